"""Which sites of a trace are random variables, and how to look at a program without leaving a mark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.poutine.subsample_messenger import _Subsample

from pyro_sym._random import fork_random_state

__all__ = ["infer_of", "latents", "stochastic", "unseen"]


@contextmanager
def unseen() -> Iterator[None]:
    """No gradients, nothing seen by handlers outside, and the random state put back."""
    with torch.no_grad(), fork_random_state(), poutine.block():
        yield


def stochastic(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    """Sample sites that stand for random variables: no plates, deterministic sites or factors."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or infer_of(site).get("_deterministic"):
            continue
        fn = site["fn"]
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if not isinstance(fn, _Subsample | Unit):
            yield name, site


def latents(trace: poutine.Trace) -> dict[str, Any]:
    """The sites that a guide draws for a model."""
    return {
        name: site
        for name, site in stochastic(trace)
        if not site["is_observed"] and not infer_of(site).get("is_auxiliary")
    }


def infer_of(site: Any) -> Mapping[str, Any]:
    """A site's ``infer``, which may be missing."""
    return site["infer"] or {}
