r"""A Bayesian network of two weights, whose evidence can be integrated; after Gelberg et al. 2024.

Two ReLU units without biases, :math:`f(x) = \mathrm{relu}(w_1 x) + \mathrm{relu}(w_2 x)`, and data without
noise, :math:`y = \alpha |x|`, x uniform on (-10, 10), N = 100 to train on and 100 to test on. One unit has to
take the slope :math:`\alpha` and the other :math:`-\alpha`: two modes, each the other's mirror image. A
mean-field normal guide (MFVI) is trained on its ELBO :math:`\mathcal L`, and another (SGM) on
:math:`\mathcal L^G`, that of its average over the swap; both are then judged by both. The two elements of the
group are summed over exactly, which is the paper's K = 2.

As in the paper: batches of 10, Adam at 5e-3, 10 epochs. Not said there, and chosen here: noise of standard
deviation 1, prior N(0, 1), starting means from N(0, 0.1²), starting scales 0.1, one draw a step. As ten
epochs leave the guides far from their optimum, there are also 300 epochs with ten draws a step, the learning
rate falling to 3 % and Adam forgetting the first gradients sooner. ELBOs are per datum, by 20,000 draws; the
log evidence is by the midpoint rule on a grid, its error by halving the grid. All fits run in one batched
loop, on the package's own orbit average; one of them is repeated with Pyro's SVI and
``AutoSymmetrizedNormal``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_value
from pyro.optim import ClippedAdam
from torch import Tensor

from benchmarks.studies._study import Results, Size, Table, mean_and_error
from pyro_sym import AutoSymmetrizedNormal, Permutation, RecordedELBO
from pyro_sym.orbit.enumeration import enumerated

TITLE = "The tractable Bayesian network: ELBOs against the evidence itself"

ALPHAS = (0.05, 0.1, 0.15, 0.2)
GUIDES = ("MFVI", "SGM")
PAPER_MSE = {"MFVI": (".11 ± .22", ".12 ± .16", ".13 ± .15", ".18 ± .19")} | {
    "SGM": (".09 ± .19", ".09 ± .17", ".10 ± .15", ".12 ± .16")
}
PAPER_ELBO = {
    "MFVI": {"L": (-0.022, -0.025, -0.032, -0.042), "LG": (-0.009, -0.013, -0.021, -0.031)},
    "SGM": {"L": (-0.023, -0.029, -0.035, -0.043), "LG": (-0.004, -0.007, -0.012, -0.019)},
}
N, BATCH, LEARNING_RATE = 100, 10, 5e-3
SWAP = Permutation({"w": -1})
START = 0.1  # spread of the starting means, and the starting scales


@dataclass(frozen=True)
class Schedule:
    """How long is trained, and how."""

    epochs: int
    particles: int
    final: float  # the last learning rate over the first
    memory: float  # Adam's second beta: 0.999 remembers the first gradients, which are huge, for too long


SCHEDULES = {"10 epochs": Schedule(10, 1, 1.0, 0.999), "300 epochs": Schedule(300, 10, 0.03, 0.99)}


def network(x: Tensor, y: Tensor) -> None:
    """The model, of all rows or of a batch that stands for them."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with poutine.scale(scale=N / len(x)), pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x.unsqueeze(-1) * w).relu().sum(-1), 1.0), obs=y)


def output(w: Tensor, x: Tensor) -> Tensor:
    """The network at rows x of shape (..., rows), for weights of shape (..., 2)."""
    return (x.unsqueeze(-1) * w.unsqueeze(-2)).relu().sum(-1)


