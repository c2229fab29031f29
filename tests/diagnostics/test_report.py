"""The report on runs with known answers.

It covers diagnostics.convergence, diagnostics.labels, diagnostics.temperatures and diagnostics.plots.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_sym import (
    BAOA,
    SGHMC,
    SGNHT,
    AutoSymmetrized,
    Permutation,
    Product,
    SignFlip,
    VectorizedMCMC,
    from_pyro,
    from_pyro_svi,
)
from pyro_sym.diagnostics import (
    Report,
    distance_to_copy,
    kernel_stein_discrepancy,
    plot_orbit,
    plot_temperatures,
    report,
    unconstrained_score,
)
from pyro_sym.diagnostics.labels import CONFIDENCE
from pyro_sym.diagnostics.temperatures import mean_band
from tests.catalogue import mixture, normal_mean, normals

SIGNED = Product(Permutation({"into": -1, "out": -1}), SignFlip({"into": -1, "out": -1}))
INPUTS = torch.linspace(-1, 1, 15).reshape(5, 3)


def predict(draw: dict[str, Tensor]) -> Tensor:
    return torch.tanh(INPUTS @ draw["into"]) @ draw["out"]


def network_draws(chains_agree: bool = True) -> dict[str, Tensor]:
    """Draws around one mode, each chain at a copy of its own; one chain may be at another mode."""
    mode = {"into": torch.randn(3, 6), "out": torch.randn(6)}
    draws = {site: value + 0.15 * torch.randn(4, 150, *value.shape) for site, value in mode.items()}
    if not chains_agree:
        draws["out"][3] += 1.0
    elements = SIGNED.sample(mode, (4, 1))
    return SIGNED.act(elements, draws)


@pytest.fixture
def _no_window() -> Any:
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    yield
    plt.close("all")


@pytest.fixture
def network() -> Any:
    return from_pyro(network_draws(), symmetry=SIGNED, functions={"prediction": predict})


def test_labels_that_differ_between_chains(network: Any) -> None:
    found = report(network, symmetry=SIGNED)
    table = found.convergence
    assert table["kind"].to_dict() == {"into": "site", "out": "site", "prediction": "function"}
    assert table["size"].to_dict() == {"into": 18, "out": 6, "prediction": 5}
    assert (table.loc[["into", "out"], "r_hat"] > 2).all()
    assert (table["r_hat_aligned"] < 1.02).all()
    assert table.loc["prediction", "r_hat"] < 1.02
    # A function that is invariant has the same diagnostics in both groups.
    for column in ("r_hat", "r_hat_median", "ess_bulk", "ess_tail"):
        raw, aligned = table.loc["prediction", [column, f"{column}_aligned"]]
        assert raw == pytest.approx(aligned, rel=1e-3)
    assert (table.loc[["into", "out"], "ess_bulk"] < 10).all()
    assert (table["ess_bulk_aligned"] > 300).all()
    relabelling = found.relabelling
    assert relabelling is not None
    assert relabelling["distinct"].to_dict() == {"permutation": 4, "sign": 4}
    assert (relabelling["switches"] == 0).all()


def test_chains_at_other_modes_are_no_matter_of_labels() -> None:
    data = from_pyro(network_draws(False), symmetry=SIGNED, functions={"prediction": predict})
    table = report(data).convergence
    assert (table.loc[["out", "prediction"], "r_hat_aligned"] > 1.5).all()


def test_distance_beside_that_of_copies(network: Any) -> None:
    table = report(network, symmetry=SIGNED).distance
    assert table is not None
    # 24 coordinates of standard deviation 0.15.
    assert table.loc["distance", "median"] == pytest.approx(0.15 * math.sqrt(24), rel=0.1)
    mode = {"into": torch.zeros(3, 6), "out": torch.arange(6.0) + 10}
    given = report(network, symmetry=SIGNED, mode=mode).distance
    assert given is not None
    assert given.loc["distance", "mode_to_copy"] == pytest.approx(distance_to_copy(mode, SIGNED))
    assert given.loc["distance", "median"] > 10
    with pytest.raises(ValueError, match="pass mode="):
        report(from_pyro(network_draws()), symmetry=SIGNED)


def test_large_variables_are_looked_at_in_part(network: Any) -> None:
    table = report(network, max_coordinates=4).convergence
    assert table["looked_at"].to_dict() == {"into": 4, "out": 4, "prediction": 4}
    assert table["size"].to_dict() == {"into": 18, "out": 6, "prediction": 5}
    full = report(network, max_coordinates=None).convergence
    assert (table["r_hat"] <= full["r_hat"]).all()
    assert (table["r_hat_aligned"] < 1.02).all()  # the same coordinates of both groups
    assert list(report(network, var_names=["out"]).convergence.index) == ["out"]


def test_chains_that_are_not_finite_are_left_out() -> None:
    draws = network_draws()
    draws["into"][2, 100:] = math.nan
    with pytest.warns(UserWarning, match="not finite"):
        data = from_pyro(draws, symmetry=SIGNED)
    found = report(data, symmetry=SIGNED)
    assert found.notes == ("chains [2] are left out: not finite in into",)
    assert (found.convergence["r_hat_aligned"] < 1.02).all()
    draws["into"][:] = math.nan
    with pytest.raises(ValueError, match="every chain"):
        report(from_pyro(draws))


def test_constant_variables_and_few_draws() -> None:
    data = from_pyro({"x": torch.ones(2, 10), "y": torch.randn(2, 10)})
    table = report(data).convergence
    assert math.isnan(table.loc["x", "r_hat"])
    assert not math.isnan(table.loc["y", "r_hat"])
    assert report(from_pyro({"y": torch.randn(2, 3)})).convergence["ess_bulk"].isna().all()


def test_confidence_is_shown_where_there_is_one(network: Any) -> None:
    values = np.linspace(0, 1, 600).reshape(4, 150)
    network["sample_stats"][CONFIDENCE] = xr.DataArray(values, dims=("chain", "draw"))
    table = report(network).confidence
    assert table is not None
    assert table.loc[CONFIDENCE].to_list() == pytest.approx([0.5, 0.05, 0.0])


def gaussian() -> None:
    pyro.sample("loc", dist.Normal(torch.zeros(4), torch.tensor([0.5, 1.0, 1.0, 2.0])).to_event(1))
    pyro.sample("scale", dist.LogNormal(0.0, 0.5))


def simplex() -> None:
    pyro.sample("part", dist.Dirichlet(torch.full((3,), 4.0)))


noisy = functools.partial(normal_mean, size=5)


def run(
    model: Any, *args: Any, step_size: float = 0.25, temperature: Any = 1.0, friction: float = 1.0
) -> Any:
    kernel = BAOA(model, step_size=step_size, friction=friction, temperature=temperature)
    mcmc = VectorizedMCMC(kernel, 150, 100, num_chains=4, thinning=5, disable_progbar=True)
    mcmc.run(*args)
    return from_pyro(mcmc)


@pytest.fixture(scope="module")
def tempered() -> Any:
    pyro.set_rng_seed(1)
    return run(gaussian, temperature=0.5)


def test_run_at_its_temperature(tempered: Any) -> None:
    table = report(tempered, probability=1 - 2e-5).temperatures
    assert table is not None
    assert table["size"].to_dict() == {"loc": 4, "scale": 1, "all sites": 5}
    assert (table["target"] == 0.5).all()
    assert table["kinetic_inside"].all() and table["configurational_inside"].all()
    assert (table["kinetic_high"] - table["kinetic_low"] < 0.5).all()
    wrong = report(tempered, temperature=1.0).temperatures
    assert wrong is not None
    assert not wrong["kinetic_inside"].any()


@pytest.mark.parametrize("kind", [SGHMC, SGNHT])
def test_the_right_temperature_is_not_taken_for_heat(kind: Any) -> None:
    """The momenta that these kernels' steps end with are 27 % too hot here, and their positions right."""
    kernel = kind(wide, step_size=0.2, friction=2.0)
    mcmc = VectorizedMCMC(kernel, 100, 50, num_chains=4, thinning=5, disable_progbar=True)
    mcmc.run()
    table = report(from_pyro(mcmc), probability=1 - 2e-5).temperatures
    assert table is not None
    assert table["kinetic_inside"].all()
    assert abs(table.loc["all sites", "kinetic"] - 1) < 0.05
    assert float(mcmc._chains.state[1].square().mean()) > 1.2  # type: ignore[union-attr]


