"""Guides whose density factorises over the units that a permutation relabels: the matrix of all pairings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor
from torch.distributions import Independent, biject_to
from torch.distributions.transforms import IndependentTransform, Transform, identity_transform

from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product

__all__ = [
    "Normals",
    "PairLogProbs",
    "coordinatewise",
    "normals_of",
    "pair_log_probs",
    "separable_sites",
]

PairLogProbs = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]
Normals = Mapping[str, tuple[Tensor, Tensor]]
"""Location and scale of an ``AutoNormal``'s sites on the unconstrained line."""

# Above this many entries the squared distances are expanded into matrix products.
MAX_DIFFERENCES = 2**22


@dataclass(frozen=True)
class _Units:
    """The group, as this room can use it: one permutation, with or without a sign a unit."""

    axes: Mapping[str, int]
    signed: bool


def pair_log_probs(guide: Callable[..., Any], symmetry: Symmetry) -> PairLogProbs | None:
    r"""The function of values that pairs every slot of a mean-field guide with every unit of a draw.

    For a guide whose density is a product over units, :math:`q(\omega) = r(\omega)\prod_i q_i(\omega_i)`,
    with :math:`r` not depending on what the group moves,

    .. math::

        L_{ij} = \log q_i(\omega_j), \qquad
        \log q^G(\omega) = \log r(\omega) + \log \operatorname{perm}(e^L) - \log n!,

    and with a sign that rides on each unit, :math:`e^{L_{ij}} = \tfrac12 (q_i(\omega_j) + q_i(-\omega_j))`.

    Args:
        guide: a Pyro guide that has been run once.
        symmetry: the group.

    Returns:
        ``None`` if the density does not factorise this way, as far as this function can tell: it knows
        ``AutoNormal``, one :class:`Permutation` on one axis a site, signs on the same axes, and supports on
        which the map to the real line acts coordinate by coordinate (a simplex is not one). Otherwise a
        function of values of shape ``(P, *native)`` a site that returns :math:`L`, of shape ``(P, n, n)``,
        and :math:`\sum_i \log q_i(\omega_i)`, of shape ``(P,)``, in nats; gradients flow to values and
        parameters.
    """
    units = _units(symmetry)
    if units is None or not isinstance(guide, AutoNormal):
        return None
    transforms: dict[str, Transform] = {}
    for name in units.axes:
        site: Any = guide.prototype_trace.nodes[name]
        transform = coordinatewise(biject_to(site["fn"].support))
        if transform is None or (units.signed and transform is not identity_transform):
            return None
        transforms[name] = transform

    def pairs(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        total: Any = 0.0
        flipped: Any = 0.0
        for name, axis in units.axes.items():
            loc, scale = (_rows(t, axis) for t in guide._get_loc_and_scale(name))
            value = values[name]
            free = transforms[name].inv(value)
            log_det = transforms[name].log_abs_det_jacobian(free, value)
            points = _rows(free, axis, batch=1)
            jacobian = _rows(log_det, axis, batch=1).sum(-1).unsqueeze(-2)  # shape: (P, 1, n), of the unit
            total = total + _normal_pairs(loc, scale, points) - jacobian
            if units.signed:
                flipped = flipped + _normal_pairs(loc, scale, -points)
        diagonal = total.diagonal(dim1=-2, dim2=-1).sum(-1)
        if units.signed:
            total = torch.logaddexp(total, flipped) - math.log(2.0)
        return total, diagonal

    return pairs


def separable_sites(guide: Callable[..., Any], symmetry: Symmetry) -> tuple[dict[str, int], bool] | None:
    """The sites of a mean-field guide whose density is, on its own, a product over units.

    Unlike for :func:`pair_log_probs`, other sites may be moved along with them.

    Args:
        guide: a Pyro guide that has been run once.
        symmetry: the group.

    Returns:
        The axis along which the units lie by site, and whether a sign rides on each of them; ``None`` if the
        guide is no ``AutoNormal``, the group not one permutation with or without signs, or there is no site.
    """
    members = symmetry.members if isinstance(symmetry, Product) else [symmetry]
    permutations = [m for m in members if isinstance(m, Permutation)]
    signs = [m for m in members if isinstance(m, SignFlip)]
    alone = len(permutations) == 1 and len(signs) <= 1 and len(permutations) + len(signs) == len(members)
    if not (alone and isinstance(guide, AutoNormal)):
        return None
    axes = {}
    for name, several in permutations[0].axes.items():
        transform = coordinatewise(biject_to(guide.prototype_trace.nodes[name]["fn"].support))
        flips = not signs or (signs[0].axes.get(name) == several and transform is identity_transform)
        if len(several) == 1 and transform is not None and flips:
            axes[name] = several[0]
    return (axes, bool(signs)) if axes else None


def _units(symmetry: Symmetry) -> _Units | None:
    members = symmetry.members if isinstance(symmetry, Product) else [symmetry]
    permutations = [m for m in members if isinstance(m, Permutation)]
    signs = [m for m in members if isinstance(m, SignFlip)]
    if len(permutations) != 1 or len(signs) > 1 or len(permutations) + len(signs) < len(members):
        return None
    (permutation,) = permutations
    if any(len(several) > 1 for several in permutation.axes.values()):
        return None
    if signs and signs[0].axes != permutation.axes:
        return None
    return _Units({site: several[0] for site, several in permutation.axes.items()}, bool(signs))


def coordinatewise(transform: Transform) -> Transform | None:
    """The transform of one coordinate, or None if coordinates are mixed."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform if transform.domain.event_dim == transform.codomain.event_dim == 0 else None


def normals_of(auxiliary: Mapping[str, Any], names: Iterable[str]) -> Normals:
    """The normals that a run of an ``AutoNormal`` drew from, by site."""
    found = {}
    for name in names:
        fn = auxiliary[f"{name}_unconstrained"]
        while isinstance(fn, Independent):
            fn = fn.base_dist
        found[name] = (fn.loc, fn.scale)
    return found


def _rows(tensor: Tensor, axis: int, batch: int = 0) -> Tensor:
    """Units along dim ``batch``, all the rest of a unit flat behind it: of shape ``(*batch, n, r)``."""
    return (
        tensor.movedim(axis, batch).flatten(batch + 1) if tensor.dim() > batch + 1 else tensor.unsqueeze(-1)
    )


def _normal_pairs(loc: Tensor, scale: Tensor, points: Tensor) -> Tensor:
    """Log density of unit j under the normal of slot i: loc, scale of shape (n, r), points (P, n, r)."""
    n, r = loc.shape
    constant = scale.log().sum(-1, keepdim=True) + 0.5 * r * math.log(2 * math.pi)
    if len(points) * n * n * r <= MAX_DIFFERENCES:
        z = (points.unsqueeze(-3) - loc.unsqueeze(-2)) / scale.unsqueeze(-2)
        return -0.5 * z.square().sum(-1) - constant
    # (x - m)^2 / s^2 as matrix products; centring keeps the terms that cancel small.
    centre = loc.mean(0).detach()
    x, m, precision = points - centre, loc - centre, scale.square().reciprocal()
    squares = x.square() @ precision.T - 2 * x @ (m * precision).T
    offset = (m.square() * precision).sum(-1, keepdim=True)
    return -0.5 * (squares.mT + offset) - constant
