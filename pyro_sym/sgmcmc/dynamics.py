r"""One-step maps of samplers: pure functions of position, momentum, gradient and noise.

Symbols, here and in every function: position :math:`\theta`, momentum :math:`m`, gradient :math:`\nabla U` of
the potential energy :math:`U = -\log p(\theta, D)`, standard normal noise :math:`\xi`, step size :math:`h`,
friction :math:`\gamma`, temperature :math:`T`, inverse mass :math:`G`, and :math:`\hat B`, an estimate of the
variance that minibatches give each coordinate of the gradient. The target is :math:`\exp(-U(\theta) / T)`;
momenta have the law :math:`N(0, T / G)`. Positions may have any shape, for instance a row a chain.

Noise is an argument, so that a step can be tested exactly. Step sizes, frictions and temperatures are numbers
or tensors without dims, so that a traced or compiled step can take them as inputs.

========================== ======================== ======================= =====================
map                        order of the position's  stable on curvature λ,  temperature added by
                           law in h                 x = h²λ, G = 1          gradient noise V
========================== ======================== ======================= =====================
:func:`sgld`               1                        hλ < 2                  hV / 2
:func:`averaged_langevin`  2, exact on Gaussians    hλ < 2                  hV / 2
:func:`sghmc`              2                        x < 4 - 2γh             hV / 2γ
:func:`baoa`               2, exact on Gaussians    x < 4                   hV / 2γ
:func:`sgnht`              2                        x < 4 - 2ζh             none
========================== ======================== ======================= =====================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "averaged_langevin",
    "baoa",
    "baoa_from_sgd",
    "check_noise_estimate",
    "draw_momentum",
    "momentum_within_kick",
    "sghmc",
    "sghmc_from_sgd",
    "sgld",
    "sgld_from_sgd",
    "sgnht",
]

Scalar = float | Tensor
"""A number, or a tensor without dims."""

INERTIA_STEPS = 20
"""Steps in which a thermostat reacts, by default."""


def sgld(
    position: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> Tensor:
    r"""One step of stochastic-gradient Langevin dynamics, the Euler scheme of overdamped Langevin dynamics.

    .. math::

        \theta \leftarrow \theta - h G \nabla U(\theta) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \xi.

    On a Gaussian of curvature :math:`\lambda` the variance is :math:`(T / \lambda) / (1 - h G \lambda / 2)`.
    At :math:`T = 0` it is ``torch.optim.SGD`` (:func:`sgld_from_sgd`).

    Args:
        position: :math:`\theta`, of any shape.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h > 0`.
        temperature: :math:`T \ge 0`; the noise drops out at 0.
        inverse_mass: :math:`G > 0`, broadcastable to ``position``: how fast each coordinate moves.
        noise_estimate: :math:`\hat B \ge 0`, broadcastable to ``position``.

    Returns:
        The position after the step; the inputs are not changed.

    Raises:
        ValueError: if the noise's variance is negative, as :func:`check_noise_estimate` has it. What is a
            tensor is not looked at: check it before.

    Example:
        >>> theta, xi = torch.tensor([1.0]), torch.tensor([0.5])
        >>> sgld(theta, theta, xi, step_size=0.5, temperature=1.0)
        tensor([1.])

    References:
        Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics", whose step size
        is :math:`2 h`.
    """
    variance = _overdamped_variance(step_size, temperature, inverse_mass, noise_estimate)
    spread = _spread(variance, step_size, temperature, noise_estimate)
    # theta <- theta - h G grad U(theta) + sqrt(2 h T G - (h G)^2 B) xi
    return _plus(_plus(position, -step_size * inverse_mass, gradient), spread, noise)


def averaged_langevin(
    position: Tensor,
    previous_noise: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""One step of overdamped Langevin dynamics by Leimkuhler and Matthews: SGLD with averaged noise.

    .. math::

        \theta \leftarrow \theta - h G \nabla U(\theta)
        + \sqrt{2 h T G - h^2 G^2 \hat B} \, \tfrac{1}{2} (\xi' + \xi),

    :math:`\xi'` being the noise of the step before; it costs what :func:`sgld` costs. On a Gaussian the
    variance of the position is exact for every stable step size. Averages of other targets are in error by
    :math:`O(h^2)`. At :math:`T = 0` it is ``torch.optim.SGD`` (:func:`sgld_from_sgd`).

    Args:
        position: :math:`\theta`, of any shape.
        previous_noise: :math:`\xi'`, of the shape of ``position``; fresh draws on the first step.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h > 0`.
        temperature: :math:`T \ge 0`; the noise drops out at 0.
        inverse_mass: :math:`G > 0`, broadcastable to ``position``.
        noise_estimate: :math:`\hat B \ge 0`, broadcastable to ``position``. Gradient noise is white and the
            averaged noise is not: a variance :math:`h^2 G^2 V / 4` to leading order remains.

    Returns:
        The position after the step, and ``noise``, the next step's ``previous_noise``.

    Raises:
        ValueError: as :func:`sgld`.

    Example:
        >>> theta, before, xi = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([-0.5])
        >>> averaged_langevin(theta, before, theta, xi, step_size=0.5, temperature=1.0)
        (tensor([0.5000]), tensor([-0.5000]))

    References:
        Leimkuhler and Matthews 2013, "Rational construction of stochastic numerical methods for molecular
        sampling" (arXiv 1203.5428).
    """
    variance = _overdamped_variance(step_size, temperature, inverse_mass, noise_estimate)
    half_spread = _spread(variance, step_size, temperature, noise_estimate) / 2
    # theta <- theta - h G grad U(theta) + sqrt(2 h T G - (h G)^2 B) (xi' + xi) / 2
    position = _plus(position, -step_size * inverse_mass, gradient)
    position = _plus(position, half_spread, previous_noise + noise)
    return position, noise


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
    r"""One step of stochastic-gradient HMC: underdamped Langevin dynamics by the symplectic Euler scheme.

    .. math::

        m &\leftarrow (1 - \gamma h) m - h \nabla U(\theta) + \sqrt{2 \gamma h T / G - h^2 \hat B} \, \xi \\
        \theta &\leftarrow \theta + h G m

    The position moves with the *new* momentum: that is what makes it ``torch.optim.SGD`` with ``momentum`` at
    :math:`T = 0` (:func:`sghmc_from_sgd`), stable for :math:`x = h^2 G \lambda < 4 - 2 \gamma h` at curvature
    :math:`\lambda`, and of second order in the position. With the old momentum it would ask for :math:`h G
    \lambda < \gamma`. On a Gaussian the variance is :math:`(T / \lambda) \, 2 (2 - \gamma h) / (4 - 2 \gamma
    h - x)`, that of the momentum :math:`(T / G) \, 4 / (4 - 2 \gamma h - x)`.

    Args:
        position: :math:`\theta`, of any shape.
        momentum: :math:`m`, of the shape of ``position``.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h > 0`, in units of time.
        friction: :math:`\gamma > 0`, per unit of time.
        temperature: :math:`T \ge 0`; the noise drops out at 0.
        inverse_mass: :math:`G > 0`, broadcastable to ``position``.
        noise_estimate: :math:`\hat B \ge 0`, broadcastable to ``position``.

    Returns:
        The position and the momentum after the step; the inputs are not changed.

    Raises:
        ValueError: as :func:`sgld`.

    Example:
        >>> theta, m, xi = torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([0.5])
        >>> sghmc(theta, m, theta, xi, step_size=0.5, friction=1.0, temperature=1.0)
        (tensor([1.2500]), tensor([0.5000]))

    References:
        Chen, Fox and Guestrin 2014, "Stochastic gradient Hamiltonian Monte Carlo" (arXiv 1402.4102); with
        their noise :math:`2 (C - \hat B') h`, :math:`\hat B' = h \hat B / 2`. The order of the two lines is
        that of Wenzel et al. 2020 (arXiv 2002.02405).
    """
    variance = _sghmc_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    spread = _spread(variance, step_size, temperature, noise_estimate)
    # m <- (1 - gamma h) m - h grad U(theta) + sqrt(2 gamma h T / G - h^2 B) xi
    momentum = _plus((1 - friction * step_size) * momentum, -step_size, gradient)
    momentum = _plus(momentum, spread, noise)
    # theta <- theta + h G m
    position = _plus(position, step_size * inverse_mass, momentum)
    return position, momentum


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
    r"""One step of underdamped Langevin dynamics by the BAOA splitting, with one gradient a step.

    It discretises, for the target :math:`\exp(-U(\theta)/T)` and momenta :math:`N(0, T / G)`,

    .. math::

        d\theta = G m \, dt, \qquad
        dm = -\nabla U(\theta) \, dt - \gamma m \, dt + \sqrt{2 \gamma T / G} \, dW,

    by a kick (B), a half drift (A), friction and noise (O) with :math:`c = e^{-\gamma h}`, and a half drift
    (A):

    .. math::

        m &\leftarrow m - h \nabla U(\theta) \\
        \theta &\leftarrow \theta + \tfrac{h}{2} G m \\
        m &\leftarrow c m + \sqrt{(1 - c^2) T / G - \tfrac{1}{4} (1 + c)^2 h^2 \hat B} \, \xi \\
        \theta &\leftarrow \theta + \tfrac{h}{2} G m

    On a Gaussian target the variance of the position is exact for every stable step size, :math:`x = h^2 G
    \lambda < 4` at curvature :math:`\lambda`; gradient noise of variance :math:`V` adds :math:`h^2 V G (1 +
    c) / (\lambda (1 - c) (4 - x))`. At :math:`T = 0` from :math:`m = 0` the step is ``torch.optim.SGD`` with
    ``momentum`` :math:`= c` and ``lr`` :math:`= \tfrac{h^2}{2} (1 + c)`, from the first step on
    (:func:`baoa_from_sgd`).

    Args:
        position: :math:`\theta`, of any shape.
        momentum: :math:`m`, of the shape of ``position``.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h > 0`, in units of time.
        friction: :math:`\gamma > 0`, per unit of time; infinite friction forgets the momentum each step.
        temperature: :math:`T \ge 0`; the noise drops out at 0.
        inverse_mass: :math:`G > 0`, broadcastable to ``position``.
        noise_estimate: :math:`\hat B \ge 0`, broadcastable to ``position``. What is subtracted sets the
            variance of the position right, up to a relative :math:`x / 4` of the correction.

    Returns:
        The position and the momentum after the step; the inputs are not changed.

    Raises:
        ValueError: as :func:`sgld`.

    Example:
        >>> theta, m, xi = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5])
        >>> baoa(theta, m, theta, xi, step_size=0.5, friction=math.inf, temperature=1.0)
        (tensor([1.]), tensor([0.5000]))

    References:
        The scheme as in Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?"
        (arXiv 2002.02405, whose code has it), and Duffield et al. 2025, "Scalable Bayesian learning with
        posteriors" (arXiv 2406.00104).
    """
    half = step_size / 2
    decay = 1 + _expm1(-friction * step_size)
    variance = _baoa_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    spread = _spread(variance, step_size, temperature, noise_estimate)
    # B: m <- m - h grad U(theta)
    momentum = _plus(momentum, -step_size, gradient)
    # A: theta <- theta + h/2 G m
    position = _plus(position, half * inverse_mass, momentum)
    # O: m <- c m + sqrt((1 - c^2) T / G - ((1 + c) h / 2)^2 B) xi
    momentum = _plus(decay * momentum, spread, noise)
    # A: theta <- theta + h/2 G m
    position = _plus(position, half * inverse_mass, momentum)
    return position, momentum


def sgnht(
    position: Tensor,
    momentum: Tensor,
    thermostat: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    friction: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    thermal_inertia: Scalar | None = None,
    groups: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""One step of the stochastic-gradient Nosé-Hoover thermostat: friction that adapts to gradient noise.

    .. math::

        m &\leftarrow (1 - \zeta h) m - h \nabla U(\theta) + \sqrt{2 \gamma h T / G} \, \xi \\
        \theta &\leftarrow \theta + h G m \\
        \zeta &\leftarrow \min \left( \zeta + \frac{h}{\mu} \left( \overline{G \bar m^2} - T \right), \;
        \max(1 / h, \gamma) \right)

    with :math:`\bar m` half way between the momenta before and after the first line. The mean runs over the
    coordinates of a thermostat :math:`\zeta`. It settles where the kinetic temperature is :math:`T`, whatever
    noise comes with the gradients: of variance :math:`V`, alike in all coordinates of a group, it raises the
    friction and leaves the target :math:`\exp(-U / T)`, where the other maps sample at a higher temperature.
    On a Gaussian with many coordinates of curvature :math:`\lambda`, :math:`x = h^2 G \lambda`, exactly

    .. math::

        \operatorname{Var} \theta = \frac{T}{\lambda} \, \frac{2 (2 - \zeta h)}{4 - 2 \zeta h - x}, \qquad
        \zeta = \gamma + \frac{h V G}{2 T}.

    **Thermal inertia.** The target does not depend on :math:`\mu`: in continuous time :math:`\zeta` is normal
    around its mean, with the variance :math:`T / (\mu d)` for a group of :math:`d` coordinates, and
    independent of position and momentum. How fast it settles does. With :math:`\tau^2 = \mu / T`, small
    deviations :math:`\delta = \zeta - \bar \zeta` and :math:`\kappa = \overline{G m^2} / T - 1` obey

    .. math::

        \dot \delta = \kappa / \tau^2, \qquad \dot \kappa = -2 \delta - 2 \bar \zeta \kappa,

    so the thermostat settles at the rate :math:`\bar \zeta` if :math:`\bar \zeta \tau < \sqrt 2`, and at
    about :math:`1 / (\bar \zeta \tau^2)` if the friction is larger. A number for :math:`\mu` is right
    for posteriors of one scale only: where :math:`N` rows make standard deviations, step size and :math:`1 /
    \zeta` shrink as :math:`1 / \sqrt N`, :math:`\mu = 1` needs about :math:`10 N` steps. The default

    .. math::

        \mu = T \, (20 h)^2

    is :math:`\tau = 20` steps in any units: the friction per step :math:`\zeta h` then changes by
    :math:`\kappa / 400` a step, settles within the larger of :math:`400 \zeta h` and :math:`1 / \zeta h`
    steps, and fluctuates by :math:`1 / (20 \sqrt d)`.

    **Its bound.** At :math:`\zeta h = 1` a step forgets the momentum; more friction would turn it round. A
    chain that starts far from its target is slowed down to gradient descent, and no further. Gradient noise
    beyond :math:`h^2 V G = 2 T (1 - \gamma h)` can't be absorbed by friction, and the chain is too hot.
    At :math:`T = 0` the thermostat is at its bound from the first step on: the map is ``torch.optim.SGD``
    without momentum, with the learning rate :math:`h^2`.

    Args:
        position: :math:`\theta`, of shape ``(*batch, d)``.
        momentum: :math:`m`, of the shape of ``position``.
        thermostat: :math:`\zeta`, of shape ``(*batch, 1)``, or ``(*batch, len(groups))``. Start at
            ``friction``.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h > 0`, in units of time.
        friction: :math:`\gamma \ge 0`, per unit of time: that for which noise is injected.
        temperature: :math:`T \ge 0`; the noise drops out at 0.
        inverse_mass: :math:`G > 0`, broadcastable to ``position``.
        thermal_inertia: :math:`\mu > 0`, in units of temperature times the square of time; None for :math:`T
            (20 h)^2`.
        groups: numbers of successive coordinates with a thermostat of their own, that sum to ``d``, for
            instance the sizes of the sites; None for one thermostat.

    Returns:
        The position, the momentum and the thermostat after the step; the inputs are not changed.

    Raises:
        ValueError: if the groups don't fit the position or the thermostat.

    Example:
        >>> theta, m, xi = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]), torch.zeros(2)
        >>> zeta = torch.tensor([1.0])
        >>> sgnht(theta, m, zeta, theta, xi, step_size=0.5, friction=1.0, temperature=1.0)
        (tensor([1.0000, 1.2500]), tensor([0.0000, 0.5000]), tensor([0.9995]))

    References:
        Ding et al. 2014, "Bayesian sampling using stochastic gradient thermostats", whose thermal inertia
        :math:`\mu` is 1 in their algorithm. They take the new momentum in the third line, whose mean square
        is in error by :math:`O(h)`.
    """
    sizes = position.shape[-1:] if groups is None else tuple(groups)
    if sum(sizes) != position.shape[-1] or thermostat.shape[-1] != len(sizes):
        raise ValueError(
            f"groups {tuple(sizes)} have {sum(sizes)} coordinates, the position has {position.shape[-1]}, "
            f"and there are {thermostat.shape[-1]} thermostats; pass sizes that sum to the last dim of the "
            "position, and a thermostat for each"
        )
    spread = _spread(
        _sghmc_variance(step_size, friction, temperature, inverse_mass, 0.0), step_size, temperature, 0.0
    )
    # m <- (1 - zeta h) m - h grad U(theta) + sqrt(2 gamma h T / G) xi
    before = momentum
    damping = 1 - step_size * over_groups(thermostat, sizes)
    momentum = _plus(_plus(damping * momentum, -step_size, gradient), spread, noise)
    # theta <- theta + h G m
    position = _plus(position, step_size * inverse_mass, momentum)
    # zeta <- zeta + h / mu (mean G m^2 - T), m half way through the first line
    excess = _mean_over(inverse_mass * ((before + momentum) / 2) ** 2, sizes) - temperature
    if thermal_inertia is None:
        # h / mu = 1 / (20^2 h T); at T = 0 any excess takes the thermostat to its bound
        rate = 1 / (INERTIA_STEPS**2 * step_size * _at_least(temperature, 1e-30))
    else:
        rate = step_size / thermal_inertia
    thermostat = _plus(thermostat, rate, excess).clamp(max=_at_least(1 / step_size, friction))
    return position, momentum, thermostat


def draw_momentum(noise: Tensor, *, temperature: Scalar, inverse_mass: Scalar = 1.0) -> Tensor:
    r"""Momenta of the law :math:`N(0, T / G)`, :math:`m = \sqrt{T / G} \, \xi`; zeros at :math:`T = 0`.

    Args:
        noise: :math:`\xi`, standard normal draws of the shape of the position.
        temperature: :math:`T \ge 0`.
        inverse_mass: :math:`G > 0`, broadcastable to ``noise``.

    Returns:
        Momenta of the shape of ``noise``.

    Example:
        >>> draw_momentum(torch.tensor([1.0, -1.0]), temperature=4.0)
        tensor([ 2., -2.])
    """
    return _sqrt(temperature / inverse_mass) * noise


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
    right but for :math:`O(h^2)`. The kick of the step to come takes it half way to

    .. math::

        \bar m = (1 - \tfrac12 \zeta h) m - \tfrac{h}{2} \nabla U(\theta) + \tfrac12 \sigma \xi, \qquad
        \operatorname{Var} \bar m = T / G

    exactly, at every stable step size, with the variance :math:`\sigma^2 = 2 \gamma h T / G - h^2 \hat B` of
    the injected noise. Without that noise, and divided by the root of the share that is left,

    .. math::

        \tilde m = \frac{(1 - \tfrac12 \zeta h) m - \tfrac{h}{2} \nabla U(\theta)}
        {\sqrt{1 - \sigma^2 G / 4 T}} \sim N(0, T / G).

    Gradient noise of variance :math:`V` raises its variance by :math:`h V / (2 \gamma (1 - \tfrac12 \gamma
    h))` for :func:`sghmc`, and leaves it alone for :func:`sgnht`.

    Args:
        momentum: :math:`m` after a step, of shape ``(*batch, d)``.
        gradient: :math:`\nabla U` at the position after the step, of the same shape.
        step_size: :math:`h`.
        damping: :math:`\zeta`, broadcastable to the momentum: the friction of :func:`sghmc`, the thermostat
            of :func:`sgnht`.
        friction: :math:`\gamma`, for which noise is injected.
        temperature: :math:`T`; at 0 nothing is divided by.
        inverse_mass: :math:`G`, broadcastable to the momentum.
        noise_estimate: :math:`\hat B`.

    Returns:
        :math:`\tilde m`, of the shape of ``momentum``.

    Example:
        >>> m, gradient = torch.tensor([1.0]), torch.tensor([0.5])
        >>> momentum_within_kick(m, gradient, step_size=0.5, damping=1.0, friction=1.0, temperature=1.0)
        tensor([0.7217])
    """
    # m <- ((1 - zeta h / 2) m - h / 2 grad U) / sqrt(1 - sigma^2 G / (4 T))
    half = step_size / 2
    variance = _sghmc_variance(step_size, friction, temperature, inverse_mass, noise_estimate)
    cold = _at_least(temperature, 1e-30)
    left = 1 - variance * inverse_mass / (4 * cold)
    return ((1 - half * damping) * momentum - half * gradient) / _sqrt(left)


