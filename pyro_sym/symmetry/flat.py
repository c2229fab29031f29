"""The normal form of groups: one view of one product."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from pyro_sym.symmetry.base import Axes, Element, Group, leaves, map_element
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.viewed import Viewed

__all__ = ["FlatGroup", "flatten", "nest", "normal_form", "split"]

Shapes = Mapping[str, tuple[tuple[int, ...], ...]]


class FlatGroup(Viewed):
    """A view of a product whose members are neither products nor views.

    Args:
        members: they name axes of the viewed sites.
        shapes: as for :class:`~pyro_sym.Viewed`.
    """

    symmetry: Product

    def __init__(self, members: Iterable[Group], shapes: Shapes) -> None:
        super().__init__(Product(*members), shapes)

    @property
    def members(self) -> list[Any]:
        """The permutations and sign flips, and in :func:`normal_form` groups of other kinds."""
        return self.symmetry.members

    def on(self, symmetry: Group) -> Viewed:
        """Another group acting on the same viewed values."""
        return Viewed(symmetry, self.shapes)


@dataclass(frozen=True)
class _Leaf:
    """A group that is neither a product nor a view, with the shapes that its axes count in."""

    group: Group
    shapes: Shapes

    @property
    def is_elementary(self) -> bool:
        return self.group.relabels or self.group.flips


def flatten(symmetry: Group) -> FlatGroup | None:
    """The same group without nesting, its members in the order of the leaves.

    Args:
        symmetry: any group.

    Returns:
        ``None`` if something in it is neither a product or view nor a permutation or sign flip along axes,
        or if views are nested in views.
    """
    found: list[Any] = leaves(_leaves(symmetry, {}))
    alien = any(not leaf.is_elementary or not all(leaf.group.axes.values()) for leaf in found)
    return None if alien else normal_form(symmetry)


def normal_form(symmetry: Group) -> FlatGroup:
    """As :func:`flatten`, with groups of other kinds as members that act as a whole.

    Args:
        symmetry: any group.

    Returns:
        One view of one product.
    """
    found: list[Any] = leaves(_leaves(symmetry, {}))
    elementary = [leaf for leaf in found if leaf.is_elementary]
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for site in symmetry.axes:
        # Those that do not view a site do not know its sizes, and take its axes as they are.
        seen = [
            (leaf.group.axes.get(site, ()), leaf.shapes[site]) for leaf in elementary if site in leaf.shapes
        ]
        if seen:
            shapes[site] = _merged(seen)
    members: list[Group] = []
    for leaf in found:
        if leaf.is_elementary:
            axes = {
                site: tuple(_translate(a, leaf.shapes.get(site), shapes.get(site)) for a in several)
                for site, several in leaf.group.axes.items()
            }
            members.append(Permutation({**axes}) if leaf.group.relabels else SignFlip({**axes}))
        else:
            own = Viewed(leaf.group, leaf.shapes) if leaf.shapes else leaf.group
            members.append(_Native(own, shapes) if own.axes.keys() & shapes.keys() else own)
    return FlatGroup(members, shapes)


def nest(symmetry: Group, parts: Iterable[Element]) -> Element:
    """An element of a group from those of the members of its normal form."""
    rest = iter(parts)
    return map_element(lambda _: next(rest), _leaves(symmetry, {}))


def split(symmetry: Group, element: Element) -> list[Element]:
    """The inverse of :func:`nest`: an element's parts, one for each member of the normal form."""
    parts: list[Element] = []

    def walk(structure: Any, part: Element) -> None:
        if isinstance(structure, tuple):
            for below, own in zip(structure, part, strict=True):
                walk(below, own)
        else:
            parts.append(part)

    walk(_leaves(symmetry, {}), element)
    return parts


@singledispatch
def _leaves(symmetry: Group, shapes: Shapes) -> Any:
    """Nested tuples of leaves, as an element of the group has parts."""
    return _Leaf(symmetry, shapes)


@_leaves.register
def _(symmetry: Product, shapes: Shapes) -> Any:
    return tuple(_leaves(member, shapes) for member in symmetry.members)


@_leaves.register
def _(symmetry: Viewed, shapes: Shapes) -> Any:
    return _Leaf(symmetry, shapes) if shapes else _leaves(symmetry.symmetry, symmetry.shapes)


class _Native(Viewed):
    """A group of native values, acting on viewed ones: the inverse of a view.

    Args:
        group: the group.
        shapes: the shapes that sites are viewed in.
    """

    view, unview = Viewed.unview, Viewed.view

    def __init__(self, group: Group, shapes: Shapes) -> None:
        self.symmetry, self.shapes = group, dict(shapes)
        self.kind = group.kind  # type: ignore[misc]
        self.axes: Axes = {
            site: tuple(sorted(axis for native in several for axis in _factors(native, shapes.get(site))))
            for site, several in group.axes.items()
        }

    def __repr__(self) -> str:
        return repr(self.symmetry)


def _factors(native: int, shape: tuple[tuple[int, ...], ...] | None) -> range:
    """The axes, from the right, that are the factors of a native axis."""
    counts = [len(shape[a]) if shape and -a <= len(shape) else 1 for a in range(native, 0)]
    return range(-sum(counts), counts[0] - sum(counts))


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
