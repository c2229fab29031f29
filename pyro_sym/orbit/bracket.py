"""Lower and upper bounds of the log orbit average of a density that factorises over units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper
from pyro_sym.orbit.guided_permutations import importance_bracket

__all__ = ["Bracket", "bracket"]

# Deterministic bounds are only computed if the sampled ones are farther apart than this, in nats.
CLOSE = 3.0


class Bracket(NamedTuple):
    r"""Bounds of :math:`\log \operatorname{perm}(e^L) - \log n!` in expectation over draws, in nats.

    ``lower`` and ``upper`` have shape ``(P,)``; ``lower_by`` and ``upper_by`` are ``"importance"`` or
    ``"deterministic"``, whichever had the larger or the smaller mean.
    """

    lower: Tensor
    upper: Tensor
    lower_by: str = "importance"
    upper_by: str = "importance"

    @property
    def note(self) -> str:
        """Which bounds of the gain are deterministic; its lower one comes from the average's upper one."""
        halves = {"lower": self.upper_by, "upper": self.lower_by}
        named = " and ".join(half for half, by in halves.items() if by == "deterministic")
        return f" (deterministic {named} half)" if named else ""


@torch.no_grad()
def bracket(pairs: Iterable[Tensor], num_elements: int) -> Bracket:
    """Bound the log orbit average from both sides, by ``num_elements`` permutations for either half.

    The sampled bounds are :func:`~pyro_sym.orbit.guided_permutations.importance_bracket`, with
    ``num_elements`` permutations each. If those of the first chunk are more than three nats apart, the best
    bounds of :mod:`pyro_sym.orbit.bounds` for each matrix are computed too. Sampled bounds hold in
    expectation only, so the two kinds are compared by their means: the larger of both, draw by draw, would be
    no lower bound.

    ``pairs`` yields :math:`L` in chunks of shape ``(p, n, n)``, with the draws' own assignment on the
    diagonal; one chunk is held at a time.
    """
    sampled: list[tuple[Tensor, Tensor]] = []
    fixed: list[tuple[Tensor, Tensor]] = []
    for chunk in pairs:
        lower, upper = importance_bracket(chunk, num_elements)
        if fixed or (not sampled and upper.mean() - lower.mean() > CLOSE):
            fixed.append(_deterministic(chunk))
        sampled.append((lower, upper))
    halves = {"importance": sampled, "deterministic": fixed} if fixed else {"importance": sampled}
    by = {name: tuple(torch.cat(half) for half in zip(*of, strict=True)) for name, of in halves.items()}
    lower_by = max(by, key=lambda name: float(by[name][0].mean()))
    upper_by = min(by, key=lambda name: float(by[name][1].mean()))
    return Bracket(by[lower_by][0], by[upper_by][1], lower_by, upper_by)


def _deterministic(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The best lower and upper bound of each matrix."""
    n = pairs.shape[-1]
    lower = torch.maximum(bethe_lower(pairs), capacity_lower(pairs))
    upper = torch.minimum(fractional_upper(pairs), torch.minimum(bethe_upper(pairs), capacity_upper(pairs)))
    return lower - math.lgamma(n + 1), upper - math.lgamma(n + 1)
