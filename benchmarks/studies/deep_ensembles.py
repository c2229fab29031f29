r"""Deep ensembles at T = 0 against the same runs at T = 1: which comes closer to the posterior?

After Duffield et al. 2024 (arXiv 2406.00104, section 4): the members of a deep ensemble are independent runs
of SGD with momentum, which is a sampler at temperature 0; with the noise of temperature 1 the same runs are
draws of the posterior, but for the error of their step size and of their minibatches. So with more members
the error of the second should fall like :math:`1 / \sqrt{\text{members}}` to that small remainder, and that
of the first should not.

Both are made by ``pyro_sym.deep_ensemble``, with one number changed, from draws of the prior. The truth is
Metropolised HMC, whose only error is that of its number of draws, from many chains side by side; Pyro's NUTS
checks it on the first problem (on the second its trees are too deep for its speed). What is compared is the
predictive *function* at test inputs, which symmetries of the parameters leave alone: the probability of
diabetes under a logistic regression (Pima Indians, eight features, 600 rows to train, minibatches of 100),
and the curve of a small tanh network (one input, 20 rows in two clusters, all of them in each step). Errors
of the posterior mean are in posterior sd, and errors of the sd are relative; both are root mean squares over
test inputs. Ensembles of M members are disjoint groups of one large run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide.initialization import init_to_sample
from torch import Tensor

import pyro_sym as ps
from benchmarks._models import pima_table
from benchmarks.studies._study import Results, Size, Table, mean_and_error
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import Potential

TITLE = "Deep ensembles at temperatures 0 and 1"

UNITS, NOISE, MOMENTUM = 5, 0.5, 0.9
SIZES: dict[Size, dict[str, Any]] = {
    "smoke": {
        "members": [4, 16, 64],
        "total": 128,
        "scale": 0.2,
        "chains": 64,
        "thinning": 2,
        "nuts": (50, 50),
    },
    "full": {
        "members": [4, 16, 64, 256, 1024],
        "total": 2_048,
        "scale": 1.0,
        "chains": 512,
        "thinning": 10,
        "nuts": (200, 1_000),
    },
}
DRAWS, WARMUP = 20, 10  # of each chain of HMC, after thinning

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model with its data, and the function that is predicted.

    Attributes:
        model: takes inputs, targets and the size of a minibatch.
        train: inputs and targets.
        test: the same, held out.
        batch: rows of a minibatch, or None for all of them.
        function: predicted values at inputs, of draws, ``(draws, rows)``.
        log_prob: log probability of targets, given the function's values.
        rates: learning rates, and steps at each.
        hmc: step size, and steps of a trajectory.
    """

    model: Callable[..., None]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    batch: int | None
    function: Callable[[Values, Tensor], Tensor]
    log_prob: Callable[[Tensor, Tensor], Tensor]
    rates: Mapping[float, int]
    hmc: tuple[float, int]


def pima() -> Problem:
    """Logistic regression, all features standardised."""
    table = pima_table()
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    x, y = table[:, :-1], table[:, -1]
    x = (x - x[:600].mean(0)) / x[:600].std(0)

    def model(x: Tensor, y: Tensor, batch: int | None = None) -> None:
        weights = pyro.sample("weights", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
        intercept = pyro.sample("intercept", dist.Normal(0.0, 1.0))
        with pyro.plate("patients", len(x), subsample_size=batch) as rows:
            logits = (x[rows] * weights).sum(-1) + intercept
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y[rows])

    def function(values: Values, x: Tensor) -> Tensor:
        return (values["weights"] @ x.T + values["intercept"].unsqueeze(-1)).sigmoid()

    def log_prob(probs: Tensor, y: Tensor) -> Tensor:
        return dist.Bernoulli(probs=probs).log_prob(y)

    train, test = (x[:600], y[:600]), (x[600:], y[600:])
    return Problem(model, train, test, 100, function, log_prob, {0.1: 500, 0.01: 1_500}, (0.06, 8))


