"""Draws kept in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_sym.draws.contract import DrawingChains, Draws, StatisticsRecorder, copy_draw

__all__ = ["DrawsInMemory"]


class DrawsInMemory(Draws):
    """Draws kept in memory as unconstrained values, ``num_samples`` of each chain."""

    def __init__(self, chains: DrawingChains, recorder: StatisticsRecorder, num_samples: int) -> None:
        self._chains = chains
        self._recorder = recorder
        self._positions = chains.position.new_empty(num_samples, *chains.position.shape)  # (draws, C, d)
        self._diverging = torch.zeros(num_samples, len(chains.position), dtype=torch.bool)  # (draws, C)

    def append(self) -> None:
        """Keep the current position of each chain as a draw."""
        copy_draw(self._chains, self._positions[self.num_draws], self._diverging[self.num_draws])
        self._recorder.append()
        self.num_draws += 1

    def samples(self) -> dict[str, Tensor]:
        """Constrained values by site, of shape ``(C, draws, *shape)``."""
        potential = self._chains.potential
        positions = self._positions[: self.num_draws].transpose(0, 1)  # (C, draws, d)
        return potential.constrain(potential.unflatten(positions))

    def statistics(self) -> dict[str, Tensor]:
        """Statistics by name, of shape ``(draws, C, ...)``."""
        return self._recorder.statistics()

    def diverging(self) -> Tensor:
        """Which draws are NaN because their chain had ended, of shape ``(draws, C)``."""
        return self._diverging[: self.num_draws]
