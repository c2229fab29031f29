"""Which labels and signs are exchangeable? Sets of axes, grown until the log joint doesn't see them move."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pyro.distributions import constraints
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.model.conditioned_sites import fixed_parameters
from pyro_sym.model.program import (
    LatentSite,
    Program,
    in_subsampled_plate,
    is_data,
    uniform_draw,
)
from pyro_sym.network.symmetry_of import NetworkSymmetry, symmetry_of
from pyro_sym.search.check import at_best_precision
from pyro_sym.search.comparison import NUM_DIFFERENCES, Joint, compared
from pyro_sym.search.evidence import MAX_GENERATORS, Evidence, Point, finite_draws, unbroken
from pyro_sym.search.networks_in_model import networks
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.viewed import Shape, Viewed
from pyro_sym.unwrap import is_real, support_of_entries

__all__ = ["find_symmetry"]

MAX_EVALUATIONS = 5_000
NUM_MILD = 2
# Relative changes above are believed without a measurement of rounding.
SURE = {torch.float64: 1e-7, torch.float32: 1e-2}
# Searches, each of which knows the point at which what the one before has found fails.
MAX_SEARCHES = 5

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
    there is none, :math:`C` is in no symmetric set. What has been grown is checked as
    :func:`~pyro_sym.check_symmetry` does it, on all rows of the data. If it fails at a point, the search goes
    on with that point added. A member that still fails is left out, with a warning that says where.

    Candidates are the axes of continuous latent sites, except those of plates that hold observed sites or
    are subsampled, and those along which supports are not exchangeable (ordered vectors, Cholesky factors).
    Both axes of a covariance move together. Signs are looked for on real sites and covariances, on axes of
    size one too, as that of a single factor.

    Networks that the model calls, and whose parameters are sites by name (:class:`~pyro_sym.BayesianModule`),
    are read first by :func:`~pyro_sym.symmetry_of`, which knows the factors of axes, too; of their groups
    those remain that the priors don't break.

    A group may move local latent sites, which lie in subsampled plates, such as the weights of documents in a
    topic model. It is true of the model and is returned; align draws by it, for example. But
    :class:`~pyro_sym.AutoSymmetrized` refuses it, because a minibatch does not show all that moves. Write the
    model with the local site in a full plate and subsample a second plate of the observations, or integrate
    the local site out; the group without that site is no symmetry.

    Where signs along axes are not free, one sign of all the values of several sites may be, as that of the
    loadings and scores of a single factor. It is looked for last, among sites outside of subsampled plates.

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
        :class:`~pyro_sym.NetworkSymmetry`.

    Raises:
        SymmetryError: if the log joint is random at fixed values of the latent sites.
        ValueError: if the model has no continuous latent sites, a latent site is discrete and can't be summed
            out, or no prior draw has a finite log joint.

    Warns:
        UserWarning: if the search was cut short after 5000 evaluations of the log joint; it names the axes
            that are left. If the graph of a network can't be read. If a member that the search found is left
            out, because it fails at other values. If not all rows were looked at.

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
    candidates = _candidates(program)
    evidence = Evidence(program, dtype)
    read = list(_read_off_networks(program, evidence))
    axes = [axis for axis in candidates if not any(axis.is_moved_by(group) for group in read)]
    search = _Search(evidence)
    idle = [axis for axis in axes if axis.may_be_moved_by(Permutation) and search.is_idle(axis)]
    free: dict[Kind, list[_Axis]] = {
        Permutation: [axis for axis in axes if axis.may_be_moved_by(Permutation) and axis not in idle],
        SignFlip: [axis for axis in axes if axis.may_be_moved_by(SignFlip)],
    }
    one_sign = [axis for axis in _whole_values(program) if not any(axis.site in group.axes for group in read)]
    members: list[Symmetry] = []
    for _ in range(MAX_SEARCHES):
        before, members = members, []
        for kind in free:
            for group in search.groups(kind, free[kind]):
                members = _joined(members, group, idle, search.points[0].values)
        # One sign of all of a site matters where its signs along axes are not free already.
        signed = {site for member in members if isinstance(member, SignFlip) for site in member.axes}
        whole = [axis for axis in one_sign if axis.site not in signed] if search.budget else []
        for group in search.groups(SignFlip, whole):
            members = _joined(members, group, idle, search.points[0].values)
        order = list(program.latents)
        members.sort(key=lambda member: order.index(member.sites[0]))
        refutation = evidence.refute(Product(*members)) if members else None
        if refutation is None or not search.budget or repr(members) == repr(before):
            break
        # The search sees a few rows at a few points. It goes on with what it missed.
        search.points.append(refutation.point)
    members, broken = unbroken(evidence, members, Product)
    for member, refutation in broken:
        warnings.warn(
            f"{member} left the log joint as it is wherever the search looked, but is left out: {refutation}",
            stacklevel=4,
        )
    members = [*read, *members]
    if members and evidence.unseen:
        warnings.warn(
            f"{Product(*members)} was not checked on all rows: {evidence.unseen}",
            stacklevel=4,
        )
    return members[0] if len(members) == 1 else Product(*members)


def _joined(
    members: list[Symmetry], group: Symmetry, idle: list[_Axis], values: dict[str, Tensor]
) -> list[Symmetry]:
    """The members with one more, unless it is among them already or does not fit into a product with them."""
    if isinstance(group, SignFlip):
        if _repeats(group, members, values):
            return members
        carriers = _carrying(group, members, idle)
    else:
        carriers = members
    try:
        return Product(*carriers, group).members
    except SymmetryError:  # of a flip of which only a part rides on a permutation
        return members


def _read_off_networks(program: Program, evidence: Evidence) -> Iterator[NetworkSymmetry]:
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
        own = whole.restrict(program.latents)
        kept, _ = unbroken(evidence, range(len(own.members)), partial(_of_members, own))
        if kept:
            yield _of_members(own, *kept)


def _of_members(group: NetworkSymmetry, *numbers: int) -> NetworkSymmetry:
    """The subgroup of some members."""
    counter = itertools.count()
    return group.where(lambda _: next(counter) in numbers)


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
    """An axis of a latent site that may move, both axes of a covariance, or none: the value as a whole.

    ``whole`` says that the support ties units to each other, as in a simplex; ``signed`` that signs may flip.
    ``shape`` is given for a value as a whole, which has one sign.
    """

    site: str
    axes: tuple[int, ...]
    size: int
    whole: bool
    signed: bool
    shape: tuple[int, ...] = ()

    def may_be_moved_by(self, kind: Kind) -> bool:
        """Whether a group of this kind may move it, and not be trivial."""
        return self.signed if kind is SignFlip else self.size > 1

    def is_moved_by(self, group: Symmetry) -> bool:
        """Whether a group moves it already."""
        return not set(self.axes).isdisjoint(group.axes.get(self.site, ()))

    def __str__(self) -> str:
        return f"{self.site}[{', '.join(map(str, self.axes))}]" if self.axes else f"{self.site} as a whole"


def _candidates(program: Program) -> list[_Axis]:
    """The axes of continuous latent sites that may be exchangeable."""
    if not program.latents:
        raise ValueError(
            f"the model has no continuous latent sites whose labels could be exchangeable (enumerated: "
            f"{list(program.enumerated)}); is everything observed, or hidden by poutine.block?"
        )
    values, indices = program.draw()
    no_data = {*program.latents, *fixed_parameters(program.model, program.args, program.kwargs)}
    data = {
        frame.name
        for name, site in program.trace(values, indices).nodes.items()
        if is_data(site) and name not in no_data
        for frame in site["cond_indep_stack"]
    }
    return [axis for latent in program.latents.values() for axis in _axes(latent, data)]


def _whole_values(program: Program) -> Iterator[_Axis]:
    """The sites that may have one sign for all of their value, as the loadings of a single factor do.

    Not those in subsampled plates, which show another part of their value in each minibatch.
    """
    for latent in program.latents.values():
        shape = tuple(latent.value.shape)
        if (
            is_real(latent.support)
            and shape
            and latent.value.numel()
            and not in_subsampled_plate(latent.frames)
        ):
            yield _Axis(latent.name, (), 1, whole=True, signed=True, shape=shape)


def _axes(latent: LatentSite, data: set[str]) -> Iterator[_Axis]:
    """The candidates of one site, given the names of plates that hold data."""
    support = support_of_entries(latent.support)
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


class _OutOfBudget(Exception):
    """The log joint has been evaluated as often as it may be."""


class _Search:
    """Grows symmetric sets of axes, counting the evaluations of the log joint."""

    def __init__(self, evidence: Evidence) -> None:
        program, self.dtype = evidence.program, evidence.dtype
        self.budget = MAX_EVALUATIONS
        near_zero = Program(program.model, program.args, program.kwargs, init_strategy=_near_zero)
        self.points = _mild(evidence.points)
        with suppress(ValueError):  # the prior alone may know where the log joint is finite
            self.points += _mild(finite_draws(near_zero, evidence.dtype))

    def is_idle(self, axis: _Axis) -> bool:
        """Whether swaps leave all values alone, as those of both axes of a 2 x 2 correlation matrix do."""
        group = _group(Permutation, [axis])
        swap = group.generators(self.points[0].values)[0][1]

        def stays(value: Tensor) -> bool:  # but for rounding, which the diagonal of such a matrix has
            image = group.act(swap, {axis.site: value})[axis.site]
            return torch.allclose(image, value, rtol=0.0, atol=1e-6 * float(value.abs().max()))

        return all(stays(point.values[axis.site]) for point in self.points)

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

    def _witnesses(self, kind: Kind, axes: list[_Axis]) -> list[tuple[Tensor, Point]]:
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
        self, kind: Kind, chosen: list[_Axis], free: list[_Axis], element: Tensor, point: Point
    ) -> list[_Axis]:
        """Axes of which a symmetric set that contains the chosen ones needs one at least."""
        rest = [axis for axis in free if axis not in chosen]

        def changed(loose: list[_Axis]) -> bool:
            """Whether the element changes the log joint with the rest tied, but for the loose axes."""
            values = point.values
            for axis in rest:
                if axis not in loose:
                    values = values | {axis.site: _tied(kind, axis, element, values)}
            there = self._evaluated(point, values)
            if there is None or not there.is_finite():
                return False  # nothing can be seen where the log joint isn't finite
            tied = replace(point, values=values, joint=there)
            return self._change(_group(kind, chosen), element, tied) > 0

        return _core(changed, rest)

    def _change(self, group: Symmetry, element: Tensor, point: Point) -> float:
        """By how much an element changes the log joint, relative to what moves; 0 for rounding."""
        after = self._evaluated(point, group.act(element, point.values))
        if after is None:
            return math.inf
        change = compared(point.joint, after)
        if change and change.relative < SURE[self.dtype]:
            self._spend(2 * NUM_DIFFERENCES)
            change = compared(point.joint, after, point.levels)
        return change.relative if change else 0.0

    def _evaluated(self, point: Point, values: dict[str, Tensor]) -> Joint | None:
        """The log joint at other values, or None outside of the support."""
        self._spend(1)
        try:
            return point.evaluate(values)
        except SymmetryError:
            raise
        except ValueError:  # of Pyro's validation
            return None

    def _spend(self, evaluations: int) -> None:
        if self.budget < evaluations:
            self.budget = 0
            raise _OutOfBudget
        self.budget -= evaluations


def _mild(points: list[Point]) -> list[Point]:
    """The points with the smallest terms, where small differences are easiest to see."""
    return sorted(points, key=lambda point: sum(map(abs, point.joint.sums.values())))[:NUM_MILD]


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
    shapes: dict[str, Shape] = {}
    for axis in axes:
        if axis.shape:  # one sign: that of an axis of length 1 in front, in which the value is viewed
            first, *rest = axis.shape
            table[axis.site], shapes[axis.site] = (-1 - len(axis.shape),), ((1, first), *rest)
        else:
            table[axis.site] = tuple(sorted({*table.get(axis.site, ()), *axis.axes}))
    return Viewed(kind({**table}), shapes) if shapes else kind({**table})


def _near_zero(site: Any) -> Tensor:
    """Draw uniformly on (-2, 2) in unconstrained space, or from the prior where there is no such space."""
    try:
        return uniform_draw(site["fn"])
    except NotImplementedError:
        return site["fn"].sample()
