"""Priors of a network's parameters, as functions of (name, parameter, module)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.transforms import ExpTransform

from pyro_sym._private import forget_inverse, without_validation
from pyro_sym.nn.selection import Selector, named
from pyro_sym.unwrap import is_real

__all__ = ["FanInPrior", "IIDPrior", "LayerwisePrior", "Prior", "fan_in", "fitted", "moved"]

_INVERSE = type(ExpTransform().inv)  # the class of inverses that torch makes
Prior = Callable[[str, nn.Parameter, nn.Module], Any]
"""From a parameter's name, the parameter, and the module that holds it, to a distribution whose shape is, or
broadcasts to, the parameter's; ``None`` leaves the parameter deterministic."""


class IIDPrior:
    r"""The same prior for every entry of every parameter.

    .. math::

        p(\theta) = \prod_i p_0(\theta_i).

    Args:
        distribution: :math:`p_0`; one with a shape has to broadcast to every parameter's.

    Example:
        >>> prior = IIDPrior(dist.Normal(0.0, 1.0))
        >>> layer = torch.nn.Linear(3, 2)
        >>> prior("weight", layer.weight, layer)
        Normal(loc: 0.0, scale: 1.0)
    """

    def __init__(self, distribution: Any) -> None:
        self.distribution = distribution

    def __call__(self, name: str, parameter: nn.Parameter, module: nn.Module) -> Any:
        """The distribution."""
        return self.distribution


class FanInPrior:
    r"""Normal priors that keep the scale of activations, whatever the width of the layers.

    .. math::

        W \sim N\left(0, \frac{g^2}{n_{\text{in}}}\right), \qquad b \sim N(0, s_b^2),

    where :math:`n_{\text{in}}` is the number of inputs that one output sums over: channels times the size of
    the window in convolutions, one in embeddings. Parameters of one axis, such as biases and gains of
    normalisations, count as :math:`b`.

    Args:
        gain: :math:`g`, or ``"radford"`` for 1, Radford Neal's scaling, in which wide networks become
            Gaussian processes, or ``"kaiming"`` for :math:`\sqrt 2`, which makes up for the half that a ReLU
            sets to zero.
        bias_scale: :math:`s_b`.

    Raises:
        ValueError: if a number is not positive.

    Example:
        >>> prior = FanInPrior("radford")
        >>> layer = torch.nn.Linear(100, 2)
        >>> prior("weight", layer.weight, layer)
        Normal(loc: 0.0, scale: 0.10000000149011612)

    References:
        Neal 1996, "Bayesian learning for neural networks". He et al. 2015, "Delving deep into rectifiers"
        (arXiv 1502.01852).
    """

    def __init__(
        self, gain: float | Literal["radford", "kaiming"] = "radford", *, bias_scale: float = 1.0
    ) -> None:
        by_name: dict[Any, float] = {"radford": 1.0, "kaiming": math.sqrt(2)}
        self.gain: Any = by_name.get(gain, gain)
        self.bias_scale = bias_scale
        for name, value in (("gain", self.gain), ("bias_scale", bias_scale)):
            if isinstance(value, str) or not value > 0:
                also = " or 'radford' or 'kaiming'" if name == "gain" else ""
                raise ValueError(f"{name} is {value!r}; pass a number > 0{also}")

    def __call__(self, name: str, parameter: nn.Parameter, module: nn.Module) -> Any:
        """The normal distribution of the parameter's entries."""
        if parameter.dim() < 2:
            return dist.Normal(0.0, self.bias_scale)
        return dist.Normal(0.0, self.gain / math.sqrt(fan_in(parameter, module)))


class LayerwisePrior:
    """A prior for each kind of layer: the first that fits a parameter is its prior.

    Args:
        priors: by a name, a pattern of names (``"*.bias"``) or the name of a module; by the type of the
            module that holds the parameter; by a module or parameter itself. The values are priors, or
            ``None`` for parameters that stay deterministic.
        default: the prior of parameters that no key fits; without it they are an error.

    Raises:
        ValueError: on the first call for a parameter without a prior.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> wide = IIDPrior(dist.Normal(0.0, 10.0))
        >>> prior = LayerwisePrior({"*.bias": wide, torch.nn.Linear: FanInPrior()})
        >>> prior("0.bias", net[0].bias, net[0])
        Normal(loc: 0.0, scale: 10.0)
    """

    def __init__(self, priors: Mapping[Selector, Any], *, default: Any = None) -> None:
        self.priors = dict(priors)
        self.default = default

    def __call__(self, name: str, parameter: nn.Parameter, module: nn.Module) -> Any:
        """The distribution by the first prior that fits."""
        fitting = [prior for key, prior in self.priors.items() if _fits(key, name, parameter, module)]
        if not fitting and self.default is None:
            raise ValueError(
                f"no prior fits parameter {name!r} in a {type(module).__name__}; there are priors for "
                f"{list(self.priors)}. Add one, or a default"
            )
        prior = fitting[0] if fitting else self.default
        return prior if prior is None or isinstance(prior, Distribution) else prior(name, parameter, module)


def _fits(selector: Selector, name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    match selector:
        case str():
            return named(selector, name)
        case nn.Parameter():
            return selector is parameter
        case nn.Module():
            return any(own is parameter for own in selector.parameters())
    return isinstance(module, selector)


def fan_in(parameter: Tensor, module: nn.Module) -> int:
    """The number of inputs that one output of a layer sums over."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return 1
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return parameter.shape[0] // module.groups * parameter[0, 0].numel()
    return parameter[0].numel()


def fitted(prior: Any, name: str, parameter: Tensor) -> Any:
    """A prior, checked, as one event of the parameter's shape, dtype and device."""
    what, kind = f"the prior of parameter {name!r}", type(prior)
    if not isinstance(prior, Distribution):
        raise TypeError(f"{what} is {prior!r}; return a distribution, or None for a deterministic parameter")
    if not isinstance(prior, TorchDistributionMixin):
        cure = f"pass Pyro's, pyro.distributions.{kind.__name__}"
        raise TypeError(f"{what} is {prior!r} of {kind.__module__}; {cure}")
    given: Any = moved(prior, parameter)
    if given.support.is_discrete:
        raise ValueError(f"{what} is discrete: {prior!r}; parameters are continuous")
    batch = parameter.shape[: parameter.dim() - len(given.event_shape)]
    try:
        expanded = given.expand(batch).to_event(len(batch))
    except RuntimeError:
        expanded = given
    if expanded.event_shape != parameter.shape:
        shapes = (
            f"{tuple(given.shape())}, which doesn't broadcast to the parameter's, {tuple(parameter.shape)}"
        )
        raise ValueError(f"{what} has shape {shapes}")
    return expanded


def moved(distribution: Any, like: Tensor) -> Any:
    """A copy of a distribution on the device and in the precision of ``like``.

    If the support is all reals, values are not validated, as every value is valid.
    """
    copied = copy.copy(distribution)
    copied.__dict__.update({name: _moved(value, like) for name, value in vars(copied).items()})
    if is_real(distribution.support):
        without_validation(copied)
    return copied


def _moved(value: Any, like: Tensor) -> Any:
    match value:
        case Tensor():
            return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
        case Distribution():
            return moved(value, like)
        case Transform() if isinstance(value, _INVERSE):
            return _moved(value.inv, like).inv
        case Transform():
            copied: Any = copy.copy(value)
            forget_inverse(copied)
            copied.__dict__.update({name: _moved(part, like) for name, part in vars(copied).items()})
            return copied
        case list():
            return [_moved(part, like) for part in value]
    return value
