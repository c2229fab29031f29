"""A step of stochastic-gradient MCMC beside its peers: posteriors, BlackJAX and a torch loop by hand.

Everybody draws its own minibatches and noise within the timing; contestants of a case take turns. Ours is
``pyro_sym.VectorizedMCMC`` on a Pyro model with a subsampled plate, a draw with its statistics every 10
steps, unless a row says otherwise.

    python -m benchmarks.sgmcmc --only pima mlp

* ``pima``: logistic regression on 8 columns, 32 of 768 rows a step, one chain;
* ``pima64``: 64 chains of it, time per chain and step;
* ``mlp``: a network 784-128-10 on 10,000 digits of MNIST, 128 of them a step, one chain;
* ``mlp16``: our 16 chains of it against one;
* ``cold``: seconds from a fresh process to the first draw, with no cache and with one;
* ``memory``: peak memory of 1,000 chains of ``pima``, and what each chain of a network of 10⁶ weights adds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._models import Model, mnist, network, network_model, pima_data, pima_model
from benchmarks._peers import blackjax_steps, missing, posteriors_steps
from benchmarks._runner import (
    Ratio,
    Row,
    Tables,
    apart,
    command_line,
    figure,
    peak_memory,
    ratios,
    take_turns,
)
from pyro_sym.model.gradient import Jit
from pyro_sym.sgmcmc.underdamped import SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC

TITLE = "A step of SG-MCMC"
THINNING = 10
Run = tuple[Callable[[], Any], int]
"""Some work, and for how many steps it counts."""


def kernel_of(model: Model, num_data: int, jit: Jit) -> SGHMC:
    """SGHMC as SGD of momentum 0.9, with noise."""
    return SGHMC.from_sgd(model, lr=1e-3, momentum=0.9, num_data=num_data, jit=jit, thinning=THINNING)


def ours(model: Model, num_data: int, jit: Jit, num_chains: int = 1) -> Run:
    """Draws of the driver, as its run() takes them."""
    kernel = kernel_of(model, num_data, jit)
    mcmc = VectorizedMCMC(kernel, 16, warmup_steps=0, num_chains=num_chains, disable_progbar=True)
    mcmc.run()
    chains, draws = mcmc._chains, mcmc._draws
    assert chains is not None and draws is not None

    def draw() -> None:
        draws.num_draws %= mcmc.num_samples
        chains.advance(mcmc.thinning, warming_up=False)
        draws.append()

    return draw, num_chains * THINNING


def ours_under_pyro(model: Model, num_data: int, jit: Jit) -> Run:
    """Draws of the kernel as ``pyro.infer.MCMC`` takes them."""
    kernel = kernel_of(model, num_data, jit)
    kernel.setup(0)
    params = dict(kernel.initial_params or {})

    def draw() -> None:
        nonlocal params
        params = kernel.sample(params)

    return draw, THINNING


def posteriors_on_pima() -> Run:
    """A step of posteriors' SGHMC; the log posterior is a Pyro model's, as in its own example."""
    x, y = pima_data()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("rows", 768, subsample=x):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        trace = pyro.poutine.trace(pyro.condition(model, params)).get_trace(*batch)
        return trace.log_prob_sum() / 768, torch.tensor([])

    return posteriors_steps(log_posterior, {"w": torch.zeros(8)}, x, y, batch=32, lr=1e-2), 1


def posteriors_on_net() -> Run:
    """A step of posteriors' SGHMC in place; the log posterior is written by hand for a torch module."""
    import posteriors

    x, y = mnist()
    net = network()

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, digits = batch
        logits = torch.func.functional_call(net, params, images)
        prior = posteriors.diag_normal_log_prob(params, normalize=False)
        return prior / len(x) - F.cross_entropy(logits, digits), torch.tensor([])

    params = {name: value.detach().clone() for name, value in net.named_parameters()}
    return posteriors_steps(log_posterior, params, x, y, batch=128, lr=1e-2, inplace=True), 1


def by_hand() -> Run:
    """A step of torch.optim.SGD with momentum and Gaussian noise, batches from memory."""
    x, y = mnist()
    net = network()
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=1 / len(x))
    scale = (2 * 0.1 * 1e-3 / len(x)) ** 0.5

    def step() -> None:
        rows = torch.randint(len(x), (128,))
        optimiser.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=scale)

    return step, 1


