"""The groups beside the draws.

Covers also `export.predictive` and `export.joined_windows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_sym import Permutation, dataset, from_pyro, log_likelihood
from tests.conftest import Z_LIMIT
from tests.export.runs import event_dims, groups, names

X = torch.linspace(-1.0, 1.0, 12).unsqueeze(-1) * torch.ones(2)


def regression(x: Tensor, y: Tensor | None = None) -> None:
    """Its likelihood can't be had from a vectorised trace, and its plates make Predictive pad."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1), infer=event_dims("feature"))
    groups = pyro.plate("group", 3, dim=-2)
    with groups:
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
    mean = pyro.deterministic("mean", x @ w + offset)
    pyro.factor("nothing", mean.sum() * 0)
    with groups, pyro.plate("data", len(x), dim=-1):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def draws(num_chains: int = 2, num_samples: int = 15) -> dict[str, Tensor]:
    return {
        "w": torch.randn(num_chains, num_samples, 2),
        "offset": torch.randn(num_chains, num_samples, 3, 1),
    }


Y = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:the labels of")  # which are not what is tested here
def test_all_groups_and_their_dims() -> None:
    data = from_pyro(
        draws(),
        model=regression,
        args=(X, Y),
        symmetry=Permutation({"offset": -2}),
        log_likelihood=True,
        posterior_predictive=True,
        predictions={"y": torch.randn(30, 3, 5)},
        prior=20,
        constant_data={"x": X},
        predictions_constant_data={"x": np.zeros((5, 2))},
        functions={"at_one": lambda draw: draw["w"].sum() + draw["offset"].squeeze(-1)},
        coords={"data": [f"row {i}" for i in range(12)], "feature": ["a", "b"]},
        dims={"x": ["data", "feature"], "at_one": ["group"]},
        pred_coords={"data": list("vwxyz")},
        pred_dims={"x": ["data", "feature"], "y": ["group", "data"]},
    )
    dims = {
        (group, name): variable.dims
        for group in groups(data)
        for name, variable in dataset(data, group).data_vars.items()
    }
    sampled = ("chain", "draw")
    both = {
        ("w",): (*sampled, "feature"),
        ("offset",): (*sampled, "group", "offset_dim_1"),
        ("at_one",): (*sampled, "group"),
        ("mean",): (*sampled, "mean_dim_0", "mean_dim_1"),
    }
    assert dims == {
        **{("posterior", *name): value for name, value in both.items()},
        **{("posterior_aligned", *name): value for name, value in both.items()},
        ("sample_stats", "permutation"): (*sampled, "permutation_dim_0"),
        ("sample_stats", "alignment_confidence"): sampled,
        ("observed_data", "y"): ("group", "data"),
        ("log_likelihood", "y"): (*sampled, "group", "data"),
        ("posterior_predictive", "y"): (*sampled, "group", "data"),
        ("predictions", "y"): (*sampled, "group", "data"),
        ("prior", "w"): (*sampled, "feature"),
        ("prior", "offset"): (*sampled, "group", "offset_dim_1"),
        ("prior", "mean"): (*sampled, "mean_dim_0", "mean_dim_1"),
        ("prior_predictive", "y"): (*sampled, "group", "data"),
        ("constant_data", "x"): ("data", "feature"),
        ("predictions_constant_data", "x"): ("data", "feature"),
    }
    assert dataset(data, "prior").sizes["draw"] == 20
    assert list(dataset(data, "predictions")["data"].values) == list("vwxyz")
    assert list(dataset(data, "log_likelihood")["data"].values[:2]) == ["row 0", "row 1"]


def test_likelihood_is_that_of_the_function_and_of_the_whole() -> None:
    values = draws()
    found = dataset(from_pyro(values, model=regression, args=(X, Y), log_likelihood=True), "log_likelihood")
    expected = log_likelihood(regression, values, X, Y, group_by_chain=True)["y"]
    np.testing.assert_array_equal(found["y"], expected)
    assert "log_likelihood" not in groups(from_pyro(values, model=regression, args=(X, Y)))


def test_a_likelihood_of_events_takes_the_batch_dims_of_names_given() -> None:
    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample("y", dist.Normal(loc, 1.0).expand([2]).to_event(1), obs=torch.zeros(4, 2))

    data = from_pyro(
        {"loc": torch.randn(1, 6)}, model=model, log_likelihood=True, dims={"y": ["city", "axis"]}
    )
    assert dataset(data, "observed_data")["y"].dims == ("city", "axis")
    assert dataset(data, "log_likelihood")["y"].dims == ("chain", "draw", "city")


