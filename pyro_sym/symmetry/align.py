"""Bring draws to one representative of their orbits, so that their means and R-hat have a meaning."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import Element, Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.flat import flatten, nest
from pyro_sym.symmetry.product import Product

__all__ = ["Alignment", "align"]

# Coordinates are scaled to unit variance over all draws and units. A slot's own variance is held when it
# falls this far below that, so that units that never move get a large weight and not an infinite one.
VARIANCE_FLOOR = 1e-6
# A draw is moved only for a gain above rounding: then equal costs can't make the descent go in circles.
LEAST_GAIN = 1e-9
SEED = 0x5EED
MAX_COST_ENTRIES = 2**24


@dataclass(frozen=True)
class Alignment:
    """Draws brought to one representative of their orbits.

    Attributes:
        samples: the aligned draws, by site; shapes and dtypes are those of the input, and every value is one
            of its values, moved or sign-flipped. Sites that the symmetry doesn't name are the input's own.
        elements: the group elements applied, batched as the draws are:
            ``symmetry.act(elements, original) == samples``.
        objective: the objective at the start and after each sweep, of shape ``(num_sweeps + 1,)``; it never
            rises.
        converged: whether the last sweep left every draw where it was.
    """

    samples: dict[str, Tensor]
    elements: Element
    objective: Tensor
    converged: bool

    @property
    def num_sweeps(self) -> int:
        """How many sweeps over the draws moved any of them."""
        return len(self.objective) - 1


def align(
    samples: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    group_by_chain: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    num_references: int = 4,
    num_restarts: int = 6,
    max_sweeps: int = 100,
) -> Alignment:
    r"""Choose a group element for every draw, so that all draws use the same labels and signs.

    Over elements :math:`g_m`, means :math:`\mu` and variances :math:`\sigma^2 \ge \sigma^2_{\min}` this
    descends

    .. math::

        J = \frac{1}{2M} \sum_{m=1}^{M} \sum_c \frac{\bigl((g_m \cdot \theta_m)_c - \mu_c\bigr)^2}{\sigma_c^2}
            + \frac12 \sum_c \log \sigma_c^2,

    the negative log likelihood of independent normals, over all coordinates :math:`c` of the symmetry's
    sites (scaled to unit variance first, alike for all units). A sweep first chooses elements at fixed
    moments, then moments at fixed elements, so :math:`J` never rises. All chains share the moments, so they
    end with the same labels.

    For one :class:`Permutation` the choice is one linear assignment per draw, of units :math:`i` to slots
    :math:`j`; signs that ride on the units are folded into its costs,

    .. math::

        C_{ji} = \min_{s = \pm 1} \sum_c (s\,\theta_{ic} - \mu_{jc})^2 / \sigma_{jc}^2,

    and are read off afterwards. Several members of a :class:`Product` are taken in turn, each with the
    others held. A site with two axes of one permutation makes the problem quadratic: there the linearised
    assignment, the assignment by the diagonal, and swaps of two labels are tried, and kept for draws that
    they improve.

    The descent starts from the draws as they are and from ``num_references`` of the draws as first mean; the
    lowest :math:`J` wins, the earlier start if they tie. For one permutation, or one set of signs, on one
    axis a site the choice at fixed moments is the best there is. For all other groups draws may be caught in
    local optima, alone or together: at the moments that were found, every draw is placed anew, block by block
    in another order of the blocks, and moved where that brings it closer; the descent goes on until none of
    ``num_restarts`` orders moves a draw. Nothing is random.

    Labels that all draws share are arbitrary. With a ``reference``, one element :math:`h` for all draws is
    chosen after that, with :math:`h^{-1}` bringing the reference closest to the mean,

    .. math::

        h^{-1} = \arg\min_{g} \sum_c \bigl((g \cdot r)_c - \mu_c\bigr)^2 / \sigma_c^2,

    so that runs aligned to one reference have the same labels.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``, or ``(num_chains, num_samples, *shape)``
            with ``group_by_chain``. Any device and any real dtype will do; costs are computed in float64.
        symmetry: a :class:`Permutation`, a :class:`SignFlip`, or a :class:`Product` or :class:`Viewed` of
            them, nested or not. Of the trivial group, ``Product()``, the draws come back as they are.
        group_by_chain: whether a chain dim stands in front, as in :meth:`pyro.infer.MCMC.get_samples`.
        reference: values of the symmetry's sites, each of the shape of one draw, to take the labels from: a
            draw, or the mean of another run's aligned draws.
        num_references: how many draws, evenly spread, serve as first mean in turn.
        num_restarts: how many orders of the blocks are tried at the end; 0 for none.
        max_sweeps: the most sweeps from one start or restart; a warning says if they did not suffice.

    Returns:
        The aligned draws, with the elements applied.

    Raises:
        SymmetryError: if the symmetry can't act on the draws, or is of a kind that can't be aligned.
        ValueError: if there are no draws, sites disagree on their number, or a draw is not finite; if the
            reference lacks a site, has it in another shape, or is not finite.

    Example:
        >>> locs = torch.tensor([[0.0, 5.0], [5.1, 0.1], [0.2, 4.9]])
        >>> aligned = align({"locs": locs}, Permutation({"locs": -1}))
        >>> aligned.samples["locs"]
        tensor([[0.0000, 5.0000],
                [0.1000, 5.1000],
                [0.2000, 4.9000]])
        >>> aligned.elements
        tensor([[0, 1],
                [1, 0],
                [0, 1]])

    References:
        Stephens (2000), "Dealing with label switching in mixture models", for relabelling by alternating
        between assignments and estimates. Ainsworth, Hayase and Srinivasa (2023), "Git re-basin", for the
        descent over the layers of a network.
    """
    batch_ndim = 2 if group_by_chain else 1
    batch_shape = _batch_shape(samples, symmetry, batch_ndim)
    flat = flatten(symmetry)
    if flat is None:
        raise SymmetryError(
            "align works modulo Permutation, SignFlip and products and views of them, not modulo "
            f"{symmetry!r}"
        )
    if not flat.members:
        return Alignment(dict(samples), symmetry.identity({}), torch.zeros(1, dtype=torch.float64), True)
    group = flat.symmetry
    draws = flat.view({site: samples[site] for site in symmetry.sites})
    scaling = _Scaling.of(group, draws, batch_ndim)
    descent = _Descent(group, scaling(draws, batch_ndim))
    best: _Run | None = None
    for start in descent.starts(num_references):
        run = descent.run(start, max_sweeps)
        if best is None or best.objective[-1] - run.objective[-1] > LEAST_GAIN * (1 + abs(run.objective[-1])):
            best = run
    assert best is not None
    best = descent.refine(best, num_restarts, max_sweeps)
    state = best.state
    if reference is not None:
        one = flat.view(_checked(reference, samples, symmetry, batch_ndim))
        to_mean = _Descent(group, scaling(one, 0)).closest(_Moments.of(state.images), num_restarts)
        shared = tuple(part.expand(descent.num_draws, -1) for part in group.inverse(to_mean))
        state = state._replace(elements=group.compose(shared, state.elements))
    if not best.converged:
        warnings.warn(
            f"align still moved draws after {max_sweeps} sweeps; its labels are not at a fixed point. "
            "Raise max_sweeps, or ask whether the units can be told apart at all",
            stacklevel=2,
        )
    elements = nest(
        symmetry,
        (
            part.reshape(*batch_shape, -1).to(samples[member.sites[0]].device)
            for member, part in zip(group.members, state.elements, strict=True)
        ),
    )
    with torch.no_grad():
        images = symmetry.act(elements, samples)
    return Alignment(images, elements, torch.tensor(best.objective, dtype=torch.float64), best.converged)


def _batch_shape(samples: Mapping[str, Tensor], symmetry: Symmetry, batch_ndim: int) -> tuple[int, ...]:
    """Check the draws, and return their number as a shape."""
    expected = "(num_chains, num_samples, ...)" if batch_ndim == 2 else "(num_samples, ...)"
    first: tuple[str, tuple[int, ...]] | None = None
    for site, value in samples.items():
        if value.dim() < batch_ndim:
            raise ValueError(f"draws of site {site!r} have shape {tuple(value.shape)}, expected {expected}")
        batch_shape = tuple(value.shape[:batch_ndim])
        if first is None:
            first = site, batch_shape
        if batch_shape != first[1]:
            raise ValueError(f"site {site!r} has draws {batch_shape}, but site {first[0]!r} has {first[1]}")
        if 0 in batch_shape:
            raise ValueError(f"there are no draws to align: site {site!r} has shape {tuple(value.shape)}")
    if first is None:
        raise ValueError("there are no draws to align: samples is empty")
    # One draw, so that a batch dim can't be taken for an axis of the site.
    symmetry.check_values({site: value[(0,) * batch_ndim] for site, value in samples.items()})
    for site in symmetry.sites:
        bad = ~samples[site].isfinite().flatten(batch_ndim).all(-1)
        if bad.any():
            index = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"site {site!r} is not finite, first at draw {index} of {first[1]}; drop such draws, or the "
                "chain they come from, before aligning"
            )
    return first[1]


def _checked(
    reference: Mapping[str, Tensor], samples: Mapping[str, Tensor], symmetry: Symmetry, batch_ndim: int
) -> dict[str, Tensor]:
    """The symmetry's sites of a reference."""
    for site in symmetry.sites:
        if site not in reference:
            raise ValueError(
                f"the reference has no site {site!r}, which {symmetry!r} moves; give a value for it"
            )
        shape, expected = tuple(reference[site].shape), tuple(samples[site].shape[batch_ndim:])
        if shape != expected:
            raise ValueError(f"site {site!r} of the reference has shape {shape}, but one draw has {expected}")
        if not reference[site].isfinite().all():
            raise ValueError(f"site {site!r} of the reference is not finite")
    return {site: reference[site] for site in symmetry.sites}


