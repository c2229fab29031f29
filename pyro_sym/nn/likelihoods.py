"""Likelihoods: the distribution of a target given a network's output, scaled to all rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroskedasticGaussian", "Likelihood", "Poisson"]


class Likelihood(ABC):
    r"""The law of a row's target given the network's output, and the number :math:`N` of rows.

    A minibatch :math:`B` of rows stands for all of them,

    .. math::

        \log p(D \mid \theta) \approx \frac{N}{|B|} \sum_{n \in B} \log p(y_n \mid f_\theta(x_n)),

    which is unbiased over uniformly drawn minibatches. A likelihood of your own implements :meth:`law`, the
    distribution of each entry.

    Args:
        num_data: :math:`N`; by default the rows of a call are all there are.

    Attributes:
        priors: of the likelihood's own parameters, by site.

    Raises:
        ValueError: if ``num_data`` is no positive integer.
    """

    def __init__(self, *, num_data: int | None = None) -> None:
        if num_data is not None and (type(num_data) is not int or num_data < 1):
            raise ValueError(f"num_data is {num_data!r}; pass the number of rows in all, an integer >= 1")
        self.num_data = num_data
        self.priors: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_data={self.num_data})"

    @abstractmethod
    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """The distribution of each entry of the target.

        Args:
            output: the network's, of shape ``(*draws, rows, *more)``.
            **parameters: values of the sites in ``priors``, ``(*draws, *event)``.

        Returns:
            A distribution whose batch shape is ``(*draws, *target)``.

        Raises:
            ValueError: if the output's shape doesn't fit the likelihood.
        """

    def target(self, y: Tensor, shape: torch.Size, output: Tensor) -> Tensor:
        """The target, checked and converted.

        Args:
            y: the target, ``(rows, *more)``.
            shape: the shape that it must have.
            output: the network's.

        Returns:
            The same values, of the output's dtype.

        Raises:
            ValueError: if it has another shape.
        """
        if y.shape != shape:
            raise ValueError(
                f"the target has shape {tuple(y.shape)}, but an output of shape {tuple(output.shape)} and "
                f"{self!r} take one of shape {tuple(shape)}{_cure(y.shape, shape)}"
            )
        return y.to(output.dtype)

    def mixture(self, law: Any) -> Any:
        """The equal mixture of laws along their first dim, if it is of the same family.

        Args:
            law: as :meth:`law` returns it, with one dim of draws.

        Returns:
            The distribution of each entry.

        Raises:
            ValueError: if it isn't.
        """
        raise ValueError(
            f"{type(self).__name__} has no closed form for the probabilities or the entropy of a mixture; "
            "its mean and variance have one: ask for those"
        )


def _cure(got: torch.Size, wanted: torch.Size) -> str:
    if got == (*wanted, 1):
        return "; pass y.squeeze(-1)"
    if wanted == (*got, 1):
        return "; pass y.unsqueeze(-1), or squeeze the output"
    return ""


class Categorical(Likelihood):
    r"""Classes, by logits along the output's last axis.

    .. math::

        p(y_n = k \mid \theta) = \operatorname{softmax}(f_\theta(x_n))_k.

    Args:
        num_data: :math:`N`; by default the rows of a call are all there are.

    Example:
        >>> law = Categorical(num_data=60_000).law(torch.zeros(5, 10))
        >>> law.log_prob(torch.tensor(3))
        tensor([-2.3026, -2.3026, -2.3026, -2.3026, -2.3026])
    """

    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """Integer classes, of shape ``(*draws, rows, *more[:-1])``."""
        return dist.Categorical(logits=output)

    def target(self, y: Tensor, shape: torch.Size, output: Tensor) -> Tensor:
        """The classes, which have to be integers."""
        if y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"the target is of dtype {y.dtype}, but classes are integers 0, 1, …; pass y.long(), or "
                "y.argmax(-1) if it is one-hot"
            )
        return super().target(y, shape, output).to(y.dtype)

    def mixture(self, law: Any) -> Any:
        """Classes again, with averaged probabilities."""
        return dist.Categorical(logits=_log_mean_exp(law.logits))


class Bernoulli(Likelihood):
    r"""Binary targets, by a logit each.

    .. math::

        p(y_n = 1 \mid \theta) = \operatorname{sigmoid}(f_\theta(x_n)).

    Args:
        num_data: :math:`N`; by default the rows of a call are all there are.

    Example:
        >>> Bernoulli().law(torch.zeros(2, 1)).mean
        tensor([[0.5000],
                [0.5000]])
    """

    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """Of the shape of the output."""
        return dist.Bernoulli(logits=output)

    def mixture(self, law: Any) -> Any:
        """Binary again, with averaged probabilities."""
        yes, no = (_log_mean_exp(F.logsigmoid(logits)) for logits in (law.logits, -law.logits))
        return dist.Bernoulli(logits=yes - no)


class Gaussian(Likelihood):
    r"""Real targets with noise of one scale, known or not.

    .. math::

        y_n \sim N(f_\theta(x_n), \sigma^2).

    Args:
        scale: :math:`\sigma`: a number or tensor if it is known, a distribution if not. It is then the site
            ``"noise_scale"``. Either may have one entry for each of the output's last axis.
        num_data: :math:`N`; by default the rows of a call are all there are.

    Raises:
        ValueError: if a known scale is not positive.

    Example:
        >>> unknown = Gaussian(dist.LogNormal(0.0, 1.0), num_data=100)
        >>> unknown.law(torch.zeros(5, 1), noise_scale=torch.tensor(2.0)).stddev.flatten()
        tensor([2., 2., 2., 2., 2.])
    """

    def __init__(self, scale: Any, *, num_data: int | None = None) -> None:
        super().__init__(num_data=num_data)
        self.scale = scale
        if isinstance(scale, Distribution):
            prior: Any = scale
            self.priors = {"noise_scale": prior.to_event(len(scale.batch_shape))}
        elif not (torch.as_tensor(scale) > 0).all():
            raise ValueError(f"scale is {scale!r}; pass what is > 0, or a prior of the site 'noise_scale'")

    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """Of the shape of the output."""
        if not self.priors:
            return dist.Normal(output, torch.as_tensor(self.scale, dtype=output.dtype, device=output.device))
        noise, event_dim = parameters["noise_scale"], self.priors["noise_scale"].event_dim
        lead, event = noise.shape[: noise.dim() - event_dim], noise.shape[noise.dim() - event_dim :]
        return dist.Normal(output, noise.reshape(*lead, *[1] * (output.dim() - noise.dim()), *event))


class HeteroskedasticGaussian(Likelihood):
    r"""Real targets with noise that depends on the input.

    .. math::

        y_n \sim N(\mu_n, \sigma_n^2), \qquad \mu_n = f_\theta(x_n)_{1 \dots k}, \qquad
        \sigma_n = \sigma_{\min} + \operatorname{softplus}(f_\theta(x_n)_{k + 1 \dots 2 k}).

    Without a floor, softplus underflows to a scale of 0 at outputs below -100 in single precision. Weights
    drawn from a wide prior give such outputs.

    Args:
        min_scale: :math:`\sigma_{\min} > 0`, the smallest standard deviation, in units of the targets.
        num_data: :math:`N`; by default the rows of a call are all there are.

    Raises:
        ValueError: if ``min_scale`` is not positive, or on the first call, if the output's last axis is not
            even.

    Example:
        >>> HeteroskedasticGaussian().law(torch.tensor([[1.0, 0.0]])).stddev
        tensor([[0.6941]])
    """

    def __init__(self, *, min_scale: float = 1e-3, num_data: int | None = None) -> None:
        super().__init__(num_data=num_data)
        if not min_scale > 0:
            raise ValueError(f"min_scale is {min_scale!r}; pass a number > 0, in units of the targets")
        self.min_scale = min_scale

    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """Of the output's shape with half its last axis."""
        if output.shape[-1] % 2:
            raise ValueError(
                f"the network's output has shape {tuple(output.shape)}; its last axis has to be even: k "
                "means, then k raw scales"
            )
        mean, raw = output.chunk(2, dim=-1)
        return dist.Normal(mean, self.min_scale + F.softplus(raw))


class Poisson(Likelihood):
    r"""Counts, by the logarithm of a rate each.

    .. math::

        y_n \sim \operatorname{Poisson}(\exp f_\theta(x_n)).

    Args:
        num_data: :math:`N`; by default the rows of a call are all there are.

    Example:
        >>> Poisson().law(torch.zeros(2, 1)).mean
        tensor([[1.],
                [1.]])
    """

    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        """Of the shape of the output."""
        return dist.Poisson(output.exp())


def _log_mean_exp(logs: Tensor) -> Tensor:
    return logs.logsumexp(0) - math.log(len(logs))
