"""Two plots that ArviZ does not have: an orbit before and after alignment, and temperatures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_sym.diagnostics.convergence import FiniteChains, has_group
from pyro_sym.diagnostics.temperatures import kernel_temperature, series_by_kind, unconstrained_sizes
from pyro_sym.export.api import dataset
from pyro_sym.sgmcmc.thermometers import kinetic_band

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_orbit", "plot_temperatures"]

Coordinate = str | tuple[str, Mapping[str, Any]]
"""A variable of at most one dim, or a variable and the labels to select along its other dims."""

MOST_IN_LEGEND = 10
COLOURS = {"kinetic": "C0", "configurational": "C1"}


def plot_orbit(
    data: Any,
    x: Coordinate,
    y: Coordinate | None = None,
    *,
    max_points: int = 2000,
    axes: Any = None,
) -> np.ndarray:
    """Scatter two coordinates of each unit, before and after alignment.

    If the coordinates have a dim of units, say two weights into each hidden unit, every draw gives a point
    for each unit, coloured by unit (colours repeat from the eleventh on): colours are mixed in the raw draws,
    and form one cloud each where alignment separated the units. Without such a dim every draw is one point,
    coloured by chain, and the copies of a mode are clouds.

    Args:
        data: what :func:`~pyro_sym.from_pyro` returned, with a symmetry.
        x: the horizontal coordinate: the name of a variable with at most one dim, or a pair of a name and
            the labels to select along its dims, ``("weight", {"weight_dim_0": 0})``.
        y: the vertical coordinate, with the same dim of units. By default the first unit of ``x`` is plotted
            against the second.
        max_points: the largest number of points in a panel; draws are thinned evenly.
        axes: two matplotlib axes to draw on; by default those of a new figure.

    Returns:
        The two axes, raw and aligned.

    Raises:
        KeyError: if there is no such variable.
        ValueError: if nothing was aligned, a coordinate has more than one dim, or the two have different
            units.

    Example:
        >>> from pyro_sym.diagnostics import plot_orbit
        >>> locs = torch.tensor([-3.0, 3.0]) + 0.1 * torch.randn(2, 50, 2)
        >>> data = from_pyro({"locs": locs}, symmetry=Permutation({"locs": -1}))
        >>> raw, aligned = plot_orbit(data, "locs")
        >>> aligned.get_title()
        'aligned'
    """
    import matplotlib.pyplot as plt

    if not has_group(data, "posterior_aligned"):
        raise ValueError("nothing was aligned: pass symmetry= to from_pyro")
    if own := axes is None:
        _, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
    axes = np.asarray(axes)
    for ax, group, title in zip(axes, ("posterior", "posterior_aligned"), ("raw", "aligned"), strict=True):
        (across, label_x), (up, label_y) = _pair(dataset(data, group), x, y)
        points_by, what = _coloured(across, up)
        step = max(1, math.ceil(across.size / max_points))
        for points_x, points_y, label in points_by:
            ax.scatter(points_x[::step], points_y[::step], s=8, alpha=0.5, linewidths=0, label=label)
        ax.set(title=title, xlabel=label_x, ylabel=label_y)
        if own:
            ax.label_outer()
    if len(points_by) <= MOST_IN_LEGEND:
        # Outside of the axes, so that it covers no points.
        axes[1].legend(title=what, loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=2, frameon=False)
    return axes


def plot_temperatures(
    data: Any, *, temperature: float | None = None, probability: float = 0.99, ax: Axes | None = None
) -> Axes:
    r"""Plot temperatures of a run by site, with the band of single draws.

    For each site a line goes from the 5 % to the 95 % quantile over draws, with the mean as a point: the
    kinetic temperature and, below it, the configurational one. The grey box is
    :func:`~pyro_sym.kinetic_band`, where the kinetic temperature of one draw should be: the lines of kinetic
    temperatures should lie inside. For the configurational temperature only the mean should be :math:`T`, the
    dashed line.

    Args:
        data: what :func:`~pyro_sym.from_pyro` returned, of a run of one of this package's kernels.
        temperature: :math:`T`; by default the kernel's, if it is constant.
        probability: of the band.
        ax: matplotlib axes to draw on; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: if the run recorded no temperatures.

    Example:
        >>> from pyro_sym.diagnostics import plot_temperatures
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        >>> mcmc = VectorizedMCMC(
        ...     BAOA(model, step_size=0.5, friction=1.0), 50, num_chains=2, disable_progbar=True
        ... )
        >>> mcmc.run()
        >>> ax = plot_temperatures(from_pyro(mcmc))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['x (3)', 'all sites (3)']

    References:
        Wenzel et al. 2020, arXiv 2002.02405, appendix I.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    series = series_by_kind(FiniteChains.of(data, None, 1).stats())
    sites = list(dict.fromkeys(site for several in series.values() for site in several))
    if not sites:
        raise ValueError("the run recorded no temperatures; runs of this package's kernels do")
    target = temperature if temperature is not None else kernel_temperature(data)
    sizes = unconstrained_sizes(data)
    if ax is None:
        _, ax = plt.subplots(figsize=(7, 1.2 + 0.5 * len(sites)), layout="constrained")
    handles: list[Any] = []
    for row, site in enumerate(sites):
        if target is not None and site in sizes:
            low, high = kinetic_band(target, sizes[site], probability)
            ax.barh(row, high - low, left=low, height=0.8, color="0.88", zorder=0)
    for kind, offset in (("kinetic", -0.17), ("configurational", 0.17)):
        for row, site in enumerate(sites):
            if site not in series[kind]:
                continue
            values = series[kind][site].values
            ends = np.quantile(values, [0.05, 0.95])
            ax.plot(ends, [row + offset] * 2, color=COLOURS[kind], linewidth=1.5)
            label = f"{kind}, mean and 90%"
            (point,) = ax.plot(values.mean(), row + offset, "o", color=COLOURS[kind], label=label)
        if series[kind]:
            handles.append(point)
    if target is not None:
        handles.append(ax.axvline(target, color="0.4", linestyle="--", linewidth=1, label=f"T = {target:g}"))
        if sizes:
            handles.append(Patch(color="0.88", label=f"{probability:.0%} of kinetic draws"))
    ax.set_yticks(range(len(sites)), [f"{site} ({sizes[site]})" if site in sizes else site for site in sites])
    ax.use_sticky_edges = False  # leave a margin around the bands
    ax.set_ylim(len(sites) - 0.4, -0.6)  # the first site on top
    ax.set_xlabel("temperature")
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


