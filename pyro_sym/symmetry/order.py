"""How many different maps a group of relabellings and sign flips makes of the values it acts on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Moves", "log_order"]

# Less than this is what rounding leaves of the order of a group with one element; the next has log 2.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Moves:
    """What one elementary symmetry does to values of given shapes.

    Attributes:
        log_order: the logarithm of the number of its elements; 0 where all of its sites are empty.
        flips: by site that is not empty, along how many axes it flips signs; empty for relabellings.
    """

    log_order: float
    flips: Mapping[str, int] = field(default_factory=dict)


def log_order(moves: Iterable[Moves]) -> float:
    r"""The logarithm of the order of a product, modulo the elements that do nothing.

    A relabelling that is not the identity moves values that differ. So an element that does nothing is made
    of sign flips. On a site with :math:`m` flipped axes it multiplies entry :math:`(i_1, \dots, i_m)` by
    :math:`\prod_j s^{(j)}_{i_j}`, which is 1 everywhere only if each :math:`s^{(j)}` is one sign
    :math:`(-1)^{c_j}` for all units, and :math:`\sum_j c_j` is even. These are linear equations over the
    field of two elements, one a site and with one unknown a sign flip. The elements that do nothing are
    their null space, of size :math:`2^{\text{flips} - \text{rank}}`.

    Args:
        moves: one for each elementary symmetry of a product whose members share no axis.

    Returns:
        The logarithm, in nats.

    Example:
        >>> both_axes = Moves(5 * math.log(2.0), {"w": 2})  # s and -s act alike
        >>> round(math.exp(log_order([both_axes])))
        16
    """
    parts = list(moves)
    flips = [part.flips for part in parts if part.flips]
    sites = {site for flip in flips for site in flip}
    rows = [sum((flip.get(site, 0) % 2) << k for k, flip in enumerate(flips)) for site in sites]
    idle = len(flips) - _rank(rows)
    total = math.fsum(part.log_order for part in parts) - idle * math.log(2.0)
    return total if total > ROUNDING else 0.0


def _rank(rows: Iterable[int]) -> int:
    """The rank over the field of two elements of a matrix whose rows are the bits of numbers."""
    pivots: list[int] = []
    for row in rows:
        for pivot in pivots:
            row = min(row, row ^ pivot)
        if row:
            pivots.append(row)
    return len(pivots)
