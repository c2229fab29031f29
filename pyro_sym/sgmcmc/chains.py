"""Chains side by side: where they stand, how they take steps, and how they end."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyro
import torch
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.model.gradient import ChainGradient, chain_slices
from pyro_sym.model.minibatch import Loader, Minibatch, PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.bad_start import EARLY, Start, blame_start
from pyro_sym.sgmcmc.preconditioners import rescale_momentum
from pyro_sym.sgmcmc.step_blocks import FusedSteps, block_length

if TYPE_CHECKING:
    from pyro_sym.sgmcmc.kernel import StochasticGradientKernel

__all__ = ["Chains", "Divergence", "State", "Temperature"]

Temperature = float | tuple[float, ...]
"""Of one step: that of all chains, or one for each chain."""

State = tuple[Tensor, ...]
"""What a dynamics carries from step to step: the positions ``(C, d)``, then what it needs besides."""


@dataclass(frozen=True)
class Divergence:
    """The end of a chain: at which step, and what was the first thing not finite, in words."""

    step: int
    what: str


class Chains:
    r"""All chains of a run as one tensor, of shape ``(C, d)``.

    Energy and gradient are those at ``state[0]``, on the minibatch of the step to come; so every position has
    its energy when it becomes a draw, on a minibatch independent of it.

    Small chains take each step together. Large ones (:func:`~pyro_sym.model.gradient.groups`) take it one
    after the other, and write what comes of it over what was there: so there are positions, momenta and
    gradients, of ``C d`` values each, and besides them the noise and intermediate results of one chain.

    Args:
        kernel: the dynamics, the schedules and the preconditioner.
        potential: the potential energy.
        gradient: its values and gradients for all chains at once.
        source: where minibatches come from.
        position: where the chains start, of shape ``(C, d)``; taken over, not copied.
        on_divergence: ``"raise"`` an error, or ``"mask"`` the chain: it stays where it last was finite.
        fused: steps of the kernel with plain gradients, compiled.

    Attributes:
        state: the positions, and what the dynamics carries along.
        energy: :math:`U`, of shape ``(C,)``.
        gradient: :math:`\nabla U`, of shape ``(C, d)``.
        diverged: by chain, how it ended.
        relaxed: how many relaxation times chains have had since the temperature last rose from 0; infinite
            if it never did. Below 1 the states are not draws of the target yet.
        start: where the chains started, as long as a divergence may come of it.

    Raises:
        ValueError: if the kernel has another number of temperatures than there are chains.
    """

    def __init__(
        self,
        kernel: StochasticGradientKernel,
        potential: Potential,
        gradient: ChainGradient,
        source: PlateRows | Loader,
        position: Tensor,
        on_divergence: Literal["raise", "mask"] = "raise",
        fused: FusedSteps | None = None,
    ) -> None:
        self.kernel = kernel
        self.potential = potential
        self.source = source
        self.on_divergence = on_divergence
        self.step = 0
        self.step_size = math.nan
        self.start: Start | None = None
        self._num_chains = len(position)
        self._noiseless = position.new_zeros(()).expand_as(position)
        self._ladder: tuple[Any, Tensor] | None = None
        self._allowed: tuple[float, ...] | None = None
        self.temperature = self._checked(kernel.temperature_at(0))
        self.relaxed = math.inf
        self.diverged: dict[int, Divergence] = {}
        self._gradient_of = gradient
        self._fused = fused
        self._last_numbers: tuple[Any, tuple[Tensor, Tensor]] | None = None
        self._groups = chain_slices(*position.shape)
        self._ahead: list[_Ahead] = []
        if fused is not None:
            assert isinstance(source, PlateRows)
            noise = position[self._groups[0]].numel()
            self._noise_ahead = _Ahead(lambda steps: {"": self._draw_noise(steps)}, noise)
            rows = len(position) * sum(plate.subsample_size for plate in source.plates.values())
            self._rows_ahead = _Ahead(source.draw_many, rows)
            self._ahead = [self._noise_ahead, self._rows_ahead]
        sizes = list(potential.sizes.values())
        self._tuning = kernel.preconditioner.init(position, sizes)
        self.inverse_mass = kernel.preconditioner.inverse_mass(self._tuning)
        self.energy = position.new_full((len(position),), math.nan)
        with _quiet():
            self.state = self._initial_state(position, sizes)
            self.gradient = torch.zeros_like(position)
            minibatch = self.source.draw()
            for group in self._groups:
                self._arrive(group, tuple(part[group] for part in self.state), minibatch.of(group))
            if self._together:  # the positions of large chains are written over
                self.start = Start.of(self.energy, self.gradient, self.position, sizes)
            self._tune(warming_up=True)

    def _initial_state(self, position: Tensor, sizes: list[int]) -> State:
        state: list[Tensor] = []
        for group in self._groups:
            noise, mass = self._noise(group), self._mass_of(group)
            temperature = self._temperature_of(group)
            parts = self.kernel.initial_state(position[group], noise, temperature, mass, sizes)
            if self._together:
                return tuple(part.contiguous() for part in parts)
            state = state or [
                position,
                *(part.new_empty(len(position), *part.shape[1:]) for part in parts[1:]),
            ]
            for whole, part in zip(state[1:], parts[1:], strict=True):
                whole[group] = part
        return tuple(state)

    @property
    def _together(self) -> bool:
        return len(self._groups) == 1

    @property
    def position(self) -> Tensor:
        """Unconstrained values, of shape ``(C, d)``."""
        return self.state[0]

    @property
    def momentum(self) -> Tensor | None:
        """The momenta, of shape ``(C, d)``, where the dynamics has them."""
        return self.state[1] if self.kernel.has_momentum else None

    def move_to(self, position: Tensor) -> None:
        """Go on from other positions, with the momenta of now."""
        with _quiet():
            minibatch = self.source.draw()
            for group in self._groups:
                state = (position[group], *(part[group] for part in self.state[1:]))
                self._arrive(group, state, minibatch.of(group))
            self._tune(warming_up=False)

    def state_dict(self) -> dict[str, Any]:
        """All that steps to come depend on, besides kernel and data and torch's random state."""
        return {
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, of chains of the same kernel, model and data."""
        device = self.position.device
        self.step, self.step_size, self.temperature = (
            state[name] for name in ("step", "step_size", "temperature")
        )
        self.relaxed = state.get("relaxed", math.inf)
        self.state = tuple(part.to(device) for part in state["state"])
        self.energy, self.gradient = state["energy"].to(device), state["gradient"].to(device)
        self._tuning = {name: values.to(device) for name, values in state["tuning"].items()}
        self.inverse_mass = self.kernel.preconditioner.inverse_mass(self._tuning)
        self.diverged.clear()
        self.diverged.update({chain: Divergence(*end) for chain, end in state["diverged"].items()})
        self.source.load_state_dict(state["source"])
        for ahead, own in zip(self._ahead, state["ahead"], strict=True):
            ahead.load_state_dict(own, device)
        for gradient, own in zip(self._gradients(), state["gradients"], strict=True):
            gradient.load_state_dict(own)

    def _gradients(self) -> list[ChainGradient]:
        return [self._gradient_of] if self._fused is None else [self._gradient_of, self._fused.gradient]

    def advance(
        self, steps: int, *, warming_up: bool, tick: Callable[[int], None] = lambda steps: None
    ) -> None:
        """Take steps.

        Args:
            steps: how many.
            warming_up: whether the preconditioner may still learn.
            tick: is called with the number of steps that were just taken, one or those of a block.

        Raises:
            DivergenceError: if a position, gradient or energy is not finite, unless chains are masked.
        """
        # Blocks of one length, that divides what is asked for: each length is compiled by itself.
        block = math.gcd(steps, block_length(self.position[self._groups[0]].numel()))
        if self.step >= EARLY:
            self.start = None
        while steps > 0:
            if self._compiles(warming_up) and not self._warms_within(block):
                self._take_block(block)
                tick(block)
            else:
                with _quiet():
                    for _ in range(block):
                        self._take_step(warming_up)
                        tick(1)
            steps -= block

    def _take_step(self, warming_up: bool) -> None:
        self.step_size = self.kernel.step_size_at(self.step)
        self._set_temperature(self.kernel.temperature_at(self.step))
        minibatch = None
        for group in self._groups:
            state = self._moved(self._noise(group), group)
            minibatch = self.source.draw() if minibatch is None else minibatch
            self._arrive(group, state, minibatch.of(group))
        self._tune(warming_up)
        self._relax(self.step_size)
        self.step += 1

    def _warms_within(self, steps: int) -> bool:
        """Whether the temperature rises from 0 after the first of these steps, where a block can't stop."""
        if not callable(self.kernel.temperature):
            return False
        _, temperatures = self.kernel.schedule(self.step, steps)
        return any(any(self._rises(was, now)) for was, now in itertools.pairwise(temperatures))

    def _rises(self, was: Temperature, now: Temperature) -> list[bool]:
        """Whether all chains, or which of them, warm up from temperature 0."""
        if not isinstance(was, tuple) and not isinstance(now, tuple):
            return [was == 0 < now]
        return [a == 0 < b for a, b in zip(self._by_chain(was), self._by_chain(now), strict=True)]

    def _set_temperature(self, temperature: Temperature) -> None:
        """Let the step to come have this temperature.

        Where it rises from 0, momenta and all else that the dynamics carries besides positions are drawn
        anew: those of an optimiser have no temperature.
        """
        now = self._checked(temperature)
        rises = self._rises(self.temperature, now)
        self.temperature = now
        if any(rises):
            self.relaxed = 0.0
            if len(self.state) > 1:
                fresh = self._initial_state(self.position, list(self.potential.sizes.values()))
                risen = torch.tensor(rises, device=self.position.device).unsqueeze(-1)  # (C, 1) or (1, 1)
                self.state = tuple(torch.where(risen, *two) for two in zip(fresh, self.state, strict=True))

    def _relax(self, *step_sizes: float) -> None:
        if self.relaxed < 1:
            self.relaxed += sum(map(self.kernel.relaxation, step_sizes))

    def _moved(self, noise: Tensor, group: slice) -> State:
        if isinstance(self.temperature, tuple) and self.temperature is not self._allowed:
            self._check_coldest(self.temperature)
        return self.kernel.move(
            tuple(part[group] for part in self.state),
            self.gradient[group],
            noise,
            step_size=self.step_size,
            temperature=self._temperature_of(group),
            inverse_mass=self._mass_of(group),
        )

    def _compiles(self, warming_up: bool) -> bool:
        """Whether steps can be taken by compiled code: it looks at nothing between them."""
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
        self._set_temperature(temperatures[0])
        sizes, heats = self._numbers(step_sizes, temperatures)
        mass = () if self.inverse_mass is None else (self.inverse_mass,)
        rows = None
        for group in self._groups:
            if any(map(is_warm, temperatures)):
                noise = self._noise_ahead.take(steps)[""]
            else:
                like = self._noiseless[group]
                noise = like.expand(steps, *like.shape).contiguous()
            rows = self._rows_ahead.take(steps) if rows is None else rows
            own = {name: row if row.dim() == 2 else row[:, group].contiguous() for name, row in rows.items()}
            state = tuple(part[group] for part in self.state)
            after, energy, gradient, total = self._fused(
                (*state, *mass),
                self.gradient[group],
                noise,
                own,
                sizes,
                heats if heats.dim() == 1 else heats[:, group].contiguous(),
            )
            if math.isfinite(total):
                self._take_over(group, (*after[: len(state)], energy, gradient))
            else:
                self._take_again(group, noise, own, step_sizes, temperatures)
        self.step_size, self.temperature = step_sizes[-1], temperatures[-1]
        self._relax(*step_sizes)
        self.step += steps

    def _take_again(
        self,
        group: slice,
        noise: Tensor,
        rows: dict[str, Tensor],
        step_sizes: tuple[float, ...],
        temperatures: tuple[Temperature, ...],
    ) -> None:
        """The steps of a block one by one, with the noise and the rows that it had."""
        start = self.step
        with _quiet():
            for i, (self.step_size, self.temperature) in enumerate(
                zip(step_sizes, temperatures, strict=True)
            ):
                self.step = start + i
                minibatch = Minibatch({name: row[i] for name, row in rows.items()})
                self._arrive(group, self._moved(noise[i], group), minibatch)
        self.step = start

    def _draw_noise(self, steps: int) -> Tensor:
        like = self._noiseless[self._groups[0]]
        return torch.randn(steps, *like.shape, dtype=like.dtype, device=like.device)

    def _numbers(
        self, step_sizes: tuple[float, ...], temperatures: tuple[Temperature, ...]
    ) -> tuple[Tensor, Tensor]:
        """Step sizes ``(k,)`` and temperatures ``(k,)`` or ``(k, C, 1)`` of a block, kept while they stay."""
        if self._last_numbers is None or self._last_numbers[0] != (step_sizes, temperatures):
            like = self._noiseless
            several: list[Any] = [self._checked(temperature) for temperature in temperatures]
            if any(isinstance(temperature, tuple) for temperature in several):
                several = [[[t] for t in self._by_chain(temperature)] for temperature in several]
            numbers = (
                torch.tensor(step_sizes, dtype=like.dtype, device=like.device),
                torch.tensor(several, dtype=like.dtype, device=like.device),
            )
            self._last_numbers = ((step_sizes, temperatures), numbers)
        return self._last_numbers[1]

    def _checked(self, temperature: Temperature) -> Temperature:
        """A temperature of a kernel, which has to have one for all chains, or as many as there are chains."""
        if isinstance(temperature, tuple) and len(temperature) != self._num_chains:
            raise ValueError(
                f"temperature has {len(temperature)} values, and there are {self._num_chains} chains; pass "
                "one for each chain, or a number for all"
            )
        return temperature

    def _by_chain(self, temperature: Temperature) -> tuple[float, ...]:
        return temperature if isinstance(temperature, tuple) else (temperature,) * self._num_chains

    def temperature_of_chain(self, chain: int, step: int | None = None) -> float:
        """The temperature of one chain, by default in the last step."""
        temperature = self.temperature if step is None else self._checked(self.kernel.temperature_at(step))
        return temperature[chain] if isinstance(temperature, tuple) else temperature

    def _temperature_of(self, group: slice) -> float | Tensor:
        """The temperature of chains in this step: a number, or of shape ``(C, 1)``."""
        if not isinstance(self.temperature, tuple):
            return self.temperature
        if self._ladder is None or self._ladder[0] != self.temperature:
            by_chain = torch.tensor(
                self.temperature, dtype=self._noiseless.dtype, device=self._noiseless.device
            )
            self._ladder = (self.temperature, by_chain.unsqueeze(-1))  # (C, 1)
        return self._ladder[1][group]

    def _mass_of(self, group: slice) -> Tensor | float:
        mass = self.inverse_mass
        if mass is None:
            return 1.0
        return mass[group] if mass.dim() == 2 else mass

    def _check_coldest(self, temperatures: tuple[float, ...]) -> None:
        """Let the kernel refuse noise of a negative variance, which it sees of numbers only."""
        self._allowed = temperatures
        if warm := [temperature for temperature in temperatures if temperature > 0]:
            row = tuple(part[:1] for part in self.state)
            zeros, mass = torch.zeros_like(row[0]), self._mass_of(slice(1))
            self.kernel.move(
                row, zeros, zeros, step_size=self.step_size, temperature=min(warm), inverse_mass=mass
            )

    def _noise(self, group: slice) -> Tensor:
        """Draw standard normal noise, or zeros where it drops out: T = 0 consumes no random number."""
        like = self._noiseless[group]
        if not is_warm(self.temperature):
            return like
        return torch.randn(like.shape, dtype=like.dtype, device=like.device)

    def report(self) -> dict[str, str]:
        """What a progress bar shows: step size and temperature, and averages over the chains."""
        shown = {
            "step size": f"{self.step_size:.2e}",
            "temp.": " to ".join(f"{t:.2g}" for t in sorted({*self._extremes()})),
            "potential": f"{self.energy.mean().item():.4g}",
        }
        if self.momentum is not None:
            momentum = self.momentum
            kinetic = [(momentum[g].square() * self._mass_of(g)).mean().item() for g in self._groups]
            shown["kinetic temp."] = f"{sum(kinetic) / len(kinetic):.2g}"
        return shown

    def _extremes(self) -> tuple[float, float]:
        temperatures = self._by_chain(self.temperature)
        return min(temperatures), max(temperatures)

    def _arrive(self, group: slice, state: State, minibatch: Minibatch) -> None:
        """Evaluate energy and gradient of chains at their new positions, and take them over."""
        # A model may fail in ways of its own at a position that is not finite: look before it is evaluated.
        self._look_at("position", group, state[0], minibatch)
        state = self._hold_diverged(group, state)
        if self._together and self.on_divergence == "raise":  # nothing to go back to: free what would be kept
            self.state, self.gradient = state, self._noiseless
        energy, gradient = self._evaluate(state[0], minibatch)
        self._look_at("gradient", group, gradient, minibatch)
        self._look_at("log probability", group, energy, minibatch, state[0])
        self._take_over(group, self._hold_diverged(group, (*state, energy, gradient)))

    def _take_over(self, group: slice, parts: State) -> None:
        """Let state, energies and gradients of chains be these."""
        if self._together:
            *state, self.energy, self.gradient = parts
            self.state = tuple(state)
        else:
            for whole, part in zip((*self.state, self.energy, self.gradient), parts, strict=True):
                whole[group] = part

    def _evaluate(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        return self._gradient_of(position, minibatch)

    def _tune(self, warming_up: bool) -> None:
        """Let the preconditioner see the gradient; momenta keep their temperature under a new mass."""
        preconditioner = self.kernel.preconditioner
        self._tuning = preconditioner.update(self._tuning, self.gradient, warming_up)
        before, self.inverse_mass = self.inverse_mass, preconditioner.inverse_mass(self._tuning)
        if self.kernel.has_momentum and self.inverse_mass is not before:
            momentum = rescale_momentum(self.state[1], before, self.inverse_mass)
            self.state = (self.state[0], momentum, *self.state[2:])

    def _look_at(
        self,
        what: str,
        group: slice,
        values: Tensor,
        minibatch: Minibatch,
        position: Tensor | None = None,
    ) -> None:
        """Find chains with values that are not finite, and raise or note them."""
        # A sum is half the price of isfinite().all() and can only err on the side of caution, by overflow.
        if math.isfinite(values.sum().item()):
            return
        finite = values.reshape(len(values), -1).isfinite().all(-1)
        chains = range(len(self.position))[group]
        for row in (~finite).nonzero().flatten().tolist():
            chain = chains[row]
            if chain in self.diverged:
                continue
            if position is None:
                sites = self.potential.unflatten(values[row])
            else:
                sites = self._log_joint_terms(position[row], minibatch.of(row))
            first = next((name for name, value in sites.items() if not value.isfinite().all()), None)
            where = "the sum over sites" if first is None else f"site {first!r}"
            divergence = Divergence(self.step, f"the {what} of {where} is not finite")
            if self.on_divergence == "raise":
                raise DivergenceError(self._message(chain, divergence, minibatch))
            self.diverged[chain] = divergence

    def _log_joint_terms(self, position: Tensor, minibatch: Minibatch) -> dict[str, Tensor]:
        values = self.potential.constrain(self.potential.unflatten(position))
        return self.potential.program.log_joint_terms(values, minibatch.indices, minibatch.args)

    def _message(self, chain: int, divergence: Divergence, minibatch: Minibatch) -> str:
        who = f"chain {chain}, " if len(self.position) > 1 else ""
        cure = blame_start(self, chain, minibatch) or (
            f"lower step_size ({self.step_size:g} at this step; a kernel by from_sgd has it from lr), or see "
            "whether the model's log density is finite where the chain has come to"
        )
        return f"{who}step {divergence.step}: {divergence.what}; {cure}"

    def _hold_diverged(self, group: slice, now: State) -> State:
        """Chains that have diverged stay where they last were finite."""
        if not self.diverged:
            return now
        ended = torch.zeros(len(self.position), dtype=torch.bool, device=self.position.device)
        ended[list(self.diverged)] = True
        then = (*self.state, self.energy, self.gradient)[: len(now)]
        return tuple(
            torch.where(ended[group].reshape(-1, *(1,) * (new.dim() - 1)), old[group], new)
            for new, old in zip(now, then, strict=True)
        )


def is_warm(temperature: Temperature) -> bool:
    """Whether any chain has noise."""
    return any(temperature) if isinstance(temperature, tuple) else temperature > 0


class _Ahead:
    """Random numbers drawn for many blocks of steps at once: what a call costs by itself is shared.

    Args:
        draw: makes tensors by name, with so many steps along the first dim.
        numel: how many numbers a step takes.
    """

    MAX_NUMEL, MAX_BLOCKS = 2**16, 64

    def __init__(self, draw: Callable[[int], dict[str, Tensor]], numel: int) -> None:
        self._draw = draw
        self._numel = numel
        self._blocks: deque[dict[str, Tensor]] = deque()
        self._steps = 0

    def take(self, steps: int) -> dict[str, Tensor]:
        """The numbers of the next block of steps."""
        if not self._blocks or steps != self._steps:
            count = max(1, min(self.MAX_BLOCKS, self.MAX_NUMEL // max(1, steps * self._numel)))
            drawn = self._draw(steps * count)
            parts = zip(*(tensor.split(steps) for tensor in drawn.values()), strict=True)
            blocks = [dict(zip(drawn, part, strict=True)) for part in parts] or [{}] * count
            self._blocks, self._steps = deque(blocks), steps
        return self._blocks.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The numbers drawn and not yet taken."""
        blocks = [{name: numbers.clone() for name, numbers in block.items()} for block in self._blocks]
        return {"steps": self._steps, "blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on with these numbers."""
        self._steps = state["steps"]
        self._blocks = deque(
            {name: numbers.to(device) for name, numbers in block.items()} for block in state["blocks"]
        )


def _quiet() -> ExitStack:
    """No autograd outside of the gradient, and no validation: it takes a third of the time of a step."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(pyro.validation_enabled(False))
    return stack
