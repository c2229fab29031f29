# %% [markdown]
# # ArviZ for symmetric models: what to pass to it, and how to read the results
#
# ArviZ assumes that each coordinate of a draw has a fixed meaning. In a model with a symmetry it hasn't:
# `locs[0]` is one component in one chain and another component in the next. This tutorial goes through an
# ArviZ workflow on a small mixture, and shows at each step what the symmetry changes:
#
# 1. `az.summary` and `az.rhat` of raw draws;
# 2. `from_pyro`: groups, dims and coords, aligned draws, functions of draws;
# 3. leave-one-out cross-validation, `az.loo` and `az.compare`, of two models and a guide;
# 4. a posterior predictive check;
# 5. the report, line by line;
# 6. files: netCDF, and draws in a Zarr store;
# 7. a check of its own claims.
#
# It runs with ArviZ 0.23, where an export is an `InferenceData`, and with ArviZ 1.x, where it is an
# `xarray.DataTree`. `ps.dataset(idata, group)` is a group of either one, as an `xarray.Dataset`.
#
# Run it with `python tutorials/06_arviz_for_symmetric_models.py`; it writes a figure, a netCDF file and a
# store to `exports/`.

# %%
from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_value
from pyro.optim import ClippedAdam
from sklearn.cluster import KMeans
from sklearn.datasets import load_wine
from torch import Tensor

import pyro_sym as ps
from pyro_sym import diagnostics

SMALL = os.environ.get("PYRO_SYM_TUTORIALS", "full") == "small"  # a smoke run
STEPS, DRAWS, THINNING = (200, 100, 10) if SMALL else (400, 250, 15)
CHAINS = 4

pyro.set_rng_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
OUT = Path("exports")
OUT.mkdir(exist_ok=True)
STORE, FILE = OUT / "run.zarr", OUT / "posterior.nc"
shutil.rmtree(STORE, ignore_errors=True)  # of an earlier run

# %% [markdown]
# ## The data and the model
# The data are two measurements, standardised, of 178 bottles of wine from three cultivars. The model doesn't
# know the cultivars.
#
# The model also names the dims of the export. Batch dims have the names of their plates; event dims are named
# by `infer={"event_dims": [...]}`.

# %%
wine = load_wine()
features = ["flavanoids", "proline"]
columns = [wine.feature_names.index(name) for name in features]
x = torch.tensor((wine.data - wine.data.mean(0)) / wine.data.std(0))[:, columns]


def mixture(K: int) -> Callable[[Tensor], None]:
    """A Gaussian mixture of K components, allocations summed out."""

    def model(x: Tensor) -> None:
        of_components, of_features = {"event_dims": ["component"]}, {"event_dims": ["feature"]}
        weights = pyro.sample("weights", dist.Dirichlet(torch.full((K,), 2.0)), infer=of_components)
        with pyro.plate("component", K):
            locs = pyro.sample(
                "locs", dist.Normal(torch.zeros(2), 1.5).to_event(1), infer=of_features
            )
            log_scales = torch.full((2,), -0.7)
            scales = pyro.sample(
                "scales", dist.LogNormal(log_scales, 0.5).to_event(1), infer=of_features
            )
        with pyro.plate("bottle", len(x)):
            components = dist.Normal(locs, scales).to_event(1)
            allocated = dist.MixtureSameFamily(dist.Categorical(weights), components)
            pyro.sample("x", allocated, obs=x, infer=of_features)

    return model


symmetry = ps.find_symmetry(mixture(3), x)
print(symmetry)

# %% [markdown]
# ## A guide and four chains
# We fit a mean-field guide, averaged over the relabellings, for two and for three components. Chains start
# from draws of it, each in a random copy of the mode. The chains with three components write their draws to
# disk; more on that at the end.


