"""Distances modulo a symmetry: from draws to the nearest copy of a mode, from a mode to its own copies."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_sym.alignment.descent import in_double
from pyro_sym.alignment.result import Draws
from pyro_sym.symmetry.base import Group
from pyro_sym.symmetry.blocks import Moments

__all__ = ["distance_to_copy", "distance_to_mode"]


def distance_to_mode(
    samples: Mapping[str, Tensor],
    mode: Mapping[str, Tensor],
    symmetry: Group,
    *,
    group_by_chain: bool = False,
    num_restarts: int = 6,
) -> Tensor:
    r"""How far every draw is from the nearest of the equivalent copies of a mode.

    .. math::

        \delta_m = \min_{g \in G} \, \lVert g \cdot \theta_m - \hat\theta \rVert
                 = \min_{g \in G} \, \lVert \theta_m - g \cdot \hat\theta \rVert,

    in constrained space, over all coordinates of the sites in ``mode``. It is invariant: relabelled draws
    have the same distances, so that those of two chains can be compared whichever copies they are at.

    The minimum is exact for one :class:`~pyro_sym.Permutation` on one axis a site, with or without signs that
    ride on it, for signs alone, and for finite groups of your own. For all other groups it is an upper bound,
    by the descent that :func:`~pyro_sym.align` makes over the layers.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``.
        mode: values, each of the shape of one draw; sites beside those that the symmetry moves count too.
        symmetry: as for :func:`~pyro_sym.align`.
        group_by_chain: whether draws have a chain dim in front.
        num_restarts: how many orders of the layers are tried.

    Returns:
        Distances in float64, of shape ``(num_samples,)``, or ``(num_chains, num_samples)``.

    Raises:
        SymmetryError: as for :func:`~pyro_sym.align`.
        ValueError: if a site is absent, shapes disagree, or a value is not finite.

    Example:
        >>> from pyro_sym.diagnostics import distance_to_mode
        >>> locs = torch.tensor([[0.0, 5.0], [5.0, 1.0]])
        >>> mode = {"locs": torch.tensor([0.0, 5.0])}
        >>> distance_to_mode({"locs": locs}, mode, Permutation({"locs": -1})).round(decimals=6)
        tensor([0., 1.], dtype=torch.float64)
    """
    draws = Draws(samples, symmetry, group_by_chain)
    batch_ndim, flat = draws.batch_ndim, draws.flat
    for site in mode.keys() - symmetry.axes.keys():
        if site not in samples or samples[site].shape[batch_ndim:] != mode[site].shape:
            raise ValueError(
                f"the mode has site {site!r} of shape {tuple(mode[site].shape)}; the draws don't"
            )
    squares = torch.zeros(math.prod(draws.batch_shape), dtype=torch.float64)
    mean = draws.point("mode", mode)
    if flat.members:
        moments = Moments(mean, draws.scaling.native_variance(mean))
        squares += moments.distance(draws.descent().closest(moments, num_restarts).images)
    for site in mode.keys() - flat.symmetry.axes.keys():
        gap = in_double(samples, batch_ndim)[site] - in_double(mode, 0)[site]
        squares += gap.reshape(len(gap), -1).square().sum(-1)
    return squares.sqrt().reshape(draws.batch_shape)


def distance_to_copy(values: Mapping[str, Tensor], symmetry: Group) -> float:
    r"""How far a point is from the nearest of its own other copies.

    .. math::

        \min_{g \ne e} \, \lVert \theta - g \cdot \theta \rVert,

    in constrained space, over the sites that the symmetry moves. In a wide network some copies are near: for
    one hidden layer some :math:`g \ne e` has :math:`\lVert \theta - g \cdot \theta \rVert = O((d_i + d_o) /
    \log d_h)\, \lVert \theta \rVert`. Where a posterior is wider than this around its mode, copies
    overlap: labels of single draws are ambiguous, and averaging a guide over the group changes where it goes.

    The smallest is taken over relabellings with the best signs, and flips of one unit. With one permutation
    on one axis a site, signed or not, that is exact; the best relabelling is then a swap, as every unit that
    moves pays at least the smallest distance of two units, and none moves alone. Of a finite group of your
    own all elements are compared; for other groups it is an upper bound.

    Args:
        values: by site, one point.
        symmetry: as for :func:`~pyro_sym.align`.

    Returns:
        The distance; infinite for the trivial group.

    Raises:
        SymmetryError: as for :func:`~pyro_sym.align`.
        ValueError: if a value is not finite.

    Example:
        >>> from pyro_sym.diagnostics import distance_to_copy
        >>> round(distance_to_copy({"locs": torch.tensor([0.0, 3.0, 7.0])}, Permutation({"locs": -1})), 2)
        4.24

    References:
        Gelberg, van der Ouderaa, van der Wilk and Gal (2024), "Variational inference failures under model
        symmetries" (arXiv 2408.05496), theorem 3.1, for the order of magnitude.
    """
    draws = Draws({site: value.unsqueeze(0) for site, value in values.items()}, symmetry, False)
    if not draws.flat.members:
        return math.inf
    descent, point = draws.descent(), draws.point("point", values)
    moments = Moments(point, draws.scaling.native_variance(point))
    return math.sqrt(2 * float(descent.margin(descent.draws, moments)))  # d(e) = 0, so d(g) is the difference
