"""Record what a guide draws and its log density, and hide its sites from handlers outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_sym.errors import NoDensityError
from pyro_sym.model.program import in_subsampled_plate, is_deterministic

__all__ = ["Capture", "Captured", "Draws", "InPlates", "is_one"]


def is_one(scale: Any) -> bool:
    """Whether a scale is the number one, as that of a site without ``poutine.scale`` is."""
    return not isinstance(scale, Tensor) and scale == 1


@dataclass(frozen=True)
class Captured:
    """A latent site of a guide's call, with the guide's own plates (``frames``) and scale."""

    value: Tensor  # dims of plates outside of the guide (particles) come first
    fn: Any  # the guide's distribution, with its own mask, before plates outside expand it
    frames: tuple[CondIndepStackFrame, ...]
    local: bool  # in a subsampled plate; such sites are not hidden
    scale: Any = 1.0  # a number or a tensor


@dataclass(frozen=True)
class Draws:
    """``P`` draws of a guide."""

    values: dict[str, Tensor]  # by latent site, of shape (P, *native)
    own: Tensor  # (P,), the log density of the hidden sites in nats, without masked entries
    indices: dict[str, Tensor]  # the minibatch of every plate of the guide
    fns: dict[str, Any] = field(default_factory=dict)  # distributions by site, with the guide's masks
    scaled: Tensor | None = None  # as own, with every term times the guide's own scale

    def at(self, rows: Tensor | slice) -> Draws:
        """Some of the draws."""
        values = {name: value[rows] for name, value in self.values.items()}
        return replace(self, values=values, own=self.own[rows], scaled=None)

    @staticmethod
    def joined(several: Sequence[Draws]) -> Draws:
        """The draws of several calls; minibatch and distributions are those of the last call."""
        values = {name: torch.cat([draws.values[name] for draws in several]) for name in several[-1].values}
        own = torch.cat([draws.own for draws in several])
        return replace(several[-1], values=values, own=own, scaled=None)


class _Term(NamedTuple):
    """A hidden site's distribution and value, and the guide's own scale and mask."""

    fn: Any
    value: Tensor
    scale: Any
    mask: Any


class _Stated(NamedTuple):
    """A site after the guide's own handlers and before those outside."""

    frames: tuple[CondIndepStackFrame, ...]
    hidden: bool
    fn: Any
    infer: dict[str, Any]
    scale: Any
    mask: Any


