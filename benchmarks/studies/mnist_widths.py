r"""Widths of a Bayesian network on digits: is log h! worth having, and does it choose the width?

After Gelberg et al. 2024 (arXiv 2408.05496, table 1). A network with one hidden layer of h ReLU units has h!
relabellings; a mean-field normal guide fits one of the copies of a mode, and averaged over the relabellings
its ELBO is :math:`\mathcal L^G = \mathcal L + I(g; \omega)`, with :math:`I \le \log h!`.

*MNIST*: weights and biases N(0, 1), Adam at 1e-3, batches of 100, 10 epochs, as in the paper, but on the
10,000 digits that MNIST tests with, split 8,000 / 2,000. The guides are ``plain``, the mean-field guide
itself; ``uniform-K``, averaged over K relabellings drawn uniformly (InfoNCE, the paper's); and ``auto``, what
the package chooses: the exact permanent for up to 14 units, and guided permutations above. The gain of a
trained plain guide is a property of that guide, so all estimators are asked for it, at every width. At some
widths symmetrised guides are trained as well, from the initial values of the plain ones.

*Choosing the width*: after 10 epochs those guides are far from converged, and their ELBOs compare guides,
not widths. So the second part takes scikit-learn's digits of 8 × 8 pixels, split 1,397 / 400, and trains
longer, with step sizes that fall to a hundredth, under two priors: the paper's N(0, 1), and variances of
2 / fan-in. It asks which width has the largest :math:`\mathcal L`, the largest :math:`\mathcal L^G` and the
least held-out negative log likelihood (NLL).

:math:`\mathcal L` takes the KL to the prior in closed form, and draws for the likelihood only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import kl_divergence

import pyro_sym as ps
from benchmarks._models import mnist
from benchmarks.studies._study import Results, Size, Table, mean_and_error

TITLE = "Widths of a Bayesian network on digits"

CLASSES, BATCH, SPLIT_SEED = 10, 100, 0
SYMMETRY = ps.Permutation({"w1": -1, "b1": -1, "w2": -2})
PAPERS_GAIN = 0.12  # points of accuracy, the largest in its table 1: h = 30, K = 20
UNIFORM = ("uniform-5", "uniform-20", "uniform-500")
SIZES: dict[Size, dict[str, Any]] = {
    "smoke": {
        "mnist": {
            "widths": [5, 20],
            "seeds": 1,
            "epochs": 1,
            "draws": 20,
            "trained": {5: ["uniform-5", "auto"]},
        },
        "digits": {"widths": [2, 5, 20], "seeds": 2, "steps": 300, "draws": 40},
    },
    "full": {
        "mnist": {
            "widths": [5, 10, 20, 30, 64, 128],
            "seeds": 3,
            "epochs": 10,
            "draws": 100,
            "trained": {width: ["uniform-20", "auto"] for width in (5, 20)},
        },
        "digits": {"widths": [3, 5, 10, 20, 30, 64, 128], "seeds": 5, "steps": 1_600, "draws": 400},
    },
}

Model = Callable[..., None]
Moments = dict[str, dist.Normal]
Split = tuple[Tensor, Tensor, Tensor, Tensor]


def shuffled(x: Tensor, y: Tensor, train: int) -> Split:
    """Training and test data, in one fixed random order."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x, y = x[order], y[order].long()
    return x[:train], y[:train], x[train:], y[train:]


def mnist_split() -> Split:
    """The 10,000 test images of MNIST, in [0, 1]."""
    return shuffled(*mnist(), train=8_000)


def small_digits() -> Split:
    """The 1,797 digits of scikit-learn, centred by pixel, and of unit variance over all."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y, x_test, y_test = shuffled(
        torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target), train=1_397
    )
    centre, scale = x.mean(0), x.std()
    return (x - centre) / scale, y, (x_test - centre) / scale, y_test


def standard(shape: Sequence[int]) -> float:
    """The paper's prior: N(0, 1)."""
    return 1.0


def by_fan_in(shape: Sequence[int]) -> float:
    """Variance 2 / fan-in for weights, and 1 for biases."""
    return math.sqrt(2 / shape[0]) if len(shape) == 2 else 1.0


PRIORS = {"N(0, 1)": standard, "N(0, 2/fan-in)": by_fan_in}


