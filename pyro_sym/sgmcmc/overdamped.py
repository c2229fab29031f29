"""Overdamped Langevin dynamics: SGLD and the scheme of Leimkuhler and Matthews."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, Unpack

from torch import Tensor

from pyro_sym.sgmcmc.from_sgd import Optimizer, check_sgd, sgd_arguments
from pyro_sym.sgmcmc.kernel import Needs, Options, Schedule, State
from pyro_sym.sgmcmc.noise import Scalar, add_scaled, injects, spread
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel

__all__ = ["SGLD", "LeimkuhlerMatthews", "averaged_langevin", "sgld", "sgld_from_sgd"]


def _variance(step_size: Scalar, temperature: Scalar, inverse_mass: Scalar, noise_estimate: Scalar) -> Scalar:
    return 2 * step_size * temperature * inverse_mass - (step_size * inverse_mass) ** 2 * noise_estimate


@injects(_variance)
def sgld(
    position: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> Tensor:
    r"""One step of ``SGLD``, whose docstring has the formula; returns the new position ``u``.

    ``noise``, :math:`\xi`, is standard normal; position, gradient and noise have one shape, to which
    :math:`G` and :math:`\hat B` broadcast. The inputs are not changed. A negative variance of the noise is a
    ``ValueError`` if it is a number (of tensors see :func:`~pyro_sym.sgmcmc.noise.check_noise_estimate`).

    Example:
        >>> u, xi = torch.tensor([1.0]), torch.tensor([0.5])
        >>> sgld(u, u, xi, step_size=0.5, temperature=1.0)
        tensor([1.])
    """
    variance = _variance(step_size, temperature, inverse_mass, noise_estimate)
    sigma = spread(variance, step_size, temperature, noise_estimate)
    return add_scaled(add_scaled(position, -step_size * inverse_mass, gradient), sigma, noise)


@injects(_variance)
def averaged_langevin(
    position: Tensor,
    previous_noise: Tensor,
    gradient: Tensor,
    noise: Tensor,
    *,
    step_size: Scalar,
    temperature: Scalar,
    inverse_mass: Scalar = 1.0,
    noise_estimate: Scalar = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""One step of ``LeimkuhlerMatthews``; returns the position, and ``noise`` for the next step.

    Arguments as for :func:`~pyro_sym.sgmcmc.overdamped.sgld`; ``previous_noise``, :math:`\xi'`, is a fresh
    draw on the first step. Gradient noise is white and the averaged noise is not: with :math:`\hat B`
    subtracted, a variance :math:`h^2 G^2 V / 4` to leading order remains.

    Example:
        >>> u, before, xi = torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([-0.5])
        >>> averaged_langevin(u, before, u, xi, step_size=0.5, temperature=1.0)
        (tensor([0.5000]), tensor([-0.5000]))
    """
    variance = _variance(step_size, temperature, inverse_mass, noise_estimate)
    sigma = spread(variance, step_size, temperature, noise_estimate)
    position = add_scaled(position, -step_size * inverse_mass, gradient)
    return add_scaled(position, sigma / 2, previous_noise + noise), noise


def sgld_from_sgd(lr: float, num_data: int) -> float:
    r"""Step size of the SGLD, or Leimkuhler-Matthews, chain whose cold limit is SGD without momentum.

    ``torch.optim.SGD(lr=lr)`` on the loss :math:`L = U / N` averaged over the :math:`N` rows of the data set
    (``num_data``; 1 if the loss is a sum) is :func:`~pyro_sym.sgmcmc.overdamped.sgld` at :math:`T = 0` with
    :math:`h = \mathrm{lr} / N`. A prior :math:`N(0, s^2)` stands for ``weight_decay`` :math:`1 / (N s^2)`.
    """
    check_sgd(lr, 0.0, num_data)
    return lr / num_data


