"""The contract of a stochastic-gradient kernel: how it runs, and which law its chains have."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from torch import Tensor

from pyro_sym.sgmcmc.kernel import Schedule, State
from pyro_sym.sgmcmc.preconditioners import Identity
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC
from pyro_sym.testing.laws import Z_LIMIT, compare, require, try_laws

__all__ = ["check_kernel_contract"]

Make = Callable[..., StochasticGradientKernel]

CHAINS, DIMS = 16, 1_000
#: The share of its starting law that a simulation may retain, and the most steps that it takes.
FORGOTTEN, MAX_STEPS = 1e-4, 3_000


def check_kernel_contract(
    make: Make, *, tolerance: float = 0.05, num_steps: int = 300, seed: int = 0
) -> None:
    r"""Check that a kernel keeps the contract of :class:`~pyro_sym.StochasticGradientKernel`.

    It runs in ``pyro.infer.MCMC`` and :class:`~pyro_sym.VectorizedMCMC`, in single and in double precision,
    and both record its own statistics. A run is reproduced by its seed, and another seed gives another. At
    :math:`T = 0` the seed makes no difference, no random number is consumed, and the energy falls; a kernel
    that declares no cold limit refuses :math:`T = 0`. Momenta start at :math:`N(0, T / G)`, if it declares
    them. :meth:`~pyro_sym.StochasticGradientKernel.step` is a pure function of tensors that takes chains by
    themselves and scalars as tensors (as compiled steps pass them). All it depends on is in its state, so
    that a run can be resumed.

    Then its law, on :math:`U = \tfrac12 \lambda \theta^2`. Where the dynamics is linear, a step is
    :math:`s \leftarrow A s + b \xi` with state :math:`s = (\theta, \dots)`, and the chain's stationary
    covariance solves

    .. math::

        S = A S A^\top + b b^\top.

    :math:`A` and :math:`b` are read off the step. As the step size goes to 0, :math:`S_{\theta \theta}` has
    to go to :math:`T / \lambda`, whatever temperature, curvature and inverse mass; and at the step size of
    the kernel a simulation of 16,000 coordinates has to have the variance :math:`S_{\theta \theta}`, within
    4.27 standard errors of 1.1 % each. Of other dynamics, such as a thermostat's, the simulation has to come
    within ``tolerance`` of :math:`T / \lambda`. Finally, minibatches must not move the mean.

    Args:
        make: the kernel's class, or what makes one: called as ``make(model)``, also with ``temperature=``, a
            number or a function of the step. Other arguments are given by ``functools.partial``. The step
            size has to be stable on a standard normal.
        tolerance: what step sizes may do to the variance, relatively, where the dynamics is not linear.
        num_steps: of the simulation where it is not; of linear ones the step tells how many it takes.
        seed: of the simulations.

    Raises:
        AssertionError: if the contract is broken; the message says how, and by how much.
        ValueError: if the kernel has a preconditioner: its state is not followed here.

    Example:
        >>> from functools import partial
        >>> from pyro_sym import testing
        >>> testing.check_kernel_contract(partial(SGLD, step_size=0.1))

        >>> class TooWarm(SGLD):
        ...     def step(self, *args, temperature, **options):
        ...         return super().step(*args, temperature=2 * temperature, **options)
        >>> testing.check_kernel_contract(partial(TooWarm, step_size=0.1))
        Traceback (most recent call last):
        ...
        AssertionError: TooWarm: as the step size goes to 0, the variance on a Gaussian goes to 2 T / λ, ...
    """
    case = _Case(make, tolerance, num_steps)
    laws = [
        _is_a_kernel,
        _runs_in_both_drivers,
        _is_reproduced_by_its_seed,
        _has_a_cold_limit_or_refuses,
        _starts_at_its_temperature,
        _steps_are_pure,
        _can_be_resumed,
        _has_the_temperature_in_the_limit,
        _has_the_stationary_law,
        _is_unbiased_by_minibatches,
    ]
    try_laws(repr(make), laws, seed, case)


@dataclass
class _Case:
    """How to make the kernel, and the arguments of the check."""

    make: Make
    tolerance: float
    num_steps: int

    def kernel(self, model: Callable[..., Any], temperature: Schedule = 1.0) -> StochasticGradientKernel:
        return self.make(model, temperature=temperature)

    @property
    def name(self) -> str:
        return type(self.make(_normal(1))).__name__

    def path(self, draws: int, seed: int, temperature: Schedule, vectorized: bool = True) -> Tensor:
        """Draws of two chains from one start (of two, at T = 0), or of one chain in Pyro's driver."""
        kernel = self.kernel(_normal(6), temperature)
        start = torch.linspace(-2.0, 2.0, 6, dtype=torch.float64)
        torch.manual_seed(seed)
        if not vectorized:
            mcmc = MCMC(kernel, draws, 0, initial_params={"x": start}, disable_progbar=True)
            mcmc.run()
            return mcmc.get_samples()["x"]
        # Without noise chains of equal starts would be copies, which is refused.
        second = start / 2 if temperature == 0.0 else start
        params = {"x": torch.stack([start, second])}  # (2, 6)
        return _run(kernel, params, draws)


