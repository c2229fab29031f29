r"""Is a posterior better cold?

Inference at temperature :math:`T` aims at :math:`p(\theta, D)^{1/T}`: at 1 it is the posterior, below it is
sharper, at 0 it is its mode. Duffield et al. 2024 (arXiv 2406.00104) temper a text classifier and report

1. a strong cold posterior effect for Gaussian approximations, a very mild one for SGHMC;
2. that parallel SGHMC, the last draws of several chains, is better than serial SGHMC, the draws of one;
3. that both are better than deep ensembles, which are parallel SGHMC at T = 0.

Here the same is asked of two small problems: a convolutional network on 300 of scikit-learn's digits, and a
perceptron with Gaussian noise of unknown scale on the diabetes data. What differs from the paper besides: no
Laplace approximation; priors are scaled by fan-in; each parallel ensemble has chains of its own, where the
paper bootstraps them from 35; serial and parallel take **the same number of gradients in all**, where the
paper gives one serial chain twice the epochs of one member. The training set is the same for all seeds, so
errors say how far runs differ, not data sets.

*Tempered VI.* Of Gaussians :math:`q` with independent coordinates the one closest to the target satisfies

.. math::

    T \, \mathrm{KL}\Big(q \,\Big\|\, \tfrac1{Z_T} p^{1/T}\Big)
    = T \log Z_T - \big( \mathrm{E}_q[\log p(\theta, D)] + T \, \mathrm{H}(q) \big),

so that the temperature is a factor on the entropy: ``poutine.scale(guide, scale=T)`` in Pyro. At T = 0 no
entropy is left, and the guide is a point. (For the noise scale, VI tempers the density of the scale itself
and chains that of its logarithm; beside 342 rows this is nothing.)

*SGHMC* is integrated by the BAOA splitting, with ``lr`` and ``momentum`` as of SGD. With symplectic Euler, a
momentum of .9 alone makes a kinetic temperature of 1.05 where it should be 1; with BAOA what is above the
target is the noise of minibatches. The digits are seen in batches of half the data, the diabetes data whole.

An effect is called *strong* if the best temperature below 1 takes more than a tenth off the loss at 1, *mild*
if less, and neither if it is within two standard errors of nothing. The best temperature is chosen on the
test data, which favours an effect. The convolutions have strides, and are written as matrix products of
patches, because batched ``conv2d`` with a kernel for each chain is slow on CPUs.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.optim import ClippedAdam
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import pyro_sym as ps
from benchmarks.studies._study import Results, Size, Table, mean_and_error
from pyro_sym.nn import Categorical, FanInPrior, Gaussian, Prediction

TITLE = "Cold posteriors: tempered VI, serial and parallel SGHMC"

METHODS = {
    "vi": "VI",
    "serial": "serial SGHMC",
    "thinned": "serial SGHMC, thinned",
    "parallel": "parallel SGHMC",
}
COLOURS = {"vi": "#D55E00", "serial": "#0072B2", "parallel": "#009E73"}
MARKERS = {"vi": "o", "serial": "s", "parallel": "D"}
STRONG = 0.1  # of the loss at T = 1


@dataclass(frozen=True)
class Scale:
    """How much is computed."""

    temperatures: tuple[float, ...]
    seeds: int
    members: int  # chains of a parallel ensemble
    steps: int  # of each; a serial chain takes as many as all members together
    thinning: int
    vi_steps: int
    vi_draws: int = 200


SCALES = {
    "smoke": Scale((0.0, 0.1, 1.0), seeds=2, members=3, steps=100, thinning=10, vi_steps=150),
    "full": Scale((0.0, 0.03, 0.1, 0.3, 1.0, 3.0), seeds=5, members=6, steps=700, thinning=50, vi_steps=1000),
}


@dataclass(frozen=True)
class Problem:
    """A model, its data, and how chains move on it."""

    name: str
    model: ps.BayesianModule
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    lr: float  # of SGD, for the mean loss


class Blocks(nn.Module):
    """Patches of 2 × 2 without overlap, of maps of 4 × 4, channels last: what a convolution multiplies."""

    def forward(self, maps: Tensor) -> Tensor:
        """From (rows, 4, 4, c) to (rows, 2, 2, 4 c)."""
        return maps.unflatten(1, (2, 2)).unflatten(3, (2, 2)).transpose(2, 3).flatten(3)


def digits() -> Problem:
    """Ten classes of images of 8 × 8 pixels: two convolutions with stride 2, and a linear layer."""
    data = load_digits()
    images = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    patches = F.unfold(images, 3, stride=2, padding=1).transpose(1, 2).unflatten(1, (4, 4))
    train, test = train_test_split(
        np.arange(len(images)), train_size=300, stratify=data.target, random_state=0
    )
    x, y = patches.contiguous(), torch.as_tensor(data.target)
    net = nn.Sequential(
        nn.Linear(9, 8), nn.ReLU(), Blocks(), nn.Linear(32, 16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)
    )
    prior = FanInPrior("kaiming", bias_scale=0.3)
    model = ps.BayesianModule(net, prior, Categorical(), batch_size=150)
    return Problem("digits", model, (x[train], y[train]), (x[test], y[test]), lr=0.03)


def diabetes() -> Problem:
    """Progression of a disease from ten numbers: one hidden layer of 16 tanh units."""
    data = load_diabetes()
    parts = train_test_split(data.data, data.target, test_size=100, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part, dtype=torch.float32) for part in parts)
    x, test_x = ((part - train_x.mean(0)) / train_x.std(0) for part in (train_x, test_x))
    y, test_y = ((part - train_y.mean()).unsqueeze(-1) / train_y.std() for part in (train_y, test_y))
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    model = ps.BayesianModule(net, FanInPrior("kaiming", bias_scale=0.3), Gaussian(dist.LogNormal(-0.5, 0.5)))
    return Problem("diabetes", model, (x, y), (test_x, test_y), lr=0.02)


def calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """The mean distance of confidence and accuracy over bins of confidence, weighted by their rows."""
    confidence, classes = probs.max(-1)
    excess = (classes == y).double() - confidence.double()
    which = (confidence * bins).long().clamp(max=bins - 1)
    return float(torch.zeros(bins, dtype=torch.double).index_add(0, which, excess).abs().sum() / len(y))


def coverage(prediction: Prediction, y: Tensor, probability: float = 0.9) -> float:
    """How many targets lie in the central interval of the predictive mixture."""
    below = prediction.law.cdf(y).mean(0)
    return float(((below - 0.5).abs() <= probability / 2).double().mean())


def scores(problem: Problem, draws: dict[str, Tensor]) -> dict[str, float]:
    """Held-out loss in nats a row, accuracy or root mean square error, and calibration."""
    x, y = problem.test
    prediction = problem.model.predict(draws, x)
    loss = -float(prediction.log_prob(y).mean())
    if problem.name == "digits":
        probs = prediction.probs
        accuracy = float((probs.argmax(-1) == y).double().mean())
        return {"loss": loss, "score": accuracy, "calibration": calibration_error(probs, y)}
    error = float((prediction.mean - y).square().mean().sqrt())
    return {"loss": loss, "score": error, "calibration": coverage(prediction, y)}


def variational(problem: Problem, temperature: float, scale: Scale, seed: int) -> dict[str, float]:
    """Fit a tempered mean-field Gaussian, and score its draws."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    if temperature == 0:
        guide: Any = AutoDelta(problem.model, init_loc_fn=init_to_sample)
        tempered: Any = guide
    else:
        guide = AutoNormal(problem.model, init_loc_fn=init_to_sample, init_scale=0.05)
        tempered = poutine.scale(guide, scale=temperature)
    optimiser = ClippedAdam({"lr": 0.02, "lrd": 0.02 ** (1 / scale.vi_steps)})
    svi = SVI(problem.model, tempered, optimiser, ps.RecordedELBO())
    for _ in range(scale.vi_steps):
        svi.step(*problem.train)
    with torch.no_grad():
        values = [guide(*problem.train) for _ in range(scale.vi_draws if temperature else 1)]
    sites = problem.model.sites
    return scores(problem, {name: torch.stack([value[name] for value in values]) for name in sites})


