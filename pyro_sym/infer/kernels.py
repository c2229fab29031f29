"""Stochastic-gradient MCMC kernels for ``pyro.infer.MCMC``: one skeleton, and a dynamics each."""

from __future__ import annotations

import math
import multiprocessing
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_sym.infer import dynamics
from pyro_sym.infer.chains import Chains, Recorder, State
from pyro_sym.infer.control_variate import ControlVariate, FullGradient, find_mode
from pyro_sym.infer.fused import FusedSteps
from pyro_sym.infer.gradient import Gradient, Jit, chain_by_chain
from pyro_sym.infer.minibatch import Loader, PlateRows
from pyro_sym.infer.potential import Potential
from pyro_sym.infer.preconditioners import Identity, Preconditioner

__all__ = ["BAOA", "SGHMC", "SGLD", "SGNHT", "LeimkuhlerMatthews", "Options", "StochasticGradientKernel"]

Schedule = float | Callable[[int], float]
"""A constant, or a function of the step (counted from 0, warm-up included)."""


Factor = float | Tensor
"""A number, or a tensor: without dims for what a schedule gives, or broadcastable to the positions."""


class Options(TypedDict, total=False):
    """What all kernels take besides their dynamics' own numbers; see :class:`StochasticGradientKernel`."""

    temperature: Schedule
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
    r"""What all stochastic-gradient kernels share; a kernel adds its dynamics by implementing :meth:`move`.

    The potential energy :math:`U` is the full negative log joint in unconstrained space
    (:class:`~pyro_sym.infer.potential.Potential`), the target

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
        temperature: :math:`T \ge 0`; a number, or a function of the step (:mod:`pyro_sym.infer.schedules`).
        thinning: steps per draw, in warm-up as well.
        init_strategy: a per-site function, as in Pyro's autoguides, that gives the initial values.
        batches: a ``DataLoader`` or another iterable that can be run through again; its batches become the
            model's positional arguments, one a step (:class:`~pyro_sym.infer.minibatch.Loader`), and
            ``MCMC.run`` takes keyword arguments only.
        shared_minibatch: whether chains that run side by side see the same minibatch.
        gradient: ``"control_variate"`` centres the minibatch gradient
            (:class:`~pyro_sym.infer.control_variate.ControlVariate`), at twice the price of a step.
        center: unconstrained values by site to centre it at; by default a mode that is looked for first.
        preconditioner: gives the inverse mass :math:`G = M^{-1}`; by default the identity
            (:mod:`pyro_sym.infer.preconditioners`).
        jit: ``"eager"`` runs the model at each step; ``"trace"`` runs its operations, recorded once;
            ``"compile"`` compiles several steps into one call, which takes some ten seconds the first time
            and wants a C++ compiler (with batches, control variates or several large chains it compiles the
            gradient alone); ``"auto"`` traces where that can be done and shown to be right.

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
        temperature: Schedule = 1.0,
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
        if not callable(step_size):
            _check_step_size(step_size)
        if not callable(temperature):
            _check_temperature(temperature)
        self.model = model
        self.step_size = step_size
        self.temperature = temperature
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
            temperature: of this step.
            inverse_mass: :math:`G`, broadcastable to the positions.

        Returns:
            The new state; the inputs must not be changed.
        """

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: float, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """The state at the start of chains, by default with momenta of the starting temperature.

        Args:
            position: of shape ``(C, d)``.
            noise: standard normal draws, of shape ``(C, d)``; zeros where the temperature is 0.
            temperature: at step 0.
            inverse_mass: :math:`G`, broadcastable to the positions.
            sizes: the number of unconstrained values of each site.

        Returns:
            The positions, and what the dynamics carries along.
        """
        return position, dynamics.draw_momentum(noise, temperature=temperature, inverse_mass=inverse_mass)

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
        source: PlateRows | Loader
        if self.batches is None:
            potential = Potential(self.model, args, kwargs, init_strategy=self.init_strategy)
            source = PlateRows(potential.program.plates, num_chains, self.shared_minibatch)
        else:
            if args:
                raise ValueError(
                    f"the run was given {len(args)} positional arguments, but the model gets its own from "
                    "batches; pass keyword arguments only"
                )
            source = Loader(self.batches)
            potential = Potential(
                self.model, source.first().args or (), kwargs, init_strategy=self.init_strategy
            )
        self.transforms = potential.transforms
        if initial_values is not None:
            _check_sites(initial_values, potential, "initial values")
            initial_params = potential.unconstrain(initial_values)
        # Compiled code takes blocks of steps where it can; what is left is too little to compile.
        small = not chain_by_chain(num_chains, potential.size)
        fuses = self.jit == "compile" and small and self.batches is None and self.gradient == "plain"
        plain = Gradient(potential, jit="auto" if fuses else self.jit)
        position = _starting_points(plain, potential, source, num_chains, initial_params)
        centred = self._centred(plain, potential, source, position) if self.gradient != "plain" else plain
        fused = FusedSteps(Gradient(potential, jit="compile"), self._step_of_block) if fuses else None
        return Chains(self, potential, centred, source, position, on_divergence, fused)

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
            _check_shapes(self.center, potential, "values of center")
            center = potential.flatten(self.center)
            _refuse_point(potential, center, "values of center")
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

    def temperature_at(self, step: int) -> float:
        """The temperature of a step, checked."""
        if callable(self.temperature):
            return _check_temperature(self.temperature(step), step)
        return self.temperature

    def schedule(self, start: int, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
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
        :mod:`pyro_sym.infer.temperature`, which says what each can and can't see, overall and (as ``site_…``,
        with the sites along the last dim) by site. ``step_size`` and ``temperature`` are those of the last
        step of the draw.

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


