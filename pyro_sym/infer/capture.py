"""Run a guide, keep what it drew and how likely that was, and hide it from the handlers outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_sym.errors import NoDensityError
from pyro_sym.program import in_subsampled_plate, is_deterministic

__all__ = ["Capture", "Captured", "Draws", "InPlates"]


@dataclass(frozen=True)
class Captured:
    """A latent site of a guide's call.

    Attributes:
        value: the value drawn; dims of plates outside of the guide (particles) stand first.
        fn: the distribution as the guide stated it, before plates outside expand it.
        frames: the guide's own plates around the site.
        local: whether one of them is subsampled; such sites are not hidden.
    """

    value: Tensor
    fn: Any
    frames: tuple[CondIndepStackFrame, ...]
    local: bool


@dataclass(frozen=True)
class Draws:
    """``P`` draws of a guide.

    Attributes:
        values: by latent site, of shape ``(P, *native)``.
        own: the log density that the guide gave to its hidden sites, of shape ``(P,)``, in nats.
        indices: the minibatch of every plate of the guide.
        fns: what the guide drew each site from.
    """

    values: dict[str, Tensor]
    own: Tensor
    indices: dict[str, Tensor]
    fns: dict[str, Any] = field(default_factory=dict)


class Capture(Messenger):
    """Records a guide's sample sites. Those outside of subsampled plates are hidden from traces outside.

    ``poutine.block`` would hide them from the plates outside as well, and so from vectorised particles.

    Args:
        guide: the guide that is going to be run.
    """

    def __init__(self, guide: Callable[..., Any]) -> None:
        super().__init__()
        # An effect-based autoguide runs the model, whose observed sites are no business of the guide's trace.
        self.runs_model = isinstance(guide, GuideMessenger)
        self.sites: dict[str, Captured] = {}
        self.auxiliary: dict[str, Any] = {}  # site -> its distribution, as the guide stated it
        self.log_probs: list[Tensor] = []
        self.indices: dict[str, Tensor] = {}
        self.outer: dict[int, int] = {}  # dim of a plate outside of the guide -> its size

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            return
        if msg["is_observed"]:
            if not self.runs_model and not is_deterministic(msg):
                raise NoDensityError(
                    f"the guide has a factor or an observation {msg['name']!r}, so its draws do not have "
                    "the density of its sites; remove it"
                )
            msg["stop"] = True
            return
        frames = tuple(msg["cond_indep_stack"])
        local = in_subsampled_plate(frames)
        msg["_captured"] = (frames, local, msg["fn"], msg["infer"])
        if not local:
            msg["infer"] = {**msg["infer"], "is_auxiliary": True, "_do_not_trace": True}

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self.indices[msg["name"]] = msg["value"]
            return
        if "_captured" not in msg:
            return
        frames, local, fn, infer = msg.pop("_captured")
        # A trace inside of the guide, as effect-based autoguides keep one, must see the site.
        msg["infer"] = infer
        if not local:
            self.log_probs.append(msg["fn"].log_prob(msg["value"]))
        if infer.get("is_auxiliary"):
            self.auxiliary[msg["name"]] = fn
        else:
            self.sites[msg["name"]] = Captured(msg["value"], fn, frames, local)
        inside = {f.name for f in frames}
        self.outer.update(
            (f.dim, f.size) for f in msg["cond_indep_stack"] if f.vectorized and f.name not in inside
        )

    def draws(self, native_dims: Mapping[str, int]) -> Draws:
        """What was drawn, one row a particle.

        Args:
            native_dims: number of dims of one draw, by latent site.

        Returns:
            The draws, with their density.
        """
        fns = {name: site.fn for name, site in self.sites.items()}
        if not self.outer:  # one draw, as in most steps of most programs: the same with less ado
            own = torch.stack([log_prob.sum() for log_prob in self.log_probs]).sum(0, keepdim=True)
            rows = {name: site.value.unsqueeze(0) for name, site in self.sites.items()}
            return Draws(rows, own, self.indices, fns)
        count = math.prod(self.outer.values())
        values = {}
        for name, site in self.sites.items():
            lead = site.value.dim() - native_dims[name]
            native = site.value.shape[lead:]
            values[name] = site.value.reshape(-1, *native).expand(count, *native)
        own = torch.zeros((), device=self.log_probs[0].device).expand(count)
        for log_prob in self.log_probs:
            full = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.outer_shape))
            own = own + full.reshape(count, -1).sum(-1)
        return Draws(values, own, self.indices, fns)

    @property
    def local(self) -> frozenset[str]:
        """Names of the latent sites in subsampled plates."""
        return frozenset(name for name, site in self.sites.items() if site.local)

    @property
    def outer_shape(self) -> tuple[int, ...]:
        """The batch shape that a term of one number a particle has among the plates outside."""
        return tuple(self.outer.get(dim, 1) for dim in range(min(self.outer, default=0), 0))


class InPlates(Messenger):
    """Puts a site into plates that a guide has already left."""

    def __init__(self, frames: tuple[CondIndepStackFrame, ...]) -> None:
        super().__init__()
        self.frames = frames

    def _pyro_sample(self, msg: Any) -> None:
        msg["cond_indep_stack"] = self.frames + tuple(msg["cond_indep_stack"])