class SGLD(StochasticGradientKernel):
    r"""Stochastic-gradient Langevin dynamics; its cold limit is SGD.

    .. math::

        u \leftarrow u - h G \nabla U(u) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \xi,

    the Euler scheme of overdamped Langevin dynamics. The variance of a Gaussian of curvature :math:`\lambda`
    comes out as :math:`(T / \lambda) / (1 - h G \lambda / 2)`, and gradient noise of variance :math:`V` adds
    :math:`h V / 2` to the temperature: :class:`~pyro_sym.LeimkuhlerMatthews` removes the first error at the
    same price.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step. Literature that writes
            :math:`\tfrac{\epsilon}{2} \nabla U` has :math:`\epsilon = 2 h`.
        noise_estimate: :math:`\hat B`, the variance that minibatches give each coordinate of the gradient; it
            is taken off the noise.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: if an argument is out of range, or ``noise_estimate`` would make a variance negative.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> mcmc = pyro.infer.MCMC(SGLD(model, step_size=0.1), num_samples=10, disable_progbar=True)
        >>> mcmc.run()
        >>> mcmc.get_samples()["x"].shape
        torch.Size([10])

    References:
        Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics".
    """

    needs: ClassVar[Needs] = Needs(momentum=False)

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        noise_estimate: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, step_size=step_size, **options)
        self.noise_estimate = noise_estimate

    @classmethod
    def from_sgd(
        cls,
        model: Callable[..., Any],
        *,
        num_data: int,
        lr: float | None = None,
        optimizer: Optimizer | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """The chain that is ``torch.optim.SGD(lr=lr)`` on the mean loss at temperature 0.

        Args:
            model: a Pyro model of ``num_data`` rows.
            num_data: :math:`N`, over which the loss is averaged.
            lr: the learning rate.
            optimizer: in place of ``lr``, a ``torch.optim.SGD`` without momentum to read it from, a
                ``pyro.optim.SGD``, or ``(torch.optim.SGD, {"lr": …})``.
            **options: as for the kernel.

        Returns:
            The kernel, with the step size of :func:`~pyro_sym.sgmcmc.overdamped.sgld_from_sgd`.

        Raises:
            TypeError: if neither ``lr`` nor ``optimizer`` is given, or the optimiser is not SGD.
            ValueError: if an argument is out of range, or the optimiser has momentum, weight decay or another
                setting that the kernel has not.
        """
        lr, momentum = sgd_arguments(lr, None, optimizer, num_data)
        if momentum:
            raise ValueError(
                f"optimizer has momentum={momentum:g}, and {cls.__name__} has none; take BAOA or SGHMC"
            )
        return cls(model, step_size=sgld_from_sgd(lr, num_data), **options)

    def step(self, state: State, gradient: Tensor, noise: Tensor, **settings: Any) -> State:
        """One step of :func:`~pyro_sym.sgmcmc.overdamped.sgld`."""
        return (sgld(state[0], gradient, noise, noise_estimate=self.noise_estimate, **settings),)


class LeimkuhlerMatthews(SGLD):
    r"""Overdamped Langevin dynamics with averaged noise: SGLD's price, without its error on a Gaussian.

    .. math::

        u \leftarrow u - h G \nabla U(u) + \sqrt{2 h T G - h^2 G^2 \hat B} \, \tfrac12 (\xi + \xi'),

    :math:`\xi'` being the noise of the step before. The variance of a Gaussian is exact at every stable step
    size, and averages of other targets are in error by :math:`O(h^2)`; gradient noise heats as it does
    :class:`~pyro_sym.SGLD`. The cold limit is SGD.

    Args:
        model: a Pyro model.
        step_size: :math:`h > 0`; a number, or a function of the step.
        noise_estimate: as for :class:`~pyro_sym.SGLD`.
        **options: what every kernel takes (:class:`StochasticGradientKernel`).

    Raises:
        ValueError: as :class:`~pyro_sym.SGLD`.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(0.0, 1.0))
        >>> kernel = LeimkuhlerMatthews(model, step_size=0.5)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=10, disable_progbar=True)
        >>> mcmc.run()

    References:
        Leimkuhler and Matthews 2013, "Rational construction of stochastic numerical methods for molecular
        sampling" (arXiv 1203.5428).
    """

    def init(self, position: Tensor, noise: Tensor, **settings: Any) -> State:
        """The positions, and the noise of a step before the first."""
        return position, noise

    def step(self, state: State, gradient: Tensor, noise: Tensor, **settings: Any) -> State:
        """One step of :func:`~pyro_sym.sgmcmc.overdamped.averaged_langevin`."""
        position, previous = state
        own = {"noise_estimate": self.noise_estimate, **settings}
        return averaged_langevin(position, previous, gradient, noise, **own)
