"""Data simulated from a model: at draws, from its prior, and beside them the data that were observed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_sym.export.at_draws import at_draws
from pyro_sym.export.rows import Windows, windows
from pyro_sym.export.sites import infer_of, stochastic, unseen
from pyro_sym.program import GivenIndices, SubsampledPlate, in_subsampled_plate

__all__ = ["predict", "prior_draws"]

Plates = Mapping[str, SubsampledPlate]


def predict(
    model: Callable[..., Any],
    draws: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    plates: Plates,
) -> dict[str, Tensor]:
    """Observed sites drawn anew at every draw of the latent ones, on all rows of subsampled plates.

    Args:
        model: a Pyro model.
        draws: constrained values, of shape ``(M, *shape)``.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        plates: its subsampled plates.

    Returns:
        Values of the observed sites, of shape ``(M, *shape)``.
    """
    free = poutine.uncondition(model)
    whole = Windows()
    with unseen():
        for window in windows(plates):
            sites: dict[str, Any] = {}

            def one(draw: dict[str, Tensor], window: Any = window, sites: Any = sites) -> dict[str, Tensor]:
                with GivenIndices(window):
                    conditioned = poutine.condition(free, data=draw)
                    trace = poutine.trace(conditioned).get_trace(*args, **kwargs)
                new = {n: s for n, s in stochastic(trace) if _was_observed(s) and n not in draw}
                sites.update({n: (tuple(s["cond_indep_stack"]), s["fn"].event_dim) for n, s in new.items()})
                return {name: site["value"] for name, site in new.items()}

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
) -> dict[str, Tensor]:
    """Draws of the latent sites from their prior, ``(count, *shape)``; not of those in subsampled plates.

    Args:
        model: a Pyro model.
        count: how many.
        args: the model's positional arguments.
        kwargs: its keyword arguments.
        plates: its subsampled plates.

    Raises:
        ValueError: if a prior is improper.
    """
    free = poutine.uncondition(model)
    window = next(windows(plates))

    def one(_: dict[str, Tensor]) -> dict[str, Tensor]:
        with GivenIndices(window), _Proper():
            trace = poutine.trace(free).get_trace(*args, **kwargs)
        return {
            name: site["value"]
            for name, site in stochastic(trace)
            if not _was_observed(site) and not in_subsampled_plate(site["cond_indep_stack"])
        }

    with unseen():
        return at_draws(one, {"draw": torch.arange(count)}, None)


class _Proper(poutine.messenger.Messenger):
    """Refuses to draw from improper priors."""

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if isinstance(fn, dist.ImproperUniform):
            raise ValueError(
                f"there are no draws of the prior of site {msg['name']!r}, which is improper; leave prior "
                "out, or pass draws by site"
            )


def _was_observed(site: Any) -> bool:
    return bool(infer_of(site).get("was_observed"))
