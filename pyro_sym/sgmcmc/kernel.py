"""The contract of a kernel: a dynamics as a value, with what it needs of a driver."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor

from pyro_sym.model.gradient import Jit
from pyro_sym.sgmcmc.noise import draw_momentum
from pyro_sym.sgmcmc.preconditioners import Identity, Preconditioner
from pyro_sym.sgmcmc.schedules import cycle_of

__all__ = ["Factor", "Kernel", "Needs", "Options", "Schedule", "State", "Temperature", "is_warm"]

State = tuple[Tensor, ...]
"""What a dynamics carries from step to step: the positions ``(C, d)``, then what it needs besides."""

Schedule = float | Callable[[int], float]
"""A constant, or a function of the step (counted from 0, warm-up included)."""

Temperatures = float | Sequence[float] | Tensor | Callable[[int], float | Sequence[float] | Tensor]
"""A number, one for each chain, or a function of the step (counted from 0) that returns either."""

Temperature = float | tuple[float, ...]
"""Of one step: that of all chains, or one for each chain."""

Factor = float | Tensor
"""A number, or a tensor: without dims for what a schedule gives, or broadcastable to the positions."""


class Options(TypedDict, total=False):
    """What all kernels take besides their own numbers; see :class:`~pyro_sym.StochasticGradientKernel`."""

    temperature: Temperatures
    thinning: int
    init_strategy: Callable[[Any], Tensor]
    batches: Iterable[Any] | None
    shared_minibatch: bool
    gradient: Literal["plain", "control_variate"]
    center: Mapping[str, Tensor] | None
    preconditioner: Preconditioner | None
    jit: Jit


@dataclass(frozen=True)
class Needs:
    """What a dynamics needs of the driver that runs it.

    Attributes:
        momentum: whether ``state[1]`` is a momentum of law :math:`N(0, T / G)`: it keeps its temperature when
            a preconditioner changes the mass, and the kinetic temperature is measured on it.
        noises: how many standard normal draws of the shape of the positions a step takes. The noise of a
            step has the shape ``(C, d)``, or ``(noises, C, d)`` if there are several.
        second_gradient: whether a step evaluates the potential energy elsewhere, to kick twice or to accept
            or reject. Then :meth:`Kernel.step` gets ``energy`` and ``gradient_at`` as well.
        cold_limit: whether the dynamics has a limit at temperature 0. A kernel without one refuses it.
    """

    momentum: bool = True
    noises: int = 1
    second_gradient: bool = False
    cold_limit: bool = True

    def noise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the noise of a step of positions of a shape."""
        return tuple(shape) if self.noises == 1 else (self.noises, *shape)


