"""Record, compare elsewhere, fall back: a graph is used only if it agrees with the model at other points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, fx

from pyro_sym.graph.record import Function, UntraceableError, message_of
from pyro_sym.graph.rewrite import rewritten

__all__ = ["NEARER", "NUDGES", "Probe", "check", "nudge", "relative_error", "rewritten_if_right", "tolerance"]

T = TypeVar("T")

NEARER = tuple(0.5**halvings for halvings in range(8))
"""Fractions of the way from the start to a point, tried in turn while the model fails at the point."""

NUDGES = 3
"""How many nudged points are tried before a difference counts.

At a kink, as of a ReLU, rounding decides which of two slopes is taken, so that two right computations may
differ by much. At a point nudged by far more than the rounding they agree again, unless it is at another
kink. A wrong graph is wrong there, too.
"""


class Probe(ABC):
    """A point at which a function is compared with its reference, the model itself.

    The point is some ``fraction`` of the way from the start, plus a ``nudge`` (0 for none). If it ``moves``
    from the start, the reference may fail there, and a point nearer the start is tried.
    """

    def __init__(self, moves: bool) -> None:
        self.moves = moves
        self.fractions = list(NEARER if moves else NEARER[:1])  # yet to be tried, the current one first
        self._known: dict[tuple[float, int], Sequence[Tensor] | None] = {}

    @abstractmethod
    def reference(self, fraction: float, nudge: int) -> Sequence[Tensor] | None:
        """The results of the reference; ``None`` if it fails."""

    @abstractmethod
    def results(self, function: Function, fraction: float, nudge: int) -> Sequence[Tensor]:
        """The results of the function."""

    @abstractmethod
    def problem(self, number: int, deviation: float) -> str:
        """What to say if the result of that number has that relative error."""

    def tolerance(self, wanted: Tensor) -> float:
        """The relative error that a result may have."""
        return tolerance(wanted)

    def may_fail(self, fraction: float) -> bool:
        """Whether the function may raise an error although the reference doesn't."""
        return False

    def compare(self, function: Function) -> bool:
        """Raise an ``UntraceableError`` if a function is wrong; return whether a point allowed to compare."""
        while self.fractions:
            fraction = self.fractions[0]
            if self._reference(0) is None:
                self.fractions.pop(0)
                continue
            try:
                first = self._problem(function, 0)
                if first is None or any(self._problem(function, n + 1) is None for n in range(NUDGES)):
                    return True
            except (RuntimeError, IndexError) as error:
                if self.may_fail(fraction):
                    self.fractions.pop(0)
                    continue
                raise UntraceableError(
                    f"its graph fails at other points than where it was recorded: {message_of(error)}"
                ) from error
            raise UntraceableError(first)
        return False

    def _reference(self, nudge: int) -> Sequence[Tensor] | None:
        key = (self.fractions[0], nudge)
        if key not in self._known:
            self._known[key] = self.reference(*key)
        return self._known[key]

    def _problem(self, function: Function, nudge: int) -> str | None:
        """What the function gets wrong at a nudged point, if anything."""
        expected = self._reference(nudge)
        if expected is None:
            return "the model fails at a nudged point"
        with torch.no_grad():
            results = self.results(function, self.fractions[0], nudge)
        for number, (wanted, result) in enumerate(zip(expected, results, strict=True)):
            deviation = relative_error(result, wanted)
            if not deviation <= self.tolerance(wanted):
                return self.problem(number, deviation)
        return None


def check(function: Function, probes: Iterable[Probe]) -> Function:
    """Return a function that agrees with the reference at all probes, or raise an ``UntraceableError``."""
    compared = [probe.compare(function) for probe in probes]
    if not any(compared):
        raise UntraceableError("the model fails at every point where its graph could be compared with it")
    return function


def rewritten_if_right(
    graph: fx.GraphModule, inputs: Sequence[Tensor], make: Callable[[fx.GraphModule], T]
) -> T:
    """The result of ``make`` for a rewritten graph, or for the graph itself if rules fail or make it wrong.

    ``make`` raises an ``UntraceableError`` for a wrong graph, as :func:`check` does.
    """
    try:
        return make(rewritten(graph, inputs))
    except UntraceableError:
        return make(graph)


def tolerance(wanted: Tensor) -> float:
    """The relative error that a right result may have, by its precision."""
    return 1e-8 if wanted.dtype == torch.float64 else 1e-3


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """The largest error, relative to the largest finite entry or to 1.

    It is infinite if an entry of one of the two is NaN or infinite and the other's isn't the same.
    """
    finite = wanted.isfinite()
    if not torch.equal(result[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return float("inf")
    result, wanted = result[finite], wanted[finite]
    if not result.isfinite().all():
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    return float((result - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def nudge(x: Tensor, number: int) -> Tensor:
    """A displacement of ``x`` by about the square root of its precision, random by ``number``; 0 for 0."""
    if number == 0:
        return torch.zeros_like(x)
    generator = torch.Generator().manual_seed(number)  # leaves the global generator alone
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    return torch.finfo(x.dtype).eps ** 0.5 * x.abs().clamp(min=1.0) * noise
