"""What one step sees of the data, and how it's drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    if count * (count - 1) > 4 * size:  # repeats in most sets: rank random numbers instead
        return torch.rand(sets, size, device=plate.device, dtype=torch.float64).topk(count, sorted=False)[1]
    # Tuples with replacement, less those with a repeat, are uniform without replacement.
    rows = torch.randint(size, (sets, count), device=plate.device)
    repeated = _with_repeats(rows)
    while len(repeated) > 0:
        rows[repeated] = again = torch.randint(size, (len(repeated), count), device=plate.device)
        repeated = repeated[_with_repeats(again)]
    return rows


def _with_repeats(rows: Tensor) -> Tensor:
    """Which sets hold a row twice."""
    ordered = rows.sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(-1).nonzero().squeeze(-1)
