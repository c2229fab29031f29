"""The thermostat, simulated in many independent dimensions, as it is not linear.

The stationary laws of the other maps are tested by algebra, in test_dynamics. Chains start in the exact law.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_sym.sgmcmc.nose_hoover import sgnht
from pyro_sym.sgmcmc.underdamped import sghmc
from tests.conftest import Z_LIMIT

LAM = 1.7
TEMPERATURES = (0.1, 0.5, 1.0)


def normal(scale: float, dims: int) -> Tensor:
    # Drawn in single precision, at half the price; moments are not off by that.
    return scale * torch.randn(dims).double()


def z_score(theta: Tensor, expected: float) -> float:
    """How many standard errors the mean square is away from its expectation."""
    return (float((theta**2).mean()) / expected - 1) / math.sqrt(2 / len(theta))


STEP, FRICTION = 0.1, 0.4


def thermostatted(
    temperature: float, V: Tensor | float, steps: int, groups: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Position in 100,000 dims and the thermostat, which starts at the friction of exact gradients."""
    dims = 100_000
    theta, m = normal(math.sqrt(temperature / LAM), dims), normal(math.sqrt(temperature), dims)
    zeta = torch.full((1 if groups is None else len(groups),), FRICTION, dtype=torch.float64)
    spread = torch.as_tensor(V, dtype=torch.float64).sqrt()
    for _ in range(steps):
        theta, m, zeta = sgnht(
            theta,
            m,
            zeta,
            LAM * theta + spread * normal(1.0, dims),
            normal(1.0, dims),
            step_size=STEP,
            friction=FRICTION,
            temperature=temperature,
            groups=groups,
        )
    return theta, zeta


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_thermostat_takes_the_heat_out_unasked(temperature: float) -> None:
    V = 8 * temperature  # twice the injected noise's power: without a thermostat T would double
    theta, zeta = thermostatted(temperature, V, 250)
    expected = FRICTION + STEP * V / (2 * temperature)
    assert zeta.item() == pytest.approx(expected, rel=0.02)
    discrete = 2 * (2 - expected * STEP) / (4 - 2 * expected * STEP - STEP**2 * LAM)
    assert abs(z_score(theta, temperature / LAM * discrete)) < Z_LIMIT
    assert float((theta**2).mean()) * LAM / temperature == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("N", [1e2, 1e6])
def test_the_thermostat_settles_as_fast_on_narrow_posteriors(N: float) -> None:
    """N rows of which 5 % are seen at a time: the chain without a thermostat is at nearly twice T."""
    dims, lam = 4_000, N
    h, friction, V = 0.1 / math.sqrt(N), math.sqrt(N), 19 * N

    def ratio(inertia: float | None, h: float = h, friction: float = friction) -> float:
        theta = normal(1 / math.sqrt(lam), dims)
        m, zeta = normal(1.0, dims), torch.full((1,), friction, dtype=torch.float64)
        for _ in range(500):
            theta, m, zeta = sgnht(
                theta,
                m,
                zeta,
                lam * theta + normal(math.sqrt(V), dims),
                normal(1.0, dims),
                step_size=h,
                friction=friction,
                temperature=1.0,
                thermal_inertia=inertia,
            )
        settled = friction + h * V / 2
        discrete = 2 * (2 - settled * h) / (4 - 2 * settled * h - h**2 * lam)
        return float((theta**2).mean()) * lam / discrete

    error = Z_LIMIT * math.sqrt(2 / dims)  # a relative 9.6 % in the variance, 4.8 % in the sd
    assert abs(ratio(None) - 1) < error
    assert abs(ratio(None, friction=1.0) - 1) < error, "whatever the friction it starts from"
    # the inertia of 1 that there was before: the sd is a third too large, as it needs 10 N steps
    assert ratio(1.0) > 1.35 + error


def test_sghmc_with_the_same_noise_is_twice_as_hot() -> None:
    theta, m = normal(math.sqrt(0.5 / LAM), 100_000), normal(math.sqrt(0.5), 100_000)
    for _ in range(100):
        gradient, noise = LAM * theta + normal(2.0, 100_000), normal(1.0, 100_000)
        theta, m = sghmc(theta, m, gradient, noise, step_size=STEP, friction=FRICTION, temperature=0.5)
    assert float((theta**2).mean()) * LAM / 0.5 == pytest.approx(2, abs=0.04)


@pytest.mark.parametrize("separate", [True, False])
def test_groups_with_unequal_noise_need_a_thermostat_each(separate: bool) -> None:
    """One thermostat for all settles in between: it cools the quiet half and leaves the noisy one hot."""
    half, temperature = 50_000, 0.5
    V = torch.cat([torch.full((half,), 0.0), torch.full((half,), 8 * temperature)])
    theta, zeta = thermostatted(temperature, V, 250, (half, half) if separate else None)
    ratios = (theta.view(2, half) ** 2).mean(1) * LAM / temperature
    needed = FRICTION + STEP * torch.tensor([0.0, 8.0], dtype=torch.float64) / 2
    if separate:
        torch.testing.assert_close(zeta, needed, rtol=0.03, atol=0)
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0.03, atol=0)
    else:
        torch.testing.assert_close(zeta, needed.mean(0, keepdim=True), rtol=0.03, atol=0)
        torch.testing.assert_close(ratios, needed / needed.mean(), rtol=0.03, atol=0)