class Capture(Messenger):
    """Records a guide's sample sites; ``hide`` hides those outside of subsampled plates from outer traces.

    ``poutine.block`` would hide them from the plates outside as well, and so from vectorised particles.
    """

    def __init__(self, guide: Callable[..., Any], hide: bool = True) -> None:
        super().__init__()
        # An effect-based autoguide runs the model, whose observed sites don't belong into the guide's trace.
        self.runs_model = isinstance(guide, GuideMessenger)
        self.hide = hide
        self.sites: dict[str, Captured] = {}
        self.auxiliary: dict[str, Any] = {}  # site -> its distribution, as the guide stated it
        self.terms: list[_Term] = []
        self.indices: dict[str, Tensor] = {}
        self.outer: dict[int, int] = {}  # dim of a plate outside of the guide -> its size
        self.outer_weights: dict[tuple[int, ...], str] = {}  # shapes of scales and masks outside -> a site

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            return
        if msg["is_observed"]:
            if self.hide and not self.runs_model and not is_deterministic(msg):
                raise NoDensityError(
                    f"the guide has a factor or an observation {msg['name']!r}, so its draws do not have "
                    "the density of its sites; remove it"
                )
            msg["stop"] = self.runs_model or (self.hide and is_deterministic(msg))
            return
        frames = tuple(msg["cond_indep_stack"])
        hidden = self.hide and not in_subsampled_plate(frames)
        # Handlers inside of the guide have run, those outside have not.
        msg["_captured"] = _Stated(frames, hidden, msg["fn"], msg["infer"], msg["scale"], msg["mask"])
        if hidden:
            msg["infer"] = {**msg["infer"], "is_auxiliary": True, "_do_not_trace": True}
            msg["scale"], msg["mask"] = 1.0, None  # from here on those of handlers outside

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self.indices[msg["name"]] = msg["value"]
            return
        if "_captured" not in msg:
            return
        stated: _Stated = msg.pop("_captured")
        infer, scale, mask = stated.infer, stated.scale, stated.mask
        local = in_subsampled_plate(stated.frames)
        # A trace inside of the guide, as effect-based autoguides keep one, must see the site.
        msg["infer"] = infer
        if stated.hidden:
            for weight in (msg["scale"], msg["mask"]):
                if isinstance(weight, Tensor) and weight.numel() > 1:
                    self.outer_weights[tuple(weight.shape)] = msg["name"]
            msg["scale"], msg["mask"] = scale, mask
        if not local:
            self.terms.append(_Term(msg["fn"], msg["value"], scale, mask))
        if infer.get("is_auxiliary"):
            self.auxiliary[msg["name"]] = stated.fn
        else:
            fn = stated.fn if mask is None else stated.fn.mask(mask)
            value = msg["value"]
            if infer.get("_enumerate_dim") is not None:
                value = _first_value(value, infer["_enumerate_dim"], fn)
            self.sites[msg["name"]] = Captured(value, fn, stated.frames, local, scale)
        inside = {f.name for f in stated.frames}
        self.outer.update(
            (f.dim, f.size) for f in msg["cond_indep_stack"] if f.vectorized and f.name not in inside
        )

    def draws(self, native_dims: Mapping[str, int]) -> Draws:
        """The draws and their log density, one row a particle.

        ``native_dims`` has the number of dims of one draw, by latent site. Raises a
        :class:`~pyro_sym.NoDensityError` if a hidden site depends on a site of the guide that is summed out.
        """
        fns = {name: site.fn for name, site in self.sites.items()}
        for name, site in self.sites.items():
            if not self.outer and site.value.dim() != native_dims[name]:
                raise NoDensityError(
                    f"site {name!r} of the guide has shape {tuple(site.value.shape)} here and had "
                    f"{native_dims[name]} dims at first; if it depends on an enumerated site, enumerate that "
                    "in the model"
                )
        log_probs = [scale_and_mask(term.fn.log_prob(term.value), mask=term.mask) for term in self.terms]
        own = self._by_particle(log_probs)
        scaled = own
        if not all(is_one(term.scale) for term in self.terms):
            scaled = self._by_particle(
                [log_prob * term.scale for log_prob, term in zip(log_probs, self.terms, strict=True)]
            )
        if not self.outer:
            rows = {name: site.value.unsqueeze(0) for name, site in self.sites.items()}
            return Draws(rows, own, self.indices, fns, scaled)
        count = math.prod(self.outer.values())
        values = {}
        for name, site in self.sites.items():
            lead = site.value.dim() - native_dims[name]
            native = site.value.shape[lead:]
            values[name] = site.value.reshape(-1, *native).expand(count, *native)
        return Draws(values, own, self.indices, fns, scaled)

    def _by_particle(self, log_probs: list[Tensor]) -> Tensor:
        """Sum terms of any shapes for each particle; of shape ``(P,)``."""
        count = math.prod(self.outer.values())
        if not log_probs:
            return torch.zeros(count)
        if not self.outer:  # one draw, the usual case, in fewer operations
            return torch.stack([log_prob.sum() for log_prob in log_probs]).sum(0, keepdim=True)
        own = torch.zeros((), device=log_probs[0].device).expand(count)
        for log_prob in log_probs:
            full = log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.outer_shape))
            own = own + full.reshape(count, -1).sum(-1)
        return own

    def refuse_uneven_weights_outside(self) -> None:
        """Refuse scales and masks around the guide that differ between entries of its sites."""
        for shape, name in self.outer_weights.items():
            sizes = dict(zip(range(-len(shape), 0), shape, strict=True))
            if any(size > 1 and dim not in self.outer for dim, size in sizes.items()):
                raise NoDensityError(
                    f"a scale or mask of shape {shape} around the symmetrised guide differs between entries "
                    f"of its sites (here {name!r}), but their average is one number; put the handler into "
                    "the base guide, or use one number"
                )

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


def _first_value(value: Tensor, dim: int, fn: Any) -> Tensor:
    """One of the values of an enumerated site, of the shape of a draw."""
    first = value.select(dim - fn.event_dim, 0)
    first = first.expand(torch.broadcast_shapes(first.shape, fn.shape()))
    while first.dim() > len(fn.shape()):
        first = first[0]
    return first
