"""The one-step maps: their algebra, noise, own stationary laws and orders, with negative controls.

Covers `sgmcmc.overdamped`, `sgmcmc.underdamped`, `sgmcmc.nose_hoover` and `sgmcmc.noise`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_sym.sgmcmc.noise import check_noise_estimate, draw_momentum
from pyro_sym.sgmcmc.nose_hoover import sgnht
from pyro_sym.sgmcmc.overdamped import averaged_langevin, sgld, sgld_from_sgd
from pyro_sym.sgmcmc.underdamped import baoa, baoa_from_sgd, momentum_within_kick, sghmc, sghmc_from_sgd
from tests.conftest import Z_LIMIT
from tests.sgmcmc.maps import MAPS, Map, explicit_euler, variance, without_noise, without_square_root


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_one_step_is_the_formula() -> None:
    h, friction, temperature, estimate = 0.3, 0.7, 0.4, 0.9
    theta, m, gradient, xi = normal(4, 5)
    G = normal(5, seed=1).exp()
    overdamped: dict[str, Any] = {
        "step_size": h,
        "temperature": temperature,
        "inverse_mass": G,
        "noise_estimate": 0.2,
    }
    options = {**overdamped, "friction": friction, "noise_estimate": estimate}
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-14)

    sigma = (2 * h * temperature * G - h**2 * G**2 * 0.2).sqrt()
    close(sgld(theta, gradient, xi, **overdamped), theta - h * G * gradient + sigma * xi)

    position, carried = averaged_langevin(theta, m, gradient, xi, **overdamped)
    close(position, theta - h * G * gradient + sigma * (m + xi) / 2)
    close(carried, xi)

    m_new = m - h * gradient - h * friction * m
    m_new = m_new + (2 * friction * h * temperature / G - h**2 * estimate).sqrt() * xi
    position, momentum = sghmc(theta, m, gradient, xi, **options)
    close(momentum, m_new)
    close(position, theta + h * G * m_new)

    c = math.exp(-friction * h)
    kicked = m - h * gradient
    halfway = theta + h / 2 * G * kicked
    m_new = c * kicked + (temperature * (1 - c**2) / G - h**2 * estimate * ((1 + c) / 2) ** 2).sqrt() * xi
    position, momentum = baoa(theta, m, gradient, xi, **options)
    close(momentum, m_new)
    close(position, halfway + h / 2 * G * m_new)

    close(draw_momentum(xi, temperature=temperature, inverse_mass=G), (temperature / G).sqrt() * xi)


@pytest.mark.parametrize("inertia", [None, 3.0])
def test_one_step_of_the_thermostat_is_the_formula(inertia: float | None) -> None:
    h, friction, temperature = 0.3, 0.7, 0.4
    theta, m, gradient, xi = normal(4, 2, 5)
    G = normal(5, seed=1).exp()
    zeta = normal(2, 2, seed=2)
    each = zeta[:, [0, 0, 1, 1, 1]]
    m_new = m - h * gradient - h * each * m + (2 * friction * h * temperature / G).sqrt() * xi
    kinetic = G * ((m + m_new) / 2) ** 2
    means = torch.stack([kinetic[:, :2].mean(1), kinetic[:, 2:].mean(1)], 1)
    position, momentum, thermostat = sgnht(
        theta,
        m,
        zeta,
        gradient,
        xi,
        step_size=h,
        friction=friction,
        temperature=temperature,
        inverse_mass=G,
        thermal_inertia=inertia,
        groups=(2, 3),
    )
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-14)
    close(momentum, m_new)
    close(position, theta + h * G * m_new)
    mu = temperature * (20 * h) ** 2 if inertia is None else inertia
    close(thermostat, zeta + h / mu * (means - temperature))


def test_a_step_of_the_thermostat_is_the_same_in_all_units() -> None:
    """Lengths, energies and times in other units: the default inertia goes along, a number does not."""
    theta, m, slope, xi = normal(4, 3, 5)
    zeta = normal(3, 1, seed=2)
    length, heat = 1e-3, 7.0  # of a narrow posterior at another temperature; unit mass, so time goes along
    time = length / math.sqrt(heat)
    options: dict[str, Any] = {"step_size": 0.2, "friction": 0.7, "temperature": 0.4}
    scaled: dict[str, Any] = {"step_size": 0.2 * time, "friction": 0.7 / time, "temperature": 0.4 * heat}

    def difference(inertia: float | None) -> float:
        one = sgnht(theta, m, zeta, slope, xi, thermal_inertia=inertia, **options)
        other = sgnht(
            theta * length,
            m * math.sqrt(heat),
            zeta / time,
            slope * heat / length,
            xi,
            thermal_inertia=inertia,
            **scaled,
        )
        units = (length, math.sqrt(heat), 1 / time)
        return max(float((a - b / unit).abs().max()) for a, b, unit in zip(one, other, units, strict=True))

    assert difference(None) < 1e-13
    assert difference(1.0) > 0.01, "a number for the inertia is right in one unit only"


def test_a_thermostat_is_bounded_where_a_step_forgets_the_momentum() -> None:
    far = 1e6 * normal(2, 5)
    for friction, bound in ((0.5, 10.0), (15.0, 15.0)):
        options: dict[str, Any] = {"step_size": 0.1, "friction": friction, "temperature": 1.0}
        zeta = torch.full((2, 1), friction, dtype=torch.float64)
        _, m, zeta = sgnht(far, torch.zeros_like(far), zeta, far, torch.zeros_like(far), **options)
        assert (zeta == bound).all()
        _, m, _ = sgnht(far, m, zeta, torch.zeros_like(far), torch.zeros_like(far), **options)
        assert bound > 10 or (m == 0).all()


def test_one_thermostat_a_chain_is_one_group() -> None:
    theta, m, gradient, xi = normal(4, 2, 5)
    zeta = torch.ones(2, 1, dtype=torch.float64)
    options: dict[str, Any] = {"step_size": 0.1, "friction": 0.5, "temperature": 0.7}
    for one, other in zip(
        sgnht(theta, m, zeta, gradient, xi, **options),
        sgnht(theta, m, zeta, gradient, xi, groups=[5], **options),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("step", MAPS.values(), ids=MAPS)
def test_inputs_are_left_alone_and_dtypes_kept(step: Map) -> None:
    inputs = [torch.randn(3) for _ in range(4)]
    copies = [value.clone() for value in inputs]
    outputs = step(*inputs, step_size=0.1, friction=1.0, temperature=1.0)
    for value, copy in zip(inputs, copies, strict=True):
        assert torch.equal(value, copy)
    assert all(value.dtype == torch.float32 for value in outputs)
    again = step(*inputs, step_size=0.1, friction=1.0, temperature=1.0)
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))


@pytest.mark.parametrize("step", MAPS.values(), ids=MAPS)
def test_an_inverse_mass_is_a_change_of_scale(step: Map) -> None:
    """With theta = sqrt(G) phi and m = p / sqrt(G), phi and p move with unit mass on U(sqrt(G) phi)."""
    phi, p, slope, xi = normal(4, 3, 5)
    G = normal(5, seed=1).exp()
    root = G.sqrt()
    options = {"step_size": 0.2, "friction": 0.7, "temperature": 0.4}
    carried = p if step is MAPS["averaged"] else p / root  # its second slot is the noise
    theta, m = step(root * phi, carried, slope / root, xi, inverse_mass=G, noise_estimate=0.1 / G, **options)
    phi, p = step(phi, p, slope, xi, noise_estimate=0.1, **options)
    torch.testing.assert_close(theta, root * phi, rtol=0, atol=1e-13)
    torch.testing.assert_close(m, p if step is MAPS["averaged"] else p / root, rtol=0, atol=1e-13)


def test_an_inverse_mass_is_a_change_of_scale_for_the_thermostat_too() -> None:
    phi, p, slope, xi = normal(4, 3, 5)
    G = normal(5, seed=1).exp()
    root, zeta = G.sqrt(), normal(3, 2, seed=2)
    options: dict[str, Any] = {"step_size": 0.2, "friction": 0.7, "temperature": 0.4, "groups": (4, 1)}
    theta, m, scaled = sgnht(root * phi, p / root, zeta, slope / root, xi, inverse_mass=G, **options)
    phi, p, plain = sgnht(phi, p, zeta, slope, xi, **options)
    torch.testing.assert_close(theta, root * phi, rtol=0, atol=1e-13)
    torch.testing.assert_close(m, p / root, rtol=0, atol=1e-13)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-13)


def affine(
    step: Map, lam: float, h: float, friction: float, temperature: float, V: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Read matrix A and noise matrix B of z' = A z + B (xi, eps) off the map, for U = lam theta^2 / 2.

    Gradients come with noise sqrt(V) eps.
    """

    def image(theta: float, m: float, xi: float, eps: float) -> Tensor:
        gradient = double(lam * theta + math.sqrt(V) * eps)
        position, momentum = step(
            double(theta),
            double(m),
            gradient,
            double(xi),
            step_size=h,
            friction=friction,
            temperature=temperature,
            **options,
        )
        return torch.cat([position, momentum])

    columns = [image(*row) for row in torch.eye(4).tolist()]
    return torch.stack(columns[:2], dim=1), torch.stack(columns[2:], dim=1)


