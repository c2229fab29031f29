"""What symmetrising gains, from both bounds of the log orbit average at draws of the guide."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.guides.density import agrees
from pyro_sym.orbit.bracket import Bracket

__all__ = ["SymmetryGain", "reliable", "symmetry_gain"]

# The repr of a gain says so if its bounds are farther apart than this, in nats.
WIDE = 0.1


class SymmetryGain(NamedTuple):
    r"""What symmetrising is worth: :math:`I(g; \omega) = \mathcal L^G - \mathcal L`, in nats.

    The gain lies in :math:`[0, \log |G|]`, and between two bounds up to their standard errors. For guides
    that do not factorise over units, as those with a full covariance or a flow, the bounds may be several
    nats apart, and ``estimate`` is just a point between them; :attr:`width` and the ``repr`` say so.

    Attributes:
        lower: mean of a lower bound (with ``method="exact"``, of the value itself). It may be below 0, within
            its standard error.
        estimate: the best single figure.
        upper: mean of an upper bound, at most ``log_order`` in expectation.
        standard_error: of the Monte Carlo means, the larger of the two; 0 for an upper bound that is
            ``log_order``.
        log_order: ``log |G|``, which the gain can't exceed.
        method: the estimator used, and where a half is not that estimator's own, by what it is.
        num_samples: number of draws of the guide.
    """

    lower: float
    estimate: float
    upper: float
    standard_error: float
    log_order: float
    method: str
    num_samples: int

    @property
    def width(self) -> float:
        """The distance of the bounds in nats. The estimate is known to no better than this."""
        return self.upper - self.lower

    def __repr__(self) -> str:
        """The fields, and a remark where the bounds are more than a tenth of a nat apart."""
        fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
        remark = f" <bounds {self.width:.2g} nats apart>" if self.width > WIDE else ""
        return f"SymmetryGain({fields}){remark}"


def reliable(again: Tensor, own: Tensor) -> Tensor:
    """Which draws have the same log density when it is computed from their values; warns if some have not."""
    good = agrees(again, own)
    if not good.all():
        off = float((again - own).abs().max())
        warnings.warn(
            f"the guide's log density at {int((~good).sum())} of {len(good)} draws differs when computed "
            f"from their values (by up to {off:.2g} nats), as values lie at the edge of their support, or "
            "a flow can't be inverted in this precision. Their gain is only known to lie between 0 and "
            "log |G|; use double precision, or a guide that is narrower or easier to invert",
            stacklevel=3,
        )
    return good


def symmetry_gain(found: Bracket | None, good: Tensor, method: str, log_order: float) -> SymmetryGain:
    """The mean gain over all draws, from bounds of the log orbit average relative to the guide's density.

    ``found`` has the bounds at the draws that are ``good``, ``None`` if there are none. For other draws the
    bounds of the gain are 0 and ``log_order``.
    """
    lower = torch.zeros(good.shape, dtype=torch.double, device=good.device)
    upper = torch.full_like(lower, log_order)
    if found is not None:
        lower[good], upper[good] = -found.upper.double(), -found.lower.double()
    highest = min(float(upper.mean()), log_order)
    ends = (min(float(lower.mean()), highest), highest)  # a smaller lower bound is one, too
    halves = (lower, upper) if highest < log_order else (lower,)
    count = len(good)
    errors = [float(half.std()) / math.sqrt(count) if count > 1 else math.nan for half in halves]
    return SymmetryGain(
        lower=ends[0],
        estimate=sum(ends) / 2 if method == "importance" else ends[1],
        upper=ends[1],
        standard_error=max(errors),
        log_order=log_order,
        method=method if found is None else f"{method}{found.note}",
        num_samples=count,
    )
