"""Which way to the log orbit average suits which guide and group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import biject_to
from torch.distributions.transforms import Transform, identity_transform

from pyro_sym.errors import SymmetryError
from pyro_sym.infer.average import Enumeration, OneBlock, OrbitAverage, Uniform
from pyro_sym.infer.blocks import BlocksOfDensity, BlocksOfNormals, coordinates, flipped_sites
from pyro_sym.infer.units import coordinatewise, pair_log_probs
from pyro_sym.orbit.coupling import Coupling
from pyro_sym.orbit.permanent import MAX_SIZE
from pyro_sym.symmetry.base import Symmetry

__all__ = ["Estimator", "choose"]

Estimator = Literal["auto", "exact", "importance", "uniform"]
MAX_EXACT_AUTO = 1_000
MAX_EXACT = 200_000


def choose(
    estimator: Estimator,
    guide: Callable[..., Any],
    symmetry: Symmetry,
    values: Mapping[str, Tensor],
    supports: Mapping[str, Any],
) -> OrbitAverage:
    """The way to the log orbit average that an estimator's name stands for.

    Args:
        estimator: ``"auto"``, or what is asked for.
        guide: the base guide, which has been run.
        symmetry: the group.
        values: one draw by site.
        supports: by site.

    Returns:
        The average. ``"auto"`` is exact where that takes permanents of up to 14 units or up to 1,000
        elements, importance otherwise, and uniform for groups not made of permutations and sign flips.

    Raises:
        SymmetryError: if the estimator asked for can't serve this guide and group.
    """
    if estimator == "uniform":
        return Uniform(guide, symmetry, "uniform")
    log_order = symmetry.log_order(values)
    coupling = Coupling.of(symmetry)
    normals = _normal_coordinates(guide, symmetry)
    one_block = pair_log_probs(guide, symmetry) is not None
    if estimator in ("auto", "exact"):
        if coupling and normals and len(coupling.uncoupled(values, MAX_SIZE)) == len(coupling.blocks):
            if one_block:
                return OneBlock(guide, symmetry, "exact")
            return BlocksOfNormals(guide, symmetry, "exact", coupling, normals, MAX_SIZE)
        if log_order <= math.log(MAX_EXACT_AUTO if estimator == "auto" else MAX_EXACT) + 1e-9:
            return Enumeration(guide, symmetry, "exact")
        if estimator == "exact":
            raise SymmetryError(
                f"estimator='exact' would enumerate the exp({log_order:.1f}) elements of {symmetry}, "
                f"more than {MAX_EXACT:,}; use estimator='importance' or 'uniform'"
            )
    if coupling is None:
        if estimator == "auto":
            return Uniform(guide, symmetry, "uniform")
        raise SymmetryError(
            f"estimator='importance' draws permutations and sign flips, and {symmetry} is not made of them; "
            "use estimator='uniform'"
        )
    if one_block:
        return OneBlock(guide, symmetry, "importance")
    if normals:
        return BlocksOfNormals(guide, symmetry, "importance", coupling, normals)
    flipped = flipped_sites(symmetry)
    transforms = {site: coordinates(supports[site], site in flipped) for site in symmetry.sites}
    return BlocksOfDensity(guide, symmetry, "importance", coupling, transforms)


def _normal_coordinates(guide: Callable[..., Any], symmetry: Symmetry) -> dict[str, Transform] | None:
    """The transforms under which the moved sites are independent normals that the group moves, if any."""
    if not isinstance(guide, AutoNormal):
        return None
    flipped = flipped_sites(symmetry)
    transforms: dict[str, Transform] = {}
    for name in symmetry.sites:
        site: Any = guide.prototype_trace.nodes[name]
        transform = coordinatewise(biject_to(site["fn"].support))
        if transform is None or (name in flipped and transform is not identity_transform):
            return None
        transforms[name] = transform
    return transforms