def stationary(transition: Tensor, noise: Tensor) -> Tensor:
    """The covariance S that solves S = A S A' + B B'."""
    assert torch.linalg.eigvals(transition).abs().max() < 1, "unstable"
    return torch.from_numpy(solve_discrete_lyapunov(transition.numpy(), (noise @ noise.T).numpy()))


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
    torch.testing.assert_close(noise @ noise.T, covariance, rtol=0, atol=1e-14)


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
    covariance = stationary(transition, noise)
    cross = h * temperature / 2
    expected = double(temperature / lam, cross, cross, temperature).view(2, 2)
    return bool(torch.allclose(covariance, expected, rtol=1e-10, atol=1e-10))


X_AND_T = [(x, t) for x in (0.01, 0.5, 2.0, 3.9) for t in (0.1, 0.5, 1.0)]


@pytest.mark.parametrize(("x", "temperature"), X_AND_T)
def test_stationary_variance_is_exact_for_any_stable_step(x: float, temperature: float) -> None:
    assert has_exact_stationary_law(baoa, x, temperature)


def test_beyond_the_stability_limit_the_check_says_no() -> None:
    assert not has_exact_stationary_law(baoa, 4.1, 1.0)


def without_damping(
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
    [
        without_square_root(baoa),
        without_noise(baoa),
        without_damping,
        explicit_euler,
        gradient_after_half_drift,
    ],
)
def test_the_stationarity_check_rejects_broken_maps(broken: Map) -> None:
    assert not has_exact_stationary_law(broken, 0.01, 0.5)


