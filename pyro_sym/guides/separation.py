"""The orbit average of a mean-field guide whose units lie far apart, without computing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_sym.guides.unit_pairs import separable_sites, viewed_normals
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.flat import FlatGroup

__all__ = ["Certificate", "certificate"]

Normals = Mapping[str, Sequence[Any]]

# Distances are reduced by this relative amount, which exceeds their rounding errors.
ROUNDING = 1e-3
MAX_PAUSE = 64


@dataclass(frozen=True)
class _Anchor:
    """The parameters at which distances were last computed."""

    locs: Mapping[str, Tensor]
    scales: Mapping[str, Tensor]  # by site, the largest scale of all units, coordinate by coordinate
    nearest: float  # the smallest distance of two units, in these scales
    num_pairs: int  # of ordered pairs

    def fits(self, normals: Normals) -> bool:
        return all(
            at.shape == normals[name][0].shape and at.device == normals[name][0].device
            for name, at in self.locs.items()
        )


class Certificate:
    r"""A bound on the error of :math:`q / |G|` as the orbit average :math:`q^G` of a mean-field guide.

    With :math:`\log(1 + x) \le \sqrt x` and :math:`\sqrt{x + y} \le \sqrt x + \sqrt y`, the mean over draws
    :math:`\omega \sim q` is bounded by Bhattacharyya coefficients. Maps of single coordinates don't change
    them, so they can be computed on the unconstrained line:

    .. math::

        0 \le \mathbb E\left[ \log \frac{|G|\, q^G(\omega)}{q(\omega)} \right]
        \le \sum_{g \ne e} \mathrm{BC}(q, q \circ g) \le e^B - 1, \qquad
        B = \sum_{i \ne j} \mathrm{BC}(q_i, q_j).

    The last step expands a permanent: with one permutation, :math:`\mathrm{BC}(q, q \circ g)` is a product
    over units, and :math:`\sum_g \prod_i b_{i g(i)} \le \prod_i \sum_j b_{ij}`, where :math:`b_{ii} = 1`. A
    site may be left out of the products, as a coefficient is at most 1: simplices and sites moved along two
    axes are. A sign on each unit adds the pairs :math:`(q_i, q_j \circ -)`, including :math:`i = j`.

    For normals with means :math:`m_i`, and scales of which none exceeds :math:`\rho S_c` in coordinate
    :math:`c`,

    .. math::

        \mathrm{BC}(q_i, q_j) \le \exp\left(-\frac{\lVert m_i - m_j \rVert_S^2}{8 \rho^2}\right), \qquad
        \lVert m \rVert_S^2 = \sum_c m_c^2 / S_c^2.

    The distances are computed once, with :math:`\rho = 1`. While no mean has moved by more than
    :math:`\delta` since, no distance has shrunk by more than :math:`2 \delta`. This is checked at every step
    from the parameters. When it no longer suffices, the distances are recomputed; if the bound is still too
    large, the next attempt waits for a number of steps that doubles up to 64.

    ``axes`` has the sites that the bound uses, and the axis of each along which its units lie, in the shape
    in which ``view`` shows the site; ``signed`` says whether the group flips each unit's sign; ``tolerance``
    is in nats.
    """

    def __init__(
        self, axes: Mapping[str, int], signed: bool, tolerance: float, view: FlatGroup | None = None
    ) -> None:
        self.axes, self.signed, self.tolerance, self.view = dict(axes), signed, tolerance, view
        self._anchor: _Anchor | None = None
        self._pause = self._wait = 0

    @torch.no_grad()
    def bound(self, normals: Normals) -> float | None:
        r"""The bound :math:`e^B - 1` in nats, or ``None`` if it exceeds the tolerance.

        ``normals`` has means and scales of the guide's sites on the unconstrained line, by site.
        """
        if torch.jit.is_tracing():  # a trace would keep this answer in all later calls
            return None
        if self.view is not None:
            normals = viewed_normals(self.view, normals, self.axes)
        if self._anchor is not None and self._anchor.fits(normals):
            bound = self._bound_from(self._anchor, normals)
            if bound <= self.tolerance:
                return bound
        if self._wait > 0:
            self._wait -= 1
            return None
        self._anchor = self._anchor_at(normals)
        bound = self._bound_from(self._anchor, normals)
        if bound <= self.tolerance:
            self._pause = 0
            return bound
        self._anchor = None
        self._pause = self._wait = min(2 * self._pause + 1, MAX_PAUSE)
        return None

    def _anchor_at(self, normals: Normals) -> _Anchor:
        locs, scales, points = {}, {}, []
        for name, axis in self.axes.items():
            loc, scale = normals[name][:2]
            locs[name] = loc.detach().clone()
            scales[name] = scale.detach().amax(axis, keepdim=True)
            points.append((locs[name] / scales[name]).movedim(axis, 0).reshape(loc.shape[axis], -1))
        units = torch.cat(points, -1)
        n = len(units)
        images = torch.cat([units, -units]) if self.signed else units
        distances = torch.nn.functional.pdist(images.to(torch.promote_types(images.dtype, torch.float)))
        nearest = float(distances.min()) if len(distances) else math.inf
        return _Anchor(locs, scales, nearest, n * (n - 1) + (n * n if self.signed else 0))

    def _bound_from(self, anchor: _Anchor, normals: Normals) -> float:
        """The bound from the anchor's distances; NaN if a parameter is."""
        moves, stretches = [], []
        for name, axis in self.axes.items():
            loc, scale = normals[name][:2]
            rest = [dim for dim in range(-loc.dim(), 0) if dim != axis]
            move = (loc - anchor.locs[name]).div_(anchor.scales[name]).square_()
            moves.append(move.sum(rest) if rest else move)
            stretches.append((scale.amax(axis, keepdim=True) / anchor.scales[name]).amax())
        move = torch.stack(moves).sum(0).amax().sqrt()
        shift, stretch = torch.stack([2 * move, torch.stack(stretches).amax()]).tolist()
        distance = (anchor.nearest * (1 - ROUNDING) - shift * (1 + ROUNDING)) / (stretch * (1 + ROUNDING))
        return math.expm1(min(anchor.num_pairs * math.exp(-(max(distance, 0.0) ** 2) / 8), 700.0))


def certificate(guide: Callable[..., Any], symmetry: Symmetry, tolerance: float | None) -> Certificate | None:
    """The certificate of a guide that has been run once; ``None`` without independent normal units."""
    units = separable_sites(guide, symmetry)
    if units is None or not tolerance:
        return None
    return Certificate(units.axes, units.signed, tolerance, units.view)