def log_joint(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of weights of shape (..., fits, 2) and data of shape (fits, rows)."""
    fit = dist.Normal(output(w, x), 1.0).log_prob(y).sum(-1) * (N / x.shape[-1])
    return fit + dist.Normal(0.0, 1.0).log_prob(w).sum(-1)


def log_q(w: Tensor, loc: Tensor, scale: Tensor, *, symmetrised: bool) -> Tensor:
    """Of draws of shape (draws, fits, 2), each under its own fit's guide, or that averaged over the swap."""
    q = dist.Normal(loc, scale).to_event(1)
    own = q.log_prob(w)
    if not symmetrised:
        return own
    density = lambda at: q.log_prob(at["w"].reshape(-1, *w.shape)).flatten(1)  # noqa: E731
    return enumerated(SWAP, density, {"w": w.flatten(0, 1)}, own.flatten()).reshape(own.shape)


def log_evidence(x: Tensor, y: Tensor, cells: int, reach: float = 0.6) -> Tensor:
    """For each data set, by the midpoint rule, with kinks on edges of cells; there is nothing further out."""
    width = 2 * reach / cells
    line = (torch.arange(cells) + 0.5) * width - reach
    w = torch.cartesian_prod(line, line)
    total = (
        dist.Normal(0.0, 1.0).log_prob(w).sum(-1)
        - 0.5 * y.square().sum(-1, keepdim=True)
        - 0.5 * N * math.log(2 * math.pi)
    )
    for side in (1, -1):  # the network is a line through the origin on either side of it
        on_side, slope = (x * side > 0).to(x), (side * w).relu().sum(-1)
        xx, xy = (
            (on_side * x.square()).sum(-1, keepdim=True),
            (on_side * x.abs() * y).sum(-1, keepdim=True),
        )
        total = total + slope * xy - 0.5 * slope.square() * xx
    return total.logsumexp(-1) + 2 * math.log(width)


def data(seeds: Sequence[int], alphas: Sequence[float]) -> tuple[Tensor, Tensor]:
    """One data set for each seed and alpha, of 2 N rows, of which the second half is for testing."""
    randoms = [torch.Generator().manual_seed(seed) for seed in seeds]
    columns = [torch.empty(2 * N, dtype=torch.double).uniform_(-10, 10, generator=r) for r in randoms]
    x = torch.stack(columns).repeat(len(alphas), 1)
    slopes = torch.tensor(alphas, dtype=torch.double).repeat_interleave(len(seeds))
    return x, slopes.unsqueeze(-1) * x.abs()


def starts(seeds: Sequence[int]) -> Tensor:
    """Starting means, of shape (seeds, 2)."""
    return torch.stack(
        [torch.randn(2, generator=torch.Generator().manual_seed(1000 + s)) * START for s in seeds]
    )


def train(
    x: Tensor, y: Tensor, loc: Tensor, schedule: Schedule, *, symmetrised: bool
) -> tuple[Tensor, Tensor]:
    """All fits at once, by Adam; means and scales, of shape (fits, 2). Draws and batches go by the seed."""
    noise = torch.Generator().manual_seed(7)
    loc, log_scale = loc.clone().requires_grad_(), torch.full_like(loc, math.log(START)).requires_grad_()
    adam = torch.optim.Adam([loc, log_scale], LEARNING_RATE, betas=(0.9, schedule.memory))
    steps = schedule.epochs * N // BATCH
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, schedule.final ** (1 / steps))
    for _ in range(schedule.epochs):
        for rows in torch.randperm(N, generator=noise).split(BATCH):
            adam.zero_grad()
            scale = log_scale.exp()
            w = loc + scale * torch.randn(schedule.particles, *loc.shape, generator=noise)
            ratio = log_joint(w, x[:, rows], y[:, rows]) - log_q(w, loc, scale, symmetrised=symmetrised)
            (-ratio.mean(0).sum()).backward()
            adam.step()
            decay.step()
    return loc.detach(), log_scale.detach().exp()


@torch.no_grad()
def judge(x: Tensor, y: Tensor, loc: Tensor, scale: Tensor, draws: int) -> dict[str, Any]:
    """Of each fit both ELBOs per datum, with Monte Carlo errors, and the test MSE of its predictive mean."""
    noise = torch.Generator().manual_seed(11)
    w = loc + scale * torch.randn(draws, *loc.shape, generator=noise)
    joint = torch.cat([log_joint(part, x[:, :N], y[:, :N]) for part in w.split(500)])
    found: dict[str, Any] = {"loc": loc.tolist(), "scale": scale.tolist()}
    for name, symmetrised in (("L", False), ("LG", True)):
        ratio = (joint - log_q(w, loc, scale, symmetrised=symmetrised)) / N
        found[name] = ratio.mean(0).tolist()
        found[f"{name} error"] = (ratio.std(0) / math.sqrt(draws)).tolist()
    mean = output(w[:1000], x[:, N:]).mean(0)
    found["mse"] = (mean - y[:, N:]).square().mean(-1).tolist()
    return found


