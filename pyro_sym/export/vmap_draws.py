"""Evaluate a function of one draw at all draws: by ``vmap`` where torch can, otherwise one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pyro
import torch
from torch import Tensor

__all__ = ["at_draws", "at_finite_draws"]

OfOneDraw = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Values = Mapping[str, Tensor]


def at_draws(function: OfOneDraw, draws: Values, chunk_size: int | None) -> dict[str, Tensor]:
    """Evaluate a function at draws ``(M, *shape)``, without gradients; returns ``(M, *shape)`` by name.

    ``torch.func.vmap`` evaluates ``chunk_size`` draws at once. A function that can't be vectorised, say
    because its control flow depends on values, is evaluated draw by draw, with a warning. ``None`` evaluates
    draw by draw without trying: for functions that draw at random, as torch's generators write in place,
    which vmap refuses.
    """
    for name, value in draws.items():
        if not len(value):
            raise ValueError(f"there are no draws: those of site {name!r} have shape {tuple(value.shape)}")
    # Validation branches on values, which vmap refuses.
    with torch.no_grad(), pyro.validation_enabled(False):
        if chunk_size is None:
            return _one_by_one(function, draws)
        try:
            return _by_chunks(function, draws, chunk_size)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            warnings.warn(
                f"the model or function can't be vectorised over draws ({reason}); evaluating them one "
                "by one, which is slower",
                stacklevel=2,
            )
            return _one_by_one(function, draws)


def at_finite_draws(function: Callable[[Values], dict[str, Tensor]], draws: Values) -> dict[str, Tensor]:
    """Evaluate a function at the finite ones of draws ``(M, *shape)``.

    Returns tensors ``(M, *shape)`` by name, with NaN at the other draws; nothing if no draw is finite.
    """
    each = [value.isfinite().reshape(len(value), -1).all(-1).cpu() for value in draws.values()]
    finite = torch.stack(each).all(0)  # (M,)
    if finite.all():
        return function(draws)
    if not finite.any():
        return {}
    spread = {}
    for name, value in function({name: value[finite] for name, value in draws.items()}).items():
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        spread[name] = value.new_full((len(finite), *value.shape[1:]), torch.nan, dtype=dtype)
        spread[name][finite] = value.to(dtype)
    return spread


def _by_chunks(function: OfOneDraw, draws: Values, chunk_size: int) -> dict[str, Tensor]:
    count = len(next(iter(draws.values())))
    several = torch.func.vmap(lambda draw: dict(function(draw)), randomness="different")
    results: dict[str, Tensor] = {}
    for start in range(0, count, chunk_size):
        with warnings.catch_warnings():  # of operations that torch runs draw by draw inside vmap
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            parts = several({name: value[start : start + chunk_size] for name, value in draws.items()})
        if chunk_size >= count:
            return parts
        for name, part in parts.items():
            if start == 0:
                results[name] = part.new_empty(count, *part.shape[1:])
            results[name][start : start + chunk_size] = part
    return results


def _one_by_one(function: OfOneDraw, draws: Values) -> dict[str, Tensor]:
    count = len(next(iter(draws.values())))
    rows = [function({name: value[i] for name, value in draws.items()}) for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