class Kernel(ABC):
    """A dynamics as a value: how a state starts, takes a step and is described, and what that needs.

    :class:`~pyro_sym.StochasticGradientKernel`, which adds the protocol of Pyro's drivers, has the arguments
    that all kernels take.
    """

    needs: ClassVar[Needs] = Needs()

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        temperature: Temperatures = 1.0,
        thinning: int = 1,
        init_strategy: Callable[[Any], Tensor] = init_to_uniform,
        batches: Iterable[Any] | None = None,
        shared_minibatch: bool = False,
        gradient: Literal["plain", "control_variate"] = "plain",
        center: Mapping[str, Tensor] | None = None,
        preconditioner: Preconditioner | None = None,
        jit: Jit = "auto",
    ) -> None:
        if not callable(model):
            raise TypeError(f"model is {model!r}; pass a Pyro model, that is, a callable")
        if type(thinning) is not int or thinning < 1:  # a bool is an int, too
            raise ValueError(f"thinning is {thinning!r}; it counts steps per draw, so pass an integer >= 1")
        if gradient not in ("plain", "control_variate"):
            raise ValueError(f"gradient is {gradient!r}; pass 'plain' or 'control_variate'")
        if center is not None and gradient == "plain":
            raise ValueError("center is for gradient='control_variate', but gradient is 'plain'")
        self.model = model
        self.step_size = step_size if callable(step_size) else _check_step_size(step_size)
        self.temperature: Temperature | Callable[[int], Any] = (
            temperature if callable(temperature) else self._check_temperature(temperature)
        )
        self.thinning = thinning
        self.init_strategy = init_strategy
        self.batches = batches
        self.shared_minibatch = shared_minibatch
        self.gradient = gradient
        self.center = center
        self.preconditioner = Identity() if preconditioner is None else preconditioner
        self.jit = jit

    def init(
        self,
        position: Tensor,
        noise: Tensor,
        *,
        temperature: Factor,
        inverse_mass: Factor,
        sizes: Sequence[int],
    ) -> State:
        """The state at the start of chains, by default with momenta of the starting temperature, if needed.

        Positions have shape ``(C, d)``; ``noise``, ``temperature`` and ``inverse_mass`` are as for
        :meth:`step`. ``sizes`` are the numbers of unconstrained values of the sites. Returns the positions,
        and whatever else the dynamics carries along, with the chains along the first dim of each.
        """
        if not self.needs.momentum:
            return (position,)
        first = noise if self.needs.noises == 1 else noise[0]
        return position, draw_momentum(first, temperature=temperature, inverse_mass=inverse_mass)

    @abstractmethod
    def step(
        self,
        state: State,
        gradient: Tensor,
        noise: Tensor,
        *,
        step_size: Factor,
        temperature: Factor,
        inverse_mass: Factor,
    ) -> State:
        """One step of the dynamics: a pure function of tensors.

        A kernel that needs a second gradient gets two more arguments: ``energy``, the potential energy at the
        positions, of shape ``(C,)``, and ``gradient_at``, which takes positions ``(C, d)`` to their energies
        and gradients on the minibatch that ``energy`` and ``gradient`` are on.

        Args:
            state: the positions, of shape ``(C, d)``, and what :meth:`init` puts beside them.
            gradient: of the potential energy at the positions, of shape ``(C, d)``.
            noise: standard normal draws, of shape ``(C, d)``, or ``(noises, C, d)`` if the kernel needs
                several; zeros where the temperature is 0.
            step_size: of this step.
            temperature: of this step; of shape ``(C, 1)`` if each chain has its own.
            inverse_mass: :math:`G`, broadcastable to the positions.

        Returns:
            The new state; the inputs must not be changed.
        """

    def statistics(self, state: State) -> dict[str, Tensor]:
        """The kernel's own statistics of draws, which are recorded beside those of all kernels.

        ``state`` is that of many draws at once, each part of shape ``(*batch, ·)``. Returns statistics by
        name, each of shape ``batch``, or ``(*batch, sites)`` with one for each site.
        """
        return {}

    def thermal_momentum(
        self,
        state: State,
        gradient: Tensor,
        *,
        step_size: Factor,
        temperature: Factor,
        inverse_mass: Factor,
    ) -> Tensor:
        """Momenta ``(*batch, d)`` that are :math:`N(0, T / G)` at a draw: the kinetic temperature is theirs.

        They are those of the state unless a dynamics discretises otherwise. State and gradient are those of
        many draws at once, each part of shape ``(*batch, ·)``; ``step_size`` and ``temperature``, those of
        the last step, and ``inverse_mass`` broadcast to the positions.
        """
        return state[1]

    def relaxation(self, step_size: float) -> float:
        """What share of a relaxation time a step is, after a :class:`~pyro_sym.Cyclical` left temperature 0.

        It is infinite with other schedules, and where neither the cycle nor the dynamics has such a time.
        """
        cycle = cycle_of(self.temperature)
        if cycle is None:
            return math.inf
        if cycle.relaxation is not None:
            return 1 / (cycle.relaxation + 0.5)  # which the step after so many takes past 1, rounded or not
        return self.own_relaxation(step_size)

    def own_relaxation(self, step_size: float) -> float:
        """What share of the dynamics' own relaxation time a step is; infinite, if it has none."""
        return math.inf

    def step_size_at(self, step: int) -> float:
        """The step size of a step, checked."""
        return _check_step_size(self.step_size(step), step) if callable(self.step_size) else self.step_size

    def temperature_at(self, step: int) -> Temperature:
        """The temperature of a step, or one for each chain, checked."""
        if callable(self.temperature):
            return self._check_temperature(self.temperature(step), step)
        return self.temperature

    def schedule(self, start: int, steps: int) -> tuple[tuple[float, ...], tuple[Temperature, ...]]:
        """Step sizes and temperatures of successive steps, checked."""
        several = range(start, start + steps)
        sizes, heats = self.step_size, self.temperature
        return (
            tuple(map(self.step_size_at, several)) if callable(sizes) else (sizes,) * steps,
            tuple(map(self.temperature_at, several)) if callable(heats) else (heats,) * steps,
        )

    def _check_temperature(self, value: Any, step: int | None = None) -> Temperature:
        value = _numbers(
            "temperature", value, "a number, a list of one for each chain, or a function of the step"
        )
        for number in value if isinstance(value, tuple) else (value,):
            if not (number >= 0 and math.isfinite(number)):
                what = "a finite number" if number is value else "finite numbers"
                raise ValueError(f"temperature is {value}{_at(step)}; pass {what} >= 0")
            if number == 0 and not self.needs.cold_limit:
                raise ValueError(
                    f"temperature is {value}{_at(step)}, and {type(self).__name__} has no limit at "
                    "temperature 0; pass numbers > 0, or take a kernel that becomes an optimiser, as BAOA"
                )
        return value


def is_warm(temperature: Temperature) -> bool:
    """Whether any chain has noise."""
    return any(temperature) if isinstance(temperature, tuple) else temperature > 0


def _check_step_size(value: Any, step: int | None = None) -> float:
    value = _numbers("step_size", value, "a number for all chains, or a function of the step")
    if isinstance(value, tuple) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"step_size is {value}{_at(step)}; pass a finite number > 0")
    return value


def _numbers(name: str, value: Any, allowed: str) -> Temperature:
    """A number as it is, or a tuple of numbers from a sequence, an array or a tensor."""
    if isinstance(value, (int, float)):
        return value
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {value!r}; pass {allowed}") from error
    if tensor.dim() > 1 or tensor.numel() == 0:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; pass {allowed}")
    return tuple(tensor.tolist()) if tensor.dim() else float(tensor)


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
