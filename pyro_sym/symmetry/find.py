"""Which labels and signs are exchangeable? Sets of axes, grown until the log joint doesn't see them move."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions import constraints
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.program import LatentSite, Program, in_subsampled_plate, uniform_draw
from pyro_sym.symmetry.base import Symmetry, unmoved
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.model import (
    MAX_GENERATORS,
    TOLERANCE,
    at_best_precision,
    check,
    finite_draw,
    refuse_hidden_randomness,
)
from pyro_sym.symmetry.modules import networks
from pyro_sym.symmetry.network import NetworkSymmetry, symmetry_of
from pyro_sym.symmetry.product import Product

__all__ = ["find_symmetry"]

MAX_EVALUATIONS = 5_000
# Extreme draws drown small differences in large terms, so the mildest of several are kept.
DRAWS, KEPT = 3, 2

Kind = type[Permutation] | type[SignFlip]


def find_symmetry(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Symmetry:
    r"""Find the exchangeable labels and the sign flips of a model's sites.

    A set :math:`S` of axes of one size :math:`n` is symmetric if moving exactly these axes leaves the log
    joint as it is, at draws from the prior and from unconstrained space near the origin,

    .. math::

        \log p(g_S \cdot \theta, D) = \log p(\theta, D) \qquad \text{for all } g \in S_n
        \text{ (or } \{\pm 1\}^n \text{)},

    and minimal if no part of it is. Minimal sets are found without a test of every subset. Take an involution
    :math:`g` (a swap of two units, a flip of one sign), a set :math:`C`, and a point :math:`\theta` at which
    all other axes but those in :math:`B` are *tied*: moving them by :math:`g` changes nothing, because the
    two units are equal, or the one is zero. If :math:`g_C` changes the log joint there, then every symmetric
    set :math:`S \supseteq C` has an axis in :math:`B`, for :math:`g_S \theta = g_C \theta` otherwise. The
    search bisects for a small :math:`B`. One axis has to join :math:`C`; of several, each is tried; and if
    there is none, :math:`C` is in no symmetric set. What has been grown is accepted when no generator
    changes the log joint, where each of its terms counts relative to its own size.

    Candidates are the axes of continuous latent sites, except those of plates that hold observed sites or
    are subsampled, and those along which supports are not exchangeable (ordered vectors, Cholesky factors).
    Both axes of a covariance move together. Signs are looked for on real sites and covariances, on axes of
    size one too, as that of a single factor.

    Networks that the model calls, and whose parameters are sites by name (:class:`~pyro_sym.BayesianModule`),
    are read first by :func:`~pyro_sym.symmetry_of`, which knows the factors of axes, too; of their groups
    those remain that the priors don't break.

    What no product of axes can say is not found: the sign of a scalar site; the exchange of sites with names
    of their own (components drawn in a loop), or of some units of an axis only; relabelling inside of blocks,
    each on its own (what is common to all blocks is found); and of minimal sets that overlap, as the signs of
    :math:`\sum_k a_k b_k c_k` do, all but one.

    The model runs in float64 where it can, and in its own precision otherwise. Enumerable discrete sites are
    summed out. Torch's global random state is left as it was.

    Args:
        model: a Pyro model; a ``poutine.block`` around it is looked through.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Returns:
        A :class:`~pyro_sym.Permutation` or :class:`~pyro_sym.SignFlip` if there is one only, and a
        :class:`~pyro_sym.Product` otherwise; ``Product()`` is the trivial group. The group of a network is a
        :class:`~pyro_sym.NetworkSymmetry`. It has been checked as :func:`~pyro_sym.check_symmetry` does it.

    Raises:
        SymmetryError: if the log joint is random at fixed values of the latent sites.
        ValueError: if the model has no continuous latent sites, a latent site is discrete and can't be summed
            out, or no prior draw has a finite log joint.

    Warns:
        UserWarning: if the search was cut short after 5000 evaluations of the log joint; it names the axes
            that are left. If the graph of a network can't be read.

    Example:
        >>> def mixture(y):
        ...     weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        ...     with pyro.plate("components", 3):
        ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        ...     with pyro.plate("data", len(y)):
        ...         z = pyro.sample("z", dist.Categorical(weights))
        ...         pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)
        >>> find_symmetry(mixture, torch.tensor([-1.0, 0.3, 4.0]))
        Permutation({'weights': -1, 'locs': -1})
    """
    return at_best_precision(_find, model, args, kwargs)


def _find(program: Program, dtype: torch.dtype) -> Symmetry:
    read = list(_read_off_networks(program, dtype))
    axes = [axis for axis in _candidates(program) if not any(axis.is_moved_by(group) for group in read)]
    search = _Search(program, dtype)
    idle = [axis for axis in axes if axis.size > 1 and search.is_idle(axis)]
    moving = [axis for axis in axes if axis.size > 1 and axis not in idle]
    members: list[Symmetry] = list(search.groups(Permutation, moving))
    for flip in search.groups(SignFlip, [axis for axis in axes if axis.signed]):
        if not _repeats(flip, members, search.points[0].values):
            # Product refuses a flip of which only a part rides on a permutation.
            with suppress(SymmetryError):
                members = Product(*_carrying(flip, members, idle), flip).members
    order = list(program.latents)
    members.sort(key=lambda member: order.index(member.sites[0]))
    if members and not _passes(program, dtype, Product(*members)):
        kept = [member for member in members if _passes(program, dtype, member)]
        warnings.warn(
            f"{', '.join(str(m) for m in members if m not in kept) or Product(*members)} left the log joint "
            "as it is at mild values but not at draws from the prior, and is left out. Is the log joint "
            "computed without loss of digits there?",
            stacklevel=4,
        )
        members = kept
    members = [*read, *members]
    return members[0] if len(members) == 1 else Product(*members)


def _read_off_networks(program: Program, dtype: torch.dtype) -> Iterator[NetworkSymmetry]:
    """The groups of networks that the model calls, less the members that its priors break."""
    for network in networks(program):
        try:
            whole = symmetry_of(network.module, *network.args, prefix=network.prefix, **network.kwargs)
        except (SymmetryError, RuntimeError) as error:
            warnings.warn(
                f"the graph of the network {type(network.module).__name__} can't be read ({error}); its "
                "parameters are searched like other sites, whole axes only",
                stacklevel=5,
            )
            continue
        kept = whole.restrict(program.latents).where(lambda member: _passes(program, dtype, member))
        if kept.members:
            yield kept


def _passes(program: Program, dtype: torch.dtype, symmetry: Symmetry) -> bool:
    try:
        check(program, dtype, symmetry)
    except SymmetryError:
        return False
    return True


def _carrying(flip: Symmetry, members: list[Symmetry], idle: list[_Axis]) -> list[Symmetry]:
    """The members, with idle axes that a flip moves given to the permutation on which the flip rides."""
    axes = {axis.site: axis.axes for axis in idle if axis.is_moved_by(flip)}
    rides = [
        isinstance(member, Permutation)
        and any(set(several) & set(flip.axes.get(site, ())) for site, several in member.axes.items())
        for member in members
    ]
    if not axes or sum(rides) != 1:
        return members
    return [
        Permutation({**member.axes, **axes}) if carries else member
        for member, carries in zip(members, rides, strict=True)
    ]


def _repeats(flip: Symmetry, members: list[Symmetry], values: dict[str, Tensor]) -> bool:
    """Whether the flip is of one sign, and is that of all signs of another member."""

    def negated(symmetry: Symmetry) -> dict[str, Tensor]:
        return symmetry.act(-symmetry.identity(values), values)

    if len(flip.identity(values)) > 1:
        return False
    return any(
        all(torch.equal(negated(flip)[site], negated(member)[site]) for site in values)
        for member in members
        if isinstance(member, SignFlip)
    )


@dataclass(frozen=True)
class _Axis:
    """An axis of a latent site that may move, or both axes of a covariance.

    ``whole`` says that the support ties units to each other, as in a simplex; ``signed`` that signs may flip.
    """

    site: str
    axes: tuple[int, ...]
    size: int
    whole: bool
    signed: bool

    def is_moved_by(self, group: Symmetry) -> bool:
        """Whether a group moves it already."""
        return not set(self.axes).isdisjoint(group.axes.get(self.site, ()))

    def __str__(self) -> str:
        return f"{self.site}[{', '.join(map(str, self.axes))}]"


def _candidates(program: Program) -> list[_Axis]:
    """The axes of continuous latent sites that may be exchangeable."""
    if not program.latents:
        raise ValueError(
            f"the model has no continuous latent sites whose labels could be exchangeable (enumerated: "
            f"{list(program.enumerated)}); is everything observed, or hidden by poutine.block?"
        )
    values, indices = program.draw()
    data = {
        frame.name
        for name, site in program.trace(values, indices).nodes.items()
        if site["type"] == "sample" and site["is_observed"] and name not in program.latents
        if not isinstance(site["fn"], dist.Unit)
        for frame in site["cond_indep_stack"]
    }
    return [axis for latent in program.latents.values() for axis in _axes(latent, data)]


def _axes(latent: LatentSite, data: set[str]) -> Iterator[_Axis]:
    """The candidates of one site, given the names of plates that hold data."""
    support: Any = latent.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    several: list[tuple[int, ...]] = [(axis,) for axis in range(-latent.value.dim(), -support.event_dim)]
    if support is constraints.simplex:
        several.append((-1,))
    elif support in (constraints.positive_definite, constraints.corr_matrix):
        several.append((-2, -1))
    fixed = {
        frame.dim - latent.event_dim
        for frame in latent.frames
        if frame.vectorized and (frame.name in data or in_subsampled_plate([frame]))
    }
    for axes in several:
        if latent.value.numel() and fixed.isdisjoint(axes):
            size, whole = latent.value.shape[axes[0]], axes[-1] >= -support.event_dim
            signed = support is constraints.real or (whole and len(axes) == 2)
            yield _Axis(latent.name, axes, size, whole, signed)


@dataclass(frozen=True)
class _Point:
    """Values by site, indices by subsampled plate, and the terms of the log joint there if it is finite."""

    values: dict[str, Tensor]
    indices: dict[str, Tensor]
    terms: dict[str, float] | None


class _OutOfBudget(Exception):
    """The log joint has been evaluated as often as it may be."""


class _Search:
    """Grows symmetric sets of axes, counting the evaluations of the log joint."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program = program
        self.dtype = dtype
        self.budget = MAX_EVALUATIONS
        near_zero = Program(program.model, program.args, program.kwargs, init_strategy=_near_zero)
        self.points = self._mild_points(program)
        with suppress(ValueError):  # the prior alone may know where the log joint is finite
            self.points += self._mild_points(near_zero)
        refuse_hidden_randomness(program, self.points[0].values, self.points[0].indices)

    def is_idle(self, axis: _Axis) -> bool:
        """Whether swaps leave all values alone, as those of both axes of a 2 x 2 correlation matrix do."""
        group = _group(Permutation, [axis])
        return all(
            bool(unmoved(group.sites, group.act(swap, point.values), point.values))
            for _, swap in group.generators(self.points[0].values)[:1]
            for point in self.points
        )

    def groups(self, kind: Kind, axes: list[_Axis]) -> Iterator[Symmetry]:
        """The minimal symmetric sets, those of many units first."""
        left = sorted(axes, key=lambda axis: -axis.size)
        while left:
            free = [axis for axis in left if axis.size == left[0].size]
            try:
                found = self.smallest(kind, free[:1], free)
            except _OutOfBudget:
                warnings.warn(
                    f"the search for {kind.__name__}s stopped after {MAX_EVALUATIONS} evaluations of the log "
                    f"joint; the axes {', '.join(map(str, left))} are not moved, though they may be "
                    "exchangeable. If you know that they are, name them and check_symmetry it",
                    stacklevel=5,
                )
                return
            if found:
                yield _group(kind, [axis for axis in free if axis in found])
            # An axis that is in no symmetric set, or in one already, is in none to come.
            left = [axis for axis in left if axis not in (found or free[:1])]

    def smallest(self, kind: Kind, chosen: list[_Axis], free: list[_Axis]) -> list[_Axis] | None:
        """The smallest symmetric set of free axes that contains the chosen ones."""
        witnesses = self._witnesses(kind, chosen)
        if not witnesses:
            return chosen
        missing: list[list[_Axis]] = []
        for element, point in witnesses:  # where a change is faint, many axes have to be loose to see it
            missing.append(self._missing(kind, chosen, free, element, point))
            if len(missing[-1]) < 2:
                break
        grown = [self.smallest(kind, [*chosen, axis], free) for axis in min(missing, key=len)]
        return min(filter(None, grown), key=len, default=None)

    def _witnesses(self, kind: Kind, axes: list[_Axis]) -> list[tuple[Tensor, _Point]]:
        """An involution that changes the log joint, and the points at which it does, the clearest first."""
        group = _group(kind, axes)
        values = self.points[0].values
        for i in _evenly_spread(axes[0].size - (kind is Permutation)):
            element = group.identity(values).clone()
            if kind is Permutation:
                element[i], element[i + 1] = i + 1, i
            else:
                element[i] = -1
            changes = [self._change(group, element, point) for point in self.points]
            clearest = sorted(range(len(changes)), key=lambda k: -changes[k])
            if any(changes):
                return [(element, self.points[k]) for k in clearest if changes[k]]
        return []

    def _missing(
        self, kind: Kind, chosen: list[_Axis], free: list[_Axis], element: Tensor, point: _Point
    ) -> list[_Axis]:
        """Axes of which a symmetric set that contains the chosen ones needs one at least."""
        rest = [axis for axis in free if axis not in chosen]

        def changed(loose: list[_Axis]) -> bool:
            """Whether the element changes the log joint with the rest tied, but for the loose axes."""
            values = point.values
            for axis in rest:
                if axis not in loose:
                    values = values | {axis.site: _tied(kind, axis, element, values)}
            return self._change(_group(kind, chosen), element, self._at(values, point.indices)) > 0

        return _core(changed, rest)

    def _change(self, group: Symmetry, element: Tensor, point: _Point) -> float:
        """By how much an element changes the terms that it moves, relative to their size; 0 for rounding."""
        before = point.terms
        if before is None:
            return 0.0  # nothing can be seen where the log joint isn't finite
        after = self._at(group.act(element, point.values), point.indices).terms
        if after is None:
            return math.inf
        tolerance = TOLERANCE[self.dtype]
        moved = [t for t, b in before.items() if abs(after[t] - b) > tolerance * (1.0 + abs(b))]
        change = abs(sum(after[t] - before[t] for t in moved)) / (1.0 + sum(abs(before[t]) for t in moved))
        return change if change > tolerance else 0.0

    def _at(self, values: dict[str, Tensor], indices: dict[str, Tensor]) -> _Point:
        """Evaluate the log joint."""
        if not self.budget:
            raise _OutOfBudget
        self.budget -= 1
        try:
            terms = self.program.log_joint_terms(values, indices)
        except ValueError:  # Pyro's validation: outside of the support
            return _Point(values, indices, None)
        floats = {name: float(term) for name, term in terms.items()}
        return _Point(values, indices, floats if all(map(math.isfinite, floats.values())) else None)

    def _mild_points(self, program: Program) -> list[_Point]:
        """Of several draws those with the smallest terms."""
        points = [self._at(*finite_draw(program, self.dtype)) for _ in range(DRAWS)]
        return sorted(points, key=lambda point: sum(map(abs, (point.terms or {}).values())))[:KEPT]


