"""Underdamped Langevin dynamics: SGHMC (symplectic Euler) and BAOA."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self, Unpack

from torch import Tensor

from pyro_sym.sgmcmc.from_sgd import Optimizer, check_sgd, sgd_arguments
from pyro_sym.sgmcmc.kernel import Options, Schedule, State
from pyro_sym.sgmcmc.noise import Scalar, add_scaled, at_least, injects, spread
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.schedules import relaxation_share

__all__ = [
    "BAOA",
    "SGHMC",
    "baoa",
    "baoa_from_sgd",
    "kick_variance",
    "momentum_within_kick",
    "sghmc",
    "sghmc_from_sgd",
]


def kick_variance(
    step_size: Scalar, friction: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar
) -> Scalar:
    """The variance of the noise that a kick with friction injects."""
    return 2 * friction * step_size * temperature / inverse_mass - step_size**2 * noise_estimate


@injects(kick_variance)
def sghmc(
    position: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    friction: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""One step of :class:`~pyro_sym.SGHMC`, whose docstring has the formula; returns position and momentum.

    ``noise``, :math:`\xi`, is standard normal; position, momentum, gradient and noise have one shape, to
    which :math:`G` and :math:`\hat B` broadcast. The inputs are not changed. A negative variance of the noise
    is a ``ValueError`` if it is a number (of tensors see
    :func:`~pyro_sym.sgmcmc.noise.check_noise_estimate`).

    Example:
        >>> u, m, xi = torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.5])
        >>> sghmc(u, m, u, xi, step_size=0.5, friction=1.0, temperature=1.0)
        (tensor([1.2500]), tensor([0.5000]))
    """
    variance = kick_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    sigma = spread(variance, step_size, temperature, noise_estimate)
    momentum = add_scaled(momentum * (1 - friction * step_size), -step_size, gradient)
    momentum = add_scaled(momentum, sigma, noise)
    return add_scaled(position, step_size * inverse_mass, momentum), momentum


def _baoa_variance(
    step_size: Scalar, friction: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar
) -> Scalar:
    # Gradient noise enters before the O step and moves the position by (1 + c) / 2 of what noise of the O
    # step does per unit of momentum that a step retains.
    lost = -_expm1(-friction * step_size)  # 1 - c
    kept = 2 - lost  # 1 + c
    return lost * kept * temperature / inverse_mass - (kept * step_size / 2) ** 2 * noise_estimate


