"""What an alignment is: aligned draws, the elements applied, and how sure they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_sym.alignment.descent import Descent, Scaling
from pyro_sym.symmetry.base import Element, Group, map_element
from pyro_sym.symmetry.flat import FlatGroup, nest, normal_form
from pyro_sym.symmetry.nearest import NUM_RESTARTS, State

__all__ = ["Alignment", "Draws"]

# Below this confidence a draw's labels are in doubt, and above this share of such draws the summaries are.
IN_DOUBT = 0.9
TOLERATED_SHARE = 0.01


@dataclass(frozen=True)
class Alignment:
    r"""Draws brought to one representative of their orbits.

    Attributes:
        samples: the aligned draws, by site; shapes and dtypes are those of the input, and every value is one
            of its values, moved or sign-flipped. Sites that the symmetry doesn't name are the input's own.
        elements: the group elements applied, batched as the draws are:
            ``symmetry.act(elements, original) == samples``.
        objective: the objective at the start and after each sweep, of shape ``(num_sweeps + 1,)``; it never
            rises.
        converged: whether the last sweep left every draw where it was.
        margin: by draw, how many nats the best rival element is worse, :math:`\Delta \ge 0`; zero as well
            where it is better. The functions that make alignments say in what density.
    """

    samples: dict[str, Tensor]
    elements: Element
    objective: Tensor
    converged: bool
    margin: Tensor

    @property
    def num_sweeps(self) -> int:
        """How many sweeps over the draws moved any of them."""
        return len(self.objective) - 1

    @property
    def confidence(self) -> Tensor:
        r"""By draw, the probability of the element applied against its best rival, between 1/2 and 1.

        .. math::

            \frac{1}{1 + e^{-\Delta}},

        which is an upper bound of its probability among all elements, and that itself if the others do not
        count.
        """
        return self.margin.sigmoid()

    def summary(self) -> dict[str, Any]:
        """The figures that exports and reports show.

        Returns:
            ``num_sweeps``, ``converged``, the least confidence, and the share of draws in doubt, which are
            those of confidence below 0.9.
        """
        return {
            "num_sweeps": self.num_sweeps,
            "converged": self.converged,
            "least_confidence": round(float(self.confidence.min()), 4),
            "share_in_doubt": round(self._share_in_doubt(), 4),
        }

    def warn_if_in_doubt(self, stacklevel: int = 1) -> None:
        """Warn if more than 1 % of the draws have a confidence below 0.9.

        Args:
            stacklevel: as in :func:`warnings.warn`, 1 being the caller of this method.
        """
        share = self._share_in_doubt()
        if share > TOLERATED_SHARE:
            warnings.warn(
                f"the labels of {share:.1%} of the draws are in doubt: other elements of the group do nearly "
                f"as well (confidence below {IN_DOUBT}). Means and standard deviations of the aligned units "
                "are of labels as chosen, and may mix units that overlap or that the data do not tell apart; "
                "rely on what does not depend on labels, or leave such draws out",
                stacklevel=stacklevel + 1,
            )

    def _share_in_doubt(self) -> float:
        return float((self.confidence < IN_DOUBT).double().mean())


class Draws:
    """Draws and the group they are aligned modulo, checked and converted to the form of a descent and back.

    Arguments and errors are those of :func:`~pyro_sym.align`. ``flat`` is the normal form of the group, and
    ``batch_shape`` the number of draws, as a shape.
    """

    def __init__(self, samples: Mapping[str, Tensor], symmetry: Group, group_by_chain: bool) -> None:
        self.samples, self.symmetry = samples, symmetry
        self.batch_ndim = 2 if group_by_chain else 1
        self.batch_shape = self._checked_batch_shape()
        self.flat: FlatGroup = normal_form(symmetry)
        viewed = self.flat.view({site: samples[site] for site in symmetry.sites})
        self.scaling = Scaling.of(self.flat.symmetry, viewed, self.batch_ndim)
        self._scaled = self.scaling(viewed, self.batch_ndim)

    def descent(self) -> Descent:
        """A descent of the scaled draws."""
        return Descent(self.flat.symmetry, self._scaled, self.scaling.spread)

    def point(self, name: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A point given by the user, checked, viewed and scaled; ``name`` appears in error messages."""
        for site in self.symmetry.sites:
            if site not in values:
                raise ValueError(
                    f"the {name} has no site {site!r}, which {self.symmetry} moves; give a value for it"
                )
            shape, expected = tuple(values[site].shape), tuple(self.samples[site].shape[self.batch_ndim :])
            if shape != expected:
                raise ValueError(
                    f"site {site!r} of the {name} has shape {shape}, but one draw has {expected}"
                )
            if not values[site].isfinite().all():
                raise ValueError(f"site {site!r} of the {name} is not finite")
        point = self.scaling(self.flat.view({site: values[site] for site in self.symmetry.sites}), 0)
        return {site: value[0] for site, value in point.items()}

    def moved_to(
        self, state: State, reference: Mapping[str, Tensor], num_restarts: int = NUM_RESTARTS
    ) -> State:
        """Apply one more element to all draws: its inverse brings the reference closest to the mean."""
        group = self.flat.symmetry
        point = {site: value.unsqueeze(0) for site, value in self.point("reference", reference).items()}
        one = Descent(group, point, self.scaling.spread)
        to_mean = one.closest(self.descent().moments(state.images), num_restarts).elements
        count = len(next(iter(state.images.values())))
        shared = map_element(lambda part: part.expand(count, *part.shape[1:]), group.inverse(to_mean))
        return state._replace(elements=group.compose(shared, state.elements))

    def aligned(
        self, elements: Element, objective: list[float], *, converged: bool, margin: Tensor
    ) -> Alignment:
        """The result, from elements of the flat group."""
        placed = [
            map_element(
                lambda part, site=member.sites[0]: part.reshape(*self.batch_shape, *part.shape[1:]).to(
                    self.samples[site].device
                ),
                several,
            )
            for member, several in zip(self.flat.members, elements, strict=True)
        ]
        nested = nest(self.symmetry, placed)
        with torch.no_grad():
            images = self.symmetry.act(nested, self.samples)
        path = torch.tensor(objective, dtype=torch.float64)
        return Alignment(images, nested, path, converged, margin.reshape(self.batch_shape))

    def _checked_batch_shape(self) -> tuple[int, ...]:
        """Check the draws and return their batch shape."""
        samples, symmetry, batch_ndim = self.samples, self.symmetry, self.batch_ndim
        expected = "(num_chains, num_samples, ...)" if batch_ndim == 2 else "(num_samples, ...)"
        first: tuple[str, tuple[int, ...]] | None = None
        for site, value in samples.items():
            if value.dim() < batch_ndim:
                raise ValueError(
                    f"draws of site {site!r} have shape {tuple(value.shape)}, expected {expected}"
                )
            batch_shape = tuple(value.shape[:batch_ndim])
            if first is None:
                first = site, batch_shape
            if batch_shape != first[1]:
                raise ValueError(
                    f"site {site!r} has draws {batch_shape}, but site {first[0]!r} has {first[1]}"
                )
            if 0 in batch_shape:
                raise ValueError(f"there are no draws to align: site {site!r} has shape {tuple(value.shape)}")
        if first is None:
            raise ValueError("there are no draws to align: samples is empty")
        # One draw, so that a batch dim can't be taken for an axis of the site.
        symmetry.check_values({site: value[(0,) * batch_ndim] for site, value in samples.items()})
        for site in symmetry.sites:
            bad = ~samples[site].isfinite().reshape(*first[1], -1).all(-1)
            if bad.any():
                index = tuple(bad.nonzero()[0].tolist())
                raise ValueError(
                    f"site {site!r} is not finite, first at draw {index} of {first[1]}; drop such draws, or "
                    "the chain they come from, before aligning"
                )
        return first[1]
