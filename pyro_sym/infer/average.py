"""How a symmetrised guide computes its log orbit average: one contract, and the ways without surrogates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_sym.infer.capture import Draws
from pyro_sym.infer.units import pair_log_probs
from pyro_sym.orbit import sequential
from pyro_sym.orbit.bracket import Bracket, bracket
from pyro_sym.orbit.exact import CHUNK_NUMEL, LogProb, enumerated
from pyro_sym.orbit.importance import uniform, uniform_unbiased
from pyro_sym.orbit.permanent import log_permanent
from pyro_sym.symmetry.base import Symmetry

__all__ = ["Enumeration", "Method", "OneBlock", "OrbitAverage", "Run", "Uniform"]

# Elements of the diagnostics' unbiased half, at least.
NUM_DIAGNOSED = 64

Method = Literal["exact", "importance", "uniform"]


@dataclass(frozen=True)
class Run:
    """A call of the base guide, with what an orbit average may ask about it.

    Attributes:
        draws: what the guide drew.
        density: makes the log density of the guide, as a function of values.
        redraw: makes so many other draws, by site.
    """

    draws: Draws
    density: Callable[[], LogProb]
    redraw: Callable[[int], dict[str, Tensor]]

    def parts(self, size: int) -> Iterator[Run]:
        """The same by up to ``size`` draws at a time."""
        own, values = self.draws.own.split(size), self.draws.values
        for i, some in enumerate(own):
            rows = {site: value[i * size : i * size + len(some)] for site, value in values.items()}
            yield replace(self, draws=Draws(rows, some, self.draws.indices))


@dataclass
class OrbitAverage(ABC):
    """One way to compute the log orbit average.

    Attributes:
        guide: the base guide.
        symmetry: the group.
        method: the estimator that it serves.
    """

    guide: Callable[..., Any]
    symmetry: Symmetry
    method: Method

    @abstractmethod
    def bound(self, run: Run, num_elements: int) -> Tensor:
        r"""At least :math:`\log q^G(\omega)` in expectation: the ELBO stays a lower bound.

        Args:
            run: the guide's call, with ``P`` draws.
            num_elements: :math:`K`, where elements are drawn.

        Returns:
            Of shape ``(P,)``, in nats.
        """

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        r"""At most :math:`\log q^G(\omega)` in expectation, for diagnostics; the same where it is exact."""
        return self.bound(run, num_elements)

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """Both halves, for diagnostics, with at least 64 elements where the unbiased one draws them."""
        upper = self.bound(run, num_elements)
        lower = upper if self.method == "exact" else self.unbiased(run, max(num_elements, NUM_DIAGNOSED))
        return Bracket(lower, upper)


class Enumeration(OrbitAverage):
    """Over all elements, for any guide with a density."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return enumerated(self.symmetry, run.density(), run.draws.values, run.draws.own)


class Uniform(OrbitAverage):
    """Over uniform elements, for any guide with a density and any group."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return uniform(self.symmetry, run.density(), run.draws.values, run.draws.own, num_elements)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        return uniform_unbiased(self.symmetry, run.density(), run.draws.values, run.draws.own, num_elements)


class OneBlock(OrbitAverage):
    """Of a density that factorises over the units of one permutation: a permanent, or a bound on it."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        if self.method == "exact":
            return self._of_units(run, lambda pairs: log_permanent(pairs) - math.lgamma(pairs.shape[-1] + 1))
        return self._of_units(run, lambda pairs: sequential.importance(pairs, num_elements))

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        if self.method == "exact":
            return self.bound(run, num_elements)
        return self._of_units(run, lambda pairs: sequential.importance_unbiased(pairs, num_elements))

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """Both halves, the best of sampled and deterministic ones, in chunks of draws."""
        if self.method == "exact":
            return super().bracket(run, num_elements)
        count = max(num_elements, NUM_DIAGNOSED)
        n = self._pairs(next(run.parts(1)))[0].shape[-1]
        others: list[Tensor] = []

        def chunks() -> Iterator[Tensor]:
            for part in run.parts(max(1, CHUNK_NUMEL // (2 * n * (n + count)))):
                pairs, own = self._pairs(part)
                others.append(part.draws.own - own)
                yield pairs

        units = bracket(chunks(), count)
        rest = torch.cat(others)
        return units._replace(lower=rest + units.lower, upper=rest + units.upper)

    def _of_units(self, run: Run, average: Callable[[Tensor], Tensor]) -> Tensor:
        """The average, from that of the units: what the group does not move is a common factor."""
        pairs, own = self._pairs(run)
        return run.draws.own - own + average(pairs)

    def _pairs(self, run: Run) -> tuple[Tensor, Tensor]:
        pair = pair_log_probs(self.guide, self.symmetry)
        assert pair is not None, "chosen only where the density factorises"
        return pair(run.draws.values)