# %%
def fit(K: int) -> ps.AutoSymmetrized:
    pyro.clear_param_store()  # a guide's parameters live in one store, by name
    pyro.set_rng_seed(K)
    centres = torch.tensor(KMeans(K, n_init=5, random_state=0).fit(x.numpy()).cluster_centers_)
    start = {"locs": centres, "scales": torch.full((K, 2), 0.5), "weights": torch.full((K,), 1 / K)}
    base = AutoNormal(mixture(K), init_loc_fn=init_to_value(values=start))
    guide = ps.AutoSymmetrized(base, symmetry)
    optimiser = ClippedAdam({"lr": 0.03, "lrd": 0.1 ** (1 / STEPS)})
    svi = SVI(mixture(K), guide, optimiser, Trace_ELBO())
    for _ in range(STEPS):
        svi.step(x)
    return guide


def sampler(K: int, guide: ps.AutoSymmetrized, **options: Any) -> ps.VectorizedMCMC:
    return ps.VectorizedMCMC(
        ps.BAOA(mixture(K), step_size=0.02, friction=3.0),
        num_samples=DRAWS,
        warmup_steps=DRAWS // 4,
        num_chains=CHAINS,
        thinning=THINNING,
        initial_values=guide.sample_posterior(x, sample_shape=(CHAINS,)),
        disable_progbar=True,
        **options,
    )


guides, runs = {}, {}
for K, options in {2: {}, 3: {"store": STORE}}.items():
    guides[K] = fit(K)
    runs[K] = sampler(K, guides[K], **options)
    runs[K].run(x)

# %% [markdown]
# ## The export
# One call exports everything; the model and its data are those of the run. `functions` are functions of one
# draw. Choose functions that don't depend on labels, and preferably those that you want to report: here the
# mean of the whole population, and the share of its largest component. A function has no plates, so `dims`
# names its dims.


# %%
def population_mean(draw: dict[str, Tensor]) -> Tensor:
    return draw["weights"] @ draw["locs"]


def largest_share(draw: dict[str, Tensor]) -> Tensor:
    return draw["weights"].max()


request = {
    "log_likelihood": True,
    "posterior_predictive": True,
    "functions": {"population_mean": population_mean, "largest_share": largest_share},
    "dims": {"population_mean": ["feature"]},
    "coords": {"feature": features},
}
idata = ps.from_pyro(runs[3], symmetry=symmetry, **request)
import arviz as az

names = (
    list(idata.children) if hasattr(idata, "children") else idata.groups()
)  # ArviZ 1.x, and before
for name in names:
    print(name)
    for variable, values in ps.dataset(idata, name).data_vars.items():
        print(f"    {variable:<32}{dict(values.sizes)}")

# %% [markdown]
# `posterior` holds the draws as they are. `posterior_aligned` holds each draw moved to the labels that all
# chains share. `sample_stats` holds the group element that moved it (`permutation`), and the probability of
# this element against the best rival (`alignment_confidence`).
#
# ## Raw and aligned, side by side
# We apply the same functions of ArviZ to both groups.

# %%
shown = {
    group: az.summary(ps.dataset(idata, group), var_names=["weights", "locs"], round_to="none")
    for group in ("posterior", "posterior_aligned")
}
print(f"{'':<22}{'raw':^31}  {'aligned':^31}")
print(f"{'':<22}" + 2 * f"{'mean':>7}{'sd':>7}{'R-hat':>8}{'ESS':>7}    ")
for name in shown["posterior"].index:
    print(f"{name:<22}", end="")
    for summary in shown.values():
        mean, sd, r_hat, ess = (
            float(summary.loc[name, c]) for c in ("mean", "sd", "r_hat", "ess_bulk")
        )
        print(f"{mean:>7.2f}{sd:>7.2f}{r_hat:>8.2f}{ess:>7.0f}", end="    ")
    print()
raw, aligned = shown.values()

# %% [markdown]
# The raw columns look like a failed run: R-hat is large, the effective sample size is tiny, and the means
# belong to no component. The aligned columns are computed from the same draws.
#
# A raw R-hat near 1 would prove nothing, either. Give every draw of every chain random labels, like a sampler
# that switches labels all the time. R-hat is then near 1, and the means are still meaningless:

# %%
locs = torch.tensor(ps.dataset(idata, "posterior")["locs"].values)
shuffles = torch.rand(CHAINS, DRAWS, 3).argsort(-1)
shuffled = locs.gather(2, shuffles[..., None].expand_as(locs))
shuffled_r_hat = float(
    az.rhat(ps.dataset(ps.from_pyro({"locs": shuffled}), "posterior"))["locs"].max()
)
shuffled_sd = float(shuffled.flatten(0, 1).std(0).min())
aligned_sd = float(ps.dataset(idata, "posterior_aligned")["locs"].std(("chain", "draw")).max())
print(f"labels at random in each draw: R-hat of the means at most {shuffled_r_hat:.3f},")
print(
    f"and their standard deviation at least {shuffled_sd:.2f}; "
    f"aligned it is at most {aligned_sd:.2f}"
)

# %% [markdown]
# ## Functions of draws, beside the weights
# A function that doesn't depend on labels has the same values in both groups and needs no alignment. If its
# R-hat is near 1, the chains agree about it, whatever the raw parameters show.

# %%
functions = ["population_mean", "largest_share"]
by_group = [ps.dataset(idata, group)[functions] for group in ("posterior", "posterior_aligned")]
apart = max(float(abs(by_group[0][name] - by_group[1][name]).max()) for name in functions)
print(f"the functions differ by {apart:.0e} at most between the two groups\n")
table = az.summary(by_group[0], round_to="none")[["mean", "sd", "ess_bulk", "r_hat"]].astype(float)
print(table.round(3).to_string())
weights = ps.dataset(idata, "posterior_aligned")["weights"]
mean_weights = weights.mean(("chain", "draw"))
of_means = float(mean_weights.max())
another = float((weights.argmax("component") != mean_weights.argmax("component")).mean())
print(f"\nlargest of the mean weights, aligned: {of_means:.3f}")
print(f"in {another:.0%} of the draws another component is the largest")

# %% [markdown]
# The mean of the largest share exceeds the largest of the mean weights, because different components are the
# largest in different draws. Which of the two you need depends on the question; aligned draws answer both.
#
# ## Leave-one-out cross-validation
# The log likelihood doesn't depend on labels, so `az.loo` needs no alignment, with one exception. It corrects
# its tail estimates for autocorrelation with the effective sample size of the *raw parameters*, which is
# meaningless here. Pass `reff`, the relative efficiency, computed from the log likelihood.
#
# `az.loo` warns if some data are influential (Pareto k is large). Here the share of such bottles is printed
# instead.


# %%
def reff(data: Any) -> float:
    """Independent draws that the log likelihood is worth, per draw."""
    terms = ps.dataset(data, "log_likelihood")["x"]
    if terms.sizes["chain"] == 1:  # a guide's draws are independent
        return 1.0
    ess = float(az.ess(terms.to_dataset())["x"].mean())
    return min(1.0, ess / (terms.sizes["chain"] * terms.sizes["draw"]))