class SGLD(StochasticGradientKernel):
    r"""Stochastic-gradient Langevin dynamics; its cold limit is SGD.

    .. math::

        u \leftarrow u - h G \nabla U(u) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \xi,

    the Euler scheme of overdamped Langevin dynamics (:func:`~pyro_sym.infer.dynamics.sgld`). The variance of
    a Gaussian of curvature :math:`\lambda` comes out as :math:`(T / \lambda) / (1 - h \lambda / 2)`, and
    gradient noise of variance :math:`V` adds :math:`h V / 2` to the temperature:
    :class:`LeimkuhlerMatthews` mends the first at the same price.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step. Literature that writes
            :math:`\tfrac{\epsilon}{2} \nabla U` has :math:`\epsilon = 2 h`.
        noise_estimate: :math:`\hat B`, the variance that minibatches give each coordinate of the gradient; it
            is taken off the noise.
        **options: what every kernel takes (:class:`StochasticGradientKernel`): ``temperature``,
            ``thinning``, ``init_strategy``, ``batches``, ``shared_minibatch``, ``gradient``, ``center``,
            ``preconditioner``, ``jit``.

    Raises:
        ValueError: if an argument is out of range, or ``noise_estimate`` would make a variance negative.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> mcmc = pyro.infer.MCMC(SGLD(model, step_size=0.1), num_samples=10, disable_progbar=True)
        >>> mcmc.run()
        >>> mcmc.get_samples()["x"].shape
        torch.Size([10])

    References:
        Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics".
    """

    has_momentum = False

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        noise_estimate: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, step_size=step_size, **options)
        self.noise_estimate = noise_estimate

    @classmethod
    def from_sgd(
        cls, model: Callable[..., Any], *, lr: float, num_data: int, **options: Unpack[Options]
    ) -> Self:
        """The chain that is ``torch.optim.SGD(lr=lr)`` on the mean loss at temperature 0.

        Args:
            model: a Pyro model of ``num_data`` rows.
            lr: the learning rate.
            num_data: :math:`N`, over which the loss is averaged.
            **options: as for the kernel.

        Returns:
            The kernel, with :func:`~pyro_sym.infer.dynamics.sgld_from_sgd`'s step size.
        """
        return cls(model, step_size=dynamics.sgld_from_sgd(lr, num_data), **options)

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: float, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """The positions alone."""
        return (position,)

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
        """One step of :func:`~pyro_sym.infer.dynamics.sgld`."""
        (position,) = state
        return (
            dynamics.sgld(
                position,
                gradient,
                noise,
                step_size=step_size,
                temperature=temperature,
                inverse_mass=inverse_mass,
                noise_estimate=self.noise_estimate,
            ),
        )


class LeimkuhlerMatthews(SGLD):
    r"""Overdamped Langevin dynamics with averaged noise: SGLD's price, without its error on a Gaussian.

    .. math::

        u \leftarrow u - h G \nabla U(u) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \tfrac12 (\xi + \xi'),

    :math:`\xi'` being the noise of the step before (:func:`~pyro_sym.infer.dynamics.averaged_langevin`). The
    variance of a Gaussian is exact, the error of other averages :math:`O(h^2)`; gradient noise heats as it
    does :class:`SGLD`. The cold limit is SGD.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        noise_estimate: as for :class:`SGLD`.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: as :class:`SGLD`.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> kernel = LeimkuhlerMatthews(model, step_size=0.5)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=10, disable_progbar=True)
        >>> mcmc.run()

    References:
        Leimkuhler and Matthews 2013, "Rational construction of stochastic numerical methods for molecular
        sampling" (arXiv 1203.5428).
    """

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: float, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """The positions, and the noise of a step before the first."""
        return position, noise

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
        """One step of :func:`~pyro_sym.infer.dynamics.averaged_langevin`."""
        position, previous_noise = state
        return dynamics.averaged_langevin(
            position,
            previous_noise,
            gradient,
            noise,
            step_size=step_size,
            temperature=temperature,
            inverse_mass=inverse_mass,
            noise_estimate=self.noise_estimate,
        )


