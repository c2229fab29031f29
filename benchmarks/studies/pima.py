r"""Do the SG-MCMC samplers of three libraries give the posterior of a logistic regression?

After the Pima experiment of Duffield et al. (2024, arXiv 2406.00104): 768 rows, 8 standardised columns, no
intercept, weights with the prior $N(0, 1)$. Every sampler has the same dynamics in physical terms. In the
units of posteriors, whose log posterior is divided by the number of rows $N$, that is a step size
$\varepsilon$, a friction $\alpha = 1$ and the temperature $1 / N$; for the undivided posterior at $T = 1$ it
is $h = \varepsilon / \sqrt N$ and $\gamma = \alpha \sqrt N$. A chain takes 1,000 steps of warm-up and 10,000
more, every fifth of which is a draw.

The paper's $\varepsilon$ is 0.01, with which a chain needs some 1,600 steps to forget where it was. Here it
is 0.1, at which minibatches of 32 show, and 0.5 on full data, at which the schemes can be told apart: those
of BlackJAX and posteriors are the same explicit Euler scheme, so that at 0.5 BlackJAX stands for both. The
parallel run has the paper's 0.01: 500 chains of 4,000 steps, of which the last is the draw.

Other changes from the paper: all chains start at the mode, at rest (the default momenta of posteriors are
$\sqrt N$ too large; ours start with their own law); BlackJAX's integrator is used with its momentum carried
on and a new minibatch each step, where `blackjax.sghmc` keeps one minibatch between two momenta; posteriors
gets a log posterior written by hand, which is faster than a Pyro model. CPU time is without compiling, for
BlackJAX and ours.

Means and standard deviations are compared with those of the posterior by importance sampling from its Laplace
approximation. The kernel Stein discrepancy is of the posterior that the samplers target: the score of the
undivided log posterior on all rows; the kernel is the inverse multiquadric $(1 + r^2)^{-1/2}$, distances $r$
in posterior standard deviations; 500 draws of a run, evenly spaced. (The paper's own has the score of the
divided one.) Its U-statistic is 0 on average for independent draws of the posterior; draws of a chain that
moves slowly are like one another, and as far from the posterior as those of a wrong law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import arviz as az
import numpy as np
import pyro
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pyro.infer import MCMC, NUTS
from torch import Tensor

from benchmarks._models import pima_data, pima_model
from benchmarks._peers import blackjax_steps, missing, posteriors_steps
from benchmarks.studies._study import Results, Size, Table, mean_and_error
from pyro_sym import BAOA, SGHMC, VectorizedMCMC
from pyro_sym.diagnostics import kernel_stein_discrepancy, unconstrained_score

TITLE = "Pima: samplers of three libraries on a logistic regression"

ROWS, BATCH, THINNING = 768, 32, 5
PAPER, MIDDLE, LARGE = 0.01, 0.1, 0.5  # step sizes in the units of posteriors, at friction 1
Draws = tuple[Tensor, float]
"""Draws of the weights, of shape (chains, draws, 8), and the seconds of CPU time that they took."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    seeds: int
    seeds_of_slow: int
    warmup: int
    draws: int
    nuts_warmup: int
    nuts_draws: int
    chains: int
    compiled: bool


FULL = Sizes(5, 3, warmup=200, draws=2000, nuts_warmup=200, nuts_draws=1000, chains=500, compiled=True)
SMOKE = Sizes(2, 1, warmup=20, draws=200, nuts_warmup=50, nuts_draws=100, chains=50, compiled=False)


@dataclass(frozen=True)
class Exact:
    """What is known of the posterior.

    Attributes:
        mode: its mode.
        mean: its mean.
        sd: its standard deviations.
        share: how many of the weighted draws count.
        gradient_noise: variance of the gradient by a minibatch of 32 at the mode, mean over coordinates.
    """

    mode: Tensor
    mean: Tensor
    sd: Tensor
    share: float
    gradient_noise: float