class Network:
    """The Bayesian network with one hidden layer of ReLU units; several at once where ``runs`` are given."""

    def __init__(
        self,
        inputs: int,
        width: int,
        prior: Callable[[Sequence[int]], float] = standard,
        runs: int | None = None,
    ) -> None:
        self.shapes = {"w1": (inputs, width), "b1": (width,), "w2": (width, CLASSES), "b2": (CLASSES,)}
        self.scales = {name: prior(shape) for name, shape in self.shapes.items()}
        self.runs = () if runs is None else (runs,)

    def __call__(self, x: Tensor, y: Tensor, batch: int | None = None) -> None:
        """The model."""
        w = {
            name: pyro.sample(
                name,
                dist.Normal(0.0, self.scales[name])
                .expand(self.runs + shape)
                .to_event(len(self.runs + shape)),
            )
            for name, shape in self.shapes.items()
        }
        with pyro.plate("data", len(x), subsample_size=batch, dim=-1) as rows:
            logits = self.logits(w, x[rows])
            if self.runs:
                with pyro.plate("runs", *self.runs, dim=-2):
                    pyro.sample("y", dist.Categorical(logits=logits), obs=y[rows])
            else:
                pyro.sample("y", dist.Categorical(logits=logits), obs=y[rows])

    @staticmethod
    def logits(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Of the classes, ``(*draws, rows, 10)``."""
        hidden = (x @ w["w1"] + w["b1"].unsqueeze(-2)).relu()
        return hidden @ w["w2"] + w["b2"].unsqueeze(-2)

    def init_loc(self, site: Any) -> Tensor:
        """Weights of variance 2 / fan-in, biases zero: at zero all units would start alike."""
        draw, shape = torch.randn_like(site["fn"].mean), self.shapes[site["name"]]
        return draw * math.sqrt(2 / shape[0]) if len(shape) == 2 else torch.zeros_like(draw)


def make_guide(model: Network, method: str, init_scale: float = 0.1) -> Any:
    """The guide that a method's name stands for."""
    base = AutoNormal(model, init_loc_fn=model.init_loc, init_scale=init_scale)
    if method == "plain":
        return base
    if method == "auto":
        return ps.AutoSymmetrized(base, SYMMETRY)
    num_elements = int(method.removeprefix("uniform-"))
    return ps.AutoSymmetrized(base, SYMMETRY, estimator="uniform", num_elements=num_elements)


def train(
    model: Network, guide: Any, x: Tensor, y: Tensor, *, steps: int, lr: float, fall: float = 1.0
) -> float:
    """Train a guide by Adam, the step size falling by a factor over the run; return the CPU seconds of it."""
    loss = ps.RecordedELBO()
    optimiser = torch.optim.Adam(guide.parameters(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, fall ** (1 / steps))
    start = time.process_time()
    for _ in range(steps):
        optimiser.zero_grad()
        loss.loss_and_grads(model, guide, x, y, BATCH)
        optimiser.step()
        schedule.step()
    return time.process_time() - start


def moments(base: AutoNormal) -> Moments:
    """The normals of a mean-field guide."""
    with torch.no_grad():
        return {
            name: dist.Normal(*base._get_loc_and_scale(name))
            for name in base.prototype_trace.stochastic_nodes
        }


@torch.no_grad()
def evaluate(model: Network, q: Moments, data: Split, draws: int) -> list[dict[str, float]]:
    """Of each run: ELBO on the training data, accuracy and NLL of the predictive mean on the test data."""
    x, y, x_test, y_test = data
    fits, probs = [], torch.tensor(0.0)
    for draw in range(draws):
        w = {name: normal.sample() for name, normal in q.items()}
        probs = probs + model.logits(w, x_test).softmax(-1) / draws
        if draw % 4 == 0:  # a pass over all training data costs more
            log_probs = model.logits(w, x).log_softmax(-1)
            fits.append(log_probs[..., torch.arange(len(y)), y].double().sum(-1))
    kl = sum(
        kl_divergence(normal, dist.Normal(0.0, model.scales[name]))
        .double()
        .sum(tuple(range(len(model.runs), normal.loc.dim())))
        for name, normal in q.items()
    )
    log_likelihood = torch.stack(fits)
    found = {
        "elbo": log_likelihood.mean(0) - kl,
        "elbo_error": log_likelihood.std(0) / math.sqrt(len(fits)),
        "accuracy": (probs.argmax(-1) == y_test).double().mean(-1),
        "nll": -probs[..., torch.arange(len(y_test)), y_test].log().double().mean(-1),
    }
    rows = {key: value.reshape(-1).tolist() for key, value in found.items()}
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def started(method: str, model: Network, state: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Any:
    """A guide that is set up, with the parameters of a plain one."""
    pyro.clear_param_store()
    guide = make_guide(model, method)
    guide(x[:BATCH], y[:BATCH], BATCH)  # the symmetry is checked on few rows as well as on all
    (guide if method == "plain" else guide.guide).load_state_dict(state)
    return guide


def gain(guide: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The symmetry gain as the guide's estimator has it, of few draws: they are nearly all alike."""
    num_samples = 4 if guide.num_elements < 100 else 2
    found = guide.symmetry_gain(x[:BATCH], y[:BATCH], num_samples=num_samples)
    return {key: getattr(found, key) for key in ("method", "lower", "upper", "standard_error")}


def slices(guide: Any, runs: int) -> list[dict[str, Tensor]]:
    """The parameters of each of the guides that were trained side by side."""
    return [{name: value[run].clone() for name, value in guide.state_dict().items()} for run in range(runs)]


def run_mnist(
    widths: Sequence[int], seeds: int, epochs: int, draws: int, trained: Mapping[int, Sequence[str]]
) -> list[dict[str, Any]]:
    """Train plain guides at every width, all seeds side by side, and others from the same initial values."""
    data = mnist_split()
    x, y = data[:2]
    steps = epochs * len(x) // BATCH
    rows = []
    for width in widths:
        together, one = (Network(x.shape[-1], width, runs=runs) for runs in (seeds, None))
        pyro.clear_param_store()
        pyro.set_rng_seed(width)
        guide = make_guide(together, "plain")
        guide(x, y, BATCH)
        initial = slices(guide, seeds)
        seconds = train(together, guide, x, y, steps=steps, lr=1e-3) / seeds
        plain = evaluate(together, moments(guide), data, draws)
        for seed, (row, state) in enumerate(zip(plain, slices(guide, seeds), strict=True)):
            estimators = (*UNIFORM, "auto") if seed == 0 else (*UNIFORM[:-1], "auto")
            gains = {name: gain(started(name, one, state, x, y), x, y) for name in estimators}
            rows.append(
                {"width": width, "seed": seed, "method": "plain", "seconds": seconds, **row, "gains": gains}
            )
        for method in trained.get(width, ()):
            for seed in range(seeds):
                guide = started(method, one, initial[seed], x, y)
                pyro.set_rng_seed(seed)
                row = {"width": width, "seed": seed, "method": method}
                row["seconds"] = train(one, guide, x, y, steps=steps, lr=1e-3)
                row |= evaluate(one, moments(guide.guide), data, draws)[0]
                rows.append(row | {"gains": {method: gain(guide, x, y)}})
        for row in rows:
            if row["width"] == width:
                print(
                    f"  h = {width}  seed {row['seed']}  {row['method']:<12}{row['seconds']:5.1f} s  "
                    f"accuracy {100 * row['accuracy']:.2f} %  L {row['elbo']:.1f}  "
                    f"gain {list(row['gains'].values())[-1]['lower']:.3f}",
                    flush=True,
                )
    return rows


def run_digits(widths: Sequence[int], seeds: int, steps: int, draws: int) -> list[dict[str, Any]]:
    """Train plain guides long, all seeds of a width side by side; a row a seed."""
    data = small_digits()
    x, y = data[:2]
    rows = []
    for label, prior in PRIORS.items():
        for width in widths:
            together, one = (Network(x.shape[-1], width, prior, runs) for runs in (seeds, None))
            pyro.clear_param_store()
            pyro.set_rng_seed(width)
            guide = make_guide(together, "plain", init_scale=0.05)
            guide(x, y, BATCH)
            seconds = train(together, guide, x, y, steps=3 * steps // 4, lr=0.02, fall=0.03)
            pyro.set_rng_seed(width)
            early = evaluate(together, moments(guide), data, draws)
            seconds += train(together, guide, x, y, steps=steps // 4, lr=0.02 * 0.03, fall=0.3)
            pyro.set_rng_seed(width)  # the same draws, for the difference
            found = evaluate(together, moments(guide), data, draws)
            for seed, (row, state) in enumerate(zip(found, slices(guide, seeds), strict=True)):
                gains = {name: gain(started(name, one, state, x, y), x, y) for name in ("uniform-20", "auto")}
                last = row["elbo"] - early[seed]["elbo"]
                rows.append(
                    {"prior": label, "width": width, "seed": seed, **row, "last": last, "gains": gains}
                )
            elbo, nll = (np.mean([row[key] for row in found]) for key in ("elbo", "nll"))
            print(f"  {label}  h = {width}{seconds:6.1f} s  L {elbo:.1f}  NLL {nll:.3f}", flush=True)
    return rows


def run(size: Size) -> Results:
    """Both parts."""
    sizes = SIZES[size]
    results = {"mnist": run_mnist(**sizes["mnist"]), "digits": run_digits(**sizes["digits"])}
    return results | {
        "sizes": {part: {k: v for k, v in s.items() if k != "trained"} for part, s in sizes.items()}
    }


COLOURS = {"log h!": "#000000", "auto": "#0072B2", "uniform-5": "#E69F00", "uniform-20": "#D55E00"}
COLOURS["uniform-500"] = "#CC79A7"


def of(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows with these entries."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(rows: list[dict[str, Any]], key: str) -> list[float]:
    """One quantity of all rows; ``"symmetrised"`` is the ELBO with the lower half of the gain's bracket."""
    if key == "symmetrised":
        return [row["elbo"] + row["gains"]["auto"]["lower"] for row in rows]
    return [row[key] for row in rows]


def average(rows: list[dict[str, Any]], estimator: str, half: str = "lower") -> float:
    """A gain's mean over the seeds that have it."""
    return float(np.mean([row["gains"][estimator][half] for row in rows if estimator in row["gains"]]))


def bracket(rows: list[dict[str, Any]]) -> str:
    """The package's bracket of the gain; closed ones may cross in the last digit of single precision."""
    return " … ".join(
        f"{end:.2f}" for end in sorted(average(rows, "auto", half) for half in ("lower", "upper"))
    )


def chosen(rows: list[dict[str, Any]], key: str) -> list[int]:
    """For each seed the width with the most of it, or the least if it is the NLL."""
    sign = -1 if key == "nll" else 1
    seeds = sorted({row["seed"] for row in rows})
    return [
        max((sign * value, row["width"]) for row, value in zip(own, values(own, key), strict=True))[1]
        for own in (of(rows, seed=seed) for seed in seeds)
    ]


def counted(widths: list[int]) -> str:
    """Widths, and how many seeds chose each."""
    return ", ".join(f"{width} ({widths.count(width)} of {len(widths)})" for width in sorted(set(widths)))


def findings(results: Results) -> list[str]:
    """What the numbers say."""
    rows = results["mnist"]
    plain = of(rows, method="plain")
    widest = of(plain, width=max(values(plain, "width")))
    order = math.lgamma(widest[0]["width"] + 1)
    told = ", ".join(
        f"{average(widest, name):.2f} with K = {number} (log K = {math.log(number):.2f})"
        for name in UNIFORM
        for number in [int(name.removeprefix("uniform-"))]
    )
    saturates = all(
        average(widest, name) < math.log(int(name.removeprefix("uniform-"))) + 0.01 for name in UNIFORM
    )
    said = [
        f"Uniform relabellings {'stop at' if saturates else 'do not stop at'} log K: at the trained plain "
        "guides "
        f"of width {widest[0]['width']} on MNIST, where log h! = {order:.2f} nats, they report a gain of "
        f"{told}; "
        f"the package's own bracket is {bracket(widest)}."
    ]
    short = max(math.lgamma(row["width"] + 1) - row["gains"]["auto"]["lower"] for row in plain)
    said.append(
        f"In all {len(plain)} plain guides on MNIST the gain is "
        + (
            f"within {short:.2f} nats of log h!: the copies are separated completely."
            if short < 0.1
            else f"up to {short:.2f} nats less than log h!: copies overlap."
        )
    )
    same = [
        abs(row["elbo"] - other["elbo"]) < 1e-6 * abs(row["elbo"]) and row["accuracy"] == other["accuracy"]
        for row in of(rows, method="auto")
        for other in rows
        if other["method"].startswith("uniform")
        and (other["width"], other["seed"]) == (row["width"], row["seed"])
    ]
    differences = [
        100 * (row["accuracy"] - of(plain, width=row["width"], seed=row["seed"])[0]["accuracy"])
        for row in of(rows, method="auto")
    ]
    error = np.std(differences, ddof=1) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    visible = "could have been seen" if 2 * error < PAPERS_GAIN else "could not be seen with this error"
    said.append(
        f"Trained by the package's average, accuracy differs from the plain guide's by "
        f"{mean_and_error(differences, 2)} points over {len(differences)} pair(s), "
        + (
            "too few to tell"
            if math.isinf(error)
            else "no more than noise"
            if abs(np.mean(differences)) < 2 * error
            else "more than noise"
        )
        + f"; the paper's gains, of up to {PAPERS_GAIN} points, {visible}. {sum(same)} of {len(same)} guides "
        "trained by uniform relabellings came out identical to those trained by the package's average: both "
        "leave it out where units are separated, as it makes no difference there."
    )
    digits = results["digits"]
    for prior in dict.fromkeys(values(digits, "prior")):
        own = of(digits, prior=prior)
        by, by_g, by_nll = (chosen(own, key) for key in ("elbo", "symmetrised", "nll"))
        moved = sum(a != b for a, b in zip(by, by_g, strict=True))
        distances = [np.mean(np.abs(np.log(np.array(w) / np.array(by_nll)))) for w in (by, by_g)]
        verdict = (
            "the same width for every seed"
            if not moved
            else f"another width for {moved} of {len(by)} seeds, "
            + ("nearer to" if distances[1] < distances[0] else "no nearer to")
            + " that of the least held-out NLL"
        )
        missed = distances[1] > 0
        said.append(
            f"Small digits, prior {prior}: the plain ELBO is largest at h = {counted(by)}, the symmetrised "
            "at "
            f"{counted(by_g)}, and the held-out NLL is least at {counted(by_nll)}. So the gain chooses "
            f"{verdict}" + (", and the ELBO is not a guide to prediction here." if missed else ".")
        )
        small, large = (of(own, width=end(values(own, "width"))) for end in (min, max))
        narrow, wide = small[0]["width"], large[0]["width"]
        loss = np.mean(values(large, "elbo")) - np.mean(values(small, "elbo"))
        extra = average(large, "auto") - average(small, "auto")
        orders = math.lgamma(wide + 1) - math.lgamma(narrow + 1)
        said.append(
            f"There, from h = {narrow} to {wide}, L changes by {loss:+.0f} nats, the gain by {extra:+.0f} "
            "and "
            f"log h! by {orders:+.0f}: "
            + (
                "wider networks are better by L alone"
                if loss > 0
                else "what a mean-field guide pays for further units outweighs their relabellings"
                if -loss > extra
                else "the relabellings outweigh what a mean-field guide pays for further units"
            )
            + (
                ", and units that are not used are not counted."
                if extra < 0.95 * orders
                else ", and hardly any copies overlap."
            )
        )
    return said


def tables(results: Results) -> list[Table]:
    """Guides as trained; gains by estimator; widths of the small digits."""
    rows = results["mnist"]
    seeds = len(set(values(rows, "seed")))
    runs = list(dict.fromkeys((row["width"], row["method"]) for row in rows))
    trained = []
    for width, method in runs:
        own = of(rows, width=width, method=method)
        estimator = "auto" if method == "plain" else method
        total = [row["elbo"] + row["gains"][estimator]["lower"] for row in own]
        trained.append(
            [
                f"h = {width}, {method}",
                mean_and_error([100 * share for share in values(own, "accuracy")], 2),
                mean_and_error(values(own, "nll"), 4),
                mean_and_error(values(own, "elbo"), 0),
                f"{average(own, estimator):.2f}",
                mean_and_error(total, 0),
            ]
        )
    names = list(dict.fromkeys(name for row in rows if row["method"] == "plain" for name in row["gains"]))
    estimators = [name for name in names if name != "auto"]
    gains = []
    for width in dict.fromkeys(values(rows, "width")):
        own = of(rows, width=width, method="plain")
        gains.append(
            [
                f"{width}",
                f"{math.lgamma(width + 1):.2f}",
                *[f"{average(own, name):.2f}" for name in estimators],
                bracket(own),
            ]
        )
    digits, choice = results["digits"], []
    for prior in dict.fromkeys(values(digits, "prior")):
        for width in dict.fromkeys(values(digits, "width")):
            own = of(digits, prior=prior, width=width)
            choice.append(
                [
                    f"{prior}, h = {width}",
                    mean_and_error(values(own, "elbo"), 1),
                    f"{average(own, 'auto'):.1f} of {math.lgamma(width + 1):.1f}",
                    mean_and_error(values(own, "symmetrised"), 1),
                    mean_and_error(values(own, "nll"), 4),
                    mean_and_error([100 * share for share in values(own, "accuracy")], 1),
                    mean_and_error(values(own, "last"), 1),
                ]
            )
    return [
        Table(
            f"MNIST, guides as trained: mean ± standard error over {seeds} seed(s). The gain, a lower "
            "bound, is "
            "that of the guide's own estimator, of plain guides the package's. Symmetrised guides were "
            "trained "
            "at some widths only: where units are separated they are plain guides.",
            ("guide", "accuracy, %", "held-out NLL", "L, nats", "gain", "L + gain"),
            trained,
        ),
        Table(
            f"MNIST, the gain at the plain guides in nats, by estimator: means over {seeds} seed(s) (K = "
            "500: "
            "of the first); the package's from lower to upper bound.",
            ("h", "log h!", *[name.replace("uniform-", "uniform, K = ") for name in estimators], "auto"),
            gains,
        ),
        Table(
            f"Small digits: mean ± standard error over {len(set(values(digits, 'seed')))} seeds. In the last "
            "column what L gained in the last quarter of training, at small steps: how far from converged it "
            "may be.",
            ("prior and width", "L, nats", "gain", "L^G, nats", "held-out NLL", "accuracy, %", "last"),
            choice,
        ),
    ]


def figure(results: Results) -> Figure:
    """Gains against the width, and what chooses the width."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    left, *right = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    plain = of(results["mnist"], method="plain")
    widths = list(dict.fromkeys(values(plain, "width")))
    left.plot(
        widths, [math.lgamma(w + 1) for w in widths], "-", color=COLOURS["log h!"], lw=1, label="log h!"
    )
    for name in ("auto", *UNIFORM):
        found = [of(plain, width=width) for width in widths]
        if not any(name in row["gains"] for row in plain):
            continue
        low = np.array([average(rows, name) for rows in found])
        if name == "auto":
            high = np.array([average(rows, name, "upper") for rows in found])
            left.errorbar(
                widths,
                (low + high) / 2,
                abs(high - low) / 2,
                fmt="o",
                color=COLOURS[name],
                label="auto, bracket",
            )
        else:
            number = int(name.removeprefix("uniform-"))
            left.plot(widths, low, "s", ms=4, color=COLOURS[name], label=f"uniform, K = {number}")
            left.axhline(math.log(number), color=COLOURS[name], ls=":", lw=1)
    left.set(xscale="log", yscale="log", xlabel="width h, MNIST", ylabel="gain at the plain guide, nats")
    left.set_title("what estimators see (dotted: log K)", fontsize=10)
    left.set_ylim(top=20 * math.lgamma(max(widths) + 1))
    left.legend(fontsize=9, loc="upper left")
    _ticks(left, widths)
    digits = results["digits"]
    for panel, prior in zip(right, dict.fromkeys(values(digits, "prior")), strict=True):
        own = of(digits, prior=prior)
        widths = list(dict.fromkeys(values(own, "width")))
        second = panel.twinx()
        for axes, key, colour, style, label in (
            (panel, "elbo", "#D55E00", "-o", "L"),
            (panel, "symmetrised", "#0072B2", "-s", "$L^G$"),
            (second, "nll", "0.45", "--^", "NLL"),
        ):
            found = [values(of(own, width=width), key) for width in widths]
            error = [np.std(v, ddof=1) / math.sqrt(len(v)) for v in found]
            axes.errorbar(
                widths, np.mean(found, 1), error, fmt=style, color=colour, ms=4, lw=1.2, label=label
            )
        panel.set(xscale="log", xlabel="width h, 8 × 8 digits")
        panel.set_title(f"prior {prior}", fontsize=10)
        panel.tick_params(axis="y", labelsize=9)
        second.tick_params(axis="y", labelsize=9)
        _ticks(panel, widths)
        if panel is right[0]:
            panel.set_ylabel("ELBO, nats")
            handles = [*panel.get_legend_handles_labels()[0], *second.get_legend_handles_labels()[0]]
            figure.legend(
                handles,
                ["L", "$L^G$", "held-out NLL (right axis)"],
                loc="outside lower right",
                ncols=3,
                fontsize=9,
            )
        else:
            second.set_ylabel("held-out NLL, nats")
    return figure


def _ticks(axes: Any, widths: list[int]) -> None:
    """Widths as they are, on a logarithmic axis."""
    shown = [width for width in widths if width in (2, 5, 10, 20, 64, 128)]
    axes.set_xticks(shown, [str(width) for width in shown])
    axes.minorticks_off()
