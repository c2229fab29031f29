"""Chains side by side: where they stand, how they take steps, and what they leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyro
import torch
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.infer.fused import FusedSteps, block_length
from pyro_sym.infer.gradient import ChainGradient, chain_by_chain, potential_on
from pyro_sym.infer.minibatch import Loader, Minibatch, PlateRows
from pyro_sym.infer.potential import Potential
from pyro_sym.infer.preconditioners import rescale_momentum
from pyro_sym.infer.temperature import thermometers

if TYPE_CHECKING:
    from pyro_sym.infer.skeleton import StochasticGradientKernel

__all__ = ["Chains", "Divergence", "Recorder", "State"]

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

    Args:
        kernel: the dynamics, the schedules and the preconditioner.
        potential: the potential energy.
        gradient: its values and gradients for all chains at once.
        source: where minibatches come from.
        position: where the chains start, of shape ``(C, d)``.
        on_divergence: ``"raise"`` an error, or ``"mask"`` the chain: it stays where it last was finite.
        fused: steps of the kernel with plain gradients, compiled.

    Attributes:
        state: the positions, and what the dynamics carries along.
        energy: :math:`U`, of shape ``(C,)``.
        gradient: :math:`\nabla U`, of shape ``(C, d)``.
        diverged: by chain, how it ended.
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
        self.temperature = kernel.temperature_at(0)
        self.diverged: dict[int, Divergence] = {}
        self._gradient_of = gradient
        self._fused = fused
        self._last_numbers: tuple[Any, list[Tensor]] | None = None
        if fused is not None:
            assert isinstance(source, PlateRows)
            self._noise_ahead = _Ahead(lambda steps: {"": self._draw_noise(steps)}, position.numel())
            rows = len(position) * sum(plate.subsample_size for plate in source.plates.values())
            self._rows_ahead = _Ahead(source.draw_many, rows)
        self._noiseless = position.new_zeros(()).expand_as(position)
        sizes = list(potential.sizes.values())
        self._tuning = kernel.preconditioner.init(position, sizes)
        self.inverse_mass = kernel.preconditioner.inverse_mass(self._tuning)
        self.energy = position.new_full((len(position),), math.nan)
        self.gradient = torch.zeros_like(position)
        with _quiet():
            parts = kernel.initial_state(position, self._noise(), self.temperature, self._mass, sizes)
            self.state = tuple(part.contiguous() for part in parts)
            self._arrive(self.state, warming_up=True)

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
            self._arrive((position, *self.state[1:]), warming_up=False)

    def advance(self, steps: int, *, warming_up: bool) -> None:
        """Take steps.

        Args:
            steps: how many.
            warming_up: whether the preconditioner may still learn.

        Raises:
            DivergenceError: if a position, gradient or energy is not finite, unless chains are masked.
        """
        # Blocks of one length, that divides what is asked for: each length is compiled by itself.
        block = math.gcd(steps, block_length(self.position.numel()))
        while steps > 0:
            if self._compiles(warming_up):
                self._take_block(block)
                steps -= block
            else:
                with _quiet():
                    self._take_step(warming_up)
                steps -= 1

    def _take_step(
        self, warming_up: bool, noise: Tensor | None = None, minibatch: Minibatch | None = None
    ) -> None:
        self.step_size = self.kernel.step_size_at(self.step)
        self.temperature = self.kernel.temperature_at(self.step)
        noise = self._noise() if noise is None else noise
        # Old and new states side by side are for chains that may have to stay behind, or that are small.
        if self.on_divergence == "raise" and chain_by_chain(*self.position.shape):
            for chain in range(len(self.position)):
                one = slice(chain, chain + 1)
                for whole, part in zip(self.state, self._moved(noise[one], one), strict=True):
                    whole[one] = part
            state = self.state
        else:
            state = self._moved(noise, slice(None))
        del noise
        self._arrive(state, warming_up, minibatch)
        self.step += 1

    def _moved(self, noise: Tensor, chains: slice) -> State:
        mass = self._mass
        return self.kernel.move(
            tuple(part[chains] for part in self.state),
            self.gradient[chains],
            noise,
            step_size=self.step_size,
            temperature=self.temperature,
            inverse_mass=mass[chains] if isinstance(mass, Tensor) and mass.dim() == 2 else mass,
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
        if any(temperatures):
            noise = self._noise_ahead.take(steps)[""]
        else:
            noise = self._noiseless.expand(steps, *self._noiseless.shape).contiguous()
        rows = self._rows_ahead.take(steps)
        mass = () if self.inverse_mass is None else (self.inverse_mass,)
        numbers = self._numbers(step_sizes, temperatures)
        state, energy, gradient, total = self._fused(
            (*self.state, *mass), self.gradient, noise, rows, *numbers
        )
        if math.isfinite(total):
            self.state = state[: len(self.state)]
            self.energy, self.gradient = energy, gradient
            self.step_size, self.temperature = step_sizes[-1], temperatures[-1]
            self.step += steps
        else:
            with _quiet():
                for i in range(steps):
                    minibatch = Minibatch({name: row[i] for name, row in rows.items()})
                    self._take_step(False, noise[i], minibatch)

    def _draw_noise(self, steps: int) -> Tensor:
        like = self._noiseless
        return torch.randn(steps, *like.shape, dtype=like.dtype, device=like.device)

    def _numbers(self, step_sizes: tuple[float, ...], temperatures: tuple[float, ...]) -> list[Tensor]:
        """Step sizes and temperatures of a block as a tensor, kept for as long as they stay the same."""
        if self._last_numbers is None or self._last_numbers[0] != (step_sizes, temperatures):
            like = self._noiseless
            numbers = torch.tensor([step_sizes, temperatures], dtype=like.dtype, device=like.device)
            self._last_numbers = ((step_sizes, temperatures), list(numbers))
        return self._last_numbers[1]

    @property
    def _mass(self) -> Tensor | float:
        return 1.0 if self.inverse_mass is None else self.inverse_mass

    def _noise(self) -> Tensor:
        """Draw standard normal noise, or zeros where it drops out: T = 0 consumes no random number."""
        if self.temperature == 0:
            return self._noiseless
        shape = self._noiseless.shape
        return torch.randn(shape, dtype=self._noiseless.dtype, device=self._noiseless.device)

    def report(self) -> dict[str, str]:
        """What a progress bar shows: step size and temperature, and averages over the chains."""
        shown = {
            "step size": f"{self.step_size:.2e}",
            "temp.": f"{self.temperature:.2g}",
            "potential": f"{self.energy.mean().item():.4g}",
        }
        if self.momentum is not None:
            kinetic = (self.momentum.square() * self._mass).mean().item()
            shown["kinetic temp."] = f"{kinetic:.2g}"
        return shown

    def _arrive(self, state: State, warming_up: bool, minibatch: Minibatch | None = None) -> None:
        """Evaluate energy and gradient at new positions on a fresh minibatch, and take them over."""
        minibatch = self.source.draw() if minibatch is None else minibatch
        # A model may fail in ways of its own at a position that is not finite: look before it is evaluated.
        self._look_at("position", state[0])
        state = self._hold_diverged(state, self.state)
        if self.on_divergence == "raise":  # nothing to go back to: free what would be kept for that
            self.state, self.gradient = state, self._noiseless
        energy, gradient = self._evaluate(state[0], minibatch)
        self._look_at("gradient", gradient)
        self._look_at("log probability", energy, state[0], minibatch)
        *arrived, self.energy, self.gradient = self._hold_diverged(
            (*state, energy, gradient), (*self.state, self.energy, self.gradient)
        )
        self.state = tuple(arrived)
        self._tune(warming_up)

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
        self, what: str, values: Tensor, position: Tensor | None = None, minibatch: Minibatch | None = None
    ) -> None:
        """Find chains with values that are not finite, and raise or note them."""
        # A sum is half the price of isfinite().all() and can only err on the side of caution, by overflow.
        if math.isfinite(values.sum().item()):
            return
        finite = values.reshape(len(values), -1).isfinite().all(-1)
        for chain in (~finite).nonzero().flatten().tolist():
            if chain in self.diverged:
                continue
            if position is None:
                sites = self.potential.unflatten(values[chain])
            else:
                assert minibatch is not None
                sites = self._log_joint_terms(position[chain], minibatch.of(chain))
            first = next((name for name, value in sites.items() if not value.isfinite().all()), None)
            where = "the sum over sites" if first is None else f"site {first!r}"
            divergence = Divergence(self.step, f"the {what} of {where} is not finite")
            if self.on_divergence == "raise":
                raise DivergenceError(self._message(chain, divergence))
            self.diverged[chain] = divergence

    def _log_joint_terms(self, position: Tensor, minibatch: Minibatch) -> dict[str, Tensor]:
        potential = potential_on(self.potential, minibatch)
        values = potential.constrain(potential.unflatten(position))
        return potential.program.log_joint_terms(values, minibatch.indices)

    def _message(self, chain: int, divergence: Divergence) -> str:
        who = f"chain {chain}, " if len(self.position) > 1 else ""
        return (
            f"{who}step {divergence.step}: {divergence.what}; lower step_size ({self.step_size:g} at this "
            "step), or see whether the model's log density is finite where the chain has come to"
        )

    def _hold_diverged(self, now: State, then: State) -> State:
        """Chains that have diverged stay where they last were finite."""
        if not self.diverged:
            return now
        ended = torch.zeros(len(self.position), dtype=torch.bool, device=self.position.device)
        ended[list(self.diverged)] = True
        return tuple(
            torch.where(ended.reshape(-1, *(1,) * (new.dim() - 1)), old, new)
            for new, old in zip(now, then, strict=True)
        )


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
        self._blocks: Iterator[dict[str, Tensor]] = iter(())
        self._steps = 0

    def take(self, steps: int) -> dict[str, Tensor]:
        """The numbers of the next block of steps."""
        block = next(self._blocks, None) if steps == self._steps else None
        if block is None:
            count = max(1, min(self.MAX_BLOCKS, self.MAX_NUMEL // max(1, steps * self._numel)))
            drawn = self._draw(steps * count)
            parts = zip(*(tensor.split(steps) for tensor in drawn.values()), strict=True)
            blocks = [dict(zip(drawn, part, strict=True)) for part in parts] or [{}] * count
            self._blocks, self._steps = iter(blocks), steps
            block = next(self._blocks)
        return block


def _quiet() -> ExitStack:
    """No autograd outside of the gradient, and no validation: it takes a third of the time of a step."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(pyro.validation_enabled(False))
    return stack