def importance_sampling(num_draws: int) -> Exact:
    """Moments of the posterior, by draws of a widened Laplace approximation, weighted."""
    x, y = (part.double() for part in pima_data())
    mode = torch.zeros(8, dtype=torch.float64)
    for _ in range(20):  # Newton's method
        p = (x @ mode).sigmoid()
        hessian = (x.T * p * (1 - p)) @ x + torch.eye(8, dtype=torch.float64)
        mode = mode - torch.linalg.solve(hessian, x.T @ (p - y) + mode)
    proposal = torch.distributions.MultivariateNormal(mode, precision_matrix=hessian / 1.2)
    draws = proposal.sample((num_draws,))
    parts = []
    for part in draws.split(10_000):
        logits = part @ x.T
        parts.append((y * logits - F.softplus(logits)).sum(-1) - 0.5 * part.square().sum(-1))
    weights = (torch.cat(parts) - proposal.log_prob(draws)).softmax(0)
    mean = weights @ draws
    sd = (weights @ (draws - mean).square()).sqrt()
    noise = ROWS**2 / BATCH * float((x * (p - y).unsqueeze(-1)).var(0).mean())
    return Exact(mode, mean, sd, float(1 / weights.square().sum() / num_draws), noise)


def nuts(seed: int, sizes: Sizes, exact: Exact) -> Draws:
    """Pyro's own, on its own potential."""
    pyro.set_rng_seed(seed)
    kernel = NUTS(pima_model(None))
    start = {"w": exact.mode.float()}
    mcmc = MCMC(kernel, sizes.nuts_draws, sizes.nuts_warmup, initial_params=start, disable_progbar=True)
    begin = time.process_time()
    mcmc.run()
    return mcmc.get_samples(group_by_chain=True)["w"], time.process_time() - begin


def ours(
    kind: type[SGHMC | BAOA], step_size: float, batch: int | None, parallel: bool = False
) -> Callable[[int, Sizes, Exact], Draws]:
    """This package's, compiled beforehand."""

    def run(seed: int, sizes: Sizes, exact: Exact) -> Draws:
        pyro.set_rng_seed(seed)
        kernel = kind(
            pima_model(batch),
            step_size=step_size / math.sqrt(ROWS),
            friction=math.sqrt(ROWS),
            jit="compile" if sizes.compiled else "auto",
        )
        chains = sizes.chains if parallel else 1
        mcmc = VectorizedMCMC(
            kernel,
            1 if parallel else sizes.draws,
            sizes.warmup,
            chains,
            4 * THINNING if parallel else THINNING,
            initial_params={"w": exact.mode.float().expand(chains, 8)},
            disable_progbar=True,
        )
        begin = time.process_time()
        mcmc.run()
        return mcmc.get_samples(group_by_chain=True)["w"], time.process_time() - begin

    return run


