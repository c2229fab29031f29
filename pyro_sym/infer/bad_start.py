"""Whether a chain that diverged early has its start to blame, or its step size."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyro.infer.autoguide.initialization import init_to_median, init_to_sample
from torch import Tensor

from pyro_sym._random import fork_random_state
from pyro_sym.infer.minibatch import Minibatch
from pyro_sym.infer.potential import Potential

if TYPE_CHECKING:
    from pyro_sym.infer.chains import Chains

__all__ = ["Start", "blame_start"]

# Later divergences have little to do with the start.
EARLY = 500
# Other starts are tried for so much longer than the chain lasted; steps too large show there as well.
LONGER, MORE = 1.5, 20
# How many other starts.
NUM_STARTS = 8


@dataclass
class Start:
    """Where chains started.

    Attributes:
        energy: :math:`U`, of shape ``(C,)``.
        slopes: the norm of its gradient by site, of shape ``(C, sites)``.
        position: of shape ``(C, d)``, or ``None`` where the chains are too large to keep it.
    """

    energy: Tensor
    slopes: Tensor
    position: Tensor | None

    @classmethod
    def of(cls, energy: Tensor, gradient: Tensor, position: Tensor | None, sizes: list[int]) -> Start:
        """Keep what describes the start of chains."""
        by_site = gradient.split(sizes, -1)  # each of shape (C, size of the site)
        return cls(energy.clone(), torch.stack([slope.norm(dim=-1) for slope in by_site], -1), position)


def blame_start(chains: Chains, chain: int, minibatch: Minibatch) -> str | None:
    """Find out by trial whether other starts would have stayed finite at the same step size.

    The same kernel takes the same number of steps and more from other starting points, on the minibatch of
    the step that failed. If they stay finite, at energies below that of the failed start, the start was to
    blame, and the strategy that drew the others is the cure. Random numbers and loaders are left alone.

    Args:
        chains: whose chain has diverged.
        chain: which one.
        minibatch: what the chains saw in the last step.

    Returns:
        A sentence that names the start, its worst site and the cure, or ``None`` if other starts fail too.
    """
    if chains.step >= EARLY or chains.start is None:
        return None
    for strategy in (init_to_median, init_to_sample):
        if strategy is chains.kernel.init_strategy:
            continue
        with fork_random_state():
            energy = _energy_from(strategy, chains, chain, minibatch)
        if energy is not None:
            return _sentence(chains, chain, strategy.__name__, energy)
    return None


def _energy_from(
    strategy: Callable[[Any], Tensor], chains: Chains, chain: int, minibatch: Minibatch
) -> float | None:
    """The energy that chains from other starts come to, or ``None`` if they fail."""
    assert chains.start is not None
    rows = 1 if chains.start.position is None else len(chains.position)
    kernel = copy.copy(chains.kernel)
    kernel.temperature = chains.temperature_of_chain(chain)
    try:
        starts = torch.stack([_draw(strategy, chains.potential) for _ in range(min(rows, NUM_STARTS))])
        position = starts.repeat(math.ceil(rows / len(starts)), 1)[:rows].contiguous()
        trial = type(chains)(
            kernel, chains.potential, chains._gradient_of, _Again(minibatch), position, "mask"
        )
        trial.advance(int(LONGER * (chains.step + 1)) + MORE, warming_up=True)
    except (RuntimeError, ValueError, ArithmeticError):
        return None
    energy = float(trial.energy.median())
    failed = 10 * len(trial.diverged) > rows  # one in ten may
    return None if failed or not energy < float(chains.start.energy[chain]) else energy


def _draw(strategy: Callable[[Any], Tensor], potential: Potential) -> Tensor:
    """A flat point drawn by another strategy, of shape ``(d,)``."""
    program = copy.copy(potential.program)
    program.init_strategy = type(potential.program.init_strategy)(strategy)  # type: ignore[call-arg]
    return potential.flatten(potential.unconstrain(program.draw()[0])).detach()


def _sentence(chains: Chains, chain: int, cure: str, energy: float) -> str:
    start, potential = chains.start, chains.potential
    assert start is not None
    slopes = start.slopes[chain]
    site = list(potential.shapes)[int(slopes.argmax())]
    value = ""
    if start.position is not None:
        values = potential.constrain(potential.unflatten(start.position[chain]))[site]
        if values.numel() <= 4:
            value = f" (= {', '.join(f'{v:.4g}' for v in values.flatten().tolist())})"
    return (
        f"the start is to blame: the potential energy is {float(start.energy[chain]):.4g} there, and its "
        f"gradient has norm {float(slopes.norm()):.4g}, the largest part at site {site!r}{value}. Chains "
        f"that start from {cure} stay finite with the same steps, at energies near {energy:.4g}: pass "
        f"init_strategy={cure} (pyro.infer.autoguide.initialization), or initial_params near a mode"
    )


class _Again:
    """A source of minibatches that gives one and the same."""

    def __init__(self, minibatch: Minibatch) -> None:
        self._minibatch = minibatch

    def draw(self) -> Minibatch:
        """The minibatch."""
        return self._minibatch
