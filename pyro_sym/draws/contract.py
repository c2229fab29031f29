"""The contract between what keeps draws and the chains that they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_sym.draws.divergence import Divergence
from pyro_sym.model.potential import Potential

__all__ = ["DrawingChains", "Draws", "StatisticsRecorder", "copy_draw"]


class DrawingChains(Protocol):
    """Chains side by side, as far as their draws are concerned."""

    @property
    def potential(self) -> Potential:
        """Of the model, which knows its sites."""

    @property
    def position(self) -> Tensor:
        """Unconstrained values, of shape ``(C, d)``."""

    @property
    def diverged(self) -> Mapping[int, Divergence]:
        """The divergences so far, by chain."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain containers that the rest of the run depends on."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a state."""


class StatisticsRecorder(Protocol):
    """Records statistics of draws besides their positions.

    Which statistics there are is up to the recorder. Each has the shape ``(draws, C)`` or ``(draws, C, k)``;
    if ``k`` is the number of latent sites, it has the dim ``latent_site``.
    """

    def append(self) -> None:
        """Record the current draw of each chain."""

    def statistics(self) -> dict[str, Tensor]:
        """The statistics of all draws since the last :meth:`take`."""

    def take(self) -> dict[str, Tensor]:
        """The same; then forget them."""


class Draws(ABC):
    """The draws of a run and their statistics; they can be read during the run, and after ``close``.

    ``done`` counts the draws of each chain so far, warm-up included, and ``num_draws`` those that can be
    read. ``sampling_time`` is in seconds.
    """

    done = 0
    num_draws = 0
    sampling_time = 0.0

    @abstractmethod
    def append(self) -> None:
        """Keep the current position of each chain as a draw."""

    def proceed(self, sampling_time: float) -> None:
        """Count a draw, kept or not, and note the seconds since the run began."""
        self.done += 1
        self.sampling_time = sampling_time

    @abstractmethod
    def samples(self) -> Mapping[str, Tensor]:
        """Constrained values by site, of shape ``(C, draws, *shape)``."""

    @abstractmethod
    def statistics(self) -> dict[str, Tensor]:
        """Statistics by name, of shape ``(draws, C, ...)``."""

    @abstractmethod
    def diverging(self) -> Tensor:
        """Which draws are NaN because their chain had ended, of shape ``(draws, C)``."""

    def close(self) -> None:  # noqa: B027
        """End the run, however it went."""


def copy_draw(chains: DrawingChains, row: Tensor, diverging: Tensor) -> None:
    """Copy positions to ``row`` ``(C, d)``; for ended chains set NaN, and true in ``diverging`` ``(C,)``."""
    row.copy_(chains.position)
    if ended := list(chains.diverged):
        row[ended], diverging[ended] = torch.nan, True
