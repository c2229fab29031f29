r"""The log orbit average of a unit-factorised density, by permutations proposed slot by slot with look-ahead.

:math:`L_{ij} = \log q_i(\omega_j)` pairs slot :math:`i` with unit :math:`j` of a draw, which itself is the
identity assignment, and :math:`\log q^G(\omega) = \log \operatorname{perm}(e^L) - \log n!` up to what the
group does not move.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["importance", "importance_bracket", "importance_unbiased", "sinkhorn"]

# Mixed into the choices of one permutation, all together: it bounds the weights, at a cost of as many nats.
UNIFORM = 0.01
SWEEPS = 30
# Less than this is not told apart in the scaled matrix that proposes, so that its scales stay finite.
FLOOR = 1e-30


def importance(log_matrix: Tensor, num_elements: int) -> Tensor:
    r"""Guided permutations beside the identity, for which the ELBO stays a lower bound.

    With :math:`\omega \sim q`, :math:`g_0 = e` and :math:`g_1, \dots, g_{K-1} \sim \tau(\cdot \mid \omega)`,

    .. math::

        \mathbb E\left[ -\log \frac1K \sum_{k<K}
            \frac{\prod_i q_i(\omega_{g_k(i)})}{n!\, \tau(g_k \mid \omega)} \right] \le H(q^G).

    The bound holds for any proposal that does not know which relabelling of the orbit it was given:
    :math:`\tau(g \mid h \cdot \omega) = \tau(hg \mid \omega)`. Then the pair of orbit and generating element
    is as if the element had been drawn from the posterior over the orbit, and the average with it among the
    others is the IWHVI bound. A proposal that looked at the index of a unit would break it. A uniform
    :math:`\tau` gives InfoNCE.

    Here :math:`\tau` fills the slots one by one, the most confident first, with unit :math:`j` in proportion
    to :math:`B_{ij} / (1 - B_{ij})`, where :math:`B` is a scaling of :math:`e^L` towards sums of one; the
    order is by :math:`\max_j B_{ij}`, which no relabelling of units changes. Every choice is followed by one
    more sweep of the scaling over the slots and units that are left: a unit that only one of these slots can
    take is kept for it. Without that, the last slots are left with units that they can't explain, and the
    weights spread over hundreds of nats; with it, they spread over a few at 512 units.

    The proposal is not differentiated: the gradient is that of the weighted average at fixed proposals and
    tends to the exact one as :math:`K` grows. The cost is :math:`K n^3` multiplications a draw, as products
    of matrices.

    Args:
        log_matrix: :math:`L`, of shape ``(P, n, n)``.
        num_elements: :math:`K`, the identity included.

    Returns:
        The logarithm of the average, of shape ``(P,)``, in nats: in expectation over :math:`\omega` and the
        elements at least :math:`\log \operatorname{perm}(e^L) - \log n!`.

    Example:
        >>> separated = torch.full((1, 20, 20), -1e3).diagonal_scatter(torch.zeros(1, 20), dim1=1, dim2=2)
        >>> round(-importance(separated, 8).item(), 1), round(math.lgamma(21), 1)
        (42.3, 42.3)

    References:
        Sobolev and Vetrov 2019, arXiv 1905.03290, for the bound; Sinkhorn-scaled sequential sampling of
        permanents goes back to Beichl and Sullivan 1999.
    """
    return _log_mean(_log_weights(log_matrix, num_elements, with_identity=True))


def importance_unbiased(log_matrix: Tensor, num_elements: int) -> Tensor:
    r"""The logarithm of an unbiased estimate of the orbit average: the proposals without the identity.

    By Jensen's inequality its expectation is at most :math:`\log \operatorname{perm}(e^L) - \log n!`. It
    bounds the gain from above and would overstate an ELBO: it is for diagnostics only.

    Args:
        log_matrix: :math:`L`, of shape ``(P, n, n)``.
        num_elements: :math:`K`.

    Returns:
        The logarithm of the estimate, of shape ``(P,)``, in nats.
    """
    return _log_mean(_log_weights(log_matrix, num_elements, with_identity=False))


def importance_bracket(log_matrix: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    r"""Both halves at the price of one: :func:`importance_unbiased` and :func:`importance` share proposals.

    Args:
        log_matrix: :math:`L`, of shape ``(P, n, n)``.
        num_elements: :math:`K`, of either half.

    Returns:
        In expectation at most, and in expectation over :math:`\omega` too at least,
        :math:`\log \operatorname{perm}(e^L) - \log n!`; each of shape ``(P,)``, in nats.

    Example:
        >>> lower, upper = importance_bracket(torch.zeros(1, 5, 5), 8)
        >>> torch.allclose(lower, torch.zeros(1)) and torch.allclose(upper, torch.zeros(1))
        True
    """
    weights = _log_weights(log_matrix, num_elements + 1, with_identity=True)
    return _log_mean(weights[:, 1:]), _log_mean(weights[:, :-1])


def sinkhorn(log_matrix: Tensor, sweeps: int = SWEEPS) -> Tensor:
    r"""Scale rows and columns of :math:`e^L` towards sums of one, in log space.

    Args:
        log_matrix: :math:`L`, of shape ``(*batch, n, n)``.
        sweeps: how often rows and then columns are scaled.

    Returns:
        :math:`\log B`, of the same shape; columns sum to one.
    """
    for _ in range(sweeps):
        log_matrix = log_matrix - log_matrix.logsumexp(-1, keepdim=True)
        log_matrix = log_matrix - log_matrix.logsumexp(-2, keepdim=True)
    return log_matrix


def _log_mean(log_weights: Tensor) -> Tensor:
    return log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])


def _log_weights(log_matrix: Tensor, num_elements: int, with_identity: bool) -> Tensor:
    """Of shape (P, K): what each proposed permutation says the orbit average is."""
    draws, n, _ = log_matrix.shape
    with torch.no_grad():
        assignments, log_proposals = _propose(log_matrix.detach().double(), num_elements, with_identity)
    row = torch.arange(draws, device=log_matrix.device)[:, None, None]
    slot = torch.arange(n, device=log_matrix.device)
    scores = log_matrix[row, slot, assignments].sum(-1)
    return scores - log_proposals.to(scores.dtype) - math.lgamma(n + 1)


def _propose(log_matrix: Tensor, num_elements: int, with_identity: bool) -> tuple[Tensor, Tensor]:
    """Units by slot, (P, K, n), and their log probabilities, (P, K); the identity may be the first."""
    draws, n, _ = log_matrix.shape
    balanced = sinkhorn(log_matrix).exp()
    order = balanced.amax(-1).argsort(-1, descending=True)  # shape: (P, n), slots
    rows = balanced.gather(-2, order.unsqueeze(-1).expand_as(balanced)).clamp_min(FLOOR)
    free = log_matrix.new_ones(draws, num_elements, n)
    scales = free.clone()  # of the columns, after those of balanced; zero where a unit is taken
    assignments = torch.empty(draws, num_elements, n, dtype=torch.long, device=log_matrix.device)
    log_proposals = log_matrix.new_zeros(draws, num_elements)
    uniforms = torch.rand(n, draws, num_elements, 1, dtype=log_matrix.dtype, device=log_matrix.device)
    for step in range(n):
        slot = order[:, step]
        weights = rows[:, step].unsqueeze(1) * scales
        weights /= weights.sum(-1, keepdim=True)
        weights /= (1 - weights).clamp_min(1e-9)
        weights /= weights.sum(-1, keepdim=True)
        cumulative = weights.mul_(1 - UNIFORM / n).add_(free, alpha=UNIFORM / n / (n - step)).cumsum(-1)
        total = cumulative[..., -1:]
        unit = (cumulative <= uniforms[step] * total).sum(-1)  # shape: (P, K)
        if with_identity:
            unit[:, 0] = slot
        chosen = unit.unsqueeze(-1)
        log_proposals += (weights.gather(-1, chosen) / total).squeeze(-1).log()
        assignments.scatter_(-1, slot[:, None, None].expand(-1, num_elements, 1), chosen)
        free.scatter_(-1, chosen, 0.0)
        if step < n - 1:
            scales = _rescale(rows[:, step + 1 :], scales.scatter_(-1, chosen, 0.0), free)
    return assignments, log_proposals


def _rescale(left: Tensor, scales: Tensor, free: Tensor) -> Tensor:
    """One sweep over the rows left, (P, r, n), and the columns that are free, (P, K, n)."""
    return free / ((scales @ left.mT).reciprocal_() @ left)
