"""What all stochastic-gradient MCMC kernels share: potential, minibatches, schedules, Pyro's protocol."""

from __future__ import annotations

import math
import multiprocessing
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict

import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_sym.model.full_data import FullGradient, find_mode
from pyro_sym.model.gradient import Gradient, Jit
from pyro_sym.model.minibatch import Loader, PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.model.program import init_to_prior
from pyro_sym.sgmcmc import dynamics
from pyro_sym.sgmcmc.chains import Chains, State, Temperature
from pyro_sym.sgmcmc.control_variate import ControlVariate
from pyro_sym.sgmcmc.preconditioners import Identity, Preconditioner
from pyro_sym.sgmcmc.schedules import cycle_of, warn_of_relaxation
from pyro_sym.sgmcmc.start import (
    as_tensors,
    check_shapes,
    refuse_point,
    starting_points,
    unconstrained_values,
)
from pyro_sym.sgmcmc.statistics import Recorder
from pyro_sym.sgmcmc.step_blocks import FusedSteps

__all__ = ["Factor", "Options", "Schedule", "StochasticGradientKernel"]

Schedule = float | Callable[[int], float]
"""A constant, or a function of the step (counted from 0, warm-up included)."""


Temperatures = float | Sequence[float] | Tensor | Callable[[int], float | Sequence[float] | Tensor]
"""A number, one for each chain, or a function of the step (counted from 0) that returns either."""

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


@dataclass
class _Run:
    """A run of one chain in Pyro's drivers."""

    chains: Chains
    recorder: Recorder
    start: dict[str, Tensor]
    params: dict[str, Tensor]
    warmup_draws_left: int


