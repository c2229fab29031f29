"""Linear assignments of units to slots, for many cost matrices: the best, and how far the next one is."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["assign", "second_best"]


def assign(cost: Tensor) -> Tensor:
    """The units that fill the slots most cheaply, each unit once.

    Args:
        cost: of unit (column) in slot (row), of shape ``(M, n, n)``.

    Returns:
        The unit in each slot, of shape ``(M, n)``.
    """
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
    r"""What the cheapest other assignment costs more, where unit :math:`j` in slot :math:`j` is the cheapest.

    Assignments differ by cycles, along each of which slots take one another's units. With
    :math:`R_{jk} = C_{jk} - C_{jj}` for slot :math:`j` taking the unit of slot :math:`k`, no cycle is
    negative, so the next best assignment changes one cycle, the shortest. All shortest paths
    (Floyd-Warshall), :math:`O(n^3)`, tell its length.

    Args:
        cost: of unit (column) in slot (row), of shape ``(M, n, n)``.

    Returns:
        The differences, of shape ``(M,)``; infinite if ``n`` is 1, below zero if the diagonal was not best.
    """
    paths = cost - cost.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    paths.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    for k in range(cost.shape[-1]):
        paths = torch.minimum(paths, paths[:, :, k : k + 1] + paths[:, k : k + 1, :])
    return paths.diagonal(dim1=-2, dim2=-1).amin(-1)