def of_blackjax(step_size: float, batch: int | None) -> Callable[[int, Sizes, Exact], Draws]:
    """BlackJAX's, in one compiled scan."""

    def run(seed: int, sizes: Sizes, exact: Exact) -> Draws:
        import jax
        import jax.numpy as jnp

        x, y = (jnp.asarray(part.numpy()) for part in pima_data())

        def log_likelihood(w: Any, row: Any) -> Any:
            logit = row[0] @ w
            return row[1] * logit - jax.nn.softplus(logit)

        block = math.gcd(sizes.warmup, sizes.draws)
        go_on = blackjax_steps(
            lambda w: -0.5 * w @ w,
            log_likelihood,
            jnp.asarray(exact.mode.float().numpy()),
            x,
            y,
            batch=batch,
            step_size=step_size / math.sqrt(ROWS),
            friction=math.sqrt(ROWS),
            thinning=THINNING,
            draws=block,
            seed=seed,
        )
        go_on()  # compiles
        begin = time.process_time()
        kept = [np.asarray(go_on()) for _ in range((sizes.warmup + sizes.draws) // block)]
        seconds = time.process_time() - begin
        return torch.tensor(np.concatenate(kept)[sizes.warmup :]).unsqueeze(0), seconds

    return run


def of_posteriors(step_size: float, batch: int | None) -> Callable[[int, Sizes, Exact], Draws]:
    """That of posteriors, step by step."""

    def run(seed: int, sizes: Sizes, exact: Exact) -> Draws:
        torch.manual_seed(seed)
        x, y = pima_data()

        def log_posterior(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            loss = F.binary_cross_entropy_with_logits(data[0] @ params["w"], data[1])
            return -loss - 0.5 * params["w"].square().sum() / ROWS, torch.tensor([])

        step = posteriors_steps(log_posterior, {"w": exact.mode.float()}, x, y, batch=batch, lr=step_size)
        kept = []
        begin = time.process_time()
        for _ in range(sizes.warmup + sizes.draws):
            for _ in range(THINNING):
                params = step()
            kept.append(params["w"])
        seconds = time.process_time() - begin
        return torch.stack(kept[sizes.warmup :]).unsqueeze(0), seconds

    return run


@dataclass(frozen=True)
class Contestant:
    """A row of the table: its name, and how it is run."""

    name: str
    run: Callable[[int, Sizes, Exact], Draws]
    needs: str = ""


NUTS_ROW, PARALLEL = "Pyro NUTS", "ours SGHMC, 32, parallel"
CONTESTANTS = (
    Contestant(NUTS_ROW, nuts),
    Contestant("BlackJAX SGHMC, full", of_blackjax(MIDDLE, None), "blackjax"),
    Contestant("posteriors SGHMC, full", of_posteriors(MIDDLE, None), "posteriors"),
    Contestant("ours SGHMC, full", ours(SGHMC, MIDDLE, None)),
    Contestant("BlackJAX SGHMC, 32", of_blackjax(MIDDLE, BATCH), "blackjax"),
    Contestant("posteriors SGHMC, 32", of_posteriors(MIDDLE, BATCH), "posteriors"),
    Contestant("ours SGHMC, 32", ours(SGHMC, MIDDLE, BATCH)),
    Contestant(PARALLEL, ours(SGHMC, PAPER, BATCH, parallel=True)),
    Contestant("BlackJAX SGHMC, full, ε = 0.5", of_blackjax(LARGE, None), "blackjax"),
    Contestant("ours SGHMC, full, ε = 0.5", ours(SGHMC, LARGE, None)),
    Contestant("ours BAOA, full, ε = 0.5", ours(BAOA, LARGE, None)),
)
LIBRARIES = ("BlackJAX", "posteriors", "ours")


def run(size: Size) -> Results:
    """Every sampler by several seeds."""
    sizes = FULL if size == "full" else SMOKE
    torch.manual_seed(0)
    exact = importance_sampling(200_000 if size == "full" else 20_000)
    absent = missing()
    runs: dict[str, list[dict[str, Any]]] = {}
    for contestant in CONTESTANTS:
        if contestant.needs in absent:
            continue
        if sizes.compiled and contestant.name.startswith("ours"):
            contestant.run(0, replace(sizes, warmup=20, draws=20), exact)  # compiles; kept on disk
        slow = contestant.name == NUTS_ROW or contestant.needs == "posteriors"
        seeds = sizes.seeds_of_slow if slow else sizes.seeds
        runs[contestant.name] = [measure(*contestant.run(seed, sizes, exact), exact) for seed in range(seeds)]
        seconds = [one["seconds"] for one in runs[contestant.name]]
        print(f"{contestant.name}: {np.mean(seconds):.1f} s of CPU time a run", flush=True)
    return {
        "mode": exact.mode.tolist(),
        "mean": exact.mean.tolist(),
        "sd": exact.sd.tolist(),
        "share_of_effective_draws": exact.share,
        "sd_by_heat": math.sqrt(1 + MIDDLE * exact.gradient_noise / (2 * ROWS)),
        "steps": [THINNING * sizes.warmup, THINNING * sizes.draws],
        "compiled": sizes.compiled,
        "missing": absent,
        "runs": runs,
    }


def measure(draws: Tensor, seconds: float, exact: Exact) -> dict[str, Any]:
    """What a run is judged by.

    Standard deviations are about the posterior's mean: about its own, a chain of few effective draws is too
    narrow.
    """
    w = draws.double()
    flat = w.flatten(0, 1)
    spaced = flat[torch.linspace(0, len(flat) - 1, min(500, len(flat))).round().long()]
    values, score = unconstrained_score(pima_model(None), {"w": spaced})
    discrepancy = kernel_stein_discrepancy(values, score, scale=exact.sd)
    one_each = w.shape[1] == 1  # then chains are as many independent draws
    sizes = [len(flat) if one_each else float(az.ess(w[..., i].numpy())) for i in range(8)]
    return {
        "mean_errors": ((flat.mean(0) - exact.mean) / exact.sd).tolist(),
        "sd_ratios": ((flat - exact.mean).square().mean(0).sqrt() / exact.sd).tolist(),
        "ess": min(sizes),
        "seconds": seconds,
        "ksd_squared": discrepancy.u_statistic,
        "ksd_p_value": discrepancy.p_value,
        "ksd_draws": discrepancy.num_draws,
    }


def _means(runs: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """A number of the runs, or the mean over coefficients, and its standard error over seeds."""
    values = [float(np.mean(run[name])) for run in runs]
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), error


def _spread(runs: list[dict[str, Any]]) -> str:
    """The sd ratio in words: is it 1, up to sampling error?"""
    ratio, error = _means(runs, "sd_ratios")
    figures = f"sd ratio {ratio:.3f} ± {error:.3f}"
    if not math.isfinite(error):
        return f"sd ratio {ratio:.3f}, one seed"
    if abs(ratio - 1) <= 2 * error:
        return f"as wide as the posterior within two standard errors ({figures})"
    return f"too {'wide' if ratio > 1 else 'narrow'} ({figures})"


def _in_turn(runs: dict[str, Any], rows: dict[str, str]) -> str:
    """What :func:`_spread` says of the rows that are there."""
    return "; ".join(f"{label} {_spread(runs[row])}" for label, row in rows.items() if row in runs)


def findings(results: Results) -> list[str]:
    """What the numbers say."""
    runs = results["runs"]
    nuts_mean = max(abs(np.mean([run["mean_errors"] for run in runs[NUTS_ROW]], 0)))
    sentences = [
        f"{results['share_of_effective_draws']:.0%} of the weighted draws are "
        "effective. The means of NUTS, seeds "
        f"pooled, are within {nuts_mean:.2f} posterior sd of theirs; it is {_spread(runs[NUTS_ROW])}.",
        "On full data at ε = 0.1: "
        + _in_turn(runs, {name: f"{name} SGHMC, full" for name in LIBRARIES})
        + ".",
        "On minibatches of 32 at ε = 0.1, whose gradient noise should heat to an sd ratio of "
        f"{results['sd_by_heat']:.3f}: "
        + _in_turn(runs, {name: f"{name} SGHMC, 32" for name in LIBRARIES})
        + ". "
        f"The parallel run at ε = 0.01 is {_spread(runs[PARALLEL])}.",
        "On full data at ε = 0.5: "
        + _in_turn(
            runs,
            {
                "the explicit scheme of the peers is": "BlackJAX SGHMC, full, ε = 0.5",
                "our SGHMC, whose position moves with the new momentum,": "ours SGHMC, full, ε = 0.5",
                "BAOA": "ours BAOA, full, ε = 0.5",
            },
        )
        + ".",
        _speed_up(runs),
        _rates(runs),
        _discrepancies(runs),
    ]
    if results["missing"]:
        sentences.append(f"Left out, as not installed: {', '.join(results['missing'])}.")
    if len(runs["ours SGHMC, full"]) < 5:
        sentences.append("A smoke run: chains are too short and seeds too few for any of this to count.")
    return sentences


def _speed_up(runs: dict[str, Any]) -> str:
    """What minibatches save."""
    factors = {
        name: _means(runs[f"{name} SGHMC, full"], "seconds")[0]
        / _means(runs[f"{name} SGHMC, 32"], "seconds")[0]
        for name in LIBRARIES
        if f"{name} SGHMC, 32" in runs
    }
    listed = ", ".join(f"{factor:.2f} ({name})" for name, factor in factors.items())
    minor = max(factors.values()) < 2
    return (
        f"Steps on all 768 rows take this many times the CPU time of steps on 32: {listed}. The paper found "
        f"minibatches to bring a minor speed-up only, which {'is so' if minor else 'does not hold for all'}."
    )


def _rates(runs: dict[str, Any]) -> str:
    """Effective draws for the time."""
    rates = {name: _means(of, "ess")[0] / _means(of, "seconds")[0] for name, of in runs.items()}
    ordered = sorted(rates, key=lambda name: -rates[name])
    return (
        "Effective draws a second of CPU time, whatever the law: "
        + ", ".join(f"{rates[name]:,.3g} ({name})" for name in ordered)
        + "."
    )


def _discrepancies(runs: dict[str, Any]) -> str:
    """Who is farther from the posterior than NUTS."""
    floor, floor_error = _means(runs[NUTS_ROW], "ksd_squared")
    far, near = [], []
    for name, of in runs.items():
        if name == NUTS_ROW:
            continue
        value, error = _means(of, "ksd_squared")
        clear = value - floor > 2 * math.hypot(error, floor_error)  # never so with one seed
        (far if clear else near).append(f"{name} ({value:.3f})")
    return (
        f"KSD² of NUTS is {floor:.4f}. Above it by more "
        f"than two standard errors: {', '.join(far) or 'none'}; "
        f"not: {', '.join(near) or 'none'}."
    )


def tables(results: Results) -> list[Table]:
    """One row a sampler."""
    rows = []
    for name, of in results["runs"].items():
        worst_mean = [max(abs(error) for error in run["mean_errors"]) for run in of]
        worst_sd = [100 * max(abs(ratio - 1) for ratio in run["sd_ratios"]) for run in of]
        rows.append(
            [
                name,
                str(len(of)),
                mean_and_error(worst_mean, 2),
                mean_and_error([float(np.mean(run["sd_ratios"])) for run in of], 3),
                mean_and_error(worst_sd, 1),
                mean_and_error([run["ess"] for run in of], 0),
                mean_and_error([run["seconds"] for run in of], 2),
                f"{np.mean([run['ess'] / run['seconds'] for run in of]):,.3g}",
                mean_and_error([run["ksd_squared"] for run in of], 4),
            ]
        )
    warmup, steps = results["steps"]
    caption = (
        "Marginals against the posterior's: the largest error of a mean in posterior sd; "
        "the ratio of sd about the "
        "posterior's mean, mean over coefficients, and how far the worst is from 1. Chains of "
        f"{steps:,} steps after {warmup:,}, ε = 0.1 unless said. Means over seeds "
        "± standard errors; the least "
        "effective sample size; CPU seconds on one thread, compilation left out."
    )
    header = [
        "sampler",
        "seeds",
        "mean off by",
        "sd ratio",
        "worst off by %",
        "ESS",
        "CPU s",
        "ESS / s",
        "KSD²",
    ]
    return [Table(caption, header, rows)]


def figure(results: Results) -> Figure:
    """Errors of the marginals, a dot a coefficient, and the discrepancy with its error."""
    runs = results["runs"]
    names = list(runs)
    places = range(len(names), 0, -1)
    colours = [_COLOURS[name.split()[0]] for name in names]
    drawn = Figure(figsize=(8, 4.6), layout="constrained")
    means, sds, discrepancies = drawn.subplots(1, 3, sharey=True, width_ratios=[1, 1, 1])
    for place, name, colour in zip(places, names, colours, strict=True):
        for panel, what in ((means, "mean_errors"), (sds, "sd_ratios")):
            values = np.mean([run[what] for run in runs[name]], 0)
            panel.plot(values, [place] * len(values), "o", color=colour, alpha=0.6, markersize=5)
        value, error = _means(runs[name], "ksd_squared")
        discrepancies.barh(place, value, 0.65, color=colour, xerr=error if math.isfinite(error) else None)
    means.axvline(0, color="0.5", linewidth=1, zorder=0)
    sds.axvline(1, color="0.5", linewidth=1, zorder=0)
    discrepancies.axvline(0, color="0.5", linewidth=1)
    means.set_yticks(list(places), names, fontsize=10)
    means.set_xlabel("error of the mean\n(posterior sd)", fontsize=10)
    sds.set_xlabel("sd ratio\n(1: the posterior's)", fontsize=10)
    discrepancies.set_xlabel("KSD² ± standard error\n(0: the posterior)", fontsize=10)
    for panel in (means, sds, discrepancies):
        panel.tick_params(axis="x", labelsize=10)
        panel.grid(axis="y", linewidth=0.4, alpha=0.5)
    return drawn


_COLOURS = {"Pyro": "#555555", "BlackJAX": "#D55E00", "posteriors": "#CC79A7", "ours": "#0072B2"}
