"""The log density of a guide at any point, not only at its own draws.

The points are constrained values of the guide's sites with batch dims in front, ``(*batch, *native)``; the
density is with respect to those constrained values. Pyro's own autoguides are evaluated in closed form; any
other guide is run with its sites held at the points.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoDiscreteParallel,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoNormal,
    AutoStructured,
)
from pyro.infer.autoguide.gaussian import AutoGaussian, AutoGaussianDense
from pyro.infer.autoguide.guides import AutoCallable
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.transforms import StickBreakingTransform

from pyro_sym._private import called_guide, loc_and_scale
from pyro_sym.errors import NoDensityError
from pyro_sym.unwrap import base_of, transform_of_entries

__all__ = ["GuideCall", "agrees", "check_independence", "log_density"]

Values = dict[str, Tensor]

# What a density computed again may be off by, in nats: so much, and as much again for every so many nats.
ROUNDING, MANY = 0.1, 1e3


@dataclass(frozen=True)
class GuideCall:
    """One call of a guide.

    Attributes:
        dims: the sites whose density is wanted, with the number of dims of one draw of each.
        args: the guide's positional arguments.
        kwargs: the guide's keyword arguments.
        indices: the minibatch of every subsampled plate.
        given: other sites that are held at the points, with the number of dims of one draw of each; their
            density does not count.
    """

    dims: Mapping[str, int]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    indices: Mapping[str, Tensor]
    given: Mapping[str, int] = field(default_factory=dict)


@torch.no_grad()
def agrees(again: Tensor, own: Tensor) -> Tensor:
    """Where a log density computed from values is that which the guide gave to its draws, but for rounding.

    It is another where a value has lost what the guide drew it from, at the edge of its support, and where a
    flow's inverse is off. What it says of other points is of no use there.

    Args:
        again: the log density computed from the values.
        own: the log density that the guide gave to them.

    Returns:
        A tensor of booleans of their shape.
    """
    return (again - own).abs() <= ROUNDING * (1 + own.abs() / MANY)


@singledispatch
def log_density(guide: Callable[..., Any], call: GuideCall) -> Callable[[Values], Tensor]:
    r"""The function :math:`v \mapsto \log q(v)` of a guide with its current parameters.

    Args:
        guide: a Pyro guide that has been run at least once.
        call: its arguments and minibatch, and the sites whose density is wanted.

    Returns:
        A function of values of shape ``(*batch, *native)`` a site that returns a tensor of shape ``batch``,
        and through which gradients flow to the values and to the guide's parameters.

    Raises:
        NoDensityError: if the guide is a point mass, or draws auxiliary variables whose integral isn't known.
    """
    return _Conditioned(guide, call)


def _unconstrained(site: Any, value: Tensor, native_dim: int) -> tuple[Tensor, Tensor]:
    """Flat unconstrained coordinates of a site, and log |d value / d unconstrained|; batch dims in front."""
    transform = biject_to(site["fn"].support)
    unconstrained = _inverse(transform, value)
    batch = value.dim() - native_dim
    log_det = transform.log_abs_det_jacobian(unconstrained, value)
    return unconstrained.flatten(batch) if native_dim else unconstrained.unsqueeze(-1), _rightmost(
        log_det, batch
    )


def _inverse(transform: Any, value: Tensor) -> Tensor:
    """The inverse of a map to a support, exact too where the last sticks of a simplex are short.

    ``StickBreakingTransform`` has what is left of the stick as 1 less what was broken off, which leaves no
    digits of it. The sum of the entries that follow has them all.
    """
    transform = transform_of_entries(transform)
    if not isinstance(transform, StickBreakingTransform):
        return transform.inv(value)
    tiny = torch.finfo(value.dtype).tiny
    left = value.flip(-1).cumsum(-1).flip(-1)[..., 1:].clamp_min(tiny)
    first = value[..., :-1].clamp_min(tiny)
    slots = torch.arange(first.shape[-1], 0, -1, dtype=value.dtype, device=value.device)
    return first.log() - left.log() + slots.log()


def _rightmost(tensor: Tensor, batch: int) -> Tensor:
    """Sum all but the first ``batch`` dims."""
    return tensor.flatten(batch).sum(-1) if tensor.dim() > batch else tensor


def _concatenated(flats: list[Tensor]) -> Tensor:
    """Coordinates of all sites side by side; sites that no element moves are broadcast."""
    batch = torch.broadcast_shapes(*[flat.shape[:-1] for flat in flats])
    return torch.cat([flat.expand(*batch, -1) for flat in flats], -1)


@log_density.register
def _(guide: AutoContinuous, call: GuideCall) -> Callable[[Values], Tensor]:
    posterior = guide.get_posterior(*call.args, **call.kwargs)
    sites = [(name, site) for name, site in guide.prototype_trace.iter_stochastic_nodes()]

    def log_prob(values: Values) -> Tensor:
        pairs = [_unconstrained(site, values[name], call.dims[name]) for name, site in sites]
        latent = _concatenated([flat for flat, _ in pairs])
        return posterior.log_prob(latent) - sum(log_det for _, log_det in pairs)

    return log_prob


@log_density.register
def _(guide: AutoNormal, call: GuideCall) -> Callable[[Values], Tensor]:
    sites = [
        (name, site) for name, site in guide.prototype_trace.iter_stochastic_nodes() if name in call.dims
    ]
    normals = {}
    for name, _ in sites:
        loc, scale = loc_and_scale(guide, name)
        normals[name] = dist.Normal(loc.flatten(), scale.flatten(), validate_args=False)

    def log_prob(values: Values) -> Tensor:
        total: Any = 0.0
        for name, site in sites:
            flat, log_det = _unconstrained(site, values[name], call.dims[name])
            total = total + normals[name].log_prob(flat).sum(-1) - log_det
        return total

    return log_prob


@log_density.register
def _(guide: AutoStructured, call: GuideCall) -> Callable[[Values], Tensor]:
    for name, conditional in guide.conditionals.items():
        if conditional not in ("normal", "mvn"):
            raise NoDensityError(
                f"AutoStructured has no density at site {name!r}, whose conditional is {conditional!r}; use "
                "'normal' or 'mvn'"
            )
    sites = list(guide._sorted_sites)

    def log_prob(values: Values) -> Tensor:
        total: Any = 0.0
        perturbations = {}
        for name, site in sites:
            flat, log_det = _unconstrained(site, values[name], call.dims[name])
            perturbations[name] = flat - attrgetter(name)(guide.locs)
            deps = attrgetter(name)(guide.deps)
            residual = perturbations[name]
            for upstream in guide.dependencies.get(name, {}):
                residual = residual - attrgetter(upstream)(deps)(perturbations[upstream])
            scale = attrgetter(name)(guide.scales)
            noise = residual / scale
            log_scale = scale.log()
            if guide.conditionals[name] == "mvn":
                tril = attrgetter(name)(guide.scale_trils)
                noise = torch.linalg.solve_triangular(tril, noise.unsqueeze(-1), upper=False).squeeze(-1)
                log_scale = log_scale + tril.diagonal(dim1=-2, dim2=-1).log()
            standard = dist.Normal(torch.zeros_like(noise), 1.0, validate_args=False)
            total = total + standard.log_prob(noise).sum(-1) - log_scale.sum() - log_det
        return total

    return log_prob


@log_density.register
def _(guide: AutoGaussianDense, call: GuideCall) -> Callable[[Values], Tensor]:
    posterior = guide._dense_get_mvn()

    def log_prob(values: Values) -> Tensor:
        parts, total = [], 0.0
        for name in guide._dense_shapes:
            flat, log_det = _unconstrained(guide._factors[name], values[name], call.dims[name])
            scale = attrgetter(name)(guide.scales).flatten()
            parts.append((flat - attrgetter(name)(guide.locs).flatten()) / scale)
            total = total - log_det - scale.log().sum()
        return posterior.log_prob(_concatenated(parts)) + total

    return log_prob


@log_density.register
def _(guide: AutoGuideList, call: GuideCall) -> Callable[[Values], Tensor]:
    parts = []
    for part in guide:
        known = called_guide(part) if isinstance(part, AutoCallable) else part
        if isinstance(known, AutoGuide) and call.dims.keys().isdisjoint(known.prototype_trace.nodes):
            continue  # it has local sites only, or others whose density is not wanted
        parts.append(log_density(known, call))
    return lambda values: torch.stack(torch.broadcast_tensors(*[part(values) for part in parts])).sum(0)


@log_density.register(AutoDelta)
@log_density.register(AutoDiscreteParallel)
@log_density.register(AutoLaplaceApproximation)
@log_density.register(AutoGaussian)
def _(guide: AutoGuide, call: GuideCall) -> Callable[[Values], Tensor]:
    cure = "use AutoNormal or AutoMultivariateNormal"
    if isinstance(guide, AutoLaplaceApproximation):
        cure = "symmetrise guide.laplace_approximation(*args) instead"
    raise NoDensityError(f"{type(guide).__name__} has no density that can be averaged over a group; {cure}")


class _At(Messenger):
    """Holds sites at given values and adds their log densities up."""

    def __init__(self, values: Values, call: GuideCall) -> None:
        super().__init__()
        self.values, self.call = values, call
        self.log_prob: Any = 0.0

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            return
        subsample = site_is_subsample(msg)
        given = self.call.indices if subsample else self.values
        if msg["name"] in given:
            msg["value"] = given[msg["name"]]
            msg["done"] = True
        elif not subsample:
            raise NoDensityError(
                f"the guide draws an auxiliary variable {msg['name']!r}, and the density of its latent "
                "sites is an integral over it; use a guide whose latent sites have a density of their own, "
                "and put handlers such as poutine.scale around the symmetrised guide, not around an autoguide"
            )

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self.call.dims or msg["is_observed"]:
            return
        if isinstance(base_of(msg["fn"]), dist.Delta):
            raise NoDensityError(
                f"site {msg['name']!r} of the guide is a point mass and has no density; give it a "
                "distribution"
            )
        # Masked, but not scaled: the average has one scale, which does not belong into it.
        log_prob = scale_and_mask(msg["fn"].log_prob(msg["value"]), mask=msg["mask"])
        self.log_prob = self.log_prob + log_prob.sum()


class _Conditioned:
    """A guide run with its sites held at the points, all points at once by vmap where the guide allows it."""

    def __init__(self, guide: Callable[..., Any], call: GuideCall) -> None:
        self.guide, self.call = guide, call
        self.vectorised = True

    def __call__(self, values: Values) -> Tensor:
        dims = {**self.call.given, **self.call.dims}
        lead = {name: value.dim() - dims[name] for name, value in values.items() if name in dims}
        batch = torch.broadcast_shapes(*[values[name].shape[:n] for name, n in lead.items()])
        flat = {
            name: values[name].expand(*batch, *values[name].shape[n:]).flatten(0, len(batch) - 1)
            for name, n in lead.items()
        }
        if self.vectorised:
            try:
                with pyro.validation_enabled(False):
                    return torch.func.vmap(self._at)(flat).reshape(batch)
            except RuntimeError as error:
                self.vectorised = False
                warnings.warn(
                    f"the guide can't be vectorised over points ({error}); evaluating them one by one, "
                    "which is slower",
                    stacklevel=2,
                )
        rows = [self._at({name: value[i] for name, value in flat.items()}) for i in range(batch.numel())]
        return torch.stack(rows).reshape(batch)

    def _at(self, values: Values) -> Tensor:
        with poutine.block(), _At(values, self.call) as held:
            self.guide(*self.call.args, **self.call.kwargs)
        return torch.as_tensor(held.log_prob)


def check_independence(
    guide: Callable[..., Any], call: GuideCall, values: Values, moved: Values, why: str
) -> None:
    """Refuse a guide in which some sites depend on what a symmetry moves.

    The terms of sites in subsampled plates are estimates, scaled up from a minibatch, and those of sites with
    a scale of their own count by that scale. Neither can enter an average of densities. They stay outside of
    it, which is right as long as the average has them as a common factor.

    Args:
        guide: the guide.
        call: its arguments; ``dims`` has the sites that have to be independent, ``given`` the others.
        values: one draw, of shape ``(1, *native)`` a site.
        moved: its image.
        why: what is said of these sites in messages.

    Raises:
        NoDensityError: if one of them is not independent of the moved ones.
    """
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        if isinstance(part, AutoNormal):
            continue
        known = called_guide(part) if isinstance(part, AutoCallable) else part
        if isinstance(known, AutoGuide):
            dims = {name: dim for name, dim in call.dims.items() if name in known.prototype_trace}
            entangled = bool(dims)
        else:
            held = _Conditioned(known, call)
            entangled = not torch.allclose(held(values), held(moved), rtol=1e-4, atol=1e-4)
        if entangled:
            raise NoDensityError(
                f"{known!r} ties the sites {sorted(call.dims)}, which {why}, to the sites that the symmetry "
                "moves; use AutoNormal, or a guide in which they are independent"
            )
