"""What chains leave behind beside their draws: statistics of each."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_sym.infer.chains import Chains, Temperature
from pyro_sym.infer.gradient import groups
from pyro_sym.infer.temperature import thermometers

__all__ = ["Recorder"]


class Recorder:
    """Statistics of draws, gathered in blocks: those of many draws cost as much as those of one.

    Args:
        chains: the chains whose draws are kept.
    """

    BLOCK_DRAWS, BLOCK_NUMEL = 256, 2**16

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._pending: list[list[Tensor]] = []
        self._settings: list[tuple[float, Temperature]] = []
        self._blocks: dict[str, list[Tensor]] = {}

    def append(self) -> None:
        """Keep statistics of the draw where the chains stand."""
        chains = self._chains
        parts = [chains.energy, chains.position, chains.gradient]
        if chains.momentum is not None:
            parts.append(chains.momentum)
            if chains.inverse_mass is not None:
                parts.append(chains.inverse_mass.expand_as(chains.position))
        self._pending.append(parts)
        self._settings.append((chains.step_size, chains.temperature))
        draws = len(self._pending)
        full = draws >= self.BLOCK_DRAWS or draws * chains.position.numel() >= self.BLOCK_NUMEL
        if full or len(groups(*chains.position.shape)) > 1:  # whose tensors are written over by the next step
            self._flush()

    def statistics(self) -> dict[str, Tensor]:
        """Statistics of all draws so far, in float64, of shape ``(draws, C)`` or ``(draws, C, sites)``."""
        self._flush()
        return {name: torch.cat(blocks) for name, blocks in self._blocks.items()}

    def take(self) -> dict[str, Tensor]:
        """The statistics since they were last taken, as :meth:`statistics` has them, to keep elsewhere."""
        taken, self._blocks = self.statistics(), {}
        return taken

    def _flush(self) -> None:
        if not self._pending:
            return
        energy, *parts = (_stack(several) for several in zip(*self._pending, strict=True))
        energy = energy.to(torch.float64, copy=True)  # the next step may write over it
        block = self._thermometers(parts)
        block |= {"lp": -energy, "potential_energy": energy, "energy": energy}
        if "kinetic_temperature" in block:
            block["energy"] = energy + block["kinetic_temperature"] * self._chains.potential.size / 2
        step_sizes, temperatures = zip(*self._settings, strict=True)
        block["step_size"] = _by_chain(step_sizes, energy)
        block["temperature"] = _by_chain(temperatures, energy)
        for name, values in block.items():
            self._blocks.setdefault(name, []).append(values)
        self._pending, self._settings = [], []

    def _thermometers(self, parts: list[Tensor]) -> dict[str, Tensor]:
        sizes = self._chains.potential.sizes
        if len(groups(*self._chains.position.shape)) == 1:
            return thermometers(*parts, sizes=sizes)
        each = [
            thermometers(*chain, sizes=sizes) for chain in zip(*(p.unbind(1) for p in parts), strict=True)
        ]
        return {name: torch.stack([one[name] for one in each], 1) for name in each[0]}


def _by_chain(settings: tuple[Temperature, ...], like: Tensor) -> Tensor:
    """Settings of draws, of all chains or one for each, as ``(draws, C)``."""
    if any(isinstance(setting, tuple) for setting in settings):
        every = [s if isinstance(s, tuple) else (s,) * like.shape[1] for s in settings]
        return torch.tensor(every, dtype=torch.float64)
    return torch.tensor(settings, dtype=torch.float64).unsqueeze(-1).expand_as(like)


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """``torch.stack`` that copies nothing where there is one: it may be large."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
