"""Values on all rows of subsampled plates, joined from windows of successive rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def on_all_rows(
    function: Callable[[dict[str, Tensor], Window], Mapping[str, Shown]],
    shown_windows: Iterable[Window],
    chunk_size: int | None,
    draws: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Evaluate a function of one draw and one window at all draws ``(M, *shape)``, and join the windows.

    ``chunk_size`` is that of :func:`~pyro_sym.export.vmap_draws.at_draws`.

    Returns:
        Values by name, of shape ``(M, *shape)``, on all rows.
    """
    whole = JoinedWindows()
    for window in shown_windows:
        places: dict[str, Shown] = {}

        def one(
            draw: dict[str, Tensor], window: Window = window, places: dict[str, Shown] = places
        ) -> dict[str, Tensor]:
            places.update(function(draw, window))
            return {name: place.value for name, place in places.items()}

        for name, part in at_draws(one, draws, chunk_size).items():
            whole.put(name, part, places[name].frames, window, places[name].event_dim)
    return whole.values


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
