"""How often alignment changed labels, and how sure it was."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from pyro_sym.diagnostics.convergence import FiniteChains

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["confidence", "relabelling"]

CONFIDENCE = "alignment_confidence"


def relabelling(draws: FiniteChains) -> pd.DataFrame | None:
    """A table, by part of the group, of the elements that alignment chose; ``None`` without alignment."""
    import pandas as pd

    stats = draws.stats()
    if stats is None:
        return None
    rows = {}
    for name in map(str, stats.data_vars):
        if not re.fullmatch(r"(permutation|sign)(_\d+)?", name):
            continue
        element = stats[name].values
        neutral = np.arange(element.shape[-1]) if name.startswith("permutation") else 1
        rows[name] = {
            "moved": float((element != neutral).any(-1).mean()),
            "distinct": len(np.unique(element.reshape(-1, element.shape[-1]), axis=0)),
            "switches": int((element[:, 1:] != element[:, :-1]).any(-1).sum()),
        }
    return pd.DataFrame.from_dict(rows, orient="index") if rows else None


def confidence(draws: FiniteChains) -> pd.DataFrame | None:
    """A summary over draws of how sure the alignment was, in one row, or ``None`` if nothing was aligned."""
    import pandas as pd

    stats = draws.stats()
    if stats is None or CONFIDENCE not in stats:
        return None
    values = stats[CONFIDENCE].values
    row = {"mean": values.mean(), "quantile_5": np.quantile(values, 0.05), "smallest": values.min()}
    return pd.DataFrame([row], index=[CONFIDENCE])