def loo(data: Any, reff: float | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        return az.loo(data, pointwise=True, reff=reff)


def elpd(result: Any) -> float:
    return float(
        result.elpd if hasattr(result, "elpd") else result.elpd_loo
    )  # ArviZ 1.x, and before


pyro.set_rng_seed(1)
two = ps.from_pyro(runs[2], symmetry=symmetry, **request)
of_guide = ps.from_pyro_svi(
    guides[3], args=(x,), num_samples=CHAINS * DRAWS, **request | {"posterior_predictive": None}
)
results = {
    name: loo(data, reff(data))
    for name, data in {
        "chains, K = 2": two,
        "chains, K = 3": idata,
        "guide, K = 3": of_guide,
    }.items()
}
raw_reff = float(raw["ess_bulk"].mean()) / (CHAINS * DRAWS)
print(
    f"relative efficiency of the chains, K = 3: "
    f"raw parameters {raw_reff:.3f}, data {reff(idata):.3f}"
)
print(
    f"elpd of these by default {elpd(loo(idata)):.2f}, "
    f"with reff {elpd(results['chains, K = 3']):.2f}\n"
)
print(f"{'':<16}{'elpd':>9}{'se':>7}{'Pareto k > 0.7':>16}")
for name, result in results.items():
    influential = float((result.pareto_k > 0.7).mean())
    print(f"{name:<16}{elpd(result):>9.2f}{float(result.se):>7.2f}{influential:>16.1%}")

# %% [markdown]
# `az.compare` lists the best model first, then the difference of each to the best (`elpd_diff`, negative and
# rounded with ArviZ 1.x). Compare a difference with its own standard error, `dse`, not with the `se` of each
# model.

# %%
comparison = az.compare(results)
print(comparison[["rank", "elpd_diff", "dse"]].astype(float).round(2).to_string())

# %% [markdown]
# The row of the guide describes the guide's predictions, not those of the posterior. It is close to the
# chains with as many components, so the guide predicts as well as they do. (The export holds `log_p` and
# `log_q` at each draw of a guide; `az.loo_approximate_posterior` of ArviZ 1.x uses them to correct for the
# difference.)
#
# Three components predict a bottle better than two, by more than twice the standard error of the difference.
#
# ## A posterior predictive check
# `posterior_predictive` holds one data set per draw, and every statistic of the data can be computed for
# these, too. Labels don't matter here. Within a component, flavanoids and proline are independent in the
# model, so it might well get the correlation over all bottles wrong.


# %%
def correlation(values: np.ndarray) -> np.ndarray:
    """Of the two features, over bottles."""
    centred = values - values.mean(-2, keepdims=True)
    first, second = centred[..., 0], centred[..., 1]
    return (first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1))


observed = ps.dataset(idata, "observed_data")["x"].values
replicated = {
    K: ps.dataset(data, "posterior_predictive")["x"].values.reshape(-1, *observed.shape)
    for K, data in {2: two, 3: idata}.items()
}
p_values = {
    K: float((correlation(sets) >= correlation(observed)).mean()) for K, sets in replicated.items()
}
for K, p in p_values.items():
    middle = np.median(correlation(replicated[K]))
    print(
        f"K = {K}: correlation {correlation(observed):.2f} in the data, "
        f"{middle:.2f} in replicated data"
    )
    print(f"       share of replicated data sets with a larger one: {p:.3f}")

# %% [markdown]
# Neither model fails. A check only tests what it looks at: two components predict worse in the comparison
# above, and still get this statistic right.

# %%
figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for column, feature in enumerate(features):
    panel = panels[column]
    edges = np.linspace(observed[:, column].min() - 0.5, observed[:, column].max() + 0.5, 22)
    counts = np.array([np.histogram(one[:, column], edges)[0] for one in replicated[3]])
    low, middle, high = np.quantile(counts, (0.05, 0.5, 0.95), axis=0)
    panel.stairs(
        high, edges, baseline=low, fill=True, color="#56B4E9", alpha=0.5, label="replicated, 90 %"
    )
    panel.stairs(middle, edges, color="#0072B2", label="replicated, median")
    panel.stairs(np.histogram(observed[:, column], edges)[0], edges, color="k", label="data")
    panel.set(xlabel=f"{feature} (standardised)", ylabel="bottles")
panels[1].legend(fontsize=8)
for K, colour in ((2, "#E69F00"), (3, "#0072B2")):
    label = f"replicated, K = {K}"
    panels[2].hist(
        correlation(replicated[K]), 30, density=True, histtype="step", color=colour, label=label
    )
panels[2].axvline(correlation(observed), color="k", label="data")
panels[2].set(xlabel="correlation of flavanoids and proline", ylabel="density")
panels[2].set_ylim(top=1.3 * panels[2].get_ylim()[1])
panels[2].legend(fontsize=8, loc="upper left")
figure.savefig(OUT / "predictive.png", dpi=150)

# %% [markdown]
# ## The report
# `diagnostics.report` shows all of this in one place.

# %%
report = diagnostics.report(idata, symmetry=symmetry)
print(report)

