"""The picture of the landing page: ``python docs/_figures/landing.py``, a minute.

It prints the numbers of the caption.

Petal lengths of 150 irises as a mixture of three normals: their means and one scale unknown, weights equal.
Four parameters, so that the evidence is had by quadrature.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import arviz as az
import matplotlib
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_value
from pyro.optim import ClippedAdam
from sklearn.datasets import load_iris
from torch import Tensor

import pyro_sym as ps

OUT = Path(__file__).resolve().parents[1] / "_static"
COLOURS = (
    "#3f8fd2",
    "#e08a00",
    "#12a37f",
)  # told apart by colour-blind eyes, on white and on black
INK = {"light": "#323232", "dark": "#ced6dd"}
K, CHAINS, DRAWS, ELBO_DRAWS = 3, 4, 250, 600
NODES, RADIUS = 32, 6.0  # of the quadrature; half its box in standard deviations


def model(x: Tensor) -> None:
    """A mixture of three normals."""
    with pyro.plate("components", K):
        locs = pyro.sample("locs", dist.Normal(4.0, 2.0))
    scale = pyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("flowers", len(x)):
        components = dist.Normal(locs, scale)
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(K)), components), obs=x)


def fit(guide: Any, x: Tensor, steps: int = 400) -> tuple[float, float]:
    """Train, and return the ELBO with its standard error."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.05, "lrd": 0.02 ** (1 / steps)}), Trace_ELBO())
    for _ in range(steps):
        svi.step(x)
    with torch.no_grad():
        values = [-svi.evaluate_loss(x) for _ in range(ELBO_DRAWS)]
    return float(np.mean(values)), float(np.std(values, ddof=1) / ELBO_DRAWS**0.5)


def mean_field() -> AutoNormal:
    """A mean-field guide that starts at three guesses."""
    return AutoNormal(
        model,
        init_loc_fn=init_to_value(values={"locs": torch.tensor([1.5, 4.3, 5.5])}),
        init_scale=0.05,
    )


def log_evidence(x: Tensor, draws: dict[str, Tensor]) -> float:
    """By Gauss-Legendre quadrature around one copy of the mode, times 3! for copies that lie far apart."""
    coordinates = torch.cat(
        [draws["locs"].reshape(-1, K), draws["scale"].reshape(-1, 1).log()], dim=1
    ).double()
    centre, spread = coordinates.mean(0), coordinates.std(0)
    nodes, weights = (torch.tensor(part) for part in np.polynomial.legendre.leggauss(NODES))
    axes = [c + RADIUS * s * nodes for c, s in zip(centre, spread, strict=True)]
    log_weight = (RADIUS * spread).log().sum() + torch.cartesian_prod(*[weights.log()] * 4).sum(-1)
    # log N(x | loc, scale) for all data, nodes of a mean and nodes of the scale.
    normals = [
        dist.Normal(a[:, None], axes[3].exp()).log_prob(x.double()[:, None, None]) for a in axes[:3]
    ]
    log_likelihood = torch.zeros(NODES, NODES, NODES, NODES, dtype=torch.float64)
    for first, second, third in zip(*normals, strict=True):
        pair = torch.logaddexp(first[:, None], second[None])
        log_likelihood += torch.logaddexp(pair[:, :, None], third[None, None]) - np.log(3)
    log_prior = sum(
        dist.Normal(4.0, 2.0).log_prob(a) for a in torch.meshgrid(*axes[:3], indexing="ij")
    )
    log_prior = log_prior[..., None] + dist.Normal(-1.0, 0.5).log_prob(axes[3])
    whole = (log_likelihood + log_prior).flatten() + log_weight
    return float(whole.logsumexp(0)) + float(np.log(6))


def canvas(ink: str) -> tuple[Figure, Any]:
    """A small transparent figure."""
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for item in axes.spines.values():
        item.set_color(ink)
    axes.tick_params(colors=ink, labelsize=10)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def save(figure: Figure, name: str) -> None:
    """Write an SVG that is the same each time."""
    figure.savefig(OUT / f"{name}.svg", transparent=True, metadata={"Date": None})


