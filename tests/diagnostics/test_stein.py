"""Kernel Stein discrepancy: algebra, exact draws, closed forms, what it misses.

It covers diagnostics.stein and diagnostics.score.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from scipy.special import k0
from torch import Tensor

from pyro_sym.diagnostics import kernel_stein_discrepancy, unconstrained_score
from pyro_sym.diagnostics.stein import stein_kernel
from tests.catalogue import linear_with_scale, normal_mean
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


def score_of(log_density: object, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(log_density))(x)  # type: ignore[arg-type]


@pytest.mark.parametrize(("c", "beta"), [(1.0, -0.5), (0.7, -0.2)])
def test_kernel_is_the_stein_operator_applied_twice(c: float, beta: float) -> None:
    def log_density(x: Tensor) -> Tensor:
        return -(x**4).sum() / 4 + x[0] * x[1]

    def k(x: Tensor, y: Tensor) -> Tensor:
        return (c**2 + (x - y).square().sum()) ** beta

    x, y = torch.randn(4, 3), torch.randn(5, 3)
    sx, sy = score_of(log_density, x), score_of(log_density, y)

    def by_autograd(i: int, j: int) -> Tensor:
        both = (x[i], y[j])
        slope_x, slope_y = torch.func.grad(k, (0, 1))(*both)
        mixed = torch.func.jacrev(torch.func.grad(k, 0), 1)(*both).trace()
        return sx[i] @ sy[j] * k(*both) + sx[i] @ slope_y + sy[j] @ slope_x + mixed

    expected = torch.stack([torch.stack([by_autograd(i, j) for j in range(5)]) for i in range(4)])
    assert torch.allclose(stein_kernel(x, sx, y, sy, c=c, beta=beta), expected, rtol=0, atol=1e-10)


def test_statistics_are_means_of_the_kernel() -> None:
    x, s = torch.randn(7, 2), torch.randn(7, 2)
    scale = torch.tensor([0.5, 2.0])
    kernel = stein_kernel(x / scale, s * scale, x / scale, s * scale, c=1.0, beta=-0.5)
    for batch_size in (3, 100):
        found = kernel_stein_discrepancy(x, s, scale=scale, batch_size=batch_size)
        assert found.v_statistic == pytest.approx(float(kernel.mean()), rel=1e-12)
        off = kernel - kernel.diag().diag()
        assert found.u_statistic == pytest.approx(float(off.sum()) / 42, rel=1e-12)


def test_exact_draws_have_none_and_its_error_is_told() -> None:
    several = [kernel_stein_discrepancy(x, -x, scale=1.0, num_bootstraps=50) for x in torch.randn(300, 60, 2)]
    u = torch.tensor([found.u_statistic for found in several])
    assert abs(float(u.mean() / u.std()) * math.sqrt(300)) < Z_LIMIT
    told = torch.tensor([found.standard_error for found in several]).square().mean().sqrt()
    assert 0.8 < float(told / u.std()) < 1.3
    # Uniform under the target, so a tenth of the p-values is below a tenth.
    below = torch.tensor([found.p_value <= 0.1 for found in several]).double().mean()
    assert abs(float(below) - 0.1) < Z_LIMIT * math.sqrt(0.09 / 300) + 0.02


def autoregressive(chains: int, draws: int, rate: float, sd: float = 1.0) -> Tensor:
    """Stationary chains of two coordinates, one after the other."""
    x = torch.randn(chains, 2)
    path = []
    for noise in torch.randn(draws, chains, 2):
        x = rate * x + math.sqrt(1 - rate**2) * noise
        path.append(x)
    return sd * torch.stack(path, 1).flatten(0, 1)


@pytest.mark.parametrize(("chains", "rate"), [(4, 0.9), (1, 0.8)])
def test_autocorrelated_draws_of_the_target_are_rejected_as_often_as_said(chains: int, rate: float) -> None:
    options: dict[str, Any] = {"num_chains": chains, "num_bootstraps": 60}
    runs, low, ignorant = 60, 0, 0
    for _ in range(runs):
        x = autoregressive(chains, 240 // chains, rate)
        low += kernel_stein_discrepancy(x, -x, **options).p_value <= 0.05
        shuffled = torch.randperm(len(x))  # as if the draws were independent
        ignorant += kernel_stein_discrepancy(x[shuffled], -x[shuffled], **options).p_value <= 0.05
    allowed = 0.05 * runs + Z_LIMIT * math.sqrt(0.05 * 0.95 * runs) + 0.015 * runs  # a rate of 2e-5
    assert low < allowed
    assert ignorant > 1.2 * allowed, "draws taken as independent are rejected far more often"


def test_autocorrelated_draws_of_another_law_are_rejected() -> None:
    x = autoregressive(4, 500, 0.9, sd=1.7)
    assert kernel_stein_discrepancy(x, -x, num_chains=4).p_value < 0.01


def test_shifted_normal_has_the_closed_form() -> None:
    # s - s_r is the constant -μ, so KSD² = μ² E k(x, y), an integral of Bessel's.
    shift = 0.7
    expected = shift**2 * math.exp(1 / 8) * k0(1 / 8) / (2 * math.sqrt(math.pi))
    x = torch.randn(2000, 1) + shift
    found = kernel_stein_discrepancy(x, -x, scale=1.0)
    assert abs(found.u_statistic - expected) < Z_LIMIT * found.standard_error
    assert found.standard_error < 0.1 * expected
    # The draws are no draws of the target: the discrepancy has to show it.
    assert found.u_statistic > Z_LIMIT * found.standard_error
    assert found.p_value < 0.01


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_wrong_temperature_is_seen(factor: float) -> None:
    x = math.sqrt(factor) * torch.randn(1500, 5)
    assert kernel_stein_discrepancy(x, -x).p_value < 0.01
    assert kernel_stein_discrepancy(x, -x / factor).p_value > 0.01


def test_units_of_measurement_do_not_matter() -> None:
    x, s = torch.randn(50, 3), torch.randn(50, 3)
    unit = torch.tensor([1e-3, 1.0, 1e4])
    one, other = kernel_stein_discrepancy(x, s), kernel_stein_discrepancy(x * unit, s / unit)
    assert one.u_statistic == pytest.approx(other.u_statistic, rel=1e-9)
    shifted = kernel_stein_discrepancy(x + 1e3, s)
    assert one.u_statistic == pytest.approx(shifted.u_statistic, rel=1e-9)


def mixture(x: Tensor, gap: float = 12.0) -> Tensor:
    """Two labelled units, exchangeable: its two modes are each other's mirror image."""
    modes = torch.tensor([[-gap / 2, gap / 2], [gap / 2, -gap / 2]])
    return (-(x - modes).square().sum(-1) / 2).logsumexp(0)


