r"""One-step maps of samplers: pure functions of position, momentum, gradient and noise.

Symbols, here and in every function: position :math:`\theta`, momentum :math:`m` (unit mass), gradient
:math:`\nabla U` of the potential energy :math:`U = -\log p(\theta, D)`, standard normal noise :math:`\xi`,
step size :math:`h`, friction :math:`\gamma`, temperature :math:`T`. Noise is an argument, so that a step can
be tested exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["baoa"]


def baoa(
    position: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: float,
    friction: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    r"""One step of underdamped Langevin dynamics by the BAOA splitting, with one gradient a step.

    It discretises, for the target :math:`\exp(-U(\theta)/T)` and momenta :math:`N(0, T)`,

    .. math::

        d\theta = m \, dt, \qquad
        dm = -\nabla U(\theta) \, dt - \gamma m \, dt + \sqrt{2 \gamma T} \, dW,

    by a kick (B), a half drift (A), friction and noise (O) with :math:`c = e^{-\gamma h}`, and a half drift
    (A). On a Gaussian target the variance of the position is exact for every stable step size, :math:`h^2
    \lambda < 4` at curvature :math:`\lambda`. At :math:`T = 0` from :math:`m = 0` the step is
    ``torch.optim.SGD`` with ``momentum`` :math:`= c` and ``lr`` :math:`= \tfrac{h^2}{2} (1 + c)`, from the
    first step on.

    Args:
        position: :math:`\theta`, of any shape.
        momentum: :math:`m`, of the shape of ``position``.
        gradient: :math:`\nabla U(\theta)` at the position before the step, of the shape of ``position``.
        noise: :math:`\xi`, standard normal draws of the shape of ``position``.
        step_size: :math:`h`, in units of time.
        friction: :math:`\gamma`, per unit of time; infinite friction forgets the momentum each step.
        temperature: :math:`T`; the noise drops out at 0.

    Returns:
        The position and the momentum after the step; the inputs are not changed.

    Example:
        >>> theta, m, xi = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5])
        >>> baoa(theta, m, theta, xi, step_size=0.5, friction=math.inf, temperature=1.0)
        (tensor([1.]), tensor([0.5000]))

    Source:
        The scheme as in Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?"
        (arXiv 2002.02405, whose code has it), and Duffield et al. 2025, "Scalable Bayesian learning with
        posteriors" (arXiv 2406.00104).
    """
    half = step_size / 2
    decay = math.exp(-friction * step_size)
    spread = math.sqrt(-temperature * math.expm1(-2 * friction * step_size))
    # B: m <- m - h grad U(theta)
    momentum = torch.add(momentum, gradient, alpha=-step_size)
    # A: theta <- theta + h/2 m
    position = torch.add(position, momentum, alpha=half)
    # O: m <- c m + sqrt(T (1 - c^2)) xi
    momentum = torch.add(decay * momentum, noise, alpha=spread)
    # A: theta <- theta + h/2 m
    position = torch.add(position, momentum, alpha=half)
    return position, momentum
