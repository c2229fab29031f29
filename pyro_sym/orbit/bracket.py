r"""The log orbit average of a unit-factorised density between two bounds, by whichever are best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper
from pyro_sym.orbit.guided_permutations import importance_bracket

__all__ = ["Bracket", "bracket"]

# Sampled halves that are closer than this, in nats, are not worth the time of deterministic ones.
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
        """Which halves of the gain, whose lower one is from the average's upper one, are deterministic."""
        halves = {"lower": self.upper_by, "upper": self.lower_by}
        named = " and ".join(half for half, by in halves.items() if by == "deterministic")
        return f" (deterministic {named} half)" if named else ""


@torch.no_grad()
def bracket(pairs: Iterable[Tensor], num_elements: int) -> Bracket:
    """Bound the log orbit average from both sides, by ``num_elements`` permutations for either half.

    ``pairs`` are :math:`L` in chunks of shape ``(p, n, n)``, the draws' own assignment on the diagonal; one
    chunk is held at a time. The sampled halves are
    :func:`~pyro_sym.orbit.guided_permutations.importance_bracket`. Where those of the first chunk are more
    than three nats apart, the deterministic ones of :mod:`pyro_sym.orbit.bounds` are computed too, the best
    for each matrix. Sampled halves are bounds in expectation only, so the two kinds are compared by their
    means: the larger of both, draw by draw, would be no bound.

    Example:
        >>> result = bracket([torch.zeros(2, 5, 5)], 8)
        >>> result.lower.shape, result.upper_by
        (torch.Size([2]), 'importance')
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
    """The best lower and the best upper half of every matrix."""
    n = pairs.shape[-1]
    lower = torch.maximum(bethe_lower(pairs), capacity_lower(pairs))
    upper = torch.minimum(fractional_upper(pairs), torch.minimum(bethe_upper(pairs), capacity_upper(pairs)))
    return lower - math.lgamma(n + 1), upper - math.lgamma(n + 1)
