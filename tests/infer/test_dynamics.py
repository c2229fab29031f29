"""The one-step map: its algebra, its noise, and its own stationary law, with negative controls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor

from pyro_sym.infer.dynamics import baoa

Map = Callable[..., tuple[Tensor, Tensor]]


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_one_step_is_the_formula() -> None:
    h, friction, temperature = 0.3, 0.7, 0.4
    theta, m, gradient, noise = torch.randn(
        4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    c = math.exp(-friction * h)
    kicked = m - h * gradient
    halfway = theta + h / 2 * kicked
    m_new = c * kicked + math.sqrt(temperature * (1 - c**2)) * noise
    position, momentum = baoa(
        theta, m, gradient, noise, step_size=h, friction=friction, temperature=temperature
    )
    torch.testing.assert_close(momentum, m_new, rtol=0, atol=1e-14)
    torch.testing.assert_close(position, halfway + h / 2 * m_new, rtol=0, atol=1e-14)


def test_inputs_are_left_alone_and_dtypes_kept() -> None:
    inputs = [torch.randn(3) for _ in range(4)]
    copies = [value.clone() for value in inputs]
    outputs = baoa(*inputs, step_size=0.1, friction=1.0, temperature=1.0)
    for value, copy in zip(inputs, copies, strict=True):
        assert torch.equal(value, copy)
    assert all(value.dtype == torch.float32 for value in outputs)


def affine(step: Map, lam: float, h: float, friction: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Read matrix A and noise vector b of z' = A z + b xi off the map, for U = lam theta^2 / 2."""

    def image(theta: float, m: float, xi: float) -> Tensor:
        gradient = double(lam * theta)
        position, momentum = step(
            double(theta),
            double(m),
            gradient,
            double(xi),
            step_size=h,
            friction=friction,
            temperature=temperature,
        )
        return torch.cat([position, momentum])

    transition = torch.stack([image(1.0, 0.0, 0.0), image(0.0, 1.0, 0.0)], dim=1)
    return transition, image(0.0, 0.0, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_one_step_mean_and_covariance(temperature: float) -> None:
    lam, h, friction = 1.7, 0.5, 0.8
    c, x = math.exp(-friction * h), h**2 * lam
    transition, noise = affine(baoa, lam, h, friction, temperature)
    # Written out by hand: theta' = (1 - x (1 + c) / 2) theta + h (1 + c) / 2 m + h/2 s xi, m' = c (m - h lam
    # theta) + s xi.
    mean = double(1 - x * (1 + c) / 2, h * (1 + c) / 2, -c * h * lam, c).view(2, 2)
    spread = math.sqrt(temperature * (1 - c**2))
    covariance = spread**2 * double(h**2 / 4, h / 2, h / 2, 1.0).view(2, 2)
    torch.testing.assert_close(transition, mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.outer(noise, noise), covariance, rtol=0, atol=1e-14)


def has_exact_stationary_law(step: Map, x: float, temperature: float) -> bool:
    """Whether position variance T / lam and momentum variance T are kept exactly.

    The stationary covariance S solves S = A S A' + b b'; this is algebra, so no tolerance hides a bias.
    Between a step and the next kick, momentum and position have covariance h T / 2: half a kick takes it to
    zero.
    """
    lam, friction = 2.5, 0.6
    h = math.sqrt(x / lam)
    transition, noise = affine(step, lam, h, friction, temperature)
    if torch.linalg.eigvals(transition).abs().max() >= 1:
        return False
    covariance = torch.from_numpy(
        solve_discrete_lyapunov(transition.numpy(), torch.outer(noise, noise).numpy())
    )
    cross = h * temperature / 2
    expected = double(temperature / lam, cross, cross, temperature).view(2, 2)
    return bool(torch.allclose(covariance, expected, rtol=1e-10, atol=1e-10))


X_AND_T = [(x, t) for x in (0.01, 0.5, 2.0, 3.9) for t in (0.1, 0.5, 1.0)]


@pytest.mark.parametrize(("x", "temperature"), X_AND_T)
def test_stationary_variance_is_exact_for_any_stable_step(x: float, temperature: float) -> None:
    assert has_exact_stationary_law(baoa, x, temperature)


def test_beyond_the_stability_limit_the_check_says_no() -> None:
    assert not has_exact_stationary_law(baoa, 4.1, 1.0)


def without_square_root(*args: Tensor, temperature: float, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return baoa(*args, temperature=temperature**2, **kwargs)


def without_noise(
    theta: Tensor, m: Tensor, gradient: Tensor, noise: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return baoa(theta, m, gradient, torch.zeros_like(noise), **kwargs)


def without_friction(
    theta: Tensor,
    m: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: float,
    friction: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The right noise, but the momentum is not damped."""
    position, momentum = baoa(
        theta, m, gradient, noise, step_size=step_size, friction=friction, temperature=temperature
    )
    lost = (1 - math.exp(-friction * step_size)) * (m - step_size * gradient)
    return position + step_size / 2 * lost, momentum + lost


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


def gradient_after_half_drift(
    theta: Tensor,
    m: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: float,
    friction: float,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Drift with the momentum from before the kick: a slip of one line."""
    position, momentum = baoa(
        theta, m, gradient, noise, step_size=step_size, friction=friction, temperature=temperature
    )
    return position + step_size**2 / 2 * gradient, momentum


@pytest.mark.parametrize(
    "broken",
    [without_square_root, without_noise, without_friction, explicit_euler, gradient_after_half_drift],
)
def test_the_stationarity_check_rejects_broken_maps(broken: Map) -> None:
    assert not has_exact_stationary_law(broken, 0.01, 0.5)


def test_wrong_temperature_passes_at_one_only() -> None:
    """At T = 1 a lost square root can't be seen: the reason to test at other temperatures."""
    assert has_exact_stationary_law(without_square_root, 0.5, 1.0)


def test_zero_temperature_is_bitwise_free_of_noise() -> None:
    theta, m, gradient = torch.randn(3, 100)
    runs = [
        baoa(theta, m, gradient, noise, step_size=0.1, friction=1.0, temperature=0.0)
        for noise in (torch.zeros(100), 1e30 * torch.randn(100))
    ]
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("friction", [0.05, 2.0, math.inf])
def test_zero_temperature_is_torch_sgd_with_momentum(friction: float) -> None:
    h = 0.3
    c = math.exp(-friction * h)
    curvature = double(0.5, 1.7, 3.0)
    parameter = torch.nn.Parameter(double(1.0, -2.0, 0.5))
    optimiser = torch.optim.SGD([parameter], lr=h**2 / 2 * (1 + c), momentum=c)
    position, momentum = parameter.detach().clone(), torch.zeros(3, dtype=torch.float64)
    for _ in range(200):
        optimiser.zero_grad()
        (curvature * parameter.cosh()).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        gradient = curvature * position.sinh()
        position, momentum = baoa(
            position, momentum, gradient, torch.zeros(3), step_size=h, friction=friction, temperature=0.0
        )
        torch.testing.assert_close(position, parameter.detach(), rtol=0, atol=1e-12)