def curve() -> Problem:
    """A network with one hidden layer of tanh units on data with a gap."""
    generator = torch.Generator().manual_seed(0)

    def observed(x: Tensor) -> Tensor:
        return (3 * x).sin() + NOISE * torch.randn(x.shape, generator=generator)

    x = torch.cat([torch.linspace(-1.5, -0.5, 10), torch.linspace(0.4, 1.3, 10)])
    x_test = torch.linspace(-1.8, 1.8, 600)

    def model(x: Tensor, y: Tensor, batch: int | None = None) -> None:
        scales = {"w1": 2.0, "b1": 1.0, "w2": 1.0}
        w = {
            name: pyro.sample(name, dist.Normal(0.0, s).expand([UNITS]).to_event(1))
            for name, s in scales.items()
        }
        b2 = pyro.sample("b2", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x), subsample_size=batch) as rows:
            loc = ((x[rows].unsqueeze(-1) * w["w1"] + w["b1"]).tanh() * w["w2"]).sum(-1) + b2
            pyro.sample("y", dist.Normal(loc, NOISE), obs=y[rows])

    def function(values: Values, x: Tensor) -> Tensor:
        hidden = (x.unsqueeze(-1) * values["w1"].unsqueeze(-2) + values["b1"].unsqueeze(-2)).tanh()
        return (hidden @ values["w2"].unsqueeze(-1)).squeeze(-1) + values["b2"].unsqueeze(-1)

    def log_prob(loc: Tensor, y: Tensor) -> Tensor:
        return dist.Normal(loc, NOISE).log_prob(y)

    train, test = (x, observed(x)), (x_test, observed(x_test))
    return Problem(model, train, test, None, function, log_prob, {0.02: 2_000, 0.005: 4_000}, (0.06, 25))


PROBLEMS: dict[str, Callable[[], Problem]] = {"Pima, logistic regression": pima, "a tanh network": curve}


def hmc(problem: Problem, chains: int, thinning: int) -> tuple[Tensor, float]:
    """The function's values at the test inputs, ``(chains, draws, rows)``, and the share accepted."""
    potential = Potential(problem.model, problem.train)
    gradient = Gradient(potential)
    longest, steps = problem.hmc
    pyro.set_rng_seed(0)
    position = torch.randn(chains, sum(potential.sizes.values()))
    energy, slope = gradient(position, Minibatch())
    kept, accepted = [], 0.0
    for iteration in range((WARMUP + DRAWS) * thinning):
        step = longest * (0.5 + 0.5 * torch.rand(()))  # so that no trajectory is periodic
        momentum = torch.randn_like(position)
        before = energy + momentum.square().sum(-1) / 2
        new, new_slope = position, slope
        for _ in range(steps):
            momentum = momentum - step / 2 * new_slope
            new = new + step * momentum
            new_energy, new_slope = gradient(new, Minibatch())
            momentum = momentum - step / 2 * new_slope
        log_ratio = before - new_energy - momentum.square().sum(-1) / 2
        accept = torch.rand(chains).log() < log_ratio
        position = torch.where(accept.unsqueeze(-1), new, position)
        energy, slope = (
            torch.where(accept, new_energy, energy),
            torch.where(accept.unsqueeze(-1), new_slope, slope),
        )
        if iteration >= WARMUP * thinning:
            accepted += float(accept.float().mean()) / (DRAWS * thinning)
            if (iteration + 1) % thinning == 0:
                kept.append(
                    problem.function(potential.constrain(potential.unflatten(position)), problem.test[0])
                )
    return torch.stack(kept, 1), accepted


def nuts(problem: Problem, warmup: int, draws: int) -> Tensor:
    """The function's values at the test inputs by Pyro's NUTS, ``(draws, rows)``."""
    pyro.set_rng_seed(0)
    kernel = NUTS(problem.model, jit_compile=True, ignore_jit_warnings=True)
    mcmc = MCMC(kernel, num_samples=draws, warmup_steps=warmup, disable_progbar=True)
    mcmc.run(*problem.train)
    return problem.function(mcmc.get_samples(), problem.test[0])


def r_hat(values: Tensor) -> float:
    """The largest R-hat over test inputs."""
    from pyro.ops.stats import split_gelman_rubin

    return float(split_gelman_rubin(values, chain_dim=0, sample_dim=1).max())


def rms(values: Tensor) -> float:
    """Root mean square."""
    return float(values.double().square().mean().sqrt())


def score(problem: Problem, values: Tensor, truth: Tensor) -> dict[str, float]:
    """Errors of an ensemble's mean and sd, and its held-out log predictive density per row."""
    mean, sd = truth.mean(0), truth.std(0)
    log_probs = problem.log_prob(values, problem.test[1])
    return {
        "mean": rms((values.mean(0) - mean) / sd),
        "sd": rms(values.std(0) / sd - 1),
        "lpd": float((log_probs.logsumexp(0) - math.log(len(values))).mean()),
    }