def _is_a_kernel(case: _Case) -> None:
    """The type of what is made."""
    kernel = case.kernel(_normal(1))
    require(
        isinstance(kernel, StochasticGradientKernel),
        f"{case.make!r} makes {kernel!r}, which is no StochasticGradientKernel",
    )
    if not isinstance(kernel.preconditioner, Identity):
        raise ValueError(
            f"{case.name} has the preconditioner {kernel.preconditioner!r}; check the kernel without it, "
            "inverse masses are tried all the same"
        )


def _runs_in_both_drivers(case: _Case) -> None:
    """Runs of a few draws."""
    for dtype in (torch.float32, torch.float64):
        mcmc = MCMC(case.kernel(_normal(3, dtype)), num_samples=4, warmup_steps=1, disable_progbar=True)
        mcmc.run()
        _check_draws(f"{case.name} in MCMC", mcmc.get_samples()["x"], (4, 3), dtype)
        _check_statistics(case, "MCMC", mcmc)
        vectorized = VectorizedMCMC(case.kernel(_normal(3, dtype)), 4, 1, num_chains=2, disable_progbar=True)
        vectorized.run()
        draws = vectorized.get_samples(group_by_chain=True)["x"]
        _check_draws(f"{case.name} in VectorizedMCMC", draws, (2, 4, 3), dtype)
        _check_statistics(case, "VectorizedMCMC", vectorized)


