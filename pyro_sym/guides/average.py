r"""How a symmetrised guide computes its log orbit average: one contract, and the ways without surrogates.

All of them return it relative to the guide's own density, :math:`\log q^G(\omega) - \log q(\omega)`: the
difference of two numbers of tens of thousands of nats would keep too few digits of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_sym.guides.capture import Draws
from pyro_sym.guides.density import agrees
from pyro_sym.guides.site_normals import LogRatios
from pyro_sym.orbit import guided_permutations as sequential
from pyro_sym.orbit.bracket import Bracket, bracket
from pyro_sym.orbit.enumeration import CHUNK_NUMEL, LogProb, enumerated, log_prob_at_images
from pyro_sym.orbit.permanent import log_permanent
from pyro_sym.orbit.uniform import uniform, uniform_unbiased
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.flat import nest

__all__ = [
    "Enumeration",
    "OneBlock",
    "OrbitAverage",
    "PartlyOneBlock",
    "Run",
    "Trivial",
    "Uniform",
]

# Elements of the diagnostics' unbiased half, at least.
NUM_DIAGNOSED = 64


@dataclass(frozen=True)
class Run:
    """A call of the base guide, with what an orbit average may ask about it.

    Attributes:
        draws: what the guide drew.
        density: makes the log density of the guide, as a function of values; or of some of its sites, for
            guides in which these are independent of the others.
        redraw: makes so many other draws, by site.
    """

    draws: Draws
    density: Callable[..., LogProb]
    redraw: Callable[[int], dict[str, Tensor]]

    def relative(self) -> LogProb:
        """The log density less that of the draws, along whose dim values have batch dims last."""
        density, own = self.density(), self.draws.own
        return lambda values: density(values) - own

    def reliable(self, relative: Tensor) -> Tensor:
        """Whether the log density computed at the draws, less ``own``, is what the guide gave to them."""
        return agrees(self.draws.own + relative, self.draws.own)

    def parts(self, size: int) -> Iterator[Run]:
        """The same by up to ``size`` draws at a time."""
        own, values = self.draws.own.split(size), self.draws.values
        for i, some in enumerate(own):
            rows = {site: value[i * size : i * size + len(some)] for site, value in values.items()}
            yield replace(self, draws=replace(self.draws, values=rows, own=some))


@dataclass
class OrbitAverage(ABC):
    """One way to compute the log orbit average.

    A way of your own is a subclass that implements :meth:`bound`, and :meth:`unbiased` if it isn't exact; it
    is handed to ``AutoSymmetrized(estimator=)`` as a class, and tried by
    :func:`~pyro_sym.testing.check_estimator_contract`.

    Attributes:
        guide: the base guide.
        symmetry: the group.
        method: the estimator that it serves, or the name of a class of the user's own.
    """

    guide: Callable[..., Any]
    symmetry: Symmetry
    method: str

    @abstractmethod
    def bound(self, run: Run, num_elements: int) -> Tensor:
        r"""At least :math:`\log q^G(\omega) - \log q(\omega)` in expectation: the ELBO stays a lower bound.

        Args:
            run: the guide's call, with ``P`` draws.
            num_elements: :math:`K`, where elements are drawn.

        Returns:
            Of shape ``(P,)``, in nats.
        """

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        r"""At most the same in expectation, for diagnostics; equal to it where it is exact."""
        return self.bound(run, num_elements)

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """Both halves, for diagnostics, with at least 64 elements where the unbiased one draws them."""
        upper = self.bound(run, num_elements)
        lower = upper if self.method == "exact" else self.unbiased(run, max(num_elements, NUM_DIAGNOSED))
        return Bracket(lower, upper)


class Trivial(OrbitAverage):
    """Of a group with one element: the guide's own density."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return torch.zeros_like(run.draws.own)


class Enumeration(OrbitAverage):
    """Over all elements, for any guide with a density."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return enumerated(self.symmetry, run.relative(), run.draws.values, own, run.reliable)


class Uniform(OrbitAverage):
    """Over uniform elements, for any guide with a density and any group."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return uniform(self.symmetry, run.relative(), run.draws.values, own, num_elements, run.reliable)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return uniform_unbiased(self.symmetry, run.relative(), run.draws.values, own, num_elements)


@dataclass
class OneBlock(OrbitAverage):
    """Of a density that factorises over the units of one permutation: a permanent, or a bound on it.

    Attributes:
        units: pairs slots with units.
    """

    units: LogRatios

    def bound(self, run: Run, num_elements: int) -> Tensor:
        pairs = self.units(run.draws)
        if self.method == "exact":
            return log_permanent(pairs) - math.lgamma(pairs.shape[-1] + 1)
        return sequential.importance(pairs, num_elements)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        if self.method == "exact":
            return self.bound(run, num_elements)
        return sequential.importance_unbiased(self.units(run.draws), num_elements)

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """Both halves, the best of sampled and deterministic ones, in chunks of draws."""
        if self.method == "exact":
            return super().bracket(run, num_elements)
        count = max(num_elements, NUM_DIAGNOSED)
        n = self.units(next(run.parts(1)).draws).shape[-1]
        parts = run.parts(max(1, CHUNK_NUMEL // (2 * n * (n + count))))
        return bracket((self.units(part.draws).double() for part in parts), count)


@dataclass
class PartlyOneBlock(OrbitAverage):
    """Of sites that factorise over units, by which elements are proposed, and independent ones that do not.

    The weights of an ``AutoNormal``'s mixture are of the second kind: stick-breaking mixes their coordinates.

    Attributes:
        units: pairs slots and units by sites of the first kind.
        rest: the permutation of sites of the second kind.
    """

    units: LogRatios
    rest: Symmetry

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return sequential.importance(self.units(run.draws), num_elements, self._of_rest(run))

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        return sequential.importance_unbiased(self.units(run.draws), num_elements, self._of_rest(run))

    def _of_rest(self, run: Run) -> Callable[[Tensor], Tensor]:
        """The log density of the rest at images by assignments (P, K, n)."""
        density = run.density(self.rest.sites)
        values = {site: run.draws.values[site] for site in self.rest.sites}

        def log_prob(assignments: Tensor) -> Tensor:
            elements = nest(self.rest, [assignments.transpose(0, 1)])
            return log_prob_at_images(self.rest, density, values, elements).mT

        return log_prob
