"""Descent to elements for all draws that bring the draws close to their own mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_sym.symmetry.blocks import Moments
from pyro_sym.symmetry.nearest import LEAST_GAIN, Nearest, State
from pyro_sym.symmetry.product import Product

__all__ = ["Descent", "Run", "Scaling", "evenly_spread", "in_double", "lower"]

# Coordinates are scaled to unit variance over all draws and units. A slot's own variance is held when it
# falls this far below that, so that units that never move get a large weight and not an infinite one.
VARIANCE_FLOOR = 1e-6


class Scaling(NamedTuple):
    """Centre and scale of sites, by moments that the group leaves alone.

    Permutations and sign flips commute with it. Sites that other groups move are not scaled; their ``spread``
    is the variance that scaling would have made 1.
    """

    centre: dict[str, Tensor]
    scale: dict[str, Tensor]
    spread: dict[str, Tensor]

    @classmethod
    def of(cls, group: Product, draws: Mapping[str, Tensor], batch_ndim: int) -> Scaling:
        """The scaling of given draws."""
        scaling = cls({}, {}, {})
        for site, value in in_double(draws, batch_ndim).items():
            movers = [member for member in group.members if site in member.axes]
            units = [a for m in movers if m.relabels for a in m.axes[site]]
            signed = any(m.flips for m in movers)
            as_is = not all(m.relabels or m.flips for m in movers)
            centre = torch.zeros(()) if signed or as_is else value.mean((0, *units), keepdim=True)
            deviations = value - value.mean(0) if as_is else value - centre
            pooled = tuple(range(value.dim())) if as_is else (0, *units)
            scale = deviations.square().mean(pooled, keepdim=True).sqrt()
            # A constant site has only the rounding of its mean for a scale.
            scale = torch.where(scale > 1e-12 * value.abs().max(), scale, 1.0)
            scaling.centre[site] = centre
            scaling.scale[site] = torch.ones_like(scale) if as_is else scale
            scaling.spread[site] = scale.square().reshape(()) if as_is else value.new_ones(())
        return scaling

    def __call__(self, values: Mapping[str, Tensor], batch_ndim: int) -> dict[str, Tensor]:
        """Scaled values in float64, of shape ``(M, *event)``."""
        return {
            site: (value - self.centre[site]) / self.scale[site]
            for site, value in in_double(values, batch_ndim).items()
        }

    def native_variance(self, point: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The variances that undo the scaling, so that all coordinates weigh alike; ``point`` as scaled."""
        return {s: (1 / self.scale[s][0].square()).expand_as(v) for s, v in point.items()}


def in_double(values: Mapping[str, Tensor], batch_ndim: int) -> dict[str, Tensor]:
    """Values in float64 on the CPU, with one batch dim."""
    return {
        site: value.detach().to("cpu", torch.float64).reshape(-1, *value.shape[batch_ndim:])
        for site, value in values.items()
    }


class Run(NamedTuple):
    """The end of a descent, with the objective after each sweep."""

    state: State
    objective: list[float]
    converged: bool


class Descent(Nearest):
    """Coordinate descent over the elements of all scaled draws and over the moments of the aligned draws.

    ``spread`` is the variance of one coordinate over draws and units, by site.
    """

    def __init__(self, group: Product, draws: dict[str, Tensor], spread: Mapping[str, Tensor]) -> None:
        super().__init__(group, draws)
        self.spread = spread

    def moments(self, images: Mapping[str, Tensor]) -> Moments:
        """Mean and variance over draws."""
        mean = {site: value.mean(0) for site, value in images.items()}
        variance = {site: (value - mean[site]).square().mean(0) for site, value in images.items()}
        pooled = self.group.pool_variance(variance)
        floors = {site: VARIANCE_FLOOR * float(self.spread[site]) for site in pooled}
        return Moments(mean, {site: value.clamp(min=floors[site]) for site, value in pooled.items()})

    def at_point(self, point: Mapping[str, Tensor]) -> Moments:
        """One point as the mean, with the variances of all draws and units."""
        return Moments(point, {site: self.spread[site].expand_as(value) for site, value in point.items()})

    def objective(self, images: Mapping[str, Tensor], moments: Moments) -> float:
        """Half the mean distance and log determinant: the negative log likelihood, but for a constant."""
        log_variance = sum(float(variance.log().sum()) for variance in moments.variance.values())
        return 0.5 * (float(moments.distance(images).mean()) + log_variance)

    def starts(self, num_references: int) -> Iterator[State]:
        """The draws as they are, then closest to one draw after another."""
        yield self.start()
        for k in evenly_spread(self.num_draws, num_references):
            reference = {site: value[k] for site, value in self.draws.items()}
            yield self.place(self.at_point(reference), self.blocks)

    def run(self, state: State, max_sweeps: int) -> Run:
        """Sweeps and moments in turn, until no draw moves."""
        moments = self.moments(state.images)
        path = [self.objective(state.images, moments)]
        for _ in range(max_sweeps):
            state, moved = self.sweep(state, moments)
            if not moved.any():
                return Run(state, path, True)
            moments = self.moments(state.images)
            path.append(self.objective(state.images, moments))
        return Run(state, path, False)

    def best_run(self, num_references: int, num_restarts: int, max_sweeps: int) -> Run:
        """The run from the best of several starts, refined."""
        runs = (self.run(start, max_sweeps) for start in self.starts(num_references))
        return self.refine(reduce(lower, runs), num_restarts, max_sweeps)

    def refine(self, run: Run, num_restarts: int, max_sweeps: int) -> Run:
        """Place all draws from scratch, in several orders of the blocks, until no order moves a draw."""
        orders = self.orders(num_restarts)
        failures = 0
        while failures < len(orders) and run.converged:
            moments = self.moments(run.state.images)
            state, moved = self.restart(run.state, moments, orders[0])
            orders = [*orders[1:], orders[0]]
            failures += 1
            if moved:
                failures = 0
                more = self.run(state, max_sweeps)
                run = Run(more.state, run.objective + more.objective, more.converged)
        return run


def lower(first: Any, second: Any) -> Any:
    """The run that ends in the lower objective; the first if they tie, up to rounding."""
    old, new = first.objective[-1], second.objective[-1]
    return second if old - new > LEAST_GAIN * (1 + abs(old)) else first


def evenly_spread(count: int, number: int) -> list[int]:
    """Up to ``number`` different indices below ``count``."""
    return sorted({int((i + 0.5) * (count / number)) for i in range(number)})