def test_wrong_temperature_passes_at_one_only() -> None:
    """At T = 1 a lost square root can't be seen: the reason to test at other temperatures."""
    assert has_exact_stationary_law(without_square_root(baoa), 0.5, 1.0)


@pytest.mark.parametrize("V", [0.0, 3.0])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", [*MAPS, "explicit"])
def test_stationary_variances_are_those_in_closed_form(name: str, temperature: float, V: float) -> None:
    """The table of the docstrings, and the heating by gradient noise, as algebra."""
    lam, h, friction = 1.7, 0.2, 0.8
    step = MAPS.get(name, explicit_euler)
    covariance = stationary(*affine(step, lam, h, friction, temperature, V))
    expected = variance(name, lam, h, friction, temperature, V)
    torch.testing.assert_close(covariance[0, 0].item(), expected, rtol=1e-11, atol=0)
    if name == "sghmc":
        kinetic = (temperature + h * V / (2 * friction)) * 4 / (4 - 2 * friction * h - h**2 * lam)
        torch.testing.assert_close(covariance[1, 1].item(), kinetic, rtol=1e-11, atol=0)


def test_half_way_through_its_kick_the_momentum_has_the_temperature() -> None:
    """What the thermostat of SGNHT measures, exactly and with gradient noise; the new momentum has not."""
    lam, h, friction, T, V = 1.7, 0.5, 0.8, 0.5, 3.0
    transition, noise = affine(sghmc, lam, h, friction, T, V)
    covariance = stationary(transition, noise)
    half_way = (covariance[1, 1] + (transition @ covariance)[1, 1]) / 2
    expected = T + h * V / (2 * friction)
    assert half_way.item() == pytest.approx(expected, rel=1e-12)
    assert covariance[1, 1].item() > 1.2 * expected


