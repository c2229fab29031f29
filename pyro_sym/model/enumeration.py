"""Enumerated discrete sites: how a model is run with them, and how they are summed out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from opt_einsum import shared_intermediates
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.ops import packed as packed_ops
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_sym.unwrap import is_plate

__all__ = ["enumerating", "marginal_terms", "marginalised", "variables"]


class _HideBatched(Messenger):
    """Replaces values whose ``data`` can't be read under ``vmap`` by meta tensors of the same shapes."""

    def __init__(self, hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden = hidden

    def _pyro_post_sample(self, msg: Any) -> None:
        try:
            msg["value"].data  # noqa: B018
        except RuntimeError:
            self.hidden[msg["name"]] = msg["value"]
            msg["value"] = torch.empty(msg["value"].shape, device="meta")


class _ShowBatched(Messenger):
    """Puts the hidden values back."""

    def __init__(self, hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden = hidden

    def _pyro_post_sample(self, msg: Any) -> None:
        msg["value"] = self.hidden.pop(msg["name"], msg["value"])


def enumerating(model: Callable[..., Any], first_available_dim: int) -> Callable[..., Any]:
    """The model with discrete sites enumerated; Pyro's handler reads ``value.data`` for its shape."""
    hidden: dict[str, Tensor] = {}
    shown = _ShowBatched(hidden)(config_enumerate(model))
    return _HideBatched(hidden)(poutine.enum(shown, first_available_dim=first_available_dim))


def variables(trace: poutine.Trace) -> list[Any]:
    """The sample sites of a trace, without those of plates."""
    return [s for s in trace.nodes.values() if s["type"] == "sample" and not is_plate(s["fn"])]


def marginal_terms(trace: poutine.Trace, ring: LogRing | None = None) -> dict[str, Tensor]:
    """The terms of :meth:`Program.log_joint_terms`, from a trace with log probabilities computed.

    Enumerated sites are summed out, with masks inside the sum and the common scale outside.
    """
    alone, joint, scale, parts = marginalised(trace, ring)
    total: Any = sum(part.sum() for part in parts)
    return {**{site["name"]: site["log_prob_sum"] for site in alone}, joint: scale * total}


def marginalised(
    trace: poutine.Trace, ring: LogRing | None
) -> tuple[list[Any], str, float | Tensor, list[Tensor]]:
    """Sites that depend on no summed-out one; the name, scale and parts of the term of all others."""
    trace.pack_tensors()
    sites = variables(trace)
    plates = {
        s["name"]: frozenset(trace.plate_to_symbol[f.name] for f in s["cond_indep_stack"] if f.vectorized)
        for s in sites
    }
    summed = {s["infer"]["_enumerate_symbol"] for s in sites if s["infer"].get("_enumerate_dim") is not None}
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    alone, joint, scales = [], [], []
    for site in sites:
        packed = site["packed"]
        if summed.isdisjoint(packed["log_prob"]._pyro_dims):
            alone.append(site)
            continue
        factor = packed["unscaled_log_prob"]
        # A masked row must contribute 1: its likelihood is 1, and its enumerated prior sums to 1 unmasked.
        if packed["mask"] is not None and site["infer"].get("_enumerate_dim") is None:
            factor = packed_ops.scale_and_mask(factor, mask=packed["mask"])
        factors.setdefault(plates[site["name"]], []).append(factor)
        scales.append(site["scale"])
        joint.append(site["name"])
    if len({float(scale) for scale in scales}) > 1:
        raise ValueError(
            f"the sites {joint} are summed out together but carry different scales {scales}; "
            "put them into the same subsampled plate or poutine.scale"
        )
    with shared_intermediates():
        contracted = contract_tensor_tree(factors, summed, ring=ring)
    return alone, "+".join(joint), scales[0], [term for group in contracted.values() for term in group]
