"""Deterministic sites and other sites that Pyro calls observed.

Covers also `export.shown_model`.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.infer.reparam import LocScaleReparam, TransformReparam
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_sym import (
    BAOA,
    DivergenceError,
    Permutation,
    VectorizedMCMC,
    dataset,
    from_pyro,
    from_pyro_svi,
    log_likelihood,
)
from pyro_sym.diagnostics import report
from pyro_sym.export.names import event_dim_of
from tests.export.runs import Y, groups, names

X = torch.linspace(-1.0, 1.0, 30)
ALL: dict[str, Any] = {"log_likelihood": True, "posterior_predictive": True, "prior": 4}
# So little noise that simulated data show the mean they were drawn around.
NOISE = 1e-5


def line(x: Tensor, y: Tensor | None = None, size: int | None = None) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 3.0))
    with pyro.plate("row", 30, subsample_size=size) as rows:
        mean = pyro.deterministic("mean", w * x[rows])
        pyro.sample("y", dist.Normal(mean, NOISE), obs=None if y is None else y[rows])


def mixture(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
    with pyro.plate("component", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0 * scale))
        precision = pyro.deterministic("precision", pyro.sample("sd", dist.Gamma(2.0, 2.0)).pow(-2))
        pyro.deterministic("moments", torch.stack([locs, locs.square(), locs**3], -1))
    with pyro.plate("data", len(y)):
        both = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, precision.rsqrt()))
        pyro.sample("y", both, obs=y)


def mixture_draws(locs: str = "locs") -> dict[str, Tensor]:
    """Two chains, of which the second has the labels the other way round."""
    values = {
        "scale": torch.full((2, 9), 0.5),
        locs: torch.tensor([-1.0, 1.0]) + 0.05 * torch.randn(2, 9, 2),
        "sd": torch.tensor([0.5, 1.5]) + 0.05 * torch.randn(2, 9, 2),
    }
    return {n: torch.stack([v[0], v[1].flip(-1)]) if n != "scale" else v for n, v in values.items()}


# Values and dims


def test_predictions_are_made_anew_through_deterministic_sites_in_the_plate_of_data() -> None:
    w = torch.randn(2, 10)
    found = from_pyro({"w": w}, model=line, args=(X, 2 * X), **ALL)
    for group, loc in (("posterior", w), ("prior", torch.from_numpy(dataset(found, "prior")["w"].values))):
        simulated = dataset(found, f"{group}_predictive")["y"]
        assert simulated.dims == dataset(found, group)["mean"].dims == ("chain", "draw", "row")
        np.testing.assert_allclose(simulated, loc[..., None] * X, atol=10 * NOISE)
        np.testing.assert_allclose(dataset(found, group)["mean"], loc[..., None] * X, rtol=1e-6)
    theirs = Predictive(line, {"w": w.flatten()})(X)
    assert theirs["y"].shape == (20, 30)
    np.testing.assert_allclose(dataset(found, "posterior")["mean"].values.reshape(20, 30), theirs["mean"])
    # The control: poutine.uncondition draws from the site's Delta, whose dims count twice.
    freed = poutine.trace(poutine.uncondition(line)).get_trace(X, 2 * X)
    assert freed.nodes["y"]["value"].shape == (30, 30)


def test_deterministic_sites_are_exported_and_aligned() -> None:
    draws, symmetry = mixture_draws(), Permutation({"locs": -1, "sd": -1})
    data = from_pyro(
        draws, model=mixture, args=(Y,), symmetry=symmetry, coords={"component": list("ab")}, **ALL
    )
    assert json.loads(data.attrs["deterministic"]) == ["precision", "moments"]
    dims = {"precision": ("component",), "moments": ("component", "moments_dim_1")}
    for group in ("posterior", "posterior_aligned", "prior"):
        values = dataset(data, group)
        for name, expected in dims.items():
            assert values[name].dims == ("chain", "draw", *expected)
        np.testing.assert_allclose(values["precision"], values["sd"].values ** -2, rtol=1e-5)
        np.testing.assert_allclose(values["moments"][..., 2], values["locs"].values ** 3, rtol=1e-5)
    aligned, raw = dataset(data, "posterior_aligned"), dataset(data, "posterior")
    assert float(aligned["moments"][..., 0].std(("chain", "draw")).max()) < 0.2
    assert float(raw["moments"][..., 0].std(("chain", "draw")).min()) > 0.8  # the labels differ by chain
    for group in ("observed_data", "log_likelihood", "posterior_predictive", "prior_predictive"):
        assert names(data, group) == {"y"}
    assert set(log_likelihood(mixture, draws, Y, group_by_chain=True)) == {"y"}
    table = report(data).convergence
    assert dict(table["kind"]) == {
        **dict.fromkeys(["scale", "locs", "sd"], "site"),
        **dict.fromkeys(["precision", "moments"], "deterministic"),
    }
    assert table["r_hat_aligned"]["precision"] < 1.3 < 1.5 < table["r_hat"]["precision"]


@pytest.mark.parametrize("given", [True, False])
def test_draws_of_deterministic_sites_are_aligned_with_what_they_depend_on(given: bool) -> None:
    """As if they came from ``Predictive``; without the model nothing is known of them, and they stay."""
    draws = mixture_draws()
    draws["precision"] = draws["sd"].pow(-2)
    model: dict[str, Any] = {"model": mixture, "args": (Y,)} if given else {}
    symmetry = Permutation({"locs": -1, "sd": -1})
    data = from_pyro(draws, symmetry=symmetry, deterministic=False, **model)
    aligned = dataset(data, "posterior_aligned")
    assert set(aligned.data_vars) == names(data, "posterior") == set(draws)
    agree = np.isclose(aligned["precision"], aligned["sd"].values ** -2, rtol=1e-4)
    assert agree.all() if given else not agree.all()


def test_reparametrised_sites_are_exported_as_the_function_that_they_are() -> None:
    model = poutine.reparam(mixture, {"locs": LocScaleReparam(0.0)})
    draws, symmetry = mixture_draws("locs_decentered"), Permutation({"locs_decentered": -1, "sd": -1})
    data = from_pyro(draws, model=model, args=(Y,), symmetry=symmetry, **ALL)
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    theirs = Predictive(model, flat, return_sites=("locs",))(Y)["locs"]
    np.testing.assert_allclose(dataset(data, "posterior")["locs"].values.reshape(18, 2), theirs, rtol=1e-5)
    for group in ("posterior", "posterior_aligned", "prior"):
        values = dataset(data, group)
        assert values["locs"].dims == ("chain", "draw", "component")
        expected = 10 * values["scale"] * values["locs_decentered"]
        np.testing.assert_allclose(values["locs"], expected, rtol=1e-5)
    assert names(data, "log_likelihood") == names(data, "posterior_predictive") == {"y"}
    with_theirs = from_pyro(draws, model=model, args=(Y,), posterior_predictive=Predictive(model, flat)(Y))
    assert dataset(with_theirs, "posterior_predictive")["moments"].dims[2:] == ("component", "moments_dim_1")


def test_eight_schools_from_a_guide() -> None:
    """Parametrised by a base distribution, and observed by ``poutine.condition``."""
    scores, noise = (
        torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12]),
        torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18]),
    )

    @poutine.reparam(config={"theta": TransformReparam()})
    def schools() -> None:
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("school", 8):
            to = dist.transforms.AffineTransform(mu, tau)
            theta = pyro.sample(
                "theta", dist.TransformedDistribution(dist.Normal(0.0, 1.0).expand([8]), [to])
            )
            pyro.sample("score", dist.Normal(theta, noise))

    def guide() -> None:
        pyro.sample("mu", dist.Normal(4.0, 3.0))
        pyro.sample("tau", dist.LogNormal(1.0, 0.5))
        with pyro.plate("school", 8):
            pyro.sample("theta_base", dist.Normal(0.0, 1.0))

    model = poutine.condition(schools, {"score": scores})
    data = from_pyro_svi(guide, model=model, num_samples=6, **ALL)
    values = dataset(data, "posterior")
    assert values["theta"].dims == ("chain", "draw", "school")
    np.testing.assert_allclose(
        values["theta"], values["mu"] + values["tau"] * values["theta_base"], rtol=1e-5
    )
    terms = dist.Normal(torch.tensor(values["theta"].values), noise).log_prob(scores)
    np.testing.assert_allclose(dataset(data, "log_likelihood")["score"], terms, rtol=1e-5)
    assert names(data, "posterior_predictive") == names(data, "observed_data") == {"score"}


@pytest.mark.parametrize(
    ("plates", "stated", "shape", "event_dim"),
    [
        ({-1: 5}, 1, (5,), 0),
        ({-1: 5}, 2, (5, 3), 1),
        ({-1: 5}, 1, (3,), 1),  # of no plate
        ({-1: 5}, 0, (), 0),
        ({-1: 5}, 2, (5, 5), 2),  # one can't tell which
        ({-1: 5}, 2, (5, 1), 1),
        ({-1: 5, -2: 4}, 2, (4, 5), 0),
        ({-1: 5, -2: 4}, 3, (4, 5, 2), 1),
        ({-1: 5, -2: 4}, 1, (5,), 0),  # of the inner plate only
        ({-1: 5, -2: 4}, 2, (4, 1), 0),
        ({-1: 5}, 1, (5, 5), 1),  # stated
    ],
)
def test_dims_of_plates_are_told_from_event_dims_where_there_is_one_way(
    plates: dict[int, int], stated: int, shape: tuple[int, ...], event_dim: int
) -> None:
    def model() -> None:
        value = torch.zeros(shape)
        with poutine.block(hide=["p-1", "p-2"]):
            several = [pyro.plate(f"p{dim}", size, dim=dim) for dim, size in plates.items()]
        for plate in several:
            plate.__enter__()
        pyro.deterministic("x", value, event_dim=None if stated == len(shape) else stated)
        for plate in reversed(several):
            plate.__exit__(None, None, None)

    site = poutine.trace(model).get_trace().nodes["x"]
    assert event_dim_of(site, shape) == event_dim


def test_what_to_compute_can_be_chosen() -> None:
    draws = mixture_draws()
    sites, model = set(draws), dict[str, Any](model=mixture, args=(Y,))
    assert names(from_pyro(draws, deterministic=False, **model), "posterior") == sites
    assert names(from_pyro(draws, deterministic=["moments"], **model), "posterior") == sites | {"moments"}
    with pytest.raises(
        ValueError, match=r"names 'gap', and the model's deterministic sites are \['precision'"
    ):
        from_pyro(draws, deterministic=["gap"], **model)
    data = from_pyro(draws, functions={"moments": lambda draw: draw["locs"].mean()}, **model)
    assert dataset(data, "posterior")["moments"].dims == ("chain", "draw"), "the function takes its place"


# What has not one value a draw


def minibatches(y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 3.0))
    with pyro.plate("row", 30, subsample_size=7) as rows:
        pyro.deterministic("pair", torch.stack([w * X[rows], X[rows]], -1), event_dim=1)
        pyro.deterministic("shown", (w * X[rows]).sum())
        mean = pyro.deterministic("mean", w * X[rows])
        pyro.sample("y", dist.Normal(mean, NOISE), obs=y[rows])
    pyro.deterministic("total", mean.sum())
    pyro.deterministic("twice", 2 * w)


def test_sites_in_subsampled_plates_are_left_out_or_have_all_rows() -> None:
    w = torch.randn(2, 5)
    asked: dict[str, Any] = {"model": minibatches, "args": (2 * X,), **ALL}
    with pytest.warns(UserWarning, match=r"\['pair', 'mean'\] have a value for every row .* name them"):
        data = from_pyro({"w": w}, **asked)
    assert names(data, "posterior") == names(data, "prior") == {"w", "twice"}
    assert json.loads(data.attrs["left_out"]) == ["mean", "pair", "shown", "total"]
    data = from_pyro({"w": w}, deterministic=["mean", "pair"], **asked)
    for group in ("posterior", "prior"):
        values = dataset(data, group)
        assert values["mean"].dims[2:] == ("row",) and values["pair"].dims[2:] == ("row", "pair_dim_1")
        expected = values["w"].values[..., None] * X.numpy()
        np.testing.assert_allclose(values["mean"], expected, rtol=1e-6)
        np.testing.assert_allclose(values["pair"][..., 0], expected, rtol=1e-6)
        np.testing.assert_allclose(dataset(data, f"{group}_predictive")["y"], expected, atol=10 * NOISE)
    with pytest.raises(ValueError, match="'total' has not one value a draw"):
        from_pyro({"w": w}, deterministic=["total"], **asked)


def test_functions_of_summed_out_sites_are_left_out() -> None:
    """Also if draws from the prior would nearly never show another value."""

    def model(y: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(1e-6))
            pyro.sample("y", dist.Normal(pyro.deterministic("own", locs[z.long()]), 1.0), obs=y)
        pyro.deterministic("gap", locs[1] - locs[0])

    data = from_pyro({"locs": torch.randn(2, 5, 2)}, model=model, args=(torch.randn(4),), log_likelihood=True)
    assert names(data, "posterior") == {"locs", "gap"}
    assert json.loads(data.attrs["left_out"]) == ["own"]
    # The control: with draws of z it has one value a draw.
    draws = {"locs": torch.randn(2, 5, 2), "z": torch.randint(0, 2, (2, 5, 4)).float()}
    values = dataset(from_pyro(draws, model=model, args=(torch.randn(4),)), "posterior")
    np.testing.assert_array_equal(values["own"], draws["locs"].gather(-1, draws["z"].long()))


def test_functions_of_batches_of_a_loader_are_left_out() -> None:
    x = torch.randn(12, 2)

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("row", 12, subsample_size=len(x)):
            mean = pyro.deterministic("mean", x @ w)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        pyro.deterministic("total", (x @ w).sum())
        pyro.deterministic("norm", w.norm())

    loader = DataLoader(TensorDataset(x, x.sum(-1)), batch_size=4)
    kernel = BAOA(model, step_size=0.01, friction=1.0, batches=loader, jit="eager")
    mcmc = VectorizedMCMC(kernel, 3, warmup_steps=0, num_chains=2, disable_progbar=True)
    mcmc.run()
    data = from_pyro(mcmc)
    assert names(data, "posterior") == {"w", "norm"}
    assert json.loads(data.attrs["left_out"]) == ["y", "mean", "total"]
    values = dataset(from_pyro(mcmc, args=(x, x.sum(-1))), "posterior")
    np.testing.assert_allclose(values["total"], values["mean"].sum("row"), rtol=1e-4, atol=1e-5)


# Parameters and data fixed by poutine.condition


def test_data_by_condition_are_data_and_fixed_parameters_are_not() -> None:
    def model(y: Tensor | None = None) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(loc, noise), obs=y)

    loc, fixed = torch.randn(2, 6), {"noise": torch.tensor(NOISE)}
    by_obs = from_pyro({"loc": loc}, model=poutine.condition(model, fixed), args=(Y,), **ALL)
    by_condition = from_pyro({"loc": loc}, model=poutine.condition(model, fixed | {"y": Y}), **ALL)
    for group in groups(by_obs):
        assert dataset(by_obs, group).equals(dataset(by_condition, group))
    for group in ("observed_data", "log_likelihood", "posterior_predictive", "prior_predictive"):
        assert names(by_obs, group) == {"y"}
    simulated = dataset(by_obs, "posterior_predictive")["y"]
    np.testing.assert_allclose(simulated, loc[..., None].expand(2, 6, 20), atol=10 * NOISE)
    terms = log_likelihood(poutine.condition(model, fixed), {"loc": loc.flatten()}, Y)
    assert set(terms) == {"y"}
    # The control: where the noise is a latent site, its draws are no constant.
    free = from_pyro({"loc": loc}, model=model, args=(Y,), posterior_predictive=True)
    assert float(dataset(free, "posterior_predictive")["y"].std("data").mean()) > 0.1


# Few draws, none, and draws that aren't finite


@pytest.mark.filterwarnings("ignore:the labels of")
@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_few_draws(num_chains: int, num_samples: int) -> None:
    draws = {name: value[:num_chains, :num_samples] for name, value in mixture_draws().items()}
    symmetry = Permutation({"locs": -1, "sd": -1})
    asked: dict[str, Any] = {**ALL, "prior": 1, "functions": {"total": lambda draw: draw["locs"].sum()}}
    data = from_pyro(draws, model=mixture, args=(Y,), symmetry=symmetry, **asked)
    for group in ("posterior", "posterior_aligned", "posterior_predictive", "log_likelihood"):
        assert (dataset(data, group).sizes["chain"], dataset(data, group).sizes["draw"]) == (
            num_chains,
            num_samples,
        )
    table = report(data, symmetry=symmetry)
    assert table.convergence["ess_bulk"].isna().all() and table.distance is not None


def stiff(y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 1e-3).to_event(1))
    pyro.deterministic("gap", mu.diff())
    if y is not None:
        pyro.sample("y", dist.Normal(mu.sum(), 1.0), obs=y)


def test_runs_without_draws() -> None:
    mcmc = VectorizedMCMC(
        BAOA(stiff, step_size=1.0, friction=1.0, jit="eager"),
        5,
        warmup_steps=99,
        num_chains=2,
        disable_progbar=True,
    )
    with pytest.raises(ValueError, match="no draws yet: call its run"):
        from_pyro(mcmc)
    with pytest.raises(DivergenceError):
        mcmc.run()
    with pytest.raises(ValueError, match="there are no draws: the run was ended by DivergenceError: chain"):
        from_pyro(mcmc)
    with pytest.raises(ValueError, match=r"there are no draws: those of site 'mu' have shape \(2, 0, 2\)"):
        from_pyro({"mu": torch.zeros(2, 0, 2)}, model=stiff)
    with pytest.raises(ValueError, match=r"there are no draws: those of site 'mu' have shape \(0, 2\)"):
        log_likelihood(stiff, {"mu": torch.zeros(0, 2)}, torch.tensor(0.0))


def test_draws_of_which_some_or_all_are_not_finite() -> None:
    mu = torch.randn(2, 5, 2)
    mu[1, 2:] = math.nan
    data = from_pyro({"mu": mu}, model=stiff, args=(torch.tensor(0.0),), posterior_predictive=True)
    np.testing.assert_allclose(dataset(data, "posterior")["gap"], mu.diff())
    asked: dict[str, Any] = {"symmetry": Permutation({"mu": -1}), **ALL}
    with pytest.warns(UserWarning, match="10 of 10 draws are not finite"):
        data = from_pyro({"mu": mu * math.nan}, model=stiff, args=(torch.tensor(0.0),), **asked)
    assert names(data, "posterior") == {"mu"} and names(data, "prior") >= {"mu"}
    assert names(data, "observed_data") == {"y"}


def test_a_model_that_fails_at_a_draw_does_not_lose_the_draws() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.deterministic("root", torch.linalg.cholesky(w * torch.eye(2)))

    draws = {"w": torch.tensor([[1.0, -1.0, 2.0]])}
    said = r"^the deterministic sites \['root'\] are left out, as the model failed at some draw: [^\n]*$"
    with pytest.warns(UserWarning, match="one by one"), pytest.warns(UserWarning, match=said):
        data = from_pyro(draws, model=model)
    assert names(data, "posterior") == {"w"}


# What can't be had is said


def test_factors_in_place_of_data_are_named() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 4):
            pyro.factor("y", -w.expand(4).square())

    with pytest.warns(UserWarning, match=r"no observed sites, and its factors \['y'\] are no data"):
        data = from_pyro({"w": torch.randn(2, 5)}, model=model, log_likelihood=True)
    assert groups(data) == {"posterior"}
    with pytest.warns(UserWarning, match=r"its factors \['y'\]"):
        assert log_likelihood(model, {"w": torch.randn(5)}) == {}
    with pytest.warns(UserWarning, match="the model has no observed sites, so that"):
        log_likelihood(stiff, {"mu": torch.randn(5, 2)})


class Unsampled(dist.TorchDistribution):
    """A likelihood that can be computed and not drawn from."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = dist.constraints.real

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, (), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return -(value - self.loc).abs()


