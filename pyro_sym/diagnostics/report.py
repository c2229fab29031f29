"""One report of a run: convergence, temperatures, labels, and distance to the mode."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_sym.alignment.distance import distance_to_copy, distance_to_mode
from pyro_sym.diagnostics.convergence import FiniteChains, convergence
from pyro_sym.diagnostics.labels import confidence, relabelling
from pyro_sym.diagnostics.stein import SteinDiscrepancy
from pyro_sym.diagnostics.temperatures import kernel_temperature, temperatures, unconstrained_sizes
from pyro_sym.guides.gain import SymmetryGain
from pyro_sym.symmetry.base import Group

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Report", "report"]

TITLES = {
    "convergence": "Convergence: the worst coordinate of each variable, raw | aligned",
    "temperatures": "Temperatures by site: means, with the bands they should be in (! if outside)",
    "relabelling": "Relabelling of draws by the alignment",
    "confidence": "Confidence of the alignment",
    "distance": "Distance to the nearest equivalent mode",
    "gain": "Gain of symmetrising the guide, in nats",
    "discrepancy": "Kernel Stein discrepancy, squared",
    "directions": "Temperatures along principal directions, relative to the target's",
}


@dataclass(frozen=True)
class Report:
    """Tables of a run; ``print`` and notebooks show them all.

    Attributes:
        convergence: by variable, its ``kind`` (``site``, ``deterministic`` or ``function``), its number of
            coordinates (``size``) and how many of them were ``looked_at``; over these the largest and the
            median ``r_hat``, and the smallest ``ess_bulk`` and ``ess_tail``, each of the raw draws and, with
            the suffix ``_aligned``, of the aligned draws.
        temperatures: by site, the ``target``, the mean of ``kinetic`` and ``configurational`` temperature
            over draws, the band of each (``_low``, ``_high``) and whether it is ``_inside``.
        relabelling: by part of the group, the share of draws that were ``moved``, the number of ``distinct``
            elements, and the number of ``switches`` between successive draws of a chain.
        confidence: of the alignment: mean, 5 % quantile and minimum over draws.
        distance: from draws to the nearest copy of the mode (median and largest), and from the mode to the
            nearest of its own copies.
        gain: a :class:`~pyro_sym.SymmetryGain` as a row.
        discrepancy: a :class:`SteinDiscrepancy` as a row.
        notes: what was left out, and what the tables can't show.
        directions: what :func:`directional_temperatures` returned.
    """

    convergence: pd.DataFrame
    temperatures: pd.DataFrame | None
    relabelling: pd.DataFrame | None
    confidence: pd.DataFrame | None
    distance: pd.DataFrame | None
    gain: pd.DataFrame | None
    discrepancy: pd.DataFrame | None
    notes: tuple[str, ...] = ()
    directions: pd.DataFrame | None = None

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables that there are, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name in TITLES}
        return {name: table for name, table in found.items() if table is not None}

    def __str__(self) -> str:
        parts = [f"{TITLES[name]}\n{_shown(table).to_string()}" for name, table in self.tables.items()]
        notes = [textwrap.fill(f"* {note}", 100, subsequent_indent="  ") for note in self.notes]
        return "\n\n".join([*parts, *notes])

    def _repr_html_(self) -> str:
        parts = [f"<h4>{TITLES[name]}</h4>{_shown(table).to_html()}" for name, table in self.tables.items()]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return "".join(parts) + (f"<ul>{notes}</ul>" if notes else "")


def report(
    data: Any,
    *,
    var_names: Collection[str] | None = None,
    max_coordinates: int | None = 100,
    temperature: float | None = None,
    probability: float = 0.99,
    symmetry: Group | None = None,
    mode: Mapping[str, Tensor] | None = None,
    gain: SymmetryGain | None = None,
    discrepancy: SteinDiscrepancy | None = None,
    directions: pd.DataFrame | None = None,
) -> Report:
    r"""Report on an exported run: its diagnostics in tables.

    * **Convergence** of raw draws, aligned draws, and functions of them. Chains at different copies of one
      mode have a large raw R-hat, but R-hats of aligned draws and of functions near 1: only their labels
      differ. If those are large, too, the chains disagree. A raw R-hat near 1 may also mean that all chains
      switch labels alike; then means and standard deviations of raw draws mix several labels.
    * **Temperatures**, for this package's kernels: means over draws, with bands around the target from the
      spread of batch means (:func:`~pyro_sym.diagnostics.temperatures.mean_band`). The bands need four
      chains, or long ones, and are missing otherwise. :mod:`pyro_sym.sgmcmc.thermometers` says which errors
      each temperature shows. One site in a hundred is outside of its 99 % band by chance.
    * **Labels**: how often alignment moved draws, and how sure it was.
    * **Distance**, with a symmetry, from the draws to the nearest copy of the mode, beside the distance from
      the mode to its own nearest copy (:func:`distance_to_mode`, :func:`distance_to_copy`).
    * **Gain**, **discrepancy** and **directions**, if they are given. With :class:`~pyro_sym.SGNHT` look at
      the directions: its thermostat holds the mean temperature even where directions are wrong.

    Of more than ``max_coordinates`` a fixed random subset is used, as each takes milliseconds; the column
    ``looked_at`` has its size. Chains with draws that are not finite are left out. ArviZ plots either group:
    ``az.plot_trace(dataset(data, "posterior_aligned"))``. It lacks :func:`plot_orbit` and
    :func:`plot_temperatures`.

    Args:
        data: what :func:`~pyro_sym.from_pyro` or :func:`~pyro_sym.from_pyro_svi` returned.
        var_names: the variables to report on; by default all of ``posterior``.
        max_coordinates: the largest number of coordinates of one variable; ``None`` for all.
        temperature: the target; by default that of the kernel, if it is constant.
        probability: of the bands.
        symmetry: distances are modulo this symmetry.
        mode: the mode, constrained values by site; by default the mean of the aligned draws.
        gain: from :meth:`~pyro_sym.AutoSymmetrized.symmetry_gain`.
        discrepancy: from :func:`kernel_stein_discrepancy`.
        directions: from :func:`directional_temperatures`.

    Returns:
        Tables as ``pandas.DataFrame`` s, and notes.

    Raises:
        KeyError: if a variable is not in the posterior.
        ValueError: if no chain is finite, there is no variable to report on or no mode, or
            ``max_coordinates`` is not positive.

    Example:
        >>> from pyro_sym.diagnostics import report
        >>> locs = torch.tensor([-3.0, 3.0]) + 0.1 * torch.randn(2, 50, 2)
        >>> locs[1] = locs[1].flip(-1)  # the second chain has the labels the other way round
        >>> symmetry = Permutation({"locs": -1})
        >>> total = {"total": lambda draw: draw["locs"].sum()}
        >>> data = from_pyro({"locs": locs}, symmetry=symmetry, functions=total)
        >>> table = report(data, symmetry=symmetry).convergence
        >>> (table["r_hat"] > 1.1).to_dict(), (table["r_hat_aligned"] > 1.1).to_dict()
        ({'locs': True, 'total': False}, {'locs': False, 'total': False})

    References:
        Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), "Rank-normalization, folding, and
        localization: an improved R-hat".
    """
    if max_coordinates is not None and max_coordinates < 1:
        raise ValueError(f"max_coordinates={max_coordinates} must be positive")
    draws = FiniteChains.of(data, var_names, max_coordinates)
    target = temperature if temperature is not None else kernel_temperature(data)
    tables = {
        "convergence": convergence(draws),
        "temperatures": temperatures(draws, target, unconstrained_sizes(data), probability),
        "relabelling": relabelling(draws),
        "confidence": confidence(draws),
        "distance": None if symmetry is None else _distance(draws, symmetry, mode),
        "gain": _row("gain", gain),
        "discrepancy": _row("discrepancy", discrepancy),
        "directions": directions,
    }
    notes = list(draws.notes)
    if tables["temperatures"] is not None and target is None:
        notes.append("the kernel's temperature is not constant; pass temperature= to get bands")
    notes += _notes_on_temperatures(tables["temperatures"], data.attrs.get("kernel"), directions is not None)
    return Report(**tables, notes=tuple(notes))


def _notes_on_temperatures(table: pd.DataFrame | None, kernel: str | None, directions: bool) -> list[str]:
    notes = []
    if table is not None and "kinetic" in table and (table["kinetic"] > table["kinetic_high"]).any():
        notes.append(
            "kinetic temperatures above their band come from minibatch noise if a run on all rows has none; "
            "otherwise the step size is too large for a target that is not Gaussian: halve it"
        )
    if table is not None and kernel == "SGNHT" and not directions:
        notes.append(
            "a thermostat holds the mean temperature, even where some directions are too hot and others too "
            "cold: pass directions=directional_temperatures(…) to see them"
        )
    return notes


def _distance(draws: FiniteChains, symmetry: Group, mode: Mapping[str, Tensor] | None) -> pd.DataFrame:
    import pandas as pd

    samples = {site: draws.tensor("posterior", site) for site in symmetry.sites}
    if mode is None:
        if draws.aligned is None:
            raise ValueError("there are no aligned draws to take a mode from; pass mode=")
        moved = {site: draws.tensor("posterior_aligned", site) for site in symmetry.sites}
        mode = {site: value.double().mean((0, 1)) for site, value in moved.items()}
    distances = distance_to_mode(samples, mode, symmetry, group_by_chain=True)
    row = {
        "median": float(distances.quantile(0.5)),
        "largest": float(distances.max()),
        "mode_to_copy": distance_to_copy(mode, symmetry),
    }
    return pd.DataFrame([row], index=["distance"])


def _row(name: str, result: Any) -> pd.DataFrame | None:
    """A named tuple as a table of one row."""
    import pandas as pd

    return None if result is None else pd.DataFrame([result._asdict()], index=[name])


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The table as text with three digits; bands and aligned values are merged, empty columns dropped."""
    import pandas as pd

    columns = list(table.dropna(axis=1, how="all"))
    text = {column: table[column].map(_digits) for column in columns}
    shown: dict[str, pd.Series] = {}
    for column in columns:
        if column.endswith(("_aligned", "_low", "_high", "_inside")):
            continue
        if f"{column}_aligned" in text:
            shown[f"{column}, aligned"] = text[column] + " | " + text[f"{column}_aligned"]
        elif f"{column}_low" in text:
            outside = table[f"{column}_inside"].map({True: "", False: " !"}).fillna("")
            band = " in [" + text[f"{column}_low"] + ", " + text[f"{column}_high"] + "]"
            shown[column] = text[column] + band + outside
        else:
            shown[column] = text[column]
    return pd.DataFrame(shown)


def _digits(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
