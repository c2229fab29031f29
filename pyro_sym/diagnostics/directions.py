"""Temperatures along principal directions of draws, which a mean over coordinates hides."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_sym.diagnostics.score import checked_pair
from pyro_sym.diagnostics.temperatures import mean_band

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["directional_temperatures"]

LEAST = 8  # draws in a half, at least
SUBSTANTIAL = 0.1  # a warning needs a relative error of at least this


def directional_temperatures(
    draws: Tensor,
    score: Tensor,
    *,
    num_chains: int = 1,
    max_directions: int = 50,
    probability: float = 0.99,
) -> pd.DataFrame:
    r"""Configurational temperatures along the principal directions of draws, relative to the target's.

    For every fixed direction :math:`v` and centre :math:`c`, and the score :math:`s = \nabla \log p_T` of the
    target, integration by parts gives for draws :math:`u` of the target

    .. math::

        T_v = -\mathbb E \left[ v^\top (u - c) \; v^\top s(u) \right] = 1.

    On a Gaussian, along a principal axis of both the draws and the target, :math:`T_v` is the variance of the
    draws over that of the target: 0.7 means that the standard deviation is 0.84 of what it should be. The
    kinetic and configurational temperatures of a run are means over coordinates, which can be right while
    some directions are too hot and others too cold. This happens with :class:`~pyro_sym.SGNHT`, whose
    thermostat fixes the mean, where minibatch noise differs by direction.

    Directions and centre come from one half of the draws (half of the chains, or of a single chain), and
    temperatures from the other half; then the halves are swapped, and their directions are paired by rank.
    So directions do not depend on the draws that they are evaluated on, and temperatures are unbiased. Bands
    (:func:`~pyro_sym.diagnostics.temperatures.mean_band`) hold for all :math:`k` directions at once: each has
    the probability :math:`1 - (1 - \text{probability}) / k`.

    Args:
        draws: unconstrained values, of shape ``(n, d)``, as :func:`unconstrained_score` returns them: one
            chain after the other.
        score: of the target there, on all data, of the same shape.
        num_chains: :math:`C`; each has ``n / C`` draws.
        max_directions: of more directions the widest and the narrowest are used, half of this number each.
        probability: that no direction is outside of its band if the draws are from the target.

    Returns:
        A table by direction, the widest first: ``sd``, the spread of the draws along it, ``temperature``,
        its band ``temperature_low`` and ``temperature_high``, and whether it is ``temperature_inside``
        (missing if there are too few draws).

    Raises:
        ValueError: if shapes disagree, something is not finite, or there are fewer than 8 draws a half.

    Warns:
        UserWarning: if a direction is outside of its band and off by more than 10 %.

    Example:
        >>> from pyro_sym.diagnostics import directional_temperatures
        >>> sd = torch.tensor([3.0, 1.0])
        >>> u = sd * torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
        >>> directional_temperatures(u, -u / sd**2, num_chains=4).round(1)["temperature"].tolist()
        [1.0, 1.0]

    References:
        Rugh 1997, "Dynamical approach to temperature", for configurational temperatures along any field.
    """
    import pandas as pd

    if max_directions < 1:
        raise ValueError(f"max_directions={max_directions} must be positive")
    pair = checked_pair(draws, score, num_chains)
    u, s = (value.cpu().unflatten(0, (num_chains, -1)) for value in pair)  # (C, n, d)
    if len(draws) < 2 * LEAST or u.shape[2] == 0:
        raise ValueError(f"there are {len(draws)} draws of {u.shape[2]} values; pass {2 * LEAST} at least")
    halves = _halves(u, s)
    bases = [_basis(own, max_directions) for own, _ in halves]
    count = min(len(axes) for axes, _ in bases)
    if count == 0:
        raise ValueError("the draws of half of the chains are all equal, and have no principal direction")
    series, spreads = [], []
    for (own, slope), (axes, centre) in zip(halves, reversed(bases), strict=True):
        along, pull = (own - centre) @ axes[:count].mT, slope @ axes[:count].mT  # (chains, draws, directions)
        series.append(-along * pull)
        spreads.append(along.flatten(0, 1).square().mean(0).sqrt())
    shortest = min(part.shape[1] for part in series)
    values = torch.cat([part[:, :shortest] for part in series])  # (halves' chains, draws, directions)
    level = 1 - (1 - probability) / count
    bands = [mean_band(values[..., k].numpy(), level) for k in range(count)]
    table = pd.DataFrame(index=pd.RangeIndex(count, name="direction"))
    table["sd"] = torch.stack(spreads).mean(0).numpy()
    table["temperature"] = [mean for mean, _ in bands]
    table["temperature_low"] = [1 - width for _, width in bands]
    table["temperature_high"] = [1 + width for _, width in bands]
    inside = [abs(mean - 1) <= width if math.isfinite(width) else None for mean, width in bands]
    table["temperature_inside"] = pd.array(inside, dtype="boolean")
    off = (~table["temperature_inside"].fillna(True)) & ((table["temperature"] - 1).abs() > SUBSTANTIAL)
    if off.any():
        _warn(table, off, float(values.mean()))
    return table


def _warn(table: pd.DataFrame, off: pd.Series, mean: float) -> None:
    worst = (table["temperature"].where(off) - 1).abs().idxmax()
    row = table.loc[worst]
    band = f"[{row['temperature_low']:.3g}, {row['temperature_high']:.3g}]"
    warnings.warn(
        f"{int(off.sum())} of {len(table)} principal directions are not at the target's temperature: along "
        f"direction {worst}, where draws have a standard deviation of {row['sd']:.3g}, it is "
        f"{row['temperature']:.3g} of it, outside of {band}, and {mean:.3g} in the mean over directions. "
        "Minibatch noise that differs by direction does this, and a thermostat does not mend it: use "
        "gradient='control_variate' or larger batches, and smaller steps",
        stacklevel=3,
    )


def _halves(u: Tensor, s: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Every other chain and the rest, or the halves of a single chain."""
    if len(u) > 1:
        return [(u[::2], s[::2]), (u[1::2], s[1::2])]
    middle = u.shape[1] // 2
    return [(u[:, :middle], s[:, :middle]), (u[:, middle:], s[:, middle:])]


def _basis(u: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Principal directions of shape ``(k, d)``, the widest first, and the mean."""
    flat = u.flatten(0, 1)  # (C * n, d)
    centre = flat.mean(0)
    _, spread, axes = torch.linalg.svd(flat - centre, full_matrices=False)
    known = int((spread > 1e-10 * spread[0]).sum())  # n centred draws span at most n - 1 directions
    if known <= most:
        return axes[:known], centre
    return axes[[*range(most - most // 2), *range(known - most // 2, known)]], centre
