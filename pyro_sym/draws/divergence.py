"""How a chain ended."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Divergence"]


@dataclass(frozen=True)
class Divergence:
    """The end of a chain.

    Attributes:
        step: at which it came.
        what: the first thing that was not finite, in words.
    """

    step: int
    what: str
