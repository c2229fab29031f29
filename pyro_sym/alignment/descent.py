"""Elements for all draws, chosen so that the draws lie close to their own mean: descent over layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.alignment.assignment import assign, second_best
from pyro_sym.symmetry.base import Element
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product

__all__ = ["LEAST_GAIN", "Descent", "Moments", "Run", "Scaling", "State"]

# Coordinates are scaled to unit variance over all draws and units. A slot's own variance is held when it
# falls this far below that, so that units that never move get a large weight and not an infinite one.
VARIANCE_FLOOR = 1e-6
# A draw is moved only for a gain above rounding: then equal costs can't make the descent go in circles.
LEAST_GAIN = 1e-9
SEED = 0x5EED
MAX_COST_ENTRIES = 2**24


class Scaling(NamedTuple):
    """Centre and scale of sites, by moments that the group leaves alone."""

    centre: dict[str, Tensor]
    scale: dict[str, Tensor]

    @classmethod
    def of(cls, group: Product, draws: Mapping[str, Tensor], batch_ndim: int) -> Scaling:
        """The scaling of given draws."""
        scaling = cls({}, {})
        for site, value in _double(draws, batch_ndim).items():
            units = [a for m in group.members if isinstance(m, Permutation) for a in m.axes.get(site, ())]
            signed = any(isinstance(m, SignFlip) and site in m.axes for m in group.members)
            centre = torch.zeros(()) if signed else value.mean((0, *units), keepdim=True)
            scale = (value - centre).square().mean((0, *units), keepdim=True).sqrt()
            scaling.centre[site] = centre
            # A constant site has only the rounding of its mean for a scale.
            scaling.scale[site] = torch.where(scale > 1e-12 * value.abs().max(), scale, 1.0)
        return scaling

    def __call__(self, values: Mapping[str, Tensor], batch_ndim: int) -> dict[str, Tensor]:
        """Scaled values in float64, of shape ``(M, *event)``."""
        return {
            site: (value - self.centre[site]) / self.scale[site]
            for site, value in _double(values, batch_ndim).items()
        }


def _double(values: Mapping[str, Tensor], batch_ndim: int) -> dict[str, Tensor]:
    """In float64, with one batch dim."""
    return {
        site: value.detach().to("cpu", torch.float64).reshape(-1, *value.shape[batch_ndim:])
        for site, value in values.items()
    }


class Moments(NamedTuple):
    """Mean and variance by site, each with a batch dim of length 1 in front."""

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]

    @classmethod
    def of(cls, draws: Mapping[str, Tensor]) -> Moments:
        """The moments of given draws."""
        mean = {site: value.mean(0, keepdim=True) for site, value in draws.items()}
        variance = {
            site: (value - mean[site]).square().mean(0, keepdim=True).clamp(min=VARIANCE_FLOOR)
            for site, value in draws.items()
        }
        return cls(mean, variance)

    def distance(self, draws: Mapping[str, Tensor]) -> Tensor:
        """The weighted squared distance of every draw from the mean, over the sites given."""
        per_site = [
            ((value - self.mean[site]).square() / self.variance[site]).reshape(len(value), -1).sum(-1)
            for site, value in draws.items()
        ]
        return torch.stack(per_site).sum(0)

    def objective(self, draws: Mapping[str, Tensor]) -> float:
        """Half the mean distance and log determinant: the negative log likelihood, but for a constant."""
        log_variance = sum(float(variance.log().sum()) for variance in self.variance.values())
        return 0.5 * (float(self.distance(draws).mean()) + log_variance)


class _Block(NamedTuple):
    """Members that are chosen together: a permutation with the signs that ride on it, or signs alone."""

    permutation: int | None
    signs: tuple[int, ...]
    axes: dict[str, tuple[int, ...]]

    @property
    def is_linear(self) -> bool:
        return all(len(several) == 1 for several in self.axes.values())


class State(NamedTuple):
    """Elements, and the draws moved by them."""

    elements: Element
    images: dict[str, Tensor]

    def take(self, rows: Tensor) -> State:
        """Some of the draws."""
        return State(
            tuple(part[rows] for part in self.elements),
            {site: value[rows] for site, value in self.images.items()},
        )

    def put(self, rows: Tensor, some: State) -> State:
        """The state with some of its draws replaced."""
        return State(
            tuple(
                part.index_put((rows,), new) for part, new in zip(self.elements, some.elements, strict=True)
            ),
            {site: value.index_put((rows,), some.images[site]) for site, value in self.images.items()},
        )


class Run(NamedTuple):
    """What a descent ended in."""

    state: State
    objective: list[float]
    converged: bool


Increment = dict[int, Tensor]
"""New parts of an element by index of the member, to be applied after what has been applied."""


class Descent:
    """Block coordinate descent over the elements of all draws, and the moments of the aligned draws."""

    def __init__(self, group: Product, draws: dict[str, Tensor]) -> None:
        self.group = group
        self.draws = draws
        self.num_draws = len(next(iter(draws.values())))
        self.blocks = _blocks(group)

    def starts(self, num_references: int) -> Iterator[State]:
        """The draws as they are, then closest to one draw after another."""
        yield State(self._identity(self.num_draws), self.draws)
        stride = self.num_draws / num_references if num_references else 0.0
        for k in sorted({int((i + 0.5) * stride) for i in range(num_references)}):
            reference = {site: value[k : k + 1] for site, value in self.draws.items()}
            ones = {site: torch.ones_like(value) for site, value in reference.items()}
            yield self._place(Moments(reference, ones), self.blocks)

    def run(self, state: State, max_sweeps: int) -> Run:
        """Sweeps and moments in turn, until no draw moves."""
        moments = Moments.of(state.images)
        path = [moments.objective(state.images)]
        for _ in range(max_sweeps):
            state, moved = self._sweep(state, moments)
            if not moved.any():
                return Run(state, path, True)
            moments = Moments.of(state.images)
            path.append(moments.objective(state.images))
        return Run(state, path, False)

    def refine(self, run: Run, num_restarts: int, max_sweeps: int) -> Run:
        """Place all draws anew, in one order of the blocks after another, until none moves any draw."""
        orders = self._orders(num_restarts)
        failures = 0
        while failures < len(orders) and run.converged:
            moments = Moments.of(run.state.images)
            state, moved = self._restart(run.state, moments, orders[0])
            orders = [*orders[1:], orders[0]]
            failures += 1
            if moved:
                failures = 0
                more = self.run(state, max_sweeps)
                run = Run(more.state, run.objective + more.objective, more.converged)
        return run

    def at(self, elements: Element) -> State:
        """The draws moved by given elements."""
        return State(elements, self.group.act(elements, self.draws))

    def closest(self, moments: Moments, num_restarts: int) -> State:
        """The draws brought closest to a fixed mean."""
        state = State(self._identity(self.num_draws), self.draws)
        state = self._settle(state, moments, torch.arange(self.num_draws))
        for order in self._orders(num_restarts):
            state, _ = self._restart(state, moments, order)
        return state

    def _orders(self, num_restarts: int) -> list[list[_Block]]:
        """Orders of the blocks to restart with; none for one linear block, whose choice is the best."""
        if len(self.blocks) == 1 and self.blocks[0].is_linear:
            return []
        generator = torch.Generator().manual_seed(SEED)
        size = len(self.blocks)
        orders = [torch.randperm(size, generator=generator).tolist() for _ in range(10 * num_restarts)]
        distinct = list(dict.fromkeys(map(tuple, orders)))[:num_restarts]
        return [[self.blocks[b] for b in order] for order in distinct]

    def _restart(self, state: State, moments: Moments, order: Sequence[_Block]) -> tuple[State, bool]:
        distance, trial = moments.distance(state.images), self._place(moments, order)
        margin = LEAST_GAIN * (1 + distance)
        farther = (moments.distance(trial.images) > distance + margin).nonzero().squeeze(-1)
        trial = self._settle(trial, moments, farther)
        better = (moments.distance(trial.images) < distance - margin).nonzero().squeeze(-1)
        return state.put(better, trial.take(better)), len(better) > 0

    def _settle(self, state: State, moments: Moments, rows: Tensor) -> State:
        """Sweeps over some draws at fixed moments, until none of them moves."""
        while len(rows):
            some, moved = self._sweep(state.take(rows), moments)
            state = state.put(rows, some)
            rows = rows[moved]
        return state

    def _sweep(self, state: State, moments: Moments) -> tuple[State, Tensor]:
        """Improve block by block, and say which draws moved."""
        any_moved = torch.zeros(len(state.elements[0]), dtype=torch.bool)
        for block in self.blocks:
            state, moved = self._improve(block, state, moments)
            any_moved |= moved
        return state, any_moved

    def _identity(self, num_draws: int) -> Element:
        first = {site: value[0] for site, value in self.draws.items()}
        return self.group.identity(first, (num_draws,))

    def _place(self, moments: Moments, order: Sequence[_Block]) -> State:
        """Match all draws to a mean, block by block from scratch.

        A site between two blocks, as the weights between two layers are, says nothing about the first while
        the labels of the second are arbitrary, so it waits until the second has been placed.
        """
        elements, images = self._identity(self.num_draws), self.draws
        for i, block in enumerate(order):
            later = {site for other in order[i + 1 :] for site in other.axes}
            usable = block.axes.keys() - later or block.axes.keys()
            increment = self._propose(block, images, moments, diagonal=True, sites=usable)
            elements = self._compose(increment, elements)
            images = {**images, **self._act(increment, {site: images[site] for site in block.axes})}
        return State(elements, images)

    def _improve(self, block: _Block, state: State, moments: Moments) -> tuple[State, Tensor]:
        """Move the draws that a better choice in one block brings closer to the mean."""
        elements, images = state
        current = {site: images[site] for site in block.axes}
        distance = moments.distance(current)
        any_moved = torch.zeros_like(distance, dtype=torch.bool)
        for increment in self._increments(block, current, moments):
            trial = self._act(increment, current)
            trial_distance = moments.distance(trial)
            better = trial_distance < distance - LEAST_GAIN * (1 + distance)
            if not better.any():
                continue
            any_moved |= better
            moved = self._compose(increment, elements)
            elements = tuple(_where(better, new, old) for new, old in zip(moved, elements, strict=True))
            # In place, for the increments that follow to be found from here.
            current.update({site: _where(better, trial[site], value) for site, value in current.items()})
            distance = torch.where(better, trial_distance, distance)
        return State(elements, {**images, **current}), any_moved

    def _increments(self, block: _Block, images: dict[str, Tensor], moments: Moments) -> Iterator[Increment]:
        """What to try in a block. For a linear block the first is the best there is."""
        yield self._propose(block, images, moments, diagonal=False, sites=block.axes)
        if not block.is_linear:
            yield self._propose(block, images, moments, diagonal=True, sites=block.axes)
            yield from self._small_steps(block, len(next(iter(images.values()))))

    def _small_steps(self, block: _Block, num_draws: int) -> Iterator[Increment]:
        """All swaps of two labels and all flips of one sign, each alike for all draws."""
        neutral = self._identity(num_draws)
        if block.permutation is not None:
            labels = neutral[block.permutation]
            for i, j in torch.combinations(torch.arange(labels.shape[-1])).tolist():
                swap = labels.clone()
                swap[:, i], swap[:, j] = j, i
                yield {block.permutation: swap}
        for sign in block.signs:
            for i in range(neutral[sign].shape[-1]):
                flip = neutral[sign].clone()
                flip[:, i] = -1
                yield {sign: flip}

    def _propose(
        self,
        block: _Block,
        images: Mapping[str, Tensor],
        moments: Moments,
        *,
        diagonal: bool,
        sites: Collection[str],
    ) -> Increment:
        """The best increments by a cost that is linear in them."""
        pieces = [piece for piece in _pieces(self.group, block, diagonal) if piece.site in sites]
        parts = [_choose(block, costs) for costs in _costs(block, pieces, images, moments)]
        return {member: torch.cat([part[member] for part in parts]) for member in parts[0]}

    def margin(self, state: State) -> Tensor:
        """How much farther from the mean the closest rivals of the elements bring the draws, in nats.

        For one linear block the rivals are all other elements; else those that differ in one linear block,
        by one swap, or by one flip.
        """
        moments = Moments.of(state.images)
        per_block = [self._margin(block, state.images, moments) for block in self.blocks]
        return torch.stack(per_block).amin(0).clamp(min=0)

    def _margin(self, block: _Block, images: dict[str, Tensor], moments: Moments) -> Tensor:
        if block.is_linear:
            pieces = list(_pieces(self.group, block, diagonal=False))
            return torch.cat([_least_change(block, c) for c in _costs(block, pieces, images, moments)])
        here = {site: images[site] for site in block.axes}
        distance = moments.distance(here)
        margin = torch.full_like(distance, torch.inf)
        for step in self._small_steps(block, len(distance)):
            margin = torch.minimum(margin, (moments.distance(self._act(step, here)) - distance) / 2)
        return margin

    def _act(self, increment: Increment, images: dict[str, Tensor]) -> dict[str, Tensor]:
        for member, part in increment.items():  # the permutation first: signs are those of the slots
            images = self.group.members[member].act(part, images)
        return images

    def _compose(self, increment: Increment, elements: Element) -> Element:
        neutral = self._identity(len(next(iter(increment.values()))))
        return self.group.compose(
            tuple(increment.get(member, part) for member, part in enumerate(neutral)), elements
        )


class _Piece(NamedTuple):
    """Coordinates of a site that move with the units: its diagonal along ``axes``, and what signs it."""

    site: str
    axes: tuple[int, ...]
    sign: int | None


def _blocks(group: Product) -> list[_Block]:
    blocks = []
    for i, member in enumerate(group.members):
        if isinstance(member, Permutation):
            riders = tuple(sign for sign, carrier in group._carrier.items() if carrier == i)
            blocks.append(_Block(i, riders, member.axes))
        elif i not in group._carrier:
            blocks.append(_Block(None, (i,), member.axes))
    return blocks


def _pieces(group: Product, block: _Block, diagonal: bool) -> Iterator[_Piece]:
    """Coordinates whose cost is linear in the assignment.

    Where a site has several axes of the block, either its diagonal, which moves as a whole; or one axis after
    another with the rest held, which is the derivative of the cost at the identity.
    """
    for site, several in block.axes.items():
        whole = diagonal and len(_signs_on(group, block, site, several)) < 2
        for axes in (several,) if whole else tuple((axis,) for axis in several):
            signs = _signs_on(group, block, site, axes)
            yield _Piece(site, axes, signs[0] if signs else None)


def _signs_on(group: Product, block: _Block, site: str, axes: tuple[int, ...]) -> list[int]:
    """The members that flip the diagonal along ``axes``; two flips by one member cancel."""
    flipped = {sign: set(axes) & set(group.members[sign].axes.get(site, ())) for sign in block.signs}
    return [sign for sign, where in flipped.items() if len(where) % 2 == 1]


def _rows(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The coordinates of each unit, ``(M, n, R)``: the diagonal along ``axes``, all other dims flattened."""
    value = value.movedim(axes, tuple(range(-len(axes), 0)))
    for _ in axes[1:]:
        value = value.diagonal(dim1=-2, dim2=-1)
    return value.reshape(len(value), -1, value.shape[-1]).transpose(1, 2)


