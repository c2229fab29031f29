"""Chains of the maps, simulated: their stationary variances in many independent dimensions.

Each test starts in the exact law of the target and lets a wrong map run away from it. With DIMS dimensions
the relative standard error of a variance is sqrt(2 / DIMS) = 0.22 %, so that agreement within Z_LIMIT of them
is agreement within 1 %.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_sym.sgmcmc.nose_hoover import sgnht
from pyro_sym.sgmcmc.underdamped import sghmc
from tests.conftest import Z_LIMIT
from tests.sgmcmc.maps import MAPS, Map, explicit_euler, variance, without_friction, without_square_root

DIMS = 400_000
LAM = 1.7
TEMPERATURE = 0.5  # test_dynamics has the same variances at other temperatures, as algebra
# name: step size, friction, number of steps. Gradients are exact, and steps so large that biases show.
SETTINGS = {
    "sgld": (0.3, 1.0, 15),
    "averaged": (0.3, 1.0, 15),
    "sghmc": (0.4, 1.0, 30),
    "baoa": (0.8, 1.0, 20),
}


def normal(scale: float = 1.0, dims: int = DIMS) -> Tensor:
    # Drawn in single precision, at half the price; moments are not off by that.
    return scale * torch.randn(dims).double()


def simulate(
    step: Map,
    h: float,
    friction: float,
    temperature: float,
    steps: int,
    V: float = 0.0,
    dims: int = DIMS,
    **options: Any,
) -> Tensor:
    """Positions after so many steps from exp(-lam theta^2 / 2T) and momenta N(0, T)."""
    theta, m = normal(math.sqrt(temperature / LAM), dims), normal(math.sqrt(temperature), dims)
    if step is MAPS["averaged"]:
        # its stationary law is that of the pair: theta = x + sqrt(h T / 2) xi, x and xi independent
        m = normal(1.0, dims)
        theta = normal(math.sqrt(temperature / LAM - h * temperature / 2), dims)
        theta = theta + math.sqrt(h * temperature / 2) * m
    for _ in range(steps):
        gradient = LAM * theta + (normal(math.sqrt(V), dims) if V else 0.0)
        theta, m = step(
            theta,
            m,
            gradient,
            normal(1.0, dims),
            step_size=h,
            friction=friction,
            temperature=temperature,
            **options,
        )
    return theta


def z_score(theta: Tensor, expected: float) -> float:
    """How many standard errors the mean square is away from its expectation."""
    return (float((theta**2).mean()) / expected - 1) / math.sqrt(2 / len(theta))


def test_a_standard_error_is_a_quarter_of_a_percent() -> None:
    assert Z_LIMIT * math.sqrt(2 / DIMS) < 0.01


# --- exact gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["averaged", "baoa"])
def test_the_target_is_kept(name: str) -> None:
    h, friction, steps = SETTINGS[name]
    theta = simulate(MAPS[name], h, friction, TEMPERATURE, steps)
    assert abs(z_score(theta, TEMPERATURE / LAM)) < Z_LIMIT


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_the_bias_is_the_predicted_one(name: str) -> None:
    h, friction, steps = SETTINGS[name]
    theta = simulate(MAPS[name], h, friction, TEMPERATURE, steps)
    assert abs(z_score(theta, variance(name, LAM, h, friction, TEMPERATURE))) < Z_LIMIT
    assert z_score(theta, TEMPERATURE / LAM) > Z_LIMIT, "the bias must be visible"


# --- gradient noise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
def test_gradient_noise_heats_as_predicted(name: str) -> None:
    h, friction, steps = SETTINGS[name]
    V = 2 * TEMPERATURE
    theta = simulate(MAPS[name], h, friction, TEMPERATURE, steps, V)
    assert abs(z_score(theta, variance(name, LAM, h, friction, TEMPERATURE, V))) < Z_LIMIT
    assert z_score(theta, variance(name, LAM, h, friction, TEMPERATURE)) > Z_LIMIT, "heat must be visible"


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_a_noise_estimate_takes_the_heat_out(name: str) -> None:
    h, friction, steps = SETTINGS[name]
    theta = simulate(MAPS[name], h, friction, 0.5, steps, V=1.0, noise_estimate=1.0)
    assert abs(z_score(theta, variance(name, LAM, h, friction, 0.5))) < Z_LIMIT


# --- the thermostat -----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
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
    theta = simulate(sghmc, STEP, FRICTION, 0.5, 100, V=4.0, dims=100_000)
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


# --- negative controls: each fails, and for its own reason --------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
def test_a_lost_square_root_shows_as_a_factor_of_the_temperature(name: str) -> None:
    h, friction, steps = SETTINGS[name]
    steps = 2 * steps  # the start is too hot by far, and is to be forgotten
    theta = simulate(without_square_root(MAPS[name]), h, friction, 0.5, steps)
    assert abs(z_score(theta, variance(name, LAM, h, friction, 0.5))) > 10 * Z_LIMIT
    assert abs(z_score(theta, 0.5 * variance(name, LAM, h, friction, 0.5))) < Z_LIMIT


def test_lost_friction_shows_as_heat_that_grows_without_end() -> None:
    """Each step adds the injected noise's 2 gamma h T to the momentum's square: gamma T t to the energy."""
    h, friction, temperature = 0.1, 1.0, 0.5
    energies = []
    for steps in (100, 200):
        theta = simulate(without_friction, h, friction, temperature, steps, dims=20_000)
        assert z_score(theta, variance("sghmc", LAM, h, friction, temperature)) > 100 * Z_LIMIT
        # by equipartition twice the potential energy, up to an oscillation
        energies.append(LAM * float((theta**2).mean()))
    assert (energies[1] - energies[0]) / (100 * h) == pytest.approx(friction * temperature, rel=0.1)


def test_explicit_euler_shows_as_the_bias_of_explicit_euler() -> None:
    h, friction, temperature = 0.1, 1.0, 0.5
    theta = simulate(explicit_euler, h, friction, temperature, 100)
    assert abs(z_score(theta, variance("sghmc", LAM, h, friction, temperature))) > 10 * Z_LIMIT
    assert abs(z_score(theta, variance("explicit", LAM, h, friction, temperature))) < Z_LIMIT
