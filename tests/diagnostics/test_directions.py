"""Temperatures along principal directions: errors that a mean hides, and correct draws that pass."""

from __future__ import annotations

import functools
import math
import warnings

import pyro
import pytest
import torch
from torch import Tensor

from pyro_sym import SGNHT, VectorizedMCMC, from_pyro
from pyro_sym.diagnostics import directional_temperatures, report, unconstrained_score
from tests.catalogue import linear

QUIET = 1 - 2e-5  # what tests of right draws ask for

ROTATION = torch.linalg.qr(
    torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
)[0]
SD = torch.tensor([10.0, 3.0, 1.0, 0.1], dtype=torch.float64)


def law(
    factor: Tensor | float = 1.0, n: int = 4_000, chains: int = 4, rate: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Draws of a rotated normal whose variances are off by a factor, and its score."""
    z = torch.randn(chains, n // chains, 4, dtype=torch.float64)
    for i in range(1, z.shape[1]):
        z[:, i] = rate * z[:, i - 1] + math.sqrt(1 - rate**2) * z[:, i]
    own = (z * (SD * torch.as_tensor(factor) ** 0.5)).flatten(0, 1)
    return own @ ROTATION.mT + 5.0, -(own / SD**2) @ ROTATION.mT


@pytest.mark.parametrize("chains", [1, 2, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.8])
def test_draws_of_the_target_are_at_its_temperature(chains: int, rate: float) -> None:
    u, score = law(n=2_400, chains=chains, rate=rate)
    table = directional_temperatures(u, score, num_chains=chains, probability=QUIET)  # a warning is an error
    assert table["temperature_inside"].all()
    assert table["sd"].to_list() == pytest.approx(SD.tolist(), rel=0.25)
    assert (abs(table["temperature"] - 1) < 0.3).all()


def test_an_isotropic_law_is_not_flagged() -> None:
    """Directions chosen for the draws that they are judged by would be too hot and too cold."""
    u = torch.randn(120, 30, dtype=torch.float64)
    table = directional_temperatures(u, -u, num_chains=4, probability=QUIET)
    assert not (~table["temperature_inside"].fillna(True)).any()
    assert abs(table["temperature"].iloc[0] - 1) < 0.3 and abs(table["temperature"].iloc[-1] - 1) < 0.3
    axes = torch.linalg.svd(u - u.mean(0))[2]
    judged = ((u - u.mean(0)) @ axes.mT).square().mean(0)
    assert judged[0] > 1.7 and judged[-1] < 0.4, "as it would be without halves"


def test_a_cold_and_a_hot_direction_are_seen_where_the_mean_passes() -> None:
    factor = torch.tensor([0.7, 1.0, 1.0, 1.3])
    u, score = law(factor)
    with pytest.warns(
        UserWarning, match=r"2 of 4 principal directions are not .* in the mean over directions"
    ):
        table = directional_temperatures(u, score, num_chains=4)
    assert table["temperature"].to_list() == pytest.approx(factor.tolist(), abs=0.15)
    assert table["temperature_inside"].to_list() == [False, True, True, False]
    assert abs(table["temperature"].mean() - 1) < 0.06


def test_few_draws_have_no_band() -> None:
    u, score = law(torch.tensor([0.5, 1.0, 1.0, 1.0]), n=40, chains=1)
    table = directional_temperatures(u, score)
    assert table["temperature_inside"].isna().all()


def test_many_directions_are_looked_at_in_part() -> None:
    u = torch.randn(400, 60, dtype=torch.float64) * torch.linspace(20, 1, 60, dtype=torch.float64)
    table = directional_temperatures(u, -u / torch.linspace(20, 1, 60) ** 2, num_chains=4, max_directions=5)
    assert len(table) == 5
    assert table["sd"].iloc[2] > 15 and table["sd"].iloc[3] < 4


CORRELATED = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
ROWS = 500

regression = functools.partial(linear, sd=10.0)


def test_a_thermostat_on_correlated_minibatches_is_seen_through() -> None:
    pyro.set_rng_seed(0)
    x = torch.randn(ROWS, 2, dtype=torch.float64) @ torch.linalg.cholesky(CORRELATED).mT
    y = x.sum(-1) + torch.randn(ROWS, dtype=torch.float64)
    precision = x.mT @ x + torch.eye(2) / 100
    sd, axes = torch.linalg.eigh(torch.linalg.inv(precision))  # narrow, then wide
    start = {"w": torch.linalg.solve(precision, x.mT @ y).expand(8, 2).clone()}
    found = {}
    for batch in (25, ROWS):
        kernel = SGNHT(regression, step_size=0.1 / 30, friction=15.0)
        mcmc = VectorizedMCMC(kernel, 100, 20, 8, 20, initial_params=start, disable_progbar=True)
        mcmc.run(x, y, batch)
        u, score = unconstrained_score(
            regression, mcmc.get_samples(group_by_chain=True), x, y, batch, group_by_chain=True
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            table = directional_temperatures(u, score, num_chains=8, probability=0.9999)
        data = from_pyro(mcmc)
        run = report(data, directions=table, probability=QUIET)
        assert run.temperatures is not None
        assert run.temperatures.loc["all sites", "kinetic_inside"], "the mean passes"
        ratio = float(((u - u.mean(0)) @ axes[:, 1]).std() / sd[1].sqrt())
        found[batch] = (ratio, bool(table["temperature_inside"].iloc[0]), len(caught))
        assert "principal directions" in str(run)
        assert not any("directional_temperatures" in note for note in run.notes)
        alone = report(data)
        assert any("directional_temperatures" in note for note in alone.notes)
    assert found[25][0] < 0.85 and found[25][1:] == (False, 1)
    assert found[ROWS][0] > 0.75 and found[ROWS][1:] == (True, 0)


def test_refusals() -> None:
    u = torch.randn(40, 2)
    with pytest.raises(ValueError, match="num_chains is 3; the 40 draws"):
        directional_temperatures(u, u, num_chains=3)
    with pytest.raises(ValueError, match=r"pass \(n, d\) for both"):
        directional_temperatures(u, u[:10])
    with pytest.raises(ValueError, match="there are 10 draws of 2 values; pass 16 at least"):
        directional_temperatures(u[:10], u[:10])
    with pytest.raises(ValueError, match="max_directions=0"):
        directional_temperatures(u, u, max_directions=0)
    with pytest.raises(ValueError, match="are all equal"):
        directional_temperatures(torch.ones(40, 2), u)
    u[3] = math.nan
    with pytest.raises(ValueError, match="draws are not finite, first at 3"):
        directional_temperatures(u, torch.ones(40, 2))
