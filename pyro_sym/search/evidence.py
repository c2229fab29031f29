r"""The evidence for or against a symmetry: prior draws and all rows of the data, the same for all groups.

**Elements.** A group of few generators is tried on all of them, which decides. Of many generators some are
tried, and random elements. If a group is no symmetry, the elements that leave the log joint unchanged at
almost all points form a proper closed subgroup. A uniformly random element is in it with probability 1/2 at
most (0 if its index is infinite), so :math:`m` of them miss a break with probability :math:`2^{-m}` at most.

**Rows.** Every row of every subsampled plate is used once, in windows of rows in random order. The windows
are as large as the model and memory allow. Each is tried on all generators, or on as many random elements as
the budget of operations allows, at least one. If even that is too expensive, some windows are left out, and
:attr:`Evidence.unseen` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_sym.errors import SymmetryError
from pyro_sym.model.all_rows import Window, blocks, widened
from pyro_sym.model.program import Program, init_to_prior
from pyro_sym.search.comparison import Change, Joint, compared, evaluated, rounding_levels
from pyro_sym.symmetry.base import Element, Group, leaves
from pyro_sym.unwrap import support_of_entries

__all__ = ["MAX_GENERATORS", "Evidence", "Point", "Refutation", "finite_draws", "named", "unbroken"]

NUM_DRAWS = 3
MAX_GENERATORS = 32
NUM_RANDOM_ELEMENTS = 3  # beside all generators
# If there are more than MAX_GENERATORS: fewer of them, and more random elements.
NUM_SPREAD, NUM_RANDOM_AMONG_MANY = 24, 9
MAX_NAMED = 1000  # generators tried to name one where a random element changed the log joint
# Unconstrained coordinates of values near the bounds of a support: 6e-6 of the interval from them.
END = 12.0
# For all rows: random elements per window, and limits for one check.
NUM_ROW_ELEMENTS = 20
MAX_ROW_EVALUATIONS = 6_000
MAX_ROW_OPERATIONS = 5e11


@dataclass(frozen=True)
class Point:
    """A point at which a log joint is finite."""

    program: Program  # the model, perhaps with larger minibatches than the user's
    values: dict[str, Tensor]
    indices: dict[str, Tensor]  # by subsampled plate
    joint: Joint

    def evaluate(self, values: dict[str, Tensor]) -> Joint:
        """The log joint at other values, on the same rows."""
        return evaluated(self.program, values, self.indices)

    def change(self, values: dict[str, Tensor]) -> Change | None:
        """The change of the log joint at other values, if it is more than the measured rounding.

        It is a ``ValueError`` if a value is outside of the support of its site.
        """
        after = self.evaluate(values)
        return None if compared(self.joint, after) is None else compared(self.joint, after, self.levels)

    @cached_property
    def levels(self) -> Mapping[str, float]:
        """The measured levels of rounding here, by term."""
        return rounding_levels(self.evaluate, self.values, self.joint)


@dataclass(frozen=True)
class Refutation:
    """A proof that a group is no symmetry: an element that changes the log joint at a point."""

    symmetry: Group
    name: str  # the element in words
    element: Element
    point: Point
    change: Change | None  # None if the image is outside of the support
    outside: str = ""  # Pyro's message about that image

    def __str__(self) -> str:
        if self.change is None:
            return (
                f"the model is not invariant under {self.name}: it maps values out of their support "
                f"({self.outside})"
            )
        moved = ", ".join(f"{site!r} by {delta:+.4g}" for site, delta in self.change.terms.items())
        return (
            f"the model is not invariant under {self.name}: its log joint changes by "
            f"{self.change.total:+.4g} (allowed {self.change.allowed:.1g}); terms that moved: {moved}. Is a "
            "site missing from the symmetry, on the wrong axis, or under a prior that tells the labels apart?"
        )


class Evidence:
    """Prior draws of a model, and all its rows.

    It is an error if no prior draw has a finite log joint, or if that is random at fixed values.
    """

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program = program
        self.dtype = dtype
        self.unseen = ""  # which rows are not checked, in words
        self.points = finite_draws(program, dtype)
        for point in self.points:
            _refuse_hidden_randomness(point)
        self._at_bounds = list(_draws_at_bounds(program, dtype))
        self._windows: list[Window] | None = None

    def refute(self, symmetry: Group) -> Refutation | None:
        """The first element of a group that changes the log joint; None if none does."""
        for point in [*self.points, *self._at_bounds]:
            symmetry.check_values(point.values)
            if found := _first_refutation(symmetry, _elements(symmetry, point), point):
                return found
        for point in self._all_rows():
            if found := _first_refutation(symmetry, self._elements_of_rows(symmetry, point), point):
                return found
        return None

    def _all_rows(self) -> Iterator[Point]:
        """A point for each window of rows."""
        if not self.program.plates:
            return
        if self._windows is None:
            self._plan()
        assert self._windows is not None
        infinite = 0
        for window in self._windows:
            for values in self._draws:
                joint = evaluated(self._wide, values, window)
                if joint.is_finite():
                    yield Point(self._wide, values, dict(window), joint)
                    break
            else:
                infinite += 1
        if infinite:
            self.unseen = (
                f"the log joint is finite at none of {len(self._draws)} prior draws on {infinite} of "
                f"{len(self._windows)} windows of rows of {', '.join(map(repr, self.program.plates))}"
            )

    def _plan(self) -> None:
        """Choose windows, and the number of elements that each is tried on."""

        def prepare(program: Program) -> Callable[[], Joint]:
            point = finite_draw(program, self.dtype)
            return partial(point.evaluate, point.values)

        self._wide, operations = widened(self.program, prepare)
        self._draws = [point.values for point in finite_draws(self._wide, self.dtype)]
        dealt = {
            name: blocks(plate, torch.randperm(plate.size, device=plate.device))
            for name, plate in self._wide.plates.items()
        }
        number = math.prod(map(len, dealt.values()))
        affordable = int(min(MAX_ROW_EVALUATIONS, MAX_ROW_OPERATIONS // operations))
        chosen = max(1, min(number, affordable // 2))
        self._trials = max(1, affordable // chosen - 1)
        self._windows = [_nth(dealt, n, all_of_them=chosen == number) for n in range(chosen)]
        if chosen < number:
            seen = ", ".join(
                f"{min(plate.size, chosen * plate.subsample_size):,} of {plate.size:,} rows of plate {name!r}"
                for name, plate in self._wide.plates.items()
            )
            self.unseen = (
                f"{chosen:,} of {number:,} windows of rows were checked ({seen}), because all rows are too "
                "expensive; a break that only shows on other rows is not detected"
            )

    def _elements_of_rows(self, symmetry: Group, point: Point) -> list[tuple[str, Element]]:
        generators = symmetry.generators(point.values)
        if len(generators) <= min(self._trials, MAX_GENERATORS):
            return generators
        return [_random(symmetry, point) for _ in range(min(self._trials, NUM_ROW_ELEMENTS))]


def finite_draw(program: Program, dtype: torch.dtype) -> Point:
    """A point at which the log joint is finite, drawn by the program's init strategy; 20 draws are tried."""
    for _ in range(20):
        values, indices = program.draw()
        if dtype == torch.float64:
            values = {name: v.double() if v.is_floating_point() else v for name, v in values.items()}
        joint = evaluated(program, values, indices)
        if joint.is_finite():
            return Point(program, values, indices, joint)
    raise ValueError(
        "the model's log joint is not finite at any of 20 prior draws, so no symmetry can be checked"
    )


