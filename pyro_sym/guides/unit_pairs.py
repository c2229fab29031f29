"""The matrix that pairs slots with units, for guides whose units are independent normals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_sym.guides.capture import Draws
from pyro_sym.guides.site_normals import coordinate_transforms, site_normals
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.flat import FlatGroup, flatten

__all__ = [
    "LogRatios",
    "UnitAxes",
    "log_ratios",
    "pair_normals",
    "separable_sites",
    "signed_axes",
    "viewed_normals",
]

LogRatios = Callable[[Draws], Tensor]

# Above this many differences, squares are expanded into matrix products in double precision, which is faster.
MAX_DIFFERENCES = 2**16


@dataclass(frozen=True)
class UnitAxes:
    """The axes along which the units of one permutation lie.

    There is one axis a site, in the shape in which ``view`` shows the site; ``signed`` says whether the group
    also flips the sign of each unit.
    """

    axes: Mapping[str, int]
    signed: bool
    view: FlatGroup


@dataclass(frozen=True)
class _PairNormals:
    """The function that :func:`pair_normals` returns."""

    guide: Callable[..., Any]
    units: UnitAxes
    transforms: Mapping[str, Transform]

    def __call__(self, draws: Draws) -> Tensor:
        units, normals = self.units, site_normals(self.guide, self.transforms)
        values = units.view.view({name: draws.values[name] for name in units.axes})
        total: Any = 0.0
        flipped: Any = 0.0
        for name, (loc, scale) in viewed_normals(units.view, normals, units.axes).items():
            axis, value = units.axes[name], values[name]
            loc, scale = _rows(loc, axis), _rows(scale, axis)  # (n, r)
            points = _rows(self.transforms[name].inv(value), axis, batch=1)  # (P, n, r)
            # The Jacobian of a unit is the same in every slot and cancels from the ratios.
            total = total + _normal_pairs(loc, scale, points)  # (P, n, n)
            if units.signed:
                flipped = flipped + _normal_pairs(loc, scale, -points)
        return log_ratios(total, flipped if units.signed else None).to(value.dtype)


def pair_normals(guide: Callable[..., Any], symmetry: Symmetry) -> LogRatios | None:
    r"""The function of draws that pairs every slot of a mean-field guide with every unit of a draw.

    For a guide whose density is a product over units, :math:`q(\omega) = r(\omega)\prod_i q_i(\omega_i)`,
    where :math:`r` does not depend on what the group moves,

    .. math::

        L_{ij} = \log q_i(\omega_j) - \log q_j(\omega_j), \qquad
        \log q^G(\omega) = \log q(\omega) + \log \operatorname{perm}(e^L) - \log n!,

    and if the group also flips the sign of each unit, :math:`e^{L_{ij}} = \tfrac12 (q_i(\omega_j) +
    q_i(-\omega_j)) / q_j(\omega_j)`.

    The function returns :math:`L`, of shape ``(P, n, n)``; gradients flow to values and parameters. ``None``
    if the density does not factorise this way: it does if the group has :func:`signed_axes` and every moved
    site is normal coordinate by coordinate (:func:`~pyro_sym.guides.site_normals.site_normals`; a simplex is
    not).
    """
    units = signed_axes(symmetry)
    if units is None:
        return None
    transforms = coordinate_transforms(guide, units.axes, units.axes if units.signed else ())
    return _PairNormals(guide, units, transforms) if len(transforms) == len(units.axes) else None


def log_ratios(pairs: Tensor, flipped: Tensor | None) -> Tensor:
    r""":math:`L` from :math:`\log q_i(\omega_j)` and, with signs, :math:`\log q_i(-\omega_j)`."""
    own = pairs.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    if flipped is None:
        return pairs - own
    return torch.logaddexp(pairs - own, flipped - own) - math.log(2.0)


def separable_sites(guide: Callable[..., Any], symmetry: Symmetry) -> UnitAxes | None:
    """The axes of the moved sites whose units are independent normals, even if other moved sites are not.

    ``None`` if there is no such site, or the group is not one permutation with or without signs.
    """
    found = _one_permutation(symmetry)
    if found is None:
        return None
    group, permutation, signs = found
    flips = {} if signs is None else signs.axes
    axes = {
        name: permutation.axes[name][0]
        for name in coordinate_transforms(guide, permutation.axes, flips)
        if len(permutation.axes[name]) == 1 and (signs is None or flips.get(name) == permutation.axes[name])
    }
    return UnitAxes(axes, signs is not None, group) if axes else None


def signed_axes(symmetry: Symmetry) -> UnitAxes | None:
    """The axes of the units, if the group is one permutation of one axis a site, with all signs or none."""
    found = _one_permutation(symmetry)
    if found is None:
        return None
    group, permutation, signs = found
    if any(len(several) > 1 for several in permutation.axes.values()):
        return None
    if signs is not None and signs.axes != permutation.axes:
        return None
    axes = {site: several[0] for site, several in permutation.axes.items()}
    return UnitAxes(axes, signs is not None, group)


def _one_permutation(symmetry: Symmetry) -> tuple[FlatGroup, Permutation, SignFlip | None] | None:
    """The normal form of a group that is one permutation, the permutation, and its signs if it has any."""
    group = flatten(symmetry)
    members = [] if group is None else group.members
    permutations = [m for m in members if isinstance(m, Permutation)]
    signs = [m for m in members if isinstance(m, SignFlip)]
    if group is None or len(permutations) != 1 or len(signs) > 1:
        return None
    return group, permutations[0], signs[0] if signs else None


def viewed_normals(
    view: FlatGroup, normals: Mapping[str, Sequence[Any]], sites: Collection[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and standard deviations of some sites, reshaped as a group views them."""
    locs, scales = (view.view({name: normals[name][i] for name in sites}) for i in (0, 1))
    return {name: (locs[name], scales[name]) for name in sites}


def _rows(tensor: Tensor, axis: int, batch: int = 0) -> Tensor:
    """One row a unit, of shape ``(*batch, n, r)``, where ``batch`` is the number of batch dims."""
    return (
        tensor.movedim(axis, batch).flatten(batch + 1) if tensor.dim() > batch + 1 else tensor.unsqueeze(-1)
    )


def _normal_pairs(loc: Tensor, scale: Tensor, points: Tensor) -> Tensor:
    """Log density of unit j in slot i, (P, n, n), for loc and scale of shape (n, r), points (P, n, r)."""
    n, r = loc.shape
    products = len(points) * n * n * r > MAX_DIFFERENCES
    if products:  # large terms cancel: in single precision errors would be a tenth of a nat
        loc, scale, points = loc.double(), scale.double(), points.double()
    constant = scale.log().sum(-1, keepdim=True) + 0.5 * r * math.log(2 * math.pi)  # (n, 1)
    if not products:
        z = (points.unsqueeze(-3) - loc.unsqueeze(-2)) / scale.unsqueeze(-2)  # (P, slot, unit, r)
        return -0.5 * z.square().sum(-1) - constant
    # (x - m)^2 / s^2 expanded, with rounding errors of some 5 eps (x - centre)^2 / s^2
    centre = loc.mean(0).detach()
    x, m, precision = points - centre, loc - centre, scale.square().reciprocal()
    squares = x.square() @ precision.T - 2 * x @ (m * precision).T  # (P, unit, slot)
    offset = (m.square() * precision).sum(-1, keepdim=True)
    return -0.5 * (squares.mT + offset) - constant
