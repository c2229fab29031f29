"""What one step sees of the data, and how it's drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym.program import SubsampledPlate

__all__ = ["Minibatch", "draw_indices", "draw_subsets"]


@dataclass(frozen=True)
class Minibatch:
    """What one step sees of the data.

    Attributes:
        indices: rows by subsampled plate, of shape ``(C, B)`` drawn for each chain, or ``(B,)`` shared by all
            of them.
        args: the model's positional arguments for this step, where batches come from a loader, shared by all
            chains; None for those of the run. The rows of a subsampled plate without indices are then those
            of the batch.

    Example:
        >>> Minibatch({"rows": torch.tensor([[0, 3], [2, 1]])}).indices["rows"].shape
        torch.Size([2, 2])
    """

    indices: Mapping[str, Tensor] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None


def draw_indices(plates: Mapping[str, SubsampledPlate], *shape: int) -> dict[str, Tensor]:
    """Draw independent sets of rows for every subsampled plate.

    Args:
        plates: as in ``Potential.program.plates``.
        *shape: how many sets, as ``steps, chains``.

    Returns:
        By plate, indices of shape ``(*shape, subsample_size)``.

    Example:
        >>> plate = SubsampledPlate("rows", 100, 10, torch.device("cpu"))
        >>> draw_indices({"rows": plate}, 5, 4)["rows"].shape
        torch.Size([5, 4, 10])
    """
    sets = torch.Size(shape).numel()
    return {
        name: draw_subsets(plate, sets).reshape(*shape, plate.subsample_size)
        for name, plate in plates.items()
    }


def draw_subsets(plate: SubsampledPlate, sets: int) -> Tensor:
    """Draw ``sets`` sets of rows of a plate, each uniformly and without replacement.

    A set costs the less the more are drawn at once, so draw for many steps ahead.

    Args:
        plate: which plate.
        sets: how many sets.

    Returns:
        Indices, of shape ``(sets, subsample_size)``.

    Example:
        >>> plate = SubsampledPlate("rows", 4, 4, torch.device("cpu"))
        >>> draw_subsets(plate, 1).sort().values
        tensor([[0, 1, 2, 3]])
    """
    size, count = plate.size, plate.subsample_size
    if 2 * count > size:  # repeats would be the rule: rank random numbers instead
        rows = torch.rand(sets, size, dtype=torch.float64).topk(count, sorted=False).indices
        return rows.to(plate.device)
    # Draw with replacement, and repeats of a row within its set anew, till there are none: rows are told
    # apart by their equality alone, so that every set is as likely as another.
    rows = torch.randint(size, (sets, count))
    drawn = rows.numpy()  # NumPy sorts many short rows ten times as fast as torch
    looked_at = np.arange(sets)
    part = drawn
    part.sort(axis=1)
    while True:
        row, column = np.nonzero(part[:, 1:] == part[:, :-1])
        if len(row) == 0:
            return rows.to(plate.device)
        part[row, column + 1] = torch.randint(size, (len(row),)).numpy()
        changed = np.unique(row)
        looked_at, part = looked_at[changed], part[changed]
        part.sort(axis=1)
        drawn[looked_at] = part
