"""The members of a group that are chosen together: units with their signs, or a group of another kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.symmetry.assignment import assign, second_best
from pyro_sym.symmetry.base import Axes, Element, Group, Values, distance

__all__ = ["Block", "Increment", "Moments", "Units", "Whole", "blocks_of"]

MAX_COST_ENTRIES = 2**24

Increment = dict[int, Element]
"""New parts of an element by index of the member, to be applied after what has been applied."""


class Moments(NamedTuple):
    """Mean and variance by site, of the shape of one draw."""

    mean: Values
    variance: Values

    def distance(self, draws: Values) -> Tensor:
        """The weighted squared distance of every draw from the mean, over the sites given."""
        return distance(draws, self.mean, self.variance)


class Block(ABC):
    """Some of a group's ``members`` that are chosen together, and the ``axes`` that these move, by site."""

    is_best: bool = True
    """Whether :meth:`propose` finds the best of all elements of the block."""

    def __init__(self, members: Sequence[Group], axes: Axes) -> None:
        self.members, self.axes = members, axes

    @abstractmethod
    def propose(self, images: Values, moments: Moments, sites: Collection[str]) -> Increment:
        """The increment that brings draws closest to the mean, at some sites of the block."""

    def increments(self, images: Values, moments: Moments) -> Iterator[Increment]:
        """The increments to try in turn; ``images`` may be updated in place between two of them."""
        yield self.propose(images, moments, self.axes)

    @abstractmethod
    def margin(self, images: Values, moments: Moments) -> Tensor:
        """By how many nats the best rivals of the identity are worse, ``(M,)``."""

    def act(self, increment: Increment, images: Values) -> dict[str, Tensor]:
        """The images, moved by an increment."""
        for member, part in increment.items():  # the permutation first: signs are those of the slots
            images = self.members[member].act(part, images)
        return dict(images)


class Whole(Block):
    """One member of another kind, asked for its :meth:`~pyro_sym.Group.closest`."""

    def __init__(self, members: Sequence[Group], member: int) -> None:
        super().__init__(members, members[member].axes)
        self.member = member

    def propose(self, images: Values, moments: Moments, sites: Collection[str]) -> Increment:
        mean, variance = moments
        ignored = {site: torch.full_like(variance[site], math.inf) for site in self.axes if site not in sites}
        return {self.member: self.members[self.member].closest(images, mean, {**variance, **ignored})}

    def margin(self, images: Values, moments: Moments) -> Tensor:
        return self.members[self.member].margin(images, *moments)


