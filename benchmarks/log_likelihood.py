"""The log likelihood of every datum at every draw: vectorised over draws, beside the loop and Pyro's own way.

All take turns, in float64; before that their results are compared.

* the loop conditions the model on one draw after another, and asks its trace;
* Pyro's vectorised trace puts a plate of draws around the model, which ``x @ w`` doesn't survive: it takes
  part with a model that is written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Predictive
from torch import Tensor

from benchmarks._models import Model
from benchmarks._runner import Ratio, Tables, command_line, figure, ratios, take_turns
from pyro_sym import log_likelihood

TITLE = "Log likelihoods of all data at all draws"
NUM_DRAWS, NUM_DATA = 400, 500


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


def measure(seconds: float, smoke: bool = False) -> Tables:
    """Compare and time."""
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
    worst = 0.0
    for model, sites in shapes.items():
        draws = {name: torch.randn(NUM_DRAWS, *shape) for name, shape in sites.items()}
        contestants: dict[str, Callable[[], Tensor]] = {
            "vectorised": lambda m=model, d=draws: log_likelihood(m, d, x, y)["y"],  # type: ignore[misc]
            "loop": lambda m=model, d=draws: by_loop(m, d, x, y),  # type: ignore[misc]
        }
        if model is for_plates:
            contestants["vectorised trace"] = lambda d=draws: by_plate(for_plates, d, x, y)  # type: ignore[misc]
        results = {name: run() for name, run in contestants.items()}
        worst = max(worst, *(float((r - results["loop"]).abs().max()) for r in results.values()))
        turns = take_turns({name: (run, 1) for name, run in contestants.items()}, seconds, block=1)
        for peer in list(contestants)[1:]:
            target = 0.1 if peer == "loop" else None
            rows.append(turns.ratio(model.__name__, "vectorised", peer, target=target))
    agreement = figure("largest difference to the loop", worst, "nats", 1e-9)
    return ratios(rows) | {"Before that.": [agreement]}


if __name__ == "__main__":
    command_line("log_likelihood")
