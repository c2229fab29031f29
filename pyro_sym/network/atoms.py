"""Axes as ordered products of atoms that union-find joins, with the signs that act along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Atoms", "Axis", "Factor"]


class Factor(NamedTuple):
    """One factor of an axis: an atom, and the signs that multiply its units.

    A sign flip has one bit for each axis of each parameter: whether it flips. The signs of a factor of any
    other tensor are a sum of such bits modulo two, stored as a bit mask.
    """

    atom: int
    signs: int = 0


Axis = tuple[Factor, ...]
"""The factors of an axis, the slowest first; an axis of size one has none."""


@dataclass
class Atoms:
    """Which factors of which axes move together.

    Joined atoms form a class, and a permutation moves all of a class alike. A pinned class does not move. An
    atom may be cut later into a slow and a fast part, which cuts every axis that holds it. Signs are not
    joined but constrained: each class collects sums of bits that must be even.

    A class remembers what pinned it first: the value of ``cause`` at that time. The cause is empty if what is
    pinned are no hidden units, but inputs, outputs, or positions in a window.
    """

    sizes: list[int] = field(default_factory=list)
    cause: str = ""
    _parents: list[int] = field(default_factory=list)
    _pinned: dict[int, str] = field(default_factory=dict)
    _parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _even: set[Factor] = field(default_factory=set)
    _bits: int = 0

    def fresh(self, size: int, signs: int = 0) -> Axis:
        """An axis that is joined with no other yet."""
        return (Factor(self._atom(size), signs),)

    def pinned(self, size: int, cause: str | None = None) -> Axis:
        """An axis whose order is fixed."""
        axis = self.fresh(size)
        self.pin(axis, cause)
        return axis

    def bit(self) -> int:
        """A new sign, free until it is constrained."""
        self._bits += 1
        return 1 << (self._bits - 1)

    def _atom(self, size: int) -> int:
        self.sizes.append(size)
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, atom: int) -> int:
        """The atom that represents the class."""
        while self._parents[atom] != atom:
            self._parents[atom] = self._parents[self._parents[atom]]
            atom = self._parents[atom]
        return atom

    def is_pinned(self, atom: int) -> bool:
        """Whether the order of the class is fixed."""
        return self.find(atom) in self._pinned

    def cause_of(self, atom: int) -> str:
        """What pinned the class; empty if nothing did, or if it holds no hidden units."""
        return self._pinned.get(self.find(atom), "")

    def expand(self, axis: Axis) -> Axis:
        """The axis in uncut atoms, each the representative of its class, without atoms of size 1."""
        whole: list[Factor] = []
        for atom, signs in axis:
            root = self.find(atom)
            if root in self._parts:
                whole += self.expand(tuple(Factor(part, signs) for part in self._parts[root]))
            elif self.sizes[root] > 1:
                whole.append(Factor(root, signs))
        return tuple(whole)

    def pin(self, axis: Axis, cause: str | None = None) -> None:
        """Fix the order and signs of an axis; by default the cause is ``self.cause``."""
        for factor in self.expand(axis):
            self._pinned.setdefault(factor.atom, self.cause if cause is None else cause)
            self._require_even(factor)

    def unsigned(self, axis: Axis) -> Axis:
        """Fix the signs of an axis."""
        for factor in self.expand(axis):
            self._require_even(factor)
        return self.forget_signs(axis)

    def forget_signs(self, axis: Axis) -> Axis:
        """The axis of an even function of a tensor."""
        return tuple(Factor(atom) for atom, _ in axis)

    def equal(self, x: Axis, y: Axis) -> Axis:
        """The axis of a sum, or of a contraction: both terms move and flip alike."""
        pairs = self._align(x, y)
        for a, b in pairs:
            self._require_even(Factor(a.atom, a.signs ^ b.signs))
        return tuple(a for a, _ in pairs)

    def multiply(self, x: Axis, y: Axis) -> Axis:
        """The axis of a product: both factors move alike, and signs multiply."""
        return tuple(Factor(a.atom, a.signs ^ b.signs) for a, b in self._align(x, y))

    def reshape(self, axes: Iterable[Axis], shape: Sequence[int]) -> list[Axis]:
        """The axes of a tensor in another shape; all are pinned if the atoms can't be cut to fit."""
        rest = [factor for axis in axes for factor in self.expand(axis)]
        everything = tuple(rest)
        shaped: list[Axis] = []
        for size in shape:
            taken: list[Factor] = []
            while size > 1:
                (atom, signs), *rest = self.expand(tuple(rest))
                has = self.sizes[atom]
                if size % has == 0:
                    taken.append(Factor(atom, signs))
                    size //= has
                elif has % size == 0:
                    slow, fast = self._cut(atom, size)
                    taken.append(Factor(slow, signs))
                    rest.insert(0, Factor(fast, signs))
                    size = 1
                else:
                    self.pin(everything)
                    return [self.pinned(size) for size in shape]
            shaped.append(tuple(taken))
        return shaped

    def chunk(self, axis: Axis, whole: int, size: int) -> Axis:
        """Cut an axis of ``whole`` units into chunks in a fixed order, and return the axis within a chunk."""
        if size == 1:
            self.pin(axis)
            return ()
        chunks, inner = self.reshape([axis], [whole // size, size])
        self.pin(chunks, cause="")  # the chunks are no units
        return inner

    def constraints(self) -> dict[int, list[int]]:
        """By class, the sums of bits that must be even."""
        by_class: dict[int, list[int]] = {}
        for factor in self._even:
            for atom, signs in self.expand((factor,)):
                by_class.setdefault(atom, []).append(signs)
        return by_class

    def _require_even(self, factor: Factor) -> None:
        if factor.signs:
            self._even.add(factor)

    def _align(self, x: Axis, y: Axis) -> list[tuple[Factor, Factor]]:
        """Cut both axes until their factors match, and join those; pin what can't be cut to match."""
        x, y = self.expand(x), self.expand(y)
        pairs: list[tuple[Factor, Factor]] = []
        while x and y:
            m, n = self.sizes[x[0].atom], self.sizes[y[0].atom]
            if m == n:
                self._join(x[0].atom, y[0].atom)
                pairs.append((x[0], y[0]))
                x, y = x[1:], y[1:]
            elif n % m == 0:
                self._cut(y[0].atom, m)
            elif m % n == 0:
                self._cut(x[0].atom, n)
            else:
                self.pin(x)
                self.pin(y)
                return pairs + [(Factor(atom), Factor(atom)) for atom, _ in x]
            x, y = self.expand(x), self.expand(y)
        if x or y:
            raise ValueError(f"axes of sizes {self.size(x)} and {self.size(y)} can't be aligned")
        return pairs

    def _join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parents[b] = a
            if b in self._pinned:
                self._pinned[a] = min(self._pinned.get(a, self._pinned[b]), self._pinned[b])  # "" comes first

    def _cut(self, atom: int, slow: int) -> tuple[int, int]:
        root = self.find(atom)
        parts = self._atom(slow), self._atom(self.sizes[root] // slow)
        if root in self._pinned:
            self._pinned.update(dict.fromkeys(parts, self._pinned[root]))
        self._parts[root] = parts
        return parts

    def size(self, axis: Axis) -> int:
        """The number of units along an axis."""
        return math.prod(self.sizes[self.find(atom)] for atom, _ in axis)
