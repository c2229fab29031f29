"""Scales and masks that a guide puts on its own sites, and what an orbit average can make of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_sym._private import mask_of_distribution
from pyro_sym.errors import NoDensityError
from pyro_sym.symmetry.base import Symmetry, unmoved
from pyro_sym.unwrap import layers

if TYPE_CHECKING:
    from pyro_sym.guides.capture import Captured

__all__ = ["common_scale", "is_one", "masks", "refuse_uneven_masks", "sites_apart"]


def is_one(scale: Any) -> bool:
    """Whether a scale is the number one, as that of a site without ``poutine.scale`` is."""
    return not isinstance(scale, Tensor) and scale == 1


def common_scale(sites: Mapping[str, Captured], moved: Collection[str]) -> Any:
    r"""The scale :math:`s` of the sites that a group moves, a number or a tensor of one number.

    A scale makes :math:`s \log q(\omega)` of a guide's term. Averaged over the group it becomes :math:`s \log
    q^G(\omega)`, if the moved sites have one scale; several are refused.
    """
    scales = {name: sites[name].scale for name in moved}
    if all(map(is_one, scales.values())):
        return 1.0
    flat = {name: torch.as_tensor(scale).detach().flatten() for name, scale in scales.items()}
    first = next(iter(flat.values()))[0]
    if all(bool((scale == first).all()) for scale in flat.values()):
        found = next(iter(scales.values()))
        return found.flatten()[0] if isinstance(found, Tensor) else found
    shown = ", ".join(f"{name!r} has {_shown(scale)}" for name, scale in flat.items())
    raise NoDensityError(
        f"the guide scales the sites that the symmetry moves differently ({shown}); put one poutine.scale "
        "around all of them"
    )


def sites_apart(sites: Mapping[str, Captured], scale: Any) -> frozenset[str]:
    """Names of the sites outside of subsampled plates whose scale is not that of the average."""

    def same(other: Any) -> bool:
        if is_one(scale) and is_one(other):
            return True
        return bool((torch.as_tensor(other) == torch.as_tensor(scale)).all())

    return frozenset(name for name, site in sites.items() if not (site.local or same(site.scale)))


def masks(sites: Mapping[str, Captured], moved: Collection[str]) -> dict[str, Tensor]:
    """The boolean masks, of the shapes of the values, of moved sites some of whose entries are masked."""
    found = {name: _mask(sites[name]) for name in moved}
    return {name: mask for name, mask in found.items() if mask is not None}


def refuse_uneven_masks(
    symmetry: Symmetry, found: Mapping[str, Tensor], sites: Mapping[str, Captured]
) -> None:
    """Refuse masks that some element of a group changes.

    If the group takes masked entries to masked entries, the density of the other entries can be averaged;
    otherwise the images of a draw would be evaluated on other entries than the draw. ``found`` is from
    :func:`masks`.
    """
    if not found:
        return
    shown = {
        name: found[name].to(sites[name].value) if name in found else torch.ones_like(sites[name].value)
        for name in symmetry.sites
    }
    for what, element in symmetry.generators(shown):
        images = {name: image.abs() for name, image in symmetry.act(element, shown).items()}
        for name in found:
            if not unmoved([name], images, shown).all():
                raise NoDensityError(
                    f"the guide masks some entries of site {name!r} and not others, and {what} exchanges "
                    "them; mask all that the symmetry exchanges, or none of it, or leave this group out"
                )


def _mask(site: Captured) -> Tensor | None:
    """The mask of a site, of the shape of its value; None without one that tells entries apart."""
    found: Tensor | None = None
    for layer in layers(site.fn):
        mask = mask_of_distribution(layer)
        if isinstance(mask, Tensor):
            mask = mask.reshape(*mask.shape, *(1,) * len(layer.event_shape)).expand(site.value.shape)
            found = mask if found is None else found & mask
    return found


def _shown(scale: Tensor) -> str:
    several = sorted({float(f"{number:.4g}") for number in scale.tolist()})
    return f"{several[0]:g}" if len(several) == 1 else f"{several[0]:g} to {several[-1]:g}"
