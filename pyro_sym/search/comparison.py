r"""Is a change of the log joint more than rounding? A rule that looks at it element by element.

An element :math:`i` of a term, with log probability :math:`\ell_i` and scale :math:`c_i`, has *moved* if it
changes by more than its allowance,

.. math::

    |\Delta_i| > a_i = \rho \, (1 + |\ell_i|).

The elements of a term may be permuted, as those of exchangeable components are. They are compared in place,
or sorted, whichever moves less. A term is *unbalanced* if the changes of the elements that moved do not
cancel,

.. math::

    \Bigl|\sum_{\text{moved}} c_i \Delta_i\Bigr| > \sum_{\text{moved}} c_i a_i,

and the log joint has changed if the changes of the unbalanced terms do not cancel, within the sum of their
allowances alone. So elements that stay, and balanced terms, add nothing to the allowance of a break, however
large or strongly scaled they are.

The level :math:`\rho` of a term is at first a small constant. Where something seems to have changed, rounding
is measured before a change is reported: at values moved by a relative :math:`h` each way, the second
difference

.. math::

    \ell_i(\theta + h\theta\xi) + \ell_i(\theta - h\theta\xi) - 2 \ell_i(\theta)

is :math:`O(h^2)` for a smooth term; the rest is the rounding of the term and of the values.

References:
    J. J. Moré, S. M. Wild, *Estimating computational noise*, SIAM J. Sci. Comput. 33 (2011) 1292-1314.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pyro
import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.model.program import Program, Term

__all__ = ["NUM_DIFFERENCES", "Change", "Joint", "compared", "evaluated", "rounding_levels"]

Values = Mapping[str, Tensor]
Levels = Mapping[str, float]

# Levels that need no measurement, by the precision of a term: some 5000 and 32 units in the last place.
FLOOR = {torch.float64: 1e-12, torch.float32: 4e-6}
# No element may change by more nats than this without a measurement, unless it is so large that these nats
# are below 16 units in its last place.
FLOOR_NATS, LAST_UNITS = 1e-6, 16
# Relative steps of the second differences, and their number.
STEP = {torch.float64: 1e-11, torch.float32: 2e-6}
NUM_DIFFERENCES = 3
# By this factor a difference of two evaluations may exceed the largest of a few second differences.
SAFETY = 16.0


class Joint:
    """The log joint at a point, by terms, and by the elements of all terms in double precision."""

    def __init__(self, terms: Mapping[str, Term]) -> None:
        self.terms = dict(terms)
        self.elements = torch.cat(
            [term.elements.reshape(-1).double() for term in self.terms.values()]
        )  # (n,)

    @cached_property
    def sizes(self) -> Tensor:
        """1 + |element|, for all elements."""
        return 1 + self.elements.abs()

    @cached_property
    def allowances(self) -> Tensor:
        """By how much each element may change without a measurement of rounding."""
        counts = [term.elements.numel() for term in self.terms.values()]
        parts = self.sizes.split(counts)
        return torch.cat([_floor(term, part) for term, part in zip(self.terms.values(), parts, strict=True)])

    @cached_property
    def sums(self) -> dict[str, float]:
        """The scaled sums, by term."""
        return {name: float((term.elements.double() * term.scale).sum()) for name, term in self.terms.items()}

    @property
    def total(self) -> float:
        """The log joint."""
        return sum(self.sums.values())

    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return bool(self.elements.isfinite().all())


@dataclass(frozen=True)
class Change:
    """A change of the log joint that is more than rounding: a sum over the unbalanced terms."""

    total: float
    allowed: float  # for rounding
    size: float  # of the elements that moved, scaled
    terms: dict[str, float]  # the change of each

    @property
    def relative(self) -> float:
        """The change relative to the size of what moved; infinite if it isn't finite."""
        return abs(self.total) / self.size if math.isfinite(self.total) else math.inf


def evaluated(program: Program, values: Values, indices: Values) -> Joint:
    """The log joint of a program at a point."""
    return Joint(program.log_joint_elements(values, indices))


