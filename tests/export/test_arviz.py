"""ArviZ of both generations reads, plots, compares and stores the result: pyro_sym._arviz and export.api."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyro_sym import _arviz, dataset, from_pyro, from_pyro_svi
from tests.catalogue import logistic
from tests.export.runs import SYMMETRY, Y, given, groups, mixture, run, two_copies

matplotlib.use("Agg")

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
COUNTS = torch.randn(30, generator=torch.Generator().manual_seed(2))


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", x @ w + b)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


EVERYTHING: dict[str, Any] = {
    "log_likelihood": True,
    "posterior_predictive": True,
    "prior": 20,
    "functions": {"at_one": lambda draw: draw["w"].sum() + draw["b"]},
}


def exact_posterior() -> dist.MultivariateNormal:
    """Of ``(w, b)``, in closed form."""
    design = torch.cat([X, torch.ones(len(X), 1)], 1)
    precision = design.T @ design + torch.eye(3)
    return dist.MultivariateNormal(
        torch.linalg.solve(precision, design.T @ COUNTS), precision_matrix=precision
    )


def exact_guide(x: Tensor, y: Tensor) -> None:
    both = pyro.sample("both", exact_posterior(), infer={"is_auxiliary": True})
    pyro.sample("w", dist.Delta(both[:2], event_dim=1))
    pyro.sample("b", dist.Delta(both[2]))


@pytest.fixture(scope="module")
def both() -> dict[str, Any]:
    """The export of one MCMC run, of two chains, and of one guide; their draws are exact, for speed."""
    pyro.set_rng_seed(3)
    values = exact_posterior().sample((2, 200))
    stats = {"diverging": torch.zeros(2, 200, dtype=torch.bool)}
    mcmc = given({"w": values[..., :2], "b": values[..., 2]}, stats, regression, (X, COUNTS))
    asked: dict[str, Any] = {**EVERYTHING, "args": (X, COUNTS)}
    return {
        "mcmc": from_pyro(mcmc, **EVERYTHING),
        "guide": from_pyro_svi(exact_guide, model=regression, num_samples=200, **asked),
    }


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """ArviZ 0.23 uses what matplotlib 3.11 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=matplotlib.MatplotlibDeprecationWarning)
        warnings.filterwarnings("ignore", ".*[Ff]igure", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*tight.?layout.*|.*constrained_layout.*", UserWarning)
        warnings.filterwarnings("ignore", "The inplace keyword")  # what pandas 3 deprecates
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
        yield
    plt.close("all")


FITS = pytest.mark.parametrize("fit", ["mcmc", "guide"])


@FITS
def test_diagnostics_run(both: dict[str, Any], fit: str) -> None:
    az, data = _arviz.load(), both[fit]
    rows = {f"mean[{i}]" for i in range(len(X))}
    assert set(az.summary(data, kind="stats").index) == {"w[0]", "w[1]", "b", "at_one"} | rows
    assert set(az.ess(data)) >= {"w", "b"} or "w" in az.ess(data)
    r_hat = az.rhat(data)
    for site in ("w", "b", "at_one"):
        if fit == "mcmc":
            assert float(np.max(r_hat[site])) < 1.1
        else:  # of one chain there is none
            assert np.isnan(r_hat[site]).all()


@FITS
def test_leave_one_out_runs(both: dict[str, Any], fit: str) -> None:
    az = _arviz.load()
    result = az.loo(both[fit], pointwise=True)
    elpd = result.elpd if hasattr(result, "elpd") else result.elpd_loo
    assert np.isfinite(elpd)
    assert result.n_data_points == 30


def test_models_are_compared(both: dict[str, Any]) -> None:
    table = _arviz.load().compare(both)
    assert set(table.index) == {"mcmc", "guide"}
    elpd = table["elpd" if "elpd" in table else "elpd_loo"]
    assert abs(elpd["mcmc"] - elpd["guide"]) < 1.0


@FITS
@pytest.mark.parametrize("plot", ["plot_trace", "plot_forest", "plot_pair", "plot_rank", "plot_ppc"])
def test_plots_are_drawn(both: dict[str, Any], fit: str, plot: str) -> None:
    az, data = _arviz.load(), both[fit]
    if plot == "plot_ppc":
        draw: Callable[..., Any] = getattr(az, "plot_ppc_dist", None) or az.plot_ppc
        draw(data)
    elif plot == "plot_pair":
        az.plot_pair(data, var_names=["w", "b"])
    elif plot == "plot_rank" and fit == "guide" and hasattr(data, "children"):
        az.plot_rank(data, method="envelope")  # 1.x's other method compares chains
    else:
        getattr(az, plot)(data)
    assert plt.get_fignums()


@FITS
def test_files_hold_all_of_it(both: dict[str, Any], fit: str, tmp_path: Path) -> None:
    az, data = _arviz.load(), both[fit]
    data.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    back = az.from_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    assert groups(back) == groups(data)
    for group in groups(data):
        assert dataset(back, group).load().equals(dataset(data, group))
    assert dict(back.attrs) == dict(data.attrs)


def test_files_hold_boolean_statistics(tmp_path: Path) -> None:
    stats = {"lp": torch.randn(4, 100), "diverging": torch.zeros(4, 100, dtype=torch.bool)}
    data = from_pyro(given(two_copies(), stats, mixture, (Y,)), symmetry=SYMMETRY)
    data.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    back = _arviz.load().from_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    assert dataset(back, "sample_stats")["diverging"].dtype == bool
    assert back.attrs["symmetry"] == repr(SYMMETRY)


def test_leave_one_out_of_masked_data_is_of_what_is_left() -> None:
    az = _arviz.load()
    y, seen = torch.randn(10), torch.arange(10) % 3 > 0

    def model(masked: bool) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with (
            pyro.plate("data", 10 if masked else 6),
            poutine.mask(mask=seen if masked else torch.tensor(True)),
        ):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y if masked else y[seen])

    loc = 0.3 * torch.randn(2, 200)
    found, expected = (
        az.loo(from_pyro({"loc": loc}, model=model, args=(masked,), log_likelihood=True))
        for masked in (True, False)
    )
    assert np.isfinite(found.se)
    assert found.n_data_points == 6
    assert found.se == pytest.approx(expected.se)


