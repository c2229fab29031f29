"""Test what ArviZ and its former converter from Pyro got wrong, on both generations.

========================================  ==================================================================
trap                                      test
========================================  ==================================================================
dict of draws without a chain dim         here, and test_conversion: dicts_of_draws
dim of two sizes, or named as a variable  test_conversion: names_that_arviz_would_mangle_are_refused
variable named as a sample dim            here
slashes and odd characters in names       here, and test_arviz: booleans_halves_and_slashes_reach_...
bfloat16, half, booleans, gradients       here, and test_arviz: booleans_halves_and_slashes_reach_...
complex variables                         here
attributes that files can't hold          here, and test_conversion: attributes_of_our_kernels
opened files are locked                   here
files of the other generation             here
stores in zarr, from 0.23 too             here
likelihoods of ``x @ w`` and ``Linear``   test_likelihood: all_draws_at_once_are_the_loop
as many draws as data                     test_arviz: as_many_draws_as_data
kernels without divergences, or a model   here, and test_conversion: kernel_without_divergences
runs that keep no draws; short ones       test_conversion: sources_without_draws, fewer_than_four_draws
more than ten chains                      test_conversion: divergences_go_to_their_draw_and_chain
deterministic sites and factors           test_arviz: deterministic_and_factor_sites_are_in_no_group_of_data
masks; masks of observations              test_groups: masked_rows_are_dropped_...; here
enumerated sites                          here, and test_likelihood: a_discrete_site_of_each_datum_is_...
sequential plates                         test_groups: data_of_a_sequential_plate_are_one_variable
dims of size one                          test_arviz: dims_of_size_one_stay
padding by ``Predictive``                 test_groups: predictive_draws_from_outside_...; of guides: here
random state                              test_conversion: nothing_outside_is_touched
statistics from several processes         tests/sgmcmc/test_kernels: several_processes
sign of ``lp``                            tests/sgmcmc/test_kernels: ``lp`` is minus the potential energy
given likelihoods ignored                 here
========================================  ==================================================================
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray
from pyro.infer import HMC, MCMC, Predictive
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_sym import _arviz, dataset, from_pyro, from_pyro_svi
from tests.export.runs import SYMMETRY, given, groups, mixture, names
from tests.export.runs import Y as MIXED

# Names, shapes and types


def vector(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)


def test_draws_without_a_chain_dim_are_told_by_the_model() -> None:
    """Otherwise twenty draws of three numbers would be twenty chains of three draws."""
    y, w = torch.tensor(0.0), torch.randn(20, 3)
    with pytest.raises(ValueError, match=r"a draw of site 'w' has shape \(\), and \(3,\) in the model"):
        from_pyro({"w": w}, model=vector, args=(y,))
    posterior = dataset(from_pyro({"w": w.unsqueeze(0)}, model=vector, args=(y,)), "posterior")
    assert dict(posterior.sizes) == {"chain": 1, "draw": 20, "w_dim_0": 3}


@pytest.mark.parametrize("name", ["chain", "draw"])
def test_a_variable_called_as_a_sample_dim_is_refused(name: str) -> None:
    """ArviZ would use it as the labels of that dim."""
    w = torch.randn(2, 8)
    with pytest.raises(ValueError, match=f"variable of posterior has the name of the sample dim '{name}'"):
        from_pyro({"w": w, name: w})
    with pytest.raises(ValueError, match=f"variable of posterior has the name of the sample dim '{name}'"):
        from_pyro({"w": w}, functions={name: lambda draw: draw["w"]})


def test_complex_variables_are_refused_among_draws_and_kept_among_data(tmp_path: Path) -> None:
    values, data = torch.randn(2, 8, 4), torch.randn(3, dtype=torch.cfloat)
    with pytest.raises(TypeError, match=r"'spectrum' of posterior is complex.*view_as_real"):
        from_pyro({"x": values}, functions={"spectrum": lambda draw: torch.fft.fft(draw["x"])})
    with pytest.raises(TypeError, match="'z' of posterior is complex"):
        from_pyro({"z": torch.view_as_complex(values.unflatten(-1, (2, 2)))})
    whole = from_pyro(
        {"x": values},
        functions={"spectrum": lambda draw: torch.view_as_real(torch.fft.fft(draw["x"]))},
        constant_data={"signal": data},
    )
    assert len(_arviz.load().summary(whole, kind="stats")) == 4 + 8
    whole.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    back = _arviz.load().from_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    np.testing.assert_array_equal(dataset(back, "constant_data")["signal"], data)


def test_odd_names_and_types_come_back_from_files(tmp_path: Path) -> None:
    draws = {
        "θ": torch.randn(2, 8, 1),
        "outer/inner": torch.randn(2, 8),
        "a[0]": torch.randn(2, 8).half(),
        "_x y": torch.randint(0, 9, (2, 8), dtype=torch.uint8),
        "brain": torch.randn(2, 8).bfloat16(),
        "flag": torch.rand(2, 8) > 0.5,
    }
    data = from_pyro(draws, dims={"θ": ["größe"]}, coords={"größe": ["ä/b"]})
    data.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    back = dataset(_arviz.load().from_netcdf(tmp_path / "run.nc", engine="h5netcdf"), "posterior").load()
    assert set(back.data_vars) == {name.replace("/", ".") for name in draws}
    for name, value in draws.items():
        np.testing.assert_array_equal(back[name.replace("/", ".")], value.float())
    assert back["θ"].dims == ("chain", "draw", "größe")
    assert [str(label) for label in back["größe"].values] == ["ä/b"]
    assert back["a[0]"].dtype == np.float16


# Attributes and files


@dataclass
class Odd:
    """A kernel whose settings no file can hold as they are."""

    dtype: Any
    table: Any
    matrix: Any
    nested: Any
    rate: Any
    limit: Any
    nothing: Any
    flag: Any


def all_files(data: Any, folder: Path) -> list[Any]:
    """What comes back from netCDF and from zarr, to which ArviZ 0.23 can't write by itself."""
    data.to_netcdf(folder / "run.nc", engine="h5netcdf")
    tree = data if hasattr(data, "children") else data.to_datatree()
    tree.to_zarr(folder / "run.zarr", consolidated=False)
    stored = xarray.open_datatree(folder / "run.zarr", engine="zarr", consolidated=False)
    return [_arviz.load().from_netcdf(folder / "run.nc", engine="h5netcdf"), stored]


