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

Factors = tuple[tuple[int, ...], ...]
"""The sizes of the factors of every axis of a site, as in :class:`~pyro_sym.Viewed`."""
Shapes = Mapping[str, Factors]


class FlatGroup(Viewed):
    """A view of a product whose members are neither products nor views."""

    symmetry: Product

    def __init__(self, members: Iterable[Group], shapes: Shapes) -> None:
        super().__init__(Product(*members), shapes)

    @property
    def members(self) -> list[Any]:
        """The permutations and sign flips, and in ``normal_form`` groups of other kinds."""
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

    Returns ``None`` if something in it is neither a product or view nor a permutation or sign flip along
    axes, or if views are nested in views.
    """
    found: list[Any] = leaves(_leaves(symmetry, {}))
    alien = any(not leaf.is_elementary or not all(leaf.group.axes.values()) for leaf in found)
    return None if alien else normal_form(symmetry)


def normal_form(symmetry: Group) -> FlatGroup:
    """Any group as one view of one product; members of other kinds than :func:`flatten` allows act whole."""
    found = leaves(_leaves(symmetry, {}))
    elementary = [leaf for leaf in found if leaf.is_elementary]
    shapes: dict[str, Factors] = {}
    for site in symmetry.axes:
        # Leaves that do not view a site do not know its sizes, and take its axes as they are.
        seen = [
            (leaf.group.axes.get(site, ()), leaf.shapes[site]) for leaf in elementary if site in leaf.shapes
        ]
        if seen:
            shapes[site] = _merged(seen)
    members: list[Group] = []
    for leaf in found:
        if leaf.is_elementary:
            axes = {
                site: tuple(
                    _translate(axis, leaf.shapes.get(site, ()), shapes.get(site, ())) for axis in several
                )
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
    map_element(lambda _, part: parts.append(part), _leaves(symmetry, {}), element)
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
    """A group of native values, acting on values that are viewed in given shapes: the inverse of a view."""

    view, unview = Viewed.unview, Viewed.view

    def __init__(self, group: Group, shapes: Shapes) -> None:
        self.symmetry, self.shapes = group, dict(shapes)
        self.kind = group.kind  # type: ignore[misc]
        self.axes: Axes = {
            site: tuple(sorted(axis for native in several for axis in _factors(native, shapes.get(site, ()))))
            for site, several in group.axes.items()
        }

    def __repr__(self) -> str:
        return repr(self.symmetry)


def _factors(native: int, shape: Factors) -> range:
    """The viewed axes, from the right, that are the factors of a native axis; one if the view lacks it."""
    counts = [len(shape[a]) if -a <= len(shape) else 1 for a in range(native, 0)]
    return range(-sum(counts), counts[0] - sum(counts))


def _merged(seen: list[tuple[tuple[int, ...], Factors]]) -> Factors:
    """The factors of every native axis: those of the leaf that moves it, else one."""
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


def _locate(axis: int, shape: Factors) -> tuple[int, int]:
    """The native axis that holds a viewed one, and which of its factors that is, both from the right."""
    known = [(k - len(shape), f - len(own)) for k, own in enumerate(shape) for f in range(len(own))]
    return known[axis] if -axis <= len(known) else (axis + len(known) - len(shape), -1)


def _translate(axis: int, shape: Factors, merged: Factors) -> int:
    """An axis of one view as an axis of another."""
    native, factor = _locate(axis, shape)
    return _factors(native, merged)[factor]