class Recorder:
    """Draws and their statistics, gathered in blocks: the statistics of many draws cost as much as of one.

    Args:
        chains: the chains whose draws are kept.
    """

    BLOCK_DRAWS, BLOCK_NUMEL = 256, 2**16

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._pending: list[list[Tensor]] = []
        self._settings: list[tuple[float, float]] = []
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
        if full or chain_by_chain(*chains.position.shape):  # whose tensors are written over by the next step
            self._flush()

    def statistics(self) -> dict[str, Tensor]:
        """Statistics of all draws so far, in float64, of shape ``(draws, C)`` or ``(draws, C, sites)``."""
        self._flush()
        return {name: torch.cat(blocks) for name, blocks in self._blocks.items()}

    def _flush(self) -> None:
        if not self._pending:
            return
        energy, *parts = (_stack(several) for several in zip(*self._pending, strict=True))
        energy = energy.double()
        block = self._thermometers(parts)
        block |= {"lp": -energy, "potential_energy": energy, "energy": energy}
        if "kinetic_temperature" in block:
            block["energy"] = energy + block["kinetic_temperature"] * self._chains.potential.size / 2
        step_size, temperature = torch.tensor(self._settings, dtype=torch.float64).T
        block["step_size"] = step_size.unsqueeze(-1).expand_as(energy)
        block["temperature"] = temperature.unsqueeze(-1).expand_as(energy)
        for name, values in block.items():
            self._blocks.setdefault(name, []).append(values)
        self._pending, self._settings = [], []

    def _thermometers(self, parts: list[Tensor]) -> dict[str, Tensor]:
        sizes = self._chains.potential.sizes
        if not chain_by_chain(*self._chains.position.shape):
            return thermometers(*parts, sizes=sizes)
        each = [
            thermometers(*chain, sizes=sizes) for chain in zip(*(p.unbind(1) for p in parts), strict=True)
        ]
        return {name: torch.stack([one[name] for one in each], 1) for name in each[0]}


def _stack(tensors: tuple[Tensor, ...]) -> Tensor:
    """``torch.stack`` that copies nothing where there is one: it may be large."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