class _Underdamped(StochasticGradientKernel):
    """What kernels with momentum and friction share."""

    @staticmethod
    @abstractmethod
    def _from_sgd(lr: float, momentum: float, num_data: int) -> tuple[float, float]:
        """Step size and friction."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        friction: float = 1.0,
        noise_estimate: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, step_size=step_size, **options)
        if not friction > 0:
            raise ValueError(
                f"friction is {friction}; without friction there is no noise to hold the temperature, so "
                "pass a number > 0"
            )
        self.friction = friction
        self.noise_estimate = noise_estimate

    @classmethod
    def from_sgd(
        cls,
        model: Callable[..., Any],
        *,
        lr: float,
        momentum: float,
        num_data: int,
        **options: Unpack[Options],
    ) -> Self:
        r"""The chain that is ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the mean loss at temperature 0.

        The loss is :math:`U / N`, so that a prior :math:`N(0, s^2)` is a ``weight_decay`` of :math:`1 / (N
        s^2)`. The class docstring has the mapping.

        Args:
            model: a Pyro model of ``num_data`` rows.
            lr: the learning rate.
            momentum: :math:`\mu` in :math:`[0, 1)`, without dampening or Nesterov's variant.
            num_data: :math:`N`, over which the loss is averaged.
            **options: as for the kernel.

        Returns:
            The kernel.

        Raises:
            ValueError: if an argument is out of range.
        """
        step_size, friction = cls._from_sgd(lr, momentum, num_data)
        return cls(model, step_size=step_size, friction=friction, **options)


class SGHMC(_Underdamped):
    r"""Stochastic-gradient HMC: underdamped Langevin dynamics by symplectic Euler; cold, SGD with momentum.

    .. math::

        m &\leftarrow (1 - \gamma h) m - h \nabla U(u) + \sqrt{2 \gamma h T M - h^2 \hat B} \, \xi \\
        u &\leftarrow u + h M^{-1} m

    (:func:`~pyro_sym.infer.dynamics.sghmc`). The position moves with the *new* momentum, unlike in other
    packages, whose explicit Euler scheme is stable only for :math:`h \lambda < \gamma` and is no optimiser at
    :math:`T = 0`. A Gaussian of curvature :math:`\lambda`, :math:`x = h^2 \lambda < 4 - 2 \gamma h`, comes
    out with the variance :math:`(T / \lambda) \, 2 (2 - \gamma h) / (4 - 2 \gamma h - x)`: :class:`BAOA`
    has no such error.

    ``torch.optim.SGD`` with ``lr`` and momentum :math:`\mu` on the loss averaged over :math:`N` rows is
    :math:`h = \sqrt{\mathrm{lr} / N}`, :math:`\gamma = (1 - \mu) / h`.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        friction: :math:`\gamma > 0`, per unit of time.
        noise_estimate: :math:`\hat B`, the variance that minibatches give each coordinate of the gradient; it
            is taken off the noise.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: if an argument is out of range, or ``noise_estimate`` would make a variance negative.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> SGHMC.from_sgd(model, lr=0.1, momentum=0.9, num_data=1000).step_size
        0.01

    References:
        Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo" (arXiv 1402.4102).
    """

    _from_sgd = staticmethod(dynamics.sghmc_from_sgd)

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
        """One step of :func:`~pyro_sym.infer.dynamics.sghmc`."""
        position, momentum = state
        return dynamics.sghmc(
            position,
            momentum,
            gradient,
            noise,
            step_size=step_size,
            friction=self.friction,
            temperature=temperature,
            inverse_mass=inverse_mass,
            noise_estimate=self.noise_estimate,
        )


class BAOA(_Underdamped):
    r"""Underdamped Langevin dynamics by the BAOA splitting; its cold limit is SGD with momentum.

    The target is the tempered posterior :math:`p(\theta, D)^{1/T}`, tempered in unconstrained space: at
    :math:`T = 1` the posterior, while at :math:`T = 0` the chain descends to a mode of the log joint.
    Constrained sites bring their Jacobian along, :math:`\exp(-U(u)/T)` with :math:`U = -\log p(\theta, D) -
    \log |\det \partial \theta / \partial u|`: as a density of :math:`\theta` the target then carries the
    Jacobian to the power :math:`1/T - 1`. With :math:`c = e^{-\gamma h}` and standard normal :math:`\xi`, a
    step is

    .. math::

        m &\leftarrow m - h \nabla U(u) \\
        u &\leftarrow u + \tfrac{h}{2} M^{-1} m \\
        m &\leftarrow c m + \sqrt{(1 - c^2) T M - \tfrac14 (1 + c)^2 h^2 \hat B} \, \xi \\
        u &\leftarrow u + \tfrac{h}{2} M^{-1} m

    where :math:`U` is scaled up from the minibatch by the model's own plates. On a Gaussian the variance is
    exact for any stable step size (:math:`h^2 \lambda < 4` at curvature :math:`\lambda`) if the gradient is;
    gradient noise of variance :math:`V` adds :math:`V h^2 (1 + c) / (\lambda (1 - c) (4 - h^2 \lambda))`, to
    leading order a heating by :math:`h V / (2 \gamma)`. Nothing is rejected: lower the step size and compare.

    At :math:`T = 0` the chain *is* ``torch.optim.SGD(lr=h**2 / 2 * (1 + c), momentum=c)`` on :math:`U`, from
    step 1 on. In the terms of a loss averaged over :math:`N` rows, SGD with ``lr`` and momentum :math:`\mu`
    is :math:`h = \sqrt{2 \, \mathrm{lr} / (N (1 + \mu))}` and :math:`\gamma = -\ln(\mu) / h`
    (:meth:`from_sgd`).

    Args:
        model: a Pyro model. Its arguments are those of ``MCMC.run``; ``plate(subsample_size=…)`` gets fresh
            indices each step.
        step_size: :math:`h > 0`; a number, or a function of the step (counted from 0, warm-up included).
        friction: :math:`\gamma > 0`, per unit of time; ``math.inf`` forgets the momentum each step.
        noise_estimate: :math:`\hat B`, the variance that minibatches give each coordinate of the gradient; it
            is taken off the noise.
        **options: what every kernel takes (:class:`StochasticGradientKernel`): ``temperature``,
            ``thinning``, ``init_strategy``, ``batches``, ``shared_minibatch``, ``gradient``, ``center``,
            ``preconditioner``, ``jit``.

    Raises:
        ValueError: if an argument is out of range, or ``noise_estimate`` would make a variance negative.

    Example:
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("rows", len(y), subsample_size=20) as rows:
        ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
        >>> kernel = BAOA(model, step_size=0.02, friction=5.0, thinning=5)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=100, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run(torch.ones(100))
        >>> mcmc.get_samples()["mean"].shape
        torch.Size([100])
        >>> mcmc.diagnostics()["sample_stats"]["chain 0"]["potential_energy"].shape
        torch.Size([100])

    References:
        Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?" (arXiv
        2002.02405); Duffield et al. 2025, "Scalable Bayesian learning with posteriors" (arXiv 2406.00104).
    """

    _from_sgd = staticmethod(dynamics.baoa_from_sgd)

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
        """One step of :func:`~pyro_sym.infer.dynamics.baoa`."""
        position, momentum = state
        return dynamics.baoa(
            position,
            momentum,
            gradient,
            noise,
            step_size=step_size,
            friction=self.friction,
            temperature=temperature,
            inverse_mass=inverse_mass,
            noise_estimate=self.noise_estimate,
        )


class SGNHT(StochasticGradientKernel):
    r"""Stochastic-gradient Nosé–Hoover thermostat: friction that adapts to the noise of minibatches.

    .. math::

        m &\leftarrow (1 - \zeta h) m - h \nabla U(u) + \sqrt{2 \gamma h T M} \, \xi \\
        u &\leftarrow u + h M^{-1} m \\
        \zeta &\leftarrow \zeta + h \bigl( \overline{M^{-1} \bar m^2} - T \bigr)

    (:func:`~pyro_sym.infer.dynamics.sgnht`). The thermostat :math:`\zeta`, which starts at :math:`\gamma`,
    settles where the kinetic temperature is :math:`T`, so that gradient noise that is alike in all
    coordinates of a thermostat heats the chain no longer. It has no optimiser as its cold limit: at
    :math:`T = 0` the friction only grows.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        friction: :math:`\gamma \ge 0`, per unit of time: that for which noise is injected.
        thermostats: ``"global"`` for one in all, ``"site"`` for one a site. The fewer coordinates one has,
            the more it fluctuates, and with it the stable step size, :math:`h^2 \lambda < 4 - 2 \zeta h`:
            take smaller steps than with :class:`BAOA`, and one a site only where sites are large.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.zeros(50), 1.0).to_event(1))
        >>> kernel = SGNHT(model, step_size=0.1, friction=1.0)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=10, disable_progbar=True)
        >>> mcmc.run()

    References:
        Ding et al. 2014, "Bayesian sampling using stochastic gradient thermostats".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        friction: float = 1.0,
        thermostats: Literal["global", "site"] = "global",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, step_size=step_size, **options)
        if not 0 <= friction < math.inf:
            raise ValueError(f"friction is {friction}; pass a finite number >= 0")
        if thermostats not in ("site", "global"):
            raise ValueError(f"thermostats is {thermostats!r}; pass 'site' or 'global'")
        self.friction = friction
        self.thermostats = thermostats
        self._groups: list[int] | None = None

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: float, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """Positions, momenta, and thermostats at the friction."""
        self._groups = sizes if self.thermostats == "site" else [position.shape[-1]]
        thermostat = position.new_full((len(position), len(self._groups)), self.friction)
        return *super().initial_state(position, noise, temperature, inverse_mass, sizes), thermostat

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
        """One step of :func:`~pyro_sym.infer.dynamics.sgnht`."""
        position, momentum, thermostat = state
        return dynamics.sgnht(
            position,
            momentum,
            thermostat,
            gradient,
            noise,
            step_size=step_size,
            friction=self.friction,
            temperature=temperature,
            inverse_mass=inverse_mass,
            groups=self._groups,
        )