def trace(draws: np.ndarray, title: str, name: str) -> None:
    """The component means, chain after chain."""
    for background, ink in INK.items():
        figure, axes = canvas(ink)
        for k, colour in enumerate(COLOURS):
            axes.plot(draws[..., k].ravel(), color=colour, linewidth=0.7)
            axes.text(
                DRAWS * CHAINS * 1.01,
                draws[-1, -40:, k].mean(),
                k + 1,
                color=colour,
                va="center",
                fontsize=11,
            )
        for chain in range(1, CHAINS):
            axes.axvline(chain * DRAWS, color=ink, linewidth=0.6, alpha=0.5)
        axes.set_xticks(
            [(c + 0.5) * DRAWS for c in range(CHAINS)], [f"chain {c + 1}" for c in range(CHAINS)]
        )
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel("mean petal length, cm", color=ink, fontsize=10)
        axes.set_title(title, color=ink, fontsize=12)
        save(figure, f"{name}_{background}")


def bounds(plain: float, symmetrised: float, evidence: float) -> None:
    """The two ELBOs below the log evidence."""
    for background, ink in INK.items():
        figure, axes = canvas(ink)
        for y, (value, colour) in enumerate([(symmetrised, COLOURS[2]), (plain, COLOURS[1])]):
            axes.barh(
                y, evidence - value, left=value - evidence, height=0.5, color=colour, alpha=0.35
            )
            axes.plot([value - evidence] * 2, [y - 0.25, y + 0.25], color=colour, linewidth=3)
            short = f"{evidence - value:.2f} nats short "
            axes.text(0, y + 0.32, short, ha="right", color=ink)
        axes.axvline(0, color=ink, linewidth=1.5)
        axes.set_yticks([0, 1], ["averaged\nover 3!", "plain\nguide"], fontsize=11)
        axes.set_ylim(-0.5, 1.65)
        axes.set_xlim(min(plain, symmetrised) - evidence - 0.2, 0.1)
        axes.set_xlabel("ELBO − log evidence, nats", color=ink, fontsize=10)
        axes.set_title("ELBO, plain and averaged", color=ink, fontsize=12)
        save(figure, f"landing_elbo_{background}")


def main() -> None:
    """Compute, draw, and print what the caption says."""
    torch.set_num_threads(1)
    matplotlib.rcParams["svg.hashsalt"] = "pyro_sym"
    x = torch.tensor(load_iris().data[:, 2], dtype=torch.float)
    symmetry = ps.find_symmetry(model, x)
    (plain, plain_error), guide = fit(mean_field(), x), ps.AutoSymmetrized(mean_field(), symmetry)
    symmetrised, error = fit(guide, x)

    start = ps.Potential(model, (x,)).unconstrain(guide.sample_posterior(x, sample_shape=(CHAINS,)))
    mcmc = ps.VectorizedMCMC(
        ps.BAOA(model, step_size=0.04, friction=2.0),
        num_samples=DRAWS,
        warmup_steps=100,
        num_chains=CHAINS,
        thinning=5,
        initial_params=start,
        disable_progbar=True,
    )
    mcmc.run(x)
    data = ps.from_pyro(mcmc, symmetry=symmetry)
    raw, aligned = (ps.dataset(data, group)["locs"] for group in ("posterior", "posterior_aligned"))
    worst, best = (
        float(az.rhat(ps.dataset(data, g))["locs"].max())
        for g in ("posterior", "posterior_aligned")
    )
    evidence = log_evidence(
        x,
        {
            n: torch.tensor(ps.dataset(data, "posterior_aligned")[n].values)
            for n in ("locs", "scale")
        },
    )
    levels = sorted(
        (float(m), RADIUS * float(s))
        for m, s in zip(
            aligned.mean(("chain", "draw")), aligned.std(("chain", "draw")), strict=True
        )
    )
    for (low, below), (high, above) in pairwise(levels):
        if low + below > high - above:
            raise RuntimeError(
                f"the box of the quadrature holds more than one copy of the mode: {levels}"
            )

    trace(raw.values, f"raw draws: R-hat {worst:.2f}", "landing_raw")
    trace(aligned.values, f"aligned draws: R-hat {best:.2f}", "landing_aligned")
    bounds(plain, symmetrised, evidence)
    print(
        f"largest R-hat of a mean: {worst:.3f} raw, {best:.3f} aligned, {CHAINS} chains of {DRAWS} draws"
    )
    print(f"log evidence {evidence:.3f}")
    print(
        f"ELBO {plain:.3f} ± {plain_error:.3f} plain, {symmetrised:.3f} ± {error:.3f} averaged over 3!"
    )


if __name__ == "__main__":
    main()
