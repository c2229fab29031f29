"""The log likelihood of every datum at every draw: vectorised over draws, beside the loop and Pyro's own way.

Run it with ``python -m nox -s bench``, or ``python benchmarks/log_likelihood.py [--json FILE]``, which keeps
the figures. All take turns, on one thread, in float64; before that their results are compared.

* the loop conditions the model on one draw after another, and asks its trace;
* Pyro's vectorised trace puts a plate of draws around the model, which ``x @ w`` doesn't survive: it takes
  part with a model that is written for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _runner import Ratio, save, show, take_turns
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from pyro_sym import log_likelihood

NUM_DRAWS, NUM_DATA = 400, 500
Model = Callable[..., Any]


def logistic(x: Tensor, y: Tensor) -> None:
    """A logistic regression as it is usually written."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def for_plates(x: Tensor, y: Tensor) -> None:
    """The same, so that a plate around it works."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=(x * w).sum(-1) + b), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    """A network with 50 hidden units."""
    w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([3, 50]).to_event(2))
    w2 = pyro.sample("w2", dist.Normal(0.0, 1.0).expand([50]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=torch.tanh(x @ w1) @ w2), obs=y)


def by_loop(model: Model, draws: dict[str, Tensor], *args: Any) -> Tensor:
    """Condition, trace, ask the site."""
    rows = []
    with torch.no_grad():
        for i in range(NUM_DRAWS):
            draw = {name: value[i] for name, value in draws.items()}
            site = poutine.trace(poutine.condition(model, data=draw)).get_trace(*args).nodes["y"]
            rows.append(site["fn"].log_prob(site["value"]))
    return torch.stack(rows)


def by_plate(model: Model, draws: dict[str, Tensor], *args: Any) -> Tensor:
    """Pyro's vectorised trace; values are padded for the plate of the data."""
    padded = {"w": draws["w"].unsqueeze(1), "b": draws["b"].unsqueeze(1)}
    with torch.no_grad():
        trace = Predictive(model, posterior_samples=padded, parallel=True).get_vectorized_trace(*args)
        site = trace.nodes["y"]
        return site["fn"].log_prob(site["value"])


def main() -> None:
    """Compare, time, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    x = torch.randn(NUM_DATA, 3)
    y = (torch.rand(NUM_DATA) > 0.5).double()
    shapes: dict[Model, dict[str, tuple[int, ...]]] = {
        logistic: {"w": (3,), "b": ()},
        for_plates: {"w": (3,), "b": ()},
        network: {"w1": (3, 50), "w2": (50,)},
    }
    rows: list[Ratio] = []
    for model, sites in shapes.items():
        draws = {name: torch.randn(NUM_DRAWS, *shape) for name, shape in sites.items()}
        contestants: dict[str, Callable[[], Tensor]] = {
            "vectorised": lambda m=model, d=draws: log_likelihood(m, d, x, y)["y"],  # type: ignore[misc]
            "loop": lambda m=model, d=draws: by_loop(m, d, x, y),  # type: ignore[misc]
        }
        if model is for_plates:
            contestants["vectorised trace"] = lambda d=draws: by_plate(for_plates, d, x, y)  # type: ignore[misc]
        results = {name: run() for name, run in contestants.items()}
        for name, result in results.items():
            worst = float((result - results["loop"]).abs().max())
            print(f"{model.__name__}: {name} differs from the loop by {worst:.1e} at most")
        turns = take_turns({name: (run, 1) for name, run in contestants.items()}, options.seconds, block=1)
        for peer in list(contestants)[1:]:
            target = 0.1 if peer == "loop" else None
            rows.append(turns.ratio(model.__name__, "vectorised", peer, target=target))
    show(rows)
    if options.json is not None:
        save(options.json, rows)


if __name__ == "__main__":
    main()