def finite_draws(program: Program, dtype: torch.dtype) -> list[Point]:
    """Up to ``NUM_DRAWS`` such points, at least one."""
    points: list[Point] = []
    for _ in range(NUM_DRAWS):
        try:
            points.append(finite_draw(program, dtype))
        except ValueError as error:
            failure = error
    if not points:
        raise failure
    return points


def _draws_at_bounds(program: Program, dtype: torch.dtype) -> Iterator[Point]:
    """Points near bounds of supports that differ from entry to entry, as those of a uniform prior may.

    If the bounds differ by little, the images of prior draws seldom leave such a support.
    """
    if any(_uneven_bounds(latent.support) for latent in program.latents.values()):
        for end in (-END, END):
            start = partial(_near_bound, end)
            with suppress(ValueError):  # the log joint may be infinite there
                yield finite_draw(
                    Program(program.model, program.args, program.kwargs, init_strategy=start), dtype
                )


def _uneven_bounds(support: Any) -> bool:
    """Whether a support has bounds that differ from entry to entry."""
    bounds = (getattr(support_of_entries(support), name, None) for name in ("lower_bound", "upper_bound"))
    return any(isinstance(b, Tensor) and b.numel() > 1 and bool((b != b.flatten()[0]).any()) for b in bounds)


def _near_bound(end: float, site: Any) -> Tensor:
    """A value near the lower or upper bound, or near the only one; a prior draw if bounds are all alike."""
    fn = site["fn"]
    if not _uneven_bounds(fn.support):
        return init_to_prior(site)
    bijection = biject_to(fn.support)
    support = support_of_entries(fn.support)
    both = hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
    return bijection(torch.full(bijection.inverse_shape(fn.shape()), end if both else -END))


