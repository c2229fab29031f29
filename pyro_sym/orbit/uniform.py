"""The log orbit average by sampled group elements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_sym.orbit.enumeration import LogProb, Reliable
from pyro_sym.symmetry.base import Symmetry, unmoved

__all__ = ["uniform", "uniform_unbiased"]


def uniform(
    symmetry: Symmetry,
    log_prob: LogProb,
    values: Mapping[str, Tensor],
    own: Tensor,
    num_elements: int,
    reliable: Reliable | None = None,
) -> Tensor:
    r"""The average over the identity and uniform elements (InfoNCE), with which the ELBO stays a lower bound.

    With :math:`\omega \sim q` and :math:`g_1, \dots, g_{K-1}` uniform on :math:`G`,

    .. math::

        \mathbb E\left[ -\log \frac1K \Bigl( q(\omega) + \sum_{k<K} q(g_k \cdot \omega) \Bigr) \right] \le
        H(q^G),

    with equality as :math:`K \to \infty` (Gelberg et al. 2024, arXiv 2408.05496, theorem 4.3). The gain that
    it can report is at most :math:`\log K` nats. Arguments are as for
    :func:`~pyro_sym.orbit.enumeration.enumerated`; returns the logarithm of the average, of shape ``(P,)``.
    """
    _, images, at_values = _at_random_images(symmetry, log_prob, values, num_elements - 1, len(own))
    relative = images - at_values
    terms = torch.cat([torch.zeros_like(relative[:1]), relative])
    ratio = terms.logsumexp(0) - math.log(num_elements)
    return own + (ratio if reliable is None else torch.where(reliable(at_values), ratio, 0.0))


def uniform_unbiased(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], own: Tensor, num_elements: int
) -> Tensor:
    r"""The logarithm of an unbiased estimate of :math:`q^G(\omega)`, for diagnostics only.

    With :math:`g_1, \dots, g_K` uniform on :math:`G`, and elements that leave :math:`\omega` fixed stratified
    out,

    .. math::

        \hat q(\omega) = \frac{q(\omega)}{|G|}
        + \frac1K \sum_k [g_k \cdot \omega \ne \omega]\, q(g_k \cdot \omega), \qquad
        \mathbb E \log \hat q(\omega) \le \log q^G(\omega),

    by Jensen's inequality, so :math:`\mathbb E[\log q(\omega) - \log \hat q(\omega)]` bounds the gain from
    above; as :math:`\hat q \ge q / |G|`, it never exceeds :math:`\log |G|`. It would overstate an ELBO, so it
    is for diagnostics only.
    """
    moved, images, at_values = _at_random_images(symmetry, log_prob, values, num_elements, len(own))
    relative = (images - at_values).masked_fill(~moved, -math.inf) - math.log(num_elements)
    terms = torch.cat([torch.full_like(relative[:1], -symmetry.log_order(values)), relative])
    return own + terms.logsumexp(0)


def _at_random_images(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], count: int, draws: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which images differ from the draws, the log density at images, both (count, P), and at draws (P,)."""
    elements = symmetry.sample(values, (count, draws))
    rows = {site: value.unsqueeze(0) for site, value in values.items()}
    images = symmetry.act(elements, rows)
    moved = ~unmoved(symmetry.sites, images, rows, 2)
    # One call for the images and the draws: many guides are run for it.
    both = {
        site: torch.cat([rows[site], images[site].expand(count, *values[site].shape)])
        for site in symmetry.sites
    }
    found = log_prob({**rows, **both})
    return moved, found[1:], found[0]
