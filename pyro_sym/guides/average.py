r"""How a symmetrised guide computes its log orbit average: the contract, and the simpler implementations.

All of them return it relative to the guide's own density, :math:`\log q^G(\omega) - \log q(\omega)`: the
difference of two numbers of tens of thousands of nats would have too few digits left.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_sym.guides.capture import Draws
from pyro_sym.guides.density import agrees
from pyro_sym.guides.site_normals import site_normals
from pyro_sym.guides.unit_pairs import LogRatios
from pyro_sym.orbit import guided_permutations as guided
from pyro_sym.orbit.bracket import Bracket, bracket
from pyro_sym.orbit.enumeration import CHUNK_NUMEL, LogProb, enumerated, log_prob_at_images
from pyro_sym.orbit.permanent import log_permanent
from pyro_sym.orbit.uniform import uniform, uniform_unbiased
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.flat import nest

__all__ = ["Enumeration", "OneBlock", "OrbitAverage", "PartlyOneBlock", "Run", "Trivial", "Uniform"]

# The least number of elements for the unbiased half in diagnostics.
NUM_DIAGNOSED = 64


@dataclass(frozen=True)
class Run:
    """Draws of the base guide, and what an orbit average may ask about them.

    ``density`` returns the guide's log density, a function of values of shape ``(*batch, *native)``;
    ``redraw`` returns a number of other draws, by site.
    """

    draws: Draws
    density: Callable[[], LogProb]
    redraw: Callable[[int], dict[str, Tensor]]

    def relative(self) -> LogProb:
        """The log density minus that of the draws, of values whose last batch dim is that of the draws."""
        density, own = self.density(), self.draws.own
        return lambda values: density(values) - own

    def reliable(self, relative: Tensor) -> Tensor:
        """Whether :meth:`relative`, computed at the draws themselves, is 0 up to rounding."""
        return agrees(self.draws.own + relative, self.draws.own)

    def chunks(self, size: int) -> Iterator[Run]:
        """Split into chunks of at most ``size`` draws."""
        for start in range(0, len(self.draws.own), size):
            yield replace(self, draws=self.draws.at(slice(start, start + size)))


@dataclass
class OrbitAverage(ABC):
    """An estimator of the log orbit average.

    An estimator of your own is a subclass that implements :meth:`bound`, and :meth:`unbiased` if it isn't
    exact; pass the class as ``AutoSymmetrized(estimator=)``, and check it with
    :func:`~pyro_sym.testing.check_estimator_contract`.

    Attributes:
        guide: the base guide.
        symmetry: the group.
        method: ``"exact"``, ``"importance"`` or ``"uniform"``, or the name of a class of the user's own.
        trivial: whether the group has one element, so that there is nothing to average.
    """

    guide: Callable[..., Any]
    symmetry: Symmetry
    method: str
    trivial: ClassVar[bool] = False

    @property
    def proposes_elements(self) -> bool:
        """Whether elements are drawn from a proposal that is fitted to the guide."""
        return self.method == "importance"

    @abstractmethod
    def bound(self, run: Run, num_elements: int) -> Tensor:
        r"""An upper bound of :math:`\log q^G(\omega) - \log q(\omega)` in expectation, for training.

        With it the ELBO stays a lower bound on the log evidence.

        Args:
            run: ``P`` draws of the guide.
            num_elements: :math:`K`, where elements are drawn.

        Returns:
            A tensor of shape ``(P,)``, in nats.
        """

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        r"""A lower bound of the same in expectation, for diagnostics; if exact, the value itself."""
        return self.bound(run, num_elements)

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """Both bounds, for diagnostics, with at least 64 elements for the unbiased one."""
        upper = self.bound(run, num_elements)
        lower = upper if self.method == "exact" else self.unbiased(run, max(num_elements, NUM_DIAGNOSED))
        return Bracket(lower, upper)


class Trivial(OrbitAverage):
    """The average over a group with one element: the guide's own density."""

    trivial = True

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return torch.zeros_like(run.draws.own)


class Enumeration(OrbitAverage):
    """The sum over all elements, for any guide with a density."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return enumerated(self.symmetry, run.relative(), run.draws.values, own, run.reliable)


class Uniform(OrbitAverage):
    """The average over uniform elements, for any guide with a density and any finite group."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return uniform(self.symmetry, run.relative(), run.draws.values, own, num_elements, run.reliable)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        own = torch.zeros_like(run.draws.own)
        return uniform_unbiased(self.symmetry, run.relative(), run.draws.values, own, num_elements)


@dataclass
class OneBlock(OrbitAverage):
    """A permanent, or a bound on it, for densities that factorise over the units of one permutation.

    ``units`` returns the matrix that pairs slots with units.
    """

    units: LogRatios

    def bound(self, run: Run, num_elements: int) -> Tensor:
        pairs = self.units(run.draws)
        if self.method == "exact":
            return log_permanent(pairs) - math.lgamma(pairs.shape[-1] + 1)
        return guided.importance(pairs, num_elements)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        if self.method == "exact":
            return self.bound(run, num_elements)
        return guided.importance_unbiased(self.units(run.draws), num_elements)

    def bracket(self, run: Run, num_elements: int) -> Bracket:
        """The best of sampled and deterministic bounds, computed in chunks of draws."""
        if self.method == "exact":
            return super().bracket(run, num_elements)
        count = max(num_elements, NUM_DIAGNOSED)
        n = self.units(next(run.chunks(1)).draws).shape[-1]
        chunks = run.chunks(max(1, CHUNK_NUMEL // (2 * n * (n + count))))
        return bracket((self.units(chunk.draws).double() for chunk in chunks), count)


@dataclass
class PartlyOneBlock(OrbitAverage):
    """Importance sampling for sites of two kinds: the units of one are independent, those of the other not.

    Elements are proposed by sites of the first kind, whose slots and units ``units`` pairs; ``rest`` permutes
    the others. The weights of a mixture are of the second kind: their unconstrained coordinates are
    independent normals, but stick-breaking mixes the units.
    """

    units: LogRatios
    rest: Symmetry

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return guided.importance(self.units(run.draws), num_elements, self._of_rest(run))

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        return guided.importance_unbiased(self.units(run.draws), num_elements, self._of_rest(run))

    def _of_rest(self, run: Run) -> Callable[[Tensor], Tensor]:
        """The log density of the other sites at images, a function of assignments of shape (P, K, n)."""
        sites = self.rest.sites
        normals = site_normals(self.guide, sites)
        values = {site: run.draws.values[site] for site in sites}

        def density(images: dict[str, Tensor]) -> Tensor:
            return torch.stack([normals[site].log_prob(images[site]) for site in sites]).sum(0)

        def log_prob(assignments: Tensor) -> Tensor:
            elements = nest(self.rest, [assignments.transpose(0, 1)])  # (K, P, n)
            return log_prob_at_images(self.rest, density, values, elements).mT  # (P, K)

        return log_prob