def _check_draws(where: str, draws: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    require(
        draws.shape == shape and draws.dtype == dtype,
        f"{where}: draws of shape {tuple(draws.shape)} and {draws.dtype}, not {shape} and {dtype}",
    )
    require(draws.isfinite().all(), f"{where}: draws are not finite on a standard normal; lower step_size")


def _check_statistics(case: _Case, driver: str, mcmc: Any) -> None:
    kernel = case.kernel(_normal(3))
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    noise = torch.randn(kernel.needs.noise_shape(zeros.shape), dtype=torch.float64)
    own = kernel.statistics(kernel.init(zeros, noise, temperature=1.0, inverse_mass=1.0, sizes=[3]))
    recorded = mcmc.diagnostics()["sample_stats"]["chain 0"]
    for name in own:
        require(name in recorded, f"{case.name}: {driver} does not record the statistic {name!r}")
        require(recorded[name].isfinite().all(), f"{case.name}: the statistic {name!r} is not finite")


def _is_reproduced_by_its_seed(case: _Case) -> None:
    """Seeds."""
    for vectorized in (False, True):
        driver = "VectorizedMCMC" if vectorized else "MCMC"
        once, again = (case.path(5, 1, 1.0, vectorized) for _ in range(2))
        compare(f"{case.name}: two runs under one seed in {driver} differ", {"x": again}, {"x": once})
        other = case.path(5, 2, 1.0, vectorized)
        require(
            not torch.equal(once, other),
            f"{case.name}: runs under two seeds in {driver} are the same; noise has to come from torch's "
            "global generator",
        )
    require(not torch.equal(once[0], once[1]), f"{case.name}: chains that run side by side share their noise")
    scheduled = case.path(5, 1, lambda step: 1.0)
    compare(f"{case.name}: a schedule that stays at 1 gives another run", {"x": scheduled}, {"x": once})


def _has_a_cold_limit_or_refuses(case: _Case) -> None:
    """Temperature 0."""
    if not case.kernel(_normal(6)).needs.cold_limit:
        try:
            case.kernel(_normal(6), 0.0)
        except ValueError:
            return
        require(False, f"{case.name}: it needs a temperature above 0, and takes 0")
    first, second = (case.path(10, seed, 0.0) for seed in (1, 2))
    compare(f"{case.name}: at temperature 0 the path depends on the seed", {"x": second}, {"x": first})
    kernel = case.kernel(_normal(6), 0.0)
    chains = kernel.start(initial_params={"x": torch.ones(1, 6, dtype=torch.float64)})
    before, energy = torch.get_rng_state(), float(chains.energy)
    chains.advance(50, warming_up=False)
    require(
        torch.equal(torch.get_rng_state(), before),
        f"{case.name}: at temperature 0 random numbers are consumed",
    )
    require(
        float(chains.energy) < energy,
        f"{case.name}: in 50 steps at temperature 0 the potential energy goes from {energy:.4g} to "
        f"{float(chains.energy):.4g}; it should fall",
    )


def _starts_at_its_temperature(case: _Case) -> None:
    """init()."""
    mass, needs = 0.5, case.kernel(_normal(1)).needs
    for temperature in (0.0, 0.25, 2.0) if needs.cold_limit else (0.25, 2.0):
        kernel = case.kernel(_normal(500), temperature)
        position = torch.randn(64, 500, dtype=torch.float64)
        noise = bool(temperature) * torch.randn(needs.noise_shape(position.shape), dtype=torch.float64)
        state = kernel.init(position, noise, temperature=temperature, inverse_mass=mass, sizes=[500])
        compare(f"{case.name}: init() moves the position", {"x": state[0]}, {"x": position})
        if not needs.momentum:
            continue
        kinetic = float((mass * state[1] ** 2).mean())
        allowed = Z_LIMIT * temperature * math.sqrt(2 / position.numel())
        require(
            abs(kinetic - temperature) <= allowed,
            f"{case.name}: momenta start at a kinetic temperature of {kinetic:.4g}, not {temperature:g} (± "
            f"{allowed:.1g}); their law is N(0, T / G)",
        )


def _steps_are_pure(case: _Case) -> None:
    """The method step()."""
    for dtype in (torch.float32, torch.float64):
        _steps_are_pure_in(case, dtype)


def _steps_are_pure_in(case: _Case, dtype: torch.dtype) -> None:
    """The same in one precision."""
    kernel = case.kernel(_normal(6))
    numbers = {"step_size": kernel.step_size_at(0), "temperature": 1.0, "inverse_mass": 1.0}
    position, gradient = torch.randn(2, 5, 6, dtype=dtype).unbind()
    noise, start = torch.randn(2, *kernel.needs.noise_shape((5, 6)), dtype=dtype).unbind()
    state = kernel.init(position, start, temperature=1.0, inverse_mass=1.0, sizes=[4, 2])
    before = [part.clone() for part in (*state, gradient, noise)]

    def step(scalars: Mapping[str, Any] = numbers, rows: slice = slice(None)) -> dict[str, Tensor]:
        own = tuple(part[rows] for part in state)
        evaluated = _evaluated(kernel, position[rows])
        moved = kernel.step(own, gradient[rows], noise[..., rows, :], **scalars, **evaluated)
        return {f"part {i} of the state": part for i, part in enumerate(moved)}

    moved = step()
    for name, part, old in zip(moved, moved.values(), state, strict=True):
        require(
            part.shape == old.shape and part.dtype == old.dtype,
            f"{case.name}: step() turns {name} from {tuple(old.shape)}, {old.dtype} into "
            f"{tuple(part.shape)}, {part.dtype}",
        )
    unchanged = all(map(torch.equal, (*state, gradient, noise), before))
    require(unchanged, f"{case.name}: step() changes its inputs")
    what = "draws random numbers of its own, or keeps something outside of the state"
    compare(f"{case.name}: step() called again gives another result, so it {what}", step(), moved)
    one = slice(2, 3)
    alone = {name: part[one] for name, part in moved.items()}
    compare(f"{case.name}: a chain moves otherwise by itself than beside others", step(rows=one), alone)
    for scalars in (numbers, {**numbers, "temperature": 0.0})[: 1 + kernel.needs.cold_limit]:
        tensors = {name: torch.tensor(value, dtype=dtype) for name, value in scalars.items()}
        what = f"tensors instead of numbers for {', '.join(scalars)} change a step"
        compare(f"{case.name}: {what}", step(tensors), step(scalars))


def _can_be_resumed(case: _Case) -> None:
    """A state that is put back."""
    params = {"x": torch.ones(2, 6, dtype=torch.float64)}
    chains = case.kernel(_normal(6)).start(num_chains=2, initial_params=params)
    chains.advance(7, warming_up=False)
    record, random = copy.deepcopy(chains.state_dict()), torch.get_rng_state()
    chains.advance(7, warming_up=False)
    resumed = case.kernel(_normal(6)).start(num_chains=2, initial_params=params)
    resumed.load_state_dict(record)
    torch.set_rng_state(random)
    resumed.advance(7, warming_up=False)
    law = "a run resumed from its state_dict() goes another way; what steps depend on belongs in the state"
    compare(f"{case.name}: {law}", {"x": resumed.position}, {"x": chains.position})


def _has_the_temperature_in_the_limit(case: _Case) -> None:
    """Small steps on a Gaussian."""
    kernel = case.kernel(_normal(1))
    step_size = kernel.step_size_at(0)
    for temperature in (0.25, 1.0, 2.0):
        for curvature, mass in ((1.0, 1.0), (0.25, 1.0), (1.0, 0.5)):
            ratios = []
            for h in (step_size / 64, step_size / 128):
                step = _linear_step(kernel, h, temperature, curvature, mass)
                if step is None:
                    return
                ratios.append(_stationary_variance(case.name, step, h) * curvature / temperature)
            limit = 2 * ratios[1] - ratios[0]  # the error is O(h) at most
            require(
                abs(limit - 1) < 1e-3,
                f"{case.name}: as the step size goes to 0, the variance on a Gaussian goes to {limit:.4g} T "
                f"/ λ, not T / λ, at temperature {temperature:g}, curvature {curvature:g} and inverse mass "
                f"{mass:g}",
            )


def _has_the_stationary_law(case: _Case) -> None:
    """A simulation on a standard normal."""
    for temperature in (0.25, 1.0):
        kernel = case.kernel(_normal(DIMS), temperature)
        step_size = kernel.step_size_at(0)
        step = _linear_step(case.kernel(_normal(1)), step_size, temperature)
        expected, steps, bias = temperature, case.num_steps, case.tolerance
        if step is not None:
            expected, bias = _stationary_variance(case.name, step, step_size), 0.0
            steps = min(MAX_STEPS, math.ceil(math.log(FORGOTTEN) / (2 * math.log(_radius(step)))))
        start = math.sqrt(temperature) * torch.randn(CHAINS, DIMS, dtype=torch.float64)
        variance = float(_run(kernel, {"x": start}, 1, steps).square().mean())
        allowed = bias + Z_LIMIT * math.sqrt(2 / start.numel())
        require(
            abs(variance / expected - 1) <= allowed,
            f"{case.name}: after {steps} steps at temperature {temperature:g} on a standard normal the "
            f"variance is {variance:.4g}, and that of {'its steps' if step else 'the target'} is "
            f"{expected:.4g} (± {allowed:.1%})",
        )


def _is_unbiased_by_minibatches(case: _Case) -> None:
    """A mean from a quarter of the rows at a time."""
    rows, dims, chains = 20, 40, 64
    data = 5 + 5 * torch.randn(rows, dims, dtype=torch.float64)

    def model() -> None:
        prior = dist.Normal(torch.zeros(dims, dtype=torch.float64), math.sqrt(2)).to_event(1)
        x = pyro.sample("x", prior)
        with pyro.plate("rows", rows, subsample_size=rows // 4) as some:
            pyro.sample("y", dist.Normal(x, math.sqrt(2 * rows)).to_event(1), obs=data[some])

    mean = data.mean(0) / 2  # the posterior has curvature 1, half of it from the data
    start = mean + torch.randn(chains, dims, dtype=torch.float64)
    errors = (_run(case.kernel(model), {"x": start}, 1, case.num_steps)[:, 0] - mean).mean(1)
    z = float(errors.mean() / (errors.std() / math.sqrt(chains)))
    require(
        abs(z) < Z_LIMIT + 0.5,  # Student's law with 63 degrees of freedom has longer tails
        f"{case.name}: minibatches move the mean of a conjugate model by {float(errors.mean()):.3g} from "
        f"{float(mean.mean()):.3g}, which is {abs(z):.1f} standard errors",
    )


def _linear_step(
    kernel: StochasticGradientKernel,
    step_size: float,
    temperature: float,
    curvature: float = 1.0,
    mass: float = 1.0,
) -> tuple[Tensor, Tensor] | None:
    """A and b of a step on a Gaussian, if it is linear in state and noise."""
    needs = kernel.needs
    zero = torch.zeros(1, 2, dtype=torch.float64)  # of two coordinates, as a dynamics may need more than one
    noise = zero.expand(needs.noise_shape(zero.shape))
    parts = kernel.init(zero, noise, temperature=temperature, inverse_mass=mass, sizes=[2])
    if any(part.shape != zero.shape for part in parts):
        return None
    k, n = len(parts), needs.noises

    def step(rows: Tensor) -> Tensor:
        both = torch.stack([rows, rows.flip(0)], -1)  # (rows, k + n, 2): other values beside them
        state: State = both[:, :k].unbind(1)
        noise = both[:, k] if n == 1 else both[:, k:].transpose(0, 1)
        numbers = {"step_size": step_size, "temperature": temperature, "inverse_mass": mass}
        evaluated = _evaluated(kernel, state[0], curvature)
        after = kernel.step(state, curvature * state[0], noise, **numbers, **evaluated)
        return torch.stack(after, 1)[..., 0]  # (rows, k)

    columns = step(torch.eye(k + n, dtype=torch.float64)).mT
    anywhere = torch.randn(8, k + n, dtype=torch.float64)
    if not torch.allclose(step(anywhere), anywhere @ columns.mT):
        return None
    return columns[:, :k], columns[:, k:]


def _evaluated(kernel: StochasticGradientKernel, position: Tensor, curvature: float = 1.0) -> dict[str, Any]:
    """What a step gets besides on a Gaussian, if it evaluates again."""
    if not kernel.needs.second_gradient:
        return {}

    def gradient_at(position: Tensor) -> tuple[Tensor, Tensor]:
        return curvature * position.square().sum(-1) / 2, curvature * position

    return {"energy": gradient_at(position)[0], "gradient_at": gradient_at}


def _radius(step: tuple[Tensor, Tensor]) -> float:
    return float(torch.linalg.eigvals(step[0]).abs().max())


def _stationary_variance(name: str, step: tuple[Tensor, Tensor], step_size: float) -> float:
    """The position's, from S = A S Aᵀ + b bᵀ."""
    A, b = step
    require(
        _radius(step) < 1,
        f"{name}: on a Gaussian steps of size {step_size:g} do not forget where they started (spectral "
        f"radius {_radius(step):.4g}); is the step size too large, or the friction missing?",
    )
    equation = torch.eye(len(A) ** 2, dtype=A.dtype) - torch.kron(A, A)
    return float(torch.linalg.solve(equation, (b @ b.mT).flatten())[0])


def _normal(dims: int, dtype: torch.dtype = torch.float64) -> Callable[[], None]:
    """Independent standard normals."""

    def model() -> None:
        pyro.sample("x", dist.Normal(torch.zeros(dims, dtype=dtype), 1.0).to_event(1))

    return model


def _run(
    kernel: StochasticGradientKernel, params: dict[str, Tensor], draws: int, thinning: int = 1
) -> Tensor:
    """Draws by chain."""
    mcmc = VectorizedMCMC(
        kernel, draws, 0, len(params["x"]), thinning, initial_params=params, disable_progbar=True
    )
    mcmc.run()
    return mcmc.get_samples(group_by_chain=True)["x"]
