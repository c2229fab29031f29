"""Sums over discrete variables in log space, by variable elimination; works under ``vmap``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pyro.ops.rings import LogRing

__all__ = ["LogSum"]

Packed = Any  # a tensor whose attribute ``_pyro_dims`` names its dims by letters, as Pyro packs them


class LogSum(LogRing):
    """A ring for ``pyro.ops.contract``. Pyro's own uses an autograd function, which ``vmap`` refuses."""

    def sumproduct(self, terms: Sequence[Packed], dims: Iterable[str]) -> Packed:
        """Log of Σ_dims exp Σ terms: sum symbols out one by one, first those that join the fewest dims."""
        left, rest = list(terms), set(dims)
        while rest:
            symbol = min(sorted(rest), key=lambda dim: len(_symbols(_touching(left, dim))))
            rest.discard(symbol)
            if not (touching := _touching(left, symbol)):
                continue
            total = _added(touching)
            summed: Packed = total.logsumexp(total._pyro_dims.index(symbol))
            summed._pyro_dims = total._pyro_dims.replace(symbol, "")
            left = [term for term in left if symbol not in term._pyro_dims] + [summed]
        return _added(left)


def _touching(terms: Sequence[Packed], symbol: str) -> list[Packed]:
    return [term for term in terms if symbol in term._pyro_dims]


def _symbols(terms: Sequence[Packed]) -> str:
    return "".join(sorted(set().union(*[term._pyro_dims for term in terms])))


def _added(terms: Sequence[Packed]) -> Packed:
    """The sum of packed terms, with dims in alphabetical order."""
    symbols = _symbols(terms)
    total: Packed = 0.0
    for term in terms:
        own = "".join(symbol for symbol in symbols if symbol in term._pyro_dims)
        ordered = term.permute([term._pyro_dims.index(symbol) for symbol in own])
        index = tuple(slice(None) if symbol in own else None for symbol in symbols)
        total = total + ordered[index]
    total._pyro_dims = symbols
    return total
