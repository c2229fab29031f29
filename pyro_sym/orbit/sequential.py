r"""The log orbit average of a unit-factorised density, by permutations proposed slot by slot.

:math:`L_{ij} = \log q_i(\omega_j)` pairs slot :math:`i` with unit :math:`j` of a draw, which itself is the
identity assignment, and :math:`\log q^G(\omega) = \log \operatorname{perm}(e^L) - \log n!` up to what the
group does not move.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["importance", "importance_unbiased", "propose", "sinkhorn"]

# Mixed into the choices of one permutation, all together: it bounds the weights, at a cost of as many nats.
UNIFORM = 0.01
SWEEPS = 30


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
    to :math:`B_{ij} / (1 - B_{ij})` among the units left, where :math:`B` is the Sinkhorn scaling of
    :math:`e^L`; the order is by :math:`\max_j B_{ij}`, which no relabelling of units changes. The proposal is
    not differentiated: the gradient is that of the weighted average at fixed proposals and tends to the exact
    one as :math:`K` grows.

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
    return _average(log_matrix, num_elements, with_identity=True)


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
    return _average(log_matrix, num_elements, with_identity=False)


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


def _average(log_matrix: Tensor, num_elements: int, with_identity: bool) -> Tensor:
    draws, n, _ = log_matrix.shape
    identity = torch.zeros(draws, num_elements, dtype=torch.bool, device=log_matrix.device)
    identity[:, 0] = with_identity
    with torch.no_grad():
        assignments, log_proposals = propose(log_matrix.detach().double(), num_elements, identity)
    row = torch.arange(draws, device=log_matrix.device)[:, None, None]
    slot = torch.arange(n, device=log_matrix.device)
    scores = log_matrix[row, slot, assignments].sum(-1)  # shape: (P, K)
    average = (scores - log_proposals.to(scores.dtype)).logsumexp(-1)
    return average - math.log(num_elements) - math.lgamma(n + 1)


def propose(log_matrix: Tensor, num_elements: int, identity: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Draw permutations slot by slot, as :func:`importance` says.

    Args:
        log_matrix: :math:`L`, of shape ``(B, n, n)``.
        num_elements: :math:`K`.
        identity: of shape ``(B, K)``, where to take the identity instead of a draw.

    Returns:
        Units by slot, of shape ``(B, K, n)``, and their log probabilities :math:`\log \tau`, of shape
        ``(B, K)``.
    """
    draws, n, _ = log_matrix.shape
    balanced = sinkhorn(log_matrix).exp().clamp(max=1 - 1e-9)
    odds = balanced / (1 - balanced)
    odds = odds / odds.amax(-1, keepdim=True)
    order = balanced.amax(-1).argsort(-1, descending=True)  # shape: (P, n), slots
    every = torch.arange(draws, device=log_matrix.device)
    free = log_matrix.new_ones(draws, num_elements, n)
    assignments = torch.empty(draws, num_elements, n, dtype=torch.long, device=log_matrix.device)
    log_proposals = log_matrix.new_zeros(draws, num_elements)
    uniforms = torch.rand(n, draws, num_elements, 1, dtype=log_matrix.dtype, device=log_matrix.device)
    for step in range(n):
        slot = order[:, step]
        weights = odds[every, slot].unsqueeze(1) * free
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-280)
        cumulative = weights.mul_(1 - UNIFORM / n).add_(free, alpha=UNIFORM / n / (n - step)).cumsum(-1)
        total = cumulative[..., -1:]
        unit = (cumulative <= uniforms[step] * total).sum(-1)  # shape: (P, K)
        if identity is not None:
            unit = torch.where(identity, slot.unsqueeze(-1), unit)
        chosen = unit.unsqueeze(-1)
        log_proposals += (weights.gather(-1, chosen) / total).squeeze(-1).log()
        free.scatter_(-1, chosen, 0.0)
        assignments.scatter_(-1, slot[:, None, None].expand(-1, num_elements, 1), chosen)
    return assignments, log_proposals