class StochasticGradientKernel(MCMCKernel):
    r"""What all stochastic-gradient kernels share; a kernel adds its dynamics by implementing ``move``.

    The potential energy :math:`U` is the full negative log joint in unconstrained space
    (:class:`~pyro_sym.model.potential.Potential`), the target

    .. math::

        \pi_T(u) \propto \exp(-U(u) / T) = \left( p(\theta, D) \, |\det \partial \theta / \partial u|
        \right)^{1/T}.

    Each step draws a fresh minibatch for every subsampled plate of the model and takes one gradient. Momenta
    start at :math:`N(0, T M)`. At :math:`T = 0` the dynamics is deterministic and consumes no random numbers.
    The kernel runs in ``pyro.infer.MCMC`` and ``StreamingMCMC``, and many chains at once in
    :class:`~pyro_sym.VectorizedMCMC`; it draws from torch's global generator (``pyro.set_rng_seed``).

    Args:
        model: a Pyro model. Its arguments are those of ``MCMC.run``.
        step_size: positive; a number, or a function of the step.
        temperature: :math:`T \ge 0`; a number, a ladder of one for each chain (a list or tensor of shape
            ``(C,)``, for :class:`~pyro_sym.VectorizedMCMC`), or a function of the step that returns either
            (:mod:`pyro_sym.sgmcmc.schedules`).
        thinning: steps per draw, in warm-up as well.
        init_strategy: a per-site function, as in Pyro's autoguides, that gives the initial values.
        batches: a ``DataLoader`` or another iterable that can be run through again; its batches become the
            model's positional arguments, one a step (:class:`~pyro_sym.model.minibatch.Loader`), and
            ``MCMC.run`` takes keyword arguments only.
        shared_minibatch: whether chains that run side by side see the same minibatch.
        gradient: ``"control_variate"`` centres the minibatch gradient
            (:class:`~pyro_sym.sgmcmc.control_variate.ControlVariate`), at twice the price of a step.
        center: unconstrained values by site to centre it at; by default a mode that is looked for first.
        preconditioner: gives the inverse mass :math:`G = M^{-1}`; by default the identity
            (:mod:`pyro_sym.sgmcmc.preconditioners`).
        jit: ``"eager"`` runs the model at each step; ``"trace"`` runs its operations, recorded once;
            ``"compile"`` compiles several steps into one call, which takes some ten seconds the first time
            and wants a C++ compiler (with batches, control variates or a preconditioner that goes on learning
            it compiles the gradient alone); ``"auto"`` traces where that can be done and shown to be right.

    Attributes:
        initial_params: unconstrained values by site that chains start from. Set them before the run (``MCMC``
            does so with its own ``initial_params``), or ``init_strategy`` draws them anew for each chain.
        transforms: by site, from constrained to unconstrained values; known once a run has started.
    """

    has_momentum: ClassVar[bool] = True

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
            temperature if callable(temperature) else _check_temperature(temperature)
        )
        self.thinning = thinning
        self.init_strategy = init_strategy
        self.batches = batches
        self.shared_minibatch = shared_minibatch
        self.gradient = gradient
        self.center = center
        self.preconditioner = Identity() if preconditioner is None else preconditioner
        self.jit = jit
        self.transforms: dict[str, Transform] | None = None
        self._given: list[dict[str, Tensor]] = []
        self._run: _Run | None = None

    @abstractmethod
    def move(
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

        Args:
            state: the positions, of shape ``(C, d)``, and what :meth:`initial_state` puts beside them.
            gradient: of the potential energy at the positions, of shape ``(C, d)``.
            noise: standard normal draws, of shape ``(C, d)``; zeros where the temperature is 0.
            step_size: of this step.
            temperature: of this step; of shape ``(C, 1)`` if each chain has its own.
            inverse_mass: :math:`G`, broadcastable to the positions.

        Returns:
            The new state; the inputs must not be changed.
        """

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: Factor, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """The state at the start of chains, by default with momenta of the starting temperature.

        Args:
            position: of shape ``(C, d)``.
            noise: standard normal draws, of shape ``(C, d)``; zeros where the temperature is 0.
            temperature: at step 0; of shape ``(C, 1)`` if each chain has its own.
            inverse_mass: :math:`G`, broadcastable to the positions.
            sizes: the number of unconstrained values of each site.

        Returns:
            The positions, and what the dynamics carries along.
        """
        return position, dynamics.draw_momentum(noise, temperature=temperature, inverse_mass=inverse_mass)

    def relaxation(self, step_size: float) -> float:
        """What share of a relaxation time a step is, after a :class:`~pyro_sym.Cyclical` left temperature 0.

        Args:
            step_size: of the step.

        Returns:
            The share; infinite with other schedules, and where neither the cycle nor the dynamics has a time.
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

    def thermal_momentum(
        self,
        state: State,
        gradient: Tensor,
        *,
        step_size: Factor,
        temperature: Factor,
        inverse_mass: Factor,
    ) -> Tensor:
        r"""Momenta that are :math:`N(0, T M)` at a draw: what the kinetic temperature is measured on.

        They are those of the state unless a dynamics discretises otherwise. It is called on many draws at
        once, whose dims come first.

        Args:
            state: of the draw, each part of shape ``(*batch, ·)``.
            gradient: of the potential energy at the positions, of shape ``(*batch, d)``.
            step_size: of the last step, broadcastable to the positions.
            temperature: of the last step, broadcastable to the positions.
            inverse_mass: :math:`G`, broadcastable to the positions.

        Returns:
            Momenta of shape ``(*batch, d)``.
        """
        return state[1]

    @property
    def initial_params(self) -> Mapping[str, Tensor] | None:
        """Unconstrained values by site that the chain starts from."""
        return self._own_params() if self._run is None else self._run.start

    @initial_params.setter
    def initial_params(self, params: Mapping[str, Tensor] | None) -> None:
        given = [] if params is None else [{name: value.detach() for name, value in params.items()}]
        # Pyro's MCMC, if it runs chains in processes, sets the values of all chains on one and the same
        # kernel before it starts the first process, so that the last chain's would win. They are rows of one
        # tensor.
        self._given = self._given + given if given and _share_storage(self._given[-1:] + given) else given

    def _own_params(self) -> dict[str, Tensor] | None:
        """The values given for this chain. MCMC names its processes by chain."""
        chain = multiprocessing.current_process().name
        if chain.isdigit() and int(chain) < len(self._given):
            return self._given[int(chain)]
        return self._given[-1] if self._given else None

    def start(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_chains: int = 1,
        initial_params: Mapping[str, Tensor] | None = None,
        initial_values: Mapping[str, Tensor] | None = None,
        on_divergence: Literal["raise", "mask"] = "raise",
    ) -> Chains:
        """Start chains side by side.

        Args:
            args: the model's positional arguments.
            kwargs: the model's keyword arguments.
            num_chains: :math:`C`.
            initial_params: unconstrained values by site, each with the chains in front, ``(C, *shape)``; by
                default ``init_strategy`` draws them anew for each chain.
            initial_values: the same as constrained values.
            on_divergence: what a chain that is no longer finite gets: ``"raise"`` or ``"mask"``.

        Returns:
            The chains, before their first step.

        Raises:
            ValueError: if the model can't be sampled, or no point to start from has a finite potential
                energy.
        """
        warn_of_relaxation(self)
        given = "initial_params" if initial_values is None else "initial_values"
        if initial_values is not None:
            initial_values = as_tensors(initial_values, given)
        elif initial_params is not None:
            initial_params = as_tensors(initial_params, given)
        source: PlateRows | Loader
        if self.batches is None:
            potential = self._potential(args, kwargs, initial_values)
            source = PlateRows(potential.program.plates, num_chains, self.shared_minibatch)
        else:
            if args:
                raise ValueError(
                    f"the run was given {len(args)} positional arguments, but the model gets its own from "
                    "batches; pass keyword arguments only"
                )
            source = Loader(self.batches)
            potential = self._potential(source.first().args or (), kwargs, initial_values)
        self.transforms = potential.transforms
        if initial_values is not None:
            initial_params = unconstrained_values(initial_values, potential, num_chains)
        # Compiled code takes blocks of steps where it can; what is left is too little to compile.
        fuses = (
            self.jit == "compile"
            and self.batches is None
            and self.gradient == "plain"
            and self.preconditioner.is_fixed(warming_up=False)
        )
        plain = Gradient(potential, jit="auto" if fuses else self.jit)
        position = starting_points(plain, potential, source, num_chains, initial_params, given)
        centred = self._centred(plain, potential, source, position) if self.gradient != "plain" else plain
        fused = FusedSteps(Gradient(potential, jit="compile"), self._step_of_block) if fuses else None
        return Chains(self, potential, centred, source, position, on_divergence, fused)

    def _potential(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        initial_values: Mapping[str, Tensor] | None,
    ) -> Potential:
        """The model's potential, looked at where the first chain starts if that is given.

        A model may fail at points that ``init_strategy`` draws, and it need not run there. Values that the
        model can't run at are refused with all the others, by chain and site.
        """
        if initial_values is not None:
            with suppress(ValueError, RuntimeError):
                at_first = partial(_first_of, initial_values, self.init_strategy)
                return Potential(self.model, args, kwargs, init_strategy=at_first)
        return Potential(self.model, args, kwargs, init_strategy=self.init_strategy)

    def _step_of_block(
        self, state: State, gradient: Tensor, noise: Tensor, step_size: Tensor, temperature: Tensor
    ) -> State:
        """:meth:`move`, with the inverse mass as the last part of the state, if there is one."""
        mass = () if isinstance(self.preconditioner, Identity) else state[-1:]
        own = state[: len(state) - len(mass)]
        factor = mass[0] if mass else 1.0
        moved = self.move(
            own, gradient, noise, step_size=step_size, temperature=temperature, inverse_mass=factor
        )
        return *moved, *mass

    def _centred(
        self, gradient: Gradient, potential: Potential, source: PlateRows | Loader, position: Tensor
    ) -> ControlVariate:
        full = FullGradient(gradient, source)
        if self.center is None:
            center = find_mode(full, position[0])
        else:
            check_shapes(self.center, potential, "values of center")
            center = potential.flatten(self.center)
            refuse_point(potential, center, "values of center")
        return ControlVariate(gradient, center, *full(center))

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Start a chain; ``MCMC`` calls this.

        Args:
            warmup_steps: number of draws that keep no statistics.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the model can't be sampled, or no point to start from has a finite potential
                energy.
        """
        if isinstance(self.temperature_at(0), tuple):
            raise ValueError(
                f"temperature is {self.temperature!r}, but Pyro's drivers run one chain of a kernel at a "
                "time; pass a number, or run the chains in VectorizedMCMC"
            )
        given = self._own_params()
        rows = None if given is None else {name: value.unsqueeze(0) for name, value in given.items()}
        chains = self.start(args, kwargs, initial_params=rows)
        start = chains.potential.unflatten(chains.position[0])
        self._given = [] if given is None else [start]
        self._run = _Run(chains, Recorder(chains), start, start, warmup_steps)

    def sample(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take ``thinning`` steps.

        Args:
            params: unconstrained values by site; the chain goes on from them.

        Returns:
            Unconstrained values by site, after the steps.

        Raises:
            DivergenceError: if a position, gradient or potential energy is not finite; the message names the
                step and the first site.
        """
        run = self._running()
        chains = run.chains
        if params is not run.params:
            chains.move_to(chains.potential.flatten(params).unsqueeze(0))
        chains.advance(self.thinning, warming_up=run.warmup_draws_left > 0)
        run.params = chains.potential.unflatten(chains.position[0])
        if run.warmup_draws_left > 0:
            run.warmup_draws_left -= 1
        else:
            run.recorder.append()
        return run.params

    def _running(self) -> _Run:
        if self._run is None:
            raise RuntimeError("the kernel has no chain; call setup(warmup_steps, *args, **kwargs) first")
        return self._run

    def step_size_at(self, step: int) -> float:
        """The step size of a step, checked."""
        return _check_step_size(self.step_size(step), step) if callable(self.step_size) else self.step_size

    def temperature_at(self, step: int) -> Temperature:
        """The temperature of a step, or one for each chain, checked."""
        if callable(self.temperature):
            return _check_temperature(self.temperature(step), step)
        return self.temperature

    def schedule(self, start: int, steps: int) -> tuple[tuple[float, ...], tuple[Temperature, ...]]:
        """Step sizes and temperatures of successive steps, checked."""
        several = range(start, start + steps)
        return (
            tuple(map(self.step_size_at, several)) if callable(self.step_size) else (self.step_size,) * steps,
            tuple(map(self.temperature_at, several))
            if callable(self.temperature)
            else (self.temperature,) * steps,
        )

    def end_warmup(self) -> None:
        """End the warm-up: statistics are kept from the next draw on."""
        self._running().warmup_draws_left = 0

    def logging(self) -> dict[str, str]:
        """What the progress bar shows: step size, temperature, potential energy and kinetic temperature."""
        return self._running().chains.report()

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        r"""Statistics of the draws after warm-up, each at the position and momentum of the draw itself.

        ``potential_energy`` is :math:`U`, the negative log joint in unconstrained space (with its Jacobian);
        with subsampled plates it is the unbiased estimate on a minibatch that is independent of the draw.
        ``lp`` is :math:`-U`, the unnormalised log posterior density, as ArviZ has it, not divided by the
        temperature. ``energy`` is :math:`U + \tfrac12 m^\top M^{-1} m`. ``gradient_norm``,
        ``kinetic_temperature`` and ``configurational_temperature`` are those of
        :mod:`pyro_sym.sgmcmc.thermometers`, which says what each can and can't see, overall and (as
        ``site_…``, with the sites along the last dim) by site. ``step_size`` and ``temperature`` are those
        of the last
        step of the draw; ``temperature`` is NaN while a chain relaxes after a :class:`~pyro_sym.Cyclical`
        left temperature 0.

        Returns:
            ``{"sample_stats": {name: tensor}}``, each tensor in float64 and of shape ``(draws,)`` or
            ``(draws, sites)``. ``MCMC.diagnostics()["sample_stats"]`` holds one such dict for each of
            ``"chain 0"``, ``"chain 1"``, …
        """
        stats = self._running().recorder.statistics()
        return {"sample_stats": {name: values[:, 0] for name, values in stats.items()}}

    def cleanup(self) -> None:
        """Forget the chain, and the data with it; ``transforms`` stay."""
        self._run = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickled kernel (``MCMC`` sends one to each process) is one before its run."""
        return {**self.__dict__, "_run": None, "transforms": None}


def _share_storage(several: list[dict[str, Tensor]]) -> bool:
    first = several[0]
    return all(
        params.keys() == first.keys()
        and all(
            v.untyped_storage().data_ptr() == first[n].untyped_storage().data_ptr() for n, v in params.items()
        )
        for params in several
    )


def _check_step_size(value: Any, step: int | None = None) -> float:
    value = _numbers("step_size", value, "a number for all chains, or a function of the step")
    if isinstance(value, tuple) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"step_size is {value}{_at(step)}; pass a finite number > 0")
    return value


def _check_temperature(value: Any, step: int | None = None) -> Temperature:
    value = _numbers(
        "temperature", value, "a number, a list of one for each chain, or a function of the step"
    )
    for number in value if isinstance(value, tuple) else (value,):
        if not (number >= 0 and math.isfinite(number)):
            what = "a finite number" if number is value else "finite numbers"
            raise ValueError(f"temperature is {value}{_at(step)}; pass {what} >= 0")
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


def _first_of(values: Mapping[str, Tensor], otherwise: Callable[[Any], Tensor], site: Any) -> Tensor:
    """The value that is given for the first chain, if it has the shape of the site; in the site's dtype."""
    given = values.get(site["name"])
    if given is not None and given.shape[1:] == site["fn"].shape() and given.dim():
        return given[0].to(init_to_prior(site).dtype)
    return otherwise(site)
