"""Which sites of a trace have values to export, and how to run a program without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Unit

from pyro_sym._random import fork_random_state
from pyro_sym.unwrap import base_of, is_plate

__all__ = ["infer_of", "latents", "unseen", "variables"]


@contextmanager
def unseen() -> Iterator[None]:
    """No gradients, nothing passed to handlers outside, and the random state restored."""
    with torch.no_grad(), fork_random_state(), poutine.block():
        yield


def variables(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    """Sample sites that have values: latent, observed and deterministic sites, without plates and factors."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or is_plate(site["fn"]) or isinstance(base_of(site["fn"]), Unit):
            continue
        yield name, site


def latents(trace: poutine.Trace) -> dict[str, Any]:
    """The sites of a guide that are latent sites of its model."""
    return {
        name: site
        for name, site in variables(trace)
        if not site["is_observed"] and not infer_of(site).get("is_auxiliary")
    }


def infer_of(site: Any) -> Mapping[str, Any]:
    """The ``infer`` of a site, or an empty dict."""
    return site["infer"] or {}
