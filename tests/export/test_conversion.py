"""Conversion of draws to ArviZ.

The same tests run on both generations of ArviZ.

Covers also `export.api`, `export.options`, `export.read`, `export.attrs`, `export.names`, `export.aligned`,
`export.sites` and `pyro_sym._options`.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from pyro.infer.mcmc import RandomWalkKernel
from pyro.infer.mcmc.api import StreamingMCMC
from torch import Tensor

from pyro_sym import (
    BAOA,
    Cyclical,
    Permutation,
    Product,
    SignFlip,
    VectorizedMCMC,
    _arviz,
    align,
    dataset,
    from_pyro,
    from_pyro_svi,
    open_run,
)
from pyro_sym.export.options import Options
from tests.export.runs import SYMMETRY, Y, event_dims, given, groups, mixture, names, run, two_copies

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def nuts() -> MCMC:
    pyro.set_rng_seed(0)
    starts = {"weights": torch.zeros(1), "locs": torch.tensor([5.0, -5.0])}
    return run(NUTS(mixture), Y, num_samples=50, warmup_steps=100, initial_params=starts)


def test_groups_dims_and_values_of_a_nuts_run(nuts: MCMC) -> None:
    data = from_pyro(nuts, symmetry=SYMMETRY, coords={"component": ["a", "b"]})
    assert groups(data) == {"posterior", "posterior_aligned", "sample_stats", "observed_data"}
    posterior = dataset(data, "posterior")
    assert posterior["locs"].dims == ("chain", "draw", "component")
    assert posterior["weights"].dims == ("chain", "draw", "part")
    assert list(posterior["component"].values) == ["a", "b"]
    np.testing.assert_array_equal(posterior["locs"], nuts.get_samples(group_by_chain=True)["locs"])
    # Without the deterministic site and the factor.
    assert names(data, "observed_data") == {"y"}
    observed = dataset(data, "observed_data")["y"]
    assert observed.dims == ("data",)
    np.testing.assert_array_equal(observed, Y)
    stats = dataset(data, "sample_stats")
    assert stats["diverging"].dtype == bool
    assert stats["diverging"].shape == (1, 50)
    assert list(np.flatnonzero(stats["diverging"])) == nuts.diagnostics()["divergences"]["chain 0"]


def test_aligned_draws_are_the_raw_ones_under_the_exported_elements(nuts: MCMC) -> None:
    data = from_pyro(nuts, symmetry=SYMMETRY)
    raw = nuts.get_samples(group_by_chain=True)
    elements = torch.from_numpy(dataset(data, "sample_stats")["permutation"].values)
    for site, value in SYMMETRY.act(elements, raw).items():
        np.testing.assert_array_equal(dataset(data, "posterior_aligned")[site], value)


def test_alignment_mends_r_hat_of_chains_in_different_copies() -> None:
    az = _arviz.load()
    data = from_pyro(given(two_copies(), model=mixture, args=(Y,)), symmetry=SYMMETRY)
    for site in ("locs", "weights"):
        assert float(az.rhat(dataset(data, "posterior"))[site].max()) > 1.5
        assert float(az.rhat(dataset(data, "posterior_aligned"))[site].max()) < 1.05
    table = az.summary(data, group="posterior_aligned", round_to="none")
    assert table["r_hat"].astype(float).max() < 1.05
    permutation = dataset(data, "sample_stats")["permutation"].values
    assert (permutation == permutation[:, :1]).all()
    assert len({tuple(chain[0]) for chain in permutation}) == 2


def test_attributes_say_what_was_done(nuts: MCMC) -> None:
    attrs = from_pyro(nuts, symmetry=SYMMETRY).attrs
    assert attrs["kernel"] == "NUTS"
    assert json.loads(attrs["kernel_settings"])["step_size"] == nuts.kernel.step_size
    assert json.loads(attrs["run"]) == {"num_chains": 1, "num_samples": 50, "warmup_steps": 100}
    assert attrs["symmetry"] == repr(SYMMETRY)
    alignment = json.loads(attrs["alignment"])
    assert alignment["converged"] is True
    assert alignment["share_in_doubt"] == 0.0 and alignment["least_confidence"] > 0.9
    assert json.loads(attrs["acceptance_rate"]) == [nuts.diagnostics()["acceptance rate"]["chain 0"]]
    assert attrs["inference_library"] == "pyro"
    assert json.loads(attrs["versions"])["torch"] == torch.__version__
    assert "sampling_time" not in attrs
    assert all(isinstance(value, str) for value in attrs.values())


def test_attributes_of_our_kernels() -> None:
    cycle = Cyclical(1e-2, period=10, relaxation=1)
    kernel = BAOA(mixture, step_size=cycle.step_size, friction=2.0, temperature=lambda step: 0.5, thinning=3)
    mcmc = VectorizedMCMC(kernel, 4, 2, num_chains=2, disable_progbar=True)
    mcmc.run(Y)
    attrs = from_pyro(mcmc).attrs
    settings = json.loads(attrs["kernel_settings"])
    assert settings["step_size"] == f"{cycle!r}.step_size"
    assert settings["friction"] == 2.0
    assert "lambda" in settings["temperature"]
    assert settings["batches"] is None
    assert "0x" not in attrs["kernel_settings"]
    assert json.loads(attrs["run"]) == {"num_chains": 2, "num_samples": 4, "warmup_steps": 2, "thinning": 3}
    assert json.loads(attrs["sampling_time"]) == mcmc.sampling_time > 0


def test_kernel_without_divergences() -> None:
    data = from_pyro(run(RandomWalkKernel(mixture), Y))
    assert groups(data) == {"posterior", "observed_data"}


def test_fewer_than_four_draws() -> None:
    data = from_pyro(run(HMC(mixture, step_size=0.01, num_steps=2), Y, num_samples=2))
    assert dataset(data, "sample_stats")["diverging"].shape == (1, 2)


def test_divergences_go_to_their_draw_and_chain() -> None:
    draws = {"x": torch.randn(12, 5)}
    mcmc = given(draws)
    mcmc._diagnostics = [{"divergences": [chain % 5] if chain > 9 else []} for chain in range(12)]
    diverging = dataset(from_pyro(mcmc), "sample_stats")["diverging"].values
    assert {tuple(pair) for pair in np.argwhere(diverging)} == {(10, 0), (11, 1)}


def test_statistics_of_our_kernels() -> None:
    stats = {"lp": torch.randn(2, 6, dtype=torch.float64), "energy": torch.randn(2, 6)}
    # A site of the name of a statistic is another thing, with dims of its own.
    data = from_pyro(given({"energy": torch.randn(2, 6, 3)}, stats))
    assert dataset(data, "sample_stats")["energy"].dims == ("chain", "draw")
    assert dataset(data, "posterior")["energy"].dims == ("chain", "draw", "energy_dim_0")
    np.testing.assert_array_equal(dataset(data, "sample_stats")["lp"], stats["lp"])
    with pytest.raises(ValueError, match=r"statistics \['permutation'\] have the names"):
        from_pyro(given(two_copies(), {"permutation": torch.zeros(4, 100)}), symmetry=SYMMETRY)
    with pytest.raises(ValueError, match="statistic 'lp' of chain 0 has shape"):
        from_pyro(given({"x": torch.randn(2, 6)}, {"lp": torch.randn(2, 5)}))


@pytest.mark.parametrize("source", ["pyro", "vectorized", "stored"])
def test_every_statistic_of_a_kernel_is_exported_by_its_name_and_shape(source: str, tmp_path: Path) -> None:
    """One value a draw, one for each latent site, and of a shape that says nothing."""
    shapes = {"thermostat": (), "thermostat_by_site": (2,), "spectrum": (3,)}
    injected = {name: torch.randn(2, 6, *shape) for name, shape in shapes.items()}  # (chain, draw, *shape)
    if source == "pyro":
        run: Any = given({n: v[:2, :6] for n, v in two_copies().items()}, injected)
        run.kernel.transforms = {
            "locs": torch.distributions.transforms.identity_transform,
            "weights": torch.distributions.transforms.identity_transform,
        }
    else:
        kernel = BAOA(mixture, step_size=0.01, friction=1.0)
        store = tmp_path / "run.zarr" if source == "stored" else None
        run = VectorizedMCMC(kernel, 6, 2, num_chains=2, disable_progbar=True, store=store)
        run.run(Y)
        run = open_run(tmp_path / "run.zarr") if source == "stored" else run
        own = run._draws.statistics()
        recorded = {**own, **{name: value.transpose(0, 1) for name, value in injected.items()}}
        run._draws.statistics = lambda: recorded
    stats = dataset(from_pyro(run), "sample_stats")
    for name, value in injected.items():
        np.testing.assert_array_equal(stats[name], value)
    assert stats["thermostat"].dims == ("chain", "draw")
    assert stats["thermostat_by_site"].dims == ("chain", "draw", "latent_site")
    assert (
        list(stats["latent_site"].values) == ["weights", "locs"] if source != "pyro" else ["locs", "weights"]
    )
    assert stats["spectrum"].dims == ("chain", "draw", "spectrum_dim_0")


@pytest.mark.parametrize("chains", [None, 3])
def test_runs_of_our_kernels(chains: int | None) -> None:
    kernel = BAOA(mixture, step_size=0.01, friction=1.0)
    if chains is None:
        mcmc: Any = run(kernel, Y)
    else:
        mcmc = VectorizedMCMC(kernel, 20, 5, num_chains=chains, disable_progbar=True)
        mcmc.run(Y)
    data = from_pyro(mcmc, symmetry=SYMMETRY)
    assert {"lp", "energy", "temperature", "permutation"} <= names(data, "sample_stats")
    by_site = dataset(data, "sample_stats")["site_kinetic_temperature"]
    assert by_site.dims == ("chain", "draw", "latent_site")
    assert list(by_site["latent_site"].values) == list(kernel.transforms or ())
    assert len(by_site["chain"]) == (chains or len(by_site["chain"]))
    assert dataset(data, "posterior_aligned").sizes["chain"] == by_site.sizes["chain"]


@pytest.mark.filterwarnings("ignore:the labels of")  # which are not what is tested here
def test_elements_of_products_are_numbered() -> None:
    first, second = {"a": -1, "b": -2}, {"b": -1}
    symmetry = Product(Permutation(first), SignFlip(first), Permutation(second))
    data = from_pyro(given({"a": torch.randn(2, 9, 3), "b": torch.randn(2, 9, 3, 4)}), symmetry=symmetry)
    stats = dataset(data, "sample_stats")
    assert set(stats.data_vars) == {"permutation_0", "permutation_1", "sign", "alignment_confidence"}
    assert stats["permutation_1"].shape == (2, 9, 4)
    assert set(np.unique(stats["sign"])) <= {-1, 1}


def nested() -> None:
    """Plates on dims -1 and -3, event dims, a name with a slash."""
    with pyro.plate("row", 3, dim=-3), pyro.plate("column", 4, dim=-1):
        pyro.sample("z", dist.Normal(0.0, 1.0).expand([3, 1, 4]))
        pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer=event_dims("axis"))
    for i in pyro.plate("one_by_one", 2):
        pyro.sample(f"s_{i}", dist.Normal(0.0, 1.0))
    pyro.sample("block/w", dist.Normal(torch.zeros(2, 5), 1.0).to_event(2))


def test_dims_of_nested_plates() -> None:
    data = from_pyro(run(HMC(nested, step_size=0.1, num_steps=1), num_samples=3))
    posterior = dataset(data, "posterior")
    assert posterior["z"].dims[2:] == ("row", "z_dim_1", "column")
    assert posterior["v"].dims[2:] == ("row", "v_dim_1", "column", "axis")
    assert posterior["s_0"].dims == ("chain", "draw")
    assert posterior["block.w"].dims[2:] == ("block.w_dim_0", "block.w_dim_1")
    again = from_pyro(
        run(HMC(nested, step_size=0.1, num_steps=1), num_samples=3),
        dims={"block/w": ["from", None], "z": ["r", "g", "c"]},
        coords={"from": ["p", "q"], "unused": [1]},
    )
    assert dataset(again, "posterior")["block.w"].dims[2:] == ("from", "block.w_dim_1")
    assert dataset(again, "posterior")["z"].dims[2:] == ("r", "g", "c")


@pytest.mark.parametrize(
    ("shape", "dims", "match"),
    [
        ({"a": (3,), "b": (4,)}, {"a": ["g"], "b": ["g"]}, "size 3 in 'a' and size 4 in 'b'"),
        ({"a": (3,)}, {"a": ["a"]}, "name of a variable"),
        ({"a": (3,)}, {"a": ["draw"]}, "sample dim"),
        ({"a": (3,)}, {"a": ["g", "h"]}, "has shape"),
        ({"a": (3, 3)}, {"a": ["g", "g"]}, "one name"),
        ({"a": (3,)}, {"c": ["g"]}, "none of"),
        ({"a/b": (), "a.b": ()}, {}, "two variables"),
    ],
)
def test_names_that_arviz_would_mangle_are_refused(shape: Any, dims: Any, match: str) -> None:
    draws = {name: torch.randn(1, 4, *rest) for name, rest in shape.items()}
    with pytest.raises(ValueError, match=match):
        from_pyro(given(draws), dims=dims)


def subsampled(y: Tensor, chosen_here: bool = True) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    how: dict[str, Any] = {"subsample_size": 7} if chosen_here else {"subsample": torch.arange(7)}
    with pyro.plate("data", len(y), **how) as rows:
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])


def test_data_cover_the_rows_of_a_subsampled_plate() -> None:
    data = from_pyro(given({"loc": torch.randn(2, 5)}, model=subsampled, args=(Y,)), log_likelihood=True)
    np.testing.assert_array_equal(dataset(data, "observed_data")["y"], Y)
    assert dataset(data, "log_likelihood")["y"].dims == ("chain", "draw", "data")
    assert "left_out" not in data.attrs


def test_data_of_which_the_model_sees_a_part_are_left_out() -> None:
    mcmc = given({"loc": torch.randn(2, 5)}, model=subsampled, args=(Y, False))
    data = from_pyro(mcmc)
    assert "observed_data" not in groups(data)
    assert json.loads(data.attrs["left_out"]) == ["y"]
    with pytest.raises(ValueError, match="site 'y' shows some rows"):
        from_pyro(mcmc, log_likelihood=True)


def test_data_that_came_in_batches() -> None:
    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        with pyro.plate("data", len(Y), subsample_size=len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    kernel = BAOA(model, step_size=0.01, friction=1.0, batches=list(Y.split(5)))
    mcmc = VectorizedMCMC(kernel, 6, 2, num_chains=2, disable_progbar=True)
    mcmc.run()
    data = from_pyro(mcmc)
    assert json.loads(data.attrs["left_out"]) == ["y"]
    with pytest.raises(ValueError, match="kernel's loader; pass args"):
        from_pyro(mcmc, log_likelihood=True)
    data = from_pyro(mcmc, args=(Y,), log_likelihood=True)
    np.testing.assert_array_equal(dataset(data, "observed_data")["y"], Y)
    assert dataset(data, "log_likelihood")["y"].shape == (2, 6, 20)


def test_options_are_the_same_for_runs_and_guides_and_written_out() -> None:
    """Whoever reads a signature or a docstring sees each option, with its default."""
    for function in (from_pyro, from_pyro_svi):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[-len(Options.__annotations__) :] == list(Options.__annotations__)
        assert parameters["deterministic"].default is True and parameters["prior"].default is None
        for name in Options.__annotations__:
            assert f"\n        {name}: " in (function.__doc__ or "")
        assert "options" not in parameters and "**options" not in (function.__doc__ or "")


def test_unknown_options_and_wrong_types_are_refused_before_the_model_runs() -> None:
    draws, guide = {"x": torch.randn(2, 5)}, AutoNormal(mixture)
    with pytest.raises(
        TypeError, match=r"from_pyro\(\) got an unexpected keyword argument 'log_lik'; its opt"
    ):
        from_pyro(draws, log_lik=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"from_pyro_svi\(\) got an unexpected keyword argument 'chains'"):
        from_pyro_svi(guide, chains=3)  # type: ignore[call-arg]
    for name, value in {"log_likelihood": {}, "deterministic": 3, "prior": "x", "predictions": 1}.items():
        with pytest.raises(TypeError, match=f"^{name} is "):
            from_pyro_svi(guide, **{name: value})  # type: ignore[arg-type]
    assert guide.prototype_trace is None, "the guide has run"


def test_draws_without_a_model() -> None:
    named = from_pyro({"x": torch.randn(2, 5, 3)}, dims={"x": ["latent_site"]})  # a name like any other
    assert dataset(named, "posterior").sizes["latent_site"] == 3
    data = from_pyro(given({"x": torch.randn(2, 5, 3)}))
    assert groups(data) == {"posterior"}
    assert dataset(data, "posterior")["x"].dims[2:] == ("x_dim_0",)


def test_dicts_of_draws() -> None:
    draws = {n: v.numpy() for n, v in two_copies().items()}
    data = from_pyro(draws, symmetry=SYMMETRY, model=mixture, args=(Y,))
    assert groups(data) == {"posterior", "posterior_aligned", "sample_stats", "observed_data"}
    assert dataset(data, "posterior")["locs"].dims == ("chain", "draw", "component")
    for bad in ({}, {"x": torch.randn(5)}, {"x": torch.randn(2, 5), "y": torch.randn(5, 2)}):
        with pytest.raises(ValueError, match="draws"):
            from_pyro(bad)


def test_sources_without_draws() -> None:
    with pytest.raises(ValueError, match="run"):
        from_pyro(MCMC(NUTS(mixture), 3))
    with pytest.raises(TypeError, match="object keeps no draws"):
        from_pyro(object())
    with pytest.raises(TypeError, match="StreamingMCMC keeps no draws"):
        from_pyro(StreamingMCMC(NUTS(mixture), 3, disable_progbar=True))
    with pytest.raises(TypeError, match="for a guide, from_pyro_svi"):
        from_pyro(AutoNormal(mixture))


def test_draws_that_are_not_finite_do_not_lose_the_run() -> None:
    def explodes(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 10.0).to_event(1))
        pyro.sample("y", dist.Normal(loc.sum(), 1.0), obs=y[0])

    kernel = BAOA(explodes, step_size=0.01, friction=1.0)
    start = {"loc": torch.tensor([[1.0, 2.0], [3.0, 1.0]])}
    mcmc = VectorizedMCMC(kernel, 12, 0, 2, initial_params=start, on_divergence="mask", disable_progbar=True)
    mcmc.run(Y)
    draws: Any = mcmc._draws
    draws._positions[5:, 1] = math.nan  # as if the second chain had diverged at draw 5
    draws._diverging[5:, 1] = True
    symmetry = Permutation({"loc": -1})
    with pytest.warns(UserWarning, match="7 of 24 draws are not finite"):
        data = from_pyro(mcmc, symmetry=symmetry, log_likelihood=True, posterior_predictive=True)
    raw, stats = dataset(data, "posterior")["loc"].values, dataset(data, "sample_stats")
    lost = np.zeros((2, 12), dtype=bool)
    lost[1, 5:] = True
    np.testing.assert_array_equal(stats["diverging"], lost)
    np.testing.assert_array_equal(np.isnan(dataset(data, "posterior_aligned")["loc"].values).all(-1), lost)
    np.testing.assert_array_equal(np.isnan(stats["alignment_confidence"]), lost)
    elements = torch.from_numpy(stats["permutation"].values)
    assert (elements[lost] == torch.arange(2)).all()
    images = symmetry.act(elements, {"loc": torch.from_numpy(raw)})["loc"]
    np.testing.assert_array_equal(dataset(data, "posterior_aligned")["loc"], images)
    for group in ("log_likelihood", "posterior_predictive"):
        np.testing.assert_array_equal(np.isnan(dataset(data, group)["y"]), lost)
    assert json.loads(data.attrs["not_finite"]) == 7
    # The others come out as they do by themselves.
    alone = align({"loc": torch.from_numpy(raw[~lost])}, symmetry)
    np.testing.assert_array_equal(
        dataset(data, "posterior_aligned")["loc"].values[~lost], alone.samples["loc"]
    )


def test_labels_in_doubt_are_said() -> None:
    """Two units of one law, which nothing tells apart; and two far from each other."""
    same = {"x": torch.randn(2, 100, 2)}
    with pytest.warns(UserWarning, match=r"labels of \d\d\.\d% of the draws are in doubt") as caught:
        data = from_pyro(same, symmetry=Permutation({"x": -1}))
    assert caught[0].filename == __file__
    confidence = dataset(data, "sample_stats")["alignment_confidence"]
    share = float((confidence < 0.9).mean())
    assert share > 0.3
    assert json.loads(data.attrs["alignment"])["share_in_doubt"] == pytest.approx(share, abs=1e-4)
    apart = from_pyro({"x": same["x"] + torch.tensor([0.0, 20.0])}, symmetry=Permutation({"x": -1}))
    assert (dataset(apart, "sample_stats")["alignment_confidence"] > 0.999).all()


def test_draws_all_of_which_are_not_finite() -> None:
    draws = {"x": torch.full((1, 4, 2), math.nan)}
    with pytest.warns(UserWarning, match="4 of 4 draws"):
        data = from_pyro(
            draws,
            symmetry=Permutation({"x": -1}),
            model=lambda: pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1)),
            posterior_predictive=True,
        )
    assert groups(data) == {"posterior", "posterior_aligned"}


@pytest.mark.filterwarnings("ignore:the labels of")  # which are not what is tested here
def test_large_draws_are_not_copied() -> None:
    draws = {"w": torch.randn(2, 3, 50, 40), "v": torch.randn(2, 3, 7)}
    data = from_pyro(draws, symmetry=Permutation({"v": -1}))
    for group, site in (("posterior", "w"), ("posterior", "v"), ("posterior_aligned", "w")):
        assert np.shares_memory(dataset(data, group)[site].values, draws[site].numpy())


def test_improper_priors_and_enumerated_sites_do_not_hinder_the_trace() -> None:
    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc + z, 1.0), obs=y)

    data = from_pyro(given({"loc": torch.randn(1, 5)}, model=model, args=(Y,)))
    assert names(data, "posterior") == {"loc"}
    assert names(data, "observed_data") == {"y"}


def test_nothing_outside_is_touched(nuts: MCMC) -> None:
    guide = AutoNormal(mixture)
    guide(Y)
    state = torch.get_rng_state()
    with poutine.trace() as outer:
        from_pyro(nuts, symmetry=SYMMETRY)
        from_pyro_svi(guide, args=(Y,), num_samples=3)
    assert torch.equal(state, torch.get_rng_state())
    assert not [name for name, site in outer.trace.nodes.items() if site["type"] == "sample"]


def test_arviz_is_imported_on_first_export_only() -> None:
    code = "import sys, pyro_sym, pyro_sym.export; assert not {'arviz', 'xarray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