def by_pyro(x: Tensor, y: Tensor, loc: Tensor, schedule: Schedule, draws: int) -> tuple[float, float]:
    """The symmetrised ELBO of one fit per datum and its error, by Pyro's SVI and this package's guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(7)
    guide = AutoSymmetrizedNormal(
        network, SWAP, estimator="exact", init_loc_fn=init_to_value(values={"w": loc}), init_scale=START
    )
    steps = schedule.epochs * N // BATCH
    adam = {"lr": LEARNING_RATE, "lrd": schedule.final ** (1 / steps), "clip_norm": math.inf}
    adam["betas"] = (0.9, schedule.memory)

    def elbo(particles: int) -> Trace_ELBO:
        return Trace_ELBO(num_particles=particles, vectorize_particles=True, max_plate_nesting=1)

    svi = SVI(network, guide, ClippedAdam(adam), RecordedELBO(elbo(schedule.particles)))
    for _ in range(schedule.epochs):
        for rows in torch.randperm(N).split(BATCH):
            svi.step(x[rows], y[rows])
    with torch.no_grad():
        values = [-elbo(draws // 10).loss(network, guide, x, y) / N for _ in range(10)]
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(10))


def run(size: Size) -> Results:
    """Train all fits by both schedules, integrate the evidence, and repeat one fit with Pyro."""
    full = size == "full"
    seeds = list(range(10 if full else 2))
    alphas = ALPHAS if full else ALPHAS[1:2]
    draws = 20_000 if full else 2_000
    schedules = (
        SCHEDULES
        if full
        else {"10 epochs": SCHEDULES["10 epochs"], "40 epochs": Schedule(40, 10, 0.03, 0.99)}
    )
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    x, y = data(seeds, alphas)
    loc = starts(seeds).repeat(len(alphas), 1)
    evidence = {cells: log_evidence(x[:, :N], y[:, :N], cells) / N for cells in (300, 600)}
    results: Results = {
        "seeds": seeds,
        "alphas": list(alphas),
        "draws": draws,
        "evidence": evidence[600].tolist(),
        "evidence error": float((evidence[600] - evidence[300]).abs().max()),
        "fits": {},
    }
    for name, schedule in schedules.items():
        results["fits"][name] = {}
        for guide in GUIDES:
            at, scale = train(x[:, :N], y[:, :N], loc, schedule, symmetrised=guide == "SGM")
            results["fits"][name][guide] = judge(x, y, at, scale, draws)
        print(f"trained for {name}", flush=True)
    of_pyro = alphas.index(0.1) * len(seeds)
    value, error = by_pyro(x[of_pyro, :N], y[of_pyro, :N], loc[of_pyro], schedule, draws)
    results["pyro"] = {"fit": of_pyro, "LG": value, "LG error": error}
    torch.set_default_dtype(dtype)
    return results


def _last(results: Results) -> str:
    """The longer schedule."""
    return list(results["fits"])[-1]


def _of(results: Results, values: Sequence[float], i: int) -> list[float]:
    """The seeds of the i-th alpha."""
    seeds = len(results["seeds"])
    return list(values[i * seeds : (i + 1) * seeds])


def _by_seed(results: Results, values: np.ndarray) -> np.ndarray:
    """Means over alpha: a seed has the same inputs and start at every alpha."""
    return values.reshape(len(results["alphas"]), -1).mean(0)


def _verdict(changes: np.ndarray) -> str:
    """Whether a mean over seeds is more than two standard errors from zero."""
    mean, error = changes.mean(), changes.std(ddof=1) / math.sqrt(len(changes))
    if abs(mean) <= 2 * error:
        return "which is zero within its error"
    return f"{abs(mean) / error:.1f} standard errors from zero"


def findings(results: Results) -> list[str]:
    """ELBOs against the evidence, what training changes, and the paper's numbers beside ours."""
    last, first = _last(results), next(iter(results["fits"]))
    sgm, mfvi = (results["fits"][last][guide] for guide in ("SGM", "MFVI"))
    evidence = np.array(results["evidence"])
    missing = evidence - np.array(sgm["LG"])
    plain = evidence - np.array(mfvi["L"])
    bound = 1e-3
    verdict = "within" if missing.max() < bound else "not all within"
    sentences = [
        f"After {last} the symmetrised ELBO of the symmetrised guide misses the log evidence by "
        f"{missing.mean():.5f} nats per datum on average and {missing.max():.5f} at most over "
        f"{len(missing)} fits, {verdict} {bound:g}; the plain ELBO of the plain guide by "
        f"{plain.mean():.5f} on average, where log 2 / N = {math.log(2) / N:.5f}. (Quadrature: error below "
        f"{max(results['evidence error'], 1e-9):.0e}.)"
    ]
    between = 1e3 * _by_seed(results, np.subtract(sgm["LG"], mfvi["LG"]))
    sentences.append(
        f"After {last}, averaging while training rather than only afterwards changes L^G by "
        f"{mean_and_error(list(between), 3)} thousandths of a nat per datum, {_verdict(between)}. The gain "
        f"L^G − L is {np.mean(np.subtract(sgm['LG'], sgm['L'])):.5f} of SGM and "
        f"{np.mean(np.subtract(mfvi['LG'], mfvi['L'])):.5f} of MFVI."
    )
    texts = []
    for name, fits in results["fits"].items():
        change = _by_seed(results, np.subtract(fits["SGM"]["mse"], fits["MFVI"]["mse"]))
        texts.append(f"{mean_and_error(list(change), 5)} after {name}, {_verdict(change)}")
    sentences.append(
        "Test MSE, SGM less MFVI with the same data, start and random numbers, by seed over all α: "
        f"{'; '.join(texts)}. In the paper it is .02 to .06 lower, with spreads of .15 to .22."
    )
    gains = [
        lg - l
        for guide in PAPER_ELBO.values()
        for l, lg in zip(guide["L"], guide["LG"], strict=True)  # noqa: E741
    ]
    first_l = np.mean(results["fits"][first]["MFVI"]["L"])
    sentences.append(
        f"The paper's ELBOs can't be compared with ours: L of MFVI is about "
        f"{np.mean(PAPER_ELBO['MFVI']['L']):.3f} there and {first_l:.3f} here after {first}, and the "
        f"evidence is {evidence.mean():.3f} "
        f"({evidence.mean() + 0.5 * math.log(2 * math.pi):.3f} without the constant "
        f"of the normal density). Its gains L^G − L are {min(gains):.3f} to {max(gains):.3f}, and two "
        f"elements can gain at most log 2 / N = {math.log(2) / N:.4f} per datum: its normalisation is "
        "another, and its noise scale and prior are not known."
    )
    pyro_fit = results["pyro"]
    difference = pyro_fit["LG"] - sgm["LG"][pyro_fit["fit"]]
    error = math.hypot(pyro_fit["LG error"], sgm["LG error"][pyro_fit["fit"]])
    sentences.append(
        f"One fit repeated with Pyro's SVI and AutoSymmetrizedNormal, other random numbers: L^G is "
        f"{pyro_fit['LG']:.5f} per datum, {difference:+.1e} ± {error:.1e} from that of the batched loop."
    )
    return sentences


