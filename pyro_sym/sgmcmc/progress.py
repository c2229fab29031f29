"""The progress of a run: what callbacks are given, and the progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pyro_sym._random import fork_random_state
from pyro_sym.draws.contract import Draws
from pyro_sym.draws.readable import ReadableRun
from pyro_sym.sgmcmc.chains import Chains

__all__ = ["Bar", "Callback", "Progress", "asks_to_stop"]


class Progress:
    """The progress of a run, as a callback sees it between two draws.

    Attributes:
        done: draws of each chain so far, warm-up included.
        num_draws: draws of each chain that were kept so far.
        num_samples: draws of each chain to keep in all.
        warmup_steps: draws of each chain that are discarded first.
        warming_up: whether draws are still discarded.
        seconds: since the run began.
        step: steps taken so far.
        step_size: the step size of the last step.
        temperature: the temperature of the last step, a number or one for each chain.
        potential_energy: :math:`U` of each chain, of shape ``(C,)``; an estimate on a minibatch if plates are
            subsampled.
        diverged: the divergences so far, by chain.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> def stop_after_20(progress):
        ...     return progress.num_draws >= 20
        >>> options = {"callback": stop_after_20, "callback_every": 5, "disable_progbar": True}
        >>> mcmc = VectorizedMCMC(BAOA(model, step_size=0.1), 1000, warmup_steps=5, **options)
        >>> mcmc.run()
        >>> mcmc.get_samples()["x"].shape
        torch.Size([20])
    """

    def __init__(
        self, run: ReadableRun, chains: Chains, draws: Draws, num_samples: int, warmup_steps: int
    ) -> None:
        self._run = run
        self._chains = chains
        self.done = draws.done
        self.num_draws = max(0, draws.done - warmup_steps)
        self.num_samples = num_samples
        self.warmup_steps = warmup_steps
        self.warming_up = draws.done < warmup_steps
        self.seconds = draws.sampling_time
        self.step = chains.step
        self.step_size = chains.step_size
        self.temperature = chains.temperature
        self.potential_energy = chains.energy.clone()
        self.diverged = dict(chains.diverged)

    def __repr__(self) -> str:
        """How many of the draws are done."""
        return f"Progress({self.done} of {self.warmup_steps + self.num_samples} draws)"

    def values(self) -> dict[str, Tensor]:
        """The current constrained values by site, of shape ``(C, *shape)``."""
        potential = self._chains.potential
        values = potential.constrain(potential.unflatten(self._chains.position))
        return {name: value.clone() for name, value in values.items()}

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> dict[str, Tensor]:
        """The draws so far, as :meth:`~pyro_sym.VectorizedMCMC.get_samples` of the run has them.

        With a store they are those of the blocks that were written. Draws of the warm-up are not kept.
        """
        return self._run.get_samples(num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Any]:
        """Of the draws so far, as :meth:`~pyro_sym.VectorizedMCMC.diagnostics` of the run has them."""
        return self._run.diagnostics()


Callback = Callable[[Progress], Any]


def asks_to_stop(callback: Callback, progress: Progress) -> bool:
    """Call a callback; whether it returned true or raised ``StopIteration``.

    Random numbers that it draws don't change the run. A value that is not a bool, such as a number, doesn't
    stop the run.
    """
    try:
        with fork_random_state():
            answer = callback(progress)
    except StopIteration:
        return True
    if isinstance(answer, Tensor):
        return answer.dtype is torch.bool and answer.numel() == 1 and bool(answer)
    return isinstance(answer, bool | np.bool_) and bool(answer)


class Bar:
    """A progress bar that is redrawn at intervals of time, not of steps.

    It starts at ``done`` of ``draws`` draws, warm-up included, of ``thinning`` steps each.
    """

    SECONDS = 0.2

    def __init__(self, draws: int, done: int, thinning: int, *, disable: bool) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(
            total=draws * thinning,
            initial=done * thinning,
            disable=disable,
            unit="draw" if thinning == 1 else "step",
            mininterval=0.0,  # this class decides when it is redrawn
            miniters=1,
        )
        self._waiting = 0
        self._next = 0.0
        self._shown = not disable

    def tick(self, chains: Chains, steps: int, *, warming_up: bool) -> None:
        """Count steps, and redraw the bar if it is time."""
        if not self._shown:
            return
        self._waiting += steps
        if time.perf_counter() < self._next:
            return
        self._bar.set_description("Warmup" if warming_up else "Sample", refresh=False)
        self._bar.set_postfix(chains.report(), refresh=False)
        self._bar.update(self._waiting)
        self._waiting, self._next = 0, time.perf_counter() + self.SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last steps, and close the bar."""
        self._bar.update(self._waiting)
        self._bar.close()