def chains(
    problem: Problem, temperature: float, scale: Scale, *, count: int, steps: int, burn_in: int
) -> ps.VectorizedMCMC:
    """Chains from draws of the prior, all at once."""
    kernel = ps.BAOA.from_sgd(
        problem.model,
        lr=problem.lr,
        momentum=0.9,
        num_data=len(problem.train[0]),
        temperature=temperature,
        init_strategy=init_to_sample,
    )
    mcmc = ps.VectorizedMCMC(
        kernel,
        num_samples=(steps - burn_in) // scale.thinning,
        warmup_steps=burn_in // scale.thinning,
        num_chains=count,
        thinning=scale.thinning,
        disable_progbar=True,
    )
    mcmc.run(*problem.train)
    return mcmc


def thermometers(mcmc: ps.VectorizedMCMC) -> dict[str, list[float]]:
    """Mean temperatures by chain."""
    stats = mcmc.diagnostics()["sample_stats"].values()
    return {
        name: [float(own[f"{name}_temperature"].mean()) for own in stats]
        for name in ("kinetic", "configurational")
    }


def sampled(problem: Problem, temperature: float, scale: Scale) -> dict[str, list[dict[str, float]]]:
    """Serial and parallel SGHMC: for each seed a chain of many steps, and as many steps of several chains."""
    members, total = scale.members, scale.members * scale.steps
    pyro.set_rng_seed(1)
    long = chains(problem, temperature, scale, count=scale.seeds, steps=total, burn_in=scale.steps)
    pyro.set_rng_seed(2)
    short = chains(
        problem, temperature, scale, count=scale.seeds * members, steps=scale.steps, burn_in=scale.steps // 2
    )
    serial, parallel = long.get_samples(group_by_chain=True), short.get_samples(group_by_chain=True)
    count = (total - scale.steps) // scale.thinning
    few = torch.linspace(0, count - 1, members).round().long()
    found: dict[str, list[dict[str, float]]] = {"serial": [], "thinned": [], "parallel": []}
    hot, hots = thermometers(long), thermometers(short)
    for seed in range(scale.seeds):
        own = slice(seed * members, (seed + 1) * members)
        chain = {name: values[seed] for name, values in serial.items()}
        last = {name: values[own, -1] for name, values in parallel.items()}
        temperatures = {name: values[seed] for name, values in hot.items()}
        found["serial"].append(scores(problem, chain) | temperatures)
        found["thinned"].append(scores(problem, {name: v[few] for name, v in chain.items()}) | temperatures)
        found["parallel"].append(
            scores(problem, last) | {name: float(np.mean(values[own])) for name, values in hots.items()}
        )
    return found