def test_masked_rows_are_dropped_and_the_others_keep_their_labels() -> None:
    y, seen = torch.randn(5), torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("city", 5):
            with poutine.mask(mask=seen):
                pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
            with poutine.mask(mask=~seen):
                pyro.sample("z", dist.Normal(loc, 1.0), obs=y)
            pyro.sample("v", dist.Normal(loc, 1.0), obs=y)

    loc = torch.randn(2, 6)
    asked: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True}
    data = from_pyro({"loc": loc}, model=model, coords={"city": list("abcde")}, **asked)
    terms = dist.Normal(loc.unsqueeze(-1), 1.0).log_prob(y)
    for group in ("observed_data", "log_likelihood", "posterior_predictive"):
        found = dataset(data, group)
        assert found["v"].dims[-1] == "city"
        assert list(found["city"].values) == list("abcde")
        assert [str(label) for label in found["y_city"].values] == list("acd")
        assert [str(label) for label in found["z_city"].values] == list("be")
        assert not np.isnan(found["y"]).any()
    np.testing.assert_allclose(dataset(data, "log_likelihood")["y"], terms[..., seen])
    np.testing.assert_array_equal(dataset(data, "observed_data")["z"], y[~seen])

    def alone() -> None:
        with poutine.block(hide=["v", "z"]):
            model()

    data = from_pyro({"loc": loc}, model=alone, **asked)
    assert list(dataset(data, "log_likelihood")["city"].values) == [0, 2, 3]


def test_what_is_masked_altogether_is_no_variable() -> None:
    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with poutine.mask(mask=torch.tensor(False)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=torch.tensor(0.0))
        with poutine.mask(mask=torch.tensor(True)):
            pyro.sample("z", dist.Normal(loc, 1.0), obs=torch.tensor(0.0))

    data = from_pyro({"loc": torch.randn(1, 6)}, model=model, log_likelihood=True)
    assert names(data, "log_likelihood") == names(data, "observed_data") == {"z"}


def test_masks_of_two_dims_become_rows_or_entries() -> None:
    y = torch.randn(3, 4)
    rows = torch.tensor([[True], [False], [True]])
    ragged = torch.arange(4) < torch.tensor([[4], [1], [2]])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("series", 3, dim=-2), pyro.plate("time", 4, dim=-1):
            with poutine.mask(mask=rows):
                pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
            with poutine.mask(mask=~rows):
                pyro.sample("v", dist.Normal(loc, 1.0), obs=y)
            with poutine.mask(mask=ragged):
                pyro.sample("z", dist.Normal(loc, 1.0), obs=y)

    data = from_pyro({"loc": torch.randn(1, 6)}, model=model, log_likelihood=True)
    found = dataset(data, "log_likelihood")
    assert found["y"].dims == ("chain", "draw", "series", "time")
    assert list(found["series"].values) == [0, 2]
    # Of the sites that mask rows of one dim, the one that has all of them keeps its name.
    assert found["v"].dims[2:] == ("v_series", "time")
    assert found["z"].dims == ("chain", "draw", "z_observed")
    assert list(found["z_observed"].values) == [0, 1, 2, 3, 4, 8, 9]
    np.testing.assert_array_equal(dataset(data, "observed_data")["z"], y[ragged])
    assert not any(np.isnan(variable).any() for variable in found.data_vars.values())


def test_data_of_a_sequential_plate_are_one_variable() -> None:
    y = torch.randn(12)

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        for i in pyro.plate("city", 12):
            pyro.sample(f"y_{i}", dist.Normal(loc, 1.0), obs=y[i])

    loc = torch.randn(2, 6)
    asked: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True, "prior": 5}
    data = from_pyro({"loc": loc}, model=model, **asked)
    found = dataset(data, "log_likelihood")
    assert list(found.data_vars) == ["y"]
    assert found["y"].dims == ("chain", "draw", "city")
    np.testing.assert_allclose(found["y"], dist.Normal(loc.unsqueeze(-1), 1.0).log_prob(y))
    np.testing.assert_array_equal(dataset(data, "observed_data")["y"], y)
    for group in ("posterior_predictive", "prior_predictive"):
        assert dataset(data, group)["y"].dims == ("chain", "draw", "city")


# Predictions


def test_posterior_predictive_is_of_the_model_at_each_draw() -> None:
    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2 * loc)
        with pyro.plate("data", len(y), subsample_size=3) as rows, poutine.scale(scale=7.0):
            z = pyro.sample("z", dist.Bernoulli(0.25), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc + 4 * z, 0.5), obs=y[rows])

    loc = torch.tensor([[-1.0, 2.0]]).repeat_interleave(100, 1)
    state = torch.get_rng_state()
    new = dataset(
        from_pyro({"loc": loc}, model=model, args=(torch.zeros(8),), posterior_predictive=True),
        "posterior_predictive",
    )
    assert torch.equal(state, torch.get_rng_state())
    assert list(new.data_vars) == ["y"]
    noise = new["y"].values[0] - loc[0, :, None].numpy() - 4 * 0.25
    variance = 0.25 + 16 * 0.25 * 0.75
    for half in (noise[:100], noise[100:]):
        # z and noise are drawn anew for every draw and row.
        assert abs(half.mean()) < Z_LIMIT * np.sqrt(variance / half.size)
        assert abs(np.corrcoef(half.T)[0, 1]) < Z_LIMIT / np.sqrt(100)
    assert len(np.unique(noise)) > 0.99 * noise.size


