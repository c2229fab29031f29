"""Export of guides: export.read, and export.guide_density with log p and log q for cross-validation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import Tensor

from pyro_sym import AutoSymmetrized, _arviz, dataset, from_pyro_svi
from tests.catalogue import normal_mean
from tests.export.runs import SYMMETRY, Y, groups, mixture, names


@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal])
def test_autoguides_become_one_chain(make: Any) -> None:
    data = from_pyro_svi(make(mixture), args=(Y,), num_samples=30)
    assert groups(data) == {"posterior", "observed_data"}
    assert names(data, "posterior") == {"locs", "weights", "gap"}
    posterior = dataset(data, "posterior")
    assert posterior["locs"].dims == ("chain", "draw", "component")
    assert posterior["locs"].shape == (1, 30, 2)
    assert float(posterior["locs"].std()) > 0
    assert len(_arviz.load().summary(data, kind="stats")) == 5


def test_hand_written_guide() -> None:
    def guide(y: Tensor) -> None:
        pyro.sample("u", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("component", 2):
            pyro.sample("locs", dist.Normal(0.0, 1.0))

    data = from_pyro_svi(guide, args=(Y,), num_samples=5, symmetry=SYMMETRY)
    assert groups(data) == {"posterior", "posterior_aligned", "sample_stats"}
    assert names(data, "posterior") == {"weights", "locs"}
    data = from_pyro_svi(guide, args=(Y,), num_samples=5, model=mixture)
    assert dataset(data, "posterior")["locs"].dims[2:] == ("component",)


def test_symmetrised_guide_is_aligned_by_its_own_symmetry() -> None:
    guide = AutoSymmetrized(AutoNormal(mixture, init_loc_fn=_apart, init_scale=0.1), SYMMETRY)
    data = from_pyro_svi(guide, args=(Y,), num_samples=60)
    assert float(dataset(data, "posterior")["locs"].std("draw").min()) > 2.0
    assert float(dataset(data, "posterior_aligned")["locs"].std("draw").max()) < 0.3
    assert data.attrs["guide"] == "AutoSymmetrized"


def _apart(site: Any) -> Tensor:
    return torch.tensor([-5.0, 5.0]) if site["name"] == "locs" else torch.tensor([0.5, 0.5])


def test_local_sites_of_a_subsampled_guide_are_left_out() -> None:
    def guide() -> None:
        pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=5):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.warns(UserWarning, match=r"\['z'\] of the guide"):
        data = from_pyro_svi(guide, num_samples=3)
    assert names(data, "posterior") == {"loc"}
    assert json.loads(data.attrs["left_out"]) == ["z"]


def test_bad_number_of_samples() -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        from_pyro_svi(AutoNormal(mixture), args=(Y,), num_samples=0)


# log p and log q


def log_joint(model: Callable[..., Any], posterior: Any, *args: Any) -> Tensor:
    """The reference: condition and trace, draw by draw."""
    rows = []
    values = {name: torch.from_numpy(value.values[0]) for name, value in posterior.items() if name != "gap"}
    for i in range(posterior.sizes["draw"]):
        draw = {name: value[i] for name, value in values.items()}
        rows.append(poutine.trace(poutine.condition(model, data=draw)).get_trace(*args).log_prob_sum())
    return torch.stack(rows)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("make", [AutoNormal, AutoMultivariateNormal, "by hand"])
def test_densities_of_guides(make: Any) -> None:
    y = Y.double()

    def by_hand(y: Tensor) -> None:
        pyro.sample("weights", dist.Dirichlet(torch.tensor([4.0, 2.0])))
        with pyro.plate("component", 2):
            pyro.sample("locs", dist.Normal(torch.tensor([-5.0, 5.0]), 0.3))

    guide: Any = by_hand if make == "by hand" else make(mixture, init_scale=0.3)
    data = from_pyro_svi(guide, args=(y,), model=mixture, num_samples=8, log_likelihood=True)
    posterior, stats = dataset(data, "posterior"), dataset(data, "sample_stats")
    assert stats["log_q"].dims == stats["log_p"].dims == ("chain", "draw")
    np.testing.assert_allclose(stats["log_p"].values[0], log_joint(mixture, posterior, y), rtol=1e-10)
    locs, weights = (
        torch.from_numpy(posterior["locs"].values[0]),
        torch.from_numpy(posterior["weights"].values[0]),
    )
    if make == "by hand":
        expected = dist.Dirichlet(torch.tensor([4.0, 2.0])).log_prob(weights)
        expected = expected + dist.Normal(torch.tensor([-5.0, 5.0]), 0.3).log_prob(locs).sum(-1)
        np.testing.assert_allclose(stats["log_q"].values[0], expected, rtol=1e-10)
    elif make is AutoNormal:
        mean, scale = guide._get_loc_and_scale("locs")
        logit, width = guide._get_loc_and_scale("weights")
        on_simplex = dist.TransformedDistribution(
            dist.Normal(logit, width).to_event(1), [dist.transforms.StickBreakingTransform()]
        )
        expected = dist.Normal(mean, scale).log_prob(locs).sum(-1) + on_simplex.log_prob(weights)
        np.testing.assert_allclose(stats["log_q"].values[0], expected.detach(), rtol=1e-8)
    plain = from_pyro_svi(guide, args=(y,), model=mixture, num_samples=8)
    assert "sample_stats" not in groups(plain)
    np.testing.assert_array_equal(dataset(plain, "posterior")["locs"], posterior["locs"])


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:the labels of")  # which are not what is tested here
def test_density_of_a_symmetrised_guide_is_the_average() -> None:
    y = Y.double()
    # Its components overlap, so that the average is neither of its terms.
    guide = AutoSymmetrized(AutoNormal(mixture, init_loc_fn=_near, init_scale=0.4), SYMMETRY)
    data = from_pyro_svi(guide, args=(y,), num_samples=70, log_likelihood=True)
    posterior = {name: torch.from_numpy(v.values[0]) for name, v in dataset(data, "posterior").items()}
    plain = from_pyro_svi(guide, args=(y,), num_samples=70)
    np.testing.assert_array_equal(dataset(plain, "posterior")["locs"][0], posterior["locs"])
    base = AutoNormal(mixture, init_loc_fn=_near, init_scale=0.4)
    base(y)
    mean, scale = base._get_loc_and_scale("locs")
    logit, width = base._get_loc_and_scale("weights")
    on_simplex = dist.TransformedDistribution(
        dist.Normal(logit, width).to_event(1), [dist.transforms.StickBreakingTransform()]
    )
    both = [
        dist.Normal(mean, scale).log_prob(posterior["locs"][:, order]).sum(-1)
        + on_simplex.log_prob(posterior["weights"][:, order])
        for order in ([0, 1], [1, 0])
    ]
    terms = torch.stack(both).detach()
    expected = terms.logsumexp(0) - math.log(2)
    found = dataset(data, "sample_stats")["log_q"].values[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(found, terms.max(0).values - math.log(2), atol=1e-2)


def _near(site: Any) -> Tensor:
    return torch.tensor([-0.3, 0.3]) if site["name"] == "locs" else torch.tensor([0.45, 0.55])


@pytest.mark.usefixtures("float64")
def test_log_joint_is_on_all_rows_with_enumerated_sites_summed_out() -> None:
    y = torch.randn(7)

    def model(batch: int) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 7, subsample_size=batch) as rows:
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(loc + z, 1.0), obs=y[rows])

    def guide(batch: int) -> None:
        pyro.sample("loc", dist.Normal(0.0, 1.0))

    whole, parts = (
        dataset(
            from_pyro_svi(guide, model=model, args=(batch,), num_samples=5, log_likelihood=True),
            "sample_stats",
        )["log_p"].values[0]
        for batch in (7, 3)
    )
    np.testing.assert_allclose(parts, whole, rtol=1e-10)


def test_guides_without_a_density_say_so() -> None:
    data = from_pyro_svi(AutoDelta(mixture), args=(Y,), num_samples=3, log_likelihood=True)
    assert names(data, "sample_stats") == {"log_p"}
    assert "no density" in json.loads(f'"{data.attrs["log_q"]}"')
    data = from_pyro_svi(lambda: pyro.sample("x", dist.Normal(0.0, 1.0)), num_samples=3)
    assert groups(data) == {"posterior"}


def exact_loo(y: Tensor) -> float:
    """Σ log p(y_n | y_-n) of the conjugate model."""
    variance = 1 / len(y)  # 1 / (1 + N - 1)
    means = (y.sum() - y) * variance
    return float(dist.Normal(means, (1 + variance) ** 0.5).log_prob(y).sum())


@pytest.mark.skipif(not hasattr(_arviz.load(), "loo_approximate_posterior"), reason="ArviZ 1.x has it")
def test_loo_of_an_approximate_posterior() -> None:
    """The exact posterior needs no correction; a guide that is off gets it, and is wrong without."""
    az = _arviz.load()
    y = torch.randn(40) + 0.5
    mean, scale = float(y.sum()) / 41, 41**-0.5

    def fit(shift: float) -> tuple[float, float]:
        def guide(y: Tensor) -> None:
            pyro.sample("loc", dist.Normal(mean + shift * scale, 1.2 * scale if shift else scale))

        data = from_pyro_svi(guide, args=(y,), model=normal_mean, num_samples=1000, log_likelihood=True)
        stats = dataset(data, "sample_stats")
        corrected = az.loo_approximate_posterior(data, stats["log_p"], stats["log_q"])
        return corrected.elpd, az.loo(data).elpd

    truth = exact_loo(y)
    exact = fit(0.0)
    assert exact[0] == pytest.approx(exact[1], abs=1e-3)
    assert exact[0] == pytest.approx(truth, abs=0.1)
    off = fit(0.8)
    assert off[0] == pytest.approx(truth, abs=0.15)
    assert abs(off[1] - truth) > 0.3
