"""Which way to the log orbit average suits which guide and group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.guides.average import Enumeration, OneBlock, OrbitAverage, PartlyOneBlock, Trivial, Uniform
from pyro_sym.guides.average_by_blocks import BlocksOfDensity, BlocksOfNormals, coordinates, flipped_sites
from pyro_sym.guides.site_normals import coordinate_transforms, site_normals
from pyro_sym.guides.unit_pairs import LogRatios, pair_normals, separable_sites, signed_axes
from pyro_sym.orbit.coupling import Coupling
from pyro_sym.orbit.permanent import MAX_SIZE
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation
from pyro_sym.symmetry.flat import flatten

__all__ = ["Estimator", "EstimatorName", "choose"]

EstimatorName = Literal["auto", "exact", "importance", "uniform"]
Estimator = EstimatorName | type[OrbitAverage]
"""A name, or a class that averages in a way of the user's own."""
MAX_EXACT_AUTO = 1_000
MAX_EXACT = 200_000


def choose(
    estimator: Estimator,
    guide: Callable[..., Any],
    symmetry: Symmetry,
    values: Mapping[str, Tensor],
    supports: Mapping[str, Any],
    units: LogRatios | None,
) -> OrbitAverage:
    """The way to the log orbit average that an estimator's name or class stands for.

    ``values`` is one draw by site; ``units`` pairs slots and units, where the guide's density factorises over
    them. The rules of ``"auto"`` are in the docstring of :class:`~pyro_sym.AutoSymmetrized`. A group with one
    element needs no average, whatever the estimator. Raises ``SymmetryError`` if the estimator can't serve
    this guide and group.
    """
    log_order = symmetry.log_order(values)
    if log_order == 0:
        return Trivial(guide, symmetry, "exact")
    if isinstance(estimator, type):
        return estimator(guide, symmetry, estimator.__name__)
    if estimator == "uniform":
        return Uniform(guide, symmetry, "uniform")
    group, coupling = flatten(symmetry), Coupling.of(symmetry)
    normals = coordinate_transforms(guide, group.sites, flipped_sites(group)) if group else {}
    all_normal = group is not None and len(normals) == len(group.sites)
    if estimator in ("auto", "exact"):
        if group and coupling:
            summed = coupling.uncoupled(group.view(values), MAX_SIZE)
            summable = len(summed) == len(coupling.blocks)
            if units and summable:
                return OneBlock(guide, symmetry, "exact", units)
            if all_normal and summable:
                return BlocksOfNormals(guide, symmetry, "exact", group, coupling, normals, MAX_SIZE)
        if log_order <= math.log(MAX_EXACT_AUTO if estimator == "auto" else MAX_EXACT) + 1e-9:
            return Enumeration(guide, symmetry, "exact")
        if estimator == "exact":
            raise SymmetryError(
                f"estimator='exact' would enumerate the exp({log_order:.1f}) elements of {symmetry!r}, "
                f"more than {MAX_EXACT:,}; use estimator='importance' or 'uniform'"
            )
    if group is None or coupling is None:
        if estimator == "auto":
            return Uniform(guide, symmetry, "uniform")
        raise SymmetryError(
            f"estimator='importance' draws permutations and sign flips, and {symmetry!r} is not made of "
            "them; use estimator='uniform'"
        )
    if units:
        return OneBlock(guide, symmetry, "importance", units)
    if all_normal:
        return BlocksOfNormals(guide, symmetry, "importance", group, coupling, normals)
    partly = _partly_one_block(guide, symmetry)
    if partly:
        return partly
    flipped = flipped_sites(group)
    transforms = {site: coordinates(supports[site], site in flipped) for site in symmetry.sites}
    return BlocksOfDensity(guide, symmetry, "importance", group, coupling, transforms)


def _partly_one_block(guide: Callable[..., Any], symmetry: Symmetry) -> PartlyOneBlock | None:
    """For one permutation of sites that are independent normals, some of them coordinate by coordinate."""
    moved, separable = signed_axes(symmetry), separable_sites(guide, symmetry)
    if moved is None or separable is None or moved.signed:
        return None
    units = pair_normals(guide, moved.view.on(Permutation({**separable.axes})))
    rest = {site: axis for site, axis in moved.axes.items() if site not in separable.axes}
    if not (units and rest) or not site_normals(guide, rest).keys() >= rest.keys():
        return None
    return PartlyOneBlock(guide, symmetry, "importance", units, moved.view.on(Permutation({**rest})))
