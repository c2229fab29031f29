"""Preconditioners: what they estimate, what they do to a chain's law, and that steps with them are traced."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_sym.sgmcmc.overdamped import sgld
from pyro_sym.sgmcmc.preconditioners import (
    Diagonal,
    Identity,
    PerSite,
    Preconditioner,
    RMSprop,
    rescale_momentum,
)
from pyro_sym.sgmcmc.underdamped import baoa
from tests.conftest import Z_LIMIT

RULES = [Identity(), Diagonal((1.0, 2.0, 0.5, 3.0, 1e-6)), PerSite(), RMSprop()]
IDS = [type(rule).__name__ for rule in RULES]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_the_contract(rule: Preconditioner) -> None:
    """States are dicts of tensors that an update leaves alone; inverse masses are positive and broadcast."""
    state = rule.init(normal(3, 5), segments=(4, 1))
    for warming_up in (True, True, False):
        kept = {name: value.clone() for name, value in state.items()}
        after = rule.update(state, normal(3, 5), warming_up)
        assert all(torch.equal(state[name], value) for name, value in kept.items())
        assert {n: (v.shape, v.dtype) for n, v in after.items()} == {
            n: (v.shape, v.dtype) for n, v in state.items()
        }
        state = after
        G = rule.inverse_mass(state)
        assert G is None or ((G > 0).all() and torch.broadcast_to(G, (3, 5)).dtype == torch.float64)
    assert pickle.loads(pickle.dumps(rule)) == rule


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_a_step_with_one_can_be_traced(rule: Preconditioner) -> None:
    def step(
        position: Tensor, gradient: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = rule.update(state, gradient, warming_up=True)
        G = rule.inverse_mass(state)
        moved = sgld(
            position,
            gradient,
            torch.ones_like(position),
            step_size=0.1,
            temperature=1.0,
            inverse_mass=1.0 if G is None else G,
        )
        return moved, state

    position, state = normal(3, 5), rule.init(normal(3, 5), segments=(4, 1))
    traced = make_fx(step)(position, normal(3, 5), state)
    for _ in range(3):
        gradient = normal(3, 5)
        (expected, after), (moved, traced_after) = (f(position, gradient, state) for f in (step, traced))
        torch.testing.assert_close(moved, expected, rtol=0, atol=0)
        assert all(torch.equal(after[name], traced_after[name]) for name in after)
        position, state = moved, after


# --- diagonal -----------------------------------------------------------------------------------------------


def test_diagonal_is_what_was_given_in_the_dtype_of_the_chain() -> None:
    variances = torch.tensor([2.0, 1e-8, 3.0], dtype=torch.float64)
    for rule in (Diagonal(variances), Diagonal(variances.tolist())):
        G = rule.inverse_mass(rule.init(normal(4, 3), (1, 2)))
        assert G.dtype == torch.float64 and torch.equal(G, variances)


def test_diagonal_makes_badly_scaled_coordinates_alike() -> None:
    """With v = 1 / curvature, a step from the same point and noise in sd is the same step in all of them."""
    curvature = torch.tensor([1e-4, 1.0, 1e6], dtype=torch.float64)
    rule = Diagonal(1 / curvature)
    sd = curvature.rsqrt()
    u, m, xi = (normal(4, 1).expand(4, 3) for _ in range(3))
    G = rule.inverse_mass(rule.init(u, (3,)))
    position, momentum = baoa(
        u * sd,
        m / sd,
        curvature * u * sd,
        xi,
        step_size=0.5,
        friction=1.0,
        temperature=1.0,
        inverse_mass=G,
    )
    for values in (position / sd, momentum * sd):
        torch.testing.assert_close(values, values[:, :1].expand(4, 3))


@pytest.mark.parametrize(
    ("variances", "message"),
    [
        ([1.0, 0.0], "has 0.0 at coordinate 1"),
        ([math.nan, 1.0], "has nan at coordinate 0"),
        ([math.inf], "has inf at coordinate 0"),
        ([[1.0, 2.0]], r"has shape \(1, 2\)"),
    ],
)
def test_diagonal_refuses_what_is_no_variance(variances: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"variances {message}; pass a vector of finite numbers > 0"):
        Diagonal(variances)


def test_diagonal_wants_one_a_coordinate() -> None:
    with pytest.raises(
        ValueError, match=r"variances has 2 numbers, but there are 3 unconstrained values, \(1, 2\) by"
    ):
        Diagonal([1.0, 2.0]).init(normal(4, 3), (1, 2))


# --- per site -----------------------------------------------------------------------------------------------


def warm_up(rule: Preconditioner, gradients: Tensor, segments: tuple[int, ...]) -> dict[str, Tensor]:
    state = rule.init(gradients[0], segments)
    for gradient in gradients:
        state = rule.update(state, gradient, warming_up=True)
    return state


def test_per_site_is_the_ratio_of_standard_deviations() -> None:
    gradients = 1e6 + normal(50, 3, 6) * torch.tensor([1.0, 1.0, 5.0, 5.0, 5.0, 30.0], dtype=torch.float64)
    state = warm_up(PerSite(), gradients, (2, 3, 1))
    variances = gradients.var(0).mean(0)
    sigma = torch.stack([part.mean() for part in variances.split((2, 3, 1))]).sqrt()
    expected = (sigma.min() / sigma).repeat_interleave(torch.tensor([2, 3, 1]))
    torch.testing.assert_close(PerSite().inverse_mass(state), expected, rtol=1e-9, atol=0)
    assert expected.max() == 1 and expected[-1] < 0.05


def test_per_site_is_fixed_after_warm_up() -> None:
    state = warm_up(PerSite(), normal(10, 2, 4), (3, 1))
    after = PerSite().update(state, 1e3 * normal(2, 4), warming_up=False)
    assert all(torch.equal(after[name], state[name]) for name in state)


def test_per_site_before_gradients_differ_is_one() -> None:
    for gradients in (normal(1, 2, 4), torch.ones(5, 2, 4)):
        G = PerSite().inverse_mass(warm_up(PerSite(), gradients, (3, 1)))
        assert torch.equal(G, torch.ones_like(G))


def test_a_site_without_noise_does_not_stop_the_others() -> None:
    gradients = normal(20, 2, 4)
    gradients[..., -1] = 3.0
    G = PerSite(max_ratio=50.0).inverse_mass(warm_up(PerSite(max_ratio=50.0), gradients, (3, 1)))
    torch.testing.assert_close(G, torch.tensor([0.02, 0.02, 0.02, 1.0], dtype=torch.float64))


# --- RMSprop ------------------------------------------------------------------------------------------------


def test_rmsprop_without_noise_is_torch_rmsprop() -> None:
    parameter = torch.nn.Parameter(normal(1, 4))
    curvature = torch.tensor([0.1, 1.0, 10.0, 100.0], dtype=torch.float64)
    optimiser = torch.optim.RMSprop([parameter], lr=0.02, alpha=0.9, eps=1e-3)
    rule = RMSprop(decay=0.9, eps=1e-3)
    theta = parameter.detach().clone()
    state = rule.init(theta, [4])
    for _ in range(100):
        optimiser.zero_grad()
        (curvature * parameter.cosh()).sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        gradient = curvature * theta.sinh()
        state = rule.update(state, gradient, warming_up=False)
        theta = sgld(
            theta,
            gradient,
            normal(1, 4),
            step_size=0.02,
            temperature=0.0,
            inverse_mass=rule.inverse_mass(state),
        )
        torch.testing.assert_close(theta, parameter.detach(), rtol=0, atol=1e-12)


def psgld_variance(decay: float, h: float, steps: int, noise: float = 0.0, dims: int = 40_000) -> float:
    """Mean square of a standard normal target's draws under SGLD with RMSprop, from the exact law."""
    rule = RMSprop(decay=decay, eps=1e-3)
    theta = normal(1, dims)
    # the mean square of gradients that the exact law has
    state = {"square": torch.full_like(theta, 1.0 + noise**2)}
    for _ in range(steps):
        gradient = theta + noise * normal(1, dims)
        state = rule.update(state, gradient, warming_up=False)
        G = rule.inverse_mass(state)
        theta = sgld(theta, gradient, normal(1, dims), step_size=h, temperature=1.0, inverse_mass=G)
    return float((theta**2).mean())


