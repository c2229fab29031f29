r"""Where averaging over a symmetry changes predictions: components that overlap, and narrow networks.

Copies of a mode that lie apart leave the fit in any one of them as it is: averaging then adds
:math:`\log |G|` to the ELBO and nothing to predictions. Gelberg et al. 2024 report better predictions too, so
here are models in which copies overlap, and the honest size of the effect. A mean-field normal guide is
trained on its own ELBO (plain), and another on that of its average over the group (symmetrised), from the
same start, with the same random numbers; both are judged by the log density that they predict for new data.
Differences are paired over data sets.

**Mixtures** of two and three normals with equal weights and standard deviation 1, their means a given
separation apart and unknown, prior N(0, 3²), 100 data. The predictive densities are exact, the guides' in
closed form and the posterior's by a grid, as is the evidence.

**Networks** :math:`f(x) = \sum_i v_i \tanh(a_i x + b_i)` of 2 to 5 units, with priors N(0, 2²) on a and b and
N(0, 1) on v, at 30 rows of a noisy :math:`\sin 2x` with the noise known. The group has the relabellings and
the flips of a unit's sign, :math:`2^h h!` elements. Predictions are by 1000 draws.

The group is averaged over exactly: a sum over relabellings of a density that factorises over units is a
permanent. All data sets are trained in one batch, on the package's permanent; the tests compare the average
with that of ``AutoSymmetrizedNormal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.studies._study import Results, Size, Table, mean_and_error
from pyro_sym.orbit.permanent import log_permanent

TITLE = "Where it matters for predictions: overlapping mixtures and narrow networks"

SEPARATIONS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
COMPONENTS = (2, 3)
WIDTHS = (2, 3, 4, 5)
NOISES = (0.2, 0.6)
DATA = {"mixture": 100, "network": 30}
PRIOR = 3.0  # standard deviation of the components' means
NET_PRIOR = (2.0, 2.0, 1.0)  # of a, b and v
GUIDES = ("plain", "symmetrised")
EQUAL_WITHIN = 2.0  # standard errors

LogJoint = Callable[[Tensor], Tensor]  # of units of shape (draws, fits, units, coordinates)


def log_q(units: Tensor, loc: Tensor, scale: Tensor, *, average: bool, signs: bool) -> Tensor:
    """Of draws of shape (draws, fits, units, coordinates), of the guide or of its average over the group."""
    if not average:
        return dist.Normal(loc, scale).log_prob(units).sum((-1, -2))
    slots = dist.Normal(loc.unsqueeze(-2), scale.unsqueeze(-2))
    pairs = slots.log_prob(units.unsqueeze(-3)).sum(-1)  # (draws, fits, slots, units)
    if signs:
        flipped = slots.log_prob(-units.unsqueeze(-3)).sum(-1)
        pairs = torch.logaddexp(pairs, flipped) - math.log(2)
    return log_permanent(pairs) - math.lgamma(units.shape[-2] + 1)


def train(
    log_joint: LogJoint, loc: Tensor, scale: float, steps: int, *, average: bool, signs: bool
) -> tuple[Tensor, Tensor]:
    """Adam on the ELBO of every fit, eight draws a step; means and scales."""
    noise = torch.Generator().manual_seed(7)
    loc, log_scale = loc.clone().requires_grad_(), torch.full_like(loc, math.log(scale)).requires_grad_()
    adam = torch.optim.Adam([loc, log_scale], 0.02, betas=(0.9, 0.99))
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, 0.02 ** (1 / steps))
    for _ in range(steps):
        adam.zero_grad()
        width = log_scale.exp()
        units = loc + width * torch.randn(8, *loc.shape, generator=noise)
        ratio = log_joint(units) - log_q(units, loc, width, average=average, signs=signs)
        (-ratio.mean(0).sum()).backward()
        adam.step()
        decay.step()
    return loc.detach(), log_scale.detach().exp()


@torch.no_grad()
def elbos(
    log_joint: LogJoint, loc: Tensor, scale: Tensor, draws: int, *, signs: bool
) -> dict[str, list[float]]:
    """The ELBO of each fit, and that of its average, by the same draws for all guides."""
    units = draws_of(loc, scale, draws)
    parts = units.split(250)
    joint = torch.cat([log_joint(part) for part in parts])
    found = {}
    for name, average in (("L", False), ("LG", True)):
        density = torch.cat([log_q(part, loc, scale, average=average, signs=signs) for part in parts])
        found[name] = (joint - density).mean(0).tolist()
    return found


def draws_of(loc: Tensor, scale: Tensor, draws: int) -> Tensor:
    """Draws of a guide, with random numbers that are the same for all."""
    return loc + scale * torch.randn(draws, *loc.shape, generator=torch.Generator().manual_seed(11))


# Mixtures


def mixture_log_joint(means: Tensor, y: Tensor) -> Tensor:
    """Of component means of shape (..., fits, components, 1) and data of shape (fits, rows)."""
    terms = dist.Normal(means, 1.0).log_prob(y.unsqueeze(-2)).logsumexp(-2) - math.log(means.shape[-2])
    return terms.sum(-1) + dist.Normal(0.0, PRIOR).log_prob(means).sum((-1, -2))


def mixture_by_grid(y: Tensor, new: Tensor, components: int, reach: float, cells: int) -> tuple[float, float]:
    """Of one data set: the log evidence, and the mean log density that the posterior predicts for new data.

    Means are on a grid of midpoints, in order, as the other orders are copies.
    """
    line = (torch.arange(cells) + 0.5) * (2 * reach / cells) - reach
    ordered = torch.tensor(list(combinations_with_replacement(range(cells), components)))
    # An ordered cell stands for n! / (m_1! m_2! ...) cells, where m of its indices are equal.
    equal = ordered.unsqueeze(-1) == ordered.unsqueeze(-2)
    repeats = equal.tril().sum(-1).prod(-1)
    copies = math.lgamma(components + 1) - repeats.log()
    density = dist.Normal(line.unsqueeze(-1), 1.0).log_prob(y).exp()  # (cells, rows)
    total = copies + dist.Normal(0.0, PRIOR).log_prob(line)[ordered].sum(-1)
    for part in range(0, len(ordered), 20_000):
        rows = slice(part, part + 20_000)
        mixed = sum(density[ordered[rows, k]] for k in range(components))
        total[rows] += (mixed / components).log().sum(-1)  # type: ignore[union-attr]
    log_evidence = float(total.logsumexp(0)) + components * math.log(2 * reach / cells)
    posterior = total.softmax(0)
    marginal = torch.zeros(cells)
    for k in range(components):
        marginal.index_add_(0, ordered[:, k], posterior / components)
    predicted = (marginal.log().unsqueeze(-1) + dist.Normal(line.unsqueeze(-1), 1.0).log_prob(new)).logsumexp(
        0
    )
    return log_evidence, float(predicted.mean())


def mixture_data(seed: int, components: int, separation: float, rows: int) -> tuple[Tensor, Tensor]:
    """Data of a mixture centred at zero, and the standard normal numbers for its start."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(components, (rows,), generator=random)
    y = (labels - (components - 1) / 2) * separation + torch.randn(rows, generator=random)
    return y, torch.randn(components, generator=random)


