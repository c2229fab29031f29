"""Stochastic-gradient MCMC kernels for ``pyro.infer.MCMC``: a dynamics each."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Self, Unpack

from torch import Tensor

from pyro_sym.sgmcmc import dynamics
from pyro_sym.sgmcmc.chains import State
from pyro_sym.sgmcmc.from_sgd import Optimizer, sgd_arguments
from pyro_sym.sgmcmc.kernel import Factor, Options, Schedule, StochasticGradientKernel
from pyro_sym.sgmcmc.schedules import relaxation_share

__all__ = ["BAOA", "SGHMC", "SGLD", "SGNHT", "LeimkuhlerMatthews"]


class SGLD(StochasticGradientKernel):
    r"""Stochastic-gradient Langevin dynamics; its cold limit is SGD.

    .. math::

        u \leftarrow u - h G \nabla U(u) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \xi,

    the Euler scheme of overdamped Langevin dynamics (:func:`~pyro_sym.sgmcmc.dynamics.sgld`). The variance of
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
        cls,
        model: Callable[..., Any],
        *,
        num_data: int,
        lr: float | None = None,
        optimizer: Optimizer | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """The chain that is ``torch.optim.SGD(lr=lr)`` on the mean loss at temperature 0.

        Args:
            model: a Pyro model of ``num_data`` rows.
            num_data: :math:`N`, over which the loss is averaged.
            lr: the learning rate.
            optimizer: in place of ``lr``, a ``torch.optim.SGD`` without momentum to read it from, a
                ``pyro.optim.SGD``, or ``(torch.optim.SGD, {"lr": …})``.
            **options: as for the kernel.

        Returns:
            The kernel, with :func:`~pyro_sym.sgmcmc.dynamics.sgld_from_sgd`'s step size.

        Raises:
            TypeError: if neither ``lr`` nor ``optimizer`` is given, or the optimiser is not SGD.
            ValueError: if an argument is out of range, or the optimiser has momentum, weight decay or another
                setting that the kernel has not.
        """
        lr, momentum = sgd_arguments(lr, None, optimizer, num_data)
        if momentum:
            raise ValueError(
                f"optimizer has momentum={momentum:g}, and {cls.__name__} has none; take BAOA or SGHMC"
            )
        return cls(model, step_size=dynamics.sgld_from_sgd(lr, num_data), **options)

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: Factor, inverse_mass: Factor, sizes: list[int]
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
        """One step of :func:`~pyro_sym.sgmcmc.dynamics.sgld`."""
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

    :math:`\xi'` being the noise of the step before (:func:`~pyro_sym.sgmcmc.dynamics.averaged_langevin`). The
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
        self, position: Tensor, noise: Tensor, temperature: Factor, inverse_mass: Factor, sizes: list[int]
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
        """One step of :func:`~pyro_sym.sgmcmc.dynamics.averaged_langevin`."""
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

    def own_relaxation(self, step_size: float) -> float:
        """By friction (:func:`~pyro_sym.sgmcmc.schedules.relaxation_share`)."""
        return relaxation_share(self.friction, step_size)

    @classmethod
    def from_sgd(
        cls,
        model: Callable[..., Any],
        *,
        num_data: int,
        lr: float | None = None,
        momentum: float | None = None,
        optimizer: Optimizer | None = None,
        **options: Unpack[Options],
    ) -> Self:
        r"""The chain that is ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the mean loss at temperature 0.

        The loss is :math:`U / N`, so that a prior :math:`N(0, s^2)` is a ``weight_decay`` of :math:`1 / (N
        s^2)`. The class docstring has the mapping.

        Args:
            model: a Pyro model of ``num_data`` rows.
            num_data: :math:`N`, over which the loss is averaged.
            lr: the learning rate.
            momentum: :math:`\mu` in :math:`[0, 1)`, without dampening or Nesterov's variant; with ``lr``.
            optimizer: in place of both, a ``torch.optim.SGD`` to read them from as they are now, a
                ``pyro.optim.SGD``, or ``(torch.optim.SGD, {"lr": …, "momentum": …})``.
            **options: as for the kernel.

        Returns:
            The kernel.

        Raises:
            TypeError: if an argument is missing, or the optimiser is not SGD.
            ValueError: if an argument is out of range, or the optimiser has weight decay or another setting
                that the kernel has not.
        """
        if optimizer is None and momentum is None:
            raise TypeError("from_sgd wants the momentum of SGD; pass momentum=, or optimizer=")
        lr, momentum = sgd_arguments(lr, momentum, optimizer, num_data)
        step_size, friction = cls._from_sgd(lr, momentum, num_data)
        return cls(model, step_size=step_size, friction=friction, **options)