def test_rmsprop_doubles_a_variance_where_it_follows_the_chain() -> None:
    """The law exp(-U) / G with 1 / G = |theta|: the claim of the docstring about the omitted correction."""
    assert psgld_variance(decay=0.5, h=0.01, steps=600) == pytest.approx(2, abs=0.1)


def test_rmsprop_is_harmless_where_it_remembers_much() -> None:
    assert psgld_variance(decay=0.9999, h=0.01, steps=400) == pytest.approx(1 / (1 - 0.005), abs=0.04)


def test_rmsprop_is_harmless_where_minibatch_noise_dominates() -> None:
    """Apart from the heating of SGLD, by h G V / 2 at G = 1 / sqrt(1 + V)."""
    V, h = 400.0, 0.01
    G = 1 / math.sqrt(1 + V)
    expected = (2 + h * G * V) / (2 - h * G)
    got = psgld_variance(decay=0.99, h=h, steps=50, noise=math.sqrt(V))
    assert got == pytest.approx(1 + (expected - 1) * (1 - (1 - h * G) ** 100), abs=0.05)


# --- momenta ------------------------------------------------------------------------------------------------


def test_rescaled_momenta_have_the_law_of_the_new_inverse_mass() -> None:
    m, old, new = normal(3, 4), normal(4).exp(), normal(3, 4).exp()
    rescaled = rescale_momentum(m, old, new)
    torch.testing.assert_close(new * rescaled**2, old * m**2)
    torch.testing.assert_close(rescale_momentum(rescaled, new, old), m)
    torch.testing.assert_close(rescale_momentum(m, None, new), rescale_momentum(m, torch.ones(()), new))
    assert torch.equal(rescale_momentum(m, None, None), m)


