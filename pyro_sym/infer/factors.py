"""Guides written by hand whose density factorises over units: the matrix from their distributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Dirichlet, Independent, constraints

from pyro_sym.infer.capture import Draws
from pyro_sym.infer.units import log_ratios, signed_axes
from pyro_sym.orbit.exact import LogProb
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation

__all__ = ["PairFactors", "factorises", "pair_factors"]

# Images of each draw at which the density is compared.
NUM_IMAGES = 4


@dataclass(frozen=True)
class PairFactors:
    """Pairs slots and units by what the guide drew its sites from.

    Attributes:
        axes: by moved site.
        signed: whether a sign rides on each unit.
    """

    axes: Mapping[str, int]
    signed: bool

    def __call__(self, draws: Draws) -> Tensor:
        """The matrix."""
        return log_ratios(self.pairs(draws), self.pairs(draws, sign=-1) if self.signed else None)

    def pairs(self, draws: Draws, sign: int = 1) -> Tensor:
        """The log density of every unit in every slot but for a constant, of shape (P, n, n)."""
        total: Any = 0.0
        for site, axis in self.axes.items():
            total = total + _pairs(_base(draws.fns[site]), axis, sign * draws.values[site])
        return total


def pair_factors(symmetry: Symmetry, draws: Draws) -> PairFactors | None:
    r"""The function of draws that pairs slots and units of a guide written by hand, by its distributions.

    Sites whose units lie along a batch axis of their distributions are independent from unit to unit; on the
    axis of a simplex itself, :math:`\operatorname{Dirichlet}(\alpha)` pairs slot :math:`i` with unit
    :math:`j` by :math:`(\alpha_i - 1) \log \omega_j`, up to what no permutation changes. The rest is as for
    :func:`~pyro_sym.infer.units.pair_normals`. That the distributions do not depend on other sites is not
    seen here: :func:`factorises` compares.

    Args:
        symmetry: the group: one permutation, with or without a sign a unit.
        draws: draws of the guide, with the distributions.

    Returns:
        ``None``, or a function of draws that returns :math:`L`, of shape ``(P, n, n)``, in nats; gradients
        flow to values and parameters.
    """
    found = signed_axes(symmetry)
    if found is None:
        return None
    axes, signed = found
    for site, axis in axes.items():
        base = _base(draws.fns[site])
        by_unit = -axis > len(base.event_shape) and not isinstance(base, dist.Delta)
        if not (by_unit or (isinstance(base, Dirichlet) and axis == -1)):
            return None
        if signed and not (by_unit and _is_real(base.support)):
            return None
    return PairFactors(axes, signed)


@torch.no_grad()
def factorises(pairs: PairFactors, draws: Draws, density: LogProb) -> bool:
    """Whether the matrix tells the density at images of draws, those of one call with the fns of another.

    Args:
        pairs: from :func:`pair_factors`.
        draws: several independent draws.
        density: the log density of the guide.

    Returns:
        Whether they agree at random relabellings and, with signs, at the draws with all signs flipped.
    """
    permutation = Permutation({**pairs.axes})
    values = draws.values
    own, matrix = density(values), pairs.pairs(draws)
    units = permutation.sample(values, (NUM_IMAGES, len(own)))
    repeated = {site: value.expand(NUM_IMAGES, *value.shape) for site, value in values.items()}
    actual = density(permutation.act(units, repeated)) - own
    told = matrix.expand(NUM_IMAGES, *matrix.shape).gather(-1, units.unsqueeze(-1)).sum((-2, -1))
    claims = [(told - _trace(matrix), actual)]
    if pairs.signed:
        negated = {site: -value if site in pairs.axes else value for site, value in values.items()}
        claims.append((_trace(pairs.pairs(draws, sign=-1)) - _trace(matrix), density(negated) - own))
    return all(_agree(told, actual, own) for told, actual in claims)


def _agree(told: Tensor, actual: Tensor, own: Tensor) -> bool:
    """Up to the square root of the rounding errors."""
    precision = torch.finfo(own.dtype).eps ** 0.5
    return torch.allclose(told, actual, rtol=precision, atol=precision * float(1 + own.abs().max()))


def _base(fn: Any) -> Any:
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def _is_real(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def _trace(pairs: Tensor) -> Tensor:
    return pairs.diagonal(dim1=-2, dim2=-1).sum(-1)


def _pairs(base: Any, axis: int, value: Tensor) -> Tensor:
    """Log density of unit j in slot i of one site, values of shape (P, *native)."""
    event = len(base.event_shape)
    if -axis <= event:  # on the simplex
        terms = torch.xlogy((base.concentration - 1).unsqueeze(-1), value.unsqueeze(-2))
        return terms.flatten(1, -3).sum(1) if terms.dim() > 3 else terms
    n = value.shape[axis]
    everywhere = value.movedim(axis, 0).unsqueeze(axis)  # shape: (n, P, ...), unit j in any slot
    shape = list(everywhere.shape)
    shape[axis] = n
    terms = base.log_prob(everywhere.expand(shape)).movedim(axis + event, 2)  # shape: (n, P, n, ...)
    return (terms.flatten(3).sum(-1) if terms.dim() > 3 else terms).permute(1, 2, 0)
