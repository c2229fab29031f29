"""The score of a model at its draws, in unconstrained space and on all data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import PlateRows
from pyro_sym.model.potential import Potential

__all__ = ["checked_pair", "unconstrained_score"]


def unconstrained_score(
    model: Callable[..., Any],
    draws: Mapping[str, Tensor],
    *args: Any,
    temperature: float = 1.0,
    group_by_chain: bool = False,
    chunk_size: int = 64,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    r"""Draws as unconstrained values, and the score of the target there.

    With the potential energy :math:`U` of :class:`~pyro_sym.Potential`, Jacobian included,

    .. math::

        s(u) = \nabla_u \log p_T(u) = -\frac1T \nabla U(u), \qquad p_T \propto e^{-U / T}.

    It is that of all data: all rows of subsampled plates.

    Args:
        model: a Pyro model.
        draws: constrained values of its latent sites, of shape ``(num_samples, *shape)``.
        *args: the model's positional arguments.
        temperature: :math:`T`.
        group_by_chain: whether draws have a chain dim in front, ``(num_chains, num_samples, *shape)``.
        chunk_size: how many draws to evaluate at once.
        **kwargs: the model's keyword arguments.

    Returns:
        The draws and the score, each of shape ``(n, d)``, all chains one after the other, sites in the
        model's order, as :func:`kernel_stein_discrepancy` takes them.

    Raises:
        ValueError: if ``temperature`` or ``chunk_size`` is not positive, a site has no draws or has them in
            another shape, or the model has no potential energy (see :class:`~pyro_sym.Potential`).

    Example:
        >>> from pyro_sym.diagnostics import unconstrained_score
        >>> def model(y):
        ...     scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        ...     with pyro.plate("data", len(y), subsample_size=2) as rows:
        ...         pyro.sample("y", dist.Normal(0.0, scale), obs=y[rows])
        >>> u, score = unconstrained_score(model, {"scale": torch.tensor([1.0, 2.0])}, torch.ones(6))
        >>> u, score  # -u - 6 + 6 exp(-2 u)
        (tensor([[0.0000],
                [0.6931]]), tensor([[ 0.0000],
                [-5.1931]]))
    """
    if not temperature > 0 or chunk_size < 1:
        raise ValueError(f"temperature={temperature} and chunk_size={chunk_size} must be positive")
    potential = Potential(model, args, kwargs)
    positions = _positions(potential, draws, 2 if group_by_chain else 1)
    gradient, source = Gradient(potential), PlateRows(potential.program.plates, 1, shared=True)
    score = torch.zeros_like(positions)
    with torch.no_grad(), pyro.validation_enabled(False):
        for rows in torch.arange(len(positions)).split(chunk_size):
            for weight, minibatch in source.cover():
                score[rows] -= weight / temperature * gradient(positions[rows], minibatch)[1]
    return positions, score


def checked_pair(draws: Tensor, score: Tensor, num_chains: int) -> tuple[Tensor, Tensor]:
    """Draws and their score in float64; refuses those that are not finite, or don't divide into chains."""
    if draws.dim() != 2 or draws.shape != score.shape or len(draws) < 2:
        found = f"draws have shape {tuple(draws.shape)} and the score {tuple(score.shape)}"
        raise ValueError(f"{found}; pass (n, d) for both, with n >= 2")
    n = len(draws)
    if num_chains < 1 or n % num_chains:
        raise ValueError(f"num_chains is {num_chains}; the {n} draws must divide into chains of equal length")
    for what, value in {"draws": draws, "score": score}.items():
        bad = ~value.isfinite().all(-1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise ValueError(f"{what} are not finite, first at {first}; leave such draws or their chains out")
    return draws.detach().double(), score.detach().double()


def _positions(potential: Potential, draws: Mapping[str, Tensor], sample_ndim: int) -> Tensor:
    """The draws as unconstrained values, of shape ``(n, d)``."""
    values = {}
    for name, transform in potential.transforms.items():
        if name not in draws:
            raise ValueError(f"latent site {name!r} has no draws; there are draws of {sorted(draws)}")
        value, expected = draws[name].detach(), tuple(transform.inverse_shape(potential.shapes[name]))
        shape = tuple(value.shape)
        if shape[sample_ndim:] != expected:
            raise ValueError(f"draws of site {name!r} have shape {shape}, but one value has {expected}")
        values[name] = value.flatten(0, sample_ndim - 1)
    return torch.cat([u.reshape(len(u), -1) for u in potential.unconstrain(values).values()], -1)
