"""Linear assignments of units to slots for many cost matrices: the best, and the gap to the second best."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["assign", "second_best"]

ROUNDING = 1e-12


def assign(cost: Tensor) -> Tensor:
    """The unit in each slot, ``(M, n)``, at least total cost; ``cost[m, slot, unit]`` is ``(M, n, n)``."""
    # Imported here, as its import takes time and adds to the warnings filters.
    from scipy.optimize import linear_sum_assignment

    costs = cost.numpy()
    labels = costs.argmin(-1)
    # Where every slot's favourite is another unit, that is the optimum; only the rest need an assignment.
    contested = (np.sort(labels, -1) != np.arange(labels.shape[-1])).any(-1)
    for m in contested.nonzero()[0]:
        labels[m] = linear_sum_assignment(costs[m])[1]
    return torch.from_numpy(labels)


def second_best(cost: Tensor) -> Tensor:
    r"""The extra cost of the second-best assignment, where unit :math:`j` in slot :math:`j` is the best.

    Assignments differ by cycles of slots that take one another's units. With
    :math:`R_{jk} = C_{jk} - C_{jj}` for slot :math:`j` taking the unit of slot :math:`k`, no cycle is
    negative, so the second-best assignment changes one cycle, the shortest. The best swap bounds its length;
    Floyd-Warshall over the few slots that it can then pass finds it.

    Returns differences of shape ``(M,)``: infinite if ``n`` is 1, minus infinity if the diagonal is not best.
    """
    steps = cost - cost.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    steps.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    steps, best = _without_negative(steps)
    swap = (steps + steps.mT).flatten(1).amin(-1)
    # No step of a cycle shorter than the best swap is longer than that.
    passed = (steps.amin(-1) < swap.unsqueeze(-1)) & (steps.amin(-2) < swap.unsqueeze(-1))
    count = int(passed.sum(-1).max())
    few = passed.byte().topk(count).indices
    paths = steps.gather(1, few.unsqueeze(-1).expand(-1, -1, cost.shape[-1]))
    paths = paths.gather(2, few.unsqueeze(1).expand(-1, count, -1))
    for k in range(count):
        paths = torch.minimum(paths, paths[:, :, k : k + 1] + paths[:, k : k + 1, :])
    cycles = paths.diagonal(dim1=-2, dim2=-1)
    shortest = torch.cat([swap.unsqueeze(-1), cycles], -1).amin(-1)
    return torch.where(best, shortest, -torch.inf)


def _without_negative(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Steps shifted so that none is negative and cycles keep their lengths, and whether that is possible.

    Bellman-Ford potentials do that, unless a cycle is negative: then some potentials keep falling.
    """
    potential = steps.new_zeros(steps.shape[:-1])
    for _ in range(steps.shape[-1] + 1):
        lower = (potential.unsqueeze(-1) + steps).amin(-2)
        falling = lower < potential - ROUNDING * (1 + potential.abs())
        if not falling.any():
            break
        potential = torch.where(falling, lower, potential)
    shifted = steps + potential.unsqueeze(-1) - potential.unsqueeze(-2)
    return shifted.clamp(min=0), ~falling.any(-1)
