"""Data simulated from a model: at given draws, or at draws from its prior."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_sym.export.joined_windows import Shown, on_all_rows
from pyro_sym.export.names import shown
from pyro_sym.export.shown_model import ShownModel
from pyro_sym.export.sites import unseen, variables
from pyro_sym.export.vmap_draws import at_draws
from pyro_sym.model.all_rows import Window, windows
from pyro_sym.model.program import GivenIndices, RefusedError, in_subsampled_plate, is_data, is_deterministic
from pyro_sym.unwrap import base_of

__all__ = ["predict", "prior_draws"]


def predict(model: ShownModel, draws: Mapping[str, Tensor], also: Collection[str] = ()) -> dict[str, Tensor]:
    """Simulate the data at all draws, on all rows of subsampled plates.

    Returns values ``(M, *shape)`` by site, with those of the deterministic sites in ``also``, which are
    computed from the latent sites and the simulated data.
    """

    def one(draw: dict[str, Tensor], window: Window) -> dict[str, Shown]:
        simulated = _SimulateData({*model.fixed, *draw})
        with GivenIndices(window):
            held = poutine.condition(simulated(model.program), data=draw)
            trace = model.trace(held)
        return {
            name: shown(site)
            for name, site in variables(trace)
            if name in simulated.names or (name in also and name not in draw)
        }

    with unseen():
        return on_all_rows(one, windows(model.plates), None, draws)


def prior_draws(model: ShownModel, count: int) -> dict[str, Tensor]:
    """Draw the latent sites from their prior, except those in subsampled plates, as ``(count, *shape)``."""
    window = next(windows(model.plates))

    def one(_: dict[str, Tensor]) -> dict[str, Tensor]:
        simulated = _SimulateData(model.fixed)
        with GivenIndices(window), _RefuseImproper():
            trace = model.trace(simulated(model.program))
        return {
            name: site["value"]
            for name, site in variables(trace)
            if not site["is_observed"] and name not in simulated.names and not is_deterministic(site)
            if not in_subsampled_plate(site["cond_indep_stack"])
        }

    with unseen():
        return at_draws(one, {"draw": torch.arange(count)}, None)


class _SimulateData(poutine.messenger.Messenger):
    """Draws data, except those in ``kept``, from their distribution; ``names`` are the simulated sites.

    ``poutine.uncondition`` would also release deterministic sites and factors, whose ``Delta`` then draws
    values of other shapes, and parameters that ``poutine.condition`` has fixed.
    """

    def __init__(self, kept: Collection[str]) -> None:
        super().__init__()
        self.kept = kept
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        if not is_data(msg) or msg["name"] in self.kept:
            return
        self.names.add(msg["name"])
        fn = base_of(msg["fn"])
        refused, kind = f"data of site {msg['name']!r} can't be simulated", type(fn).__name__
        if getattr(fn, "duration", 0) is None:  # Pyro's distributions of sequences
            raise RefusedError(f"{refused}: its {kind} has no duration; pass duration=, the number of steps")
        try:
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        except NotImplementedError as error:
            raise RefusedError(f"{refused}: {kind} has no sample method; write one, or pass data") from error
        msg["is_observed"] = False


class _RefuseImproper(poutine.messenger.Messenger):
    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and isinstance(base_of(msg["fn"]), dist.ImproperUniform):
            raise RefusedError(f"prior of site {msg['name']!r} is improper; leave prior out, or pass draws")
