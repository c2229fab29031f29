"""One step of SVI: a symmetrised mean-field guide against the plain one, on the same model and data.

Both start from the same values, train on, and take turns step by step.

    python -m benchmarks.svi_step --only wine

* ``digits``: a network 784-h-10 on MNIST, minibatches of 100, units far apart after the warm-up;
* ``wine``: the mixture of ``tutorials/00_quickstart.py``;
* ``curve``: a regression 1-50-1 whose units overlap, so that no step can be skipped;
* ``memory``: peak memory of a full bound for 512 units and 64 permutations, beside that of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.optim import Adam
from torch import Tensor

from benchmarks._models import Model, mnist
from benchmarks._runner import Ratio, Tables, apart, command_line, compare, figure, peak_memory, ratios
from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry

TITLE = "A step of SVI, symmetrised and plain"
OPTIONS = {"only": {"default": "", "help": "cases whose name has this in it"}}
Guide = Callable[..., Any]


def digits(width: int, **settings: Any) -> tuple[Model, Symmetry, Callable[[], tuple[Any, ...]], AutoNormal]:
    """The network, its symmetry, a sampler of minibatches, and a guide."""
    images, labels = mnist()

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


def measure(seconds: float, smoke: bool = False, only: str = "") -> Tables:
    """The cases, and the memory."""
    pyro.set_rng_seed(0)
    only = only or ("wine K=3" if smoke else "")
    tables = ratios(run(seconds / 2) for name, run in CASES.items() if only in name)
    if only in "memory":
        tables["Peak memory of a process, 512 units."] = [
            figure("symmetrised, 64 permutations, in full", apart(peak, True), "GiB"),
            figure("plain", apart(peak, False), "GiB"),
        ]
    return tables


if __name__ == "__main__":
    command_line("svi_step")
