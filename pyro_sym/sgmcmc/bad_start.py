"""Whether a chain that diverged early has its start to blame, or its step size."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_median, init_to_sample
from torch import Tensor

from pyro_sym._random import fork_random_state
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import ContinuousOnly, Potential
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.divergence import EARLY

__all__ = ["blame_start"]

# Trials take LONGER times the steps that the chain lasted, and MORE: steps that are too large show as well.
LONGER, MORE = 1.5, 20
NUM_STARTS = 8


def blame_start(chains: Chains, chain: int, minibatch: Minibatch) -> str | None:
    """Find out by trial whether the start was to blame, and which other starts stay finite.

    The same kernel takes at least as many steps, on the minibatch of the step that failed, from the same
    start and from others. If the same start fails again, and others stay finite at energies below its own,
    the start was to blame, and the strategy that drew the others is the cure. The run's random numbers and
    loaders stay as they are.

    Returns a sentence that names the start, its worst site and the cure; ``None`` if other starts fail too,
    or if this one would not have failed with other noise.
    """
    if chains.step >= EARLY or chains.start is None:
        return None
    with fork_random_state():
        again = chains.start.position[chain].expand(NUM_STARTS, -1)
        failed, _ = _try(chains, chain, again, minibatch)
        if failed == 0:
            return None
        for strategy in (init_to_median, init_to_sample):
            if strategy is chains.kernel.init_strategy:
                continue
            try:
                others = torch.stack([_draw(strategy, chains.potential) for _ in range(NUM_STARTS)])
            except (RuntimeError, ValueError, ArithmeticError):
                continue
            failed, energy = _try(chains, chain, others, minibatch)
            if failed == 0 and energy < float(chains.start.energy[chain]):
                return _sentence(chains, chain, strategy.__name__, energy)
    return None


def _try(chains: Chains, chain: int, starts: Tensor, minibatch: Minibatch) -> tuple[int, float]:
    """How many chains fail from these starts, of shape ``(S, d)``, and the median energy of all."""
    kernel = copy.copy(chains.kernel)
    kernel.temperature = chains.temperature_of_chain(chain)
    source: Any = _OneMinibatch(minibatch)
    steps = int(LONGER * (chains.step + 1)) + MORE
    failed, energies = 0, []
    # As many chains at once as there are in the run, so that the same graph serves.
    rows = torch.arange(math.ceil(len(starts) / len(chains.position)) * len(chains.position)) % len(starts)
    for chunk in rows.split(len(chains.position)):
        try:
            trial = Chains(kernel, chains.potential, chains.gradient_of, source, starts[chunk], "mask")
            trial.advance(steps, warming_up=True)
        except (RuntimeError, ValueError, ArithmeticError):
            return len(starts), math.nan
        failed += len(trial.diverged)
        energies.append(trial.energy)
    return failed, float(torch.cat(energies).median())


def _draw(strategy: Callable[[Any], Tensor], potential: Potential) -> Tensor:
    """A flat point drawn by another strategy, of shape ``(d,)``."""
    program = copy.copy(potential.program)
    program.init_strategy = ContinuousOnly(strategy)
    return potential.flatten(potential.unconstrain(program.draw()[0])).detach()


def _sentence(chains: Chains, chain: int, cure: str, energy: float) -> str:
    start, potential = chains.start, chains.potential
    assert start is not None
    slopes = start.slopes[chain]
    site = list(potential.shapes)[int(slopes.argmax())]
    value = ""
    values = potential.constrain(potential.unflatten(start.position[chain]))[site]
    if values.numel() <= 4:
        value = f" (= {', '.join(f'{v:.4g}' for v in values.flatten().tolist())})"
    return (
        f"the start is to blame: the potential energy is {float(start.energy[chain]):.4g} there, and its "
        f"gradient has norm {float(slopes.norm()):.4g}, the largest part at site {site!r}{value}. Chains "
        f"that start from {cure} stay finite with the same steps, at energies near {energy:.4g}: pass "
        f"init_strategy={cure} (pyro.infer.autoguide.initialization), or initial_params near a mode"
    )


class _OneMinibatch:
    """A source of minibatches that always gives the same one."""

    def __init__(self, minibatch: Minibatch) -> None:
        self._minibatch = minibatch

    def draw(self) -> Minibatch:
        """The minibatch."""
        return self._minibatch