class Units(Block):
    r"""A permutation with the signs that ride on it, or signs alone: units are assigned to slots.

    The cost of unit :math:`i` in slot :math:`j`, at its best sign, is a sum over the coordinates :math:`c` of
    the unit,

    .. math::

        C_{ji} = \min_{s = \pm 1} \sum_c (s\,\theta_{ic} - \mu_{jc})^2 / \sigma_{jc}^2 .

    With one axis a site that is the distance itself, and the best assignment the best element. A site with
    two axes makes the distance quadratic: there the cost is linearised at the identity, or that of the
    diagonal alone, and swaps of two labels and flips of one sign are tried too.

    ``permutation`` and ``signs`` are indices of members; the permutation is ``None`` for signs alone.
    """

    def __init__(self, members: Sequence[Group], permutation: int | None, signs: tuple[int, ...]) -> None:
        super().__init__(members, members[signs[0] if permutation is None else permutation].axes)
        self.permutation, self.signs = permutation, signs
        self.is_best = all(len(several) < 2 for several in self.axes.values())

    def propose(
        self, images: Values, moments: Moments, sites: Collection[str], *, diagonal: bool = True
    ) -> Increment:
        pieces = [piece for piece in self._pieces(diagonal) if piece.site in sites]
        chosen = [self._choose(costs) for costs in self._costs(pieces, images, moments)]
        return {member: torch.cat([part[member] for part in chosen]) for member in chosen[0]}

    def increments(self, images: Values, moments: Moments) -> Iterator[Increment]:
        yield self.propose(images, moments, self.axes, diagonal=False)
        if not self.is_best:
            yield self.propose(images, moments, self.axes)
            yield from self._small_steps(images)

    def margin(self, images: Values, moments: Moments) -> Tensor:
        if self.is_best:
            costs = self._costs(list(self._pieces(diagonal=False)), images, moments)
            return torch.cat([self._least_change(c) for c in costs])
        here = {site: images[site] for site in self.axes}
        now = moments.distance(here)
        margin = torch.full_like(now, torch.inf)
        for step in self._small_steps(here):
            margin = torch.minimum(margin, (moments.distance(self.act(step, here)) - now) / 2)
        return margin

    def _small_steps(self, images: Values) -> Iterator[Increment]:
        """All swaps of two labels and all flips of one sign, each alike for all draws."""
        one, count = {site: images[site][0] for site in self.axes}, len(images[next(iter(self.axes))])
        if self.permutation is not None:
            labels = self.members[self.permutation].identity(one, (count,))  # (M, n)
            for i, j in torch.combinations(torch.arange(labels.shape[-1])).tolist():
                swap = labels.clone()
                swap[:, i], swap[:, j] = j, i
                yield {self.permutation: swap}
        for sign in self.signs:
            positive = self.members[sign].identity(one, (count,))
            for i in range(positive.shape[-1]):
                flip = positive.clone()
                flip[:, i] = -1
                yield {sign: flip}

    def _pieces(self, diagonal: bool) -> Iterator[_Piece]:
        """Coordinates whose cost is linear in the assignment.

        If a site has several axes of the block, these are either its diagonal, or one axis after another with
        the rest held: the derivative of the cost at the identity.
        """
        for site, several in self.axes.items():
            whole = len(several) < 2 or (diagonal and len(self._signs_on(site, several)) < 2)
            for axes in (several,) if whole else tuple((axis,) for axis in several):
                signs = self._signs_on(site, axes)
                yield _Piece(site, axes, signs[0] if signs else None)

    def _signs_on(self, site: str, axes: tuple[int, ...]) -> list[int]:
        """The members that flip the diagonal along ``axes``; two flips by one member cancel."""
        flipped = {s: self.members[s].axes[site] for s in self.signs if site in self.members[s].axes}
        # A site flipped as a whole has no axes, and one sign.
        return [s for s, where in flipped.items() if not where or len(set(axes) & set(where)) % 2 == 1]

    def _costs(self, pieces: list[_Piece], images: Values, moments: Moments) -> Iterator[_Costs]:
        """The costs by chunks of draws: ``(s x - m)^2 w`` written as ``x^2 w - 2 s x m w + const``."""
        fixed = []
        for site, axes, _ in pieces:
            weight = 1 / _units(moments.variance[site].unsqueeze(0), axes)[0]  # (n, R)
            fixed.append((weight, weight * _units(moments.mean[site].unsqueeze(0), axes)[0]))
        size = max(len(weight) for weight, _ in fixed)
        # For signs alone, unit and slot are the same.
        equation = "mir,jr->mji" if self.permutation is not None else "mjr,jr->mj"
        count = len(images[pieces[0].site])
        for draws in torch.arange(count).split(max(1, MAX_COST_ENTRIES // size**2)):
            cost = torch.zeros(())
            products: dict[int, Tensor] = {}
            for piece, (weight, weighted_mean) in zip(pieces, fixed, strict=True):
                units = _units(images[piece.site][draws], piece.axes)  # (m, n, R)
                cost = cost + torch.einsum(equation, units.square(), weight)
                product = torch.einsum(equation, units, weighted_mean)
                if piece.sign is None:
                    cost = cost - 2 * product
                else:
                    products[piece.sign] = products.get(piece.sign, 0.0) + product
            for product in products.values():
                cost = cost - 2 * product.abs()
            yield _Costs(cost, products)

    def _choose(self, costs: _Costs) -> Increment:
        """The assignment and signs of least cost."""
        products = {s: costs.products.get(s, torch.ones_like(costs.cost)) for s in self.signs}
        if self.permutation is None:
            return {s: _sign(product) for s, product in products.items()}
        labels = assign(costs.cost)  # (m, n)
        signs = {s: _sign(p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)) for s, p in products.items()}
        return {self.permutation: labels, **signs}

    def _least_change(self, costs: _Costs) -> Tensor:
        """What the best increment but for the identity costs, in nats: another assignment, or one sign."""
        margins = []
        if self.permutation is not None:
            margins.append(second_best(costs.cost) / 2)
        for product in costs.products.values():
            own = product if self.permutation is None else product.diagonal(dim1=-2, dim2=-1)
            margins.append(2 * own.amin(-1))
        return torch.stack(margins).amin(0)


class _Piece(NamedTuple):
    """Coordinates of a site that move with the units: its diagonal along ``axes``, and the sign's member."""

    site: str
    axes: tuple[int, ...]
    sign: int | None


class _Costs(NamedTuple):
    """Costs of units in slots, ``(m, n, n)``, at their best signs; for signs alone ``(m, n)``.

    A sign against that of its member's product ``sum x m w`` adds four times the product to the cost.
    """

    cost: Tensor
    products: dict[int, Tensor]


def blocks_of(members: Sequence[Group], carriers: Mapping[int, int]) -> list[Block]:
    """The blocks of a product, each permutation with the sign flips that it carries."""
    blocks: list[Block] = []
    for i, member in enumerate(members):
        if member.relabels:
            blocks.append(Units(members, i, tuple(s for s, carrier in carriers.items() if carrier == i)))
        elif not member.flips:
            blocks.append(Whole(members, i))
        elif i not in carriers:
            blocks.append(Units(members, None, (i,)))
    return blocks


def _units(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The coordinates of each unit, ``(M, n, R)``: the diagonal along ``axes``, all other dims flattened."""
    if not axes:
        return value.reshape(len(value), 1, -1)
    value = value.movedim(axes, tuple(range(-len(axes), 0)))
    for _ in axes[1:]:
        value = value.diagonal(dim1=-2, dim2=-1)
    return value.reshape(len(value), -1, value.shape[-1]).transpose(1, 2)


def _sign(product: Tensor) -> Tensor:
    return torch.where(product < 0, -1, 1).to(torch.int8)
