r"""The permanent of a positive matrix, in log space.

For a density that factorises over units, the sum over all relabellings is the permanent of the matrix that
pairs every slot with every unit (:mod:`pyro_sym.guides.site_normals`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, permutations
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper

__all__ = ["MAX_SIZE", "log_permanent"]

MAX_SIZE = 14
FEW = 5  # up to here it is faster to list the permutations
# Larger batches are split into chunks of this many steps of the dynamic programme.
CHUNK_STEPS = 2**23

Method = Literal[
    "exact", "bethe_lower", "capacity_lower", "bethe_upper", "capacity_upper", "fractional_upper"
]
BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "bethe_lower": bethe_lower,
    "capacity_lower": capacity_lower,
    "bethe_upper": bethe_upper,
    "capacity_upper": capacity_upper,
    "fractional_upper": fractional_upper,
}


def log_permanent(log_matrix: Tensor, *, max_size: int = MAX_SIZE, method: Method = "exact") -> Tensor:
    r"""The log permanent of matrices ``(*batch, n, n)``, of shape ``batch``: exactly, or a bound at any size.

    With :math:`A = e^L`, a dynamic programme over subsets :math:`S` of columns,

    .. math::

        \operatorname{perm}(A) = \sum_\pi \prod_i A_{i \pi(i)} = P(\{1, \dots, n\}), \qquad
        P(\emptyset) = 1, \quad P(S) = \sum_{j \in S} A_{|S| j}\, P(S \setminus j),

    takes :math:`n 2^{n-1}` steps; up to five units, the permutations are listed. As all steps add positive
    numbers, no digits are lost. The derivative in :math:`L_{ij}` is the probability that slot :math:`i` holds
    unit :math:`j`. Large batches are split into chunks, which the backward pass recomputes: memory stays at
    some hundred MiB. The other methods take :math:`n^2` steps a sweep (:mod:`pyro_sym.orbit.bounds`).

    Entries of minus infinity are zeros of :math:`A`; the result is minus infinity if no permutation has
    weight. ``max_size`` is the largest :math:`n` that ``"exact"`` accepts: each further unit doubles time and
    memory.

    Example:
        >>> log_permanent(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).log()).exp()
        tensor(10.)
    """
    n = log_matrix.shape[-1]
    if log_matrix.dim() < 2 or log_matrix.shape[-2] != n:
        raise ValueError(f"log_matrix has shape {tuple(log_matrix.shape)}; a permanent is of square matrices")
    if method in BOUNDS:
        return BOUNDS[method](log_matrix)
    if method != "exact":
        raise ValueError(f"method={method!r} is none of {get_args(Method)}")
    if n > max_size:
        raise ValueError(
            f"the exact permanent of {n} units takes {n} * 2**{n - 1} steps; pass max_size={n}, or use the "
            "importance estimator, or a method that bounds it"
        )
    chunks = log_matrix.reshape(-1, n, n).split(max(1, CHUNK_STEPS // (n * 2**n)))
    if len(chunks) == 1:
        return _by_subsets(log_matrix)
    values = [_recomputed(chunk) if chunk.requires_grad else _by_subsets(chunk) for chunk in chunks]
    return torch.cat(values).reshape(log_matrix.shape[:-2])


def _recomputed(log_matrix: Tensor) -> Tensor:
    """The dynamic programme, recomputed in the backward pass."""
    from torch.utils.checkpoint import checkpoint  # with old torch its import adds a warnings filter

    return checkpoint(_by_subsets, log_matrix, use_reentrant=False, preserve_rng_state=False)


def _by_subsets(log_matrix: Tensor) -> Tensor:
    """The dynamic programme, or the list of all permutations where they are few."""
    n = log_matrix.shape[-1]
    # Finite instead of log 0, so that no gradient is infinity minus infinity.
    floor = torch.finfo(log_matrix.dtype).min / (4 * n + 4)
    safe = log_matrix.clamp(min=floor)
    if n <= FEW:
        result = safe.flatten(-2)[..., _permutations(n).to(safe.device)].sum(-1).logsumexp(-1)
    else:
        layer = log_matrix.new_zeros(*log_matrix.shape[:-2], 1)  # (*batch, subsets of k columns)
        for row, (columns, without) in zip(safe.unbind(-2), _layers(n), strict=True):
            terms = _take(row, columns.to(safe.device)) + _take(layer, without.to(safe.device))
            layer = terms.logsumexp(-1)
        result = layer.squeeze(-1)
    return torch.where(result > floor / 2, result, -torch.inf)


def _take(tensor: Tensor, at: Tensor) -> Tensor:
    """``tensor[..., at]``, whose gradient is faster this way."""
    return tensor.index_select(-1, at.flatten()).unflatten(-1, at.shape)


@cache
def _permutations(n: int) -> Tensor:
    """The entries of a flattened matrix that each permutation picks, of shape (n!, n)."""
    return torch.tensor([[n * i + j for i, j in enumerate(p)] for p in permutations(range(n))])


@cache
def _layers(n: int) -> list[tuple[Tensor, Tensor]]:
    """Layer k has every subset of k columns: the columns, and where in layer k - 1 it is without each."""
    layers = []
    position: dict[tuple[int, ...], int] = {(): 0}
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        without = [[position[s[:i] + s[i + 1 :]] for i in range(k)] for s in subsets]
        layers.append((torch.tensor(subsets), torch.tensor(without)))
        position = {s: at for at, s in enumerate(subsets)}
    return layers
