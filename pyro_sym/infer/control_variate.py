"""The gradient on all data, and minibatch gradients centred at a point where it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_sym.infer.gradient import Gradient
from pyro_sym.infer.minibatch import Loader, Minibatch, PlateRows

__all__ = ["ControlVariate", "FullGradient", "find_mode"]


class FullGradient:
    r"""Potential energy and gradient on all the data, from minibatches that cover it evenly.

    With :math:`\hat U_b` the energy on minibatch :math:`b` of a set in which every row is seen equally often,

    .. math::

        U(u) = \sum_b w_b \, \hat U_b(u), \qquad \sum_b w_b = 1.

    Args:
        gradient: energies and gradients on minibatches.
        source: where the run's minibatches come from; it says what covers the data.
    """

    def __init__(self, gradient: Gradient, source: PlateRows | Loader) -> None:
        self._gradient = gradient
        self._source = source

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate at a flat position of shape ``(d,)``.

        Returns:
            The energy, a scalar, and the gradient, of shape ``(d,)``.
        """
        energy, gradient = position.new_zeros(()), torch.zeros_like(position)
        with torch.no_grad(), pyro.validation_enabled(False):
            for weight, minibatch in self._source.cover():
                (part,), (slope,) = self._gradient(position.unsqueeze(0), minibatch)
                energy += weight * part
                gradient += weight * slope
        return energy, gradient


class ControlVariate:
    r"""Minibatch gradients centred at a point :math:`\hat u` where the full gradient is known.

    .. math::

        \tilde\nabla U(u) = \nabla \hat U(u) - \nabla \hat U(\hat u) + \nabla U(\hat u),

    on the same minibatch twice: unbiased, and with a variance that goes with the distance from the centre,
    so it pays where a posterior is narrow, as with many data. Energies are centred alike. A step costs two
    gradients.

    Args:
        gradient: energies and gradients on minibatches.
        center: :math:`\hat u`, flat, of shape ``(d,)``; a mode is a good one.
        energy: :math:`U(\hat u)` on all data.
        slope: :math:`\nabla U(\hat u)` on all data, of shape ``(d,)``.

    References:
        Baker et al. 2019, "Control variates for stochastic gradient MCMC" (arXiv 1706.05439).
    """

    def __init__(self, gradient: Gradient, center: Tensor, energy: Tensor, slope: Tensor) -> None:
        self.center = center
        self._gradient = gradient
        self._energy = energy
        self._slope = slope

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Evaluate for all chains.

        Args:
            position: of shape ``(C, d)``.
            minibatch: rows that all chains share, or a set each.

        Returns:
            Energies, of shape ``(C,)``, and gradients, of shape ``(C, d)``.
        """
        chains = len(position)
        twice = Minibatch(
            {n: rows if rows.dim() == 1 else rows.repeat(2, 1) for n, rows in minibatch.indices.items()},
            minibatch.args,
        )
        energy, slope = self._gradient(torch.cat([position, self.center.expand_as(position)]), twice)
        return (
            energy[:chains] - energy[chains:] + self._energy,
            slope[:chains] - slope[chains:] + self._slope,
        )

    def state_dict(self) -> dict[str, Any]:
        """The centre, with energy and gradient there."""
        known = {"center": self.center, "energy": self._energy, "slope": self._slope}
        return {**known, "gradient": self._gradient.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        device = self.center.device
        self.center, self._energy, self._slope = (
            state[name].to(device) for name in ("center", "energy", "slope")
        )
        self._gradient.load_state_dict(state["gradient"])


def find_mode(full: FullGradient, start: Tensor) -> Tensor:
    """A local minimum of the potential energy on all data, by L-BFGS.

    Args:
        full: energy and gradient on all data.
        start: where to begin, flat, of shape ``(d,)``.

    Returns:
        The mode, of shape ``(d,)``.
    """
    from scipy.optimize import minimize  # its import changes the warnings filters

    def objective(x: Any) -> tuple[float, Any]:
        energy, slope = full(torch.as_tensor(x).to(start))
        return energy.item(), slope.double().cpu().numpy()

    found = minimize(objective, start.double().cpu().numpy(), jac=True, method="L-BFGS-B")
    return torch.as_tensor(found.x).to(start)
