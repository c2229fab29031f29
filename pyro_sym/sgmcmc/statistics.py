"""Statistics of draws: those of all kernels, and the kernel's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.kernel import Temperature
from pyro_sym.sgmcmc.thermometers import thermometers

__all__ = ["Recorder"]


class Recorder:
    """Statistics of draws of chains, computed in blocks: those of many draws cost as much as those of one."""

    BLOCK_DRAWS, BLOCK_NUMEL = 256, 2**16

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._pending: list[list[Tensor]] = []
        self._settings: list[tuple[float, Temperature, bool]] = []
        self._blocks: dict[str, list[Tensor]] = {}

    def append(self) -> None:
        """Keep statistics of the draw where the chains stand."""
        chains = self._chains
        mass = chains.inverse_mass
        masses = [] if mass is None else [mass.expand_as(chains.position)]
        self._pending.append([chains.energy, chains.gradient, *masses, *chains.state])
        self._settings.append((chains.step_size, chains.temperature, chains.relaxed >= 1))
        draws = len(self._pending)
        full = draws >= self.BLOCK_DRAWS or draws * chains.position.numel() >= self.BLOCK_NUMEL
        if full or len(chains.shards) > 1:  # whose tensors are written over by the next step
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
        step_sizes, temperatures, relaxed = zip(*self._settings, strict=True)
        settings = {  # each (draws, C)
            "step_size": _by_chain(step_sizes, energy),
            "temperature": _by_chain(temperatures, energy),
        }
        own, block = self._measure_all(parts, settings)
        block |= {"lp": -energy, "potential_energy": energy, "energy": energy, **settings}
        on_the_way = ~torch.tensor(relaxed).unsqueeze(-1)  # from temperature 0: they have no temperature yet
        block["temperature"] = settings["temperature"].masked_fill(on_the_way, math.nan)
        if "kinetic_temperature" in block:
            block["energy"] = energy + block["kinetic_temperature"] * self._chains.potential.size / 2
        self._check_own(own, block, energy)
        for name, values in {**block, **own}.items():
            self._blocks.setdefault(name, []).append(values)
        self._pending, self._settings = [], []

    def _measure_all(self, parts: list[Tensor], settings: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The kernel's own statistics and the thermometers; of large chains one after the other."""
        shards = self._chains.shards
        if len(shards) == 1:
            return self._measure(parts, settings)
        each = [
            self._measure(
                [part[:, shard.rows] for part in parts], {n: s[:, shard.rows] for n, s in settings.items()}
            )
            for shard in shards
        ]
        return [
            {name: torch.cat([one[name] for one in several], 1) for name in several[0]}
            for several in zip(*each, strict=True)
        ]

    def _measure(self, parts: list[Tensor], settings: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Statistics of draws, whose parts have the shape ``(draws, C, ·)``."""
        chains, kernel = self._chains, self._chains.kernel
        gradient, *state = parts
        mass: Tensor | float = 1.0 if chains.inverse_mass is None else state.pop(0)
        momentum = None
        if kernel.needs.momentum:
            numbers = {name: value.to(gradient).unsqueeze(-1) for name, value in settings.items()}
            momentum = kernel.thermal_momentum(tuple(state), gradient, **numbers, inverse_mass=mass)
        own = {name: value.to(torch.float64) for name, value in kernel.statistics(tuple(state)).items()}
        return [own, thermometers(state[0], gradient, momentum, mass, sizes=chains.potential.sizes)]

    def _check_own(self, own: dict[str, Tensor], common: dict[str, Tensor], energy: Tensor) -> None:
        """Refuse statistics of a kernel that have a common name, or another shape."""
        kernel, sites = type(self._chains.kernel).__name__, len(self._chains.potential.sizes)
        for name, value in own.items():
            if name in common or name == "diverging":
                raise ValueError(f"{kernel}.statistics() returns {name!r}, which all kernels have; rename it")
            if value.shape not in (energy.shape, (*energy.shape, sites)):
                raise ValueError(
                    f"{kernel}.statistics() returns {name!r} of shape {tuple(value.shape)} for draws "
                    f"of shape {tuple(energy.shape)}; return a number a draw, or one for each site"
                )


def _by_chain(settings: tuple[Temperature, ...], like: Tensor) -> Tensor:
    """Settings of draws, of all chains or one for each, as ``(draws, C)``."""
    if any(isinstance(setting, tuple) for setting in settings):
        every = [s if isinstance(s, tuple) else (s,) * like.shape[1] for s in settings]
        return torch.tensor(every, dtype=torch.float64)
    return torch.tensor(settings, dtype=torch.float64).unsqueeze(-1).expand_as(like)


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """``torch.stack`` that copies nothing where there is one: it may be large."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
