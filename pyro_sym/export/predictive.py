"""Data simulated from a model: at draws, from its prior, and beside them the data that were observed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_sym.export.all_rows import Windows, windows
from pyro_sym.export.names import event_dim_of
from pyro_sym.export.sites import unseen, variables
from pyro_sym.export.vmap_draws import at_draws
from pyro_sym.model.program import (
    GivenIndices,
    RefusedError,
    SubsampledPlate,
    in_subsampled_plate,
    is_data,
    is_deterministic,
    traced,
)
from pyro_sym.unwrap import base_of

__all__ = ["predict", "prior_draws"]

Plates = Mapping[str, SubsampledPlate]


def predict(
    model: Callable[..., Any],
    draws: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plates: Plates,
    fixed: Collection[str],
    also: Collection[str] = (),
) -> dict[str, Tensor]:
    """Data drawn anew at every draw of the latent sites, on all rows of subsampled plates.

    Deterministic sites are computed anew on the way, from the latent sites and the new data.

    Args:
        model: a Pyro model.
        draws: constrained values, of shape ``(M, *shape)``.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        plates: its subsampled plates.
        fixed: sites that are parameters at fixed values, and so no data.
        also: deterministic sites whose values are wanted, too.

    Returns:
        Values of the data and of the other sites wanted, of shape ``(M, *shape)``.
    """
    whole = Windows()
    with unseen():
        for window in windows(plates):
            sites: dict[str, Any] = {}

            def one(draw: dict[str, Tensor], window: Any = window, sites: Any = sites) -> dict[str, Tensor]:
                anew = _DataAnew({*fixed, *draw})
                with GivenIndices(window):
                    trace = traced(poutine.condition(anew(model), data=draw), args, kwargs)
                shown = {
                    n: s for n, s in variables(trace) if n in anew.names or (n in also and n not in draw)
                }
                values = {name: torch.as_tensor(site["value"]) for name, site in shown.items()}
                for name, site in shown.items():
                    event_dim = event_dim_of(site, tuple(values[name].shape))
                    sites[name] = tuple(site["cond_indep_stack"]), event_dim
                return values

            for name, part in at_draws(one, draws, None).items():
                frames, event_dim = sites[name]
                whole.put(name, part, frames, window, event_dim)
    return whole.values


def prior_draws(
    model: Callable[..., Any],
    count: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plates: Plates,
    fixed: Collection[str],
) -> dict[str, Tensor]:
    """Draws of the latent sites from their prior, ``(count, *shape)``; not of those in subsampled plates.

    Args:
        model: a Pyro model.
        count: how many.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        plates: its subsampled plates.
        fixed: sites that are parameters at fixed values, and so no data.

    Raises:
        ValueError: if a prior is improper.
    """
    window = next(windows(plates))

    def one(_: dict[str, Tensor]) -> dict[str, Tensor]:
        anew = _DataAnew(fixed)
        with GivenIndices(window), _Proper():
            trace = traced(anew(model), args, kwargs)
        return {
            name: site["value"]
            for name, site in variables(trace)
            if not site["is_observed"] and name not in anew.names and not is_deterministic(site)
            if not in_subsampled_plate(site["cond_indep_stack"])
        }

    with unseen():
        return at_draws(one, {"draw": torch.arange(count)}, None)


class _DataAnew(poutine.messenger.Messenger):
    """Draws data from their distribution; what else Pyro calls observed stays as the model has it.

    ``poutine.uncondition`` frees deterministic sites and factors as well, whose ``Delta`` then draws values
    of other shapes, and parameters that ``poutine.condition`` has fixed.

    Args:
        kept: observed sites that stay as they are.
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
        if getattr(fn, "duration", 0) is None:  # Pyro's models of sequences
            raise RefusedError(
                f"data of site {msg['name']!r} can't be simulated: its {type(fn).__name__} has no duration; "
                "pass duration=, the number of steps"
            )
        try:
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        except NotImplementedError as error:
            raise RefusedError(
                f"data of site {msg['name']!r} can't be simulated: {type(fn).__name__} has no sample method; "
                "write one, or pass data that were simulated elsewhere"
            ) from error
        msg["is_observed"] = False


class _Proper(poutine.messenger.Messenger):
    """Refuses to draw from improper priors."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and isinstance(base_of(msg["fn"]), dist.ImproperUniform):
            raise RefusedError(
                f"there are no draws of the prior of site {msg['name']!r}, which is improper; leave prior "
                "out, or pass draws by site"
            )
