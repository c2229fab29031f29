"""What is checked once about a guide before it is averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.transforms import identity_transform

from pyro_sym.errors import NoDensityError, SymmetryError
from pyro_sym.guides.capture import Captured, Draws
from pyro_sym.guides.density import Conditioned, GuideCall, agrees
from pyro_sym.guides.pyro_guides import prototype_sites, unwrapped
from pyro_sym.guides.site_normals import coordinatewise, inverse, site_normals
from pyro_sym.model.program import in_subsampled_plate
from pyro_sym.orbit.enumeration import LogProb
from pyro_sym.symmetry.base import Symmetry

__all__ = ["check_independence", "check_site_normals", "refuse_sites"]

# A value this far out, near the edge of its support, has lost digits of its unconstrained coordinate.
FAR = 10.0


def refuse_sites(symmetry: Symmetry, sites: Mapping[str, Captured]) -> None:
    """Refuse sites that can't be averaged: moved ones in subsampled plates, and those without gradients."""
    for name, site in sites.items():
        if site.local and name in symmetry.sites:
            plate = next(frame for frame in site.frames if in_subsampled_plate([frame]))
            whole = plate.full_size
            raise SymmetryError(
                f"{symmetry!r} moves site {name!r}, which lies in the subsampled plate {plate.name!r}, where "
                f"a minibatch shows {plate.size} of {whole} rows of what is moved. Draw {name!r} on all "
                f"rows, in pyro.plate({plate.name!r}, {whole}), and observe the data in a second plate, with "
                f"pyro.plate('minibatch', {whole}, subsample_size={plate.size}) as rows, by {name}[rows]; or "
                f"sum {name!r} out"
            )
        if not site.local and not site.fn.has_rsample:
            discrete = site.fn.support is not None and site.fn.support.is_discrete
            what = "discrete" if discrete else "not reparameterised"
            raise NoDensityError(
                f"site {name!r} of the guide is {what} ({type(site.fn).__name__}); sum it out in the model "
                "(config_enumerate), and make the guide from the model without it"
            )


def check_independence(
    guide: Callable[..., Any], call: GuideCall, values: dict[str, Tensor], moved: dict[str, Tensor], why: str
) -> None:
    """Refuse a guide in which the sites ``call.dims`` depend on the sites that a symmetry moves.

    The log density of sites in subsampled plates is an estimate, scaled up from a minibatch, and that of
    sites with a scale of their own is multiplied by that scale. Neither can enter an average of densities.
    They are left out of it, which is right if their density is a common factor of all terms.

    ``values`` are one draw, of shape ``(1, *native)`` a site; ``moved`` are its images, of shape ``(M, 1,
    *native)``; ``why`` tells in error messages what is special about the sites.
    """
    for part in guide if isinstance(guide, AutoGuideList) else [guide]:
        known = unwrapped(part)
        if isinstance(known, AutoGuide):
            own = call.dims.keys() & prototype_sites(known).keys()
            entangled = not site_normals(known, own).keys() >= own
        else:
            held = Conditioned(known, call)
            entangled = not torch.allclose(held(values), held(moved), rtol=1e-4, atol=1e-4)
        if entangled:
            raise NoDensityError(
                f"{known!r} ties the sites {sorted(call.dims)}, which {why}, to the sites that the symmetry "
                "moves; use AutoNormal, or a guide in which they are independent"
            )


@torch.no_grad()
def check_site_normals(
    guide: Callable[..., Any], sites: Collection[str], draws: Draws, density: LogProb
) -> None:
    r"""Compare a guide's registered normals with its own log density, at two or more of its own draws.

    Let :math:`n(\omega)` be the log density of the sites that have normals. If these are all ``sites``, it
    has to be the log density that the guide gave to the draw. Otherwise, when these sites are exchanged
    between draws, it has to change as the guide's log density does. Raises ``ValueError`` for the worst site
    otherwise.
    """
    normals = {name: normal for name, normal in site_normals(guide, sites).items() if name in sites}
    if not normals:
        return
    values, misfit = draws.values, {}
    told, near = torch.zeros_like(draws.own), torch.ones_like(draws.own, dtype=torch.bool)  # (P,)
    for name, (loc, scale, support) in normals.items():
        transform = biject_to(support)
        shape = tuple(transform.inverse_shape(values[name].shape[1:]))
        if not tuple(loc.shape) == tuple(scale.shape) == shape:
            raise ValueError(
                f"site_normals of {type(guide).__name__}: loc and scale of site {name!r} have shapes "
                f"{tuple(loc.shape)} and {tuple(scale.shape)}; its unconstrained value has shape {shape}"
            )
        points = inverse(transform, values[name])  # (P, *shape)
        if coordinatewise(transform) is not identity_transform:
            near &= (points.abs() <= FAR).reshape(len(near), -1).all(-1)
        misfit[name] = float(((points - loc) / scale).square().mean().sqrt())
        told = told + normals[name].log_prob(values[name])
    own = draws.own
    if not normals.keys() >= set(sites):
        exchanged = {**values, **{name: values[name].roll(1, 0) for name in normals}}
        told, own = told.roll(1, 0) - told, density(exchanged) - density(values)
        near &= near.roll(1, 0)
    off = (told - own)[near]
    if not agrees(draws.own[near] + off, draws.own[near]).all():
        worst = max(misfit, key=lambda name: abs(math.log(max(misfit[name], 1e-30))))
        raise ValueError(
            f"site_normals of {type(guide).__name__} are not what the guide draws from: at its own draws "
            f"their log density is off by up to {float(off.abs().max()):.3g} nats. Site {worst!r} fits "
            f"worst: its draws are {misfit[worst]:.3g} registered standard deviations from the registered "
            "mean (root mean square; 1 if right, unless coordinates are dependent). Register means and "
            "standard deviations of unconstrained values, biject_to(support).inv(value)"
        )