def sgld_from_sgd(lr: float, num_data: int) -> float:
    r"""Step size of the SGLD, or Leimkuhler-Matthews, chain whose cold limit is SGD without momentum.

    ``torch.optim.SGD(lr=lr)`` on the loss :math:`L = U / N` averaged over :math:`N` rows is :func:`sgld` at
    :math:`T = 0` with :math:`h = \mathrm{lr} / N`. A prior :math:`N(0, s^2)` stands for ``weight_decay``
    :math:`1 / (N s^2)`.

    Args:
        lr: learning rate of SGD, positive.
        num_data: :math:`N`, the rows of the whole data set; 1 if the loss is a sum over rows.

    Returns:
        The step size :math:`h`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> sgld_from_sgd(lr=0.1, num_data=1000)
        0.0001
    """
    _check_sgd(lr, 0.0, num_data)
    return lr / num_data


def sghmc_from_sgd(lr: float, momentum: float, num_data: int) -> tuple[float, float]:
    r"""Step size and friction of the SGHMC chain whose cold limit is SGD with momentum.

    ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the loss :math:`L = U / N` averaged over :math:`N` rows
    is :func:`sghmc` at :math:`T = 0` from :math:`m = 0` with

    .. math::

        h = \sqrt{\mathrm{lr} / N}, \qquad \gamma = (1 - \mu) / h,

    from the first step on: SGD's buffer is :math:`-m / (h N)`. A prior :math:`N(0, s^2)` stands for
    ``weight_decay`` :math:`1 / (N s^2)`.

    Args:
        lr: learning rate of SGD, positive.
        momentum: :math:`\mu` of SGD, in :math:`[0, 1)`, without dampening or Nesterov's variant.
        num_data: :math:`N`, the rows of the whole data set; 1 if the loss is a sum over rows.

    Returns:
        The step size :math:`h` and the friction :math:`\gamma`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> h, friction = sghmc_from_sgd(lr=0.1, momentum=0.9, num_data=1000)
        >>> round(h, 6), round(friction, 6)
        (0.01, 10.0)
    """
    _check_sgd(lr, momentum, num_data)
    step_size = math.sqrt(lr / num_data)
    return step_size, (1 - momentum) / step_size