def chain(y: Tensor, duration: int | None) -> None:
    trans = pyro.sample("trans", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    steps = dist.Normal(torch.tensor([-1.0, 1.0]), 1.0)
    pyro.sample("y", dist.DiscreteHMM(torch.zeros(2), trans.log(), steps, duration=duration), obs=y)


@pytest.mark.filterwarnings("ignore:.*can't be vectorised")  # Pyro's HMM
def test_data_that_cannot_be_simulated_are_named() -> None:
    draws = {"trans": dist.Dirichlet(torch.ones(2, 2)).sample((1, 5))}
    asked: dict[str, Any] = {"model": chain, "log_likelihood": True}
    for group in ({"posterior_predictive": True}, {"prior": 3}):
        with pytest.raises(
            ValueError, match=r"'y' can't be simulated: its DiscreteHMM has no duration[^\n]*$"
        ):
            from_pyro(draws, args=(torch.randn(6), None), **asked, **group)
    data = from_pyro(draws, args=(torch.randn(6), 6), model=chain, **ALL)
    assert dataset(data, "posterior_predictive")["y"].shape == (1, 5, 6)
    assert names(from_pyro(draws, args=(torch.randn(6), None), **asked), "log_likelihood") == {"y"}

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", Unsampled(w), obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match="'y' can't be simulated: Unsampled has no sample method"):
        from_pyro({"w": torch.randn(1, 5)}, model=model, posterior_predictive=True)


def test_a_report_leaves_out_what_is_not_finite_of_deterministic_sites() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("padded", torch.stack([w[0], torch.tensor(math.nan), w[1]]))
        pyro.deterministic("log", -w.abs().log() * math.inf)

    draws, symmetry = {"w": torch.tensor([-1.0, 1.0]) + 0.1 * torch.randn(2, 40, 2)}, Permutation({"w": -1})
    found = report(from_pyro(draws, model=model, symmetry=symmetry), symmetry=symmetry)
    assert dict(found.convergence["looked_at"]) == {"w": 2, "padded": 2}
    assert found.convergence["r_hat_aligned"].max() < 1.3
    assert "1 of 3 coordinates of padded are not finite, and left out" in found.notes
    # The control: a site with NaN is a chain that has failed.
    draws["w"][1, 3:] = math.nan
    with pytest.warns(UserWarning, match="37 of 80 draws are not finite"):
        data = from_pyro(draws, model=model, symmetry=symmetry)
    assert any("chains [1] are left out: not finite in w" in note for note in report(data).notes)