def run(size: Size) -> Results:
    """Reference, and ensembles of every temperature and learning rate, in groups of every size."""
    sizes = SIZES[size]
    results: Results = {"sizes": sizes, "problems": {}}
    for name, make in PROBLEMS.items():
        problem = make()
        start = time.process_time()
        chains, accepted = hmc(problem, sizes["chains"], sizes["thinning"])
        truth = chains.flatten(0, 1)
        halves = [half.flatten(0, 1) for half in chains.chunk(2)]
        found: dict[str, Any] = {
            "reference": {
                "seconds": time.process_time() - start,
                "accepted": accepted,
                "r_hat": r_hat(chains),
                # the whole has half the error of the difference of its halves
                "mean": rms((halves[0].mean(0) - halves[1].mean(0)) / truth.std(0)) / 2,
                "sd": rms((halves[0].std(0) - halves[1].std(0)) / truth.std(0)) / 2,
                "lpd": score(problem, truth, truth)["lpd"],
            },
            "ensembles": [],
        }
        if problem.batch is not None:
            found["nuts"] = score(problem, nuts(problem, *sizes["nuts"]), truth)
        print(f"  {name}: HMC {found['reference']}, NUTS {found.get('nuts')}", flush=True)
        for rate, steps in problem.rates.items():
            for temperature in (0.0, 1.0):
                pyro.set_rng_seed(1)
                start = time.process_time()
                ensemble = ps.deep_ensemble(
                    problem.model,
                    *problem.train,
                    num_members=sizes["total"],
                    num_steps=round(sizes["scale"] * steps),
                    lr=rate,
                    momentum=MOMENTUM,
                    num_data=len(problem.train[0]),
                    temperature=temperature,
                    init_strategy=init_to_sample,
                    model_kwargs={"batch": problem.batch},
                )
                values = problem.function(ensemble.get_samples(), problem.test[0])
                seconds = time.process_time() - start
                for members in sizes["members"]:
                    groups = [score(problem, group, truth) for group in values.split(members)]
                    found["ensembles"].append(
                        {
                            "rate": rate,
                            "temperature": temperature,
                            "members": members,
                            "seconds": seconds,
                            **{key: [group[key] for group in groups] for key in groups[0]},
                        }
                    )
                shown = {key: round(value, 3) for key, value in groups[-1].items()}
                print(f"    lr {rate}  T = {temperature:.0f}  {seconds:5.1f} s  {shown}", flush=True)
        results["problems"][name] = found
    return results


COLOURS = {0.0: "#0072B2", 1.0: "#D55E00"}


def of(found: Results, temperature: float, rate: float) -> list[dict[str, Any]]:
    """The ensembles of one temperature and learning rate, by number of members."""
    return [e for e in found["ensembles"] if (e["temperature"], e["rate"]) == (temperature, rate)]


