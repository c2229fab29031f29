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
    r"""Scale rows and columns of :math:`e^L` towards sums of one.

    Args:
        log_matrix: :math:`L`, of shape ``(*batch, n, n)``.
        sweeps: how often rows and then columns are scaled.

    Returns:
        :math:`\log B`, of the same shape; columns sum to one.
    """
    # Afterwards all entries are at most 0 and every row and every column has a 0: no sum is empty.
    log_matrix = log_matrix - log_matrix.amax(-1, keepdim=True)
    log_matrix = log_matrix - log_matrix.amax(-2, keepdim=True)
    matrix = log_matrix.exp()
    transposed = matrix.mT.contiguous()
    columns = torch.ones_like(matrix[..., :1])
    rows = columns
    for _ in range(sweeps):
        rows = (matrix @ columns).reciprocal()
        columns = (transposed @ rows).reciprocal()
    return log_matrix + rows.log() + columns.log().mT


def propose(log_matrix: Tensor, num_elements: int, identity: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Draw permutations slot by slot, as :func:`importance` describes.

    Args:
        log_matrix: :math:`L`, of shape ``(B, n, n)``; no gradient flows.
        num_elements: :math:`K`.
        identity: of shape ``(B, K)``; where it is true, the identity stands instead of a draw.

    Returns:
        The unit of every slot, of shape ``(B, K, n)``, and the log probabilities
        :math:`\log \tau`, of shape ``(B, K)``, in double precision.

    Example:
        >>> assignments, log_proposals = propose(torch.zeros(1, 3, 3), 4)
        >>> assignments.shape, log_proposals.shape
        (torch.Size([1, 4, 3]), torch.Size([1, 4]))
    """
    with torch.no_grad():
        n = log_matrix.shape[-1]
        order, odds = _odds(log_matrix.detach().double())
        chosen, totals = _draw(odds, num_elements)
        left = torch.arange(n, 0, -1, dtype=odds.dtype, device=odds.device)[:, None, None]
        scale = 1 - UNIFORM / n
        odds_chosen = odds.squeeze(2).gather(-1, chosen)
        log_proposals = (scale * odds_chosen / totals + UNIFORM / n / left).log().sum(0)
        slots = order.T.unsqueeze(-1).expand_as(chosen)
        assignments = torch.empty_like(chosen).scatter_(0, slots, chosen).permute(1, 2, 0)
        if identity is not None:
            own, total = _odds_of_identity(order, odds)
            log_own = (scale * own / total + UNIFORM / n / left.squeeze(-1)).log().sum(0)
            assignments = torch.where(
                identity.unsqueeze(-1), torch.arange(n, device=odds.device), assignments
            )
            log_proposals = torch.where(identity, log_own.unsqueeze(-1), log_proposals)
    return assignments, log_proposals


def _odds(log_matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The order of the slots, (B, n), and in this order the odds of all units, (n, B, 1, n)."""
    balanced = sinkhorn(log_matrix).exp_().clamp_(max=1 - 1e-9)
    confidence, order = balanced.amax(-1).sort(-1, descending=True)
    odds = balanced.div_(1 - balanced)
    odds = odds.gather(-2, order.unsqueeze(-1).expand_as(odds))
    best = confidence / (1 - confidence)
    # Of units that are far from all of a slot's favourites, each stays possible.
    odds = odds.div_(best.unsqueeze(-1)).clamp_(min=1e-200)
    return order, odds.transpose(0, 1).contiguous().unsqueeze(2)


def _draw(odds: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """The units chosen and the odds of all units that were free, step by step: both of shape (n, B, K)."""
    n, batch, _, _ = odds.shape
    free = odds.new_ones(batch, num_elements, n)
    weights, cumulative = torch.empty_like(free), torch.empty_like(free)
    total = cumulative[..., -1:]
    uniforms = torch.rand_like(odds[..., :1].expand(-1, -1, num_elements, -1)).clamp_(1e-12, 1 - 1e-12)
    levels = torch.empty_like(uniforms)
    chosen = torch.empty_like(uniforms, dtype=torch.long)
    # One choice in n / UNIFORM is uniform among the free units: so rare that it isn't in every step's way.
    astray = torch.rand_like(uniforms) < UNIFORM / n
    any_astray = astray.flatten(1).any(-1).tolist()
    steps = zip(odds.unbind(), uniforms.unbind(), levels.unbind(), chosen.unbind(), strict=True)
    for step, (odds_, uniform, level, unit) in enumerate(steps):
        torch.mul(odds_, free, out=weights)
        torch.cumsum(weights, -1, out=cumulative)
        torch.mul(total, uniform, out=level)
        torch.searchsorted(cumulative, level, right=True, out=unit)
        if any_astray[step]:
            torch.cumsum(free, -1, out=cumulative)
            other = torch.searchsorted(cumulative, total * uniform, right=True)
            torch.where(astray[step], other, unit, out=unit)
        free.scatter_(-1, unit, 0.0)
    return chosen.squeeze(-1), (levels / uniforms).squeeze(-1)


def _odds_of_identity(order: Tensor, odds: Tensor) -> tuple[Tensor, Tensor]:
    """The odds of each slot's own unit, and of all that are free if all slots before got theirs: (n, B)."""
    by_step = odds.squeeze(2).gather(-1, order.expand(len(odds), -1, -1))  # units in the order of slots
    return by_step.diagonal(dim1=0, dim2=2).T, by_step.transpose(0, 1).triu().sum(-1).T


def _average(log_matrix: Tensor, num_elements: int, with_identity: bool) -> Tensor:
    draws, n, _ = log_matrix.shape
    identity = None
    if with_identity:
        identity = torch.zeros(draws, num_elements, dtype=torch.bool, device=log_matrix.device)
        identity[:, 0] = True
    assignments, log_proposals = propose(log_matrix, num_elements, identity)
    row = torch.arange(draws, device=log_matrix.device)[:, None, None]
    slot = torch.arange(n, device=log_matrix.device)
    scores = log_matrix[row, slot, assignments].sum(-1)  # shape: (P, K)
    average = (scores - log_proposals.to(scores.dtype)).logsumexp(-1)
    return average - math.log(num_elements) - math.lgamma(n + 1)