def blackjax_on_pima(num_chains: int = 1) -> Run:
    """Many steps of BlackJAX's SGHMC in one compiled scan, every 10th position kept."""
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(t.numpy()) for t in pima_data())

    def log_prior(w: Any) -> Any:
        return -0.5 * w @ w

    def log_likelihood(w: Any, row: Any) -> Any:
        logit = row[0] @ w
        return row[1] * logit - jax.nn.softplus(logit)

    return _scan(log_prior, log_likelihood, jnp.zeros(8), x, y, 32, num_chains, draws=200)


def blackjax_on_net() -> Run:
    """The same for the network."""
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(t.numpy()) for t in mnist())
    keys = jax.random.split(jax.random.key(0), 2)
    start = {
        "w1": 0.03 * jax.random.normal(keys[0], (784, 128)),
        "b1": jnp.zeros(128),
        "w2": 0.1 * jax.random.normal(keys[1], (128, 10)),
        "b2": jnp.zeros(10),
    }

    def log_prior(w: Any) -> Any:
        return -0.5 * sum(jnp.sum(value**2) for value in w.values())

    def log_likelihood(w: Any, row: Any) -> Any:
        hidden = jax.nn.relu(row[0] @ w["w1"] + w["b1"])
        return jax.nn.log_softmax(hidden @ w["w2"] + w["b2"])[row[1]]

    return _scan(log_prior, log_likelihood, start, x, y, 128, 1, draws=2)


def _scan(
    log_prior: Any, log_likelihood: Any, start: Any, x: Any, y: Any, batch: int, num_chains: int, draws: int
) -> Run:
    go_on = blackjax_steps(
        log_prior,
        log_likelihood,
        start,
        x,
        y,
        batch=batch,
        step_size=(1e-3 / len(x)) ** 0.5,
        friction=300.0,
        thinning=THINNING,
        draws=draws,
        num_chains=num_chains,
    )
    return go_on, num_chains * draws * THINNING


Race = tuple[dict[str, Callable[[], Run]], list[tuple[str, str, float | None]]]
"""Contestants by name, and the pairs of which a ratio is taken, with their targets."""


def races() -> dict[str, Race]:
    """By name; contestants whose name begins with that of a peer need it."""
    regression, net = pima_model(), network_model()
    return {
        "pima": (
            {
                "ours": lambda: ours(regression, 768, "auto"),
                "ours, compiled": lambda: ours(regression, 768, "compile"),
                "ours under MCMC": lambda: ours_under_pyro(regression, 768, "auto"),
                "ours under MCMC, compiled": lambda: ours_under_pyro(regression, 768, "compile"),
                "posteriors": posteriors_on_pima,
                "BlackJAX scan": blackjax_on_pima,
            },
            [
                ("ours", "posteriors", 1 / 5),
                ("ours under MCMC", "posteriors", 1 / 5),
                ("ours, compiled", "posteriors", 1 / 40),
                ("ours, compiled", "BlackJAX scan", 1.1),
                ("ours under MCMC, compiled", "BlackJAX scan", 1.1),
            ],
        ),
        "pima64": (
            {
                "ours": lambda: ours(regression, 768, "auto", 64),
                "ours, compiled": lambda: ours(regression, 768, "compile", 64),
                "BlackJAX scan + vmap": lambda: blackjax_on_pima(64),
            },
            [("ours", "BlackJAX scan + vmap", None), ("ours, compiled", "BlackJAX scan + vmap", 0.5)],
        ),
        "mlp": (
            {
                "ours": lambda: ours(net, 10_000, "auto"),
                "ours, compiled": lambda: ours(net, 10_000, "compile"),
                "torch by hand": by_hand,
                "posteriors": posteriors_on_net,
                "BlackJAX scan": blackjax_on_net,
            },
            [
                ("ours", "torch by hand", 1.15),
                ("ours, compiled", "torch by hand", 0.8),
                ("ours, compiled", "posteriors", 0.42),
                ("ours, compiled", "BlackJAX scan", 1.2),
            ],
        ),
        "mlp16": (
            {
                "16 chains": lambda: ours(net, 10_000, "auto", 16),
                "1 chain": lambda: ours(net, 10_000, "auto"),
                "16 chains, compiled": lambda: ours(net, 10_000, "compile", 16),
                "1 chain, compiled": lambda: ours(net, 10_000, "compile"),
            },
            [("16 chains", "1 chain", 1.0), ("16 chains, compiled", "1 chain, compiled", 1.0)],
        ),
    }