def test_relabelling_all_draws_alike_changes_nothing() -> None:
    x = torch.randn(100, 2) + torch.tensor([-6.0, 5.5])
    mirrored = x.flip(-1)
    one = kernel_stein_discrepancy(x, score_of(mixture, x))
    other = kernel_stein_discrepancy(mirrored, score_of(mixture, mirrored))
    assert one.u_statistic == pytest.approx(other.u_statistic, rel=1e-9)


def test_proportions_of_separated_copies_are_not_seen() -> None:
    """The reason for what the documentation says it misses."""
    x = torch.randn(800, 2) + torch.tensor([-6.0, 6.0])
    one_copy = kernel_stein_discrepancy(x, score_of(mixture, x), scale=1.0)
    assert one_copy.p_value > 0.01
    assert abs(one_copy.u_statistic) < Z_LIMIT * one_copy.standard_error
    # Where copies overlap, it is.
    x = torch.randn(800, 2) + torch.tensor([-1.0, 1.0])
    overlapping = partial(mixture, gap=2.0)
    assert kernel_stein_discrepancy(x, score_of(overlapping, x), scale=1.0).p_value < 0.01


def test_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    kernel_stein_discrepancy(torch.zeros(2, 1), torch.ones(2, 1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("draws", "score", "options", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(3, 1), {}, r"\(n, d\) for both"),
        (torch.zeros(1, 2), torch.zeros(1, 2), {}, "n >= 2"),
        (torch.zeros(3, 2), torch.full((3, 2), math.nan), {}, "score are not finite, first at 0"),
        (torch.zeros(3, 2), torch.zeros(3, 2), {"scale": 0.0}, "scale is 0.0"),
        (torch.zeros(3, 2), torch.zeros(3, 2), {"beta": -1.0}, "beta=-1.0"),
        (torch.zeros(3, 2), torch.zeros(3, 2), {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_refusals(draws: Tensor, score: Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel_stein_discrepancy(draws, score, **options)  # type: ignore[arg-type]


regression = partial(linear_with_scale, size=3)


def test_score_is_that_of_all_data_at_the_temperature() -> None:
    x, y = torch.randn(7, 2), torch.randn(7)
    draws = {"w": torch.randn(5, 2), "scale": torch.rand(5) + 0.5}
    u, score = unconstrained_score(regression, draws, x, y, temperature=2.0, chunk_size=2)

    def log_density(u: Tensor) -> Tensor:
        # Without validation, which torch 2.6 can't do under vmap.
        prior = dist.Normal(0.0, 1.0, validate_args=False).log_prob(u).sum()  # of log scale as well
        rows = dist.Normal(x @ u[:2], u[2].exp(), validate_args=False)
        return (prior + rows.log_prob(y).sum()) / 2

    assert torch.allclose(u, torch.cat([draws["w"], draws["scale"].log().unsqueeze(-1)], -1))
    assert torch.allclose(score, score_of(log_density, u), atol=1e-10)
    by_chain = {name: value.unsqueeze(0) for name, value in draws.items()}
    again = unconstrained_score(regression, by_chain, x, y, temperature=2.0, group_by_chain=True)
    assert torch.allclose(again[1], score)


conjugate = partial(normal_mean, size=4)


def test_exact_draws_of_a_posterior_and_hot_ones() -> None:
    y = torch.randn(10, 3)
    noise = torch.randn(800, 3) / math.sqrt(11)
    for factor, is_right in ((1.0, True), (1.2, False)):
        draws = {"loc": y.sum(0) / 11 + factor * noise}
        found = kernel_stein_discrepancy(*unconstrained_score(conjugate, draws, y))
        assert (found.p_value > 0.01) == is_right


def test_refusals_of_the_score() -> None:
    x, y = torch.randn(7, 2), torch.randn(7)
    with pytest.raises(ValueError, match="'scale' has no draws"):
        unconstrained_score(regression, {"w": torch.zeros(5, 2)}, x, y)
    with pytest.raises(ValueError, match=r"'w' have shape \(5, 3\), but one value has \(2,\)"):
        unconstrained_score(regression, {"w": torch.zeros(5, 3), "scale": torch.ones(5)}, x, y)
    with pytest.raises(ValueError, match="temperature=0"):
        unconstrained_score(regression, {}, x, y, temperature=0.0)
