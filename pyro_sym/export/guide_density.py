"""Log p and log q at draws of a guide, by which leave-one-out cross-validation is corrected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_sym.export.log_sum import LogSum
from pyro_sym.export.sites import unseen
from pyro_sym.export.vmap_draws import at_draws
from pyro_sym.guides.density import GuideCall, log_density
from pyro_sym.guides.symmetrized import AutoSymmetrized
from pyro_sym.model.minibatch import PlateRows
from pyro_sym.model.program import Program

__all__ = ["draw_symmetrized", "log_joint", "log_q"]

CHUNK_SIZE = 64


def log_joint(
    model: Callable[..., Any], draws: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """The log joint at constrained values of shape ``(M, *shape)``, on all rows of subsampled plates."""
    total: Any = 0.0
    with unseen():
        program = Program(model, args, kwargs)
        for weight, minibatch in PlateRows(program.plates, 1).cover():
            part = at_draws(partial(_log_joint, program, minibatch.indices), draws, CHUNK_SIZE)
            total = total + weight * part["log_p"]
    return total


def _log_joint(program: Program, rows: Mapping[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"log_p": program.log_joint(values, rows, ring=LogSum())}


def log_q(
    guide: Callable[..., Any], draws: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """The guide's log density at constrained values of shape ``(M, *shape)``."""
    call = GuideCall({name: value.dim() - 1 for name, value in draws.items()}, args, kwargs, {})
    with unseen():
        return log_density(guide, call)(dict(draws))


def draw_symmetrized(
    guide: AutoSymmetrized, count: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    r"""Draws of :math:`q^G`, and :math:`\log q^G` of them, as the guide's own estimator computes it.

    :math:`q^G` is invariant, so its density is computed where the base guide drew, before an element moves
    the draw: the image may lie in the tails of the base density.
    """
    with unseen():
        run = guide.draw(count, *args, **kwargs)
        values = run.draws.values
        # Before the average, which may take random numbers: the draws don't depend on the estimator.
        images = guide.symmetry.act(guide.symmetry.sample(values, (count,)), values)
        averages = [guide.log_average(chunk) for chunk in run.chunks(CHUNK_SIZE)]
    return images, torch.cat(averages)
