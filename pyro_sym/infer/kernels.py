"""Stochastic-gradient MCMC kernels for ``pyro.infer.MCMC``: one skeleton, and a dynamics each."""

from __future__ import annotations

import math
import multiprocessing
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_sym.errors import DivergenceError
from pyro_sym.infer.dynamics import baoa
from pyro_sym.infer.potential import Potential

__all__ = ["BAOA", "StochasticGradientKernel"]

Schedule = float | Callable[[int], float]
"""A constant, or a function of the step (counted from 0, warm-up included)."""


@dataclass
class _Chain:
    """Where a run stands; energy and gradient are at ``position``, on the minibatch of the next step."""

    potential: Potential
    position: Tensor  # shape: (d,)
    momentum: Tensor  # shape: (d,)
    energy: Tensor  # shape: ()
    gradient: Tensor  # shape: (d,)
    start: dict[str, Tensor]
    params: dict[str, Tensor]
    warmup_draws_left: int
    step: int = 0
    step_size: float = math.nan
    temperature: float = math.nan
    stats: dict[str, list[float]] = field(default_factory=dict)


class StochasticGradientKernel(MCMCKernel):
    r"""What all stochastic-gradient kernels share; a kernel adds its dynamics by implementing :meth:`move`.

    The potential energy :math:`U` is the full negative log joint in unconstrained space
    (:class:`~pyro_sym.infer.potential.Potential`), the target

    .. math::

        \pi_T(u) \propto \exp(-U(u) / T) = \left( p(\theta, D) \, |\det \partial \theta / \partial u|
        \right)^{1/T}.

    Each step draws a fresh minibatch for every subsampled plate of the model and takes one gradient. Momenta
    start at :math:`N(0, T)`. At :math:`T = 0` the dynamics is deterministic and consumes no random numbers.
    The kernel runs in ``pyro.infer.MCMC`` and ``StreamingMCMC``; it draws from torch's global generator
    (``pyro.set_rng_seed``).

    Args:
        model: a Pyro model. Its arguments are those of ``MCMC.run``.
        step_size: positive; a number, or a function of the step.
        temperature: :math:`T \ge 0`; a number, or a function of the step.
        thinning: steps per draw, in warm-up as well.
        init_strategy: a per-site function, as in Pyro's autoguides, that gives the initial values.

    Attributes:
        initial_params: unconstrained values by site that chains start from. Set them before the run (``MCMC``
            does so with its own ``initial_params``), or ``init_strategy`` draws them anew for each chain.
        transforms: by site, from constrained to unconstrained values; known once a run has started.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        temperature: Schedule = 1.0,
        thinning: int = 1,
        init_strategy: Callable[[Any], Tensor] = init_to_uniform,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model is {model!r}; pass a Pyro model, that is, a callable")
        if type(thinning) is not int or thinning < 1:  # a bool is an int, too
            raise ValueError(f"thinning is {thinning!r}; it counts steps per draw, so pass an integer >= 1")
        if not callable(step_size):
            _check_step_size(step_size)
        if not callable(temperature):
            _check_temperature(temperature)
        self.model = model
        self.step_size = step_size
        self.temperature = temperature
        self.thinning = thinning
        self.init_strategy = init_strategy
        self.transforms: dict[str, Transform] | None = None
        self._given: list[dict[str, Tensor]] = []
        self._chain: _Chain | None = None

    @abstractmethod
    def move(
        self,
        position: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        noise: Tensor,
        *,
        step_size: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """One step of the dynamics.

        Args:
            position: flat unconstrained values, of shape ``(d,)``.
            momentum: of shape ``(d,)``.
            gradient: of the potential energy at ``position``, of shape ``(d,)``.
            noise: standard normal draws, of shape ``(d,)``; zeros where the temperature is 0.
            step_size: of this step.
            temperature: of this step.

        Returns:
            The new position and momentum; the inputs must not be changed.
        """

    @property
    def initial_params(self) -> Mapping[str, Tensor] | None:
        """Unconstrained values by site that the chain starts from."""
        return self._own_params() if self._chain is None else self._chain.start

    @initial_params.setter
    def initial_params(self, params: Mapping[str, Tensor] | None) -> None:
        given = [] if params is None else [{name: value.detach() for name, value in params.items()}]
        # Pyro's MCMC, if it runs chains in processes, sets the values of all chains on one and the same
        # kernel before it starts the first process, so that the last chain's would win. They are rows of one
        # tensor.
        self._given = self._given + given if given and _share_storage(self._given[-1:] + given) else given

    def _own_params(self) -> dict[str, Tensor] | None:
        """The values given for this chain. MCMC names its processes by chain."""
        chain = multiprocessing.current_process().name
        if chain.isdigit() and int(chain) < len(self._given):
            return self._given[int(chain)]
        return self._given[-1] if self._given else None

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Start a chain; ``MCMC`` calls this.

        Args:
            warmup_steps: number of draws that keep no statistics.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the model can't be sampled, or no point to start from has a finite potential
                energy.
        """
        potential = Potential(self.model, args, kwargs, init_strategy=self.init_strategy)
        given = self._own_params()
        params = potential.initial() if given is None else _checked(given, potential)
        self._given = [] if given is None else [params]
        position = potential.flatten(params)
        temperature = self._temperature_at(0)
        momentum = math.sqrt(temperature) * _noise_like(position, temperature)
        energy, gradient = potential.value_and_grad(position, potential.draw_indices())
        self.transforms = potential.transforms
        self._chain = _Chain(potential, position, momentum, energy, gradient, params, params, warmup_steps)

    def sample(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take ``thinning`` steps.

        Args:
            params: unconstrained values by site; the chain goes on from them.

        Returns:
            Unconstrained values by site, after the steps.

        Raises:
            DivergenceError: if a position, gradient or potential energy is not finite; the message names the
                step and the first site.
        """
        chain = self._running()
        # Pyro validates every argument of every distribution by default, at a third of the cost of a step.
        with pyro.validation_enabled(False), torch.no_grad():
            if params is not chain.params:
                chain.position = chain.potential.flatten(params)
                self._evaluate(chain)
            for _ in range(self.thinning):
                self._step(chain)
        chain.params = chain.potential.unflatten(chain.position)
        if chain.warmup_draws_left > 0:
            chain.warmup_draws_left -= 1
        else:
            _record(chain)
        return chain.params

    def _running(self) -> _Chain:
        if self._chain is None:
            raise RuntimeError("the kernel has no chain; call setup(warmup_steps, *args, **kwargs) first")
        return self._chain

    def _step(self, chain: _Chain) -> None:
        chain.step_size = self._step_size_at(chain.step)
        chain.temperature = self._temperature_at(chain.step)
        chain.position, chain.momentum = self.move(
            chain.position,
            chain.momentum,
            chain.gradient,
            _noise_like(chain.position, chain.temperature),
            step_size=chain.step_size,
            temperature=chain.temperature,
        )
        self._evaluate(chain)
        chain.step += 1

    def _evaluate(self, chain: _Chain) -> None:
        """Evaluate potential energy and gradient at the chain's position, on a fresh minibatch."""
        if not _is_finite(chain.position):  # a model may fail in ways of its own at such a position
            self._report(chain, "position", chain.potential.unflatten(chain.position))
        indices = chain.potential.draw_indices()
        chain.energy, chain.gradient = chain.potential.value_and_grad(chain.position, indices)
        if not _is_finite(chain.gradient):
            self._report(chain, "gradient", chain.potential.unflatten(chain.gradient))
        if not _is_finite(chain.energy):
            values = chain.potential.constrain(chain.potential.unflatten(chain.position))
            self._report(chain, "log probability", chain.potential.program.log_joint_terms(values, indices))

    def _report(self, chain: _Chain, what: str, sites: Mapping[str, Tensor]) -> None:
        first = next((name for name, value in sites.items() if not torch.isfinite(value).all()), None)
        where = "the sum over sites" if first is None else f"site {first!r}"
        raise DivergenceError(
            f"step {chain.step}: the {what} of {where} is not finite; lower step_size ({chain.step_size:g} "
            "at this step), or see whether the model's log density is finite where the chain has come to"
        )

    def _step_size_at(self, step: int) -> float:
        return _check_step_size(self.step_size(step), step) if callable(self.step_size) else self.step_size

    def _temperature_at(self, step: int) -> float:
        if callable(self.temperature):
            return _check_temperature(self.temperature(step), step)
        return self.temperature

    def end_warmup(self) -> None:
        """End the warm-up: statistics are kept from the next draw on."""
        self._running().warmup_draws_left = 0

    def logging(self) -> dict[str, str]:
        """What the progress bar shows: step size, temperature, potential energy and kinetic temperature."""
        chain = self._running()
        return OrderedDict(
            {
                "step size": f"{chain.step_size:.2e}",
                "temp.": f"{chain.temperature:.2g}",
                "potential": f"{chain.energy.item():.4g}",
                "kinetic temp.": f"{_kinetic_temperature(chain):.2g}",
            }
        )

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        r"""Statistics of the draws after warm-up, each at the position and momentum of the draw itself.

        ``potential_energy`` is :math:`U`, the negative log joint in unconstrained space (with its Jacobian);
        with subsampled plates it is the unbiased estimate on a minibatch that is independent of the draw.
        ``lp`` is :math:`-U`, the unnormalised log posterior density, as ArviZ has it, not divided by the
        temperature. ``energy`` is :math:`U + m \cdot m / 2`, ``kinetic_temperature`` is :math:`m \cdot m /
        d`, whose mean is near ``temperature`` if step size and minibatch noise heat the chain little.
        ``step_size`` and ``temperature`` are those of the last step of the draw.

        Returns:
            ``{"sample_stats": {name: tensor}}``, each tensor in float64 and of shape ``(draws,)``.
            ``MCMC.diagnostics()["sample_stats"]`` holds one such dict for each of ``"chain 0"``, ``"chain
            1"``, …
        """
        stats = self._running().stats
        return {"sample_stats": {name: torch.tensor(v, dtype=torch.float64) for name, v in stats.items()}}

    def cleanup(self) -> None:
        """Forget the chain, and the data with it; ``transforms`` stay."""
        self._chain = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickled kernel (``MCMC`` sends one to each process) is one before its run."""
        return {**self.__dict__, "_chain": None, "transforms": None}


class BAOA(StochasticGradientKernel):
    r"""Underdamped Langevin dynamics by the BAOA splitting; its cold limit is SGD with momentum.

    The target is the tempered posterior :math:`p(\theta, D)^{1/T}`, tempered in unconstrained space: at
    :math:`T = 1` the posterior, while at :math:`T = 0` the chain descends to a mode of the log joint.
    Constrained sites bring their Jacobian along, :math:`\exp(-U(u)/T)` with :math:`U = -\log p(\theta, D) -
    \log |\det \partial \theta / \partial u|`: as a density of :math:`\theta` the target then carries the
    Jacobian to the power :math:`1/T - 1`. With :math:`c = e^{-\gamma h}`, unit mass and standard normal
    :math:`\xi`, a step is

    .. math::

        m &\leftarrow m - h \nabla U(u) \\
        u &\leftarrow u + \tfrac{h}{2} m \\
        m &\leftarrow c m + \sqrt{T (1 - c^2)} \, \xi \\
        u &\leftarrow u + \tfrac{h}{2} m

    where :math:`U` is scaled up from the minibatch by the model's own plates. On a Gaussian the variance is
    exact for any stable step size (:math:`h^2 \lambda < 4` at curvature :math:`\lambda`) if the gradient is;
    gradient noise of variance :math:`V` adds :math:`V h^2 (1 + c) / (\lambda (1 - c) (4 - h^2 \lambda))`, to
    leading order a heating by :math:`h V / (2 \gamma)`. Nothing is rejected: lower the step size and compare.

    At :math:`T = 0` the chain *is* ``torch.optim.SGD(lr=h**2 / 2 * (1 + c), momentum=c)`` on :math:`U`, from
    step 1 on. In the terms of a loss averaged over :math:`N` rows, SGD with ``lr`` and ``momentum``
    :math:`\mu` is :math:`h = \sqrt{2 \, \mathrm{lr} / (N (1 + \mu))}` and :math:`\gamma = -\ln(\mu) / h`.

    Args:
        model: a Pyro model. Its arguments are those of ``MCMC.run``; ``plate(subsample_size=…)`` gets fresh
            indices each step.
        step_size: :math:`h > 0`; a number, or a function of the step (counted from 0, warm-up included).
        friction: :math:`\gamma > 0`, per unit of time; ``math.inf`` forgets the momentum each step.
        temperature: :math:`T \ge 0`; a number, or a function of the step.
        thinning: steps per draw, in warm-up as well.
        init_strategy: a per-site function, as in Pyro's autoguides, that gives the initial values.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("rows", len(y), subsample_size=20) as rows:
        ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
        >>> kernel = BAOA(model, step_size=0.02, friction=5.0, thinning=5)
        >>> mcmc = pyro.infer.MCMC(kernel, num_samples=100, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run(torch.ones(100))
        >>> mcmc.get_samples()["mean"].shape
        torch.Size([100])
        >>> mcmc.diagnostics()["sample_stats"]["chain 0"]["potential_energy"].shape
        torch.Size([100])

    Source:
        Wenzel et al. 2020, "How good is the Bayes posterior in deep neural networks really?" (arXiv
        2002.02405); Duffield et al. 2025, "Scalable Bayesian learning with posteriors" (arXiv 2406.00104).
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        step_size: Schedule,
        friction: float = 1.0,
        temperature: Schedule = 1.0,
        thinning: int = 1,
        init_strategy: Callable[[Any], Tensor] = init_to_uniform,
    ) -> None:
        super().__init__(
            model,
            step_size=step_size,
            temperature=temperature,
            thinning=thinning,
            init_strategy=init_strategy,
        )
        if not friction > 0:
            raise ValueError(
                f"friction is {friction}; without friction there is no noise to hold the temperature, so "
                "pass a number > 0"
            )
        self.friction = friction

    def move(
        self,
        position: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        noise: Tensor,
        *,
        step_size: float,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """One step of :func:`~pyro_sym.infer.dynamics.baoa`."""
        return baoa(
            position,
            momentum,
            gradient,
            noise,
            step_size=step_size,
            friction=self.friction,
            temperature=temperature,
        )


def _checked(params: Mapping[str, Tensor], potential: Potential) -> dict[str, Tensor]:
    """The initial values in the shapes, order and dtypes of the potential's."""
    if set(params) != set(potential.shapes):
        raise ValueError(
            f"initial_params are given for {sorted(params)}; the model's latent sites are "
            f"{sorted(potential.shapes)}"
        )
    for name, shape in potential.shapes.items():
        if params[name].shape != shape:
            raise ValueError(
                f"initial_params of site {name!r} have shape {tuple(params[name].shape)}; its "
                f"unconstrained values have shape {tuple(shape)}"
            )
    params = potential.unflatten(potential.flatten(params))
    at_fault = potential.non_finite_sites(params, potential.draw_indices())
    if at_fault:
        raise ValueError(
            f"initial_params are no place to start; not finite there: {', '.join(at_fault)}. They are taken "
            "as unconstrained values"
        )
    return params


def _share_storage(several: list[dict[str, Tensor]]) -> bool:
    first = several[0]
    return all(
        params.keys() == first.keys()
        and all(
            v.untyped_storage().data_ptr() == first[n].untyped_storage().data_ptr() for n, v in params.items()
        )
        for params in several
    )


def _check_step_size(value: float, step: int | None = None) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"step_size is {value}{_at(step)}; pass a finite number > 0")
    return value


def _check_temperature(value: float, step: int | None = None) -> float:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"temperature is {value}{_at(step)}; pass a finite number >= 0")
    return value


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _noise_like(position: Tensor, temperature: float) -> Tensor:
    """Draw standard normal noise, or zeros where it drops out: no random number is consumed at T = 0."""
    return torch.randn_like(position) if temperature > 0 else torch.zeros_like(position)


def _is_finite(value: Tensor) -> bool:
    # A sum is half the price of isfinite().all() and can only err on the side of caution, by overflow.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def _kinetic_temperature(chain: _Chain) -> float:
    return (chain.momentum @ chain.momentum).item() / len(chain.momentum)


def _record(chain: _Chain) -> None:
    energy, kinetic = chain.energy.item(), _kinetic_temperature(chain)
    draw = {
        "lp": -energy,
        "energy": energy + kinetic * len(chain.momentum) / 2,
        "potential_energy": energy,
        "kinetic_temperature": kinetic,
        "step_size": chain.step_size,
        "temperature": chain.temperature,
    }
    for name, value in draw.items():
        chain.stats.setdefault(name, []).append(value)
