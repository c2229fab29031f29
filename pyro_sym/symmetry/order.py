"""How many different maps a group of relabellings and sign flips makes of the values it acts on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Moves", "log_order", "null_space"]

# Less than this is what rounding leaves of the order of a group with one element; the next has log 2.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Moves:
    """What one elementary symmetry does to values of given shapes.

    ``log_order`` is the logarithm of the number of its elements, 0 if all of its sites are empty. ``flips``
    says, by site that is not empty, along how many axes it flips signs.
    """

    log_order: float
    flips: Mapping[str, int] = field(default_factory=dict)


def log_order(moves: Iterable[Moves]) -> float:
    r"""The logarithm, in nats, of the order of a product, modulo the elements that do nothing.

    A relabelling that is not the identity moves values that differ. So an element that does nothing is made
    of sign flips. On a site with :math:`m` flipped axes it multiplies entry :math:`(i_1, \dots, i_m)` by
    :math:`\prod_j s^{(j)}_{i_j}`, which is 1 everywhere only if each :math:`s^{(j)}` is one sign
    :math:`(-1)^{c_j}` for all units, and :math:`\sum_j c_j` is even. These are linear equations over the
    field of two elements, one a site and with one unknown a sign flip. The elements that do nothing are
    their null space. (``moves`` has one entry for each elementary symmetry; these share no axis.)
    """
    parts = list(moves)
    flips = [part.flips for part in parts if part.flips]
    sites = {site for flip in flips for site in flip}
    rows = [sum((flip.get(site, 0) % 2) << k for k, flip in enumerate(flips)) for site in sites]
    idle = len(null_space(rows, [1 << k for k in range(len(flips))]))
    total = math.fsum(part.log_order for part in parts) - idle * math.log(2.0)
    return total if total > ROUNDING else 0.0


def null_space(rows: Iterable[int], bits: Iterable[int]) -> list[int]:
    """A basis of the bit masks that have an even number of bits in common with each row, over GF(2).

    The masks are made of ``bits`` and of the bits in rows.
    """
    pivots: dict[int, int] = {}
    every = sum(bits)
    for row in rows:
        every |= row
        for pivot, kept in pivots.items():
            if row & pivot:
                row ^= kept
        if row:
            new = row & -row
            pivots = {pivot: kept ^ row if kept & new else kept for pivot, kept in pivots.items()}
            pivots[new] = row
    free = [1 << k for k in range(every.bit_length()) if every >> k & 1 and 1 << k not in pivots]
    return [bit | sum(pivot for pivot, kept in pivots.items() if kept & bit) for bit in free]
