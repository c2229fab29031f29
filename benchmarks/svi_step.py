"""One step of SVI: a symmetrised mean-field guide against the plain one, on the same model and data.

Run it with ``python -m nox -s bench``, or ``python benchmarks/svi_step.py [--json FILE] [--only WORD]``.
Both guides start from the same values, train on, and take turns step by step, on one thread.

* ``digits``: a network 784-h-10 on MNIST, minibatches of 100, units far apart after the warm-up;
* ``wine``: the mixture of ``tutorials/00_quickstart.py``;
* ``curve``: a regression 1-50-1 whose units overlap, so that no step can be skipped;
* ``memory``: peak memory of a full bound for 512 units and 64 permutations, above that of the plain step.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from _runner import Ratio, compare, peak_memory, save, show
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.optim import Adam
from torch import Tensor

from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry

DATA = Path(os.environ.get("PYRO_SYM_DATA", Path(__file__).parents[2] / "shared" / "data"))
Guide = Callable[..., Any]
Model = Callable[..., Any]


def digits(width: int, **settings: Any) -> tuple[Model, Symmetry, Callable[[], tuple[Any, ...]], AutoNormal]:
    """The network, its symmetry, a sampler of minibatches, and a guide."""
    images, labels = _mnist()

    def model(x: Tensor, y: Tensor) -> None:
        w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([784, width]).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(0.0, 1.0).expand([width]).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(0.0, width**-0.5).expand([width, 10]).to_event(2))
        b2 = pyro.sample("b2", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
        with pyro.plate("data", len(images), subsample=x):
            logits = torch.tanh(x @ w1 / 28 + b1) @ w2 + b2
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    def batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(images), (100,))
        return images[rows], labels[rows]

    axes = {"w1": -1, "b1": -1, "w2": -2}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    return model, symmetry, batch, lambda: AutoNormal(model, init_loc_fn=init_to_sample, init_scale=0.05)


def wine(components: int) -> tuple[Model, Symmetry, Callable[[], tuple[Any, ...]], AutoNormal]:
    """The quickstart's mixture."""
    from sklearn.datasets import load_wine

    raw = load_wine().data
    x = torch.tensor((raw - raw.mean(0)) / raw.std(0), dtype=torch.float)
    features = x.shape[1]

    def model(x: Tensor) -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.full((components,), 2.0)))
        with pyro.plate("component", components):
            locs = pyro.sample("locs", dist.Normal(torch.zeros(features), 2.0).to_event(1))
            scales = pyro.sample("scales", dist.LogNormal(torch.zeros(features), 0.5).to_event(1))
        with pyro.plate("bottle", len(x)):
            mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales).to_event(1))
            pyro.sample("x", mixture, obs=x)

    symmetry = Permutation({"weights": -1, "locs": -2, "scales": -2})
    return model, symmetry, lambda: (x,), lambda: AutoNormal(model)


def curve(width: int = 50) -> tuple[Model, Symmetry, Callable[[], tuple[Any, ...]], AutoNormal]:
    """Forty points of a curve: most of the units keep to the prior."""
    x = torch.linspace(-2, 2, 40).unsqueeze(-1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1)

    def model(x: Tensor, y: Tensor) -> None:
        w1 = pyro.sample("w1", dist.Normal(0.0, 2.0).expand([1, width]).to_event(2))
        b1 = pyro.sample("b1", dist.Normal(0.0, 2.0).expand([width]).to_event(1))
        w2 = pyro.sample("w2", dist.Normal(0.0, width**-0.5).expand([width, 1]).to_event(2))
        with pyro.plate("data", len(x), dim=-2):
            pyro.sample("y", dist.Normal(torch.tanh(x @ w1 + b1) @ w2, 0.1), obs=y)

    symmetry = Permutation({"w1": -1, "b1": -1, "w2": -2})
    return (
        model,
        symmetry,
        lambda: (x, y),
        lambda: AutoNormal(model, init_loc_fn=init_to_sample, init_scale=1.0),
    )


def step_of(model: Model, guide: Guide, batch: Callable[[], tuple[Any, ...]], lr: float) -> Callable[[], Any]:
    """One step of SVI."""
    svi = SVI(model, guide, Adam({"lr": lr}), Trace_ELBO())
    return lambda: svi.step(*batch())


def case(name: str, setting: tuple[Any, ...], *, warm_up: int, seconds: float, lr: float) -> Ratio:
    """Train plain, then go on from there with both guides."""
    pyro.clear_param_store()
    model, symmetry, batch, make = setting
    plain = make()
    step = step_of(model, plain, batch, lr)
    for _ in range(warm_up):
        step()
    guide = AutoSymmetrized(make(), symmetry)
    guide(*batch())
    guide.guide.load_state_dict(plain.state_dict())
    ours, peer = (step_of(model, g, batch, lr) for g in (guide, plain))

    def note() -> str:
        return str(guide.method)

    return compare(name, ours, peer, seconds=seconds, note=note)


CASES: dict[str, Callable[[float], Ratio]] = {
    "digits h=30": lambda s: case("digits h=30", digits(30), warm_up=100, seconds=s, lr=1e-3),
    "digits h=128": lambda s: case("digits h=128", digits(128), warm_up=100, seconds=s, lr=1e-3),
    "digits h=512": lambda s: case("digits h=512", digits(512), warm_up=30, seconds=2 * s, lr=1e-3),
    "wine K=3": lambda s: case("wine K=3", wine(3), warm_up=300, seconds=s, lr=0.03),
    "wine K=10": lambda s: case("wine K=10", wine(10), warm_up=300, seconds=s, lr=0.03),
    "curve": lambda s: case("curve", curve(), warm_up=200, seconds=s, lr=1e-2),
}


def _mnist() -> tuple[Tensor, Tensor]:
    with gzip.open(DATA / "mnist-10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(DATA / "mnist-10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.tensor(images / 255.0, dtype=torch.float), torch.tensor(labels, dtype=torch.long)


def peak(symmetrised: bool) -> float:
    """GiB of memory at most, over three steps of the widest network with the average in full."""
    model, symmetry, batch, make = digits(512)
    guide: Guide = make()
    if symmetrised:
        guide = AutoSymmetrized(guide, symmetry, num_elements=64, tolerance=None)
    step = step_of(model, guide, batch, 1e-3)
    for _ in range(3):
        step()
    return peak_memory() / 2**30


def peak_of_a_process(which: str) -> float:
    """Memory has a peak only once: each guide gets a process."""
    command = [sys.executable, __file__, "--peak", which]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each case")
    parser.add_argument("--peak", choices=["ours", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    if options.peak:
        print(peak(options.peak == "ours"))
        return
    rows = [run(options.seconds) for name, run in CASES.items() if options.only in name]
    show(rows)
    memory = {}
    if options.only in "memory":
        memory = {which: peak_of_a_process(which) for which in ("ours", "plain")}
        print(f"memory, h=512, K=64: {memory['ours']:.2f} GiB, plain {memory['plain']:.2f} GiB")
    if options.json:
        save(options.json, rows, memory_gib=memory)


if __name__ == "__main__":
    main()
