"""Scales and masks that a guide puts on its own sites, and which of them can be averaged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym._private import mask_of_distribution
from pyro_sym.errors import NoDensityError
from pyro_sym.guides.capture import Captured, is_one
from pyro_sym.symmetry.base import Symmetry, unmoved
from pyro_sym.unwrap import layers

__all__ = ["common_scale", "masks", "refuse_uneven_masks", "sites_apart"]


def common_scale(sites: Mapping[str, Captured], moved: Collection[str]) -> Any:
    r"""The scale :math:`s` of the moved sites, a number or a tensor of one; several scales are refused.

    Their term :math:`s \log q(\omega)` becomes :math:`s \log q^G(\omega)`, if they have one scale.
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
        f"the guide scales the sites that the symmetry moves differently ({shown}), so their average has no "
        "scale; put one poutine.scale around all of them"
    )


def sites_apart(sites: Mapping[str, Captured], scale: Any) -> frozenset[str]:
    """Names of the sites outside of subsampled plates whose scale is not that of the average."""

    def same(other: Any) -> bool:
        if is_one(scale) and is_one(other):
            return True
        return bool((torch.as_tensor(other) == torch.as_tensor(scale)).all())

    return frozenset(name for name, site in sites.items() if not (site.local or same(site.scale)))


def masks(sites: Mapping[str, Captured], moved: Collection[str]) -> dict[str, Tensor]:
    """The masks of moved sites that have one, boolean tensors of the shapes of their values."""
    found = {name: _mask(sites[name]) for name in moved}
    return {name: mask for name, mask in found.items() if mask is not None}


def refuse_uneven_masks(
    symmetry: Symmetry, found: Mapping[str, Tensor], sites: Mapping[str, Captured]
) -> None:
    r"""Refuse masks, from :func:`masks`, of which some element moves a masked entry to an unmasked one.

    Masked entries are left out of the density. If the group maps masked entries to masked ones, the density
    of the others can be averaged; if not, the images of a draw would be compared by different entries.
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
    """The mask of a site, of the shape of its value; None without a mask tensor."""
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