def test_r_hat_of_a_function_stands_beside_r_hat_of_the_weights() -> None:
    az = _arviz.load()
    draws = two_copies()

    def density(draw: dict[str, Tensor]) -> Tensor:
        grid = torch.linspace(-6, 6, 5).unsqueeze(-1)
        return (draw["weights"] * dist.Normal(draw["locs"], 1.0).log_prob(grid).exp()).sum(-1)

    r_hat = az.rhat(dataset(from_pyro(draws, functions={"density": density}), "posterior"))
    assert float(r_hat["locs"].max()) > 1.5
    assert float(r_hat["density"].max()) < 1.05


# What ArviZ, or its own from_pyro, did to runs of Pyro


def test_random_state_and_divergences_and_short_runs() -> None:
    """No divergences reported, fewer than four draws: both were errors."""
    state = torch.get_rng_state()
    mcmc = given({"w": torch.randn(1, 2, 2), "b": torch.randn(1, 2)}, model=regression, args=(X, COUNTS))
    torch.set_rng_state(state)
    data = from_pyro(mcmc, **EVERYTHING)
    assert torch.equal(state, torch.get_rng_state())
    assert dataset(data, "log_likelihood")["y"].shape == (1, 2, 30)
    assert "sample_stats" not in groups(data)


def test_as_many_draws_as_data() -> None:
    """A plate of draws around the model pairs draws with data then, in silence."""
    w, b = torch.randn(1, 30, 2), torch.randn(1, 30)
    data = from_pyro({"w": w, "b": b}, model=regression, args=(X, COUNTS), log_likelihood=True)
    expected = dist.Normal(w[0] @ X.T + b[0].unsqueeze(-1), 1.0).log_prob(COUNTS)
    np.testing.assert_allclose(dataset(data, "log_likelihood")["y"].values[0], expected, rtol=1e-4, atol=1e-4)


def test_deterministic_and_factor_sites_are_in_no_group_of_data() -> None:
    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.factor("penalty", -loc.abs())
        pyro.deterministic("twice", 2 * loc)
        with pyro.plate("data", 3):
            pyro.factor("local", -loc.expand(3))
            pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.zeros(3))

    asked: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True, "prior": 3}
    with pytest.warns(UserWarning, match=r"factors \['local'\] lie in plates of data"):
        data = from_pyro({"loc": torch.randn(1, 10)}, model=model, **asked)
    for group in ("observed_data", "log_likelihood", "posterior_predictive", "prior_predictive"):
        assert list(dataset(data, group).data_vars) == ["y"]


def test_dims_of_size_one_stay() -> None:
    data = from_pyro({"a": torch.randn(2, 10, 1, 3), "b": torch.randn(2, 10, 1)})
    assert dataset(data, "posterior")["a"].shape == (2, 10, 1, 3)
    assert dataset(data, "posterior")["b"].shape == (2, 10, 1)


def test_more_than_ten_chains_and_more_chains_than_draws() -> None:
    values = torch.arange(12.0).unsqueeze(-1).expand(12, 4)
    posterior = dataset(from_pyro({"x": values}), "posterior")
    np.testing.assert_array_equal(posterior["x"][:, 0], np.arange(12))
    assert posterior.sizes == {"chain": 12, "draw": 4}


def test_booleans_halves_and_slashes_reach_the_summary_and_the_file(tmp_path: Path) -> None:
    draws = {
        "flag": torch.rand(2, 8) > 0.5,
        "half": torch.randn(2, 8).half(),
        "brain": torch.randn(2, 8).bfloat16(),
        "scope/x": torch.randn(2, 8, requires_grad=True),
        "_a.b[0]": torch.randn(2, 8),
    }
    data = from_pyro(draws, functions={"inside": lambda draw: draw["half"] > 0})
    assert len(_arviz.load().summary(data)) == 6
    data.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")


def test_the_generation_is_told_without_a_warning() -> None:
    az = _arviz.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = from_pyro({"x": torch.randn(2, 8)})
    assert hasattr(data, "children") is (not hasattr(az, "convert_to_inference_data"))


def test_nuts_of_pyro_end_to_end() -> None:
    """A logistic regression, of which ArviZ's own converter got no likelihood."""

    mcmc: MCMC = run(NUTS(logistic), X, (COUNTS > 0).float(), num_samples=30, warmup_steps=30)
    data = from_pyro(mcmc, log_likelihood=True)
    terms = dataset(data, "log_likelihood")["y"].values
    w = mcmc.get_samples()["w"]
    expected = dist.Bernoulli(logits=w @ X.T).log_prob((COUNTS > 0).float())
    np.testing.assert_allclose(terms[0], expected, rtol=1e-4, atol=1e-5)
