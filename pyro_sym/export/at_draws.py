"""A function of one draw, evaluated at all of them: many at once where torch can, one by one where not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import pyro
import torch
from torch import Tensor

__all__ = ["at_draws"]

Values = Mapping[str, Tensor]


def at_draws(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], draws: Values, chunk_size: int
) -> dict[str, Tensor]:
    """Evaluate a function at every draw, without gradients.

    Args:
        function: takes the values of one draw by name, and returns tensors by name. It may draw at random.
        draws: values by name, of shape ``(M, *shape)``.
        chunk_size: how many draws are evaluated at once, by ``torch.func.vmap``. A function that can't be
            vectorised, for its control flow depends on values, is evaluated draw by draw, with a warning.

    Returns:
        Tensors by name, of shape ``(M, *shape)``.
    """
    count = len(next(iter(draws.values())))
    several = torch.func.vmap(lambda draw: dict(function(draw)), randomness="different")
    results: dict[str, Tensor] = {}
    # Validation looks at values, which vmap has no single one of.
    with torch.no_grad(), pyro.validation_enabled(False):
        for start in range(0, count, chunk_size):
            chunk = {name: value[start : start + chunk_size] for name, value in draws.items()}
            try:
                parts = several(chunk)
            except RuntimeError as error:
                if chunk_size == 1:  # it was one by one already
                    raise
                reason = str(error).strip().splitlines()[0]
                warnings.warn(
                    f"the model or function can't be vectorised over draws ({reason}); evaluating them one "
                    "by one, which is slower",
                    stacklevel=2,
                )
                return _one_by_one(function, draws, count)
            if chunk_size >= count:
                return parts
            for name, part in parts.items():
                if start == 0:
                    results[name] = part.new_empty(count, *part.shape[1:])
                results[name][start : start + chunk_size] = part
    return results


def _one_by_one(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], draws: Values, count: int
) -> dict[str, Tensor]:
    rows = [function({name: value[i] for name, value in draws.items()}) for i in range(count)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