def test_settings_that_no_file_can_hold_are_words(tmp_path: Path) -> None:
    odd = Odd(
        torch.float64,
        {"a": None},
        torch.eye(2),
        [[1, 2]],
        torch.tensor(0.5),
        math.inf,
        nothing=None,
        flag=True,
    )
    mcmc: Any = given({"x": torch.randn(2, 8)})
    mcmc.kernel = odd
    data = from_pyro(mcmc)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    settings = json.loads(data.attrs["kernel_settings"], parse_constant=refuse)
    assert settings.keys() == vars(odd).keys()
    assert (settings["rate"], settings["limit"]) == (0.5, "inf")
    assert settings["nothing"] is None and settings["flag"] is True
    for back in all_files(data, tmp_path):
        assert dict(back.attrs) == dict(data.attrs)


def test_opened_files_are_locked_and_stay_whole(tmp_path: Path) -> None:
    az, path = _arviz.load(), tmp_path / "run.nc"
    first, second = from_pyro({"x": torch.zeros(2, 8)}), from_pyro({"x": torch.ones(2, 8)})
    first.to_netcdf(path, engine="h5netcdf")
    opened = az.from_netcdf(path, engine="h5netcdf")
    with pytest.raises(OSError, match="already open"):
        second.to_netcdf(path, engine="h5netcdf")
    assert dataset(opened, "posterior").load().equals(dataset(first, "posterior"))
    # What the documentation says to do instead.
    second.to_netcdf(tmp_path / "new.nc", engine="h5netcdf")
    again = az.from_netcdf(tmp_path / "new.nc", engine="h5netcdf")
    assert dataset(again, "posterior").load().equals(dataset(second, "posterior"))


# Written by ArviZ 0.23.4 and 1.3.0, each by
#   python -c "from tests.export.test_traps import DATA, example
#   example().to_netcdf(DATA / 'arviz_0.nc', engine='h5netcdf')" && gzip -9 -n tests/export/data/arviz_0.nc
DATA = Path(__file__).parent / "data"


