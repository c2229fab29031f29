"""Pyro's diagnostics and its table of draws, which also work for few draws and diverged chains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from pyro.infer.mcmc.util import diagnostics
from pyro.ops.stats import hpdi
from torch import Tensor

__all__ = ["diagnose", "print_table", "without_diverged"]

# Split R-hat halves chains, and needs two draws in each half.
MIN_DRAWS = 4


def diagnose(samples: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return ``{site: {"n_eff": …, "r_hat": …}}`` of draws by site, ``(C, draws, *shape)``.

    Effective sample size and split R-hat have the site's shape; they are NaN for fewer than four draws a
    chain.
    """
    report: dict[str, Any] = {}
    for name, value in samples.items():
        if value.shape[1] < MIN_DRAWS:
            unknown = torch.full(value.shape[2:], math.nan, dtype=value.dtype, device=value.device)
            report[name] = {"n_eff": unknown, "r_hat": unknown.clone()}
        else:
            report |= diagnostics({name: value})
    return report


def without_diverged(samples: Mapping[str, Tensor], diverging: Tensor) -> dict[str, Tensor]:
    """Return the draws ``(C, draws, *shape)`` by site of the chains without a true in ``diverging``.

    It has the shape ``(draws, C)``. If all chains diverged, all are returned.
    """
    whole = ~diverging.any(0)  # (C,)
    whole = whole if whole.any() else torch.ones_like(whole)
    return {name: value[whole.to(value.device)] for name, value in samples.items()}


def print_table(samples: Mapping[str, Tensor], prob: float, diverging: Tensor) -> None:
    """Print mean, sd, median, interval, effective sample size and R-hat by coordinate, in Pyro's layout.

    ``samples`` are ``(C, draws, *shape)`` by site, ``diverging`` ``(draws, C)``. Draws after a divergence are
    left out; effective sample size and R-hat leave out the whole chain. ``prob`` is that of the interval.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob is {prob}; pass the probability of the interval, > 0 and < 1")
    ends = [f"{50 * (1 - prob):.1f}%", f"{50 * (1 + prob):.1f}%"]
    columns = ["mean", "std", "median", *ends, "n_eff", "r_hat"]
    rows: dict[str, list[float]] = {}
    for name, value in samples.items():
        convergence = diagnose(without_diverged({name: value}, diverging))[name]
        draws = value[~diverging.T.to(value.device)]  # (C * draws, *shape), without those that are NaN
        if not len(draws):  # all chains diverged in their first draw
            draws = value.flatten(0, 1)[:1]
        single = len(draws) == 1
        low, high = (draws[0], draws[0]) if single else hpdi(draws, prob)
        shown = [
            draws.mean(0),
            torch.full_like(draws[0], math.nan) if single else draws.std(0),
            draws.median(0).values,
            low,
            high,
            convergence["n_eff"],
            convergence["r_hat"],
        ]
        for index in product(*map(range, value.shape[2:])):
            label = name + (f"[{','.join(map(str, index))}]" if index else "")
            rows[label] = [float(column[index]) for column in shown]
    width = max(10, *map(len, rows))
    print()
    print(f"{'':>{width}}", *(f"{column:>9}" for column in columns))
    for label, numbers in rows.items():
        print(f"{label:>{width}}", *(f"{number:>9.2f}" for number in numbers))
    print()