wide = normals({"x": (2_000,)})


def test_bands_hold_for_few_autocorrelated_draws() -> None:
    """At their 99 %: by chance 60 of 3,000 fail at a rate of 1.3 %, which allows for short chains."""
    rng = np.random.default_rng(0)
    for chains, length, rate in ((4, 40, 0.95), (4, 150, 0.9), (1, 1000, 0.8), (2, 200, 0.5)):
        path = np.empty((750, chains, length))
        x = rng.standard_normal((750, chains))
        for i in range(length):
            x = rate * x + math.sqrt(1 - rate**2) * rng.standard_normal(x.shape)
            path[..., i] = x
        bands = [mean_band(run, 0.99) for run in path]
        said = [(mean, width) for mean, width in bands if not math.isnan(width)]
        missed = sum(abs(mean) > width for mean, width in said)
        assert len(said) > 700
        assert missed < 0.013 * len(said) + 4.27 * math.sqrt(0.013 * len(said))
        # normal bands around a standard error of independent draws fail far more often
        naive = [abs(run.mean()) > 2.58 * run.std() / math.sqrt(run.size) for run in path]
        assert sum(naive) > 2 * 750 * 0.05


def test_too_few_draws_have_no_band() -> None:
    slow = np.linspace(-1, 1, 200)[None]
    assert math.isnan(mean_band(slow, 0.99)[1])
    assert math.isnan(mean_band(np.zeros((8, 3)), 0.99)[1])
    assert mean_band(np.ones((4, 10)), 0.99) == (1.0, 0.0)


