"""Temperatures by site, averaged over draws, and the bands that the averages should be in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyro_sym import _arviz
from pyro_sym.diagnostics.convergence import LEAST_DRAWS, Draws
from pyro_sym.infer.temperature import kinetic_band

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["ALL_SITES", "by_site", "temperatures"]

ALL_SITES = "all sites"
KINDS = ("kinetic", "configurational")


def by_site(stats: xr.Dataset, kind: str) -> dict[str, xr.DataArray]:
    """Draws of one temperature, by site, and of all sites together; nothing if the kernel keeps none.

    Args:
        stats: the statistics of a run.
        kind: ``"kinetic"`` or ``"configurational"``.

    Returns:
        Arrays with dims ``(chain, draw)``.
    """
    name = f"{kind}_temperature"
    sites = stats.get(f"site_{name}")
    found = {}
    if sites is not None:
        axis = sites.dims[-1]
        found = {str(label): sites.sel({axis: label}, drop=True) for label in sites[axis].values}
    if name in stats:
        found[ALL_SITES] = stats[name]
    return found


def temperatures(
    draws: Draws, target: float | None, sizes: Mapping[str, int], probability: float
) -> pd.DataFrame | None:
    r"""Means over draws, with their bands.

    A mean over draws that are worth :math:`n` independent ones is, for the kinetic temperature of :math:`d`
    values, :math:`T \chi^2_{n d} / (n d)`; for the configurational one it is normal around :math:`T`, with a
    standard error from the spread of the draws.

    Args:
        draws: what to look at.
        target: :math:`T`, if it is known.
        sizes: number of unconstrained values by site, and of all.
        probability: of the bands.

    Returns:
        A table by site, or ``None`` if the kernel keeps no temperatures.
    """
    import pandas as pd
    from scipy.stats import norm

    stats = draws.stats()
    series = {} if stats is None else {kind: by_site(stats, kind) for kind in KINDS}
    sites = list(dict.fromkeys(site for several in series.values() for site in several))
    if not sites:
        return None
    goal = math.nan if target is None else target
    width = float(norm.ppf((1 + probability) / 2))
    table = pd.DataFrame(index=pd.Index(sites, name="site"))
    table["size"] = [sizes.get(site, math.nan) for site in sites]
    table["target"] = goal
    for kind, several in series.items():
        for site, values in several.items():
            worth = _effective(values)
            if kind == "kinetic":
                low, high = _band(goal, sizes.get(site), worth, probability)
            else:
                error = float(values.std(ddof=1)) / math.sqrt(worth)
                low, high = goal - width * error, goal + width * error
            mean = float(values.mean())
            known = math.isfinite(low)
            table.loc[site, [kind, f"{kind}_low", f"{kind}_high"]] = mean, low, high
            table.loc[site, f"{kind}_inside"] = float(low <= mean <= high) if known else math.nan
    for kind in KINDS:
        column = f"{kind}_inside"
        if column in table:
            table[column] = table[column].astype("boolean")
    return table


def _band(target: float, size: int | None, worth: float, probability: float) -> tuple[float, float]:
    """Of the mean kinetic temperature of so many independent draws."""
    if size is None or not math.isfinite(target * worth):
        return math.nan, math.nan
    return kinetic_band(target, max(1, round(size * worth)), probability)


def _effective(values: xr.DataArray) -> float:
    """How many independent draws a mean is worth; one that doesn't vary has all of them."""
    if values.sizes["draw"] < LEAST_DRAWS:
        return math.nan
    az = _arviz.load()
    worth = float(az.ess(values.to_dataset(name="value"), method="mean")["value"])
    return worth if math.isfinite(worth) else float(values.size)
