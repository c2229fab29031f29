"""What a run depends on, as words by place: the code, numbers and data that a model can reach."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_sym.draws.value_reader import Part, ValueReader

__all__ = ["COLLAPSED", "Fingerprint", "fingerprint"]

# How many places a fingerprint names; deeper ones go into the digest of the place above them.
MAX_WORDS = 400
COLLAPSED = ", with all in it "
"""What precedes the digest of a place and everything below it."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Values at one moment, in words that are the same in every process, by name in ``roots``.

    ``doubts`` are places that can't be read, with the reason, ``handlers`` those of Pyro's effect handlers,
    which keep what they computed, ``tensors`` digests of large tensors, reused for those that don't change.
    """

    roots: list[tuple[str, Part]]
    doubts: list[str]
    handlers: list[str]
    tensors: dict[int, tuple[Tensor, int, str]]

    def words(self, leave_out: Collection[str] = ()) -> dict[str, str]:
        """Return words by place, as ``{"model": "Model", "model.loc": "0.5", ...}``.

        Parameters of the names in ``leave_out`` are left out, in whatever module they are. At most
        ``MAX_WORDS`` places are named, those nearest to the roots; the others go into the digest of the place
        above them.
        """
        left_out = tuple(f".{name}" for name in leave_out)
        digests: dict[int, str] = {}
        level = list(self.roots)
        words = {place: part.word for place, part in level}
        while level:
            deeper: list[tuple[str, Part]] = []
            for place, part in level:
                children = [(place + name, child) for name, child in part.kept(left_out)]
                if not children:
                    words[place] = f"{part.word} {part.digest}".rstrip()
                elif len(words) + len(children) > MAX_WORDS:
                    words[place] = f"{part.word}{COLLAPSED}{part.full_digest(left_out, digests)}"
                else:
                    words.update((name, child.word) for name, child in children)
                    deeper += children
            level = deeper
        return words


def fingerprint(roots: Mapping[str, Any], before: Fingerprint | None = None) -> Fingerprint:
    """Read the values in ``roots`` and everything that they reach; ``doubts`` names what can't be read.

    Tensors and arrays are read value by value. Functions and classes of the user are read by their code,
    defaults, closures and the global variables that they name; those of installed packages by their names.
    Other objects are read by what ``pickle`` would keep of them: their attributes and items. The order of
    items counts in a ``dict``, but not in a ``set``.

    Locks, weak caches, the cache of ``functools.lru_cache`` and the random generators of a ``DataLoader``
    (which a run restores) are left out. Large tensors that were not written to since ``before``, an earlier
    fingerprint, are not read again.
    """
    reader = ValueReader({} if before is None else before.tensors)
    parts = [(name, reader.read(value, name)) for name, value in roots.items()]
    return Fingerprint(parts, reader.doubts, reader.handlers, reader.tensors)