def mixtures(
    components: int, seeds: list[int], separations: tuple[float, ...], steps: int, draws: int
) -> Any:
    """All data sets of one number of components: a row for each separation."""
    held_out, n = 500, DATA["mixture"]
    made = [mixture_data(seed, components, s, n + held_out) for s in separations for seed in seeds]
    y = torch.stack([y for y, _ in made])
    y, new = y[:, :n], y[:, n:]
    at = (torch.arange(components) + 0.5) / components
    start = y.quantile(at, -1).T + 0.1 * torch.stack([numbers for _, numbers in made])
    log_joint = lambda means: mixture_log_joint(means, y)  # noqa: E731
    fits = {}
    for guide in GUIDES:
        loc, scale = train(
            log_joint, start.unsqueeze(-1), 0.3, steps, average=guide == "symmetrised", signs=False
        )
        spread = (1 + scale.square()).sqrt()
        predicted = dist.Normal(loc, spread).log_prob(new.unsqueeze(-2)).logsumexp(-2) - math.log(components)
        fits[guide] = elbos(log_joint, loc, scale, draws, signs=False)
        fits[guide]["held out"] = predicted.mean(-1).tolist()
    exact = [
        mixture_by_grid(y[i], new[i], components, separations[i // len(seeds)] * (components - 1) / 2 + 4, 64)
        for i in range(len(y))
    ]
    whole = {**fits, "exact": {"log evidence": [e for e, _ in exact], "held out": [p for _, p in exact]}}
    return [
        {"components": components, "separation": s, **_part(whole, i, len(seeds))}
        for i, s in enumerate(separations)
    ]


# Networks


def network_output(units: Tensor, x: Tensor) -> Tensor:
    """Of units (..., fits, h, 3) at rows of shape (fits, rows)."""
    a, b, v = units.unsqueeze(-3).unbind(-1)  # (..., fits, 1, h)
    return (v * (a * x.unsqueeze(-1) + b).tanh()).sum(-1)


def network_log_joint(units: Tensor, x: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """Of units (..., fits, h, 3), data of shape (fits, rows) and noise of shape (fits, 1)."""
    fit = dist.Normal(network_output(units, x), noise).log_prob(y).sum(-1)
    return fit + dist.Normal(0.0, torch.tensor(NET_PRIOR)).log_prob(units).sum((-1, -2))


def networks(width: int, seeds: list[int], noises: tuple[float, ...], steps: int, draws: int) -> Any:
    """All data sets at one width: a row for each noise."""
    held_out, n = 300, DATA["network"]
    x, clean, numbers = [], [], []
    for seed in seeds:
        random = torch.Generator().manual_seed(seed)
        x.append(torch.empty(n + held_out).uniform_(-2, 2, generator=random))
        clean.append(torch.randn(n + held_out, generator=random))
        numbers.append(torch.randn(width, 3, generator=random))
    noise = torch.tensor(noises).repeat_interleave(len(seeds)).unsqueeze(-1)
    rows = torch.stack(x).repeat(len(noises), 1)
    y = (2 * rows).sin() + noise * torch.stack(clean).repeat(len(noises), 1)
    start = torch.stack(numbers).repeat(len(noises), 1, 1)
    log_joint = lambda units: network_log_joint(units, rows[:, :n], y[:, :n], noise)  # noqa: E731
    fits = {}
    for guide in GUIDES:
        loc, scale = train(log_joint, start, 0.1, steps, average=guide == "symmetrised", signs=True)
        fits[guide] = elbos(log_joint, loc, scale, draws, signs=True)
        units = draws_of(loc, scale, 1000)
        logs = torch.cat(
            [
                dist.Normal(network_output(part, rows[:, n:]), noise).log_prob(y[:, n:])
                for part in units.split(100)
            ]
        )
        fits[guide]["held out"] = (logs.logsumexp(0) - math.log(len(logs))).mean(-1).tolist()
    return [{"width": width, "noise": s, **_part(fits, i, len(seeds))} for i, s in enumerate(noises)]


def _part(fits: dict[str, dict[str, list[float]]], i: int, seeds: int) -> dict[str, Any]:
    """The i-th of equal parts of every list."""
    return {
        name: {what: values[i * seeds : (i + 1) * seeds] for what, values in one.items()}
        for name, one in fits.items()
    }


def run(size: Size) -> Results:
    """Train and judge all mixtures and networks."""
    full = size == "full"
    seeds = list(range(20 if full else 4))
    results: Results = {"seeds": seeds, "mixtures": [], "networks": []}
    # Checks of arguments cost as much as the small tensors' arithmetic.
    with pyro.validation_enabled(False):
        _fill(results, full)
    return results


def _fill(results: Results, full: bool) -> None:
    seeds = results["seeds"]
    for components in COMPONENTS if full else COMPONENTS[:1]:
        separations = SEPARATIONS if full else SEPARATIONS[1::2]
        steps, draws = (600, 4000) if full else (300, 1000)
        results["mixtures"] += mixtures(components, seeds, separations, steps, draws)
        print(f"trained mixtures of {components}", flush=True)
    for width in WIDTHS if full else WIDTHS[:2]:
        steps, draws = (1000, 4000) if full else (300, 1000)
        results["networks"] += networks(width, seeds, NOISES, steps, draws)
        print(f"trained networks of {width}", flush=True)


def _difference(row: dict[str, Any], what: str = "held out") -> np.ndarray:
    """Of the symmetrised guide less the plain one, over data sets."""
    return np.subtract(row["symmetrised"][what], row["plain"][what])


def _errors(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _effect(rows: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> str:
    """Where the held-out density differs beyond its error, and by how much; where it does not."""
    beyond, within = [], []
    for row in rows:
        mean, error = _errors(_difference(row))
        if abs(mean) > EQUAL_WITHIN * error:
            beyond.append(f"{name(row)} ({1e3 * mean:+.1f} ± {1e3 * error:.1f})")
        else:
            within.append(name(row))
    texts = []
    if beyond:
        texts.append(f"it differs by more than {EQUAL_WITHIN:g} standard errors at {', '.join(beyond)}")
    if within:
        where = ", ".join(within) if len(within) < 4 else f"{len(within)} of the {len(rows)} rows"
        texts.append(f"it is zero within the error at {where}")
    return "; ".join(texts)


def findings(results: Results) -> list[str]:
    """The effect on predictions, row by row, beside that on the ELBO."""
    seeds = len(results["seeds"])
    sentences = []
    for kind, name in (
        ("mixtures", lambda row: f"{row['components']} components {row['separation']:g} apart"),
        ("networks", lambda row: f"{row['width']} units with noise {row['noise']:g}"),
    ):
        rows = results[kind]
        sentences.append(
            f"{kind.capitalize()}: held-out log density of the symmetrised guide less the plain one, in "
            f"thousandths of a nat per datum, paired over {seeds} data sets: {_effect(rows, name)}."
        )
        total = [_errors(np.subtract(row["symmetrised"]["LG"], row["plain"]["L"])) for row in rows]
        trained = [_errors(_difference(row, "LG")) for row in rows]
        sentences.append(
            f"{kind.capitalize()}: the ELBO rises by {min(m for m, _ in total):.2f} to "
            f"{max(m for m, _ in total):.2f} nats on average, of which averaging while training, not only "
            f"afterwards, brings {min(m for m, _ in trained):.2f} to {max(m for m, _ in trained):.2f}."
        )
    short = {
        guide: [
            _errors(np.subtract(row["exact"]["held out"], row[guide]["held out"]))
            for row in results["mixtures"]
        ]
        for guide in GUIDES
    }
    worst = {guide: max(one) for guide, one in short.items()}
    gap = max(
        float(np.mean(np.subtract(row["exact"]["log evidence"], row["symmetrised"]["LG"])))
        for row in results["mixtures"]
    )
    sentences.append(
        "Against the exact posterior predictive of the mixtures, the plain guide loses at most "
        f"{1e3 * worst['plain'][0]:.1f} ± {1e3 * worst['plain'][1]:.1f} thousandths of a nat per datum (mean "
        f"over data sets, the worst row), the symmetrised one {1e3 * worst['symmetrised'][0]:.1f} ± "
        f"{1e3 * worst['symmetrised'][1]:.1f}; the symmetrised ELBO misses at most {gap:.2f} nats of the log "
        "evidence."
    )
    return sentences


def tables(results: Results) -> list[Table]:
    """Mixtures and networks: what averaging changes, paired."""
    seeds = len(results["seeds"])
    errors = f"means over {seeds} data sets ± standard errors, paired"
    columns = ["ELBO, L^G − L", "of it by training", "held-out density, ×10⁻³"]

    def changes(row: dict[str, Any]) -> list[str]:
        return [
            mean_and_error(list(np.subtract(row["symmetrised"]["LG"], row["plain"]["L"])), 3),
            mean_and_error(list(_difference(row, "LG")), 3),
            mean_and_error(list(1e3 * _difference(row)), 2),
        ]

    mixture_rows = [
        [
            f"{row['components']}, {row['separation']:g} sd apart",
            *changes(row),
            mean_and_error(list(1e3 * np.subtract(row["exact"]["held out"], row["plain"]["held out"])), 2),
            mean_and_error(list(np.subtract(row["exact"]["log evidence"], row["symmetrised"]["LG"])), 3),
        ]
        for row in results["mixtures"]
    ]
    network_rows = [
        [f"{row['width']} units, noise {row['noise']:g}", *changes(row)] for row in results["networks"]
    ]
    what = "the symmetrised guide's ELBO L^G less the plain guide's L, and held-out log density per datum"
    return [
        Table(
            f"Mixtures, {DATA['mixture']} data: {what}, in nats ({errors}); then the exact posterior's "
            "held-out density less the plain guide's, and the log evidence less L^G.",
            ["components", *columns, "exact − plain, ×10⁻³", "evidence − L^G"],
            mixture_rows,
        ),
        Table(
            f"Networks, {DATA['network']} rows: {what}, in nats ({errors}).",
            ["network", *columns],
            network_rows,
        ),
    ]


def figure(results: Results) -> Figure:
    """What averaging changes in held-out density, of mixtures and networks."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours, markers = ("#0072B2", "#D55E00"), ("o", "s")
    for k, components in enumerate(sorted({row["components"] for row in results["mixtures"]})):
        rows = [row for row in results["mixtures"] if row["components"] == components]
        at = [row["separation"] for row in rows]
        exact = [
            np.mean(np.subtract(row["exact"]["held out"], row["plain"]["held out"])) * 1e3 for row in rows
        ]
        means, bars = zip(*(_errors(1e3 * _difference(row)) for row in rows), strict=True)
        style = {"color": colours[k], "marker": markers[k], "capsize": 3}
        left.errorbar(at, means, bars, label=f"symmetrised, {components} components", **style)
        left.plot(at, exact, "--", color=colours[k], label=f"exact posterior, {components}")
    left.set(xlabel="separation (standard deviations)", title="Mixtures")
    left.set_ylabel("held-out log density less plain's\n(10⁻³ nats per datum)")
    for k, noise in enumerate(sorted({row["noise"] for row in results["networks"]})):
        rows = [row for row in results["networks"] if row["noise"] == noise]
        at = [row["width"] + 0.06 * (2 * k - 1) for row in rows]
        means, bars = zip(*(_errors(1e3 * _difference(row)) for row in rows), strict=True)
        style = {"color": colours[k], "marker": markers[k], "capsize": 3, "linestyle": ""}
        right.errorbar(at, means, bars, label=f"noise {noise:g}", **style)
    right.set(xlabel="hidden units", title="Networks: symmetrised")
    right.set_xticks(sorted({row["width"] for row in results["networks"]}))
    for panel in (left, right):
        panel.axhline(0, color="0.3", linewidth=0.8)
        panel.legend(fontsize=9)
    return figure
