"""How a chain ended, if it diverged."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Divergence"]


@dataclass(frozen=True)
class Divergence:
    """The end of a chain.

    Attributes:
        step: at which it diverged.
        what: the first thing that was not finite, in words.
    """

    step: int
    what: str