def run(size: Size) -> Results:
    """All methods at all temperatures, on both problems."""
    scale, start = SCALES[size], time.process_time()
    results: Results = {"scale": vars(scale) | {"temperatures": list(scale.temperatures)}, "problems": {}}
    for problem in (digits(), diabetes()):
        dimension = sum(parameter.numel() for parameter in problem.model.net.parameters())
        dimension += len(problem.model.likelihood.priors)
        kept: dict[str, Any] = {method: {} for method in METHODS}
        for temperature in scale.temperatures:
            found = sampled(problem, temperature, scale)
            found["vi"] = [variational(problem, temperature, scale, seed) for seed in range(scale.seeds)]
            for method, seeds in found.items():
                kept[method][str(temperature)] = {name: [own[name] for own in seeds] for name in seeds[0]}
            losses = {method: round(float(np.mean([s["loss"] for s in v])), 4) for method, v in found.items()}
            print(
                f"{problem.name} T={temperature}: {losses} ({time.process_time() - start:.0f} s)", flush=True
            )
        results["problems"][problem.name] = {
            "parameters": dimension,
            "rows": [len(problem.train[0]), len(problem.test[0])],
            "methods": kept,
        }
    results["cpu_seconds"] = round(time.process_time() - start)
    return results


def _values(
    results: Results, problem: str, method: str, temperature: float, what: str = "loss"
) -> np.ndarray:
    """By seed."""
    return np.array(results["problems"][problem]["methods"][method][str(temperature)][what])


