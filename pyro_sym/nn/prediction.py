"""The posterior predictive of a network at new rows, from many draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Categorical

from pyro_sym.nn.likelihoods import Likelihood

__all__ = ["Prediction", "Uncertainty"]


@dataclass(frozen=True)
class Uncertainty:
    """A measure of uncertainty in two parts, ``total = aleatoric + epistemic``, for each entry of the target.

    Attributes:
        total: the uncertainty of the posterior predictive.
        aleatoric: the part that would remain if the parameters were known, averaged over the draws.
        epistemic: the part that knowing the parameters would remove.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


@dataclass(frozen=True)
class Prediction:
    r"""The posterior predictive at some rows, as the equal mixture over :math:`S` draws.

    .. math::

        p(y \mid x, D) \approx \frac{1}{S} \sum_s p(y \mid x, \theta_s).

    Attributes:
        likelihood: of the model.
        output: the network's, ``(S, rows, *more)``.
        law: the distribution of each entry of the target given each draw, of batch shape ``(S, *target)``;
            ``law.sample()`` draws from the posterior predictive.
    """

    likelihood: Likelihood
    output: Tensor
    law: Any

    @property
    def probs(self) -> Tensor:
        """Probabilities, ``(rows, classes)`` of classes, ``(rows, *more)`` of ones under Bernoulli.

        Raises:
            ValueError: if the likelihood has none.
        """
        return self.likelihood.mixture(self.law).probs

    @property
    def mean(self) -> Tensor:
        """The mean of each entry of the target.

        Raises:
            ValueError: under Categorical.
        """
        return self._numbers("mean").mean(0)

    @property
    def entropy(self) -> Uncertainty:
        r"""Entropies of each entry in nats; epistemic is the mutual information of target and parameters.

        .. math::

            H\Big[\tfrac1S \sum_s p_s\Big] = \tfrac1S \sum_s H[p_s]
            + \tfrac1S \sum_s \mathrm{KL}\Big(p_s \,\Big\|\, \tfrac1S \sum_r p_r\Big).

        Raises:
            ValueError: if the likelihood has no closed form for a mixture's: Gaussian, Poisson.
        """
        total = self.likelihood.mixture(self.law).entropy()
        aleatoric = self.law.entropy().mean(0)
        return Uncertainty(total, aleatoric, (total - aleatoric).clamp(min=0))  # < 0 by rounding only

    @property
    def variance(self) -> Uncertainty:
        r"""Variances of each entry, by the law of total variance.

        .. math::

            \mathrm{Var}[y] = \tfrac1S \sum_s \mathrm{Var}[y \mid \theta_s]
            + \mathrm{Var}_s(E[y \mid \theta_s]).

        Raises:
            ValueError: under Categorical.
        """
        aleatoric = self._numbers("variance").mean(0)
        epistemic = self._numbers("mean").var(0, correction=0)
        return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)

    def log_prob(self, y: Tensor) -> Tensor:
        r"""The log predictive density of each row, :math:`\log \frac1S \sum_s p(y_n \mid x_n, \theta_s)`.

        Args:
            y: the target.

        Returns:
            In nats, of shape ``(rows,)``; all entries of a row's target jointly.

        Raises:
            ValueError: if the target's shape doesn't fit the output's.
        """
        shape = self.law.batch_shape[1:]
        target = self.likelihood.target(y, shape, self.output[0])
        by_draw = self.law.to_event(len(shape) - 1).log_prob(target)  # (S, rows)
        return by_draw.logsumexp(0) - math.log(len(by_draw))

    def _numbers(self, what: str) -> Tensor:
        if isinstance(self.law, Categorical):
            raise ValueError(f"{self.likelihood!r} has no {what} of classes; use probs or entropy")
        values: Tensor = getattr(self.law, what)
        return values
