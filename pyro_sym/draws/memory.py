"""Where the draws of a run are kept: the contract, and the way in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.statistics import Recorder

__all__ = ["Draws", "DrawsInMemory"]


class Draws(ABC):
    """Draws of a run and their statistics, as they come.

    It is a context: what was drawn can be read within and after it, however it was left.

    Attributes:
        done: draws of each chain that are behind it, warm-up included.
        num_draws: those of them that are kept.
        sampling_time: seconds that they took.
    """

    done = 0
    num_draws = 0
    sampling_time = 0.0

    @abstractmethod
    def append(self) -> None:
        """Keep the draw where the chains stand."""

    def proceed(self, sampling_time: float) -> None:
        """Note that a draw is done, kept or not, and the seconds since the run began."""
        self.done += 1
        self.sampling_time = sampling_time

    @abstractmethod
    def samples(self) -> Mapping[str, Tensor]:
        """Constrained values by site, of shape ``(C, draws, *shape)``."""

    @abstractmethod
    def statistics(self) -> dict[str, Tensor]:
        """Statistics, of shape ``(draws, C)`` or ``(draws, C, sites)``."""

    @abstractmethod
    def diverging(self) -> Tensor:
        """Which draws are NaN as their chain had ended, of shape ``(draws, C)``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class DrawsInMemory(Draws):
    """Draws kept as unconstrained values.

    Args:
        chains: the chains that draw.
        num_samples: how many draws each.
    """

    def __init__(self, chains: Chains, num_samples: int) -> None:
        self._chains = chains
        self._recorder = Recorder(chains)
        self._positions = chains.position.new_empty(num_samples, *chains.position.shape)
        self._diverging = torch.zeros(num_samples, len(chains.position), dtype=torch.bool)

    def append(self) -> None:
        """Keep the draw where the chains stand."""
        keep(self._chains, self._positions[self.num_draws], self._diverging[self.num_draws])
        self._recorder.append()
        self.num_draws += 1

    def samples(self) -> dict[str, Tensor]:
        """Constrained values by site, of shape ``(C, draws, *shape)``."""
        potential = self._chains.potential
        positions = self._positions[: self.num_draws].transpose(0, 1)
        return potential.constrain(potential.unflatten(positions))

    def statistics(self) -> dict[str, Tensor]:
        """Statistics, of shape ``(draws, C)`` or ``(draws, C, sites)``."""
        return self._recorder.statistics()

    def diverging(self) -> Tensor:
        """Which draws are NaN as their chain had ended, of shape ``(draws, C)``."""
        return self._diverging[: self.num_draws]


def keep(chains: Chains, row: Tensor, diverging: Tensor) -> None:
    """Copy positions, with NaN for chains that have ended, and which those are."""
    row.copy_(chains.position)
    if ended := list(chains.diverged):
        row[ended], diverging[ended] = torch.nan, True