class _Scaling(NamedTuple):
    """Centre and scale of sites, by moments that the group leaves alone."""

    centre: dict[str, Tensor]
    scale: dict[str, Tensor]

    @classmethod
    def of(cls, group: Product, draws: Mapping[str, Tensor], batch_ndim: int) -> _Scaling:
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


class _Moments(NamedTuple):
    """Mean and variance by site, each with a batch dim of length 1 in front."""

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]

    @classmethod
    def of(cls, draws: Mapping[str, Tensor]) -> _Moments:
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


class _State(NamedTuple):
    """Elements, and the draws moved by them."""

    elements: Element
    images: dict[str, Tensor]

    def take(self, rows: Tensor) -> _State:
        return _State(
            tuple(part[rows] for part in self.elements),
            {site: value[rows] for site, value in self.images.items()},
        )

    def put(self, rows: Tensor, some: _State) -> _State:
        """The state with some of its draws replaced."""
        return _State(
            tuple(
                part.index_put((rows,), new) for part, new in zip(self.elements, some.elements, strict=True)
            ),
            {site: value.index_put((rows,), some.images[site]) for site, value in self.images.items()},
        )


class _Run(NamedTuple):
    """What a descent ended in."""

    state: _State
    objective: list[float]
    converged: bool


Increment = dict[int, Tensor]
"""New parts of an element by index of the member, to be applied after what has been applied."""


