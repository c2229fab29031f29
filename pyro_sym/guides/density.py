"""The log density of a guide at any point, not only at its own draws.

The points are constrained values of the guide's sites with batch dims in front, ``(*batch, *native)``; the
density is with respect to constrained values. Pyro's autoguides are evaluated in closed form; any other guide
is run with its sites held at the points. For a guide class of your own, ``@log_density.register`` a function.
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
    AutoDiagonalNormal,
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

from pyro_sym._private import parts_of
from pyro_sym.errors import NoDensityError
from pyro_sym.guides.pyro_guides import prototype_sites, unwrapped
from pyro_sym.guides.site_normals import site_normals, unconstrained
from pyro_sym.unwrap import base_of

__all__ = ["Conditioned", "GuideCall", "agrees", "log_density"]

Values = dict[str, Tensor]

# A log density that is computed twice may differ by ROUNDING nats, and by as much again for every MANY nats.
ROUNDING, MANY = 0.1, 1e3


@dataclass(frozen=True)
class GuideCall:
    """One call of a guide: its arguments and the minibatch (``indices``) of every subsampled plate.

    ``dims`` has the sites whose density is asked for, with the number of dims of one draw of each; ``given``
    has other sites that are held at the points, and whose density is left out.
    """

    dims: Mapping[str, int]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    indices: Mapping[str, Tensor]
    given: Mapping[str, int] = field(default_factory=dict)


@torch.no_grad()
def agrees(again: Tensor, own: Tensor) -> Tensor:
    """Where a log density computed again from values equals, up to rounding, the one the guide gave to them.

    They differ where a value at the edge of its support has lost the digits that the guide drew, and where a
    flow can't be inverted exactly. Densities computed at images of such a draw are wrong too.
    """
    return (again - own).abs() <= ROUNDING * (1 + own.abs() / MANY)


@singledispatch
def log_density(guide: Callable[..., Any], call: GuideCall) -> Callable[[Values], Tensor]:
    r"""The function :math:`v \mapsto \log q(v)` of a guide with its current parameters.

    The guide has been run at least once. The function takes values of shape ``(*batch, *native)`` a site and
    returns shape ``batch``; gradients flow to the values and to the guide's parameters. Raises
    ``NoDensityError`` if the guide is a point mass, or draws auxiliary variables that would have to be
    integrated out.
    """
    return Conditioned(guide, call)


def _concatenated(flats: list[Tensor]) -> Tensor:
    """Coordinates of all sites side by side, their batch dims broadcast; of shape ``(*batch, r)``."""
    batch = torch.broadcast_shapes(*[flat.shape[:-1] for flat in flats])
    return torch.cat([flat.expand(*batch, -1) for flat in flats], -1)


@log_density.register
def _(guide: AutoGuide, call: GuideCall) -> Callable[[Values], Tensor]:
    covered = site_normals(guide, call.dims).keys() >= call.dims.keys()
    return _of_normals(guide, call) if covered else Conditioned(guide, call)


@log_density.register(AutoNormal)
@log_density.register(AutoDiagonalNormal)
def _of_normals(guide: AutoGuide, call: GuideCall) -> Callable[[Values], Tensor]:
    normals = site_normals(guide, call.dims)
    return lambda values: sum(
        (normals[name].log_prob(values[name]) for name in call.dims if name in normals), torch.zeros(())
    )


@log_density.register
def _(guide: AutoContinuous, call: GuideCall) -> Callable[[Values], Tensor]:
    posterior = guide.get_posterior(*call.args, **call.kwargs)
    sites = [(name, site) for name, site in guide.prototype_trace.iter_stochastic_nodes()]

    def log_prob(values: Values) -> Tensor:
        pairs = [unconstrained(site["fn"].support, values[name], call.dims[name]) for name, site in sites]
        latent = _concatenated([flat for flat, _ in pairs])  # (*batch, latent_dim)
        return posterior.log_prob(latent) - sum(log_det for _, log_det in pairs)

    return log_prob


@log_density.register
def _(guide: AutoStructured, call: GuideCall) -> Callable[[Values], Tensor]:
    for name, conditional in guide.conditionals.items():
        if conditional not in ("normal", "mvn"):
            raise NoDensityError(
                f"AutoStructured has no density at site {name!r}, whose conditional is {conditional!r}; use "
                "'normal' or 'mvn'"
            )
    (sites,) = parts_of(guide, "_sorted_sites")

    def log_prob(values: Values) -> Tensor:
        total: Any = 0.0
        perturbations = {}
        for name, site in sites:
            flat, log_det = unconstrained(site["fn"].support, values[name], call.dims[name])
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
    get_mvn, shapes, factors = parts_of(guide, "_dense_get_mvn", "_dense_shapes", "_factors")
    posterior = get_mvn()

    def log_prob(values: Values) -> Tensor:
        parts, total = [], 0.0
        for name in shapes:
            flat, log_det = unconstrained(factors[name]["fn"].support, values[name], call.dims[name])
            scale = attrgetter(name)(guide.scales).flatten()
            parts.append((flat - attrgetter(name)(guide.locs).flatten()) / scale)
            total = total - log_det - scale.log().sum()
        return posterior.log_prob(_concatenated(parts)) + total

    return log_prob


@log_density.register
def _(guide: AutoCallable, call: GuideCall) -> Callable[[Values], Tensor]:
    return log_density(unwrapped(guide), call)


@log_density.register
def _(guide: AutoGuideList, call: GuideCall) -> Callable[[Values], Tensor]:
    parts = []
    for part in guide:
        sites = prototype_sites(unwrapped(part))
        if not sites or not call.dims.keys().isdisjoint(sites):
            parts.append(log_density(part, call))  # the others have no site whose density is asked for
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
    """Holds sites at given values and sums their log densities."""

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
                f"the guide draws an auxiliary variable {msg['name']!r}, over which its density has to be "
                "integrated; use a guide without one, and put handlers such as poutine.scale around the "
                "symmetrised guide, not around an autoguide"
            )

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self.call.dims or msg["is_observed"]:
            return
        if isinstance(base_of(msg["fn"]), dist.Delta):
            raise NoDensityError(
                f"site {msg['name']!r} of the guide is a point mass and has no density; give it a "
                "distribution"
            )
        # Masked, but not scaled: the scale multiplies the log of the average.
        log_prob = scale_and_mask(msg["fn"].log_prob(msg["value"]), mask=msg["mask"])
        self.log_prob = self.log_prob + log_prob.sum()


class Conditioned:
    """A guide run with its sites held at the points, all at once by vmap if the guide allows it."""

    def __init__(self, guide: Callable[..., Any], call: GuideCall) -> None:
        self.guide, self.call = guide, call
        self.vectorised = True

    def __call__(self, values: Values) -> Tensor:
        """The log density at values of shape ``(*batch, *native)``, of shape ``batch``."""
        dims = {**self.call.given, **self.call.dims}
        lead = {name: value.dim() - dims[name] for name, value in values.items() if name in dims}
        batch = torch.broadcast_shapes(*[values[name].shape[:n] for name, n in lead.items()])
        flat = {  # (batch.numel(), *native) a site
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
                    f"the guide can't be vectorised over points ({error}), so they are evaluated one by one, "
                    "which is slower",
                    stacklevel=2,
                )
        rows = [self._at({name: value[i] for name, value in flat.items()}) for i in range(batch.numel())]
        return torch.stack(rows).reshape(batch)

    def _at(self, values: Values) -> Tensor:
        with poutine.block(), _At(values, self.call) as held:
            self.guide(*self.call.args, **self.call.kwargs)
        return torch.as_tensor(held.log_prob)
