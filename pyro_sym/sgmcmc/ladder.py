"""Temperatures of chains: one for all of them, or one for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_sym.sgmcmc.kernel import Factor, Temperature

__all__ = ["Ladder"]


class Ladder:
    """What temperatures mean for a number of chains, as numbers and as tensors of the kind of ``like``."""

    def __init__(self, num_chains: int, like: Tensor) -> None:
        self.num_chains = num_chains
        self._options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self._column: tuple[Any, Tensor] | None = None
        self._block: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def checked(self, temperature: Temperature) -> Temperature:
        """A temperature of a kernel, which has to be one for all chains, or as many as there are chains."""
        if isinstance(temperature, tuple) and len(temperature) != self.num_chains:
            raise ValueError(
                f"temperature has {len(temperature)} values, and there are {self.num_chains} chains; pass "
                "one for each chain, or a number for all"
            )
        return temperature

    def by_chain(self, temperature: Temperature) -> tuple[float, ...]:
        """The temperature of each chain."""
        return temperature if isinstance(temperature, tuple) else (temperature,) * self.num_chains

    def rises(self, before: Temperature, now: Temperature) -> list[bool]:
        """Whether all chains, or which of them, warm up from temperature 0."""
        if not isinstance(before, tuple) and not isinstance(now, tuple):
            return [before == 0 < now]
        return [a == 0 < b for a, b in zip(self.by_chain(before), self.by_chain(now), strict=True)]

    def factor(self, temperature: Temperature, rows: slice) -> Factor:
        """The temperature of some chains as a step takes it: a number, or of shape ``(c, 1)``."""
        if not isinstance(temperature, tuple):
            return temperature
        if self._column is None or self._column[0] != temperature:
            self._column = (temperature, torch.tensor(temperature, **self._options).unsqueeze(-1))  # (C, 1)
        return self._column[1][rows]

    def block(
        self, step_sizes: tuple[float, ...], temperatures: tuple[Temperature, ...]
    ) -> tuple[Tensor, Tensor]:
        """Step sizes ``(k,)`` and temperatures ``(k,)`` or ``(k, C, 1)`` of a block, kept while they stay."""
        if self._block is None or self._block[0] != (step_sizes, temperatures):
            several: list[Any] = [self.checked(temperature) for temperature in temperatures]
            if any(isinstance(temperature, tuple) for temperature in several):
                several = [[[t] for t in self.by_chain(temperature)] for temperature in several]
            numbers = torch.tensor(step_sizes, **self._options), torch.tensor(several, **self._options)
            self._block = ((step_sizes, temperatures), numbers)
        return self._block[1]
