"""The axes of a model's latent sites that may be exchangeable, and the group that moves some of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pyro.distributions import constraints

from pyro_sym.model.conditioned_sites import fixed_parameters
from pyro_sym.model.program import LatentSite, Program, in_subsampled_plate, is_data
from pyro_sym.symmetry.base import FiniteGroup, Group
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.viewed import Shape, Viewed
from pyro_sym.unwrap import is_real, support_of_entries

__all__ = ["Candidate", "Kind", "candidates", "group_of", "whole_sites"]

Kind = type[Permutation] | type[SignFlip]


@dataclass(frozen=True)
class Candidate:
    """An axis of a latent site, both axes of a covariance, or a site as a whole."""

    site: str
    axes: tuple[int, ...]  # counted from the right; none for a site as a whole
    size: int  # the number of units along the axis; 1 for a site as a whole
    coupled: bool  # whether the support ties the units to each other, as in a simplex
    signed: bool  # whether signs may flip
    shape: tuple[int, ...] = ()  # of a site as a whole, which has one sign

    def may_be_moved_by(self, kind: Kind) -> bool:
        """Whether a group of this kind may act on it, and not trivially."""
        return self.signed if kind.flips else self.size > 1

    def is_moved_by(self, group: Group) -> bool:
        """Whether a group acts on one of its axes."""
        return not set(self.axes).isdisjoint(group.axes.get(self.site, ()))

    def __str__(self) -> str:
        return f"{self.site}[{', '.join(map(str, self.axes))}]" if self.axes else f"{self.site} as a whole"


def candidates(program: Program) -> list[Candidate]:
    """The axes of continuous latent sites that may be exchangeable; an error if there are no such sites."""
    if not program.latents:
        raise ValueError(
            f"the model has no continuous latent sites whose labels could be exchangeable (enumerated: "
            f"{list(program.enumerated)}); is everything observed, or hidden by poutine.block?"
        )
    values, indices = program.draw()
    no_data = {*program.latents, *fixed_parameters(program.model, program.args, program.kwargs)}
    data_plates = {
        frame.name
        for name, site in program.trace(values, indices).nodes.items()
        if is_data(site) and name not in no_data
        for frame in site["cond_indep_stack"]
    }
    return [axis for latent in program.latents.values() for axis in _axes(latent, data_plates)]


def whole_sites(program: Program) -> Iterator[Candidate]:
    """The sites that may have a single sign, as the loadings of a single factor.

    Scalar sites are left out: guides average a product that holds their signs less well.
    So are sites in subsampled plates: each minibatch shows another part of their value.
    """
    for latent in program.latents.values():
        shape = tuple(latent.value.shape)
        real = is_real(latent.support)
        if real and shape and latent.value.numel() and not in_subsampled_plate(latent.frames):
            yield Candidate(latent.name, (), 1, coupled=True, signed=True, shape=shape)


def _axes(latent: LatentSite, data_plates: set[str]) -> Iterator[Candidate]:
    """The candidates of one site."""
    support = support_of_entries(latent.support)
    several: list[tuple[int, ...]] = [(axis,) for axis in range(-latent.value.dim(), -support.event_dim)]
    if support is constraints.simplex:
        several.append((-1,))
    elif support in (constraints.positive_definite, constraints.corr_matrix):
        several.append((-2, -1))
    fixed = {
        frame.dim - latent.event_dim
        for frame in latent.frames
        if frame.vectorized and (frame.name in data_plates or in_subsampled_plate([frame]))
    }
    for axes in several:
        if latent.value.numel() and fixed.isdisjoint(axes):
            coupled = axes[-1] >= -support.event_dim
            signed = support is constraints.real or (coupled and len(axes) == 2)
            yield Candidate(latent.name, axes, latent.value.shape[axes[0]], coupled, signed)


def group_of(kind: Kind, axes: Iterable[Candidate]) -> FiniteGroup:
    """The group of a kind that acts on these axes, and on no others."""
    table: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, Shape] = {}
    for axis in axes:
        if axis.shape:  # view (a, b, ...) as (1, a, b, ...): one sign along the axis of length 1
            first, *rest = axis.shape
            table[axis.site], shapes[axis.site] = (-1 - len(axis.shape),), ((1, first), *rest)
        else:
            table[axis.site] = tuple(sorted({*table.get(axis.site, ()), *axis.axes}))
    return Viewed(kind({**table}), shapes) if shapes else kind({**table})
