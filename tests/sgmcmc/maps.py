"""The one-step maps under one signature, their stationary variances in closed form, and broken ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_sym.sgmcmc.overdamped import averaged_langevin, sgld
from pyro_sym.sgmcmc.underdamped import baoa, sghmc

Map = Callable[..., tuple[Tensor, Tensor]]
"""Position, momentum, gradient and noise to position and momentum; friction is an option of all."""


def sgld_pair(
    theta: Tensor, m: Tensor, gradient: Tensor, noise: Tensor, *, friction: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    return sgld(theta, gradient, noise, **options), torch.zeros_like(m)


def averaged_pair(
    theta: Tensor, m: Tensor, gradient: Tensor, noise: Tensor, *, friction: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    return averaged_langevin(theta, m, gradient, noise, **options)


MAPS: dict[str, Map] = {"sgld": sgld_pair, "averaged": averaged_pair, "sghmc": sghmc, "baoa": baoa}


def variance(name: str, lam: float, h: float, friction: float, temperature: float, V: float = 0.0) -> float:
    """Variance of the position on U = lam theta^2 / 2, with gradient noise of variance V."""
    x, a, c = h**2 * lam, friction * h, math.exp(-friction * h)
    heated = temperature + h * V / (2 * friction)
    match name:
        case "sgld":
            return (2 * temperature + h * V) / (lam * (2 - h * lam))
        case "averaged":
            return temperature / lam + h * V / (lam * (2 - h * lam))
        case "sghmc":
            return heated / lam * 2 * (2 - a) / (4 - 2 * a - x)
        case "baoa":
            return temperature / lam + V * h**2 * (1 + c) / (lam * (1 - c) * (4 - x))
        case "explicit":
            return heated / lam * 2 * friction * (2 - a + x) / ((friction - h * lam) * (4 - 2 * a + x))
    raise KeyError(name)


# --- slips, each of which a test has to catch ---------------------------------------------------------------


def without_square_root(step: Map) -> Map:
    """Noise in proportion to T, not to its root."""

    def broken(*args: Tensor, temperature: float, **options: Any) -> tuple[Tensor, Tensor]:
        return step(*args, temperature=temperature**2, **options)

    return broken


def without_noise(step: Map) -> Map:
    def broken(
        theta: Tensor, m: Tensor, gradient: Tensor, noise: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return step(theta, m, gradient, torch.zeros_like(noise), **options)

    return broken


def explicit_euler(
    theta: Tensor,
    m: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: float,
    friction: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """What posteriors and BlackJAX call SGHMC: both lines use the old values."""
    kick = -step_size * gradient - step_size * friction * m
    return theta + step_size * m, m + kick + math.sqrt(2 * friction * step_size * temperature) * noise
