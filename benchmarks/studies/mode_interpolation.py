r"""One Gaussian for two modes: when does it fall between them? After figure 3 of Gelberg et al. 2024.

The target is an equal mixture of two Gaussians of standard deviation :math:`\sigma` at a distance
:math:`\alpha`,

.. math::

    p(x) = \tfrac12 N(x; 0, \sigma^2) + \tfrac12 N(x; \alpha, \sigma^2),

and a Gaussian :math:`q = N(\mu, s^2)`, mean and log scale learnt, minimises :math:`\mathrm{KL}(q \| p)`. The
figure shows :math:`\mu^* / \alpha`: it is 1/2 up to a threshold :math:`\alpha^*`, where q covers both modes,
and 0 or 1 above, where it has settled in one. In more dimensions an axis-aligned q has the others exactly, so
one dimension, that along which the modes lie, is all there is.

Training is that of the paper, Adam at 1e-2, 3000 steps, from N(0, 1), but with 1000 draws a step in place of
5000. Three things are added. Training by quadrature of the KL, which has no noise, takes 2000 steps and can
be done at many :math:`\alpha`. A start at N(0, :math:`\sigma^2`), one component itself: there the threshold
is where that component ceases to have an optimum of its own, a fact of the objective and not of the start.
And the symmetrised Gaussian: averaged over the group that swaps the components, the reflection
:math:`x \mapsto \alpha - x`. All is written in :math:`z = x - \alpha/2`, where that is a flip of the sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.studies._study import Results, Size, Table
from pyro_sym import SignFlip
from pyro_sym.orbit.enumeration import enumerated

TITLE = "Mode interpolation: one Gaussian for two modes"

PAPER = {0.25: 1.25, 0.5: 2.5, 1.0: 5.0, 2.0: 10.0}
STARTS = ("N(0, 1)", "N(0, σ²)")
LEARNING_RATE = 1e-2
STEPS, QUADRATURE_STEPS = 3000, 2000
REFLECTION = SignFlip({"z": -1})

Draw = Callable[[], tuple[Tensor, Tensor]]  # standard normal points of shape (points, 1), and their weights


@dataclass(frozen=True)
class Target:
    """Several targets side by side, ``alpha`` and ``sigma`` of shape (targets,), in centred coordinates."""

    alpha: Tensor
    sigma: Tensor

    def log_prob(self, z: Tensor) -> Tensor:
        """Of one point for each target, the last dim: that of one component, and what the other adds."""
        one = -0.5 * ((z + self.alpha / 2) / self.sigma).square() - self.sigma.log()
        other = softplus(z * (self.alpha / self.sigma**2))
        return one + other - math.log(2) - 0.5 * math.log(2 * math.pi)


def kl(target: Target, mean: Tensor, log_scale: Tensor, draw: Draw, *, symmetrised: bool) -> Tensor:
    """KL(q | p), or of q averaged over the reflection, for each target."""
    noise, weights = draw()
    scale = log_scale.exp()
    z = mean + scale * noise
    log_q = -0.5 * noise.square() - log_scale - 0.5 * math.log(2 * math.pi)
    if symmetrised:  # the integrand is invariant, so draws of q do for those of the average
        q, column = dist.Normal(mean, scale), {"z": z.reshape(-1, 1)}
        density = lambda at: q.log_prob(at["z"].reshape(-1, *z.shape)).flatten(1)  # noqa: E731
        log_q = enumerated(REFLECTION, density, column, log_q.flatten()).reshape(z.shape)
    return ((log_q - target.log_prob(z)) * weights).sum(0)


def quadrature(points: int, reach: float = 6.0) -> Draw:
    """Equally spaced points with normal weights, as accurate as the integrand is smooth."""
    at = torch.linspace(-reach, reach, points).unsqueeze(-1)
    weights = (-0.5 * at**2).softmax(0)
    return lambda: (at, weights)


def monte_carlo(samples: int, seed: int) -> Draw:
    """New draws at every call, the same for all targets."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: (torch.randn(samples, 1, generator=generator), torch.tensor(1 / samples))