def _starting_points(
    gradient: Gradient,
    potential: Potential,
    source: PlateRows | Loader,
    num_chains: int,
    given: Mapping[str, Tensor] | None,
) -> Tensor:
    """Flat positions of shape ``(C, d)`` with finite energies and gradients."""
    if given is None:
        rows = [potential.unconstrain(potential.program.draw()[0]) for _ in range(num_chains)]
    else:
        _check_shapes(given, potential, "initial values", num_chains)
        rows = [{name: value[chain] for name, value in given.items()} for chain in range(num_chains)]
    position = torch.stack([potential.flatten(row) for row in rows]).detach()
    with torch.no_grad(), pyro.validation_enabled(False):
        energy, slope = gradient(position, source.first())
    fine = energy.isfinite() & slope.isfinite().all(-1) & position.isfinite().all(-1)
    for chain in (~fine).nonzero().flatten().tolist():
        if given is not None:
            _refuse_point(potential, position[chain], "initial values", f" of chain {chain}")
        position[chain] = potential.flatten(potential.initial())
    return position


def _check_shapes(
    given: Mapping[str, Tensor], potential: Potential, what: str, num_chains: int | None = None
) -> None:
    _check_sites(given, potential, what)
    chains = () if num_chains is None else (num_chains,)
    for name, shape in potential.shapes.items():
        if given[name].shape != (*chains, *shape):
            raise ValueError(
                f"{what} of site {name!r} have shape {tuple(given[name].shape)}; unconstrained values of "
                f"{'one chain' if num_chains is None else f'{num_chains} chains'} have shape "
                f"{(*chains, *shape)}"
            )


def _check_sites(given: Mapping[str, Tensor], potential: Potential, what: str) -> None:
    if set(given) != set(potential.shapes):
        raise ValueError(
            f"{what} are given for {sorted(given)}; the model's latent sites are {sorted(potential.shapes)}"
        )


def _refuse_point(potential: Potential, position: Tensor, what: str, whose: str = "") -> None:
    at_fault = potential.non_finite_sites(potential.unflatten(position), potential.draw_indices())
    if at_fault:
        raise ValueError(
            f"the {what}{whose} are no place to be; not finite there: {', '.join(at_fault)}. They are taken "
            "as unconstrained values"
        )


def _share_storage(several: list[dict[str, Tensor]]) -> bool:
    first = several[0]
    return all(
        params.keys() == first.keys()
        and all(
            v.untyped_storage().data_ptr() == first[n].untyped_storage().data_ptr() for n, v in params.items()
        )
        for params in several
    )


def _check_step_size(value: float, step: int | None = None) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"step_size is {value}{_at(step)}; pass a finite number > 0")
    return value


def _check_temperature(value: float, step: int | None = None) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"temperature is {value}{_at(step)}; pass a finite number >= 0")
    return value


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"
