"""The log orbit average by sampled group elements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_sym.orbit.exact import LogProb, log_prob_at_images
from pyro_sym.symmetry.base import Symmetry, unmoved

__all__ = ["uniform", "uniform_unbiased"]


def uniform(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], own: Tensor, num_elements: int
) -> Tensor:
    r"""Uniform elements beside the identity: the InfoNCE form, for which the ELBO stays a lower bound.

    With :math:`\omega \sim q` and :math:`g_1, \dots, g_{K-1}` uniform on :math:`G`,

    .. math::

        \mathbb E\left[ -\log \frac1K \Bigl( q(\omega) + \sum_{k<K} q(g_k \cdot \omega) \Bigr) \right] \le
        H(q^G),

    with equality as :math:`K \to \infty`. The gain that it can report is at most :math:`\log K` nats.

    Args:
        symmetry: the group.
        log_prob: the log density of the guide.
        values: draws :math:`\omega \sim q` by site, each of shape ``(P, *native)``.
        own: :math:`\log q(\omega)`, of shape ``(P,)``.
        num_elements: :math:`K`, the identity included.

    Returns:
        The logarithm of the average, of shape ``(P,)``: in expectation over :math:`\omega` and the elements,
        at least :math:`\log q^G(\omega)`.

    References:
        Gelberg et al. 2024, arXiv 2408.05496, theorem 4.3.
    """
    elements = symmetry.sample(values, (num_elements - 1, len(own)))
    images = log_prob_at_images(symmetry, log_prob, values, elements)
    return torch.cat([own.unsqueeze(0), images]).logsumexp(0) - math.log(num_elements)


def uniform_unbiased(
    symmetry: Symmetry, log_prob: LogProb, values: Mapping[str, Tensor], own: Tensor, num_elements: int
) -> Tensor:
    r"""The logarithm of an unbiased estimate of :math:`q^G(\omega)`, idle elements stratified out.

    With :math:`g_1, \dots, g_K` uniform on :math:`G`,

    .. math::

        \hat q(\omega) = \frac{q(\omega)}{|G|}
        + \frac1K \sum_k [g_k \cdot \omega \ne \omega]\, q(g_k \cdot \omega), \qquad
        \mathbb E \log \hat q(\omega) \le \log q^G(\omega),

    by Jensen's inequality, so :math:`\mathbb E[\log q(\omega) - \log \hat q(\omega)]` bounds the gain from
    above; and as :math:`\hat q \ge q / |G|`, that bound never exceeds :math:`\log |G|`. It would overstate an
    ELBO: it is for diagnostics only.

    Args:
        symmetry: the group.
        log_prob: the log density of the guide.
        values: draws :math:`\omega` by site, each of shape ``(P, *native)``.
        own: :math:`\log q(\omega)`, of shape ``(P,)``.
        num_elements: :math:`K`.

    Returns:
        :math:`\log \hat q(\omega)`, of shape ``(P,)``.
    """
    elements = symmetry.sample(values, (num_elements, len(own)))
    rows = {site: value.unsqueeze(0) for site, value in values.items()}
    images = symmetry.act(elements, rows)
    at_images = log_prob(images).masked_fill(unmoved(symmetry.sites, images, rows, 2), -math.inf)
    terms = [(own - symmetry.log_order(values)).unsqueeze(0), at_images - math.log(num_elements)]
    return torch.cat(terms).logsumexp(0)