def better(ensemble: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the error of the mean is smaller, by two standard errors and more."""
    (first, own), (second, others) = (
        (np.mean(e["mean"]), np.var(e["mean"], ddof=1) / len(e["mean"])) for e in (ensemble, other)
    )
    return bool(second - first > 2 * math.sqrt(own + others))


def findings(results: Results) -> list[str]:
    """What the numbers say."""
    said = []
    for name, found in results["problems"].items():
        rate, reference = min(e["rate"] for e in found["ensembles"]), found["reference"]
        cold, warm = (of(found, temperature, rate) for temperature in (0.0, 1.0))
        first, last = warm[0]["members"], warm[-1]["members"]
        ideal = math.sqrt(last / first)
        errors = {
            (t, key, end): float(np.mean(e[end][key]))
            for t, e in ((0, cold), (1, warm))
            for key in ("mean", "sd")
            for end in (0, -1)
        }
        falls = {key: errors[1, key, 0] / errors[1, key, -1] for key in ("mean", "sd")}
        limit = "nearly as 1 / sqrt(members)" if min(falls.values()) > 0.5 * ideal else "to a remainder"
        said.append(
            f"{name}, at T = 1 with learning rate {rate:g}: from {first} to {last} members the error of the "
            f"sd falls from {errors[1, 'sd', 0]:.2f} to {errors[1, 'sd', -1]:.3f}, and that of the mean from "
            f"{errors[1, 'mean', 0]:.2f} to {errors[1, 'mean', -1]:.3f} posterior sd, {limit}; the reference "
            f"itself is uncertain by {reference['sd']:.3f} and {reference['mean']:.3f}."
        )
        large = max(e["rate"] for e in found["ensembles"])
        coarse = float(np.mean(of(found, 1.0, large)[-1]["sd"]))
        said.append(
            f"{name}, at T = 1 with the larger learning rate {large:g}: the error of the sd is "
            f"{coarse:.3f} with "
            f"{last} members, "
            + (
                "which is the bias of the steps, and no number of members mends it."
                if coarse > 2 * errors[1, "sd", -1]
                else "not much more, so that the bias of the steps is not seen yet."
            )
        )
        fewer = [str(e["members"]) for e, other in zip(cold, warm, strict=True) if better(e, other)]
        stays = errors[0, "sd", -1] > 0.5 * errors[0, "sd", 0]
        said.append(
            f"{name}, at T = 0: the error of the sd is {errors[0, 'sd', 0]:.2f} with {first} members and "
            f"{errors[0, 'sd', -1]:.2f} with {last}, "
            + ("so that more members do not help" if stays else "so that it falls as well")
            + f"; that of the mean ends at {errors[0, 'mean', -1]:.3f} posterior sd, and is smaller than at "
            + f"T = 1 by more than noise for {' and '.join(fewer) or 'no number of'} members."
        )
        start, density = (
            {t: float(np.mean(e[end]["lpd"])) for t, e in ((0, cold), (1, warm))} for end in (0, -1)
        )
        said.append(
            f"{name}: with {last} members the held-out log predictive density is {density[0]:.4f} nats a row "
            f"at T = 0, {density[1]:.4f} at T = 1 and {reference['lpd']:.4f} by the reference: "
            + (
                "a difference too small to choose by."
                if abs(density[0] - density[1]) < 0.005
                else f"better at T = {0 if density[0] > density[1] else 1}."
            )
            + f" With {first} it is {start[0]:.4f} and {start[1]:.4f}."
        )
        if "nuts" in found:
            said.append(
                f"{name}: NUTS agrees with the reference to {found['nuts']['mean']:.3f} posterior sd in the "
                f"mean and {found['nuts']['sd']:.3f} in the sd."
            )
    return said


def tables(results: Results) -> list[Table]:
    """Errors and predictive density by number of members; one table a problem."""
    made = []
    for name, found in results["problems"].items():
        rows = [
            [
                f"T = {e['temperature']:.0f}, learning rate {e['rate']:g}",
                str(e["members"]),
                mean_and_error(e["mean"]),
                mean_and_error(e["sd"]),
                mean_and_error(e["lpd"], 4),
            ]
            for e in found["ensembles"]
        ]
        reference, total = found["reference"], results["sizes"]["total"]
        draws = results["sizes"]["chains"] * DRAWS
        rows.append(
            [
                "HMC, its own uncertainty",
                str(draws),
                f"{reference['mean']:.3f}",
                f"{reference['sd']:.3f}",
                f"{reference['lpd']:.4f}",
            ]
        )
        made.append(
            Table(
                f"{name}: root mean square error over test inputs, mean ± standard error over the disjoint "
                f"groups of one run of {total} members (with two groups or less a rough one). HMC accepts "
                f"{100 * reference['accepted']:.0f} %, largest R-hat {reference['r_hat']:.3f}.",
                ("ensemble", "members", "error of mean, sd", "relative error of sd", "LPD, nats a row"),
                rows,
            )
        )
    return made


def figure(results: Results) -> Figure:
    """Errors of mean and sd against the number of members."""
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, (name, found) in enumerate(results["problems"].items()):
        for row, (key, label) in enumerate(
            (("mean", "error of mean,\nposterior sd"), ("sd", "relative error\nof sd"))
        ):
            panel = panels[row, column]
            rates = sorted({e["rate"] for e in found["ensembles"]})
            for temperature in (0.0, 1.0):
                for rate, style in zip(rates, ("-o", "--^"), strict=True):
                    ensembles = of(found, temperature, rate)
                    panel.errorbar(
                        [e["members"] for e in ensembles],
                        [np.mean(e[key]) for e in ensembles],
                        [np.std(e[key]) / math.sqrt(max(1, len(e[key]) - 1)) for e in ensembles],
                        fmt=style,
                        color=COLOURS[temperature],
                        markersize=5,
                        label=f"T = {temperature:.0f}, lr {rate:g}",
                    )
            members = np.array([e["members"] for e in ensembles])
            panel.plot(
                members, np.mean(of(found, 1.0, rates[0])[0][key]) * (members / members[0]) ** -0.5, ":k"
            )
            panel.axhspan(0, found["reference"][key], color="0.85", zorder=0)
            panel.set(xscale="log", yscale="log")
            panel.set_xticks(members, [str(m) for m in members])
            panel.minorticks_off()
            if column == 0:
                panel.set_ylabel(label)
            if row == 0:
                panel.set_title(name, fontsize=11)
            else:
                panel.set_xlabel("members")
        panels[1, column].legend(fontsize=9)
    panels[0, 0].text(
        0.03, 0.12, "dotted: 1/√members; grey: reference's own", transform=panels[0, 0].transAxes, fontsize=9
    )
    return figure