# %% [markdown]
# Line by line:
#
# * **Convergence.** The worst coordinate of each variable, raw | aligned. Sites have a large R-hat raw and
#   one near 1 aligned: the chains differ only by their labels. Functions have the same R-hat on both sides.
# * **Temperatures.** The chains should run at 1; `!` marks a mean outside its band. At 99 % one line in a
#   hundred is marked by chance; look first at the line for all sites.
# * **Relabelling.** The share of draws that were moved, and the number of distinct elements that did it;
#   `switches` counts changes between successive draws of one chain. There are none: chains keep their labels.
# * **Confidence.** Of each draw's labels against the best other ones. If it is low for more than 1 % of the
#   draws `from_pyro` warns.
# * **Distance.** From the draws to the nearest copy of the mode, and from the mode to its own nearest copy
#   (`mode_to_copy`). Labels are clear where the first is much less than the second.
#
# ## Files
# `to_netcdf` writes everything, the element of each draw and its confidence included. Name the
# engine, so that the file is written and read by the same one.


# %%
def same_draws(data: Any) -> bool:
    """Whether draws, aligned draws and log likelihoods equal those of the export above."""
    return all(
        np.array_equal(ps.dataset(data, group)[name].values, values.values)
        for group in ("posterior", "posterior_aligned", "log_likelihood")
        for name, values in ps.dataset(idata, group).data_vars.items()
    )


idata.to_netcdf(FILE, engine="h5netcdf")
same_file = same_draws(az.from_netcdf(FILE, engine="h5netcdf"))
print(f"read from {FILE} the same draws: {same_file}")

# %% [markdown]
# A store is for long runs. Draws go to disk in blocks as they are made, and with `resume=True` a run that
# crashed continues where it stopped. A finished run is only read, as another process would read it. Seed and
# starting values don't matter then; model, data and settings must be the same, which is checked. `from_pyro`
# exports it like any other run.

# %%
reopened = sampler(3, guides[3], store=STORE, resume=True)
reopened.run(x)
stored = ps.from_pyro(reopened, symmetry=symmetry, **request | {"posterior_predictive": None})
same_store = same_draws(stored)
print(f"read from {STORE} the same draws: {same_store}")

# %% [markdown]
# ## What this shows

# %%
worse = elpd(results["chains, K = 3"]) - elpd(results["chains, K = 2"])
error = float(comparison["dse"]["chains, K = 2"])
kinetic = report.temperatures.loc["all sites", "kinetic"]
distance = report.distance.loc["distance"]
assert raw["r_hat"].max() > 1.3 and raw["ess_bulk"].min() < 20, (
    "raw draws: the chains disagree about labels"
)
assert aligned["r_hat"].max() < 1.1, "aligned draws: they agree about everything else"
assert aligned["ess_bulk"].min() > 4 * raw["ess_bulk"].max(), "and are worth many more draws"
assert shuffled_r_hat < 1.05, "labels at random in every draw: R-hat sees nothing"
assert shuffled_sd > 3 * aligned_sd, "and the standard deviations are of the labels"
assert apart < 1e-10, "functions that ignore labels are the same in both groups"
assert table["r_hat"].max() < 1.1, "and the chains agree about them"
assert float(table["mean"]["largest_share"]) > of_means, (
    "the mean of a maximum, the maximum of means"
)
assert raw_reff < 0.2 * reff(idata), "the efficiency that LOO needs isn't that of raw parameters"
assert worse > 2 * error, "three components predict better than two"
gap = abs(elpd(results["guide, K = 3"]) - elpd(results["chains, K = 3"]))
assert gap < 0.2 * worse, "the guide predicts as the chains do"
assert all(0.05 < p < 0.95 for p in p_values.values()), (
    "the correlation is no surprise to either model"
)
assert abs(kinetic - 1) < 0.1, "the chains run at their temperature"
assert report.relabelling["switches"].sum() == 0, "chains keep their labels"
assert distance["median"] < distance["mode_to_copy"] / 3, (
    "draws are nearer to a copy than copies are"
)
assert same_file and same_store, "files and stores give the draws back"
print("all claims hold")