@pytest.mark.parametrize("noise_estimate", [0.0, 0.3])
@pytest.mark.parametrize(("lam", "h", "friction"), [(1.7, 0.5, 0.8), (1.0, 1.2, 0.5), (4.0, 0.1, 9.0)])
def test_the_momentum_within_a_kick_has_the_temperature(
    lam: float, h: float, friction: float, noise_estimate: float
) -> None:
    """On the law of the chain, exactly, whatever step size, friction and noise."""
    T = 0.5
    options = {"step_size": h, "friction": friction, "temperature": T, "noise_estimate": noise_estimate}
    covariance = stationary(
        *affine(sghmc, lam, h, friction, T, noise_estimate, noise_estimate=noise_estimate)
    )
    m, slope = independent(covariance, lam, noise_estimate)
    shown = momentum_within_kick(m, slope, damping=friction, **options)
    assert float(shown.square().sum()) == pytest.approx(T, rel=1e-12)
    # what a step ends with has not, which was read as heat
    assert float(m.square().sum()) > 1.04 * T


def independent(covariance: Tensor, lam: float, V: float) -> tuple[Tensor, Tensor]:
    """Momentum and noisy gradient at a draw, as coefficients of three independent standard normals."""
    law = torch.linalg.cholesky(covariance)
    return torch.cat([law[1], double(0.0)]), torch.cat([lam * law[0], double(math.sqrt(V))])


def test_the_momentum_within_a_kick_shows_heat() -> None:
    lam, h, friction, T, V = 1.7, 0.2, 0.8, 0.5, 3.0
    m, slope = independent(stationary(*affine(sghmc, lam, h, friction, T, V)), lam, V)
    options = {"step_size": h, "friction": friction, "damping": friction}
    shown = momentum_within_kick(m, slope, temperature=T, **options)
    heat = h * V / (2 * friction * (1 - friction * h / 2))
    assert float(shown.square().sum()) == pytest.approx(T + heat, rel=1e-12)
    cold = momentum_within_kick(m, slope, temperature=0.0, **options)
    torch.testing.assert_close(cold, (1 - friction * h / 2) * m - h / 2 * slope)


def test_the_position_moves_with_the_new_momentum() -> None:
    """Explicit Euler is unstable where the symplectic one is fine: h lam > gamma."""
    lam, h, friction = 100.0, 0.05, 2.0
    assert torch.linalg.eigvals(affine(sghmc, lam, h, friction, 1.0)[0]).abs().max() < 1
    assert torch.linalg.eigvals(affine(explicit_euler, lam, h, friction, 1.0)[0]).abs().max() > 1


# --- noise estimates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
def test_a_noise_estimate_removes_the_heating(name: str) -> None:
    """Exactly so for SGLD and SGHMC; for the others to leading order in h, with the rest in closed form."""
    lam, h, friction, T, V = 1.7, 0.2, 0.8, 0.5, 3.0
    corrected = stationary(*affine(MAPS[name], lam, h, friction, T, V, noise_estimate=V))[0, 0].item()
    x = h**2 * lam
    removed = {
        "averaged": V * h / 2 / lam,
        "baoa": V * h**2 * (1 + math.exp(-friction * h)) / (lam * (1 - math.exp(-friction * h)) * 4),
    }
    plain, heated = (variance(name, lam, h, friction, T, v) for v in (0.0, V))
    expected = heated - removed[name] if name in removed else plain
    assert corrected == pytest.approx(expected, rel=1e-11)
    share = {"averaged": h * lam / 2, "baoa": x / 4}.get(name, 0.0)
    assert (corrected - plain) / (heated - plain) == pytest.approx(share, abs=1e-9)


LIMITS = {"sgld": 2 / 0.1, "averaged": 2 / 0.1, "sghmc": 2 * 0.5 / 0.1, "baoa": 4 / 0.1**2 * math.tanh(0.025)}


@pytest.mark.parametrize("name", MAPS)
def test_a_noise_estimate_beyond_what_is_injected_is_refused(name: str) -> None:
    """Neither complex numbers nor NaN: the largest estimate is in closed form."""
    dynamics: Any = {"sgld": sgld, "averaged": averaged_langevin, "sghmc": sghmc, "baoa": baoa}[name]
    options: dict[str, Any] = {"step_size": 0.1, "temperature": 1.0}
    arguments = options if name in ("sgld", "averaged") else {**options, "friction": 0.5}
    values = normal(4, 3)
    for estimate in (0.999 * LIMITS[name], torch.tensor([0.0, 0.999 * LIMITS[name]])):
        check_noise_estimate(dynamics, noise_estimate=estimate, **arguments)
    good = MAPS[name](*values, friction=0.5, noise_estimate=0.999 * LIMITS[name], **options)
    assert all(value.isfinite().all() and value.dtype == torch.float64 for value in good)
    too_large = 1.001 * LIMITS[name]
    message = rf"noise_estimate {too_large:g} at step_size 0.1 leaves noise of variance -.*lower step_size"
    for estimate in (too_large, torch.tensor([0.0, too_large])):
        with pytest.raises(ValueError, match=message):
            check_noise_estimate(dynamics, noise_estimate=estimate, **arguments)
    with pytest.raises(ValueError, match=message):
        MAPS[name](*values, friction=0.5, noise_estimate=too_large, **options)


