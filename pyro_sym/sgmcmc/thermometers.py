r"""Thermometers: what the momenta and the forces of a chain say about the temperature it runs at.

At stationarity, per site with :math:`d` unconstrained values,

.. math::

    T_{\mathrm{kin}} = \frac1d \, m^\top M^{-1} m, \qquad
    T_{\mathrm{conf}} = \frac1d \, u^\top \nabla U(u),

both have the mean :math:`T`, the first since momenta are :math:`N(0, T M)`, the second by partial
integration. The momentum is the one that has this law on a Gaussian at every stable step size: that of the
state for :class:`~pyro_sym.BAOA`, and for :class:`~pyro_sym.SGHMC` and :class:`~pyro_sym.SGNHT` the momentum
half way through its kick (:func:`~pyro_sym.sgmcmc.underdamped.momentum_within_kick`).

What they can see differs. :math:`T_{\mathrm{kin}}` follows :math:`T \chi^2_d / d` in each draw, so one draw
far outside of :func:`~pyro_sym.kinetic_band` is a finding. It reacts to the noise of minibatches. It reacts
to the step size only where the target is no Gaussian: there a step that is too large heats the momenta on
full data, too, for instance those of a network's weights. So a high kinetic temperature is the minibatches'
only if it goes away on all rows; if it does not, it is the step size's.

:math:`T_{\mathrm{conf}}` speaks of the positions: it reacts to a step size too large, to minibatch noise, and
to chains that have not arrived yet; but its spread is that of the positions around zero, not of
:math:`\chi^2`, so look at its mean over draws. Neither sees a mode that no chain has found. Both are means
over coordinates, and a hot coordinate may hide a cold one
(:func:`~pyro_sym.diagnostics.directional_temperatures` tells them apart).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["kinetic_band", "thermometers"]


def thermometers(
    position: Tensor,
    gradient: Tensor,
    momentum: Tensor | None = None,
    inverse_mass: Tensor | float = 1.0,
    *,
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """Temperatures per site and overall, and the norm of the gradient, in float64.

    Position, gradient and momentum (``None`` for dynamics without) have shape ``(*batch, d)``, the sites one
    after the other, with ``sizes`` values each; ``inverse_mass``, :math:`M^{-1}`, broadcasts to them. Returns
    ``gradient_norm``, ``configurational_temperature`` and with momenta ``kinetic_temperature``, of shape
    ``batch``, and ``site_configurational_temperature`` and ``site_kinetic_temperature``, of shape ``(*batch,
    sites)``. Wenzel et al. 2020 (arXiv 2002.02405, appendix I) use both per tensor of a network.
    """
    parts = {"configurational_temperature": position * gradient}
    if momentum is not None:
        parts["kinetic_temperature"] = momentum * momentum * inverse_mass
    widths = list(sizes.values())
    count = torch.tensor(widths, dtype=torch.float64, device=position.device)
    result = {"gradient_norm": torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float64)}
    for name, products in parts.items():
        sums = torch.stack([p.sum(-1, dtype=torch.float64) for p in products.split(widths, -1)], -1)
        result[name] = sums.sum(-1) / count.sum()
        result[f"site_{name}"] = sums / count
    return result


def kinetic_band(temperature: float, size: int, probability: float = 0.99) -> tuple[float, float]:
    r"""The central interval of the kinetic temperature of one draw, from :math:`T \chi^2_d / d`.

    Args:
        temperature: :math:`T`.
        size: :math:`d`, the number of unconstrained values.
        probability: of the interval.

    Returns:
        Its ends.

    Example:
        >>> low, high = kinetic_band(1.0, 100)
        >>> round(low, 2), round(high, 2)
        (0.67, 1.4)
    """
    from scipy.stats import chi2

    low, high = chi2.ppf([(1 - probability) / 2, (1 + probability) / 2], size)
    return temperature * float(low) / size, temperature * float(high) / size
