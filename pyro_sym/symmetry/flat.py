"""The normal form of groups made of permutations and signs: one view of one product."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from pyro_sym.symmetry.base import Element, Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.viewed import Viewed

__all__ = ["FlatGroup", "flatten", "leaves", "nest"]

Shapes = Mapping[str, tuple[tuple[int, ...], ...]]
Leaf = tuple[Permutation | SignFlip, Shapes]


class FlatGroup(Viewed):
    """A view of a product of permutations and sign flips.

    Args:
        members: they name axes of the viewed sites.
        shapes: as for :class:`~pyro_sym.Viewed`.
    """

    symmetry: Product

    def __init__(self, members: Iterable[Permutation | SignFlip], shapes: Shapes) -> None:
        super().__init__(Product(*members), shapes)

    @property
    def members(self) -> list[Symmetry]:
        """The permutations and sign flips."""
        return self.symmetry.members

    def on(self, symmetry: Symmetry) -> Viewed:
        """Another symmetry of the same viewed values."""
        return Viewed(symmetry, self.shapes)


def flatten(symmetry: Symmetry) -> FlatGroup | None:
    """The same group without nesting, its members in the order of the leaves.

    Args:
        symmetry: any group.

    Returns:
        ``None`` if something in it is neither a product or view nor a permutation or sign flip, or if views
        are nested in views.
    """
    found = _leaves(symmetry, {})
    if found is None:
        return None
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for site in symmetry.axes:
        # Those that do not view a site do not know its sizes, and take its axes as they are.
        seen = [(leaf.axes.get(site, ()), table[site]) for leaf, table in found if site in table]
        if seen:
            shapes[site] = _merged(seen)
    members = []
    for leaf, table in found:
        axes = {
            site: tuple(_translate(a, table.get(site), shapes.get(site)) for a in several)
            for site, several in leaf.axes.items()
        }
        members.append(Permutation({**axes}) if isinstance(leaf, Permutation) else SignFlip({**axes}))
    return FlatGroup(members, shapes)


def nest(symmetry: Symmetry, parts: Iterable[Tensor]) -> Element:
    """An element of a group from those of the members of its normal form."""
    rest = iter(parts)

    def element(part: Symmetry) -> Element:
        if isinstance(part, Product):
            return tuple(element(member) for member in part.members)
        return element(part.symmetry) if isinstance(part, Viewed) else next(rest)

    return element(symmetry)


def leaves(element: Element) -> list[Tensor]:
    """The inverse of :func:`nest`: the parts of an element, one a member of the normal form."""
    if not isinstance(element, tuple):
        return [element]
    return [part for several in element for part in leaves(several)]


def _leaves(symmetry: Symmetry, shapes: Shapes) -> list[Leaf] | None:
    """Permutations and signs, each with the shapes that its axes count in."""
    if isinstance(symmetry, Permutation | SignFlip):
        return [(symmetry, shapes)]
    if isinstance(symmetry, Viewed) and not shapes:
        return _leaves(symmetry.symmetry, symmetry.shapes)
    if not isinstance(symmetry, Product):
        return None
    all_leaves: list[Leaf] = []
    for member in symmetry.members:
        several = _leaves(member, shapes)
        if several is None:
            return None
        all_leaves += several
    return all_leaves


def _merged(seen: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]) -> tuple[tuple[int, ...], ...]:
    """The factors of every native axis: as the leaf that moves it has them, else in one piece."""
    length = max(len(shape) for _, shape in seen)
    merged = []
    for native in range(-length, 0):
        known = [(several, shape) for several, shape in seen if -native <= len(shape)]
        factors: tuple[int, ...] = (math.prod(known[0][1][native]),)
        for several, shape in known:
            if native in {_locate(axis, shape)[0] for axis in several}:
                factors = shape[native]
        merged.append(factors)
    return tuple(merged)


def _locate(axis: int, shape: tuple[tuple[int, ...], ...] | None) -> tuple[int, int]:
    """The native axis that holds a factor, and which of its factors it is, both from the right."""
    if shape is not None:
        left = axis
        for native in range(-1, -len(shape) - 1, -1):
            if -left <= len(shape[native]):
                return native, left
            left += len(shape[native])
        return left - len(shape), -1
    return axis, -1


def _translate(
    axis: int, shape: tuple[tuple[int, ...], ...] | None, merged: tuple[tuple[int, ...], ...] | None
) -> int:
    """A factor of one shape as a factor of another."""
    native, factor = _locate(axis, shape)
    behind = range(native + 1, 0)
    if merged is None:
        return native
    return factor - sum(len(merged[a]) if -a <= len(merged) else 1 for a in behind)
