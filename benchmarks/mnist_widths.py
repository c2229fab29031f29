r"""A one-hidden-layer Bayesian network on MNIST digits: what averaging over its h! relabellings is worth.

The setting is that of Gelberg et al. 2024 (arXiv 2408.05496, table 1), on the 10,000 digits that MNIST tests
with, split 8,000 / 2,000: weights and biases N(0, 1), mean-field normal guide, Adam at 1e-3, batches of 100,
10 epochs, 1,000 predictive draws. Three kinds of guide are trained, each from the same initial values:

* ``plain``, the mean-field guide itself;
* ``uniform-K``, averaged over K relabellings drawn uniformly, as in the paper;
* ``auto``, averaged with what the package chooses: the exact permanent for up to 14 units, and guided
  permutations above.

Reported are the accuracy of the predictive mean, and :math:`\mathcal L^G = \mathcal L + I(g; \omega)` with
the gain :math:`I` as each guide's own estimator has it. :math:`\mathcal L` takes the KL to the prior in
closed form and draws only for the likelihood, with the same random numbers for every guide. A second table
evaluates all estimators at one and the same trained guide, the plain one; there K can be large.

After 10 epochs the guides are far from converged (``--epochs``), so their ELBOs compare guides, not widths.

    python benchmarks/mnist_widths.py                    # the paper's largest width, three seeds
    python benchmarks/mnist_widths.py --widths 5 10 20 30
    python benchmarks/mnist_widths.py --smoke            # does it run?

The digits are looked for in the folder that the environment variable PYRO_SYM_DATA names.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from torch import Tensor

import pyro_sym as ps

HERE = Path(__file__).resolve().parent
DATA = Path(os.environ.get("PYRO_SYM_DATA", HERE.parent.parent / "shared" / "data"))
PIXELS, CLASSES, TRAIN, BATCH = 784, 10, 8_000, 100
SPLIT_SEED = 0

Model = Callable[..., None]
SYMMETRY = ps.Permutation({"w1": -1, "b1": -1, "w2": -2})


def digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1], of shape (10000, 784), and labels, in one fixed random order."""

    def read(name: str, header: int) -> Tensor:
        path = DATA / f"mnist-10k-{name}-ubyte.gz"
        if not path.exists():
            raise SystemExit(f"{path} is missing: set PYRO_SYM_DATA to the folder that has it")
        return torch.tensor(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header))

    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(SPLIT_SEED))
    images = read("images-idx3", header=16).reshape(-1, PIXELS) / 255.0
    return images[order], read("labels-idx1", header=8).long()[order]


def network(width: int) -> Model:
    """The Bayesian network with one hidden layer of ReLU units."""

    def model(x: Tensor, y: Tensor, batch: int | None = None) -> None:
        def normal(name: str, *shape: int) -> Tensor:
            return pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))

        w1, b1 = normal("w1", PIXELS, width), normal("b1", width)
        w2, b2 = normal("w2", width, CLASSES), normal("b2", CLASSES)
        with pyro.plate("data", len(x), subsample_size=batch) as rows:
            logits = (x[rows] @ w1 + b1).relu() @ w2 + b2
            pyro.sample("y", dist.Categorical(logits=logits), obs=y[rows])

    return model


def init_loc(site: Any) -> Tensor:
    """Weights of variance 2 / fan-in, biases zero: at zero all units would start alike."""
    draw = torch.randn_like(site["fn"].mean)
    return draw * math.sqrt(2 / len(draw)) if draw.dim() == 2 else torch.zeros_like(draw)


def make_guide(model: Model, method: str) -> torch.nn.Module:
    """The guide that a method's name stands for."""
    base = AutoNormal(model, init_loc_fn=init_loc)
    if method == "plain":
        return base
    if method == "auto":
        return ps.AutoSymmetrized(base, SYMMETRY)
    num_elements = int(method.removeprefix("uniform-"))
    return ps.AutoSymmetrized(base, SYMMETRY, estimator="uniform", num_elements=num_elements)