def tables(results: Results) -> list[Table]:
    """Test errors, then ELBOs of both schedules, then the paper's."""
    seeds, alphas = len(results["seeds"]), results["alphas"]
    errors = f"mean over {seeds} seeds ± its standard error"
    header = ["α"] + [f"{guide}, {name}" for name in results["fits"] for guide in GUIDES]
    mse = [
        [
            f"{alpha:g}",
            *(
                mean_and_error(_of(results, fits[guide]["mse"], i), 5)
                for fits in results["fits"].values()
                for guide in GUIDES
            ),
            *(PAPER_MSE[guide][ALPHAS.index(alpha)] for guide in GUIDES),
        ]
        for i, alpha in enumerate(alphas)
    ]
    found = [
        Table(
            f"Test MSE of the predictive mean: {errors}; the paper's as printed there.",
            [*header, "MFVI, paper", "SGM, paper"],
            mse,
        )
    ]
    header = ["α", *(f"{what}, {guide}" for guide in GUIDES for what in ("L", "L^G"))]
    for name, fits in results["fits"].items():
        rows = [
            [
                f"{alpha:g}",
                *(
                    mean_and_error(_of(results, fits[guide][what], i), 4)
                    for guide in GUIDES
                    for what in ("L", "LG")
                ),
                mean_and_error(_of(results, results["evidence"], i), 4),
            ]
            for i, alpha in enumerate(alphas)
        ]
        caption = f"ELBOs per datum after {name}, in nats: {errors}. Evidence by quadrature."
        found.append(Table(caption, [*header, "log evidence"], rows))
    rows = [
        [
            f"{alpha:g}",
            *(
                f"{PAPER_ELBO[guide][what][ALPHAS.index(alpha)]:.3f}"
                for guide in GUIDES
                for what in ("L", "LG")
            ),
        ]
        for alpha in alphas
    ]
    found.append(Table("The paper's normalised ELBOs (its table 3), for comparison.", header, rows))
    return found