def test_noise_of_minibatches_is_seen_as_heat() -> None:
    y = torch.linspace(-3.0, 3.0, 100)
    found = report(run(noisy, y, step_size=0.05, friction=4.0), probability=1 - 2e-5)
    table = found.temperatures
    assert table is not None
    assert not table["kinetic_inside"].any() and not table["configurational_inside"].any()
    assert (table["kinetic"] > table["kinetic_high"]).all()
    assert "!" in str(found)


def test_sizes_are_those_of_unconstrained_values() -> None:
    kernel = BAOA(simplex, step_size=0.1, friction=1.0)
    mcmc = VectorizedMCMC(kernel, 2, 0, num_chains=2, thinning=1, disable_progbar=True)
    mcmc.run()
    table = report(from_pyro(mcmc)).temperatures
    assert table is not None
    assert table["size"].to_dict() == {"part": 2, "all sites": 2}
    assert table["kinetic_low"].isna().all()  # too few draws to say what their mean is worth


@pytest.mark.usefixtures("_no_window")
def test_schedules_have_no_one_band() -> None:
    data = run(noisy, torch.zeros(5), temperature=lambda step: 1.0)
    found = report(data)
    assert found.temperatures is not None
    assert found.temperatures["kinetic_low"].isna().all()
    assert found.temperatures["kinetic_inside"].isna().all()
    assert any("pass temperature=" in note for note in found.notes)
    assert len(plot_temperatures(data).patches) == 0
    again = report(data, temperature=1.0).temperatures
    assert again is not None
    assert again["kinetic_low"].notna().all()


