r"""Minimal symmetric sets of axes, grown without a test of every subset.

A set :math:`S` of axes is symmetric if moving exactly these axes leaves the log joint unchanged. Take an
involution :math:`g` (a swap of two units, or a flip of one sign), a set :math:`C`, and a point
:math:`\theta` at which all axes outside of :math:`C \cup B` are *tied*: :math:`g` leaves them unchanged,
because the two units are equal, or the one is zero. If :math:`g_C` changes the log joint there, then every
symmetric set :math:`S \supseteq C` contains an axis of :math:`B`, since :math:`g_S \theta = g_C \theta`
otherwise. Bisection finds a small :math:`B`. If it has one axis, that axis joins :math:`C`; if it has
several, each is tried; if it has none, no symmetric set contains :math:`C`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.model.program import Program, uniform_draw
from pyro_sym.search.candidates import Candidate, Kind, group_of
from pyro_sym.search.comparison import NUM_DIFFERENCES, Joint, compared
from pyro_sym.search.evidence import MAX_GENERATORS, Evidence, Point, finite_draws
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation

__all__ = ["MinimalSets"]

MAX_EVALUATIONS = 5_000
# The number of prior draws, and of draws near zero, that the search uses.
NUM_MILD = 2
# Relative changes above this are not compared with measured rounding.
SURE = {torch.float64: 1e-7, torch.float32: 1e-2}


class _OutOfBudgetError(Exception):
    """The log joint has been evaluated ``MAX_EVALUATIONS`` times."""


class MinimalSets:
    """The search for minimal symmetric sets, within a budget of evaluations of the log joint."""

    def __init__(self, evidence: Evidence) -> None:
        program, self.dtype = evidence.program, evidence.dtype
        self.budget = MAX_EVALUATIONS  # the evaluations that are left
        near_zero = Program(program.model, program.args, program.kwargs, init_strategy=_near_zero)
        self.points = _mild(evidence.points)  # the caller adds those that refute what was found
        with suppress(ValueError):  # the log joint may be finite at prior draws only
            self.points += _mild(finite_draws(near_zero, evidence.dtype))

    def is_idle(self, axis: Candidate) -> bool:
        """Whether a swap leaves all values unchanged, as on both axes of a 2 x 2 correlation matrix."""
        group = group_of(Permutation, [axis])
        swap = group.generators(self.points[0].values)[0][1]

        def stays(value: Tensor) -> bool:  # up to rounding, as on the diagonal of such a matrix
            image = group.act(swap, {axis.site: value})[axis.site]
            return torch.allclose(image, value, rtol=0.0, atol=1e-6 * float(value.abs().max()))

        return all(stays(point.values[axis.site]) for point in self.points)

    def groups(self, kind: Kind, axes: list[Candidate]) -> Iterator[Symmetry]:
        """The groups of the minimal symmetric sets, those of many units first."""
        left = sorted(axes, key=lambda axis: -axis.size)
        while left:
            free = [axis for axis in left if axis.size == left[0].size]
            try:
                found = self._smallest(kind, free[:1], free)
            except _OutOfBudgetError:
                warnings.warn(
                    f"the search for {kind.__name__}s stopped after {MAX_EVALUATIONS} evaluations of the log "
                    f"joint; the axes {', '.join(map(str, left))} are not moved, though they may be "
                    "exchangeable. If you know that they are, name them and check_symmetry it",
                    stacklevel=5,
                )
                return
            if found:
                yield group_of(kind, [axis for axis in free if axis in found])
            # Minimal sets are taken as disjoint: an axis is in one of them at most.
            left = [axis for axis in left if axis not in (found or free[:1])]

    def _smallest(self, kind: Kind, chosen: list[Candidate], free: list[Candidate]) -> list[Candidate] | None:
        """The smallest symmetric set of free axes that contains the chosen ones."""
        witnesses = self._witnesses(kind, chosen)
        if not witnesses:
            return chosen
        missing: list[list[Candidate]] = []
        for element, point in witnesses:  # where a change is faint, B comes out larger than it need be
            missing.append(self._missing(kind, chosen, free, element, point))
            if len(missing[-1]) < 2:
                break
        grown = [self._smallest(kind, [*chosen, axis], free) for axis in min(missing, key=len)]
        return min(filter(None, grown), key=len, default=None)

    def _witnesses(self, kind: Kind, axes: list[Candidate]) -> list[tuple[Tensor, Point]]:
        """An involution that changes the log joint, with each point where it does, clearest first."""
        group = group_of(kind, axes)
        generators = group.generators(self.points[0].values)
        for _, element in generators[:: -(-len(generators) // MAX_GENERATORS) or 1]:
            changes = [self._change(group, element, point) for point in self.points]
            clearest = sorted(range(len(changes)), key=lambda k: -changes[k])
            if any(changes):
                return [(element, self.points[k]) for k in clearest if changes[k]]
        return []

    def _missing(
        self, kind: Kind, chosen: list[Candidate], free: list[Candidate], element: Tensor, point: Point
    ) -> list[Candidate]:
        """A small set B of axes, of which each symmetric set that contains the chosen axes has one."""
        rest = [axis for axis in free if axis not in chosen]

        def changed(loose: list[Candidate]) -> bool:
            """Whether the element changes the log joint where all of ``rest`` but ``loose`` is tied."""
            values = point.values
            for axis in rest:
                if axis not in loose:
                    values = values | {axis.site: _tied(kind, axis, element, values)}
            there = self._evaluated(point, values)
            if there is None or not there.is_finite():
                return False
            tied = replace(point, values=values, joint=there)
            return self._change(group_of(kind, chosen), element, tied) > 0

        return _core(changed, rest)

    def _change(self, group: Symmetry, element: Tensor, point: Point) -> float:
        """The change of the log joint under an element, relative to what moves; 0 for rounding."""
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
        except ValueError:  # from Pyro's validation
            return None

    def _spend(self, evaluations: int) -> None:
        if self.budget < evaluations:
            self.budget = 0
            raise _OutOfBudgetError
        self.budget -= evaluations


def _mild(points: list[Point]) -> list[Point]:
    """The points with the smallest terms, where small differences are easiest to see."""
    return sorted(points, key=lambda point: sum(map(abs, point.joint.sums.values())))[:NUM_MILD]


def _core(changed: Callable[[list[Candidate]], bool], axes: list[Candidate]) -> list[Candidate]:
    """A minimal set of axes for which ``changed`` holds, by bisection; it holds for all of them."""
    core: list[Candidate] = []
    while not changed(core):
        unseen, seen = 0, len(axes)  # prefixes of axes: core + axes[:seen] changes, + axes[:unseen] doesn't
        while seen - unseen > 1:
            middle = (unseen + seen) // 2
            if changed([*core, *axes[:middle]]):
                seen = middle
            else:
                unseen = middle
        core.append(axes[seen - 1])
        axes = axes[: seen - 1]
    return core


def _tied(kind: Kind, axis: Candidate, element: Tensor, values: dict[str, Tensor]) -> Tensor:
    """The site's value, changed along the axis to one that the involution leaves unchanged."""
    group = group_of(kind, [axis])
    if kind.relabels and not axis.coupled:
        # Copy one unit to the other: that stays in any support, and the mean of the two may not.
        copies = element.minimum(torch.arange(axis.size, device=element.device))
        return group.act(copies, values)[axis.site]
    return (values[axis.site] + group.act(element, values)[axis.site]) / 2


def _near_zero(site: Any) -> Tensor:
    """Draw uniformly on (-2, 2) in unconstrained space, or from the prior where there is no such space."""
    try:
        return uniform_draw(site["fn"])
    except NotImplementedError:
        return site["fn"].sample()
