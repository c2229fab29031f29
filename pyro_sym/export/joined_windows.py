"""Values on all rows of subsampled plates, joined from windows of successive rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pyro_sym.export.vmap_draws import at_draws
from pyro_sym.model.all_rows import Window

__all__ = ["JoinedWindows", "Shown", "on_all_rows"]


class Shown(NamedTuple):
    """A value that a model shows on the rows of a window, the plates around it, and its event dims."""

    value: Tensor
    frames: Iterable[Any]
    event_dim: int = 0


OnWindow = Callable[[dict[str, Tensor], Window], Mapping[str, Shown]]


def on_all_rows(
    function: OnWindow, shown_windows: Iterable[Window], chunk_size: int | None, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Evaluate a function of one draw and one window at all draws; return all rows, ``(M, *shape)`` by name.

    ``chunk_size`` is that of :func:`~pyro_sym.export.vmap_draws.at_draws`.
    """
    whole = JoinedWindows()
    for window in shown_windows:
        last: dict[str, Shown] = {}  # plates and event dims are the same at all draws
        for name, part in at_draws(partial(_values, function, window, last), draws, chunk_size).items():
            whole.put(name, part, last[name].frames, window, last[name].event_dim)
    return whole.values


def _values(
    function: OnWindow, window: Window, last: dict[str, Shown], draw: dict[str, Tensor]
) -> dict[str, Tensor]:
    last.update(function(draw, window))
    return {name: place.value for name, place in last.items()}


class JoinedWindows:
    """Tensors over all rows, joined so far, as ``values`` by name."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def put(self, name: str, part: Tensor, frames: Iterable[Any], window: Window, event_dim: int = 0) -> None:
        """Copy a site's values ``(*sample_shape, *batch_shape, *event_shape)`` on a window to their rows."""
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