def unbroken(
    evidence: Evidence, members: Sequence[Any], group: Callable[..., Any]
) -> tuple[list[Any], list[tuple[Any, Refutation]]]:
    """The members whose product is a symmetry, and the others, each with its refutation.

    ``group`` makes a product, whose elements are tuples, of some members. The product is tried as a whole. If
    an element changes the log joint, its parts are applied in turn from the same point; at least one of these
    steps changes the log joint, and its member is removed.
    """
    left, broken = list(members), []
    while left:
        refutation = evidence.refute(group(*left))
        if refutation is None:
            break
        guilty = _guilty(refutation)
        broken += [(left[i], refutation) for i in guilty]
        left = [member for i, member in enumerate(left) if i not in guilty]
    return left, broken


def _guilty(refutation: Refutation) -> list[int]:
    """The indices of members whose part of an element changes the log joint, applied in turn."""
    group: Any = refutation.symmetry  # a product of the members
    point = refutation.point
    parts = list(group.identity(point.values))
    moving = [
        i
        for i, neutral in enumerate(parts)
        if not all(map(torch.equal, leaves(neutral), leaves(refutation.element[i])))
    ]
    # Permutations first, then signs: the order within an element of a product.
    moving.sort(key=lambda i: getattr(group.members[i], "symmetry", group.members[i]).flips)
    guilty, here = [], point
    for i in moving:
        parts[i] = refutation.element[i]
        values = group.act(tuple(parts), point.values)
        try:
            changed = here.change(values) is not None
            after = here.evaluate(values)
        except ValueError:
            changed = True
        if changed:
            guilty.append(i)
            parts[i] = group.identity(point.values)[i]
        else:
            here = Point(point.program, values, point.indices, after)
    return guilty or moving


def _elements(symmetry: Group, point: Point) -> Iterator[tuple[str, Element]]:
    """All generators and some random elements, or some generators and more random elements."""
    generators = symmetry.generators(point.values)
    few = len(generators) <= MAX_GENERATORS
    yield from generators if few else generators[:: -(-len(generators) // NUM_SPREAD)]
    for _ in range(NUM_RANDOM_ELEMENTS if few else NUM_RANDOM_AMONG_MANY):
        yield _random(symmetry, point)


def _random(symmetry: Group, point: Point) -> tuple[str, Element]:
    """A uniformly random element, and what messages call it."""
    return f"a random element of {symmetry!r}", symmetry.sample(point.values)


def _first_refutation(
    symmetry: Group, elements: Iterable[tuple[str, Element]], point: Point
) -> Refutation | None:
    """The first of some elements that changes the log joint at a point."""
    for name, element in elements:
        try:
            change = point.change(symmetry.act(element, point.values))
        except SymmetryError:
            raise
        except ValueError as error:  # from Pyro's validation: the image is outside of the support
            return Refutation(symmetry, name, element, point, None, str(error).splitlines()[0])
        if change:
            return Refutation(symmetry, name, element, point, change)
    return None


def named(refutation: Refutation) -> Refutation:
    """The refutation by a generator, which has a clear name, if one is found; else the given one."""
    symmetry, point = refutation.symmetry, refutation.point
    generators = symmetry.generators(point.values)[:MAX_NAMED]
    return _first_refutation(symmetry, generators, point) or refutation


def _nth(dealt: dict[str, list[Tensor]], n: int, *, all_of_them: bool) -> Window:
    """The n-th window: of all combinations, or so that few windows use each plate evenly."""
    window = {}
    for number, (name, several) in enumerate(dealt.items()):
        if all_of_them:
            n, k = divmod(n, len(several))
        else:
            k = (n + number * (n // len(several))) % len(several)
        window[name] = several[k]
    return window


def _refuse_hidden_randomness(point: Point) -> None:
    """Raise if the log joint differs between two runs at the same values."""
    again = point.evaluate(point.values)
    if compared(point.joint, again):
        raise SymmetryError(
            "the model's log joint is random at fixed values of its latent sites "
            f"{list(point.program.latents)}: {point.joint.total:.6g}, then {again.total:.6g}. Does it sample "
            "outside pyro.sample, or hide a site? Pass the whole model"
        )
