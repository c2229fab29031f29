"""Which parts of a group move which axes of which sites, and so depend on one another."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from pyro_sym.symmetry.base import Element, Symmetry, Values
from pyro_sym.symmetry.elementary import Permutation
from pyro_sym.symmetry.flat import flatten, nest

__all__ = ["Block", "Coupling", "Factor"]


@dataclass(frozen=True)
class Block:
    """A permutation with the sign flips of its units, or one sign flip alone, as indices of members.

    ``permutation`` is ``None`` for signs alone; ``first`` is a site and one of its axes, for the size.
    """

    permutation: int | None
    flips: tuple[int, ...]
    first: tuple[str, int]

    def size(self, values: Values) -> int:
        """The number of units."""
        site, axis = self.first
        return values[site].shape[axis]

    def log_order(self, values: Values) -> float:
        """The logarithm of the number of elements."""
        n = self.size(values)
        shuffles = 0.0 if self.permutation is None else math.lgamma(n + 1)
        return shuffles + n * len(self.flips) * math.log(2.0)


@dataclass(frozen=True)
class Factor:
    """A moved site: its moved axes from the right, and the block that moves each of them.

    ``flips`` tells by axis which of that block's flips changes the sign along it, if any.
    """

    site: str
    axes: tuple[int, ...]
    blocks: tuple[int, ...]
    flips: tuple[int | None, ...]


@dataclass(frozen=True)
class Coupling:
    """The table of blocks, in the order of the group's members, and of the sites (factors) that they move.

    Blocks that move axes of one site are coupled: the best choice in one depends on the other, as for the two
    hidden layers that a weight matrix joins. A block that moves two axes of one site, as the states of a
    hidden Markov model do, is coupled to itself. Where sites are viewed in finer shapes, axes and values are
    those of the viewed sites.
    """

    blocks: tuple[Block, ...]
    factors: tuple[Factor, ...]

    @classmethod
    def of(cls, symmetry: Symmetry) -> Coupling | None:
        """The table of a group; ``None`` if it is not made of permutations and sign flips."""
        group = flatten(symmetry)
        if group is None:
            return None
        members = group.members
        mover: dict[tuple[str, int], int] = {}  # site and axis -> the permutation that moves it
        flipper: dict[tuple[str, int], int] = {}
        for i, member in enumerate(members):
            table = mover if isinstance(member, Permutation) else flipper
            table.update({(site, axis): i for site, several in member.axes.items() for axis in several})
        blocks, place = [], {}
        for i, member in enumerate(members):
            first = next((site, several[0]) for site, several in member.axes.items())
            if isinstance(member, Permutation):
                flips = tuple(sorted({f for at, f in flipper.items() if mover.get(at) == i}))
                blocks.append(Block(i, flips, first))
                place.update({k: len(blocks) - 1 for k in (i, *flips)})
            elif first not in mover:
                blocks.append(Block(None, (i,), first))
                place[i] = len(blocks) - 1
        factors = []
        for site in group.symmetry.axes:
            axes = sorted(axis for name, axis in {*mover, *flipper} if name == site)
            ats = [(site, axis) for axis in axes]
            movers = [place[mover[at] if at in mover else flipper[at]] for at in ats]
            signs = [
                blocks[b].flips.index(flipper[at]) if at in flipper else None
                for at, b in zip(ats, movers, strict=True)
            ]
            factors.append(Factor(site, tuple(axes), tuple(movers), tuple(signs)))
        return cls(tuple(blocks), tuple(factors))

    def is_self_coupled(self, block: int) -> bool:
        """Whether a block moves two axes of one site."""
        return any(factor.blocks.count(block) > 1 for factor in self.factors)

    def uncoupled(self, values: Values, max_size: int) -> frozenset[int]:
        """Blocks that are independent given the others: none is coupled to another of them or to itself.

        Indices are chosen greedily by log order; permutations of more than ``max_size`` units are left out.
        """
        chosen: set[int] = set()
        by_order = sorted(range(len(self.blocks)), key=lambda b: -self.blocks[b].log_order(values))
        for b in by_order:
            block = self.blocks[b]
            too_large = block.permutation is not None and block.size(values) > max_size
            if not too_large and not self.is_self_coupled(b) and not self._meets(b, chosen):
                chosen.add(b)
        return frozenset(chosen)

    def _meets(self, block: int, others: Collection[int]) -> bool:
        return any(block in factor.blocks and set(factor.blocks) & set(others) for factor in self.factors)

    def element(self, symmetry: Symmetry, parts: dict[int, Element]) -> Element:
        """The group's element from those of its members, by index."""
        return nest(symmetry, (parts[i] for i in sorted(parts)))
