"""All rows of the data, where the model shows a part of them at a time.

A subsampled plate is handed one window of successive rows after another, and what the model shows of each is
put in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pyro_sym.model.all_rows import Window, windows

__all__ = ["Window", "Windows", "windows"]


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
