"""The matrix that pairs slots with units, for guides written by hand, from their distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Dirichlet

from pyro_sym.guides.capture import Draws
from pyro_sym.guides.unit_pairs import UnitAxes, log_ratios, signed_axes
from pyro_sym.orbit.enumeration import LogProb
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation
from pyro_sym.unwrap import is_real, without_event_dims

__all__ = ["PairFactors", "factorises", "pair_factors"]

# The density is compared at this many images of each draw.
NUM_IMAGES = 4


@dataclass(frozen=True)
class PairFactors:
    """The matrix that pairs slots with units, by the distributions that the guide drew from."""

    units: UnitAxes

    def __call__(self, draws: Draws) -> Tensor:
        """The matrix."""
        return log_ratios(self.pairs(draws), self.pairs(draws, sign=-1) if self.units.signed else None)

    def pairs(self, draws: Draws, sign: int = 1) -> Tensor:
        """The log density of every unit in every slot up to a constant, of shape (P, n, n)."""
        total: Any = 0.0
        for site, axis in self.units.axes.items():
            shape = self.units.view.shapes.get(site, ())
            total = total + _pairs(
                without_event_dims(draws.fns[site]), axis, shape, sign * draws.values[site]
            )
        return total


def pair_factors(symmetry: Symmetry, draws: Draws) -> PairFactors | None:
    r"""The function of draws that pairs slots and units of a guide written by hand, by its distributions.

    Sites whose units lie along a batch axis of their distributions are independent from unit to unit; on the
    axis of a simplex itself, :math:`\operatorname{Dirichlet}(\alpha)` pairs slot :math:`i` with unit
    :math:`j` by :math:`(\alpha_i - 1) \log \omega_j`, up to what no permutation changes. The rest is as for
    :func:`~pyro_sym.guides.unit_pairs.pair_normals`. Whether the distributions depend on other sites is
    checked by :func:`factorises`.
    """
    units = signed_axes(symmetry)
    if units is None:
        return None
    for site, (native,) in units.view.axes.items():
        base, axis = without_event_dims(draws.fns[site]), units.axes[site]
        by_unit = -native > len(base.event_shape) and not isinstance(base, dist.Delta)
        if not (by_unit or (isinstance(base, Dirichlet) and axis == -1 and site not in units.view.shapes)):
            return None
        if units.signed and not (by_unit and is_real(base.support)):
            return None
    return PairFactors(units)


@torch.no_grad()
def factorises(pairs: PairFactors, draws: Draws, density: LogProb) -> bool:
    """Whether the matrix predicts the density at random relabellings of draws and, with signs, at ``-draws``.

    The draws come from several calls, so values of one call meet the distributions of another.
    """
    units = pairs.units
    permutation = units.view.on(Permutation({**units.axes}))
    values = draws.values
    own, matrix = density(values), pairs.pairs(draws)
    labels = permutation.sample(values, (NUM_IMAGES, len(own)))
    repeated = {site: value.expand(NUM_IMAGES, *value.shape) for site, value in values.items()}
    actual = density(permutation.act(labels, repeated)) - own
    told = matrix.expand(NUM_IMAGES, *matrix.shape).gather(-1, labels.unsqueeze(-1)).sum((-2, -1))
    claims = [(told - _trace(matrix), actual)]
    if units.signed:
        negated = {site: -value if site in units.axes else value for site, value in values.items()}
        claims.append((_trace(pairs.pairs(draws, sign=-1)) - _trace(matrix), density(negated) - own))
    return all(_agree(told, actual, own) for told, actual in claims)


def _agree(told: Tensor, actual: Tensor, own: Tensor) -> bool:
    """Whether two log densities agree up to the square root of the rounding errors."""
    precision = torch.finfo(own.dtype).eps ** 0.5
    return torch.allclose(told, actual, rtol=precision, atol=precision * float(1 + own.abs().max()))


def _trace(pairs: Tensor) -> Tensor:
    return pairs.diagonal(dim1=-2, dim2=-1).sum(-1)


def _pairs(base: Any, axis: int, shape: Sequence[tuple[int, ...]], value: Tensor) -> Tensor:
    """Log density of unit j in slot i of one site, (P, n, n), for values of shape (P, *native)."""
    event = len(base.event_shape)
    if -axis <= event and not shape:  # on the simplex
        terms = torch.xlogy((base.concentration - 1).unsqueeze(-1), value.unsqueeze(-2))
        return terms.flatten(1, -3).sum(1) if terms.dim() > 3 else terms
    viewed = _factored(value, shape)
    n = viewed.shape[axis]
    everywhere = viewed.movedim(axis, 0).unsqueeze(axis)  # shape: (n, P, ...), unit j in any slot
    terms = base.log_prob(everywhere.expand(n, *viewed.shape).reshape(n, *value.shape))
    batch, of_event = shape[: len(shape) - event], shape[max(len(shape) - event, 0) :]
    slots = axis + event + sum(len(factors) - 1 for factors in of_event)
    terms = _factored(terms, batch).movedim(slots, 2)  # shape: (n, P, n, ...)
    return (terms.flatten(3).sum(-1) if terms.dim() > 3 else terms).permute(1, 2, 0)


def _factored(tensor: Tensor, shape: Sequence[tuple[int, ...]]) -> Tensor:
    """Split the last dims into factors."""
    sizes = (size for factors in shape for size in factors)
    return tensor.reshape(*tensor.shape[: tensor.dim() - len(shape)], *sizes)
