r"""Bounds of the log permanent from doubly stochastic matrices: deterministic, for every single matrix.

With :math:`A = e^L` and :math:`P` doubly stochastic, the fractional free energies are

.. math::

    F_\gamma(P) = \sum_{ij} P_{ij} L_{ij} - P_{ij} \log P_{ij} - \gamma (1 - P_{ij}) \log (1 - P_{ij}),
    \qquad \log Z_\gamma = \max_P F_\gamma(P),

the capacity for :math:`\gamma = 0`, the Bethe permanent for :math:`-1`, and between them they sandwich

.. math::

    \log Z_{-1} \le \log \operatorname{perm} A \le
    \min\bigl(\log Z_{-1} + \tfrac n2 \log 2,\; \log Z_{-1/2},\; \log Z_0\bigr), \qquad
    \log Z_0 + \log \tfrac{n!}{n^n} \le \log \operatorname{perm} A.

All bounds hold before the solver has converged. A lower bound is :math:`F` at any doubly stochastic
:math:`P`, to which the solver's is rounded. An upper bound is the Lagrangian dual in the column sums at the
solver's scales :math:`v`,

.. math::

    \log Z_\gamma \le \sum_i \max_{p \in \Delta} \bigl[ \langle p, L_i + v \rangle + h_\gamma(p) \bigr]
    - \sum_j v_j,

where :math:`h_\gamma(p)`, the terms of one row without :math:`L`, is concave on the simplex :math:`\Delta`,
and the tangent at any :math:`p` bounds its row's maximum.

All functions take :math:`L` of shape ``(*batch, n, n)`` and the largest number of sweeps of the solver (fewer
loosen the bound), and return the bound in nats, of shape ``batch``. Gradients are those of the envelope
theorem, :math:`\partial / \partial L_{ij} = P_{ij}`; nothing is differentiated through the solver.

References:
    Chertkov and Yedidia 2013, JMLR 14, for the family; Gurvits 2011, arXiv 1106.2844, for the Bethe lower
    bound; Anari and Rezaei 2018, arXiv 1811.02933, for the upper bounds; Vontobel 2013, arXiv 1107.4196, for
    concavity; the capacity's lower bound is van der Waerden's conjecture, proved by Egorychev and Falikman.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["bethe_lower", "bethe_upper", "capacity_lower", "capacity_upper", "fractional_upper"]

SWEEPS = 100
TOLERANCE = 1e-10
FAR = 1e5  # nats; a probability this close to one is one


def capacity_lower(log_matrix: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    r"""A lower bound of the log permanent, van der Waerden's: :math:`F_0(P) + \log(n! / n^n)`."""
    n = log_matrix.shape[-1]
    return _primal(log_matrix, 0.0, sweeps) + math.lgamma(n + 1) - n * math.log(n)


