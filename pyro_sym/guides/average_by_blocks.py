"""Log orbit averages over permutations and signs, by elements drawn block by block."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ExpTransform, Transform, identity_transform

from pyro_sym.guides.average import OrbitAverage, Run
from pyro_sym.guides.density import agrees
from pyro_sym.guides.site_normals import coordinatewise, site_normals
from pyro_sym.guides.unit_pairs import viewed_normals
from pyro_sym.orbit.coupling import Coupling
from pyro_sym.orbit.enumeration import log_prob_at_images
from pyro_sym.orbit.guided_blocks import Surrogate, draw_elements
from pyro_sym.symmetry.elementary import SignFlip
from pyro_sym.symmetry.flat import FlatGroup

__all__ = ["Blocks", "BlocksOfDensity", "BlocksOfNormals", "coordinates", "flipped_sites"]

# Permutations of more units are drawn rather than summed over.
MAX_SUMMED = 8
# Every REFIT_EVERY calls the proposal's normals are fitted to NUM_FITTED draws and widened by a factor.
NUM_FITTED = 64
REFIT_EVERY = 20
INFLATION = (1.0, 2.0, 4.0)
SEED = 0x5EED
CHUNK_NUMEL = 2**24

Moments = Mapping[str, tuple[Tensor, Tensor]]


@dataclass
class Blocks(OrbitAverage):
    """Elements drawn block by block, as in :mod:`pyro_sym.orbit.guided_blocks`.

    ``group`` is the symmetry's normal form, which views sites in the shapes that ``coupling`` refers to;
    ``transforms`` map the real line to the coordinates of every moved site.
    """

    group: FlatGroup
    coupling: Coupling
    transforms: Mapping[str, Transform]

    def bound(self, run: Run, num_elements: int) -> Tensor:
        return self._average(run, num_elements, with_identity=True)

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        return self._average(run, num_elements, with_identity=False)

    @abstractmethod
    def _moments(self, run: Run) -> Moments:
        """Mean and standard deviation of every coordinate in every slot."""

    @abstractmethod
    def _log_average(self, run: Run, surrogate: Surrogate, num_elements: int, with_identity: bool) -> Tensor:
        """The log average of the weights of densities relative to the draws' own, of shape ``(P,)``."""

    def _points(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The coordinates of draws on the real line."""
        free = {site: _finite(transform.inv(values[site])) for site, transform in self.transforms.items()}
        return self.group.view(free)

    def _sizes(self, values: Mapping[str, Tensor]) -> list[int]:
        viewed = self.group.view(values)
        return [block.size(viewed) for block in self.coupling.blocks]

    def _average(self, run: Run, num_elements: int, with_identity: bool) -> Tensor:
        values = run.draws.values
        sizes, moments = self._sizes(values), self._moments(run)
        entries = num_elements * max(max(sizes) ** 2, *(values[site][0].numel() for site in self.transforms))
        averages = []
        for chunk in run.chunks(max(1, CHUNK_NUMEL // entries)):
            surrogate = Surrogate(self.coupling, sizes, self._points(chunk.draws.values), moments)
            averages.append(self._log_average(chunk, surrogate, num_elements, with_identity))
        return torch.cat(averages) - self._log_count(values)

    def _log_count(self, values: Mapping[str, Tensor]) -> float:
        """The log of the number of elements; unlike in ``log_order``, those that act alike all count."""
        viewed = self.group.view(values)
        return sum(block.log_order(viewed) for block in self.coupling.blocks)


@dataclass
class BlocksOfNormals(Blocks):
    """For independent normal coordinates: uncoupled blocks of up to ``max_size`` units are summed exactly."""

    max_size: int = MAX_SUMMED

    def _moments(self, run: Run) -> Moments:
        return viewed_normals(self.group, site_normals(self.guide, self.transforms), self.transforms)

    def _log_average(self, run: Run, surrogate: Surrogate, num_elements: int, with_identity: bool) -> Tensor:
        summed = self.coupling.uncoupled(self.group.view(run.draws.values), self.max_size)
        count = num_elements if len(summed) < len(self.coupling.blocks) else 1
        proposal = draw_elements(surrogate, count, with_identity=with_identity, summed=summed)
        log_weights = surrogate.log_sum(proposal.elements, summed) - proposal.log_probs
        # The surrogate at the identity is the density at the draws, without terms that no element changes.
        own = surrogate.log_sum(surrogate.identity(), frozenset()).squeeze(-1)
        return log_weights.logsumexp(-1) - own - math.log(count)


@dataclass
class BlocksOfDensity(Blocks):
    """For any guide with a density, at elements proposed by normals with its marginal moments."""

    _fitted: Moments = field(default_factory=dict)
    _calls: int = 0

    def _moments(self, run: Run) -> Moments:
        if self._calls % REFIT_EVERY == 0:
            with torch.no_grad(), _own_randomness(run.draws.own.device, SEED + self._calls):
                self._fitted = self._fit(run.redraw(NUM_FITTED))
        self._calls += 1
        return self._fitted

    def _fit(self, others: Mapping[str, Tensor]) -> Moments:
        """Moments of draws, with the inflation under which their own labels are most likely proposed."""
        points, sizes = self._points(others), self._sizes(others)
        moments = {site: (value.mean(0), value.std(0)) for site, value in points.items()}
        best = -math.inf
        for factor in INFLATION:
            wider = {
                site: (loc, factor * scale.clamp_min(1e-6 * (1e-6 + loc.abs())))
                for site, (loc, scale) in moments.items()
            }
            surrogate = Surrogate(self.coupling, sizes, points, wider)
            guessed = float(draw_elements(surrogate, 1, with_identity=True).log_probs.mean())
            if guessed > best:
                best, fitted = guessed, wider
        return fitted

    def _log_average(self, run: Run, surrogate: Surrogate, num_elements: int, with_identity: bool) -> Tensor:
        proposal = draw_elements(surrogate, num_elements, with_identity=with_identity)
        elements = proposal.group_elements(self.coupling, self.symmetry)
        # The density at the draws by the same function, so that rounding errors cancel.
        density = run.density()
        images = log_prob_at_images(self.symmetry, density, run.draws.values, elements)
        at_draws = images[0] if with_identity else density(run.draws.values)
        ratios = images - at_draws
        average = (ratios.mT - proposal.log_probs).logsumexp(-1) - math.log(num_elements)
        # Where the density computed at the draws is wrong, so are those of images: use the plain guide's.
        return torch.where(agrees(at_draws, run.draws.own), average, self._log_count(run.draws.values))


def coordinates(support: Any, flipped: bool) -> Transform:
    """A map from the real line to each coordinate of a support; approximate if there is none."""
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if flipped:
        return identity_transform
    if base is constraints.simplex:
        return ExpTransform()
    try:
        return coordinatewise(biject_to(support)) or identity_transform
    except NotImplementedError:
        return identity_transform


def flipped_sites(group: FlatGroup) -> set[str]:
    """The sites whose signs a group flips."""
    return {site for member in group.members if isinstance(member, SignFlip) for site in member.axes}


def _finite(points: Tensor) -> Tensor:
    """Replace infinite points, of values at the edge of a support, by distant ones."""
    return points.nan_to_num(0.0, 1e3, -1e3)


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Separate random numbers, so that what is fitted with them is independent of all other draws."""
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