class _Descent:
    """Block coordinate descent over the elements of all draws, and the moments of the aligned draws."""

    def __init__(self, group: Product, draws: dict[str, Tensor]) -> None:
        self.group = group
        self.draws = draws
        self.num_draws = len(next(iter(draws.values())))
        self.blocks = _blocks(group)

    def starts(self, num_references: int) -> Iterator[_State]:
        """The draws as they are, then closest to one draw after another."""
        yield _State(self._identity(self.num_draws), self.draws)
        stride = self.num_draws / num_references if num_references else 0.0
        for k in sorted({int((i + 0.5) * stride) for i in range(num_references)}):
            reference = {site: value[k : k + 1] for site, value in self.draws.items()}
            ones = {site: torch.ones_like(value) for site, value in reference.items()}
            yield self._place(_Moments(reference, ones), self.blocks)

    def run(self, state: _State, max_sweeps: int) -> _Run:
        """Sweeps and moments in turn, until no draw moves."""
        moments = _Moments.of(state.images)
        path = [moments.objective(state.images)]
        for _ in range(max_sweeps):
            state, moved = self._sweep(state, moments)
            if not moved.any():
                return _Run(state, path, True)
            moments = _Moments.of(state.images)
            path.append(moments.objective(state.images))
        return _Run(state, path, False)

    def refine(self, run: _Run, num_restarts: int, max_sweeps: int) -> _Run:
        """Place all draws anew, in one order of the blocks after another, until none moves any draw."""
        orders = self._orders(num_restarts)
        failures = 0
        while failures < len(orders) and run.converged:
            moments = _Moments.of(run.state.images)
            state, moved = self._restart(run.state, moments, orders[0])
            orders = [*orders[1:], orders[0]]
            failures += 1
            if moved:
                failures = 0
                more = self.run(state, max_sweeps)
                run = _Run(more.state, run.objective + more.objective, more.converged)
        return run

    def closest(self, moments: _Moments, num_restarts: int) -> Element:
        """Elements that bring the draws closest to a fixed mean."""
        state = _State(self._identity(self.num_draws), self.draws)
        state = self._settle(state, moments, torch.arange(self.num_draws))
        for order in self._orders(num_restarts):
            state, _ = self._restart(state, moments, order)
        return state.elements

    def _orders(self, num_restarts: int) -> list[list[_Block]]:
        """Orders of the blocks to restart with; none for one linear block, whose choice is the best."""
        if len(self.blocks) == 1 and self.blocks[0].is_linear:
            return []
        generator = torch.Generator().manual_seed(SEED)
        size = len(self.blocks)
        orders = [torch.randperm(size, generator=generator).tolist() for _ in range(10 * num_restarts)]
        distinct = list(dict.fromkeys(map(tuple, orders)))[:num_restarts]
        return [[self.blocks[b] for b in order] for order in distinct]

    def _restart(self, state: _State, moments: _Moments, order: Sequence[_Block]) -> tuple[_State, bool]:
        distance, trial = moments.distance(state.images), self._place(moments, order)
        margin = LEAST_GAIN * (1 + distance)
        farther = (moments.distance(trial.images) > distance + margin).nonzero().squeeze(-1)
        trial = self._settle(trial, moments, farther)
        better = (moments.distance(trial.images) < distance - margin).nonzero().squeeze(-1)
        return state.put(better, trial.take(better)), len(better) > 0

    def _settle(self, state: _State, moments: _Moments, rows: Tensor) -> _State:
        """Sweeps over some draws at fixed moments, until none of them moves."""
        while len(rows):
            some, moved = self._sweep(state.take(rows), moments)
            state = state.put(rows, some)
            rows = rows[moved]
        return state

    def _sweep(self, state: _State, moments: _Moments) -> tuple[_State, Tensor]:
        """Improve block by block, and say which draws moved."""
        any_moved = torch.zeros(len(state.elements[0]), dtype=torch.bool)
        for block in self.blocks:
            state, moved = self._improve(block, state, moments)
            any_moved |= moved
        return state, any_moved

    def _identity(self, num_draws: int) -> Element:
        first = {site: value[0] for site, value in self.draws.items()}
        return self.group.identity(first, (num_draws,))

    def _place(self, moments: _Moments, order: Sequence[_Block]) -> _State:
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
        return _State(elements, images)

    def _improve(self, block: _Block, state: _State, moments: _Moments) -> tuple[_State, Tensor]:
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
        return _State(elements, {**images, **current}), any_moved

    def _increments(self, block: _Block, images: dict[str, Tensor], moments: _Moments) -> Iterator[Increment]:
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
        moments: _Moments,
        *,
        diagonal: bool,
        sites: Collection[str],
    ) -> Increment:
        """The best increments by a cost that is linear in them."""
        pieces = [piece for piece in _pieces(self.group, block, diagonal) if piece.site in sites]
        fixed = []
        for piece in pieces:
            weight = 1 / _rows(moments.variance[piece.site], piece.axes)[0]
            fixed.append((weight, weight * _rows(moments.mean[piece.site], piece.axes)[0]))
        size = max(len(weight) for weight, _ in fixed)
        parts = []
        for draws in torch.arange(len(next(iter(images.values())))).split(
            max(1, MAX_COST_ENTRIES // size**2)
        ):
            rows = [_rows(images[piece.site][draws], piece.axes) for piece in pieces]
            parts.append(_choose(block, pieces, rows, fixed))
        return {member: torch.cat([part[member] for part in parts]) for member in parts[0]}

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


def _choose(
    block: _Block, pieces: list[_Piece], rows: list[Tensor], fixed: list[tuple[Tensor, Tensor]]
) -> Increment:
    """The assignment and signs of least cost, ``(s x - m)^2 w`` written as ``x^2 w - 2 s x m w + const``."""
    # For signs alone, unit and slot are the same.
    equation = "mir,jr->mji" if block.permutation is not None else "mjr,jr->mj"
    cost = torch.zeros(())
    products: dict[int, Tensor] = {}
    for piece, row, (weight, weighted_mean) in zip(pieces, rows, fixed, strict=True):
        cost = cost + torch.einsum(equation, row.square(), weight)
        product = torch.einsum(equation, row, weighted_mean)
        if piece.sign is None:
            cost = cost - 2 * product
        else:
            products[piece.sign] = products.get(piece.sign, 0.0) + product
    if block.permutation is None:
        return {sign: _sign(products.get(sign, torch.ones_like(cost))) for sign in block.signs}
    for product in products.values():
        cost = cost - 2 * product.abs()
    labels = _assign(cost)
    increment = {block.permutation: labels}
    for sign in block.signs:
        product = products.get(sign, torch.ones_like(cost))
        increment[sign] = _sign(product.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    return increment


def _assign(cost: Tensor) -> Tensor:
    """The units ``(M, n)`` that fill the slots (rows of the costs) most cheaply, each unit once."""
    # Imported here, as its import takes time and adds to the warnings filters.
    from scipy.optimize import linear_sum_assignment

    costs = cost.numpy()
    labels = costs.argmin(-1)
    # Where every slot's favourite is another unit, that is the optimum; only the rest need an assignment.
    contested = (np.sort(labels, -1) != np.arange(labels.shape[-1])).any(-1)
    for m in contested.nonzero()[0]:
        labels[m] = linear_sum_assignment(costs[m])[1]
    return torch.from_numpy(labels)


def _sign(product: Tensor) -> Tensor:
    return torch.where(product < 0, -1, 1).to(torch.int8)


def _where(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(chosen.reshape(-1, *(1,) * (old.dim() - 1)), new, old)