def example() -> Any:
    """The export of a run without random numbers: all kinds of groups, dims, labels and types."""
    grid = torch.arange(2 * 20.0).reshape(2, 20, 1)
    wave = 0.3 * torch.sin(1.7 * grid + torch.tensor([0.0, 1.0]))
    weights = torch.tensor([0.3, 0.7]) + 0.1 * wave[..., :1] * torch.tensor([1.0, -1.0])
    draws = {"locs": wave + torch.tensor([-5.0, 5.0]), "weights": weights}
    # The second chain has the labels swapped.
    draws = {name: torch.stack([value[0], value[1].flip(-1)]) for name, value in draws.items()}
    stats = {"diverging": grid.squeeze(-1) % 7 == 0, "lp": wave.sum(-1).double()}
    return from_pyro(
        given(draws, stats, mixture, (MIXED,)),
        symmetry=SYMMETRY,
        log_likelihood=True,
        constant_data={"x": MIXED},
        functions={"gap": lambda draw: draw["locs"].diff()},
        coords={"component": ["a", "b"], "data": [f"row {i}" for i in range(len(MIXED))]},
        dims={"x": ["data"]},
    )


@pytest.mark.parametrize("generation", [0, 1])
def test_files_of_both_generations_are_read_alike(generation: int, tmp_path: Path) -> None:
    az, fresh = _arviz.load(), example()
    path = tmp_path / "run.nc"
    path.write_bytes(gzip.decompress((DATA / f"arviz_{generation}.nc.gz").read_bytes()))
    back = az.from_netcdf(path, engine="h5netcdf")
    written_by = dataset(back, "posterior").attrs
    assert ("arviz_version" in written_by) == (generation == 0)
    assert groups(back) == groups(fresh)
    for group in groups(fresh):
        xarray.testing.assert_allclose(dataset(back, group), dataset(fresh, group), rtol=1e-4)
        for name, variable in dataset(fresh, group).data_vars.items():
            assert dataset(back, group)[name].dtype == variable.dtype
    versions = {"versions", "inference_library_version"}
    assert {k: v for k, v in back.attrs.items() if k not in versions} == {
        k: v for k, v in fresh.attrs.items() if k not in versions
    }
    assert back.attrs.keys() == fresh.attrs.keys()
    ours, theirs = (az.loo(data) for data in (fresh, back))
    assert theirs.se == pytest.approx(ours.se, rel=1e-4)
    table = az.summary(back, group="posterior_aligned", kind="stats")
    assert set(table.index) == {"locs[a]", "locs[b]", "weights[0]", "weights[1]", "gap[0]"}


# What the former converter from Pyro did


def test_kernels_without_a_model() -> None:
    """One that was given a potential, and one that has no such attribute."""
    kernel = HMC(potential_fn=lambda values: values["x"].square().sum() / 2, step_size=0.1, num_steps=2)
    mcmc = MCMC(kernel, 3, 0, initial_params={"x": torch.zeros(2)}, disable_progbar=True)
    mcmc.run()
    assert groups(from_pyro(mcmc)) == {"posterior", "sample_stats"}
    bare = given({"x": torch.randn(1, 3)})
    del bare.kernel.model
    assert groups(from_pyro(bare)) == {"posterior"}


def test_masks_of_observations() -> None:
    """Of the sites that Pyro makes of one, the seen rows are data, and the others have draws."""
    y, seen = torch.randn(4), torch.tensor([True, True, False, True])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 4):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y, obs_mask=seen)

    draws = {"loc": torch.randn(2, 6), "y_unobserved": torch.randn(2, 6, 4)}
    asked: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True, "prior": 3}
    data = from_pyro(draws, model=model, **asked)
    assert names(data, "posterior") == names(data, "prior") == {"loc", "y_unobserved", "y"}
    completed = torch.where(seen, y, draws["y_unobserved"])
    np.testing.assert_array_equal(dataset(data, "posterior")["y"], completed)
    for group in ("observed_data", "log_likelihood", "posterior_predictive", "prior_predictive"):
        assert names(data, group) == {"y_observed"}
        assert list(dataset(data, group)["y_observed"]["data"].values) == [0, 1, 3]
    np.testing.assert_array_equal(dataset(data, "observed_data")["y_observed"], y[seen])
    terms = dist.Normal(draws["loc"].unsqueeze(-1), 1.0).log_prob(y[seen])
    np.testing.assert_allclose(dataset(data, "log_likelihood")["y_observed"], terms, rtol=1e-5)


