"""Draws aligned modulo a symmetry with the elements applied, also if some draws are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_sym.alignment.by_values import align
from pyro_sym.symmetry.base import Element, Group, leaves, map_element
from pyro_sym.symmetry.flat import normal_form, split

__all__ = ["Aligned", "aligned"]

Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Aligned:
    """Aligned draws of shape ``(num_chains, num_samples, *shape)``, by site."""

    draws: dict[str, Tensor]
    stats: dict[str, Tensor]  # by draw: the elements and the confidence in them
    attrs: dict[str, Any]


def aligned(draws: Values, symmetry: Group) -> Aligned:
    """Align draws of shape ``(num_chains, num_samples, *shape)``; those that aren't finite stay as they are.

    A chain that diverged and was masked has NaN for draws from there on.
    """
    batch = next(iter(draws.values())).shape[:2]
    finite = torch.ones(batch, dtype=torch.bool)
    for site in symmetry.sites:
        if site in draws:
            finite &= draws[site].isfinite().reshape(*batch, -1).all(-1).cpu()
    attrs: dict[str, Any] = {}
    if finite.all():
        alignment = align(draws, symmetry, group_by_chain=True)
        samples, elements = alignment.samples, alignment.elements
    else:
        left = int((~finite).sum())
        warnings.warn(
            f"{left} of {finite.numel()} draws are not finite; they are exported as they are, and the others "
            "aligned without them",
            stacklevel=4,
        )
        attrs["not_finite"] = left
        if not finite.any():
            return Aligned(dict(draws), {}, attrs)
        alignment = align({site: value[finite] for site, value in draws.items()}, symmetry)
        samples = dict(draws)
        for site in symmetry.sites:
            samples[site] = draws[site].clone()
            samples[site][finite] = alignment.samples[site]
        identity = symmetry.identity({site: value[0, 0] for site, value in draws.items()}, tuple(batch))
        elements = map_element(
            lambda whole, part: whole.index_put((finite.to(whole.device),), part),
            identity,
            alignment.elements,
        )
    alignment.warn_if_in_doubt(stacklevel=4)
    attrs["alignment"] = alignment.summary()
    confidence = torch.full(batch, torch.nan, dtype=torch.float64)
    confidence[finite] = alignment.confidence.flatten()
    return Aligned(samples, {**_named(elements, symmetry), "alignment_confidence": confidence}, attrs)


def _named(elements: Element, symmetry: Group) -> dict[str, Tensor]:
    """The elements, by the kinds of the symmetry's members; names are numbered if there are several."""
    kinds = [
        (member.kind, part)
        for member, several in zip(normal_form(symmetry).members, split(symmetry, elements), strict=True)
        for part in leaves(several)
    ]
    stats: dict[str, Tensor] = {}
    for i, (kind, part) in enumerate(kinds):
        same = [j for j, (other, _) in enumerate(kinds) if other == kind]
        stats[kind if len(same) == 1 else f"{kind}_{same.index(i)}"] = part
    return stats