class SGHMC(_Underdamped):
    r"""Stochastic-gradient HMC: underdamped Langevin dynamics by symplectic Euler; cold, SGD with momentum.

    .. math::

        m &\leftarrow (1 - \gamma h) m - h \nabla U(u) + \sqrt{2 \gamma h T M - h^2 \hat B} \, \xi \\
        u &\leftarrow u + h M^{-1} m

    (:func:`~pyro_sym.sgmcmc.dynamics.sghmc`). The position moves with the *new* momentum, unlike in other
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
        """One step of :func:`~pyro_sym.sgmcmc.dynamics.sghmc`."""
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

    def thermal_momentum(
        self,
        state: State,
        gradient: Tensor,
        *,
        step_size: Factor,
        temperature: Factor,
        inverse_mass: Factor,
    ) -> Tensor:
        """:func:`~pyro_sym.sgmcmc.dynamics.momentum_within_kick`."""
        return dynamics.momentum_within_kick(
            state[1],
            gradient,
            step_size=step_size,
            damping=self.friction,
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
        """One step of :func:`~pyro_sym.sgmcmc.dynamics.baoa`."""
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
        \zeta &\leftarrow \min \Bigl( \zeta + \frac{h}{\mu} \bigl( \overline{M^{-1} \bar m^2} - T \bigr), \;
        \max(1 / h, \gamma) \Bigr)

    (:func:`~pyro_sym.sgmcmc.dynamics.sgnht`). The thermostat :math:`\zeta` starts at :math:`\gamma` and
    settles where the kinetic temperature is :math:`T`. It settles in a number of steps that does not depend
    on the scale of the posterior (:math:`\mu = T (20 h)^2`). At :math:`T = 0` the chain is
    ``torch.optim.SGD`` without momentum.

    **For which noise it is right.** A thermostat fixes one number, the *mean* kinetic temperature of its
    coordinates. It is right where :math:`h V / (2 T)`, the friction that the noise asks for, is the same in
    every direction, or small beside the friction. The noise of minibatches has about the covariance of the
    curvature: it is alike in all directions where the posterior is about isotropic in the coordinates that
    the kernel moves in (after a preconditioner), and it is not where coordinates are correlated or have
    unequal scales. Then stiff directions are too hot, soft ones too cold, and the mean passes
    (:func:`~pyro_sym.diagnostics.directional_temperatures` shows it). Control variates cut the noise itself,
    in all directions.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        friction: :math:`\gamma \ge 0`, per unit of time: that for which noise is injected.
        thermal_inertia: :math:`\mu > 0`, in units of temperature times the square of time; by default
            :math:`T (20 h)^2`, with the step size and temperature of each step. It changes how fast the
            thermostat settles, not where.
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
        thermal_inertia: float | None = None,
        thermostats: Literal["global", "site"] = "global",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, step_size=step_size, **options)
        if not 0 <= friction < math.inf:
            raise ValueError(f"friction is {friction}; pass a finite number >= 0")
        if thermal_inertia is not None and not 0 < thermal_inertia < math.inf:
            raise ValueError(
                f"thermal_inertia is {thermal_inertia}; pass a finite number > 0, or None for T (20 h)²"
            )
        if thermostats not in ("site", "global"):
            raise ValueError(f"thermostats is {thermostats!r}; pass 'site' or 'global'")
        self.friction = friction
        self.thermal_inertia = thermal_inertia
        self.thermostats = thermostats
        self._groups: list[int] | None = None

    def own_relaxation(self, step_size: float) -> float:
        """As for the other kernels with friction, but in eight times the steps of a thermostat at least."""
        return min(1 / (8 * dynamics.INERTIA_STEPS), relaxation_share(self.friction, step_size))

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: Factor, inverse_mass: Factor, sizes: list[int]
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
        """One step of :func:`~pyro_sym.sgmcmc.dynamics.sgnht`."""
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
            thermal_inertia=self.thermal_inertia,
            groups=self._groups,
        )

    def thermal_momentum(
        self,
        state: State,
        gradient: Tensor,
        *,
        step_size: Factor,
        temperature: Factor,
        inverse_mass: Factor,
    ) -> Tensor:
        """:func:`~pyro_sym.sgmcmc.dynamics.momentum_within_kick`, damped by the thermostats."""
        _, momentum, thermostat = state
        return dynamics.momentum_within_kick(
            momentum,
            gradient,
            step_size=step_size,
            damping=dynamics.over_groups(thermostat, self._groups or [momentum.shape[-1]]),
            friction=self.friction,
            temperature=temperature,
            inverse_mass=inverse_mass,
        )
