r"""The log orbit average of a density that factorises over units, by permutations proposed slot by slot.

:math:`L_{ij} = \log q_i(\omega_j)` pairs slot :math:`i` with unit :math:`j` of a draw, which itself is the
identity assignment, and :math:`\log q^G(\omega) = \log \operatorname{perm}(e^L) - \log n!` up to what the
group does not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["importance", "importance_bracket", "importance_unbiased", "propose", "sinkhorn"]

Rest = Callable[[Tensor], Tensor]

# The share of uniform choices in one permutation: it bounds the weights, and costs as many nats.
UNIFORM = 0.01
# Sweeps of the scaling, for up to 16 units and for more.
FEW_SWEEPS, SWEEPS = 10, 30
# Smallest entry of the scaled matrix, so that its scales stay finite.
FLOOR = 1e-30
# How often the remaining rows and columns are rescaled in training.
RESCALINGS = 8


def importance(log_matrix: Tensor, num_elements: int, rest: Rest | None = None) -> Tensor:
    r"""The average over the identity and guided permutations, with which the ELBO stays a lower bound.

    With :math:`\omega \sim q`, :math:`g_0 = e` and :math:`g_1, \dots, g_{K-1} \sim \tau(\cdot \mid \omega)`,

    .. math::

        \mathbb E\left[ -\log \frac1K \sum_{k<K}
            \frac{\prod_i q_i(\omega_{g_k(i)})}{n!\, \tau(g_k \mid \omega)} \right] \le H(q^G).

    The bound holds for any equivariant proposal, :math:`\tau(g \mid h \cdot \omega) = \tau(gh \mid \omega)`:
    then the identity has the law of a draw from the posterior over the orbit, and the average is the IWHVI
    bound (proof in :func:`~pyro_sym.orbit.guided_blocks.draw_elements`). A proposal that uses the index of a
    unit would break it. A uniform :math:`\tau` gives InfoNCE.

    Here :math:`\tau` fills the slots one by one, the most confident first, with unit :math:`j` in proportion
    to :math:`B_{ij} / (1 - B_{ij})`, where :math:`B` is a scaling of :math:`e^L` towards sums of one; the
    order is by :math:`\max_j B_{ij}`, which no relabelling of units changes. After some choices the slots and
    units that are left are rescaled by one more sweep, so that a unit that only one of these slots can take
    is kept for it. Without rescaling, the last slots get units that they can't explain, and the weights
    spread over hundreds of nats; rescaled after every choice, they spread over a few at 512 units. Here it
    happens eight times, evenly spaced, at about :math:`8 K n^2` multiplications a draw; in
    :func:`importance_bracket` after every choice, at :math:`K n^3`.

    The proposal is not differentiated: the gradient is that of the weighted average at fixed permutations,
    and tends to the exact one as :math:`K` grows.

    Args:
        log_matrix: :math:`L`, of shape ``(P, n, n)``.
        num_elements: :math:`K`, the identity included.
        rest: the log of a factor of the density that is no product over units and not used in proposals: of
            assignments of shape ``(P, K, n)``, returns shape ``(P, K)``. The result is then relative to its
            value at the identity.

    Returns:
        The logarithm of the average, of shape ``(P,)``, in nats: in expectation over :math:`\omega` and the
        elements at least :math:`\log \operatorname{perm}(e^L) - \log n!`.

    Example:
        >>> separated = torch.full((1, 20, 20), -1e3).diagonal_scatter(torch.zeros(1, 20), dim1=1, dim2=2)
        >>> round(-importance(separated, 8).item(), 1), round(math.lgamma(21), 1)
        (42.3, 42.3)
    """
    return _log_mean(_log_weights(log_matrix, num_elements, rest=rest))


def importance_unbiased(log_matrix: Tensor, num_elements: int, rest: Rest | None = None) -> Tensor:
    r"""The logarithm of an unbiased estimate, of shape ``(P,)``: the proposals without the identity.

    By Jensen's inequality its expectation is at most :math:`\log \operatorname{perm}(e^L) - \log n!`. It
    would overstate an ELBO, so it is for diagnostics only. Arguments are as for
    :func:`~pyro_sym.orbit.guided_permutations.importance`.
    """
    return _log_mean(_log_weights(log_matrix, num_elements + 1, rest=rest)[:, 1:])


def importance_bracket(log_matrix: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    r"""``importance_unbiased`` and ``importance`` on shared proposals, rescaled after every choice.

    Each has :math:`K` elements and shape ``(P,)``; in expectation the first is at most, and over
    :math:`\omega` too the second at least, :math:`\log \operatorname{perm}(e^L) - \log n!`, in nats.
    """
    n = log_matrix.shape[-1]
    weights = _log_weights(log_matrix, num_elements + 1, rescalings=n)
    return _log_mean(weights[:, 1:]), _log_mean(weights[:, :-1])


def sinkhorn(log_matrix: Tensor, sweeps: int | None = None) -> Tensor:
    r"""Scale rows and columns of :math:`e^L` towards sums of one; returns :math:`\log B`, of its shape.

    By default rows and then columns are scaled 10 times up to 16 units, and 30 times above. Columns of
    :math:`B` sum to one.
    """
    if sweeps is None:
        sweeps = FEW_SWEEPS if log_matrix.shape[-1] <= 16 else SWEEPS
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


def propose(
    log_matrix: Tensor, num_elements: int, identity: Tensor | None = None, *, rescalings: int = RESCALINGS
) -> tuple[Tensor, Tensor]:
    r"""Draw permutations slot by slot, as ``importance`` describes, without gradients.

    :math:`L` has shape ``(B, n, n)``. Where ``identity``, of shape ``(B, K)``, is true, the identity replaces
    the draw. ``rescalings`` is how often the remaining matrix is rescaled. Returns the unit of every slot, of
    shape ``(B, K, n)``, and :math:`\log \tau`, of shape ``(B, K)``, in double precision.

    Example:
        >>> assignments, log_proposals = propose(torch.zeros(1, 3, 3), 4)
        >>> assignments.shape, log_proposals.shape
        (torch.Size([1, 4, 3]), torch.Size([1, 4]))
    """
    with torch.no_grad():
        n = log_matrix.shape[-1]
        balanced = sinkhorn(log_matrix.detach().double()).exp_().clamp_(min=FLOOR)
        order = balanced.amax(-1).argsort(-1, descending=True)  # shape: (B, n), slots
        rows = balanced.gather(-2, order.unsqueeze(-1).expand_as(balanced))
        given = None if identity is None else (identity, order)
        units, shares = _choose(rows, num_elements, given, stride=-(-n // rescalings))
        left = torch.arange(n, 0, -1, dtype=rows.dtype, device=rows.device)[:, None, None]
        log_proposals = ((1 - UNIFORM / n) * shares + UNIFORM / n / left).log().sum(0)
        slots = order.T.unsqueeze(-1).expand_as(units)
        return torch.empty_like(units).scatter_(0, slots, units).permute(1, 2, 0), log_proposals


def _choose(
    rows: Tensor, num_elements: int, given: tuple[Tensor, Tensor] | None, stride: int
) -> tuple[Tensor, Tensor]:
    """The units of slots in their order, and the share of their odds among the units left: both (n, B, K).

    ``rows``, of shape (B, n, n), is the scaled matrix, one row a slot. The inner loop uses few operations, as
    with few units the overhead of each is most of the time.
    """
    batch, n, _ = rows.shape
    free = rows.new_ones(batch, num_elements, n)
    scales = free.clone()  # of the columns, after those of the scaled matrix
    weights, cumulative = torch.empty_like(free), torch.empty_like(free)
    total = cumulative[..., -1:]
    uniforms = rows.new_empty(n, batch, num_elements, 1).uniform_(1e-12, 1 - 1e-12)
    levels, units = torch.empty_like(uniforms), torch.empty_like(uniforms, dtype=torch.long)
    # One choice in n / UNIFORM is uniform among the units left; most steps have none and skip the work.
    astray = torch.rand_like(uniforms) < UNIFORM / n
    any_astray = astray.flatten(1).any(-1).tolist()
    shares = []
    for start in range(0, n, stride):
        block = slice(start, start + stride)
        odds = _odds(rows[:, block], scales)
        steps = zip(odds, uniforms[block], levels[block], units[block], strict=True)
        for step, (odds_, uniform, level, unit) in enumerate(steps, start):
            torch.mul(odds_, free, out=weights)
            torch.cumsum(weights, -1, out=cumulative)
            torch.mul(total, uniform, out=level)
            torch.searchsorted(cumulative, level, right=True, out=unit)
            if any_astray[step]:
                ranks = free.cumsum(-1)
                other = torch.searchsorted(ranks, ranks[..., -1:] * uniform, right=True)
                torch.where(astray[step], other, unit, out=unit)
            if given is not None:
                identity, order = given
                torch.where(identity.unsqueeze(-1), order[:, step, None, None], unit, out=unit)
            free.scatter_(-1, unit, 0.0)
        shares.append(odds.gather(-1, units[block]) * uniforms[block] / levels[block])
        if start + stride < n:
            scales = _rescale(rows[:, start + stride :], scales * free, free)
    return units.squeeze(-1), torch.cat(shares).squeeze(-1)


def _odds(rows: Tensor, scales: Tensor) -> Tensor:
    """The odds B / (1 - B) of the next slots, (s, B, K, n), with their rows scaled to sums of one."""
    balanced = rows.transpose(0, 1).unsqueeze(2) * scales
    balanced /= balanced.sum(-1, keepdim=True)
    return balanced.div_((1 - balanced).clamp_(min=1e-9))


def _rescale(left: Tensor, scales: Tensor, free: Tensor) -> Tensor:
    """One sweep over the rows left, (B, r, n), and the columns that are free, (B, K, n)."""
    return free / ((scales @ left.mT).reciprocal_() @ left)


def _log_mean(log_weights: Tensor) -> Tensor:
    return log_weights.logsumexp(-1) - math.log(log_weights.shape[-1])


def _log_weights(
    log_matrix: Tensor, num_elements: int, rescalings: int = RESCALINGS, rest: Rest | None = None
) -> Tensor:
    """The log weights of the identity and of proposed permutations, of shape (P, K)."""
    draws, n, _ = log_matrix.shape
    identity = torch.zeros(draws, num_elements, dtype=torch.bool, device=log_matrix.device)
    identity[:, 0] = True
    assignments, log_proposals = propose(log_matrix, num_elements, identity, rescalings=rescalings)
    row = torch.arange(draws, device=log_matrix.device)[:, None, None]
    slot = torch.arange(n, device=log_matrix.device)
    scores = log_matrix[row, slot, assignments].sum(-1)
    if rest is not None:
        factors = rest(assignments)
        scores = scores + factors - factors[:, :1]
    return (scores.double() - log_proposals - math.lgamma(n + 1)).to(scores.dtype)