def _evenly_spread(count: int) -> range:
    """At most ``MAX_GENERATORS`` of so many."""
    return range(0, count, -(-count // MAX_GENERATORS))


def _core(changed: Callable[[list[_Axis]], bool], axes: list[_Axis]) -> list[_Axis]:
    """A minimal part of the axes that has to be loose for a change to be seen; it is seen if all are."""
    core: list[_Axis] = []
    while not changed(core):
        unseen, seen = 0, len(axes)  # prefixes of the axes, loose beside the core
        while seen - unseen > 1:
            middle = (unseen + seen) // 2
            if changed([*core, *axes[:middle]]):
                seen = middle
            else:
                unseen = middle
        core.append(axes[seen - 1])
        axes = axes[: seen - 1]
    return core


def _tied(kind: Kind, axis: _Axis, element: Tensor, values: dict[str, Tensor]) -> Tensor:
    """The site's value, changed along the axis to one that the involution does not move."""
    group = _group(kind, [axis])
    if kind is Permutation and not axis.whole:
        # Units can be copied in any support; a mean of two may leave it.
        copies = element.minimum(torch.arange(axis.size, device=element.device))
        return group.act(copies, values)[axis.site]
    return (values[axis.site] + group.act(element, values)[axis.site]) / 2


def _group(kind: Kind, axes: list[_Axis]) -> Symmetry:
    """The symmetry that moves these axes, and no others."""
    table: dict[str, tuple[int, ...]] = {}
    for axis in axes:
        table[axis.site] = tuple(sorted({*table.get(axis.site, ()), *axis.axes}))
    return kind(table)


def _near_zero(site: Any) -> Tensor:
    """Draw uniformly on (-2, 2) in unconstrained space, or from the prior where there is no such space."""
    try:
        return uniform_draw(site["fn"])
    except NotImplementedError:
        return site["fn"].sample()