def test_predictive_draws_from_outside_lose_their_padding() -> None:
    padded = Predictive(regression, num_samples=4)(X)
    assert padded["w"].shape == (4, 1, 1, 2)
    new = torch.randn(30, 3, 12)
    data = from_pyro(
        draws(),
        model=regression,
        args=(X, Y),
        posterior_predictive={"y": new.unsqueeze(1)},
        prior={name: value for name, value in padded.items() if name in ("w", "offset", "y")},
    )
    found = dataset(data, "posterior_predictive")["y"]
    assert found.dims == ("chain", "draw", "group", "data")
    np.testing.assert_array_equal(found, new.unflatten(0, (2, 15)))
    assert names(data, "prior") == {"w", "offset"}
    assert dataset(data, "prior")["w"].shape == (1, 4, 2)
    assert dataset(data, "prior")["offset"].shape == (1, 4, 3, 1)  # its own size-1 dim stays
    assert names(data, "prior_predictive") == {"y"}
    with pytest.raises(ValueError, match=r"predictive draws of 'y' have shape \(7,\)"):
        from_pyro(draws(), posterior_predictive={"y": torch.randn(7)})
    assert "posterior_predictive" not in groups(from_pyro(draws(), posterior_predictive=False))


def test_prior_draws_are_of_the_prior() -> None:
    count = 200
    data = from_pyro(draws(), model=regression, args=(X, Y), prior=count)
    w = dataset(data, "prior")["w"].values[0]
    y = dataset(data, "prior_predictive")["y"].values[0]
    offset = dataset(data, "prior")["offset"].values[0]
    assert abs(w.mean()) < Z_LIMIT / np.sqrt(w.size)
    assert abs((w**2).mean() - 1) < Z_LIMIT * np.sqrt(2 / w.size)
    residual = y - (w @ X.numpy().T)[:, None, :] - offset
    assert abs(residual.mean()) < Z_LIMIT / np.sqrt(residual.size)
    assert abs((residual**2).mean() - 1) < Z_LIMIT * np.sqrt(2 / residual.size)


def test_what_has_no_prior_or_model_is_refused() -> None:
    def improper() -> None:
        pyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))

    with pytest.raises(ValueError, match="prior of site 'loc' is improper"):
        from_pyro({"loc": torch.randn(1, 5)}, model=improper, prior=3)
    for wrong in (0, True):
        with pytest.raises(ValueError, match="no number of draws"):
            from_pyro(draws(), model=regression, args=(X, Y), prior=wrong)
    for asked in ({"log_likelihood": True}, {"posterior_predictive": True}, {"prior": 3}):
        with pytest.raises(ValueError, match="needs the model"):
            from_pyro(draws(), **asked)  # type: ignore[arg-type]


# Functions


@pytest.mark.filterwarnings("ignore:the labels of")  # which are not what is tested here
def test_functions_of_draws_are_variables() -> None:
    def curve(draw: dict[str, Tensor]) -> Tensor:
        return torch.tanh(torch.linspace(-1, 1, 7).outer(draw["w1"]) + draw["b1"]) @ draw["w2"]

    w1 = torch.randn(3, 40, 5)
    values = {"w1": w1, "b1": torch.randn(3, 40, 5), "w2": torch.randn(3, 40, 5)}
    data = from_pyro(
        values,
        symmetry=Permutation({"w1": -1, "b1": -1, "w2": -1}),
        functions={"f": curve, "first": lambda draw: draw["w1"][0]},
        dims={"f": ["input"]},
        coords={"input": range(7)},
    )
    raw, moved = dataset(data, "posterior"), dataset(data, "posterior_aligned")
    assert raw["f"].dims == ("chain", "draw", "input")
    expected = torch.stack([curve({n: v[1, i] for n, v in values.items()}) for i in range(40)])
    np.testing.assert_allclose(raw["f"].values[1], expected, rtol=1e-4, atol=1e-5)
    # What is a function of the network's output is the same; what looks at a label is not.
    np.testing.assert_allclose(raw["f"], moved["f"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(raw["first"], w1[..., 0])
    assert not np.allclose(raw["first"], moved["first"])


def test_functions_that_depend_on_values_and_bad_ones() -> None:
    values = {"x": torch.randn(2, 6)}
    with pytest.warns(UserWarning, match="can't be vectorised"):
        data = from_pyro(values, functions={"s": lambda d: d["x"] if d["x"] > 0 else -d["x"]})
    np.testing.assert_array_equal(dataset(data, "posterior")["s"], values["x"].abs())
    with pytest.raises(ValueError, match=r"functions \['x'\] have the names"):
        from_pyro(values, functions={"x": lambda draw: draw["x"]})
    with pytest.raises(TypeError, match="'s' returned float"):
        from_pyro(values, functions={"s": lambda draw: 1.0})  # type: ignore[dict-item,return-value]


def test_words_in_constant_data_are_refused_with_where_they_belong() -> None:
    with pytest.raises(TypeError, match=r"constant data 'place' hold <U6 values.*coords=\{dim: values\}"):
        from_pyro(draws(), constant_data={"place": ["Berlin", "Rome"]})
