"""One scale for each ReLU unit, for summaries: it leaves functions as they are, but not densities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_sym.symmetry.base import Axes, Values, along, common_size, normalise_axes

__all__ = ["normalise_scales"]

Layer = tuple[Mapping[str, int], Mapping[str, int]]
# A largest change of log scales below this is rounding.
TOLERANCE = 1e-13
MAX_SWEEPS = 1000


@torch.no_grad()
def normalise_scales(samples: Values, *layers: Layer, group_by_chain: bool = False) -> dict[str, Tensor]:
    r"""Rescale ReLU units so that what comes in and what goes out of each have the same norm.

    For a unit with :math:`\phi(c x) = c\,\phi(x)` for all :math:`c > 0`, as ReLU and leaky ReLU are,

    .. math::

        (w_{\text{in}}, b, w_{\text{out}}) \mapsto (c\, w_{\text{in}}, c\, b, w_{\text{out}} / c)

    leaves the network's function as it is. Of all these, draws get the one of least norm,

    .. math::

        \min_{c > 0}\; c^2 \lVert (w_{\text{in}}, b) \rVert^2 + c^{-2} \lVert w_{\text{out}} \rVert^2
        \quad\Longleftrightarrow\quad
        c^2 = \lVert w_{\text{out}} \rVert \,/\, \lVert (w_{\text{in}}, b) \rVert .

    It is unique, continuous in the draw, and shares the scale alike, so that neither side of a unit has all
    of the spread, as it would if one norm were set to 1. For several layers the sum of all squared norms is
    least, a convex problem in :math:`\log c`, and is found unit by unit.

    **For summaries only.** This is not a :class:`Group`, and what it returns are not draws of the
    posterior: the prior weighs the points of such an orbit differently, a Gaussian one prefers small norms;
    the map does not preserve volume; and the orbit is a continuum of infinite extent, over which nothing
    can be averaged uniformly. So don't evaluate densities at the result, start chains from it as if it were a
    draw, or fit a guide to it. Norms, means and R-hat of it speak of the function without the spread along
    its orbits.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``, or ``(num_chains, num_samples, *shape)``
            with ``group_by_chain``.
        *layers: for each, two tables of site name to the axis along which its units lie, counted from the
            right: of what comes in (weights and bias), and of what goes out.
        group_by_chain: whether a chain dim stands in front.

    Returns:
        All draws, those of the named sites rescaled; dtypes are kept. A unit of which all that comes in or
        all that goes out is zero has no representative of least norm and is left as it is.

    Raises:
        ValueError: if a site is named on both sides of a layer, as a recurrent weight would be.
        SymmetryError: if a site is absent, an axis out of range, or sizes disagree.

    Example:
        >>> draws = {"w1": torch.tensor([[[8.0, 0.0]]]), "w2": torch.tensor([[[2.0]]])}
        >>> normalise_scales(draws, ({"w1": -2}, {"w2": -1}))["w1"]
        tensor([[[4., 0.]]])

    References:
        Laurent et al. (2024), "A symmetry-aware exploration of Bayesian neural network posteriors", for the
        representative of least mass as a convex problem.
    """
    batch_ndim = 2 if group_by_chain else 1
    tables = [_tables(layer, samples, batch_ndim) for layer in layers]
    scaled = {site: samples[site].double() for both in tables for table in both for site in table}
    for _ in range(MAX_SWEEPS):
        largest = 0.0
        for incoming, outgoing in tables:
            log_scale = _log_scale(scaled, incoming, outgoing, batch_ndim)
            for table, sign in ((incoming, 1), (outgoing, -1)):
                for site, (axis,) in table.items():
                    scaled[site] = scaled[site] * along((sign * log_scale).exp(), scaled[site], axis)
            largest = max(largest, float(log_scale.abs().max()))
        if largest < TOLERANCE or len(tables) == 1:
            break
    return {**samples, **{site: value.to(samples[site].dtype) for site, value in scaled.items()}}


def _tables(layer: Layer, samples: Values, batch_ndim: int) -> tuple[Axes, Axes]:
    """The two tables of a layer, checked at one draw."""
    incoming, outgoing = (normalise_axes("normalise_scales", {**table}) for table in layer)
    both = sorted(incoming.keys() & outgoing.keys())
    if both:
        raise ValueError(
            f"site {both[0]!r} comes in and goes out of the same units; their scales can't be told from it: "
            "name it on neither side"
        )
    named = {**incoming, **outgoing}
    one = {site: value[(0,) * batch_ndim] for site, value in samples.items() if site in named}
    common_size("normalise_scales", named, one)
    return incoming, outgoing


def _log_scale(values: Values, incoming: Axes, outgoing: Axes, batch_ndim: int) -> Tensor:
    """Log scales of units that make both norms equal, of shape ``(*batch, n)``."""
    into, out = (
        torch.stack([_squares(values[site], axis, batch_ndim) for site, (axis,) in table.items()]).sum(0)
        for table in (incoming, outgoing)
    )
    return torch.where((into > 0) & (out > 0), (out.log() - into.log()) / 4, 0.0)


def _squares(value: Tensor, axis: int, batch_ndim: int) -> Tensor:
    """The sum of squares of every unit."""
    units = value.movedim(axis, batch_ndim).square()
    return units.flatten(batch_ndim + 1).sum(-1) if units.dim() > batch_ndim + 1 else units
