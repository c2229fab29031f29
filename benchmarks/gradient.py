"""What a gradient costs: the model itself, its graph, the compiled graph and steps, and a gradient by hand.

Run from the root of the repository: ``python benchmarks/gradient.py [--mlp] [--chains 64]``. Rounds go
through all contestants in turn, so that what else the machine does hits them alike. One thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_sym.infer.fused import FusedSteps, block_length
from pyro_sym.infer.gradient import Gradient, Jit
from pyro_sym.infer.minibatch import Minibatch, draw_indices
from pyro_sym.infer.potential import Potential

Gradients = Callable[[Tensor, Tensor], Any]


def pima() -> tuple[Potential, Gradients]:
    """Logistic regression, 768 rows of 8 columns, 32 at a time."""
    folder = os.environ.get("PYRO_SYM_DATA", str(Path(__file__).parents[1] / ".." / "shared" / "data"))
    table = np.loadtxt(Path(folder, "pima-indians-diabetes.csv"), delimiter=",")
    columns, labels = torch.tensor(table[:, :8]).float(), torch.tensor(table[:, 8]).float()
    columns = (columns - columns.mean(0)) / columns.std(0)

    def model() -> None:
        weights = pyro.sample("weights", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("data", 768, subsample_size=32) as row:
            pyro.sample("y", dist.Bernoulli(logits=columns[row] @ weights), obs=labels[row])

    def by_hand(position: Tensor, row: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(columns[row] @ position, labels[row], reduction="sum")
        return 768 / 32 * loss + position.square().sum() / 2

    return Potential(model), _differentiated(by_hand)


def mlp() -> tuple[Potential, Gradients]:
    """A net of 784-128-10 units on random data, 128 of 10,000 rows at a time."""
    images, digits = torch.rand(10_000, 784), torch.randint(10, (10_000,))
    shapes = {"w1": (128, 784), "b1": (128,), "w2": (10, 128), "b2": (10,)}
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]

    def logits(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, rows: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(rows, w1, b1)), w2, b2)

    def model() -> None:
        weights = {
            name: pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        with pyro.plate("data", 10_000, subsample_size=128) as row:
            law = dist.Categorical(logits=logits(**weights, rows=images[row]))
            pyro.sample("y", law, obs=digits[row])

    def by_hand(position: Tensor, row: Tensor) -> Tensor:
        parts = [p.view(s) for p, s in zip(position.split(sizes), shapes.values(), strict=True)]
        loss = F.cross_entropy(logits(*parts, rows=images[row]), digits[row], reduction="sum")
        return 10_000 / 128 * loss + position.square().sum() / 2

    return Potential(model), _differentiated(by_hand)


def _differentiated(energy: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
    def gradient(position: Tensor, rows: Tensor) -> list[Tensor]:
        results = []
        for chain, row in zip(position, rows, strict=True):
            leaf = chain.detach().requires_grad_()
            results.append(torch.autograd.grad(energy(leaf, row), leaf)[0])
        return results

    return gradient


def langevin(
    state: tuple[Tensor, ...], gradient: Tensor, noise: Tensor, step_size: Tensor, temperature: Tensor
) -> tuple[Tensor, ...]:
    """A step as cheap as any with noise and momentum."""
    position, momentum = state
    momentum = 0.9 * momentum - step_size * gradient + (0.19 * temperature).sqrt() * noise
    return position + step_size * momentum, momentum


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlp", action="store_true", help="the net instead of the logistic regression")
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    potential, by_hand = mlp() if options.mlp else pima()
    chains, steps = options.chains, block_length(options.chains * potential.size)
    position = 0.1 * torch.randn(chains, potential.size)
    plates = potential.program.plates
    minibatch = Minibatch(draw_indices(plates, chains))
    state = (position, torch.zeros_like(position))
    step_sizes, temperatures = torch.full((steps,), 1e-4), torch.ones(steps)

    jits: list[Jit] = ["eager", "trace", "compile"]
    gradients = {jit: Gradient(potential, jit) for jit in jits}
    fused = FusedSteps(Gradient(potential, "compile"), langevin)
    noise, indices = torch.randn(steps, *position.shape), draw_indices(plates, steps, chains)

    contestants: dict[str, tuple[Callable[[], Any], int]] = {
        "by hand, torch autograd": (lambda: by_hand(position, minibatch.indices["data"]), 1),
        **{
            f"Gradient, jit={jit!r}": (lambda g=gradient: g(position, minibatch), 1)
            for jit, gradient in gradients.items()
        },
        f"FusedSteps, blocks of {steps}": (
            lambda: fused(state, position, noise, indices, step_sizes, temperatures),
            steps,
        ),
    }
    first, repeats = {}, {}
    for name, (run, _) in contestants.items():
        start, cpu = time.perf_counter(), time.process_time()
        run()
        first[name] = (time.perf_counter() - start, time.process_time() - cpu)
        start = time.perf_counter()
        run()
        repeats[name] = max(1, int(0.02 / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, (run, _) in contestants.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            seconds[name].append((time.perf_counter() - start) / repeats[name])

    print(f"{'mlp' if options.mlp else 'pima'}, {chains} chains, µs for each chain and gradient")
    print(f"{'':44}{'median':>10}{'least':>10}{'first call, s':>16}{'CPU, s':>9}")
    for name, (_, count) in contestants.items():
        scale = 1e6 / count / chains
        once, cpu = first[name]
        print(
            f"{name:44}{scale * median(seconds[name]):10.2f}{scale * min(seconds[name]):10.2f}"
            f"{once:16.2f}{cpu:9.2f}"
        )


if __name__ == "__main__":
    main()
