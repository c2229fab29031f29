"""The stochastic-gradient Nosé–Hoover thermostat, SGNHT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from pyro_sym.sgmcmc.kernel import Options, Schedule, State
from pyro_sym.sgmcmc.noise import Scalar, add_scaled, at_least, spread
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.schedules import relaxation_share
from pyro_sym.sgmcmc.underdamped import kick_variance, momentum_within_kick

__all__ = ["INERTIA_STEPS", "SGNHT", "sgnht"]

INERTIA_STEPS = 20
"""Steps in which a thermostat reacts, by default."""


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
    r"""One step of :class:`~pyro_sym.SGNHT`, whose docstring has the formula; returns the new state.

    **Thermal inertia.** The target does not depend on :math:`\mu`: in continuous time :math:`\zeta` is normal
    around its mean, with the variance :math:`T / (\mu d)` for a group of :math:`d` coordinates, and
    independent of position and momentum. Only how fast it settles does. With :math:`\tau^2 = \mu / T`, small
    deviations :math:`\delta = \zeta - \bar \zeta` and :math:`\kappa = \overline{G m^2} / T - 1` obey

    .. math::

        \dot \delta = \kappa / \tau^2, \qquad \dot \kappa = -2 \delta - 2 \bar \zeta \kappa,

    so the thermostat settles at the rate :math:`\bar \zeta` if :math:`\bar \zeta \tau < \sqrt 2`, and at
    about :math:`1 / (\bar \zeta \tau^2)` if the friction is larger. A number for :math:`\mu` is right for
    posteriors of one scale only: where :math:`N` rows make standard deviations, step size and :math:`1 /
    \zeta` shrink as :math:`1 / \sqrt N`, :math:`\mu = 1` needs about :math:`10 N` steps. The default
    :math:`\mu = T \, (20 h)^2` is :math:`\tau = 20` steps in any units: the friction per step :math:`\zeta h`
    then changes by :math:`\kappa / 400` a step, settles within the larger of :math:`400 \zeta h` and :math:`1
    / \zeta h` steps, and fluctuates by :math:`1 / (20 \sqrt d)`.

    **Its bound.** At :math:`\zeta h = 1` a step forgets the momentum; more friction would reverse it. A chain
    that starts far from its target is slowed down to gradient descent, and no further. Gradient noise beyond
    :math:`h^2 V G = 2 T (1 - \gamma h)` can't be absorbed by friction, and the chain is too hot. At :math:`T
    = 0` the thermostat is at its bound from the first step on: the map is ``torch.optim.SGD`` without
    momentum, with the learning rate :math:`h^2`.

    Position, momentum, gradient and noise, :math:`\xi`, have the shape ``(*batch, d)``; the inputs are not
    changed. ``groups`` are the sizes of successive groups of coordinates with a thermostat each, by default
    one group; ``thermostat``, of shape ``(*batch, groups)``, starts at ``friction``.

    Example:
        >>> u, m, xi = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]), torch.zeros(2)
        >>> zeta = torch.tensor([1.0])
        >>> sgnht(u, m, zeta, u, xi, step_size=0.5, friction=1.0, temperature=1.0)
        (tensor([1.0000, 1.2500]), tensor([0.0000, 0.5000]), tensor([0.9995]))
    """
    sizes = position.shape[-1:] if groups is None else tuple(groups)
    if sum(sizes) != position.shape[-1] or thermostat.shape[-1] != len(sizes):
        raise ValueError(
            f"groups {tuple(sizes)} have {sum(sizes)} coordinates, the position has {position.shape[-1]}, "
            f"and there are {thermostat.shape[-1]} thermostats; pass sizes that sum to the last dim of the "
            "position, and a thermostat for each"
        )
    variance = kick_variance(step_size, friction, temperature, inverse_mass, 0.0)
    sigma = spread(variance, step_size, temperature, 0.0)
    before = momentum
    damping = 1 - step_size * _over_groups(thermostat, sizes)  # (*batch, d)
    momentum = add_scaled(add_scaled(damping * momentum, -step_size, gradient), sigma, noise)
    position = add_scaled(position, step_size * inverse_mass, momentum)
    kinetic = inverse_mass * ((before + momentum) / 2) ** 2
    excess = torch.stack([group.mean(-1) for group in kinetic.split(list(sizes), -1)], -1) - temperature
    if thermal_inertia is None:
        # h / mu = 1 / (20^2 h T); at T = 0 any excess takes the thermostat to its bound
        rate = 1 / (INERTIA_STEPS**2 * step_size * at_least(temperature, 1e-30))
    else:
        rate = step_size / thermal_inertia
    thermostat = add_scaled(thermostat, rate, excess)  # (*batch, groups)
    return position, momentum, thermostat.clamp(max=at_least(1 / step_size, friction))


def _over_groups(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """A value a group, of shape ``(*batch, groups)``, repeated over the group's coordinates."""
    each = values.split(1, -1)
    return torch.cat([v.expand(*v.shape[:-1], n) for v, n in zip(each, sizes, strict=True)], -1)


class SGNHT(StochasticGradientKernel):
    r"""Stochastic-gradient Nosé–Hoover thermostat: friction that adapts to the noise of minibatches.

    .. math::

        m &\leftarrow (1 - \zeta h) m - h \nabla U(u) + \sqrt{2 \gamma h T / G} \, \xi \\
        u &\leftarrow u + h G m \\
        \zeta &\leftarrow \min \Bigl( \zeta + \frac{h}{\mu} \bigl( \overline{G \bar m^2} - T \bigr), \;
        \max(1 / h, \gamma) \Bigr)

    with :math:`\bar m` half way between the momenta before and after the first line; the mean runs over the
    coordinates of a thermostat :math:`\zeta`, which starts at :math:`\gamma` and settles where the kinetic
    temperature is :math:`T`, in a number of steps that does not depend on the scale of the posterior
    (:math:`\mu = T (20 h)^2`; :func:`~pyro_sym.sgmcmc.nose_hoover.sgnht` says why). Gradient noise of
    variance :math:`V` raises the friction, where it raises the temperature of other kernels. On a Gaussian
    with many coordinates of curvature :math:`\lambda`, :math:`x = h^2 G \lambda`, exactly

    .. math::

        \operatorname{Var} u = \frac{T}{\lambda} \, \frac{2 (2 - \zeta h)}{4 - 2 \zeta h - x}, \qquad
        \zeta = \gamma + \frac{h V G}{2 T}.

    At :math:`T = 0` the chain is ``torch.optim.SGD`` without momentum.

    **For which noise it is right.** A thermostat fixes one number, the *mean* kinetic temperature of its
    coordinates. It is right where :math:`h V / (2 T)`, the friction that the noise asks for, is the same in
    every direction, or small beside the friction. The noise of minibatches has about the covariance of the
    curvature: it is alike in all directions where the posterior is about isotropic in the coordinates that
    the kernel moves in (after a preconditioner), and it is not where coordinates are correlated or have
    unequal scales. Then stiff directions are too hot, soft ones too cold, and the mean passes
    (:func:`~pyro_sym.diagnostics.directional_temperatures` shows it). Control variates cut the noise itself,
    in all directions.

    Its own statistic is ``thermostat``, the friction :math:`\zeta` at each draw, or ``site_thermostat`` by
    site.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        friction: :math:`\gamma \ge 0`, per unit of time: that for which noise is injected.
        thermal_inertia: :math:`\mu > 0`, in units of temperature times the square of time; by default
            :math:`T (20 h)^2`, with the step size and temperature of each step. It changes how fast the
            thermostat settles, not where.
        thermostats: ``"global"`` for one in all, ``"site"`` for one a site. The fewer coordinates one has,
            the more it fluctuates, and with it the stable step size, :math:`h^2 \lambda < 4 - 2 \zeta h`:
            take smaller steps than with :class:`~pyro_sym.BAOA`, and one a site only where sites are large.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.zeros(50), 1.0).to_event(1))
        >>> kernel = SGNHT(model, step_size=0.1, friction=1.0)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=10, disable_progbar=True)
        >>> mcmc.run()
        >>> mcmc.diagnostics()["sample_stats"]["chain 0"]["thermostat"].shape
        torch.Size([10])

    References:
        Ding et al. 2014, "Bayesian sampling using stochastic gradient thermostats", whose thermal inertia
        :math:`\mu` is 1 in their algorithm. They take the new momentum in the third line, whose mean square
        is in error by :math:`O(h)`.
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
        """As for the other kernels with friction, but at least eight times the steps of a thermostat."""
        return min(1 / (8 * INERTIA_STEPS), relaxation_share(self.friction, step_size))

    def init(self, position: Tensor, noise: Tensor, *, sizes: Sequence[int], **settings: Any) -> State:
        """Positions, momenta, and thermostats at the friction."""
        self._groups = list(sizes) if self.thermostats == "site" else [position.shape[-1]]
        thermostat = position.new_full((len(position), len(self._groups)), self.friction)  # (C, groups)
        return *super().init(position, noise, sizes=sizes, **settings), thermostat

    def step(self, state: State, gradient: Tensor, noise: Tensor, **settings: Any) -> State:
        """One step of :func:`~pyro_sym.sgmcmc.nose_hoover.sgnht`."""
        position, momentum, thermostat = state
        settings |= {"friction": self.friction, "thermal_inertia": self.thermal_inertia}
        return sgnht(position, momentum, thermostat, gradient, noise, groups=self._groups, **settings)

    def thermal_momentum(self, state: State, gradient: Tensor, **settings: Any) -> Tensor:
        """:func:`~pyro_sym.sgmcmc.underdamped.momentum_within_kick`, damped by the thermostats."""
        _, momentum, thermostat = state
        damping = _over_groups(thermostat, self._groups or [momentum.shape[-1]])
        return momentum_within_kick(momentum, gradient, damping=damping, friction=self.friction, **settings)

    def statistics(self, state: State) -> dict[str, Tensor]:
        """The thermostats."""
        thermostat = state[2]
        if self.thermostats == "site":
            return {"site_thermostat": thermostat}
        return {"thermostat": thermostat.squeeze(-1)}