RACES = ("pima", "pima64", "mlp", "mlp16")


def race(name: str, seconds: float, smoke: bool) -> list[Ratio]:
    """The ratios of those that are there; a smoke run compiles nothing."""
    contestants, pairs = races()[name]
    absent = missing()

    def takes_part(contestant: str) -> bool:
        peer_is_there = contestant.split()[0].lower() not in absent
        return peer_is_there and not (smoke and "compiled" in contestant)

    here = {contestant: make() for contestant, make in contestants.items() if takes_part(contestant)}
    turns = take_turns(here, seconds)
    return [
        turns.ratio(name, own, peer, target=target)
        for own, peer, target in pairs
        if own in here and peer in here
    ]


def first_draw(which: str, jit: Jit) -> float:
    """Seconds to the first draw, the import of this package and of torch not counted."""
    model, num_data = (pima_model(), 768) if which == "pima" else (network_model(), 10_000)
    start = time.perf_counter()
    mcmc = VectorizedMCMC(kernel_of(model, num_data, jit), 1, warmup_steps=0, disable_progbar=True)
    mcmc.run()
    return time.perf_counter() - start


def peak_of_chains(which: str, num_chains: int, jit: Jit) -> float:
    """Bytes of memory at most, over a short run."""
    if which == "pima":
        model, num_data, draws = pima_model(), 768, 100
    else:
        model, num_data, draws = network_model(1258), 10_000, 1
    kernel = kernel_of(model, num_data, jit)
    mcmc = VectorizedMCMC(kernel, draws, warmup_steps=0, num_chains=num_chains, disable_progbar=True)
    mcmc.run()
    return peak_memory()


def cold() -> list[Row]:
    """Seconds to the first draw of a fresh process."""
    rows = []
    for which in ("pima", "mlp"):
        rows.append(figure(f"{which}, traced", apart(first_draw, which, "auto"), "s", 2))
        with tempfile.TemporaryDirectory() as cache:
            for run, limit in (("compiled", 30), ("compiled before", 3)):
                place = {"TORCHINDUCTOR_CACHE_DIR": cache}
                took = apart(first_draw, which, "compile", environment=place)
                rows.append(figure(f"{which}, {run}", took, "s", limit))
    return rows


def memory() -> list[Row]:
    """Peak memory; a process has one peak, so each figure gets processes of its own."""
    rows = []
    jits: tuple[Jit, ...] = ("auto", "compile")
    for jit in jits:
        total = apart(peak_of_chains, "pima", 1000, jit) / 2**30
        rows.append(figure(f"1,000 chains of pima, {jit}", total, "GiB", 1))
        few, many = (apart(peak_of_chains, "net", chains, jit) for chains in (2, 6))
        weights = 4 * (784 * 1258 + 1258 + 10 * 1258 + 10)
        each = (many - few) / 4 / weights
        rows.append(figure(f"a chain of 10⁶ weights, {jit}", each, "times the weights", 6))
    return rows


OPTIONS = {"only": {"nargs": "+", "choices": [*RACES, "cold", "memory"], "default": None}}


def measure(seconds: float, smoke: bool = False, only: Sequence[str] | None = None) -> Tables:
    """The races, cold starts and memory."""
    pyro.set_rng_seed(0)
    only = only or (["pima"] if smoke else [*RACES, "cold", "memory"])
    rows = [row for name in RACES if name in only for row in race(name, seconds, smoke)]
    tables = ratios(rows, missing()) if rows else {}
    if "cold" in only:
        tables["From a fresh process to the first draw, imports not counted, by wall clock."] = cold()
    if "memory" in only:
        tables["Peak memory."] = memory()
    return tables


if __name__ == "__main__":
    command_line("sgmcmc")
