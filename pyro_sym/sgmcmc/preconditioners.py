r"""How fast each coordinate moves: inverse masses :math:`G`, given or learnt from gradients.

A preconditioner is a rule without state; its state is a dict of tensors that the chain carries along.
Positions and gradients have shape ``(C, d)``, a row a chain, whose coordinates are those of the sites one
after another. A step of a chain updates the state with the gradient at its position, rescales the momentum to
the new inverse mass and moves by it:

    >>> rule, gradient = RMSprop(), torch.tensor([[3.0, -0.5]])
    >>> state = rule.init(position=torch.zeros(1, 2), segments=[2])
    >>> state = rule.update(state, gradient, warming_up=True)
    >>> rule.inverse_mass(state)
    tensor([[ 3.3332, 19.9960]])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Diagonal", "Identity", "PerSite", "Preconditioner", "RMSprop", "rescale_momentum"]

State = Mapping[str, Tensor]


class Preconditioner(ABC):
    """What all preconditioners offer.

    They are immutable and take tensors to tensors, so that a step with one can be traced.
    """

    @abstractmethod
    def init(self, position: Tensor, segments: Sequence[int]) -> dict[str, Tensor]:
        """Return the state before any gradient; ``segments``, the sizes of the sites, sum to ``d``."""

    @abstractmethod
    def update(self, state: State, gradient: Tensor, warming_up: bool) -> dict[str, Tensor]:
        """Return the state after one more gradient, of shape ``(C, d)``; the one handed in is not changed."""

    @abstractmethod
    def inverse_mass(self, state: State) -> Tensor | None:
        """Return the inverse mass, broadcastable to ``(C, d)``, or None if it is 1."""

    @abstractmethod
    def is_fixed(self, warming_up: bool) -> bool:
        """Tell whether :meth:`update` changes nothing, in warm-up or after it."""


class _Fixed(Preconditioner):
    """A preconditioner that learns nothing: its inverse mass is 1 by default."""

    def update(self, state: State, gradient: Tensor, warming_up: bool) -> dict[str, Tensor]:
        """Return the state."""
        return dict(state)

    def inverse_mass(self, state: State) -> Tensor | None:
        """Return None: the inverse mass is 1."""
        return None

    def is_fixed(self, warming_up: bool) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Identity(_Fixed):
    """No preconditioner: all coordinates have unit mass.

    Example:
        >>> Identity().inverse_mass({}) is None
        True
    """

    def init(self, position: Tensor, segments: Sequence[int]) -> dict[str, Tensor]:
        """Return a state of nothing."""
        _check_segments(position, segments)
        return {}


@dataclass(frozen=True)
class Diagonal(_Fixed):
    r"""One number a coordinate, given by the user: a rough idea of the variances of the target.

    .. math::

        G_i = v_i,

    so that ``step_size`` counts in standard deviations :math:`\sqrt{v_i}`. As :math:`G` is a constant, the
    target stays :math:`\exp(-U / T)` however rough the :math:`v_i` are. Good ones are variances in a pilot
    run, or :math:`1 / H_{ii}` with :math:`H` the Hessian of the potential energy at a mode; the curvatures
    that bound the step size are then the eigenvalues of :math:`H_{ij} \sqrt{v_i v_j}`, at most :math:`d`.

    Args:
        variances: :math:`v_i > 0`, a number for each unconstrained value, in the order of ``shapes`` of
            :class:`~pyro_sym.model.potential.Potential`; its ``flatten`` makes them of values by site.

    Raises:
        ValueError: if a variance is not a finite number above 0, or, at the start of a run, if there are not
            as many as unconstrained values.

    Example:
        >>> rule = Diagonal(torch.tensor([4.0, 0.25, 1.0]))
        >>> rule.inverse_mass(rule.init(torch.zeros(1, 3), segments=[1, 2]))
        tensor([4.0000, 0.2500, 1.0000])
    """

    variances: Sequence[float] | Tensor

    def __post_init__(self) -> None:
        numbers = torch.as_tensor(self.variances, dtype=torch.float64)
        wrong = ~((numbers > 0) & (numbers < math.inf))
        if numbers.dim() != 1 or wrong.any():
            shown = f"has shape {tuple(numbers.shape)}"
            if numbers.dim() == 1:
                first = int(wrong.nonzero()[0])
                shown = f"has {numbers[first].item()} at coordinate {first}"
            raise ValueError(f"variances {shown}; pass a vector of finite numbers > 0")
        object.__setattr__(self, "variances", tuple(numbers.tolist()))  # which is immutable, and compares

    def init(self, position: Tensor, segments: Sequence[int]) -> dict[str, Tensor]:
        """Return a state of the inverse mass."""
        _check_segments(position, segments)
        if len(self.variances) != position.shape[-1]:
            raise ValueError(
                f"variances has {len(self.variances)} numbers, but there are {position.shape[-1]} "
                f"unconstrained values, {tuple(segments)} by site; pass one for each"
            )
        return {"inverse_mass": position.new_tensor(self.variances)}

    def inverse_mass(self, state: State) -> Tensor:
        """Return the inverse mass, of shape ``(d,)``."""
        return state["inverse_mass"]


@dataclass(frozen=True)
class PerSite(Preconditioner):
    r"""One number a site, learnt in warm-up and fixed after: sites with noisy gradients get a larger mass.

    .. math::

        G_s = \frac{\min_r \sigma_r}{\sigma_s}, \qquad
        \sigma_s^2 = \text{mean over chains and the coordinates of } s \text{ of } \operatorname{Var}_t
        \left[ \partial_i U_t(\theta_t) \right],

    the variance being that over the gradients of warm-up, each on its own minibatch. The site with the least
    noise has :math:`G = 1`, so that ``step_size`` is the one that this site takes, and no site moves faster
    than without a preconditioner. As :math:`G` is a constant after warm-up, the target stays
    :math:`\exp(-U / T)`. All chains share it.

    Gradients vary by minibatches and because the chain moves. Give warm-up the time to forget a start far out
    in the tails, or the variance is that of the descent.

    Args:
        max_ratio: a site's :math:`\sigma` counts as at least the largest one divided by this, so that
            :math:`G \ge 1 /` ``max_ratio``, though one site had no noise at all.

    Raises:
        ValueError: if ``max_ratio`` is below 1 or not finite.

    Example:
        >>> rule = PerSite()
        >>> state = rule.init(torch.zeros(1, 3), segments=[1, 2])
        >>> for g in (torch.tensor([[1.0, 4.0, 4.0]]), torch.tensor([[-1.0, -4.0, 4.0]])):
        ...     state = rule.update(state, g, warming_up=True)
        >>> rule.inverse_mass(state)
        tensor([1.0000, 0.3536, 0.3536])

    References:
        Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?" (arXiv
        2002.02405), their layerwise preconditioner.
    """

    max_ratio: float = 1000.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_ratio < math.inf:
            raise ValueError(f"max_ratio is {self.max_ratio}; pass a finite number >= 1")

    def init(self, position: Tensor, segments: Sequence[int]) -> dict[str, Tensor]:
        """Return the state before any gradient is seen: the inverse mass is 1."""
        _check_segments(position, segments)
        return {
            "count": position.new_zeros(()),
            "mean": torch.zeros_like(position),
            "scatter": torch.zeros_like(position),
            "sizes": torch.tensor(list(segments), device=position.device),
            "inverse_mass": torch.ones_like(position[0]),
        }

    def update(self, state: State, gradient: Tensor, warming_up: bool) -> dict[str, Tensor]:
        """Return the state after one more gradient; after warm-up it does not change."""
        if not warming_up:
            return dict(state)
        # Welford: mean and sum of squared deviations in one pass, without cancellation
        count = state["count"] + 1
        deviation = gradient - state["mean"]
        mean = state["mean"] + deviation / count
        scatter = state["scatter"] + deviation * (gradient - mean)
        variance = (scatter / (count - 1).clamp(min=1)).mean(0)
        sizes = state["sizes"]
        sigma = torch.segment_reduce(variance, "mean", lengths=sizes, unsafe=True).sqrt()
        # All are alike, and G = 1, until gradients differ.
        sigma = sigma.clamp(min=sigma.max() / self.max_ratio).clamp(min=torch.finfo(sigma.dtype).tiny)
        ratio = sigma.min() / sigma
        return {
            "count": count,
            "mean": mean,
            "scatter": scatter,
            "sizes": sizes,
            "inverse_mass": ratio.repeat_interleave(sizes, output_size=len(variance)),
        }

    def inverse_mass(self, state: State) -> Tensor:
        """Return the inverse mass, of shape ``(d,)``."""
        return state["inverse_mass"]

    def is_fixed(self, warming_up: bool) -> bool:
        """Return whether warm-up is over."""
        return not warming_up


@dataclass(frozen=True)
class RMSprop(Preconditioner):
    r"""The inverse root mean square of recent gradients, coordinate by coordinate and chain by chain.

    .. math::

        V \leftarrow \alpha V + (1 - \alpha) \, (\nabla U)^2, \qquad G = \frac{1}{\sqrt{V} + \epsilon}.

    With SGLD this is pSGLD; at :math:`T = 0` SGLD with it is ``torch.optim.RMSprop`` on :math:`U` with ``lr``
    the step size, from the first step on. Gradients are those of :math:`U`, summed over the data: a loss
    averaged over :math:`N` rows has an ``eps`` :math:`N` times smaller.

    **The target is not kept exactly.** An inverse mass that depends on the position asks for the drift
    :math:`T \Gamma`, :math:`\Gamma_i = \partial G_i / \partial \theta_i`, which is left out here, as in
    pSGLD. Through the gradient of the step itself it is

    .. math::

        \Gamma_i = -(1 - \alpha) \, \frac{G_i^2 \, \partial_i U}{\sqrt{V_i}} \,
        \frac{\partial^2 U}{\partial \theta_i^2} = O(1 - \alpha),

    and the error is of that order while a chain crosses its posterior within the :math:`1 / (1 - \alpha)`
    steps that :math:`V` remembers. With smaller steps :math:`V` follows the chain, :math:`\Gamma` is of order
    1, and the law in one dimension becomes :math:`\propto \exp(-U / T) / G(\theta)`, with :math:`V` the local
    mean square of gradients: for a standard normal with exact gradients a variance of 2 in place of 1. The
    error is small where minibatch noise dominates :math:`V`, as it then hardly depends on the position. Where
    that matters use :class:`PerSite`, which is exact.

    Args:
        decay: :math:`\alpha` in :math:`[0, 1)`.
        eps: :math:`\epsilon > 0`, in units of the gradient; :math:`1 / \epsilon` bounds :math:`G`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> rule = RMSprop(decay=0.75, eps=1e-8)
        >>> state = rule.init(torch.zeros(2, 1), segments=[1])
        >>> state = rule.update(state, torch.tensor([[4.0], [-8.0]]), warming_up=False)
        >>> rule.inverse_mass(state)
        tensor([[0.5000],
                [0.2500]])

    References:
        Li et al. 2016, "Preconditioned stochastic gradient Langevin dynamics for deep neural networks" (arXiv
        1512.07666).
    """

    decay: float = 0.99
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}; pass a number >= 0 and < 1")
        if not 0 < self.eps < math.inf:
            raise ValueError(
                f"eps is {self.eps}; it bounds the inverse mass by 1 / eps, so pass a number > 0"
            )

    def init(self, position: Tensor, segments: Sequence[int]) -> dict[str, Tensor]:
        """Return the state before any gradient is seen."""
        _check_segments(position, segments)
        return {"square": torch.zeros_like(position)}

    def update(self, state: State, gradient: Tensor, warming_up: bool) -> dict[str, Tensor]:
        """Return the state after one more gradient, in warm-up and after."""
        return {"square": self.decay * state["square"] + (1 - self.decay) * gradient**2}

    def inverse_mass(self, state: State) -> Tensor:
        """Return the inverse mass, of shape ``(C, d)``."""
        return 1 / (state["square"].sqrt() + self.eps)

    def is_fixed(self, warming_up: bool) -> bool:
        """Return False: it follows the chain."""
        return False


def rescale_momentum(momentum: Tensor, old: Tensor | None, new: Tensor | None) -> Tensor:
    r"""Take momenta ``(C, d)`` of law :math:`N(0, T / G)` to the same law under another inverse mass.

    .. math::

        m \leftarrow \sqrt{G_{\text{old}} / G_{\text{new}}} \; m,

    with None for :math:`G = 1`. The covariance of order :math:`h` that position and momentum have between
    steps is scaled along, and recovers in a relaxation time.
    """
    if old is not None:
        momentum = momentum * old.sqrt()
    if new is not None:
        momentum = momentum / new.sqrt()
    return momentum


def _check_segments(position: Tensor, segments: Sequence[int]) -> None:
    if position.dim() != 2 or sum(segments) != position.shape[-1]:
        raise ValueError(
            f"segments {tuple(segments)} have {sum(segments)} coordinates, the position has shape "
            f"{tuple(position.shape)}; pass a position of shape (C, d) and the sizes of its sites, which sum "
            "to d"
        )
