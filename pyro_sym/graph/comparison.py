"""How a graph's results are compared with those of what it stands for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NEARER", "NUDGES", "nudge", "relative_error", "tolerance"]

NEARER = tuple(0.5**halvings for halvings in range(8))
"""Fractions of the way from the start to a point, to be tried in turn where the model fails at the point."""

NUDGES = 3
"""How many nudged points are tried before a difference counts.

At a kink, as of a ReLU, rounding decides which of two slopes is taken, so that two right computations may
differ by much. At a point nudged by far more than the rounding they agree again, unless it is at another
kink. A graph that is wrong is wrong there, too.
"""


def tolerance(wanted: Tensor) -> float:
    """The relative error up to which a graph is right, in the precision of what it computes."""
    return 1e-8 if wanted.dtype == torch.float64 else 1e-3


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """The largest error, relative to the largest finite entry or to 1.

    It is infinite where one of the two is NaN or infinite and the other isn't the same.
    """
    finite = wanted.isfinite()
    if not torch.equal(result[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return float("inf")
    result, wanted = result[finite], wanted[finite]
    if not result.isfinite().all():
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    return float((result - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def nudge(x: Tensor, number: int) -> Tensor:
    """A random displacement of about the square root of the precision of ``x``, the same for a number.

    Args:
        x: a floating point tensor.
        number: 0 for none.

    Returns:
        A tensor of the shape of ``x``.
    """
    if number == 0:
        return torch.zeros_like(x)
    generator = torch.Generator().manual_seed(number)  # the user's random numbers stay as they are
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    return torch.finfo(x.dtype).eps ** 0.5 * x.abs().clamp(min=1.0) * noise
