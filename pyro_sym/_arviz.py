"""The one place that knows the two generations of ArviZ: 0.23 (``InferenceData``) and 1.x (``DataTree``)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["build", "has_sample_dims", "load"]


def load() -> Any:
    """Import ArviZ, on first use: it takes longer to import than Pyro."""
    with warnings.catch_warnings():
        # 0.23 announces 1.x on the first import of each day.
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
    return arviz


def has_sample_dims(group: str) -> bool:
    """Whether variables of a group begin with dims ``chain`` and ``draw``, as all but data do."""
    return "data" not in group


def build(
    groups: Mapping[str, Mapping[str, np.ndarray]],
    *,
    coords: Mapping[str, Mapping[str, Any]],
    dims: Mapping[str, Mapping[str, list[str]]],
    attrs: Mapping[str, Any],
) -> Any:
    """Build ArviZ's container from groups of arrays.

    Args:
        groups: arrays by group and variable, of shape ``(chain, draw, *shape)``, or ``shape`` for data.
        coords: labels by group and dim.
        dims: names of the dims of ``shape``, by group and variable.
        attrs: attributes of the container, of types that netCDF can hold.

    Returns:
        An ``InferenceData`` with ArviZ 0.23, a ``DataTree`` with 1.x.
    """
    az = load()
    # Not hasattr(az, "InferenceData"): 1.x has that attribute, too, and warns.
    is_old = hasattr(az, "convert_to_inference_data")
    datasets = {}
    for group, arrays in groups.items():
        sample_dims = ["chain", "draw"] if has_sample_dims(group) else []
        keyword = {"default_dims" if is_old else "sample_dims": sample_dims}
        with warnings.catch_warnings():
            # It guesses that chains and draws are swapped; here they are not.
            warnings.filterwarnings("ignore", "More chains|Found chain", UserWarning)
            datasets[group] = az.dict_to_dataset(
                dict(arrays), coords=coords[group], dims=dims[group], **keyword
            )
    if is_old:
        return az.InferenceData(**datasets, attrs=dict(attrs))
    import xarray

    tree = xarray.DataTree.from_dict(datasets)
    tree.attrs.update(attrs)
    return tree
