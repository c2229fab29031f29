"""Mean temperatures of draws by site, and the bands in which the means should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_sym.diagnostics.convergence import LEAST_DRAWS, FiniteChains
from pyro_sym.export.attrs import read_attr

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["kernel_temperature", "mean_band", "series_by_kind", "temperatures", "unconstrained_sizes"]

ALL_SITES = "all sites"
KINDS = ("kinetic", "configurational")

# Batches are this many autocorrelation times long, and at most this many.
BATCH_TIMES, MOST_BATCHES = 5, 30
# This many chains need one batch each; fewer need this many batches together.
ENOUGH_CHAINS, LEAST_BATCHES = 4, 10


def kernel_temperature(data: Any) -> float | None:
    """The temperature that the kernel of an export was given, or ``None`` if it is a schedule."""
    value = read_attr(data, "kernel_settings", {}).get("temperature")
    return float(value) if isinstance(value, int | float) else None


def unconstrained_sizes(data: Any) -> dict[str, int]:
    """The number of unconstrained values of each latent site of an export, and of all together."""
    sizes: dict[str, int] = read_attr(data, "unconstrained_sizes", {})
    return {**sizes, ALL_SITES: sum(sizes.values())} if sizes else {}


def series_by_kind(stats: xr.Dataset | None) -> dict[str, dict[str, xr.DataArray]]:
    """Temperatures in the statistics of a run, by kind and site; each has dims ``(chain, draw)``."""
    return {} if stats is None else {kind: _by_site(stats, kind) for kind in KINDS}


def _by_site(stats: xr.Dataset, kind: str) -> dict[str, xr.DataArray]:
    """Temperatures of one kind, by site and of all sites together; empty if the kernel records none."""
    name = f"{kind}_temperature"
    found = {}
    if (sites := stats.get(f"site_{name}")) is not None:
        axis = sites.dims[-1]
        found = {str(label): sites.sel({axis: label}, drop=True) for label in sites[axis].values}
    if name in stats:
        found[ALL_SITES] = stats[name]
    return found


def temperatures(
    draws: FiniteChains, target: float | None, sizes: Mapping[str, int], probability: float
) -> pd.DataFrame | None:
    """A table of mean temperatures by site, with the bands of :func:`mean_band` around the target.

    ``sizes`` are numbers of unconstrained values by site. Returns ``None`` if no temperatures were recorded.
    """
    import pandas as pd

    series = series_by_kind(draws.stats())
    sites = list(dict.fromkeys(site for several in series.values() for site in several))
    if not sites:
        return None
    goal = math.nan if target is None else target
    table = pd.DataFrame(index=pd.Index(sites, name="site"))
    table["size"] = [sizes.get(site, math.nan) for site in sites]
    table["target"] = goal
    for kind, several in series.items():
        for site, values in several.items():
            mean, width = mean_band(values.transpose("chain", "draw").values, probability)
            low, high = goal - width, goal + width
            inside = float(low <= mean <= high) if math.isfinite(low) else math.nan
            columns = [kind, f"{kind}_low", f"{kind}_high", f"{kind}_inside"]
            table.loc[site, columns] = mean, low, high, inside
    return table.astype({column: "boolean" for column in table if column.endswith("_inside")})


def mean_band(values: np.ndarray, probability: float) -> tuple[float, float]:
    r"""The mean of autocorrelated draws, and half the width of the band around it for their expectation.

    Draws of each chain are cut into :math:`b` batches of equal length, whose :math:`k = C b` means
    :math:`m_i` are about independent and normal: then

    .. math::

        \left| \bar m - \mathbb E \right| \le t_{k - 1} \, \frac{s}{\sqrt k}

    with the probability of the band, where :math:`s` is the standard deviation of the batch means and
    :math:`t` a quantile of Student's distribution. Batches are five autocorrelation times long, or a whole
    chain if it is shorter. Chains are independent, so four of them are enough, however slowly they move, once
    they are stationary. Fewer chains need ten batches, as their autocorrelation time is hard to estimate.

    ``values`` have shape ``(C, n)``. With too few draws the width is NaN.

    References:
        Geyer 1992, "Practical Markov chain Monte Carlo", for batch means and the autocorrelation time.
    """
    from scipy.stats import t

    chains, draws = values.shape
    mean = float(values.mean())
    if draws < LEAST_DRAWS or not math.isfinite(mean):
        return mean, math.nan
    most = max(1, MOST_BATCHES // chains)
    batches = max(1, min(int(draws / (BATCH_TIMES * autocorrelation_time(values))), most))
    least = LEAST_BATCHES if chains < ENOUGH_CHAINS else ENOUGH_CHAINS
    if chains * batches < least:
        return mean, math.nan
    length = draws // batches
    means = values[:, draws - batches * length :].reshape(chains * batches, length).mean(1)
    quantile = float(t.ppf((1 + probability) / 2, len(means) - 1))
    return mean, quantile * float(means.std(ddof=1)) / math.sqrt(len(means))


def autocorrelation_time(values: np.ndarray) -> float:
    r"""The integrated autocorrelation time of chains, :math:`1 + 2 \sum_k \rho_k`, at least 1.

    The sum ends before the first pair of successive terms with a negative sum. Values are centred by the mean
    of all chains, so that the time is long if chains disagree. ``values`` have shape ``(C, n)``.
    """
    draws = values.shape[1]
    centred = values - values.mean()
    spectrum = np.fft.rfft(centred, 2 * draws, axis=1)
    products = np.fft.irfft((spectrum * spectrum.conj()).mean(0))[:draws]
    if not products[0] > 0:
        return 1.0
    correlation = products / products[0] * draws / np.arange(draws, 0, -1)
    pairs = correlation[1 : 1 + 2 * ((draws - 1) // 2)].reshape(-1, 2).sum(1)
    ends = np.flatnonzero(pairs < 0)
    return max(1.0, 1 + 2 * float(pairs[: ends[0] if len(ends) else None].sum()))