@injects(_baoa_variance)
def baoa(
    position: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    friction: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""One step of :class:`~pyro_sym.BAOA`, whose docstring has the formula; returns position and momentum.

    Arguments as for :func:`~pyro_sym.sgmcmc.underdamped.sghmc`. Infinite friction forgets the momentum each
    step. With :math:`\hat B` subtracted the variance of the position is right, up to a relative :math:`x /
    4` of the correction.

    Example:
        >>> u, m, xi = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5])
        >>> baoa(u, m, u, xi, step_size=0.5, friction=math.inf, temperature=1.0)
        (tensor([1.]), tensor([0.5000]))
    """
    half_drift = step_size / 2 * inverse_mass
    decay = 1 + _expm1(-friction * step_size)
    variance = _baoa_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    sigma = spread(variance, step_size, temperature, noise_estimate)
    momentum = add_scaled(momentum, -step_size, gradient)  # B
    position = add_scaled(position, half_drift, momentum)  # A
    momentum = add_scaled(momentum * decay, sigma, noise)  # O
    return add_scaled(position, half_drift, momentum), momentum  # A


def momentum_within_kick(
    momentum: Tensor,
    gradient: Tensor,
    *,
    step_size: Scalar,
    damping: Scalar,
    friction: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> Tensor:
    r"""The momentum half way through a kick, which shows the temperature of SGHMC and SGNHT.

    The momentum that a step ends with is no thermometer: on a Gaussian of curvature :math:`\lambda`, :math:`x
    = h^2 G \lambda`, its variance is :math:`(T / G) \, 4 / (4 - 2 \gamma h - x)`, while the positions are
    right but for :math:`O(h^2)`. The kick of the next step takes it half way to

    .. math::

        \bar m = (1 - \tfrac12 \zeta h) m - \tfrac{h}{2} \nabla U(u) + \tfrac12 \sigma \xi, \qquad
        \operatorname{Var} \bar m = T / G

    exactly, at every stable step size, with the damping :math:`\zeta` (the friction of SGHMC, the thermostat
    of SGNHT) and the variance :math:`\sigma^2 = 2 \gamma h T / G - h^2 \hat B` of the injected noise. Without
    that noise, and divided by the root of the remaining share, it is what this function returns,

    .. math::

        \tilde m = \frac{(1 - \tfrac12 \zeta h) m - \tfrac{h}{2} \nabla U(u)}
        {\sqrt{1 - \sigma^2 G / 4 T}} \sim N(0, T / G).

    Momentum and gradient, of shape ``(*batch, d)``, are those after a step; all else broadcasts to them.
    Gradient noise of variance :math:`V` raises the variance by :math:`h V / (2 \gamma (1 - \tfrac12 \gamma
    h))` for :class:`~pyro_sym.SGHMC`, and leaves it unchanged for :class:`~pyro_sym.SGNHT`.
    """
    half = step_size / 2
    variance = kick_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    left = 1 - variance * inverse_mass / (4 * at_least(temperature, 1e-30))
    root = left.sqrt() if isinstance(left, Tensor) else math.sqrt(left)
    return ((1 - half * damping) * momentum - half * gradient) / root


def sghmc_from_sgd(lr: float, momentum: float, num_data: int) -> tuple[float, float]:
    """Step size and friction of the SGHMC chain whose cold limit is SGD with momentum.

    ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the loss :math:`L = U / N` averaged over the :math:`N`
    rows of the data set (``num_data``; 1 if the loss is a sum) is :func:`~pyro_sym.sgmcmc.underdamped.sghmc`
    at :math:`T = 0` from :math:`m = 0`, from the first step on: SGD's buffer is :math:`-m / (h N)`.
    :class:`~pyro_sym.SGHMC` has the formula. A prior :math:`N(0, s^2)` stands for ``weight_decay`` :math:`1
    / (N s^2)`.
    """
    check_sgd(lr, momentum, num_data)
    step_size = math.sqrt(lr / num_data)
    return step_size, (1 - momentum) / step_size


def baoa_from_sgd(lr: float, momentum: float, num_data: int) -> tuple[float, float]:
    r"""As ``sghmc_from_sgd``, for ``BAOA``; the friction is infinite at :math:`\mu = 0`."""
    check_sgd(lr, momentum, num_data)
    step_size = math.sqrt(2 * lr / (num_data * (1 + momentum)))
    return step_size, -math.log(momentum) / step_size if momentum > 0 else math.inf


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
        """The share by friction (:func:`~pyro_sym.sgmcmc.schedules.relaxation_share`)."""
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
            raise TypeError("from_sgd needs the momentum of SGD; pass momentum=, or optimizer=")
        lr, momentum = sgd_arguments(lr, momentum, optimizer, num_data)
        step_size, friction = cls._from_sgd(lr, momentum, num_data)
        return cls(model, step_size=step_size, friction=friction, **options)


class SGHMC(_Underdamped):
    r"""Stochastic-gradient HMC: underdamped Langevin dynamics by symplectic Euler; cold, SGD with momentum.

    .. math::

        m &\leftarrow (1 - \gamma h) m - h \nabla U(u) + \sqrt{2 \gamma h T / G - h^2 \hat B} \, \xi \\
        u &\leftarrow u + h G m

    The position moves with the *new* momentum, unlike in other packages, whose explicit Euler scheme is
    stable only for :math:`h G \lambda < \gamma` and is no optimiser at :math:`T = 0`. A Gaussian of curvature
    :math:`\lambda`, :math:`x = h^2 G \lambda < 4 - 2 \gamma h`, comes out with the variance :math:`(T /
    \lambda) \, 2 (2 - \gamma h) / (4 - 2 \gamma h - x)`, and its momenta with :math:`(T / G) \, 4 / (4 - 2
    \gamma h - x)`: :class:`~pyro_sym.BAOA` has no such error.

    ``torch.optim.SGD`` with ``lr`` and momentum :math:`\mu` on the loss averaged over :math:`N` rows is
    :math:`h = \sqrt{\mathrm{lr} / N}`, :math:`\gamma = (1 - \mu) / h` (:meth:`from_sgd`).

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
        Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo" (arXiv 1402.4102); with
        their noise :math:`2 (C - \hat B') h`, :math:`\hat B' = h \hat B / 2`. The order of the two lines is
        that of Wenzel et al. 2020 (arXiv 2002.02405).
    """

    _from_sgd = staticmethod(sghmc_from_sgd)

    def step(self, state: State, gradient: Tensor, noise: Tensor, **settings: Any) -> State:
        """One step of :func:`~pyro_sym.sgmcmc.underdamped.sghmc`."""
        position, momentum = state
        own = {"friction": self.friction, "noise_estimate": self.noise_estimate}
        return sghmc(position, momentum, gradient, noise, **own, **settings)

    def thermal_momentum(self, state: State, gradient: Tensor, **settings: Any) -> Tensor:
        """:func:`~pyro_sym.sgmcmc.underdamped.momentum_within_kick`."""
        own = {"friction": self.friction, "noise_estimate": self.noise_estimate}
        return momentum_within_kick(state[1], gradient, damping=self.friction, **own, **settings)


class BAOA(_Underdamped):
    r"""Underdamped Langevin dynamics by the BAOA splitting; its cold limit is SGD with momentum.

    The target is that of all kernels (:class:`StochasticGradientKernel`): at :math:`T = 1` the posterior,
    while at :math:`T = 0` the chain descends to a mode of the log joint. The dynamics

    .. math::

        du = G m \, dt, \qquad dm = -\nabla U(u) \, dt - \gamma m \, dt + \sqrt{2 \gamma T / G} \, dW

    is split into a kick (B), a half drift (A), friction and noise (O) with :math:`c = e^{-\gamma h}`, and a
    half drift (A):

    .. math::

        m &\leftarrow m - h \nabla U(u) \\
        u &\leftarrow u + \tfrac{h}{2} G m \\
        m &\leftarrow c m + \sqrt{(1 - c^2) T / G - \tfrac14 (1 + c)^2 h^2 \hat B} \, \xi \\
        u &\leftarrow u + \tfrac{h}{2} G m

    where :math:`U` is scaled up from the minibatch by the model's own plates. On a Gaussian the variance is
    exact for any stable step size (:math:`x = h^2 G \lambda < 4` at curvature :math:`\lambda`) if the
    gradient is; gradient noise of variance :math:`V` adds :math:`V h^2 G (1 + c) / (\lambda (1 - c) (4 -
    x))`, to leading order a heating by :math:`h V / (2 \gamma)`. Nothing is rejected: lower the step size and
    compare.

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
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

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
        2002.02405, whose code has the scheme); Duffield et al. 2025, "Scalable Bayesian learning with
        posteriors" (arXiv 2406.00104).
    """

    _from_sgd = staticmethod(baoa_from_sgd)

    def step(self, state: State, gradient: Tensor, noise: Tensor, **settings: Any) -> State:
        """One step of :func:`~pyro_sym.sgmcmc.underdamped.baoa`."""
        position, momentum = state
        own = {"friction": self.friction, "noise_estimate": self.noise_estimate}
        return baoa(position, momentum, gradient, noise, **own, **settings)


def _expm1(value: Scalar) -> Scalar:
    return value.expm1() if isinstance(value, Tensor) else math.expm1(value)
