"""R-hat and effective sample size of raw and aligned draws, of some coordinates of each variable."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym import _arviz
from pyro_sym.export.api import dataset
from pyro_sym.export.attrs import read_attr
from pyro_sym.export.names import legal

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["FiniteChains", "convergence", "has_group"]

# ArviZ needs this many draws a chain, and R-hat this many chains.
LEAST_DRAWS, LEAST_CHAINS = 4, 2
SEED = 0x5EED


@dataclass(frozen=True)
class FiniteChains:
    """The chains of an export whose draws are finite, and some coordinates of their draws."""

    data: Any
    chains: list[int]  # their indices
    sizes: dict[str, int]  # number of coordinates by variable
    raw: dict[str, np.ndarray]  # some coordinates by variable, of shape (chain, draw, coordinate)
    aligned: dict[str, np.ndarray] | None  # the same coordinates of the aligned draws
    notes: tuple[str, ...]  # on chains and coordinates that were left out

    @classmethod
    def of(cls, data: Any, var_names: Collection[str] | None, max_coordinates: int | None) -> FiniteChains:
        """Read the named variables of an export, or all, and at most ``max_coordinates`` of each."""
        posterior = dataset(data, "posterior")
        names = list(posterior.data_vars) if var_names is None else list(var_names)
        for name in names:
            if name not in posterior:
                raise KeyError(f"the posterior has no variable {name!r}, but {list(posterior.data_vars)}")
        sizes = {name: math.prod(posterior[name].shape[2:]) for name in names}
        names = [name for name in names if sizes[name]]
        if not names:
            raise ValueError("there is no variable with coordinates to report on")
        raw = {name: _coordinates(posterior[name], max_coordinates) for name in names}
        computed = read_attr(data, "deterministic", [])  # by the model from its latent sites
        sources = {name for name in names if name not in computed} or names
        by_name = {name: np.isfinite(raw[name]).all((1, 2)) for name in names if name in sources}  # (chain,)
        finite = np.stack(list(by_name.values())).all(0)
        if not finite.any():
            raise ValueError("every chain has draws that are not finite; there is nothing to report on")
        notes = []
        if not finite.all():
            at_fault = [name for name, fine in by_name.items() if not fine.all()]
            left_out = np.flatnonzero(~finite).tolist()
            notes.append(f"chains {left_out} are left out: not finite in {', '.join(at_fault)}")
        if "guide" in data.attrs:
            notes.append("draws of a guide are independent: that they mix says nothing about its fit")
        elif finite.sum() < LEAST_CHAINS:
            notes.append("there is one chain, so no R-hat: run several chains from different starts")
        aligned = None
        if has_group(data, "posterior_aligned"):
            moved = dataset(data, "posterior_aligned")
            aligned = {name: _coordinates(moved[name], max_coordinates)[finite] for name in names}
        raw = {name: value[finite] for name, value in raw.items()}
        for name in names:  # deterministic sites may be infinite or padded with NaN in finite chains
            both = [raw[name]] if aligned is None else [raw[name], aligned[name]]
            kept = np.isfinite(np.concatenate(both)).all((0, 1))
            if kept.all():
                continue
            count = int((~kept).sum())
            notes.append(f"{count} of {len(kept)} coordinates of {name} are not finite, and left out")
            for values in [raw] if aligned is None else [raw, aligned]:
                values[name] = values[name][..., kept]
                if not kept.any():
                    del values[name]
        return cls(data, np.flatnonzero(finite).tolist(), sizes, raw, aligned, tuple(notes))

    def stats(self) -> xr.Dataset | None:
        """Statistics of the draws of these chains, if there are any."""
        if not has_group(self.data, "sample_stats"):
            return None
        return dataset(self.data, "sample_stats").isel(chain=self.chains)

    def tensor(self, group: str, site: str) -> Tensor:
        """All coordinates of a site in these chains, of shape ``(chain, draw, *shape)``."""
        return torch.from_numpy(dataset(self.data, group)[legal(site)].values[self.chains])


def convergence(draws: FiniteChains) -> pd.DataFrame:
    """A table by variable: R-hat and effective sample sizes of its worst coordinate."""
    import pandas as pd

    table = pd.DataFrame(index=pd.Index(list(draws.raw), name="variable"))
    kinds = dict.fromkeys(read_attr(draws.data, "deterministic", []), "deterministic")
    kinds |= dict.fromkeys(read_attr(draws.data, "functions", []), "function")
    table["kind"] = [kinds.get(name, "site") for name in draws.raw]
    table["size"] = [draws.sizes[name] for name in draws.raw]
    table["looked_at"] = [value.shape[-1] for value in draws.raw.values()]
    aligned = _diagnosed(draws.aligned) if draws.aligned is not None else {}
    for column, values in _diagnosed(draws.raw).items():
        table[column] = values
        table[f"{column}_aligned"] = aligned.get(column, math.nan)
    return table


def _diagnosed(values: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Columns of the table, for raw or aligned draws."""
    import xarray as xr

    az = _arviz.load()
    chains, count = next(iter(values.values())).shape[:2]
    variables = xr.Dataset(
        {name: (("chain", "draw", f"{name}_coordinate"), value) for name, value in values.items()}
    )
    unknown = {name: np.full(value.shape[-1], math.nan) for name, value in values.items()}
    fits = count >= LEAST_DRAWS
    with np.errstate(invalid="ignore", divide="ignore"):  # constant coordinates
        r_hat = az.rhat(variables) if fits and chains >= LEAST_CHAINS else unknown
        bulk = az.ess(variables, method="bulk") if fits else unknown
        tail = az.ess(variables, method="tail") if fits else unknown
    return {
        "r_hat": [_over_known(np.max, r_hat[name]) for name in values],
        "r_hat_median": [_over_known(np.median, r_hat[name]) for name in values],
        "ess_bulk": [_over_known(np.min, bulk[name]) for name in values],
        "ess_tail": [_over_known(np.min, tail[name]) for name in values],
    }


def _over_known(statistic: Any, values: Any) -> float:
    """A statistic over the coordinates with a value; a constant coordinate has no R-hat."""
    known = np.asarray(values)
    known = known[~np.isnan(known)]
    return float(statistic(known)) if known.size else math.nan


def _coordinates(variable: xr.DataArray, most: int | None) -> np.ndarray:
    """All coordinates, or a fixed random subset of ``most``, of shape ``(chain, draw, coordinate)``."""
    import xarray as xr

    shape = variable.shape[2:]
    size = math.prod(shape)
    if most is None or size <= most:
        return variable.values.reshape(*variable.shape[:2], size)
    # Evenly spaced coordinates could all be in one row of a matrix.
    chosen = np.sort(np.random.default_rng(SEED).choice(size, most, replace=False))
    indices = zip(variable.dims[2:], np.unravel_index(chosen, shape), strict=True)
    picked = variable.isel({dim: xr.DataArray(where, dims="coordinate") for dim, where in indices})
    return picked.transpose(*variable.dims[:2], "coordinate").values


def has_group(data: Any, group: str) -> bool:
    """Whether an export of either generation of ArviZ has a group."""
    return group in (data.children if hasattr(data, "children") else data.groups())
