"""What a gradient costs: the model itself, its graph, the compiled graph and steps, and a gradient by hand.

Rounds go through all contestants in turn, so that what else the machine does hits them alike.

    python -m benchmarks.gradient --chains 64
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._models import network_model, pima_data, pima_model
from benchmarks._runner import Row, Tables, command_line, take_turns
from pyro_sym.model.gradient import Gradient, Jit
from pyro_sym.model.minibatch import Minibatch, draw_indices
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.step_blocks import FusedSteps, block_length

TITLE = "What a gradient costs"
OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"nargs": "+", "choices": ["pima", "mlp"], "default": ["pima", "mlp"]},
    "chains": {"type": int, "nargs": "+", "default": [1, 64]},
}
Gradients = Callable[[Tensor, Tensor], Any]


def pima() -> tuple[Potential, Gradients]:
    """Logistic regression, 768 rows of 8 columns, 32 at a time."""
    columns, labels = pima_data()

    def by_hand(position: Tensor, row: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(columns[row] @ position, labels[row], reduction="sum")
        return 768 / 32 * loss + position.square().sum() / 2

    return Potential(pima_model()), _differentiated(by_hand)


def mlp() -> tuple[Potential, Gradients]:
    """A net of 784-128-10 units on random data, 128 of 10,000 rows at a time."""
    images, digits = torch.rand(10_000, 784), torch.randint(10, (10_000,))
    shapes = (128, 784), (128,), (10, 128), (10,)
    sizes = [torch.Size(shape).numel() for shape in shapes]

    def by_hand(position: Tensor, row: Tensor) -> Tensor:
        w1, b1, w2, b2 = (p.view(s) for p, s in zip(position.split(sizes), shapes, strict=True))
        logits = F.linear(torch.relu(F.linear(images[row], w1, b1)), w2, b2)
        loss = F.cross_entropy(logits, digits[row], reduction="sum")
        return 10_000 / 128 * loss + position.square().sum() / 2

    return Potential(network_model(data=(images, digits))), _differentiated(by_hand)


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


def race(which: str, chains: int, seconds: float, jits: tuple[Jit, ...]) -> list[Row]:
    """One model, by all contestants."""
    potential, by_hand = {"pima": pima, "mlp": mlp}[which]()
    steps = block_length(chains * potential.size)
    position = 0.1 * torch.randn(chains, potential.size)
    plates = potential.program.plates
    minibatch = Minibatch(draw_indices(plates, chains))
    contestants: dict[str, tuple[Callable[[], Any], int]] = {
        "by hand, torch autograd": (lambda: by_hand(position, minibatch.indices["rows"]), 1)
    }
    for jit in jits:
        gradient = Gradient(potential, jit)
        contestants[f"jit={jit!r}"] = (lambda g=gradient: g(position, minibatch), 1)  # type: ignore[misc]
    if "compile" in jits:
        fused = FusedSteps(Gradient(potential, "compile"), langevin)
        state = (position, torch.zeros_like(position))
        noise, indices = torch.randn(steps, *position.shape), draw_indices(plates, steps, chains)
        schedule = torch.full((steps,), 1e-4), torch.ones(steps)
        contestants[f"steps, {steps} a call"] = (
            lambda: fused(state, position, noise, indices, *schedule),
            steps,
        )
    first = {}
    for name, (run, _) in contestants.items():
        start = time.perf_counter()
        run()
        first[name] = time.perf_counter() - start
    turns = take_turns(contestants, seconds)
    return [
        {
            "case": f"{which}, {chains} chain{'s' * (chains > 1)}: {name}",
            "µs": 1e6 * median(cpu for cpu, _ in turns.seconds[name]) / chains,
            "first call, s": first[name],
        }
        for name in contestants
    ]


def measure(
    seconds: float,
    smoke: bool = False,
    only: Sequence[str] = ("pima", "mlp"),
    chains: Sequence[int] = (1, 64),
) -> Tables:
    """Each model with each number of chains; the network has one chain."""
    torch.manual_seed(0)
    jits: tuple[Jit, ...] = ("eager", "trace") if smoke else ("eager", "trace", "compile")
    cases = [(which, count) for which in only for count in (chains if which == "pima" else chains[:1])]
    rows = [
        row for which, count in cases[: 1 if smoke else None] for row in race(which, count, seconds, jits)
    ]
    return {"Microseconds of CPU time for each chain and gradient, and the seconds of the first call.": rows}


if __name__ == "__main__":
    command_line("gradient")