def train(
    target: Target, mean: Tensor, scale: Tensor, draw: Draw, steps: int, *, symmetrised: bool = False
) -> tuple[Tensor, Tensor]:
    """Adam from given means and scales, one q a target; the means and log scales that it ends at."""
    mean, log_scale = mean.clone().requires_grad_(), scale.log().requires_grad_()
    adam = torch.optim.Adam([mean, log_scale], LEARNING_RATE)
    for _ in range(steps):
        adam.zero_grad()
        kl(target, mean, log_scale, draw, symmetrised=symmetrised).sum().backward()
        adam.step()
    return mean.detach(), log_scale.detach()


def threshold(alphas: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Halfway between the last alpha with the mean between the modes and the first with it in one, or None.

    A mean is in a mode if it is nearer to it than to the midpoint. The alphas are in order.
    """
    interpolates = [abs(ratio - 0.5) < 0.25 for ratio in ratios]
    if all(interpolates) or not interpolates[0]:
        return None
    first = interpolates.index(False)
    return (alphas[first - 1] + alphas[first]) / 2


def crossing(x: Sequence[float], above: Sequence[float], below: Sequence[float]) -> float | None:
    """Where the first curve rises through the second, by a line between neighbours, or None."""
    gap = np.subtract(above, below)
    for i in range(1, len(gap)):
        if gap[i - 1] <= 0 < gap[i]:
            return float(x[i - 1] - gap[i - 1] * (x[i] - x[i - 1]) / (gap[i] - gap[i - 1]))
    return None


def trained(units: Sequence[float], start: str, draw: Draw, steps: int, *, symmetrised: bool = False) -> Any:
    """For each sigma, over alpha / sigma: mu / alpha and the KL, at the end of training."""
    sigma = torch.tensor(list(PAPER)).repeat_interleave(len(units))
    target = Target(sigma * torch.tensor(units).repeat(len(PAPER)), sigma)
    mean = torch.zeros_like(sigma) if start == "midpoint" else -target.alpha / 2
    scale = {
        "N(0, 1)": torch.ones_like(sigma),
        "N(0, σ²)": sigma,
        "midpoint": (sigma**2 + target.alpha**2 / 4).sqrt(),
    }[start]
    mean, log_scale = train(target, mean, scale, draw, steps, symmetrised=symmetrised)
    ratio = mean / target.alpha + 0.5
    value = kl(target, mean, log_scale, quadrature(2001), symmetrised=symmetrised)
    rows = zip(PAPER, ratio.view(len(PAPER), -1).tolist(), value.view(len(PAPER), -1).tolist(), strict=True)
    return {
        str(sigma): {"ratio": [round(r, 5) for r in ratios], "kl": [round(v, 7) for v in values]}
        for sigma, ratios, values in rows
    }


def run(size: Size) -> Results:
    """Train everything; what is kept are the means and the KLs."""
    full = size == "full"
    fine = [0.5, 1, 1.5, 2, 2.5, 3, 3.5, *np.arange(4, 7.01, 0.1 if full else 1.0).round(3).tolist(), 7.5, 8]
    coarse = [2, 4, 4.5, 4.75, 5, 5.25, 5.5, 6, 6.5, 7] if full else [4, 5, 6, 7]
    samples, seeds = (1000, [0, 1, 2]) if full else (100, [0])
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    nodes = quadrature(91)
    with pyro.validation_enabled(False):
        exact = {start: trained(fine, start, nodes, QUADRATURE_STEPS) for start in (*STARTS, "midpoint")}
        print("trained by quadrature", flush=True)
        symmetrised = {
            start: trained(fine, start, nodes, QUADRATURE_STEPS, symmetrised=True) for start in STARTS
        }
        print("trained the symmetrised", flush=True)
    torch.set_default_dtype(torch.float32)
    noisy = []
    for seed in seeds:
        noisy.append({start: trained(coarse, start, monte_carlo(samples, seed), STEPS) for start in STARTS})
        print(f"trained with {samples} draws, seed {seed}", flush=True)
    torch.set_default_dtype(dtype)
    return {
        "steps": STEPS,
        "samples": samples,
        "seeds": seeds,
        "alpha_over_sigma": {"quadrature": fine, "monte carlo": coarse},
        "quadrature": exact,
        "symmetrised": symmetrised,
        "monte carlo": noisy,
    }


def thresholds(results: Results) -> dict[str, dict[str, list[float | None]]]:
    """By sigma and by way of training, alpha* (of every seed where there are several)."""
    units = results["alpha_over_sigma"]
    found: dict[str, dict[str, list[float | None]]] = {}
    for sigma in PAPER:
        fine = [sigma * unit for unit in units["quadrature"]]
        coarse = [sigma * unit for unit in units["monte carlo"]]
        one = found[str(sigma)] = {}
        for start in STARTS:
            one[f"quadrature, {start}"] = [threshold(fine, results["quadrature"][start][str(sigma)]["ratio"])]
            one[f"draws, {start}"] = [
                threshold(coarse, seed[start][str(sigma)]["ratio"]) for seed in results["monte carlo"]
            ]
        between, inside = (
            results["quadrature"][start][str(sigma)]["kl"] for start in ("midpoint", "N(0, σ²)")
        )
        # Up to the threshold both starts end at one and the same optimum, and differ by rounding.
        last = max(i for i, (b, s) in enumerate(zip(between, inside, strict=True)) if b <= s + 1e-6)
        one["equal KL"] = [crossing(fine[last:], between[last:], [s + 1e-6 for s in inside[last:]])]
    return found


def findings(results: Results) -> list[str]:
    """Thresholds against the paper's, the two optima, and the symmetrised Gaussian."""
    found = thresholds(results)
    sentences = []
    for start, what in (
        ("N(0, σ²)", "From one component itself, N(0, σ²)"),
        ("N(0, 1)", "From N(0, 1), the paper's start"),
    ):
        texts, off = [], []
        for sigma, paper in PAPER.items():
            values = found[str(sigma)][f"draws, {start}"] + found[str(sigma)][f"quadrature, {start}"]
            known = [value for value in values if value is not None]
            few = "" if len(known) == len(values) else " or more"
            reached = f"{np.mean(known):.2f}{few}" if known else "none"
            texts.append(f"{reached} at σ = {sigma:g} (paper: {paper:g})")
            if len(known) < len(values) or max(abs(value / paper - 1) for value in known) > 0.15:
                off.append(f"σ = {sigma:g}")
        verdict = (
            f"At {', '.join(off)} that does not reproduce the paper's figure to 15 %"
            if off
            else "All are within 15 % of the paper's figures, with noise and without"
        )
        sentences.append(f"{what}, the mean leaves the midpoint at α* = {', '.join(texts)}. {verdict}.")
    units = {sigma: one["quadrature, N(0, σ²)"][0] for sigma, one in found.items()}
    per = [value / float(sigma) for sigma, value in units.items() if value is not None]
    equal = [one["equal KL"][0] / float(s) for s, one in found.items() if one["equal KL"][0] is not None]
    if per and equal:
        sentences.append(
            f"The component has an optimum of its own from α = {np.mean(per):.2f} σ on, but up to "
            f"{np.mean(equal):.2f} σ that between the modes has the lower KL: in this window what training "
            "finds depends on its start, and below it covering both modes is the only optimum."
        )
    for start in STARTS:
        sentences.append(_of_symmetrised(results, start))
    return sentences


def _of_symmetrised(results: Results, start: str) -> str:
    """How many of the symmetrised fits settled in a mode, and how good those are that did and did not."""
    rows = [
        (min(abs(ratio), abs(ratio - 1)) < 0.25, value, plain)
        for sigma, one in results["symmetrised"][start].items()
        for ratio, value, plain in zip(
            one["ratio"], one["kl"], results["quadrature"][start][sigma]["kl"], strict=True
        )
    ]
    settled = [value for in_mode, value, _ in rows if in_mode]
    text = f"From {start} the symmetrised Gaussian settles in a mode at {len(settled)} of {len(rows)} (α, σ)"
    if settled:
        text += f", with a KL of at most {max(settled):.0e} nats, as the target is in its family"
    if others := [value for in_mode, value, _ in rows if not in_mode]:
        text += f"; elsewhere it stays between the modes, a local optimum, with a KL up to {max(others):.2f}"
    worst = max(plain for *_, plain in rows)
    return f"{text}. The plain one's KL rises to {worst:.3f} (log 2 = {math.log(2):.3f})."


def tables(results: Results) -> list[Table]:
    """Thresholds; and means and KLs over the distance."""
    found = thresholds(results)
    ways = [f"{how}, {start}" for start in STARTS for how in ("draws", "quadrature")]
    rows = []
    for sigma, paper in PAPER.items():
        last = sigma * results["alpha_over_sigma"]["monte carlo"][-1]
        cells = [_spread(found[str(sigma)][way], last) for way in (*ways, "equal KL")]
        rows.append([f"{sigma:g}", f"{paper:g}", *cells])
    seeds = len(results["seeds"])
    caption = (
        f"The threshold α*, by the start of training: with {results['samples']} draws a step (mean over "
        f"{seeds} seed{'s' * (seeds > 1)}, ± half the range) and by quadrature (no noise). Last, the α at "
        "which the optimum in a mode and that between the modes have equal KL."
    )
    thresholds_table = Table(caption, ["σ", "paper", *ways, "equal KL"], rows)
    units = results["alpha_over_sigma"]["quadrature"]
    shown = [i for i, unit in enumerate(units) if unit in (1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 8.0)]
    plain, averaged = (results[key]["N(0, σ²)"]["1.0"] for key in ("quadrature", "symmetrised"))
    kl_rows = [
        [
            f"{units[i]:g}",
            *(f"{round(one[key][i], 4) + 0.0:.4f}" for one in (plain, averaged) for key in ("ratio", "kl")),
        ]
        for i in shown
    ]
    header = ["α / σ", "μ/α, plain", "KL, plain", "μ/α, symmetrised", "KL, symmetrised"]
    caption = (
        "Where a Gaussian and a symmetrised Gaussian end, and their KL to the target in nats; by quadrature, "
        "without noise (no seeds, no errors), from N(0, σ²)."
    )
    return [thresholds_table, Table(caption, header, kl_rows)]


def _spread(values: Sequence[float | None], last: float) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"above {last:g}"
    middle, half = (max(known) + min(known)) / 2, (max(known) - min(known)) / 2
    return f"{middle:.2f}" + (f" ± {half:.2f}" if len(known) > 1 else "")


def figure(results: Results) -> Figure:
    """Means over the distance, and the KL."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    units = results["alpha_over_sigma"]
    colours = dict(zip(PAPER, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True))
    markers = dict(zip(PAPER, "os^D", strict=True))
    for sigma, colour in colours.items():
        alphas = sigma * np.array(units["quadrature"])
        left.plot(alphas, results["quadrature"]["N(0, σ²)"][str(sigma)]["ratio"], color=colour)
        for seed in results["monte carlo"]:
            ratios = seed["N(0, 1)"][str(sigma)]["ratio"]
            marker = {"marker": markers[sigma], "markersize": 4.5, "markerfacecolor": "none"}
            label = f"σ = {sigma:g}" if seed is results["monte carlo"][0] else None
            left.plot(
                sigma * np.array(units["monte carlo"]), ratios, ls="", color=colour, label=label, **marker
            )
        left.axvline(PAPER[sigma], color=colour, linewidth=0.8, linestyle=":")
    left.set(xscale="log", xlabel="distance of the modes α", ylabel="mean of q, μ*/α")
    left.set_xticks([0.25, 1, 4, 16], ["0.25", "1", "4", "16"])
    left.minorticks_off()
    left.set_title("Lines from N(0, σ²), points from N(0, 1); dotted: paper", fontsize=9)
    left.legend(fontsize=9, loc="lower left")
    for name, curve, style in (
        ("plain", results["quadrature"]["N(0, σ²)"]["1.0"], {"color": "#D55E00"}),
        ("plain, between", results["quadrature"]["midpoint"]["1.0"], {"color": "0.55", "ls": "--"}),
        ("symmetrised", results["symmetrised"]["N(0, σ²)"]["1.0"], {"color": "#0072B2"}),
    ):
        right.plot(units["quadrature"], curve["kl"], label=name, **style)
    right.axhline(math.log(2), color="0.3", linewidth=0.8, linestyle=":")
    right.text(0.5, math.log(2) + 0.015, "log 2", fontsize=9)
    right.set(xlabel="distance of the modes α / σ", ylabel="KL(q | p) in nats", ylim=(-0.03, 1.0))
    right.set_title("How far from the target, from N(0, σ²)", fontsize=9)
    right.legend(fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.7))
    return figure