class _Costs(NamedTuple):
    """What units cost in slots, ``(m, n, n)``, at their best signs; for signs alone in their own, ``(m, n)``.

    A sign turned against the product ``sum x m w`` of its member costs four times the product more.
    """

    cost: Tensor
    products: dict[int, Tensor]


def _costs(
    block: _Block, pieces: list[_Piece], images: Mapping[str, Tensor], moments: Moments
) -> Iterator[_Costs]:
    """The costs by chunks of draws: ``(s x - m)^2 w`` written as ``x^2 w - 2 s x m w + const``."""
    fixed = []
    for piece in pieces:
        weight = 1 / _rows(moments.variance[piece.site], piece.axes)[0]
        fixed.append((weight, weight * _rows(moments.mean[piece.site], piece.axes)[0]))
    size = max(len(weight) for weight, _ in fixed)
    # For signs alone, unit and slot are the same.
    equation = "mir,jr->mji" if block.permutation is not None else "mjr,jr->mj"
    for draws in torch.arange(len(next(iter(images.values())))).split(max(1, MAX_COST_ENTRIES // size**2)):
        cost = torch.zeros(())
        products: dict[int, Tensor] = {}
        for piece, (weight, weighted_mean) in zip(pieces, fixed, strict=True):
            row = _rows(images[piece.site][draws], piece.axes)
            cost = cost + torch.einsum(equation, row.square(), weight)
            product = torch.einsum(equation, row, weighted_mean)
            if piece.sign is None:
                cost = cost - 2 * product
            else:
                products[piece.sign] = products.get(piece.sign, 0.0) + product
        for product in products.values():
            cost = cost - 2 * product.abs()
        yield _Costs(cost, products)


def _choose(block: _Block, costs: _Costs) -> Increment:
    """The assignment and signs of least cost."""
    if block.permutation is None:
        return {sign: _sign(costs.products.get(sign, torch.ones_like(costs.cost))) for sign in block.signs}
    labels = assign(costs.cost)
    increment = {block.permutation: labels}
    for sign in block.signs:
        product = costs.products.get(sign, torch.ones_like(costs.cost))
        increment[sign] = _sign(product.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    return increment


def _least_change(block: _Block, costs: _Costs) -> Tensor:
    """What the best increment but for the identity costs, in nats: another assignment, or one sign."""
    margins = []
    if block.permutation is not None:
        margins.append(second_best(costs.cost) / 2)
    for product in costs.products.values():
        own = product if block.permutation is None else product.diagonal(dim1=-2, dim2=-1)
        margins.append(2 * own.amin(-1))
    return torch.stack(margins).amin(0)


def _sign(product: Tensor) -> Tensor:
    return torch.where(product < 0, -1, 1).to(torch.int8)


def _where(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(chosen.reshape(-1, *(1,) * (old.dim() - 1)), new, old)
