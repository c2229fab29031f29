r"""The log orbit average by enumeration of the group.

Notation of this room: :math:`q` is a density on values, :math:`G` a finite group that acts on them and
preserves volume, and

.. math::

    q^G(\omega) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot \omega)

the density of :math:`g \cdot \omega` for :math:`\omega \sim q` and :math:`g` uniform on :math:`G`. ``own``
is :math:`\log q(\omega)` as the guide itself reported it, which is more exact than a round trip through
constrained space; both densities of a ratio make the same round trip, so that its errors cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_sym.symmetry.base import Element, Symmetry, length, map_element

__all__ = ["LogProb", "Reliable", "enumerated", "log_prob_at_images"]

LogProb = Callable[[dict[str, Tensor]], Tensor]
"""Values of shape ``(*batch, *native)`` to their log density, of shape ``batch``."""

Reliable = Callable[[Tensor], Tensor]
"""The log density computed at the draws to booleans; where false, ``own`` is returned."""

CHUNK_NUMEL = 2**22


def enumerated(
    symmetry: Symmetry,
    log_prob: LogProb,
    values: Mapping[str, Tensor],
    own: Tensor,
    reliable: Reliable | None = None,
) -> Tensor:
    r"""The log orbit average :math:`\log q^G(\omega)`, exactly, of shape ``(P,)``, in nats.

    ``values`` are draws, of shape ``(P, *native)`` a site, and ``own`` is :math:`\log q(\omega)`, of shape
    ``(P,)``. ``reliable`` maps the log density computed at the draws to booleans; where one is false, that of
    the images is not trusted either, and ``own`` is returned. The images are evaluated in chunks of bounded
    memory; where there are several, the backward pass recomputes them.
    """
    elements = symmetry.elements(values)
    order = length(elements)
    numel = sum(value.numel() for value in values.values())
    rows = max(1, CHUNK_NUMEL // numel)
    starts = range(0, order, rows)
    parts = (map_element(lambda part, s=s: part[s : s + rows].unsqueeze(1), elements) for s in starts)
    if len(starts) == 1:
        images = log_prob_at_images(symmetry, log_prob, values, next(parts))
        at_values = images[0]  # the identity is first
    else:
        images = torch.cat([_summed_chunk(symmetry, log_prob, values, chunk) for chunk in parts])
        at_values = log_prob(dict(values))
    ratio = images.logsumexp(0) - at_values - math.log(order)
    return own + (ratio if reliable is None else torch.where(reliable(at_values), ratio, 0.0))


def log_prob_at_images(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], elements: Element
) -> Tensor:
    r"""The log density at images, :math:`\log q(g_m \cdot \omega_p)`, of shape ``(M, P)``.

    ``elements`` have batch shape ``(M, P)`` or ``(M, 1)``, and ``values`` shape ``(P, *native)``.
    """
    return log_prob(symmetry.act(elements, {site: value.unsqueeze(0) for site, value in values.items()}))


def _summed_chunk(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], elements: Element
) -> Tensor:
    """The log sum exp over a chunk, of shape (1, P), recomputed in the backward pass."""
    from torch.utils.checkpoint import checkpoint  # with old torch its import adds a warnings filter

    sites = list(values)

    def row(*tensors: Tensor) -> Tensor:
        at = dict(zip(sites, tensors, strict=True))
        return log_prob_at_images(symmetry, log_prob, at, elements).logsumexp(0, keepdim=True)

    return checkpoint(row, *values.values(), use_reentrant=False, preserve_rng_state=False)