@pytest.mark.filterwarnings("ignore:the labels of")  # the guide has not been trained
def test_guide_with_gain_and_discrepancy() -> None:
    y = torch.tensor([-2.0, -1.5, 1.0, 2.5])
    model = partial(mixture, k=2, allocations=False, equal_weights=True)  # no arguments by position
    guide = AutoSymmetrized(AutoNormal(model), Permutation({"locs": -1}))
    guide(y)
    data = from_pyro_svi(guide, args=(y,), num_samples=60)
    gain = guide.symmetry_gain(y, num_samples=20)
    draws = {"locs": torch.from_numpy(data["posterior"]["locs"].values)}
    stein = kernel_stein_discrepancy(*unconstrained_score(model, draws, y, group_by_chain=True))
    found = report(data, gain=gain, discrepancy=stein)
    assert found.gain is not None and found.discrepancy is not None
    assert found.gain.loc["gain", "log_order"] == pytest.approx(math.log(2))
    assert found.gain.loc["gain", "estimate"] == gain.estimate
    assert found.discrepancy.loc["discrepancy", "p_value"] == stein.p_value
    assert found.temperatures is None
    assert math.isnan(found.convergence.loc["locs", "r_hat"])
    assert found.convergence.loc["locs", "ess_bulk_aligned"] > 20
    assert any("of a guide" in note for note in found.notes)


def test_report_reads_well(network: Any) -> None:
    found = report(network, symmetry=SIGNED)
    text = str(found)
    assert "raw | aligned" in text and "prediction" in text
    assert list(found.tables) == ["convergence", "relabelling", "confidence", "distance"]
    assert max(map(len, text.splitlines())) <= 120
    page = found._repr_html_()
    assert page.count("<table") == 4
    noted = Report(found.convergence, None, None, None, None, None, None, notes=("a < b",))
    assert "a &lt; b" in noted._repr_html_()
    assert str(noted).endswith("* a < b")


def test_refusals(network: Any) -> None:
    with pytest.raises(KeyError, match="no variable 'absent'"):
        report(network, var_names=["absent"])
    with pytest.raises(ValueError, match="max_coordinates=0"):
        report(network, max_coordinates=0)
    with pytest.raises(ValueError, match="no variable with coordinates"):
        report(network, var_names=[])
    one = from_pyro({"x": torch.randn(1, 20)})
    assert "no R-hat" in report(one).notes[0]


@pytest.mark.usefixtures("_no_window")
def test_plot_of_an_orbit(network: Any) -> None:
    raw, aligned = plot_orbit(
        network, ("into", {"into_dim_0": 0}), ("into", {"into_dim_0": 2}), max_points=600
    )
    assert [len(points.get_offsets()) for points in raw.collections] == [100] * 6  # one colour a unit
    assert (raw.get_xlabel(), raw.get_ylabel()) == ("into[0]", "into[2]")
    spread = [np.mean([points.get_offsets().std(0) for points in ax.collections]) for ax in (raw, aligned)]
    assert spread[1] == pytest.approx(0.15, rel=0.1) and spread[0] > 0.3
    legend = aligned.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == list("012345")
    by_chain, _ = plot_orbit(network, "out")
    assert len(by_chain.collections) == 4
    assert (by_chain.get_xlabel(), by_chain.get_ylabel()) == ("out[0]", "out[1]")
    own = np.array([by_chain, by_chain])
    assert plot_orbit(network, "out", axes=own)[0] is by_chain


@pytest.mark.usefixtures("_no_window")
def test_plot_of_temperatures(tempered: Any) -> None:
    ax = plot_temperatures(tempered)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["loc (4)", "scale (1)", "all sites (5)"]
    assert len(ax.patches) == 3
    (at,) = [line.get_xdata() for line in ax.lines if line.get_label() == "T = 0.5"]
    assert np.array_equal(np.asarray(at), [0.5, 0.5])


@pytest.mark.usefixtures("_no_window")
def test_refusals_of_plots(network: Any) -> None:
    with pytest.raises(ValueError, match="no temperatures"):
        plot_temperatures(network)
    with pytest.raises(ValueError, match="nothing was aligned"):
        plot_orbit(from_pyro({"x": torch.zeros(1, 4)}), "x")
    with pytest.raises(ValueError, match="select along all but that of the units"):
        plot_orbit(network, "into")
    with pytest.raises(ValueError, match="they must be equal"):
        plot_orbit(network, "out", "prediction")
    with pytest.raises(KeyError, match="no variable 'absent'"):
        plot_orbit(network, "absent")
    with pytest.raises(ValueError, match="pass y"):
        plot_orbit(network, ("out", {"out_dim_0": 0}))
