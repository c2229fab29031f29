"""Minibatch gradients centred at a point where the gradient on all data is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch

__all__ = ["ControlVariate"]


class ControlVariate:
    r"""Minibatch gradients centred at a point :math:`\hat u` where the full gradient is known.

    .. math::

        \tilde\nabla U(u) = \nabla \hat U(u) - \nabla \hat U(\hat u) + \nabla U(\hat u),

    on the same minibatch twice: unbiased, and with a variance that goes with the distance from the centre,
    such as a mode, so it pays where a posterior is narrow, as with many data. Energies are centred alike. A
    step costs two gradients. ``energy`` and ``slope`` ``(d,)`` are those at ``center`` ``(d,)`` on all data.

    References:
        Baker et al. 2019, "Control variates for stochastic gradient MCMC" (arXiv 1706.05439).
    """

    def __init__(self, gradient: Gradient, center: Tensor, energy: Tensor, slope: Tensor) -> None:
        self.center = center
        self._gradient = gradient
        self._energy = energy
        self._slope = slope

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Energies ``(C,)`` and gradients ``(C, d)`` at positions ``(C, d)``."""
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
        """Continue from a state."""
        device = self.center.device
        self.center, self._energy, self._slope = (
            state[name].to(device) for name in ("center", "energy", "slope")
        )
        self._gradient.load_state_dict(state["gradient"])