@pytest.mark.parametrize("estimate", [-1.0, math.nan, math.inf, torch.tensor([1.0, -1.0])])
def test_a_noise_estimate_that_is_no_variance_is_refused(estimate: float | Tensor) -> None:
    with pytest.raises(ValueError, match="it is a variance, so pass finite numbers >= 0"):
        check_noise_estimate(sgld, step_size=0.1, temperature=1.0, noise_estimate=estimate)


# --- numbers or tensors, traced or not ----------------------------------------------------------------------

SCALARS = {"step_size": 0.2, "friction": 0.7, "temperature": 0.4, "inverse_mass": 1.3, "noise_estimate": 0.1}


@pytest.mark.parametrize("name", [*MAPS, "sgnht"])
def test_tensor_scalars_are_numbers_and_can_be_traced(name: str) -> None:
    """A traced step takes other values of its scalars: none was read off and baked in."""

    def call(values: Tensor, zeta: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
        theta, m, gradient, xi = values
        if name == "sgnht":
            options = {k: v for k, v in options.items() if k != "noise_estimate"}
            return sgnht(theta, m, zeta, gradient, xi, groups=(4, 1), **options)
        return MAPS[name](theta, m, gradient, xi, **options)

    values, zeta = normal(4, 3, 5), normal(3, 2, seed=1)
    tensors = {key: double(value)[0] for key, value in SCALARS.items()}
    traced = make_fx(call)(values, zeta, tensors)
    for scale in (1.0, 0.5):
        expected = call(values, zeta, {key: scale * value for key, value in SCALARS.items()})
        scaled = {key: scale * value for key, value in tensors.items()}
        for outputs in (call(values, zeta, scaled), traced(values, zeta, scaled)):
            for output, value in zip(outputs, expected, strict=True):
                torch.testing.assert_close(output, value, rtol=0, atol=1e-14)


# --- T = 0 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", [*MAPS, "sgnht"])
def test_zero_temperature_is_bitwise_free_of_noise(name: str, temperature: float | Tensor) -> None:
    theta, m, gradient = torch.randn(3, 100)
    m = torch.zeros(100) if name == "averaged" else m  # its second slot is noise, too
    options: dict[str, Any] = {"step_size": 0.1, "friction": 1.0, "temperature": temperature}

    def step(noise: Tensor) -> tuple[Tensor, ...]:
        if name == "sgnht":
            return sgnht(theta, m, torch.ones(1), gradient, noise, **options)
        outputs = MAPS[name](theta, m, gradient, noise, noise_estimate=5.0, **options)
        return outputs[:1] if name == "averaged" else outputs

    for quiet, loud in zip(step(torch.zeros(100)), step(1e30 * torch.randn(100)), strict=True):
        assert torch.equal(quiet, loud)


@pytest.mark.parametrize("temperature", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_the_thermostat_at_zero_temperature_is_gradient_descent(temperature: float | Tensor) -> None:
    theta, m, zeta = normal(4), torch.zeros(4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    expected = theta
    for _ in range(5):
        theta, m, zeta = sgnht(
            theta, m, zeta, theta, normal(4), step_size=0.125, friction=1.0, temperature=temperature
        )
        expected = expected - 0.125**2 * expected
        torch.testing.assert_close(theta, expected, rtol=0, atol=1e-15)
    at_rest = torch.zeros_like(theta)  # nothing moves, and 0 / 0 is no number
    options: dict[str, Any] = {"step_size": 0.125, "friction": 1.0, "temperature": temperature}
    for value in sgnht(at_rest, at_rest, torch.ones(1), at_rest, at_rest, **options):
        assert value.isfinite().all()


class Network:
    """A network, its data and minibatches: U is the loss summed up to all rows, with its prior."""

    rows, batch = 64, 16

    def __init__(self) -> None:
        self.inputs, self.targets = normal(self.rows, 3), normal(self.rows, seed=1)
        self.start = [0.5 * normal(3, 8, seed=2), 0.5 * normal(8, seed=3)]
        generator = torch.Generator().manual_seed(4)
        self.batches = [torch.randperm(self.rows, generator=generator)[: self.batch] for _ in range(200)]

    def mean_loss(self, first: Tensor, second: Tensor, rows: Tensor) -> Tensor:
        """The negative log joint at unit prior variances, over the number of rows."""
        residuals = torch.tanh(self.inputs[rows] @ first) @ second - self.targets[rows]
        return (residuals**2).mean() / 2 + ((first**2).sum() + (second**2).sum()) / (2 * self.rows)

    def sgd(self, lr: float, momentum: float) -> list[Tensor]:
        parameters = [torch.nn.Parameter(value.clone()) for value in self.start]
        optimiser = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
        path = []
        for rows in self.batches:
            optimiser.zero_grad()
            self.mean_loss(parameters[0], parameters[1], rows).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            path.append(torch.cat([value.detach().flatten() for value in parameters]))
        return path

    def chain(self, step: Map, **options: float) -> list[Tensor]:
        theta = torch.cat([value.flatten() for value in self.start])
        m = draw_momentum(torch.randn_like(theta), temperature=0.0)
        path = []
        for rows in self.batches:
            leaf = theta.clone().requires_grad_()
            energy = self.rows * self.mean_loss(leaf[:24].view(3, 8), leaf[24:], rows)
            (gradient,) = torch.autograd.grad(energy, leaf)
            with torch.no_grad():
                theta, m = step(theta, m, gradient, torch.randn_like(theta), temperature=0.0, **options)
            path.append(theta)
        return path


@pytest.mark.parametrize(
    ("name", "momentum"),
    [("sgld", 0.0), ("averaged", 0.0), ("sghmc", 0.0), ("sghmc", 0.9), ("baoa", 0.0), ("baoa", 0.9)],
)
def test_zero_temperature_is_torch_sgd_over_200_minibatches(name: str, momentum: float) -> None:
    network, lr = Network(), 0.05
    if name in ("sgld", "averaged"):
        options = {"step_size": sgld_from_sgd(lr, network.rows), "friction": math.nan}
    else:
        mapping = {"sghmc": sghmc_from_sgd, "baoa": baoa_from_sgd}[name]
        options = dict(zip(("step_size", "friction"), mapping(lr, momentum, network.rows), strict=True))
    path = network.sgd(lr, momentum)
    for ours, theirs in zip(network.chain(MAPS[name], **options), path, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert (path[-1] - path[0]).abs().max() > 0.1, "the run must have gone somewhere"


def test_explicit_euler_is_not_torch_sgd() -> None:
    network, lr = Network(), 0.05
    h, friction = sghmc_from_sgd(lr, 0.9, network.rows)
    path = network.chain(explicit_euler, step_size=h, friction=friction)
    assert (path[-1] - network.sgd(lr, 0.9)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.9, 10), "lr is 0.0"),
        ((math.nan, 0.9, 10), "lr is nan"),
        ((0.1, 1.0, 10), "momentum is 1.0; pass that of SGD, a number >= 0 and < 1"),
        ((0.1, -0.1, 10), "momentum is -0.1"),
        ((0.1, 0.9, 0), "num_data is 0; pass the number of rows"),
    ],
)
def test_settings_that_are_not_those_of_sgd(arguments: tuple[float, float, int], message: str) -> None:
    for mapping in (sghmc_from_sgd, baoa_from_sgd):
        with pytest.raises(ValueError, match=message):
            mapping(*arguments)
    if "momentum" not in message:
        with pytest.raises(ValueError, match=message):
            sgld_from_sgd(arguments[0], arguments[2])


@pytest.mark.parametrize(("groups", "thermostats"), [((2, 2), 2), ((2, 3), 1), (None, 2)])
def test_groups_that_do_not_fit(groups: tuple[int, ...] | None, thermostats: int) -> None:
    theta, m, gradient, xi = normal(4, 5)
    with pytest.raises(ValueError, match="the position has 5"):
        sgnht(
            theta,
            m,
            torch.ones(thermostats),
            gradient,
            xi,
            step_size=0.1,
            friction=1.0,
            temperature=1.0,
            groups=groups,
        )


# --- order in the step size ---------------------------------------------------------------------------------


def interpolation(points: Tensor, nodes: Tensor) -> Tensor:
    """Values at nodes to values at points, by the polynomial through Chebyshev points (barycentric)."""
    signs = torch.ones(len(nodes), dtype=torch.float64)
    signs[1::2] = -1
    signs[[0, -1]] /= 2
    terms = signs / (points[:, None] - nodes)
    return terms / terms.sum(1, keepdim=True)


def second_moment(step: Map, h: float, friction: float, theta_max: float = 3.6, size: int = 32) -> float:
    """E theta^2 in the chain's own stationary law on U = theta^2 / 2 + theta^4 / 4, without Monte Carlo.

    The transition operator acts on functions of position and momentum, which are polynomials through a grid
    of Chebyshev points; the expectation over the noise is Gaussian quadrature.
    """
    unit = torch.cos(torch.arange(size, dtype=torch.float64) * math.pi / (size - 1))
    theta_nodes, m_nodes = theta_max * unit, 6.5 * unit
    theta, m = (grid.flatten() for grid in torch.meshgrid(theta_nodes, m_nodes, indexing="ij"))
    operator = torch.zeros(size**2, size**2, dtype=torch.float64)
    for xi, weight in zip(*np.polynomial.hermite_e.hermegauss(30), strict=True):
        noise = torch.full_like(theta, float(xi))
        ahead = step(theta, m, theta + theta**3, noise, step_size=h, friction=friction, temperature=1.0)
        # a point on a node would be 0 / 0
        left = interpolation(ahead[0].clamp(-theta_max, theta_max) + 1e-13, theta_nodes)
        right = interpolation(ahead[1].clamp(-6.5, 6.5) + 1e-13, m_nodes)
        product = (left[:, :, None] * right[:, None, :]).flatten(1)
        operator += float(weight) / math.sqrt(2 * math.pi) * product
    # the left eigenvector at eigenvalue 1, with sum 1
    ones = torch.full((size**2,), 1 / size, dtype=torch.float64)
    matrix = torch.eye(size**2, dtype=torch.float64) - operator + torch.outer(ones, ones)
    law = torch.linalg.solve(matrix.T, ones)
    return float((law @ theta**2) / law.sum())


@functools.cache
def exact_second_moment() -> float:
    theta = torch.linspace(-6, 6, 20001, dtype=torch.float64)
    density = (-(theta**2) / 2 - theta**4 / 4).exp()
    return float((theta**2 * density).sum() / density.sum())


def order(step: Map, step_sizes: tuple[float, float, float]) -> float:
    """Slope of log bias against log step size."""
    biases = [abs(second_moment(step, h, 1.0) - exact_second_moment()) for h in step_sizes]
    return float(np.polyfit(np.log(step_sizes), np.log(biases), 1)[0])


LADDERS = {
    "sgld": (1, (0.01, 0.02, 0.04)),
    "averaged": (2, (0.02, 0.04, 0.06)),
    "sghmc": (2, (0.05, 0.1, 0.2)),
    "baoa": (2, (0.1, 0.2, 0.3)),
}


@pytest.mark.parametrize("name", LADDERS)
def test_the_order_in_the_step_size_on_a_quartic(name: str) -> None:
    expected, ladder = LADDERS[name]
    assert order(MAPS[name], ladder) == pytest.approx(expected, abs=0.15)


def test_explicit_euler_is_of_first_order() -> None:
    assert order(explicit_euler, (0.02, 0.03, 0.04)) == pytest.approx(1, abs=0.15)


def test_the_stationary_law_without_monte_carlo_agrees_with_simulation() -> None:
    h = 0.2
    theta, m = torch.randn(2, 200_000, dtype=torch.float64)
    for _ in range(60):
        theta, m = sghmc(
            theta,
            m,
            theta + theta**3,
            torch.randn_like(theta),
            step_size=h,
            friction=1.0,
            temperature=1.0,
        )
    squares = theta**2
    error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - second_moment(sghmc, h, 1.0)) < Z_LIMIT * error
    assert abs(squares.mean() - exact_second_moment()) > Z_LIMIT * error, "the bias must be visible"