def _pair(posterior: Any, x: Coordinate, y: Coordinate | None) -> tuple[Any, Any]:
    """Both coordinates, of shape ``(chain, draw)`` or ``(chain, draw, unit)``, each with its label."""
    across, label = _coordinate(posterior, x)
    if y is None:
        if across.ndim < 3 or across.shape[2] < 2:
            raise ValueError(f"{x!r} has no two units to plot against each other; pass y")
        labels = [f"{label}[{unit}]" for unit in across[across.dims[2]].values[:2]]
        return (across[..., 0], labels[0]), (across[..., 1], labels[1])
    up, other = _coordinate(posterior, y)
    if across.shape != up.shape:
        raise ValueError(f"{x!r} and {y!r} have shapes {across.shape} and {up.shape}; they must be equal")
    return (across, label), (up, other)


def _coordinate(posterior: Any, which: Coordinate) -> tuple[Any, str]:
    name, selection = (which, {}) if isinstance(which, str) else which
    if name not in posterior:
        raise KeyError(f"the posterior has no variable {name!r}, but {list(posterior.data_vars)}")
    values = posterior[name].sel(selection)
    if values.ndim > 3:
        cure = f"select along all but that of the units, as in ({name!r}, {{{values.dims[2]!r}: 0}})"
        raise ValueError(f"{name!r} has dims {list(values.dims[2:])}; {cure}")
    return values, f"{name}[{', '.join(map(str, selection.values()))}]" if selection else name


def _coloured(across: Any, up: Any) -> tuple[list[tuple[Any, Any, str]], str]:
    """Points ``(x, y, label)`` by colour, and whether colours are units or chains."""
    axis = 2 if across.ndim == 3 else 0
    dim = across.dims[axis]
    groups = [
        (across.isel({dim: i}).values.ravel(), up.values.take(i, axis).ravel(), str(label))
        for i, label in enumerate(across[dim].values)
    ]
    return groups, "unit" if axis == 2 else "chain"
