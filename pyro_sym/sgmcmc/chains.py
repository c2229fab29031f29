"""The chains of a run: what their shards share, and the steps that they take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from typing import Any, Literal

import pyro
import torch
from torch import Tensor

from pyro_sym.model.gradient import ChainGradient, chain_slices
from pyro_sym.model.minibatch import Loader, Minibatch, PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.divergence import EARLY, Divergence, Divergences, Start
from pyro_sym.sgmcmc.kernel import Factor, Kernel, State, Temperature, is_warm
from pyro_sym.sgmcmc.ladder import Ladder
from pyro_sym.sgmcmc.preconditioners import rescale_momentum
from pyro_sym.sgmcmc.prefetch import Prefetcher
from pyro_sym.sgmcmc.shard import Shard
from pyro_sym.sgmcmc.step_blocks import FusedSteps, block_length

__all__ = ["Chains", "Divergence"]

Blame = Callable[["Chains", int, Minibatch], str | None]
"""From chains, the one that diverged and its minibatch to a sentence on its start, if that is to blame."""


class Chains:
    """All chains of a run, of shape ``(C, d)``, as one or several shards.

    Small chains are one shard and take each step together. Large ones are a shard each
    (:func:`~pyro_sym.model.gradient.chain_slices`) and take it one after the other. Shards share the
    minibatch of the step, its step size and temperature, and the mass that the preconditioner has learnt.

    Energy and gradient are those at ``state[0]``, on the minibatch of the next step; so every position has
    its energy when it becomes a draw, on a minibatch independent of it.

    ``position``, where the chains start, is taken over, not copied. ``on_divergence="mask"`` leaves a chain
    where it last was finite, instead of raising an error. ``fused`` are steps of the kernel with plain
    gradients, compiled. ``blame`` finds out whether the start is to blame for a divergence.

    Attributes:
        step: how many steps were taken; ``step_size`` and ``temperature`` are those of the last one.
        relaxed: how many relaxation times chains have had since the temperature last rose from 0; infinite
            if it never did. Below 1 the states are not draws of the target yet.
        start: where the chains started, as long as it may explain a divergence.
    """

    def __init__(
        self,
        kernel: Kernel,
        potential: Potential,
        gradient: ChainGradient,
        source: PlateRows | Loader,
        position: Tensor,
        on_divergence: Literal["raise", "mask"] = "raise",
        fused: FusedSteps | None = None,
        blame: Blame | None = None,
    ) -> None:
        self.kernel = kernel
        self.potential = potential
        self.source = source
        self.gradient_of = gradient
        self.num_chains = len(position)
        self.step = 0
        self.step_size = math.nan
        self.start: Start | None = None
        self.relaxed = math.inf
        self._ladder = Ladder(self.num_chains, position)
        self._sizes = list(potential.sizes.values())
        self._blame = blame
        self._divergences = Divergences(potential, self.num_chains, on_divergence, self._explain)
        self._allowed: tuple[float, ...] | None = None
        self.temperature = self._ladder.checked(kernel.temperature_at(0))
        self._warm = is_warm(self.temperature)
        slices = chain_slices(*position.shape)
        self.shards = [Shard(kernel, rows, position, alone=len(slices) == 1) for rows in slices]
        self._fused = fused
        self._ahead: list[Prefetcher] = []
        if fused is not None:
            assert isinstance(source, PlateRows)
            first = self.shards[0]
            self._noise_ahead = Prefetcher(lambda k: {"": first.draw_noise(k)}, math.prod(first.noise_shape))
            rows = self.num_chains * sum(plate.subsample_size for plate in source.plates.values())
            self._rows_ahead = Prefetcher(source.draw_many, rows)
            self._ahead += [self._noise_ahead, self._rows_ahead]
        self._tuning = kernel.preconditioner.init(position, self._sizes)
        self.inverse_mass = kernel.preconditioner.inverse_mass(self._tuning)
        self._known: tuple[Tensor, Any] | None = None  # where a step evaluated last, and what it got
        with _quiet():
            energy = position.new_full((self.num_chains,), math.nan)
            self._view(self._initial_state(position), energy, torch.zeros_like(position))
            self._evaluate_all()
            if self._together:  # the positions of large chains are written over
                self.start = Start.of(self.energy, self.gradient, self.position, self._sizes)
            self._tune(warming_up=True)

    def _initial_state(self, position: Tensor) -> State:
        """The state at the positions of all chains ``(C, d)``, with momenta of the current temperature."""
        whole: list[Tensor] = []
        for shard in self.shards:
            temperature = self._ladder.factor(self.temperature, shard.rows)
            at, noise, mass = position[shard.rows], self._noise(shard), self._mass(shard)
            state = shard.initial_state(at, noise, temperature, mass, self._sizes)
            if shard.alone:
                return state
            count = self.num_chains
            whole = whole or [position, *(p.new_empty(count, *p.shape[1:]) for p in state[1:])]
            for part, own in zip(whole[1:], state[1:], strict=True):
                part[shard.rows] = own
        return tuple(whole)

    def _view(self, state: State, energy: Tensor, gradient: Tensor) -> None:
        """Set the chains' state; several shards get views of these tensors, and write to them."""
        self._whole = None if self._together else (state, energy, gradient)
        for shard in self.shards:
            shard.view(state, energy, gradient)

    @property
    def _together(self) -> bool:
        return self.shards[0].alone

    @property
    def state(self) -> State:
        """What the dynamics carries along, each part of shape ``(C, ·)``, the positions first."""
        return self.shards[0].state if self._whole is None else self._whole[0]

    @property
    def energy(self) -> Tensor:
        r""":math:`U`, of shape ``(C,)``."""
        return self.shards[0].energy if self._whole is None else self._whole[1]

    @property
    def gradient(self) -> Tensor:
        r""":math:`\nabla U`, of shape ``(C, d)``."""
        return self.shards[0].gradient if self._whole is None else self._whole[2]

    @property
    def position(self) -> Tensor:
        """Unconstrained values, of shape ``(C, d)``."""
        return self.state[0]

    @property
    def diverged(self) -> dict[int, Divergence]:
        """By chain, how it ended."""
        return self._divergences.ended

    def move_to(self, position: Tensor) -> None:
        """Continue from other positions ``(C, d)``, with the current momenta."""
        with _quiet():
            self._evaluate_all(position)
            self._tune(warming_up=False)

    def _evaluate_all(self, position: Tensor | None = None) -> None:
        """Evaluate all chains on a fresh minibatch, where they are or at other positions."""
        minibatch = self.source.draw()
        for shard in self.shards:
            at = shard.state[0] if position is None else position[shard.rows]
            self._evaluate_at(shard, (at, *shard.state[1:]), minibatch.of(shard.rows))
        self._minibatch = minibatch

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, except kernel, data and torch's random state."""
        state: dict[str, Any] = {
            "step": self.step,
            "step_size": self.step_size,
            "temperature": self.temperature,
            "relaxed": self.relaxed,
            "state": list(self.state),
            "energy": self.energy,
            "gradient": self.gradient,
            "tuning": dict(self._tuning),
            "diverged": {chain: astuple(divergence) for chain, divergence in self.diverged.items()},
            "source": self.source.state_dict(),
            "ahead": [ahead.state_dict() for ahead in self._ahead],
            "gradients": [gradient.state_dict() for gradient in self._gradients()],
        }
        if self.kernel.needs.second_gradient:
            state["minibatch"] = (dict(self._minibatch.indices), self._minibatch.args)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of chains of the same kernel, model and data."""
        device = self.position.device
        self.step, self.step_size = state["step"], state["step_size"]
        self.temperature = state["temperature"]
        self._warm = is_warm(self.temperature)
        self.relaxed = state.get("relaxed", math.inf)
        parts = tuple(part.to(device) for part in state["state"])
        self._view(parts, state["energy"].to(device), state["gradient"].to(device))
        self._tuning = {name: values.to(device) for name, values in state["tuning"].items()}
        self.inverse_mass = self.kernel.preconditioner.inverse_mass(self._tuning)
        self._refresh_settings()
        self.diverged.clear()
        self.diverged.update({chain: Divergence(*end) for chain, end in state["diverged"].items()})
        self.source.load_state_dict(state["source"])
        for ahead, own in zip(self._ahead, state["ahead"], strict=True):
            ahead.load_state_dict(own, device)
        for gradient, own in zip(self._gradients(), state["gradients"], strict=True):
            gradient.load_state_dict(own)
        if "minibatch" in state:
            indices, args = state["minibatch"]
            self._minibatch = Minibatch({name: rows.to(device) for name, rows in indices.items()}, args)

    def _gradients(self) -> list[ChainGradient]:
        return [self.gradient_of] if self._fused is None else [self.gradient_of, self._fused.gradient]

    def advance(
        self, steps: int, *, warming_up: bool, tick: Callable[[int], None] = lambda steps: None
    ) -> None:
        """Take steps; ``warming_up`` tells whether the preconditioner may still learn.

        ``tick`` is called with the number of steps that were just taken, one or those of a block. Unless
        chains are masked, a position, gradient or energy that is not finite raises a ``DivergenceError``.
        """
        # Blocks of one length, that divides what is asked for: each length is compiled by itself.
        block = math.gcd(steps, block_length(self.shards[0].zeros.numel()))
        if self.step >= EARLY:
            self.start = None
        while steps > 0:
            if self._compiles(warming_up) and not self._warms_within(block):
                self._take_block(block)
                tick(block)
            else:
                with _quiet():
                    self._take_steps(block, warming_up, tick)
            steps -= block

    def _take_steps(self, steps: int, warming_up: bool, tick: Callable[[int], None]) -> None:
        kernel, together = self.kernel, self._together
        scheduled = callable(kernel.step_size) or callable(kernel.temperature)
        learns = not kernel.preconditioner.is_fixed(warming_up)
        for number in range(steps):
            if scheduled or number == 0:
                self._set(kernel.step_size_at(self.step), kernel.temperature_at(self.step))
            minibatch = None
            for shard in self.shards:
                state = self._stepped(shard, self._noise(shard))
                minibatch = minibatch or self.source.draw()  # one for all shards
                self._evaluate_at(shard, state, minibatch if together else minibatch.of(shard.rows))
            self._minibatch = minibatch or self._minibatch
            if learns:
                self._tune(warming_up)
            if self.relaxed < 1:
                self.relaxed += kernel.relaxation(self.step_size)
            self.step += 1
            tick(1)

    def _set(self, step_size: float, temperature: Temperature) -> None:
        """Set the step size and the temperature of the next step."""
        if temperature != self.temperature:
            self._set_temperature(self._ladder.checked(temperature))
        self.step_size = step_size
        self._refresh_settings()

    def _set_temperature(self, temperature: Temperature) -> None:
        """Set the temperature of the next step.

        Where it rises from 0, momenta and whatever the dynamics carries besides positions are redrawn: those
        of an optimiser have no temperature.
        """
        rises = self._ladder.rises(self.temperature, temperature)
        self.temperature, self._warm = temperature, is_warm(temperature)
        if any(rises):
            self.relaxed = 0.0
            if len(self.state) > 1:
                fresh = self._initial_state(self.position)
                risen = torch.tensor(rises, device=self.position.device).unsqueeze(-1)  # (C, 1) or (1, 1)
                state = tuple(torch.where(risen, *two) for two in zip(fresh, self.state, strict=True))
                self._view(state, self.energy, self.gradient)

    def _warms_within(self, steps: int) -> bool:
        """Whether the temperature rises from 0 after the first of these steps, where a block can't stop."""
        if not callable(self.kernel.temperature):
            return False
        _, temperatures = self.kernel.schedule(self.step, steps)
        return any(any(self._ladder.rises(before, now)) for before, now in itertools.pairwise(temperatures))

    def temperature_of_chain(self, chain: int, step: int | None = None) -> float:
        """The temperature of one chain, by default in the last step."""
        temperature = self.temperature if step is None else self.kernel.temperature_at(step)
        return self._ladder.by_chain(self._ladder.checked(temperature))[chain]

    def _refresh_settings(self) -> None:
        """Hand step size, temperature and inverse mass to the shards."""
        for shard in self.shards:
            shard.settings = {
                "step_size": self.step_size,
                "temperature": self._ladder.factor(self.temperature, shard.rows),
                "inverse_mass": self._mass(shard),
            }

    def _mass(self, shard: Shard) -> Factor:
        mass = self.inverse_mass
        if mass is None:
            return 1.0
        return mass[shard.rows] if mass.dim() == 2 else mass

    def _noise(self, shard: Shard) -> Tensor:
        """Draw standard normal noise, or zeros where it drops out: T = 0 consumes no random number."""
        return shard.draw_noise() if self._warm else shard.no_noise

    def _stepped(self, shard: Shard, noise: Tensor) -> State:
        """The state after a step of the dynamics."""
        kernel = self.kernel
        if isinstance(self.temperature, tuple) and self.temperature is not self._allowed:
            self._check_coldest(self.temperature)
        more: dict[str, Any] = {}
        if kernel.needs.second_gradient:
            evaluate = partial(self._evaluate_again, self._minibatch.of(shard.rows))
            more = {"energy": shard.energy, "gradient_at": evaluate}
        return kernel.step(shard.state, shard.gradient, noise, **shard.settings, **more)

    def _evaluate_again(self, minibatch: Minibatch, position: Tensor) -> tuple[Tensor, Tensor]:
        result = self._evaluate(position, minibatch)
        if isinstance(self.source, PlateRows) and not self.source.plates:  # the next minibatch is the same
            self._known = position, result
        return result

    def _check_coldest(self, temperatures: tuple[float, ...]) -> None:
        """Let the kernel refuse noise of a negative variance, which it sees of numbers only."""
        self._allowed = temperatures
        if (warm := [t for t in temperatures if t > 0]) and not self.kernel.needs.second_gradient:
            first = self.shards[0]
            state = tuple(part[:1] for part in first.state)
            settings = {**first.settings, "temperature": min(warm)}
            if self.inverse_mass is not None and self.inverse_mass.dim() == 2:
                settings["inverse_mass"] = self.inverse_mass[:1]
            noise = first.no_noise.narrow(-2, 0, 1)
            self.kernel.step(state, torch.zeros_like(state[0]), noise, **settings)

    def _compiles(self, warming_up: bool) -> bool:
        """Whether steps can be taken by compiled code, which checks nothing between them."""
        return (
            self._fused is not None
            and self._fused.gradient.mode == "compile"
            and not self.diverged
            and self.kernel.preconditioner.is_fixed(warming_up)
        )

    def _take_block(self, steps: int) -> None:
        """Take steps by compiled code; if something is not finite, again one by one to find what."""
        assert self._fused is not None and isinstance(self.source, PlateRows)
        step_sizes, temperatures = self.kernel.schedule(self.step, steps)
        if temperatures[0] != self.temperature:
            self._set_temperature(self._ladder.checked(temperatures[0]))
        sizes, heats = self._ladder.block(step_sizes, temperatures)
        warm = any(map(is_warm, temperatures))
        mass = () if self.inverse_mass is None else (self.inverse_mass,)
        second = self.kernel.needs.second_gradient
        rows = None
        for shard in self.shards:
            if warm:
                noise = self._noise_ahead.take(steps)[""]  # (k, c, d)
            else:
                noise = shard.no_noise.expand(steps, *shard.noise_shape).contiguous()
            rows = self._rows(steps, second) if rows is None else rows
            own = {n: r if r.dim() == 2 else r[:, shard.rows].contiguous() for n, r in rows.items()}
            state, energy, gradient, total = self._fused(
                (*shard.state, *mass),
                shard.gradient,
                noise,
                own,
                sizes,
                heats if heats.dim() == 1 else heats[:, shard.rows].contiguous(),
                shard.energy if second else None,
            )
            if math.isfinite(total):
                shard.commit(state[: len(shard.state)], energy, gradient)
            else:
                self._replay_block(shard, noise, own, zip(step_sizes, temperatures, strict=True))
        if second:
            self._minibatch = Minibatch({name: row[-1] for name, row in (rows or {}).items()})
        self.step_size, self.temperature = step_sizes[-1], temperatures[-1]
        self._warm = is_warm(self.temperature)
        if self.relaxed < 1:
            self.relaxed += sum(map(self.kernel.relaxation, step_sizes))
        self.step += steps

    def _rows(self, steps: int, second: bool) -> dict[str, Tensor]:
        """Rows of a block by plate, ``(k, C, B)`` or ``(k, B)``, with those of now before them if needed."""
        rows = self._rows_ahead.take(steps)
        if not second:
            return rows
        return {n: torch.cat([self._minibatch.indices[n].unsqueeze(0), new]) for n, new in rows.items()}

    def _replay_block(
        self,
        shard: Shard,
        noise: Tensor,
        rows: dict[str, Tensor],
        numbers: Iterable[tuple[float, Temperature]],
    ) -> None:
        """Take the steps of a block one by one, with the noise and the rows that it had."""
        start, before, second = self.step, self._minibatch, self.kernel.needs.second_gradient
        with _quiet():
            for i, (self.step_size, self.temperature) in enumerate(numbers):
                self.step = start + i
                self._refresh_settings()
                state = self._stepped(shard, noise[i])
                minibatch = Minibatch({name: row[i + second] for name, row in rows.items()})
                self._evaluate_at(shard, state, minibatch)
                self._minibatch = minibatch
        self.step, self._minibatch = start, before

    def _evaluate_at(self, shard: Shard, state: State, minibatch: Minibatch) -> None:
        """Evaluate energy and gradient of a shard at its new positions, and commit them."""
        ended, check = self._divergences, self._check_finite
        # A model may raise its own error at a position that is not finite: check before it is evaluated.
        check("position", state[0], shard, minibatch)
        if ended.ended:
            state = ended.freeze(shard.rows, state, shard.state)
        elif shard.alone and ended.on_divergence == "raise":  # nothing to go back to: free what would be kept
            shard.state, shard.gradient = state, shard.zeros
        if self._known is not None and self._known[0] is state[0]:
            energy, gradient = self._known[1]
        else:
            energy, gradient = self._evaluate(state[0], minibatch)
        check("gradient", gradient, shard, minibatch)
        check("log probability", energy, shard, minibatch, state[0])
        if ended.ended:
            before = (*shard.state, shard.energy, shard.gradient)
            *parts, energy, gradient = ended.freeze(shard.rows, (*state, energy, gradient), before)
            state = tuple(parts)
        shard.commit(state, energy, gradient)

    def _check_finite(
        self, what: str, values: Tensor, shard: Shard, minibatch: Minibatch, position: Tensor | None = None
    ) -> None:
        # A sum is half the price of isfinite().all() and can only err on the side of caution, by overflow.
        if not math.isfinite(values.sum().item()):
            self._divergences.check_finite(what, values, shard.rows, self.step, minibatch, position)

    def _evaluate(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        return self.gradient_of(position, minibatch)

    def _tune(self, warming_up: bool) -> None:
        """Let the preconditioner see the gradient; momenta keep their temperature under a new mass."""
        preconditioner = self.kernel.preconditioner
        self._tuning = preconditioner.update(self._tuning, self.gradient, warming_up)
        before, self.inverse_mass = self.inverse_mass, preconditioner.inverse_mass(self._tuning)
        if self.kernel.needs.momentum and self.inverse_mass is not before:
            momentum = rescale_momentum(self.state[1], before, self.inverse_mass)
            self._view((self.position, momentum, *self.state[2:]), self.energy, self.gradient)
        self._refresh_settings()

    def _explain(self, chain: int, minibatch: Minibatch) -> str:
        """What may have caused a divergence, with the cure."""
        start = None if self._blame is None else self._blame(self, chain, minibatch)
        return start or (
            f"lower step_size ({self.step_size:g} at this step; a kernel by from_sgd has it from lr), or see "
            "whether the model's log density is finite at the chain's position"
        )

    def report(self) -> dict[str, str]:
        """What a progress bar shows: step size and temperature, and averages over the chains."""
        ladder = self._ladder.by_chain(self.temperature)
        shown = {
            "step size": f"{self.step_size:.2e}",
            "temp.": " to ".join(f"{t:.2g}" for t in sorted({min(ladder), max(ladder)})),
            "potential": f"{self.energy.mean().item():.4g}",
        }
        if self.kernel.needs.momentum:
            kinetic = [(s.state[1].square() * self._mass(s)).mean().item() for s in self.shards]
            shown["kinetic temp."] = f"{sum(kinetic) / len(kinetic):.2g}"
        return shown


def _quiet() -> ExitStack:
    """No autograd outside of the gradient, and no validation: it takes a third of the time of a step."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(pyro.validation_enabled(False))
    return stack
