"""What Pyro's guides keep about themselves: model, parameter names, supports, parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import AutoCallable
from pyro.nn import PyroModule

from pyro_sym._private import called_guide, has_run

__all__ = ["is_named", "model_of", "prototype_sites", "unwrapped"]


def unwrapped(guide: Callable[..., Any]) -> Callable[..., Any]:
    """The guide that an ``AutoCallable``, a part of an ``AutoGuideList``, stands for."""
    return called_guide(guide) if isinstance(guide, AutoCallable) else guide


def prototype_sites(guide: Callable[..., Any]) -> dict[str, Any]:
    """The latent sites of the model that an autoguide was made from; none for other guides.

    An autoguide's own sites may be point masses, which don't have the support of the model's site.
    """
    prototype = getattr(guide, "prototype_trace", None)
    nodes = {} if prototype is None else prototype.nodes
    return {name: node for name, node in nodes.items() if "fn" in node}


def model_of(guide: Callable[..., Any]) -> Callable[..., Any] | None:
    """The model that a guide holds, if any; Pyro drops it when an autoguide is copied."""
    if not isinstance(guide, AutoGuide):
        return getattr(guide, "model", None)
    if guide._model is not None:
        return guide.model
    if guide.prototype_trace is None:
        raise ValueError(
            f"{type(guide).__name__} was copied or pickled before its first run, and has lost its model; "
            "make a new one from the model, or run it once before copying it"
        )
    return None


def is_named(guide: PyroModule) -> bool:
    """Whether any part of a guide has run, so that its parameters are already named."""
    used = any(has_run(m) for m in guide.modules() if isinstance(m, PyroModule))
    if used and not getattr(guide, "_pyro_name", ""):
        raise ValueError(
            f"{type(guide).__name__} has been run already and has no name for its parameters; give it one, "
            "as in super().__init__(name='guide'), or symmetrise it before its first run"
        )
    return used