def compared(before: Joint, after: Joint, levels: Levels | None = None) -> Change | None:
    """The change of the log joint from a point where it is finite to another; None if it may be rounding.

    ``levels`` are the relative levels of rounding of terms that :func:`rounding_levels` measures; by default
    small constants. It is an error if the two have different terms, or terms of different shapes.
    """
    _refuse_other_terms(before, after)
    difference = after.elements - before.elements
    if bool((difference.abs() <= before.allowances).all()):
        return None
    total = allowed = size = 0.0
    terms: dict[str, float] = {}
    start = 0
    for name, term in before.terms.items():
        part = slice(start, start + term.elements.numel())
        start = part.stop
        sizes = before.sizes[part]  # (n,), as all below
        allowance = before.allowances[part].maximum((levels or {}).get(name, 0.0) * sizes)
        scale = torch.as_tensor(term.scale, dtype=torch.float64, device=difference.device)
        if scale.dim():
            scale = scale.expand(term.elements.shape).reshape(-1)
        change, own, moved = _sums_of_moved(difference[part], allowance, sizes, scale)
        if abs(change) <= own and not scale.dim() and own > FLOOR_NATS * float(scale):
            # Many permuted elements have a large allowance together. Sorted, those that only moved drop out.
            (first, order), second = before.elements[part].sort(), after.elements[part].sort().values
            change, own, moved = _sums_of_moved(second - first, allowance[order], sizes[order], scale)
        if not abs(change) <= own:
            total, allowed, size = total + change, allowed + own, size + moved
            terms[name] = change
    return Change(total, allowed, size, terms) if terms and not abs(total) <= allowed else None


def _sums_of_moved(
    difference: Tensor, allowance: Tensor, sizes: Tensor, scale: Tensor
) -> tuple[float, float, float]:
    """The scaled sums of changes, allowances and sizes, over the elements that moved."""
    moved = ~(difference.abs() <= allowance)  # true for NaN, too
    change, own, size = (float((part * scale)[moved].sum()) for part in (difference, allowance, sizes))
    return change, own, size


def rounding_levels(evaluate: Callable[[dict[str, Tensor]], Joint], values: Values, joint: Joint) -> Levels:
    """The relative level of rounding of each term at a point with log joint ``joint``, by second differences.

    Empty if the log joint can't be evaluated nearby.
    """
    seconds = torch.zeros_like(joint.elements)
    with pyro.validation_enabled(False):  # a simplex need not sum to one to the last digits here
        for _ in range(NUM_DIFFERENCES):
            steps = {name: _step(value) for name, value in values.items()}
            try:
                up = evaluate({name: value + steps[name] for name, value in values.items()})
                down = evaluate({name: value - steps[name] for name, value in values.items()})
                _refuse_other_terms(joint, up)
                _refuse_other_terms(joint, down)
            except (ValueError, RuntimeError):
                return {}
            second = (up.elements + down.elements - 2 * joint.elements).abs()
            seconds = seconds.maximum(second.nan_to_num(0.0, 0.0, 0.0))
    relative = SAFETY * seconds / joint.sizes
    counts = [term.elements.numel() for term in joint.terms.values()]
    return {
        name: float(part.max()) if part.numel() else 0.0
        for name, part in zip(joint.terms, relative.split(counts), strict=True)
    }


def _step(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return torch.zeros_like(value)
    return STEP.get(value.dtype, STEP[torch.float32]) * value * (2 * torch.rand_like(value) - 1)


def _floor(term: Term, sizes: Tensor) -> Tensor:
    """By how much elements of given sizes may change without a measurement of rounding."""
    last = LAST_UNITS * torch.finfo(term.elements.dtype).eps
    floor = FLOOR.get(term.elements.dtype, 2 * last)
    return (floor * sizes).minimum((last * sizes).clamp(min=FLOOR_NATS))


def _refuse_other_terms(before: Joint, after: Joint) -> None:
    if before.terms.keys() != after.terms.keys():
        differ = sorted(before.terms.keys() ^ after.terms.keys())
        raise SymmetryError(
            f"the model has other sites at other values of its latent sites: {differ}; a symmetry can be "
            "checked only where the sites are always the same"
        )
    for name, term in before.terms.items():
        now = after.terms[name].elements.shape
        if now != term.elements.shape:
            raise SymmetryError(
                f"the log probability of site {name!r} has shape {tuple(term.elements.shape)} at some values "
                f"of the latent sites and {tuple(now)} at others; a symmetry can be checked only where it is "
                "always the same"
            )