def baoa_from_sgd(lr: float, momentum: float, num_data: int) -> tuple[float, float]:
    r"""Step size and friction of the BAOA chain whose cold limit is SGD with momentum.

    ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the loss :math:`L = U / N` averaged over :math:`N` rows
    is :func:`baoa` at :math:`T = 0` from :math:`m = 0` with

    .. math::

        h = \sqrt{\frac{2 \, \mathrm{lr}}{N (1 + \mu)}}, \qquad \gamma = -\frac{\ln \mu}{h},

    from the first step on. A prior :math:`N(0, s^2)` stands for ``weight_decay`` :math:`1 / (N s^2)`.

    Args:
        lr: learning rate of SGD, positive.
        momentum: :math:`\mu` of SGD, in :math:`[0, 1)`, without dampening or Nesterov's variant.
        num_data: :math:`N`, the rows of the whole data set; 1 if the loss is a sum over rows.

    Returns:
        The step size :math:`h` and the friction :math:`\gamma`, infinite without momentum.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> h, friction = baoa_from_sgd(lr=0.095, momentum=0.9, num_data=1000)
        >>> round(h, 6), round(friction, 6)
        (0.01, 10.536052)
    """
    _check_sgd(lr, momentum, num_data)
    step_size = math.sqrt(2 * lr / (num_data * (1 + momentum)))
    return step_size, -math.log(momentum) / step_size if momentum > 0 else math.inf


