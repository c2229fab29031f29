"""How tightly each method brackets the gain of symmetrising n units, and what a draw costs.

The units are N(m_i, I) in five dimensions with means of spread s, and the gain is
E[log q - log q^G] = E[sum_i L_ii - log perm(e^L) + log n!], in nats. Every method sees the same draws; a
deterministic bound holds for each of them, a sampled one on average. Seconds are of one thread, a draw, both
halves together.

    python benchmarks/orbit_bounds.py --sizes 8 64 --separations 1 2 --draws 20
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper
from pyro_sym.orbit.permanent import MAX_SIZE, log_permanent
from pyro_sym.orbit.sequential import importance_bracket

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 12, 64, 512])
    parser.add_argument("--separations", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--elements", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(options.seed)
    print(f"{'n':>4} {'s':>4}  {'method':<20} {'gain >=':>10} {'gain <=':>10} {'s/draw':>9}")
    for n in options.sizes:
        for separation in options.separations:
            pairs = gaussian_pairs(n, separation, options.draws)
            base = pairs.diagonal(dim1=-2, dim2=-1).sum(-1) + math.lgamma(n + 1)
            for name, halves in methods(n, options.elements).items():
                start = time.perf_counter()
                lower, upper = zip(*(halves(draw) for draw in pairs.split(1)), strict=True)
                seconds = (time.perf_counter() - start) / options.draws
                ends = [
                    "-" if half[0] is None else f"{float((base - torch.cat(half)).mean()):.3f}"
                    for half in (upper, lower)
                ]
                print(
                    f"{n:>4} {separation:>4}  {name:<20} {ends[0]:>10} {ends[1]:>10} {seconds:>9.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
