"""How a chain ended, if it diverged."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Divergence"]


@dataclass(frozen=True)
class Divergence:
    """The step at which a chain diverged, and in words the first thing that was not finite."""

    step: int
    what: str