def capacity_upper(log_matrix: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    r"""An upper bound of the log permanent, the capacity; exact for well separated units.

    .. math::

        \log Z_0 = \min_v \sum_i \log \sum_j e^{L_{ij} + v_j} - \sum_j v_j
    """
    return _dual(log_matrix, 0.0, sweeps)


def bethe_lower(log_matrix: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    """A lower bound of shape ``batch``: :math:`F_{-1}(P)`, the Bethe permanent once converged.

    It is minus infinity if a row or column has no weight.
    """
    return _primal(log_matrix, -1.0, sweeps)


def bethe_upper(log_matrix: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    r"""An upper bound of the log permanent: the Bethe permanent's bound plus :math:`\tfrac n2 \log 2`."""
    return _dual(log_matrix, -1.0, sweeps) + 0.5 * log_matrix.shape[-1] * math.log(2.0)


def fractional_upper(log_matrix: Tensor, *, sweeps: int = SWEEPS) -> Tensor:
    r"""An upper bound of the log permanent: :math:`\log Z_{-1/2}`, exact for blocks of two equal units."""
    return _dual(log_matrix, -0.5, sweeps)


def _primal(log_matrix: Tensor, gamma: float, sweeps: int) -> Tensor:
    """F at a doubly stochastic matrix near its maximum, of shape ``batch``."""
    with torch.no_grad():
        exact = log_matrix.detach().double()
        log_p, _ = _solve(exact, gamma, sweeps)
        p = _doubly_stochastic(log_p.exp())
        entropy = torch.special.entr(p) + gamma * torch.special.entr(1 - p)
        linear = torch.where(p > 0, p * exact, 0.0)
        value = (linear + entropy).sum((-2, -1))
        value = torch.where(value.isnan(), -torch.inf, value)  # a row or column without weight
    return _with_gradient(value, p, log_matrix)


def _dual(log_matrix: Tensor, gamma: float, sweeps: int) -> Tensor:
    """The Lagrangian dual, from tangents at the solver's rows, of shape ``batch``."""
    with torch.no_grad():
        log_p, value = _solve(log_matrix.detach().double(), gamma, sweeps)
    return _with_gradient(value, log_p.exp(), log_matrix)


def _with_gradient(value: Tensor, p: Tensor, log_matrix: Tensor) -> Tensor:
    """The value, with P as its gradient."""
    if not log_matrix.requires_grad:
        return value.to(log_matrix.dtype)
    change = torch.where(p > 0, log_matrix - log_matrix.detach(), 0.0)
    return value.to(log_matrix.dtype) + (p.to(log_matrix.dtype) * change).sum((-2, -1))


def _solve(log_matrix: Tensor, gamma: float, sweeps: int) -> tuple[Tensor, Tensor]:
    r"""Concave-convex Sinkhorn: P scales :math:`A (1 - P)^\gamma`, with the second factor of the last sweep.

    Returns log P, whose rows sum to one, and the smallest dual value of all sweeps. With column scales v and
    :math:`\log p_{ij} = L_{ij} + \gamma \ell_{ij} + v_j - \lambda_i`, the tangents at :math:`p` give

    .. math::

        \sum_i \Bigl[ \lambda_i - \gamma \sum_j \log(1 - p_{ij})
        + \max_j \gamma \bigl( \log(1 - p_{ij}) - \ell_{ij} \bigr) \Bigr] - \sum_j v_j .
    """
    lagging = torch.zeros_like(log_matrix)  # log(1 - P) of the last sweep, (*batch, n, n)
    columns = log_matrix.new_zeros(*log_matrix.shape[:-2], 1, log_matrix.shape[-1])
    best = log_matrix.new_full(log_matrix.shape[:-2], torch.inf)
    for _ in range(sweeps):
        weights = log_matrix + gamma * lagging
        rows = (weights + columns).logsumexp(-1, keepdim=True)  # (*batch, n, 1)
        log_p = weights + columns - rows
        rest = _log_rest(log_p) if gamma else lagging
        slack = gamma * (rest - lagging)
        dual = (rows.squeeze(-1) - gamma * rest.sum(-1) + slack.amax(-1)).sum(-1) - columns.sum((-2, -1))
        best = torch.fmin(best, dual)
        sums = log_p.logsumexp(-2, keepdim=True)
        if float(sums.abs().max() + slack.abs().max()) < TOLERANCE:
            break
        columns = columns - sums
        lagging = rest
    return log_p, best


def _log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) of rows that sum to one, for the largest p as the sum of the others: nothing cancels."""
    top = log_p.argmax(-1, keepdim=True)
    others = log_p.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True).clamp_min(-FAR)
    return torch.log1p(-log_p.exp().clamp(max=0.75)).scatter(-1, top, others)


def _doubly_stochastic(p: Tensor) -> Tensor:
    """A doubly stochastic matrix near p: scale down sums above one, then add what is missing."""
    p = p / p.sum(-1, keepdim=True).clamp_min(1.0)
    p = p / p.sum(-2, keepdim=True).clamp_min(1.0)
    rows = (1 - p.sum(-1, keepdim=True)).clamp_min(0.0)
    columns = (1 - p.sum(-2, keepdim=True)).clamp_min(0.0)
    return (p + rows * columns / rows.sum(-2, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