def test_enumerated_sites_are_summed_out_alike_every_time() -> None:
    y = torch.randn(5)

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc + 3 * z, 1.0), obs=y)

    loc = torch.randn(2, 6)
    asked: dict[str, Any] = {"model": model, "log_likelihood": True, "posterior_predictive": True}
    data, again = (from_pyro({"loc": loc}, **asked) for _ in range(2))
    means = loc[..., None, None] + torch.tensor([0.0, 3.0])
    terms = dist.Normal(means, 1.0).log_prob(y.unsqueeze(-1)) + torch.tensor([0.7, 0.3]).log()
    found = dataset(data, "log_likelihood")
    np.testing.assert_allclose(found["y"], terms.logsumexp(-1), rtol=1e-4, atol=1e-5)
    assert found["y"].dims == ("chain", "draw", "data")
    for group in groups(data):
        assert "z" not in names(data, group)
        assert dataset(data, group).equals(dataset(again, group))


def nested(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    groups = pyro.plate("group", 3, dim=-2)
    with groups:
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
    with groups, pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(x @ w + offset, 1.0), obs=y)


def test_guides_of_nested_plates_have_native_shapes() -> None:
    x, y = torch.randn(5, 2), torch.randn(3, 5)

    def guide(x: Tensor, y: Tensor) -> None:
        pyro.sample("w", dist.Normal(1.0, 0.1).expand([2]).to_event(1))
        with pyro.plate("group", 3, dim=-2):
            pyro.sample("offset", dist.Normal(0.0, 0.1))

    asked: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True}
    for some in (guide, AutoNormal(nested)):
        data = from_pyro_svi(some, model=nested, args=(x, y), num_samples=7, **asked)
        assert names(data, "posterior") == {"w", "offset"}  # and no site of the guide's own
        w, offset = (torch.from_numpy(dataset(data, "posterior")[name].values) for name in ("w", "offset"))
        assert w.shape == (1, 7, 2) and offset.shape == (1, 7, 3, 1)
        terms = dist.Normal((w @ x.T).unsqueeze(-2) + offset, 1.0).log_prob(y)
        np.testing.assert_allclose(dataset(data, "log_likelihood")["y"], terms, rtol=1e-4, atol=1e-4)
        assert dataset(data, "posterior_predictive")["y"].dims == ("chain", "draw", "group", "data")
    # The control: Pyro's Predictive pads w by dims of the plate, and x @ w fails.
    with pytest.raises(RuntimeError, match="size"):
        Predictive(nested, guide=guide, num_samples=7)(x, y)


def test_likelihoods_that_are_given_are_not_ignored() -> None:
    with pytest.raises(TypeError, match="log_likelihood is a dict"):
        from_pyro({"x": torch.randn(1, 4)}, log_likelihood={"y": torch.randn(4)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": None}, "deterministic is None; pass True"),
        ({"posterior_predictive": "y"}, "posterior_predictive is 'y'; pass True, or a dict"),
        ({"predictions": True}, "predictions is True; pass a dict"),
        ({"prior": 3.0}, r"prior is 3\.0; pass a number of draws, or a dict"),
        ({"constant_data": torch.ones(3)}, "constant_data is a Tensor; pass a dict"),
        ({"predictions_constant_data": [1]}, "predictions_constant_data is a list; pass a dict"),
    ],
)
def test_arguments_of_other_types_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_pyro({"w": torch.randn(1, 4, 3)}, model=vector, args=(torch.tensor(0.0),), **options)


def test_draws_of_one_site_without_chains_are_named_once() -> None:
    with pytest.raises(ValueError, match=r"^draws of site 'w' have shape \(4,\); pass \(num_chains"):
        from_pyro({"w": torch.randn(4)})