def _error(values: np.ndarray) -> float:
    """The standard error of their mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _best(results: Results, problem: str, method: str, below: float = math.inf) -> float:
    """The temperature of the least mean loss."""
    choice = [t for t in results["scale"]["temperatures"] if t < below]
    return min(choice, key=lambda t: _values(results, problem, method, t).mean())


def _effect(results: Results, problem: str, method: str) -> tuple[str, str]:
    """How strong the cold posterior effect is, and the numbers."""
    best, warm = _best(results, problem, method, below=1.0), _values(results, problem, method, 1.0)
    gain = warm - _values(results, problem, method, best)
    numbers = f"{warm.mean():.3f} at T = 1, {gain.mean():.3f} ± {_error(gain):.3f} less at T = {best:g}"
    if gain.mean() < -2 * _error(gain):
        numbers = f"{warm.mean():.3f} at T = 1, {-gain.mean():.3f} ± {_error(gain):.3f} more at T = {best:g}"
        return "none (colder is worse)", numbers
    if gain.mean() < 2 * _error(gain):
        return "none", numbers
    return ("strong" if gain.mean() > STRONG * abs(warm.mean()) else "mild"), numbers


def _comparison(
    results: Results, problem: str, ours: tuple[str, float], other: tuple[str, float], name: str
) -> tuple[bool, str]:
    """Whether one is better than the other, and how it compares, in words."""
    gain = _values(results, problem, *other) - _values(results, problem, *ours)
    mean, error = gain.mean(), _error(gain)
    if abs(mean) < 2 * error:
        return False, f"as good as {name} ({mean:+.3f} ± {error:.3f} nats a row)"
    return mean > 0, f"{'better' if mean > 0 else 'worse'} than {name} by {abs(mean):.3f} ± {error:.3f}"


def _verdict(holds: bool) -> str:
    return "reproduces" if holds else "does not reproduce"


def findings(results: Results) -> list[str]:
    """The paper's claims, problem by problem, and whether chains hold their temperature."""
    said, members = [], results["scale"]["members"]
    if len(results["scale"]["temperatures"]) < len(SCALES["full"].temperatures):
        said.append("This is the smoke size: no chain is near its target, and the verdicts mean nothing.")
    for name in results["problems"]:
        effects = {method: _effect(results, name, method) for method in ("vi", "serial", "parallel")}
        holds = effects["vi"][0] == "strong" and "strong" not in (
            effects["serial"][0],
            effects["parallel"][0],
        )
        told = "; ".join(f"{METHODS[m]}: {kind}, loss {numbers}" for m, (kind, numbers) in effects.items())
        said.append(
            f"{name}: a strong cold posterior effect for VI and a mild one at most for SGHMC "
            f"{_verdict(holds)}. {told}."
        )
        warm = ("parallel", 1.0)
        holds, told = _comparison(results, name, warm, ("serial", 1.0), "all draws of the long chain")
        thinned = _comparison(results, name, warm, ("thinned", 1.0), f"{members} of them")[1]
        said.append(
            f"{name}: parallel SGHMC better than serial, at T = 1 and with as many gradients, "
            f"{_verdict(holds)}. Its {members} last draws are {told}, and {thinned}."
        )
        cold = ("parallel", 0.0)
        parallel = _comparison(results, name, warm, cold, "a deep ensemble")
        serial = _comparison(results, name, ("serial", 1.0), cold, "it")
        said.append(
            f"{name}: SGHMC at T = 1 better than a deep ensemble {_verdict(parallel[0] and serial[0])}. "
            f"Parallel SGHMC is {parallel[1]}; serial SGHMC is {serial[1]}."
        )
        said.append(_heat(results, name))
    return said