def check_noise_estimate(dynamics: Callable[..., Any], **arguments: Scalar) -> None:
    r"""Check that a step can inject less noise by what minibatches bring along already.

    The variance of the noise that a step injects, the expression under the root in its formula, is to be
    :math:`\ge 0` in every coordinate. The steps refuse by themselves if it is a negative number; if any
    argument is a tensor they can't look, so that they can be traced, and the root would be NaN. At :math:`T
    = 0` no noise is injected and the estimate is not used.

    Args:
        dynamics: :func:`sgld`, :func:`averaged_langevin`, :func:`sghmc` or :func:`baoa`.
        **arguments: the keyword arguments of the step.

    Raises:
        ValueError: if the variance or the estimate is negative, or the estimate is not finite.

    Example:
        >>> check_noise_estimate(sgld, step_size=0.1, temperature=1.0, noise_estimate=torch.tensor([5.0]))
        >>> check_noise_estimate(sgld, step_size=0.1, temperature=1.0, noise_estimate=torch.tensor([25.0]))
        Traceback (most recent call last):
            ...
        ValueError: noise_estimate 25 at step_size 0.1 leaves noise of variance -0.05 to inject; ...
    """
    full = {"inverse_mass": 1.0, "noise_estimate": 0.0, **arguments}
    estimate = torch.as_tensor(full["noise_estimate"])
    if not ((estimate >= 0) & estimate.isfinite()).all():
        raise ValueError(f"noise_estimate is {estimate}; it is a variance, so pass finite numbers >= 0")
    variance = torch.as_tensor(_VARIANCES[dynamics](**full))
    if full["temperature"] > 0 and (variance < 0).any():
        estimate, variance = torch.broadcast_tensors(estimate, variance)
        worst = variance.argmin()
        _refuse(float(variance.flatten()[worst]), full["step_size"], float(estimate.flatten()[worst]))