def symmetrised_at(model: Model, base: AutoNormal, method: str, x: Tensor, y: Tensor) -> ps.AutoSymmetrized:
    """A symmetrised guide with the parameters of a plain one that has been trained."""
    guide = make_guide(model, method)  # Pyro lets no module join another one after it has run
    guide(x, y)
    guide.guide.load_state_dict(base.state_dict())
    return guide


def train(model: Model, guide: torch.nn.Module, x: Tensor, y: Tensor, epochs: int) -> float:
    """Train a guide; return the CPU seconds that took."""
    svi = SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO())
    start = time.process_time()
    for _ in range(epochs * TRAIN // BATCH):
        svi.step(x, y, BATCH)
    return time.process_time() - start


@torch.no_grad()
def plain_elbo(model: Model, base: AutoNormal, x: Tensor, y: Tensor, draws: int) -> float:
    """The ELBO of the base guide, in nats, on all of the training data."""
    elbo = TraceMeanField_ELBO()
    return -sum(elbo.loss(model, base, x, y) for _ in range(draws)) / draws


@torch.no_grad()
def accuracy(guide: torch.nn.Module, x: Tensor, y: Tensor, draws: int) -> float:
    """The share of digits that the predictive mean over draws of the guide gets right."""
    total = torch.zeros(len(x), CLASSES)
    for _ in range(draws // 20):
        several = [guide(x, y) for _ in range(20)]
        w = {name: torch.stack([one[name] for one in several]) for name in several[0]}
        hidden = (torch.einsum("nd,sdh->snh", x, w["w1"]) + w["b1"].unsqueeze(1)).relu()
        total += (hidden @ w["w2"] + w["b2"].unsqueeze(1)).softmax(-1).sum(0)
    return float((total.argmax(-1) == y).double().mean())


def gain(guide: ps.AutoSymmetrized, x: Tensor, y: Tensor, draws: int) -> dict[str, Any]:
    """The symmetry gain, in as many calls as keep the images of one below about 1,000 networks."""
    images = max(guide.num_elements, 64)
    rounds = max(1, draws * images // 1_000)
    gains = [guide.symmetry_gain(x, y, num_samples=math.ceil(draws / rounds)) for _ in range(rounds)]
    return {
        "method": guide.method,
        "lower": sum(g.lower for g in gains) / rounds,
        "upper": sum(g.upper for g in gains) / rounds,
        "standard_error": math.sqrt(sum(g.standard_error**2 for g in gains)) / rounds,
    }


def mean_and_error(values: list[float], decimals: int) -> str:
    """Mean, and its standard error over seeds where there are several."""
    mean = f"{np.mean(values):.{decimals}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{decimals}f}"


def study(width: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train and evaluate every method with every seed at one width; print and return one row a run."""
    x, y = digits()
    x, y, x_test, y_test = x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]
    model = network(width)
    rows = []
    for seed in range(args.seeds):
        for method in args.methods:
            pyro.clear_param_store()
            pyro.set_rng_seed(seed)
            guide = make_guide(model, method)
            guide(x, y, BATCH)  # sets up; the initial values are the first thing drawn
            row: dict[str, Any] = {"width": width, "seed": seed, "method": method}
            row["seconds"] = train(model, guide, x, y, args.epochs)
            pyro.set_rng_seed(seed)
            base = guide if method == "plain" else guide.guide
            row["plain_elbo"] = plain_elbo(model, base, x, y, args.elbo_draws)
            row["accuracy"] = accuracy(guide, x_test, y_test, args.draws)
            row["gain"] = 0.0 if method == "plain" else gain(guide, x, y, args.gain_draws)["lower"]
            row["elbo"] = row["plain_elbo"] + row["gain"]
            row["gains"] = {}
            if method == "plain":
                for other in args.gains:
                    at_plain = symmetrised_at(model, base, other, x, y)
                    row["gains"][other] = gain(at_plain, x, y, args.gain_draws)
            rows.append(row)
            print(
                f"  seed {seed}  {method:<12}{row['seconds']:6.0f} s  accuracy {100 * row['accuracy']:.2f} %"
                f"  L {row['plain_elbo']:.1f}  gain {row['gain']:.3f}",
                flush=True,
            )
    return rows


def report(width: int, rows: list[dict[str, Any]]) -> None:
    """Print both tables of one width."""
    seeds = len({row["seed"] for row in rows})
    print(
        f"\nh = {width}, log h! = {math.lgamma(width + 1):.3f} nats; mean ± standard error, {seeds} seed(s)"
    )
    print(f"{'trained as':<13}{'accuracy, %':>14}{'L':>19}{'gain':>9}{'L^G = L + gain':>19}{'CPU s':>9}")
    for method in dict.fromkeys(row["method"] for row in rows):
        columns = {key: [row[key] for row in rows if row["method"] == method] for key in rows[0]}
        print(
            f"{method:<13}"
            f"{mean_and_error([100 * share for share in columns['accuracy']], 2):>14}"
            f"{mean_and_error(columns['plain_elbo'], 1):>19}"
            f"{np.mean(columns['gain']):9.3f}"
            f"{mean_and_error(columns['elbo'], 1):>19}"
            f"{np.mean(columns['seconds']):9.0f}"
        )
    at_plain = [row for row in rows if row["gains"]]
    if at_plain:
        print(f"\n{'gain at the plain guides':<26}{'reported':>10}{'upper bound':>13}{'log K':>8}")
        for method in at_plain[0]["gains"]:
            gains = [row["gains"][method] for row in at_plain]
            log_elements = (
                f"{math.log(int(method.removeprefix('uniform-'))):.3f}"
                if method.startswith("uniform-")
                else ""
            )
            print(
                f"{method + ' (' + gains[0]['method'] + ')':<26}"
                f"{np.mean([g['lower'] for g in gains]):10.3f}"
                f"{np.mean([g['upper'] for g in gains]):13.3f}"
                f"{log_elements:>8}"
            )
    print()


def provenance() -> dict[str, Any]:
    """What it takes to run this again: versions, commit and machine."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True).stdout.strip()

    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyro": pyro.__version__,
        },
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread",
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="MNIST, one hidden layer: plain and symmetrised guides")
    parser.add_argument("--widths", type=int, nargs="+", default=[30])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--draws", type=int, default=1_000, help="predictive draws, in twenties")
    parser.add_argument("--elbo-draws", type=int, default=100)
    parser.add_argument("--gain-draws", type=int, default=8)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["plain", "uniform-5", "uniform-10", "uniform-20", "auto"],
        help="guides to train: plain, auto, uniform-K",
    )
    parser.add_argument(
        "--gains",
        nargs="+",
        default=["uniform-5", "uniform-10", "uniform-20", "uniform-500", "auto"],
        help="estimators to evaluate at the plain guides: auto, uniform-K",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny run of every part")
    parser.add_argument(
        "--json", nargs="?", const="mnist_widths.json", help="write a file under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.smoke:
        args.widths, args.seeds, args.epochs, args.draws, args.elbo_draws, args.gain_draws = (
            [5],
            1,
            1,
            20,
            5,
            4,
        )
        args.methods, args.gains = ["plain", "uniform-5", "auto"], ["uniform-5", "uniform-20", "auto"]
    return args


def main() -> None:
    """Run the study, print its tables, and keep them if asked to."""
    args = arguments()
    torch.set_num_threads(1)
    origin = provenance()
    rows = []
    for width in args.widths:
        rows += (of_width := study(width, args))
        report(width, of_width)
    if args.json:
        path = HERE / "results" / args.json
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**origin, "arguments": vars(args), "runs": rows}, indent=1) + "\n")
        print(f"wrote {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
