"""Which sites of a guide are independent normals, for guides of Pyro's and of one's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import singledispatch
from operator import attrgetter
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoNormal
from pyro.infer.autoguide.guides import AutoCallable
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.transforms import StickBreakingTransform, Transform, identity_transform

from pyro_sym.guides.pyro_guides import unwrapped
from pyro_sym.unwrap import transform_of_entries, without_event_dims

__all__ = [
    "SiteNormal",
    "SiteNormals",
    "coordinate_transforms",
    "coordinatewise",
    "drawn_normals",
    "inverse",
    "site_normals",
    "unconstrained",
]


class SiteNormal(NamedTuple):
    r"""A site whose unconstrained coordinates are independent normals.

    .. math::

        \omega = T(z), \qquad z_c \sim \mathcal N(m_c, s_c^2) \text{ independently,}

    with :math:`T` = ``torch.distributions.biject_to(support)``.

    Attributes:
        loc: the means, of the shape of the site's unconstrained value without batch dims.
        scale: the standard deviations, of the same shape.
        support: the constraint that the site's values satisfy, such as ``constraints.positive``.
    """

    loc: Tensor
    scale: Tensor
    support: Any

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density, of shape ``batch``, of constrained values of shape ``(*batch, *native)``."""
        transform = biject_to(self.support)
        native_dim = self.loc.dim() - transform.domain.event_dim + transform.codomain.event_dim
        points, log_det = unconstrained(self.support, value, native_dim)  # (*batch, r), batch
        normal = dist.Normal(self.loc.flatten(), self.scale.flatten(), validate_args=False)
        return normal.log_prob(points).sum(-1) - log_det


SiteNormals = Mapping[str, SiteNormal]


@singledispatch
def site_normals(guide: Callable[..., Any], sites: Collection[str]) -> SiteNormals:
    """The sites of a guide that are independent normals, of one another and of all its other sites.

    Guides whose sites are such normals are averaged over relabellings of units by permanents, instead of by
    listing the elements. For a guide class of your own, register a function with ``@site_normals.register``;
    it is compared with the guide when :class:`~pyro_sym.AutoSymmetrized` first runs it.

    Args:
        guide: a guide that has been run at least once.
        sites: the sites that are asked for; a registered function may return others too.

    Returns:
        The normals by site, with the guide's current parameters, through which gradients flow. Sites that are
        not independent normals are left out; for guides that are not registered, all are.

    Example:
        >>> class MeanField:
        ...     def __init__(self):
        ...         self.loc, self.scale = torch.zeros(3), torch.ones(3)
        ...     def __call__(self):
        ...         pyro.sample("locs", dist.Normal(self.loc, self.scale).to_event(1))
        >>> @site_normals.register
        ... def _(guide: MeanField, sites):
        ...     return {"locs": SiteNormal(guide.loc, guide.scale, dist.constraints.real)}
        >>> list(site_normals(MeanField(), ["locs"]))
        ['locs']
    """
    return {}


@site_normals.register
def _(guide: AutoNormal, sites: Collection[str]) -> SiteNormals:
    nodes = guide.prototype_trace.nodes
    return {
        name: SiteNormal(
            attrgetter(name)(guide.locs), attrgetter(name)(guide.scales), nodes[name]["fn"].support
        )
        for name in sites
        if name in nodes
    }


@site_normals.register
def _(guide: AutoDiagonalNormal, sites: Collection[str]) -> SiteNormals:
    # All sites lie side by side in one vector, in the order of the prototype.
    loc, scale = guide.loc, guide.scale  # (latent_dim,)
    found, start = {}, 0
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        support = site["fn"].support
        shape = torch.Size(biject_to(support).inverse_shape(site["value"].shape))
        stop = start + shape.numel()
        if name in sites:
            found[name] = SiteNormal(
                loc[start:stop].reshape(shape), scale[start:stop].reshape(shape), support
            )
        start = stop
    return found


@site_normals.register
def _(guide: AutoGuideList, sites: Collection[str]) -> SiteNormals:
    return {name: normal for part in guide for name, normal in site_normals(part, sites).items()}


@site_normals.register
def _(guide: AutoCallable, sites: Collection[str]) -> SiteNormals:
    return site_normals(unwrapped(guide), sites)


@singledispatch
def drawn_normals(
    guide: Callable[..., Any], sites: Collection[str], auxiliary: Mapping[str, Any]
) -> Mapping[str, Sequence[Any]]:
    """Means and standard deviations of sites, in a call of the guide that has just drawn them.

    ``auxiliary`` has the distributions of the auxiliary sites in that call. For ``AutoNormal`` the result is
    taken from them: to read the parameters again would cost as much as the rest of a certified step.
    """
    return site_normals(guide, sites)


@drawn_normals.register
def _(guide: AutoNormal, sites: Collection[str], auxiliary: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    if not all(f"{name}_unconstrained" in auxiliary for name in sites):  # another version of Pyro
        return site_normals(guide, sites)
    found = {}
    for name in sites:
        fn = without_event_dims(auxiliary[f"{name}_unconstrained"])
        found[name] = (fn.loc, fn.scale)
    return found


def coordinate_transforms(
    guide: Callable[..., Any], sites: Collection[str], flipped: Collection[str] = ()
) -> dict[str, Transform]:
    """By site, the transform from the real line to one coordinate, where these are independent normals.

    Sites whose support mixes coordinates are left out, and those ``flipped`` by a group if they do not lie on
    the whole real line.
    """
    found = {}
    for name, normal in site_normals(guide, sites).items():
        transform = coordinatewise(biject_to(normal.support))
        movable = name not in flipped or transform is identity_transform
        if name in sites and transform is not None and movable:
            found[name] = transform
    return found


def coordinatewise(transform: Transform) -> Transform | None:
    """The transform of one coordinate, or ``None`` if the transform mixes coordinates."""
    transform = transform_of_entries(transform)
    return transform if transform.domain.event_dim == transform.codomain.event_dim == 0 else None


def unconstrained(support: Any, value: Tensor, native_dim: int) -> tuple[Tensor, Tensor]:
    r"""The unconstrained coordinates of a site, ``(*batch, r)``, and their log Jacobian, of shape ``batch``.

    ``value`` has shape ``(*batch, *native)``, where one draw has ``native_dim`` dims; the Jacobian is
    :math:`\log |d \omega / d z|`.
    """
    transform = biject_to(support)
    points = inverse(transform, value)
    batch = value.dim() - native_dim
    log_det = transform.log_abs_det_jacobian(points, value)
    points = points.flatten(batch) if native_dim else points.unsqueeze(-1)  # (*batch, r)
    return points, log_det.flatten(batch).sum(-1) if log_det.dim() > batch else log_det


def inverse(transform: Any, value: Tensor) -> Tensor:
    """The inverse of a map to a support, without cancellation on a simplex.

    ``StickBreakingTransform`` computes the rest of the stick as 1 minus what was broken off, which cancels
    where the rest is short. The sum of the entries that follow does not.
    """
    transform = transform_of_entries(transform)
    if not isinstance(transform, StickBreakingTransform):
        return transform.inv(value)
    tiny = torch.finfo(value.dtype).tiny
    left = value.flip(-1).cumsum(-1).flip(-1)[..., 1:].clamp_min(tiny)  # (*batch, k - 1)
    first = value[..., :-1].clamp_min(tiny)
    slots = torch.arange(first.shape[-1], 0, -1, dtype=value.dtype, device=value.device)
    return first.log() - left.log() + slots.log()
