"""How tightly each method brackets the gain of symmetrising n units, and what a draw costs.

The units are N(m_i, I) in five dimensions with means of spread s, and the gain is E[log q - log q^G] =
E[sum_i L_ii - log perm(e^L) + log n!], in nats. Every method sees the same draws; a deterministic bound
holds for each of them, a sampled one on average. Seconds of CPU time are of a draw, both halves together.

    python -m benchmarks.orbit_bounds --sizes 8 64 --separations 1 2 --draws 20
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks._runner import Row, Tables, command_line
from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper
from pyro_sym.orbit.guided_permutations import importance_bracket
from pyro_sym.orbit.permanent import MAX_SIZE, log_permanent

TITLE = "Brackets of the gain"
OPTIONS: dict[str, dict[str, Any]] = {
    "sizes": {"type": int, "nargs": "+", "default": [8, 12, 64, 512]},
    "separations": {"type": float, "nargs": "+", "default": [1.0, 2.0]},
    "draws": {"type": int, "default": 4},
    "elements": {"type": int, "default": 64},
    "seed": {"type": int, "default": 0},
}
Halves = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]


def gaussian_pairs(n: int, separation: float, draws: int) -> Tensor:
    """Log density of unit j of a draw under slot i, the draws' own slots on the diagonal."""
    means = separation * torch.randn(n, 5)
    points = means + torch.randn(draws, n, 5)
    squares = torch.cdist(means.expand(draws, n, 5), points).square()
    return -0.5 * (squares + 5 * math.log(2 * math.pi))


def sampled(num_elements: int) -> Halves:
    """The log permanent's sampled halves."""

    def halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = importance_bracket(pairs, num_elements)
        constant = math.lgamma(pairs.shape[-1] + 1)
        return lower + constant, upper + constant

    return halves


def methods(n: int, num_elements: int) -> dict[str, Halves]:
    """Lower and upper halves of the log permanent, where a method has them."""
    found: dict[str, Halves] = {
        f"importance, K={num_elements}": sampled(num_elements),
        "Bethe": lambda pairs: (bethe_lower(pairs), bethe_upper(pairs)),
        "fractional": lambda pairs: (None, fractional_upper(pairs)),
        "capacity": lambda pairs: (capacity_lower(pairs), capacity_upper(pairs)),
    }
    if n <= MAX_SIZE:
        found = {"exact": lambda pairs: (log_permanent(pairs),) * 2, **found}
    return found


def measure(
    seconds: float = 0.0,
    smoke: bool = False,
    sizes: Sequence[int] = (8, 12, 64, 512),
    separations: Sequence[float] = (1.0, 2.0),
    draws: int = 4,
    elements: int = 64,
    seed: int = 0,
) -> Tables:
    """All methods, on the same draws; ``seconds`` changes nothing."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    rows: list[Row] = []
    for n in sizes[:1] if smoke else sizes:
        for separation in separations:
            pairs = gaussian_pairs(n, separation, draws)
            base = pairs.diagonal(dim1=-2, dim2=-1).sum(-1) + math.lgamma(n + 1)
            for name, halves in methods(n, elements).items():
                start = time.process_time()
                lower, upper = zip(*(halves(draw) for draw in pairs.split(1)), strict=True)
                took = (time.process_time() - start) / draws
                least, most = (
                    None if half[0] is None else f"{float((base - torch.cat(half)).mean()):.3f}"
                    for half in (upper, lower)
                )
                case = f"n = {n}, s = {separation:g}: {name}"
                rows.append({"case": case, "gain ≥": least, "gain ≤": most, "s / draw": took})
    return {f"Gains in nats, means over {draws} draws.": rows}


if __name__ == "__main__":
    command_line("orbit_bounds")
