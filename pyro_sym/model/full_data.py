"""The gradient on all data, and the mode found with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_sym._private import unvalidated
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Loader, PlateRows

__all__ = ["FullGradient", "find_mode"]


class FullGradient:
    r"""Potential energy and gradient on all the data, from minibatches that cover it evenly.

    With :math:`\hat U_b` the energy on minibatch :math:`b` of a set in which every row is seen equally often,

    .. math::

        U(u) = \sum_b w_b \, \hat U_b(u), \qquad \sum_b w_b = 1.

    The minibatches are those of the source's ``cover``.
    """

    def __init__(self, gradient: Gradient, source: PlateRows | Loader) -> None:
        self._gradient = gradient
        self._source = source

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The energy, a scalar, and the gradient, ``(d,)``, at a flat position of shape ``(d,)``."""
        energy, gradient = position.new_zeros(()), torch.zeros_like(position)
        with torch.no_grad(), unvalidated():
            for weight, minibatch in self._source.cover():
                (part,), (slope,) = self._gradient(position.unsqueeze(0), minibatch)
                energy += weight * part
                gradient += weight * slope
        return energy, gradient


def find_mode(full: FullGradient, start: Tensor) -> Tensor:
    """A local minimum ``(d,)`` of the potential energy on all data, by L-BFGS from ``start``, ``(d,)``."""
    from scipy.optimize import minimize  # its import changes the warnings filters

    def objective(x: Any) -> tuple[float, Any]:
        energy, slope = full(torch.as_tensor(x).to(start))
        return energy.item(), slope.double().cpu().numpy()

    found = minimize(objective, start.double().cpu().numpy(), jac=True, method="L-BFGS-B")
    return torch.as_tensor(found.x).to(start)