@pytest.mark.parametrize("rescaled", [True, False])
def test_a_change_of_mass_keeps_the_law_only_with_momenta_rescaled(rescaled: bool) -> None:
    """BAOA on a Gaussian in its stationary law, whose mass changes once, half way through a kick.

    There position and momentum are independent, so that the rescaled chain is in its law exactly.
    """
    dims, h, T, lam = 100_000, 0.5, 0.5, 1.7
    G = torch.tensor(0.25, dtype=torch.float64)
    options: dict[str, Any] = {"step_size": h, "friction": 0.5, "temperature": T, "inverse_mass": G}
    theta, m = math.sqrt(T / lam) * normal(dims), math.sqrt(T) * normal(dims)
    m = (rescale_momentum(m, None, G) if rescaled else m) + h / 2 * lam * theta
    for _ in range(3):
        theta, m = baoa(theta, m, lam * theta, normal(dims), **options)
    z = (float((theta**2).mean()) / (T / lam) - 1) / math.sqrt(2 / dims)
    assert abs(z) < Z_LIMIT if rescaled else z < -5 * Z_LIMIT


# --- what bad input gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (PerSite, {"max_ratio": 0.5}, "max_ratio is 0.5; pass a finite number >= 1"),
        (PerSite, {"max_ratio": math.inf}, "max_ratio is inf"),
        (RMSprop, {"decay": 1.0}, "decay is 1.0; pass a number >= 0 and < 1"),
        (RMSprop, {"eps": 0.0}, "eps is 0.0"),
    ],
)
def test_arguments_out_of_range(rule: type[Any], options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**options)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
@pytest.mark.parametrize(("shape", "segments"), [((2, 4), (3, 2)), ((4,), (4,))])
def test_segments_that_do_not_fit(
    rule: Preconditioner, shape: tuple[int, ...], segments: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="the sizes of its sites, which sum to d"):
        rule.init(normal(*shape), segments)
