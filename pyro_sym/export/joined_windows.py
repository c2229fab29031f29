"""Tensors over all rows of subsampled plates, joined from windows of successive rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pyro_sym.model.all_rows import Window

__all__ = ["JoinedWindows"]


class JoinedWindows:
    """Tensors over all rows, by name.

    Attributes:
        values: what has been joined so far.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def put(self, name: str, part: Tensor, frames: Iterable[Any], window: Window, event_dim: int = 0) -> None:
        """Copy the values of a site on the rows of a window into the tensor over all rows.

        Args:
            name: of the tensor.
            part: of shape ``(*sample_shape, *batch_shape, *event_shape)``.
            frames: the plates around the site.
            window: the rows that the model showed.
            event_dim: number of event dims.
        """
        subsampled = {f.dim - event_dim: f for f in frames if f.vectorized and f.name in window}
        if not subsampled:  # the same in every window
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