def figure(results: Results) -> Figure:
    """The posterior with a guide and its image; what each ELBO misses of the evidence."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fits = results["fits"][_last(results)]
    shown = results["pyro"]["fit"]  # alpha = 0.1, the first seed
    x, y = (part[:, :N] for part in data(results["seeds"][:1], [0.1]))
    reach = 0.25
    line = torch.linspace(-reach, reach, 201, dtype=torch.double)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
    density = log_joint(grid.reshape(-1, 1, 2), x, y).reshape(201, 201)
    density = (density - density.max()).exp()
    left.contourf(
        line, line, density, levels=[0.011, 0.135, 0.6, 1.0], colors=["#D9D9D9", "#B0B0B0", "#808080"]
    )
    loc, scale = fits["SGM"]["loc"][shown], fits["SGM"]["scale"][shown]
    for flip, line_style, colour, label in ((1, "-", "#D55E00", "q"), (-1, "--", "#0072B2", "image of q")):
        for sd in (1, 2, 3):
            (width, height), centre = (2 * sd * np.array(scale[::flip])), loc[::flip]
            left.add_patch(
                Ellipse(
                    centre,
                    width,
                    height,
                    fill=False,
                    linewidth=1.4,
                    label=label if sd == 1 else None,
                    linestyle=line_style,
                    edgecolor=colour,
                )
            )
    left.set(xlabel="weight $w_1$", ylabel="weight $w_2$", aspect="equal")
    left.set_title("Posterior (grey), q and image; α = 0.1", fontsize=10)
    left.legend(fontsize=9, loc="upper right")
    alphas = np.array(results["alphas"])
    evidence = np.array(results["evidence"]).reshape(len(alphas), -1)
    for what, guide, marker, colour in (
        ("L", "MFVI", "o", "#D55E00"),
        ("LG", "MFVI", "s", "#E69F00"),
        ("LG", "SGM", "^", "#0072B2"),
    ):
        gap = 1e3 * (np.array(fits[guide][what]).reshape(evidence.shape) - evidence)
        error = gap.std(1, ddof=1) / math.sqrt(gap.shape[1])
        name = {"L": "$L$", "LG": "$L^G$"}[what]
        right.errorbar(
            alphas + 0.003 * ("os^".index(marker) - 1), gap.mean(1), error,
            fmt=marker, color=colour, capsize=3, label=f"{name} of {guide}",
        )  # fmt: skip
    right.axhline(0, color="0.3", linewidth=0.8)
    right.axhline(-1e3 * math.log(2) / N, color="0.3", linewidth=0.8, linestyle=":")
    right.text(alphas[0], -1e3 * math.log(2) / N + 0.12, "−log 2 / N", fontsize=9)
    right.set(xlabel="slope α", ylabel="ELBO − log evidence\n(10⁻³ nats per datum)", ylim=(-9, 0.8))
    right.set_xticks(alphas)
    right.set_title(f"After {_last(results)}", fontsize=10)
    right.legend(fontsize=9, loc="center right")
    return figure