def _plus(tensor: Tensor, factor: Scalar, other: Tensor) -> Tensor:
    """``tensor + factor * other``, in one pass over memory where the factor is a number."""
    if isinstance(factor, Tensor):
        return tensor + factor * other
    return torch.add(tensor, other, alpha=factor)


def _overdamped_variance(
    step_size: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar
) -> Scalar:
    return 2 * step_size * temperature * inverse_mass - (step_size * inverse_mass) ** 2 * noise_estimate


def _sghmc_variance(
    step_size: Scalar, friction: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar
) -> Scalar:
    return 2 * friction * step_size * temperature / inverse_mass - step_size**2 * noise_estimate


def _baoa_variance(
    step_size: Scalar, friction: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar
) -> Scalar:
    # Gradient noise enters before the O step and moves the position by (1 + c) / 2 of what noise of the O
    # step does per unit of momentum that a step retains.
    lost = -_expm1(-friction * step_size)  # 1 - c
    kept = 2 - lost  # 1 + c
    return lost * kept * temperature / inverse_mass - (kept * step_size / 2) ** 2 * noise_estimate


_VARIANCES: dict[Callable[..., Any], Callable[..., Scalar]] = {
    sgld: _overdamped_variance,
    averaged_langevin: _overdamped_variance,
    sghmc: _sghmc_variance,
    baoa: _baoa_variance,
}


