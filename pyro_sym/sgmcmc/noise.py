r"""The noise that a step injects: its standard deviation, less by what minibatches bring along already."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Scalar", "add_scaled", "at_least", "check_noise_estimate", "draw_momentum", "injects", "spread"]

Scalar = float | Tensor
"""A number, or a tensor without dims, so that a traced or compiled step can take it as an input."""

Step = TypeVar("Step", bound=Callable[..., Any])

_VARIANCES: dict[Callable[..., Any], Callable[..., Scalar]] = {}


def injects(variance: Callable[..., Scalar]) -> Callable[[Step], Step]:
    """Declare the variance of the noise that a one-step map injects, for :func:`check_noise_estimate`."""

    def register(step: Step) -> Step:
        _VARIANCES[step] = variance
        return step

    return register


def spread(variance: Scalar, step_size: Scalar, temperature: Scalar, noise_estimate: Scalar) -> Scalar:
    """The standard deviation of the injected noise: the root of its variance, and 0 at T = 0.

    A negative number is a ``ValueError``. Tensors are not checked: a traced step can't.
    """
    if isinstance(temperature, Tensor):
        return torch.where(temperature > 0, variance, 0.0).sqrt()
    if temperature == 0:
        return 0.0
    if isinstance(variance, Tensor):
        return variance.sqrt()
    if variance < 0:
        _refuse(variance, step_size, noise_estimate)
    return math.sqrt(variance)


def check_noise_estimate(dynamics: Callable[..., Any], **arguments: Scalar) -> None:
    r"""Check that a step can inject less noise because minibatches already add some.

    The variance of the noise that a step injects, the expression under the root in its formula, has to be
    :math:`\ge 0` in every coordinate. The steps refuse a negative number by themselves; so that they can be
    traced they don't check tensors, and the root would be NaN. At :math:`T = 0` no noise is injected and the
    estimate is not used. ``dynamics`` is one of the one-step maps that ``injects`` registers,
    ``arguments`` are its keyword arguments.

    Example:
        >>> from pyro_sym.sgmcmc.overdamped import sgld
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


def _refuse(variance: float, step_size: Scalar, noise_estimate: Scalar) -> None:
    raise ValueError(
        f"noise_estimate {float(noise_estimate):g} at step_size {float(step_size):g} leaves noise of "
        f"variance {variance:g} to inject; the gradients alone heat the chain beyond its temperature, so "
        "lower step_size, take larger minibatches and a smaller noise_estimate with them, or raise friction "
        "or temperature"
    )


def draw_momentum(noise: Tensor, *, temperature: Scalar, inverse_mass: Scalar = 1.0) -> Tensor:
    r"""Momenta of the law :math:`N(0, T / G)`, :math:`m = \sqrt{T / G} \, \xi`; zeros at :math:`T = 0`."""
    variance = temperature / inverse_mass
    return (variance.sqrt() if isinstance(variance, Tensor) else math.sqrt(variance)) * noise


def add_scaled(tensor: Tensor, factor: Scalar, other: Tensor) -> Tensor:
    """``tensor + factor * other``, in one pass over memory where the factor is a number."""
    if isinstance(factor, Tensor):
        return tensor + factor * other
    return torch.add(tensor, other, alpha=factor)


def at_least(value: Scalar, least: Scalar) -> Scalar:
    """The larger of two numbers."""
    if isinstance(value, Tensor):
        return value.clamp(min=least)
    return least.clamp(min=value) if isinstance(least, Tensor) else max(value, least)
