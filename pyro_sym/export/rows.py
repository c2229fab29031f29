"""All rows of the data, where the model shows a part of them at a time.

A subsampled plate is handed one window of successive rows after another, and what the model shows of each is
put in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym.program import SubsampledPlate

__all__ = ["Window", "Windows", "windows"]

Window = Mapping[str, Tensor]
"""Successive row numbers, by subsampled plate."""


def windows(plates: Mapping[str, SubsampledPlate]) -> Iterator[Window]:
    """Windows that cover all rows of all plates; the last of a plate overlaps with the one before it."""
    blocks = {}
    for name, plate in plates.items():
        last = plate.size - plate.subsample_size
        starts = [*range(0, last, plate.subsample_size), last]
        blocks[name] = [
            torch.arange(start, start + plate.subsample_size, device=plate.device) for start in starts
        ]
    for several in itertools.product(*blocks.values()):
        yield dict(zip(blocks, several, strict=True))


class Windows:
    """Tensors over all rows, put together from windows.

    Attributes:
        values: the tensors so far, by name.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def put(self, name: str, part: Tensor, frames: Iterable[Any], window: Window, event_dim: int = 0) -> None:
        """Put what a site shows of a window in its place.

        Args:
            name: what it goes by.
            part: of any number of dims in front, the batch dims of the site, and ``event_dim`` more.
            frames: the plates around the site.
            window: the rows that were shown.
            event_dim: number of event dims.
        """
        subsampled = {f.dim - event_dim: f for f in frames if f.vectorized and f.name in window}
        if not subsampled:  # every window shows all of it
            self.values.setdefault(name, part)
            return
        if name not in self.values:
            shape = list(part.shape)
            for axis, frame in subsampled.items():
                shape[axis] = frame.full_size
            self.values[name] = part.new_empty(shape)
        place = self.values[name]
        for axis, frame in subsampled.items():
            rows = window[frame.name]
            place = place.narrow(axis, int(rows[0]), len(rows))
        place.copy_(part)
