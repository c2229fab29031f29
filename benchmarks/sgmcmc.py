"""A step of stochastic-gradient MCMC beside its peers: posteriors, BlackJAX and a torch loop by hand.

Run it with ``python -m nox -s bench_sgmcmc``, or ``python benchmarks/sgmcmc.py [--json FILE] [--only WORD]``.
Everybody draws its own minibatches and noise within the timing; contestants of a case take turns, on one
thread. Ours is :class:`pyro_sym.VectorizedMCMC` on a Pyro model with a subsampled plate, a draw with its
statistics every 10 steps, unless a row says otherwise.

* ``pima``: logistic regression on 8 columns, 32 of 768 rows a step, one chain;
* ``pima64``: 64 chains of it, time per chain and step;
* ``mlp``: a network 784-128-10 on 10,000 digits of MNIST, 128 of them a step, one chain;
* ``mlp16``: our 16 chains of it against one;
* ``cold``: seconds from a fresh process to the first draw, with no cache and with one;
* ``memory``: peak memory of 1,000 chains of ``pima``, and what each chain of a network of 10⁶ weights adds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _runner import Ratio, peak_memory, save, show, take_turns
from torch import Tensor, nn

from pyro_sym.infer.gradient import Jit
from pyro_sym.infer.kernels import SGHMC
from pyro_sym.infer.vectorized import VectorizedMCMC

DATA = Path(os.environ.get("PYRO_SYM_DATA", Path(__file__).parents[2] / "shared" / "data"))
THINNING = 10
Model = Callable[[], None]
Run = tuple[Callable[[], Any], int]
"""Some work, and for how many steps it counts."""


def pima_data() -> tuple[Tensor, Tensor]:
    """Columns, standardised, and labels."""
    table = np.loadtxt(DATA / "pima-indians-diabetes.csv", delimiter=",", dtype=np.float32)
    columns = torch.tensor(table[:, :8])
    return (columns - columns.mean(0)) / columns.std(0), torch.tensor(table[:, 8])


def pima_model() -> Model:
    """Logistic regression with minibatches of 32."""
    x, y = pima_data()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("rows", len(x), subsample_size=32) as rows:
            pyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])

    return model


def mnist() -> tuple[Tensor, Tensor]:
    """Images, of shape (10000, 784), and digits."""
    with gzip.open(DATA / "mnist-10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(DATA / "mnist-10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.tensor(images / 255.0, dtype=torch.float), torch.tensor(labels, dtype=torch.long)


def net_model(width: int = 128) -> Model:
    """The network as a plain Pyro model, with minibatches of 128."""
    x, y = mnist()
    shapes = {"w1": (width, 784), "b1": (width,), "w2": (10, width), "b2": (10,)}

    def model() -> None:
        w1, b1, w2, b2 = (
            pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
            for name, shape in shapes.items()
        )
        with pyro.plate("rows", len(x), subsample_size=128) as rows:
            logits = F.linear(torch.relu(F.linear(x[rows], w1, b1)), w2, b2)
            pyro.sample("y", dist.Categorical(logits=logits), obs=y[rows])

    return model


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
    import posteriors

    x, y = pima_data()

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("rows", 768, subsample=x):
            pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        trace = pyro.poutine.trace(pyro.condition(model, params)).get_trace(*batch)
        return trace.log_prob_sum() / 768, torch.tensor([])

    method = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-2, alpha=1.0, temperature=1 / 768)
    return _posteriors_step(method, {"w": torch.zeros(8)}, x, y, 32), 1


def posteriors_on_net() -> Run:
    """A step of posteriors' SGHMC in place; the log posterior is written by hand for a torch module."""
    import posteriors

    x, y = mnist()
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def log_posterior(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, digits = batch
        logits = torch.func.functional_call(net, params, images)
        prior = posteriors.diag_normal_log_prob(params, normalize=False)
        return prior / len(x) - F.cross_entropy(logits, digits), torch.tensor([])

    method = posteriors.sgmcmc.sghmc.build(log_posterior, lr=1e-2, alpha=1.0, temperature=1 / len(x))
    params = {name: value.detach().clone() for name, value in net.named_parameters()}
    return _posteriors_step(method, params, x, y, 128, inplace=True), 1


def _posteriors_step(
    method: Any, params: dict[str, Tensor], x: Tensor, y: Tensor, batch: int, inplace: bool = False
) -> Callable[[], Any]:
    state = method.init(params)

    def step() -> None:
        nonlocal state
        rows = torch.randint(len(x), (batch,))
        state, _ = method.update(state, (x[rows], y[rows]), inplace=inplace)

    return step


def by_hand() -> Run:
    """A step of torch.optim.SGD with momentum and Gaussian noise, batches from memory."""
    x, y = mnist()
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
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
    import jax
    from blackjax.sgmcmc import diffusions, gradients

    gradient_of = gradients.grad_estimator(log_prior, log_likelihood, len(x))
    # blackjax.sghmc keeps one minibatch for all steps between two momenta: this is its step, each on its own.
    integrator = diffusions.sghmc(alpha=300.0)
    step_size = (1e-3 / len(x)) ** 0.5

    def step(state: Any, key: Any) -> Any:
        for_rows, for_noise = jax.random.split(key)
        rows = jax.random.randint(for_rows, (batch,), 0, len(x))
        gradient = gradient_of(state[0], (x[rows], y[rows]))
        return integrator(for_noise, *state, gradient, step_size, 1.0), None

    def draw(state: Any, key: Any) -> Any:
        state, _ = jax.lax.scan(step, state, jax.random.split(key, THINNING))
        return state, state[0]

    def chain(state: Any, key: Any) -> Any:
        return jax.lax.scan(draw, state, jax.random.split(key, draws))

    run = jax.jit(chain if num_chains == 1 else jax.vmap(chain))
    state = (start, jax.tree.map(jax.numpy.zeros_like, start))
    if num_chains > 1:
        state = jax.tree.map(lambda value: jax.numpy.broadcast_to(value, (num_chains, *value.shape)), state)
    key = jax.random.key(0)

    def go_on() -> None:
        nonlocal state, key
        key, now = jax.random.split(key)
        state, kept = run(state, now if num_chains == 1 else jax.random.split(now, num_chains))
        jax.block_until_ready(kept)

    return go_on, num_chains * draws * THINNING


def pima(seconds: float) -> list[Ratio]:
    """One chain of logistic regression."""
    model = pima_model()
    times = take_turns(
        {
            "ours": ours(model, 768, "auto"),
            "ours, compiled": ours(model, 768, "compile"),
            "ours under MCMC": ours_under_pyro(model, 768, "auto"),
            "ours under MCMC, compiled": ours_under_pyro(model, 768, "compile"),
            "posteriors": posteriors_on_pima(),
            "BlackJAX scan": blackjax_on_pima(),
        },
        seconds,
    )
    return [
        times.ratio("pima", "ours", "posteriors", target=1 / 5),
        times.ratio("pima", "ours under MCMC", "posteriors", target=1 / 5),
        times.ratio("pima", "ours, compiled", "posteriors", target=1 / 40),
        times.ratio("pima", "ours, compiled", "BlackJAX scan", target=1.1),
        times.ratio("pima", "ours under MCMC, compiled", "BlackJAX scan", target=1.1),
    ]


def pima64(seconds: float) -> list[Ratio]:
    """Sixty-four chains of logistic regression."""
    model = pima_model()
    times = take_turns(
        {
            "ours": ours(model, 768, "auto", 64),
            "ours, compiled": ours(model, 768, "compile", 64),
            "BlackJAX scan + vmap": blackjax_on_pima(64),
        },
        seconds,
    )
    return [
        times.ratio("pima64", "ours", "BlackJAX scan + vmap"),
        times.ratio("pima64", "ours, compiled", "BlackJAX scan + vmap", target=0.5),
    ]


def mlp(seconds: float) -> list[Ratio]:
    """One chain of a network."""
    model = net_model()
    times = take_turns(
        {
            "ours": ours(model, 10_000, "auto"),
            "ours, compiled": ours(model, 10_000, "compile"),
            "torch by hand": by_hand(),
            "posteriors": posteriors_on_net(),
            "BlackJAX scan": blackjax_on_net(),
        },
        seconds,
    )
    return [
        times.ratio("mlp", "ours", "torch by hand", target=1.15),
        times.ratio("mlp", "ours, compiled", "torch by hand", target=0.8),
        times.ratio("mlp", "ours, compiled", "posteriors", target=0.42),
        times.ratio("mlp", "ours, compiled", "BlackJAX scan", target=1.2),
    ]


def mlp16(seconds: float) -> list[Ratio]:
    """Chains of a network, per chain and step."""
    model = net_model()
    times = take_turns(
        {
            "16 chains": ours(model, 10_000, "auto", 16),
            "1 chain": ours(model, 10_000, "auto"),
            "16 chains, compiled": ours(model, 10_000, "compile", 16),
            "1 chain, compiled": ours(model, 10_000, "compile"),
        },
        seconds,
    )
    return [
        times.ratio("mlp16", "16 chains", "1 chain", target=1.0),
        times.ratio("mlp16", "16 chains, compiled", "1 chain, compiled", target=1.0),
    ]


RACES: dict[str, Callable[[float], list[Ratio]]] = {
    "pima": pima,
    "pima64": pima64,
    "mlp": mlp,
    "mlp16": mlp16,
}


def first_draw(which: str, jit: Jit) -> float:
    """Seconds to the first draw, the import of this package and of torch not counted."""
    model, num_data = (pima_model(), 768) if which == "pima" else (net_model(), 10_000)
    start = time.perf_counter()
    mcmc = VectorizedMCMC(kernel_of(model, num_data, jit), 1, warmup_steps=0, disable_progbar=True)
    mcmc.run()
    return time.perf_counter() - start


def peak_of_chains(which: str, num_chains: int, jit: Jit) -> float:
    """Bytes of memory at most, over a short run."""
    if which == "pima":
        model, num_data, draws = pima_model(), 768, 100
    else:
        model, num_data, draws = net_model(1258), 10_000, 1
    kernel = kernel_of(model, num_data, jit)
    mcmc = VectorizedMCMC(kernel, draws, warmup_steps=0, num_chains=num_chains, disable_progbar=True)
    mcmc.run()
    return peak_memory()


PROBES: dict[str, Callable[..., float]] = {"first_draw": first_draw, "peak_of_chains": peak_of_chains}


def in_a_process(probe: str, *arguments: Any, cache: str | None = None) -> float:
    """A figure of a fresh process."""
    environment = os.environ | ({} if cache is None else {"TORCHINDUCTOR_CACHE_DIR": cache})
    command = [sys.executable, __file__, "--probe", probe, json.dumps(arguments)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)


def cold() -> dict[str, float]:
    """Seconds to the first draw of a fresh process."""
    figures = {}
    for which in ("pima", "mlp"):
        with tempfile.TemporaryDirectory() as cache:
            figures[f"cold, {which}, traced (s, < 2)"] = in_a_process("first_draw", which, "auto")
            for run, limit in (("compiled", 30), ("compiled before", 3)):
                name = f"cold, {which}, {run} (s, < {limit})"
                figures[name] = in_a_process("first_draw", which, "compile", cache=cache)
    return figures


def memory() -> dict[str, float]:
    """Peak memory; a process has one peak, so each figure gets processes of its own."""
    figures = {}
    jits: tuple[Jit, ...] = ("auto", "compile")
    for jit in jits:
        figures[f"memory, 1,000 chains of pima, {jit} (GiB, < 1)"] = (
            in_a_process("peak_of_chains", "pima", 1000, jit) / 2**30
        )
        few, many = (in_a_process("peak_of_chains", "net", chains, jit) for chains in (2, 6))
        weights = 4 * (784 * 1258 + 1258 + 10 * 1258 + 10)
        figures[f"memory, a chain of 10⁶ weights, {jit} (× the weights, <= 6)"] = (many - few) / 4 / weights
    return figures


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--only", default="", help="cases, separated by commas; by default all")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    if options.probe:
        probe, arguments = options.probe
        print(PROBES[probe](*json.loads(arguments)))
        return
    only = options.only.split(",") if options.only else [*RACES, "cold", "memory"]
    rows = [row for name, race in RACES.items() if name in only for row in race(options.seconds)]
    show(rows)
    figures = (cold() if "cold" in only else {}) | (memory() if "memory" in only else {})
    for name, figure in figures.items():
        print(f"{name}: {figure:.2f}")
    if options.json:
        save(options.json, rows, figures=figures)


if __name__ == "__main__":
    main()