def _spread(variance: Scalar, step_size: Scalar, temperature: Scalar, noise_estimate: Scalar) -> Scalar:
    """Standard deviation of the injected noise, which is none at T = 0."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature > 0, variance, 0.0).sqrt()
    if temperature == 0:
        return 0.0
    if not isinstance(variance, Tensor) and variance < 0:
        _refuse(variance, step_size, noise_estimate)
    return _sqrt(variance)


def _refuse(variance: float, step_size: Scalar, noise_estimate: Scalar) -> None:
    raise ValueError(
        f"noise_estimate {float(noise_estimate):g} at step_size {float(step_size):g} leaves noise of "
        f"variance {variance:g} to inject; the gradients alone heat the chain beyond its temperature, so "
        "lower step_size, take larger minibatches and a smaller noise_estimate with them, or raise friction "
        "or temperature"
    )


def _check_sgd(lr: float, momentum: float, num_data: int) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr}; pass the learning rate of SGD, a finite number > 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; pass that of SGD, a number >= 0 and < 1")
    if not 1 <= num_data < math.inf:
        raise ValueError(f"num_data is {num_data}; pass the number of rows of the whole data set, >= 1")


def _mean_over(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Means over successive groups of the last dim."""
    return torch.stack([group.mean(-1) for group in values.split(list(sizes), -1)], -1)


def over_groups(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """A value a group, of shape ``(*batch, groups)``, repeated over the group's coordinates."""
    each = values.split(1, -1)
    return torch.cat([v.expand(*v.shape[:-1], n) for v, n in zip(each, sizes, strict=True)], -1)


def _at_least(value: Scalar, least: Scalar) -> Scalar:
    """The larger of two numbers."""
    if isinstance(value, Tensor):
        return value.clamp(min=least)
    return least.clamp(min=value) if isinstance(least, Tensor) else max(value, least)


def _sqrt(value: Scalar) -> Scalar:
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def _expm1(value: Scalar) -> Scalar:
    return value.expm1() if isinstance(value, Tensor) else math.expm1(value)