def _heat(results: Results, name: str) -> str:
    """Kinetic temperatures against what momenta of the target's temperature would show."""
    scale, problem = results["scale"], results["problems"][name]
    draws = scale["seeds"] * (scale["members"] - 1) * scale["steps"] // scale["thinning"]
    told, inside = [], 0
    means = {t: _values(results, name, "serial", t, "kinetic").mean() for t in scale["temperatures"]}
    for temperature, mean in means.items():
        told.append(f"{mean:.3g} at T = {temperature:g}")
        if temperature:
            low, high = ps.kinetic_band(temperature, draws * problem["parameters"])
            inside += bool(low <= mean <= high)
    positions = _values(results, name, "serial", 1.0, "configurational").mean()
    return (
        f"{name}: the long chains' mean kinetic temperatures are {', '.join(told)}: at T = 1 off by "
        f"{means[1.0] - 1:+.1%}, with {inside} of {sum(t > 0 for t in means)} in the 99 % band of so many "
        f"draws. The positions at T = 1 have {positions:.2f}."
    )


def tables(results: Results) -> list[Table]:
    """Loss, accuracy or error, and calibration by temperature; temperatures of chains."""
    scale = results["scale"]
    temperatures, shown = scale["temperatures"], []
    header = ["", *(f"T = {temperature:g}" for temperature in temperatures)]
    errors = f"mean ± standard error of {scale['seeds']} seeds"
    for name, problem in results["problems"].items():
        train, test = problem["rows"]
        score, calibration = (
            ("Accuracy", "Expected calibration error (15 bins)")
            if name == "digits"
            else ("Root mean square error in standard deviations", "Coverage of the 90 % predictive interval")
        )
        for what, meaning in (
            ("loss", f"Negative log predictive density in nats a row, {test} test rows, {train} to train on"),
            ("score", score),
            ("calibration", calibration),
        ):
            rows = [
                [label, *(mean_and_error(_values(results, name, m, t, what).tolist()) for t in temperatures)]
                for m, label in METHODS.items()
            ]
            shown.append(Table(f"{name}: {meaning}; {errors}.", header, rows))
        rows = [
            [
                f"{what}, {m}",
                *(mean_and_error(_values(results, name, m, t, what).tolist()) for t in temperatures),
            ]
            for what in ("kinetic", "configurational")
            for m in ("serial", "parallel")
        ]
        meaning = "Temperatures of the chains, of momenta and of positions, after burn-in"
        shown.append(Table(f"{name}: {meaning}; {errors}.", header, rows))
    return shown


def figure(results: Results) -> Figure:
    """Held-out loss by temperature."""
    temperatures = results["scale"]["temperatures"]
    drawn = Figure(figsize=(8, 3.6), layout="constrained")
    panels = drawn.subplots(1, 2)
    for panel, (name, problem) in zip(panels, results["problems"].items(), strict=True):
        for shift, (method, colour) in zip((-0.06, 0.0, 0.06), COLOURS.items(), strict=True):
            values = [_values(results, name, method, t) for t in temperatures]
            panel.errorbar(
                np.arange(len(values)) + shift,
                [value.mean() for value in values],
                [_error(value) for value in values],
                color=colour,
                marker=MARKERS[method],
                markersize=5,
                capsize=3,
                linewidth=1.5,
                label=METHODS[method],
            )
        panel.axvline(temperatures.index(1.0), color="0.8", linewidth=1, zorder=0)
        panel.set_xticks(range(len(temperatures)), [f"{t:g}" for t in temperatures])
        panel.set_title(f"{name}, {problem['parameters']} parameters", fontsize=12)
        panel.set_xlabel("temperature (1: the posterior, 0: modes)", fontsize=11)
        panel.tick_params(labelsize=10.5)
    panels[0].set_ylabel("held-out loss, nats a row", fontsize=11)
    panels[0].legend(fontsize=10.5, frameon=False)
    return drawn
