"""The start of a run: from a kernel, model and data to chains before their first step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_sym.model.full_data import FullGradient, find_mode
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Loader, PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.model.program import init_to_prior
from pyro_sym.sgmcmc.bad_start import blame_start
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.control_variate import ControlVariate
from pyro_sym.sgmcmc.kernel import Kernel, State
from pyro_sym.sgmcmc.preconditioners import Identity
from pyro_sym.sgmcmc.schedules import cycle_of
from pyro_sym.sgmcmc.starting_points import (
    as_tensors,
    check_shapes,
    refuse_point,
    starting_points,
    unconstrained_values,
)
from pyro_sym.sgmcmc.step_blocks import FusedSteps, Step

__all__ = ["refuse_copies", "start_chains"]

# The share of drawn starts that may be equal by chance, in single precision.
COPIES_BY_CHANCE = 0.01


def start_chains(
    kernel: Kernel,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_chains: int = 1,
    initial_params: Mapping[str, Tensor] | None = None,
    initial_values: Mapping[str, Tensor] | None = None,
    on_divergence: Literal["raise", "mask"] = "raise",
) -> Chains:
    """Start chains side by side, before their first step, with the model's arguments ``args`` and ``kwargs``.

    ``initial_params`` are unconstrained values by site, each of shape ``(C, *shape)``, and ``initial_values``
    the same as constrained values; by default the kernel's ``init_strategy`` draws them for each chain.
    Raises a ``ValueError`` if the model can't be sampled, or no starting point has a finite potential energy.
    """
    _warn_of_relaxation(kernel)
    given = "initial_params" if initial_values is None else "initial_values"
    if initial_values is not None:
        initial_values = as_tensors(initial_values, given)
    elif initial_params is not None:
        initial_params = as_tensors(initial_params, given)
    source: PlateRows | Loader
    if kernel.batches is None:
        potential = _potential(kernel, args, kwargs, initial_values)
        source = PlateRows(potential.program.plates, num_chains, kernel.shared_minibatch)
    else:
        if args:
            raise ValueError(
                f"the run was given {len(args)} positional arguments, but the model gets its own from "
                "batches; pass keyword arguments only"
            )
        source = Loader(kernel.batches)
        potential = _potential(kernel, source.first().args or (), kwargs, initial_values)
    if initial_values is not None:
        initial_params = unconstrained_values(initial_values, potential, num_chains)
    # Compiled code takes blocks of steps where it can; what is left is too little to compile.
    fuses = (
        kernel.jit == "compile"
        and kernel.batches is None
        and kernel.gradient == "plain"
        and kernel.preconditioner.is_fixed(warming_up=False)
    )
    plain = Gradient(potential, jit="auto" if fuses else kernel.jit)
    position = starting_points(plain, potential, source, num_chains, initial_params, given)
    gradient = plain if kernel.gradient == "plain" else _centred(kernel, plain, potential, source, position)
    fused = None
    if fuses:
        compiled = Gradient(potential, jit="compile")
        fused = FusedSteps(compiled, _step_of_block(kernel), kernel.needs.second_gradient)
    return Chains(kernel, potential, gradient, source, position, on_divergence, fused, blame_start)


def _potential(
    kernel: Kernel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    initial_values: Mapping[str, Tensor] | None,
) -> Potential:
    """The model's potential, recorded from a run where the first chain starts if that is given.

    A model may fail at points that ``init_strategy`` draws, so it is not run there without need. Given values
    at which the model fails are refused later with all the others, by chain and site.
    """
    if initial_values is not None:
        with suppress(ValueError, RuntimeError):
            at_first = partial(_first_of, initial_values, kernel.init_strategy)
            return Potential(kernel.model, args, kwargs, init_strategy=at_first)
    return Potential(kernel.model, args, kwargs, init_strategy=kernel.init_strategy)


def _first_of(values: Mapping[str, Tensor], otherwise: Callable[[Any], Tensor], site: Any) -> Tensor:
    """The value that is given for the first chain, if it has the shape of the site; in the site's dtype."""
    given = values.get(site["name"])
    if given is not None and given.shape[1:] == site["fn"].shape() and given.dim():
        return given[0].to(init_to_prior(site).dtype)
    return otherwise(site)


def _step_of_block(kernel: Kernel) -> Step:
    """A kernel's step, with the inverse mass as the last part of the state, if there is one."""
    has_mass = not isinstance(kernel.preconditioner, Identity)

    def step(
        state: State, gradient: Tensor, noise: Tensor, step_size: Tensor, temperature: Tensor, **more: Any
    ) -> State:
        own, mass = (state[:-1], state[-1:]) if has_mass else (state, ())
        settings = {"step_size": step_size, "temperature": temperature, **more}
        return *kernel.step(own, gradient, noise, inverse_mass=mass[0] if mass else 1.0, **settings), *mass

    return step


def _centred(
    kernel: Kernel, gradient: Gradient, potential: Potential, source: PlateRows | Loader, position: Tensor
) -> ControlVariate:
    full = FullGradient(gradient, source)
    if kernel.center is None:
        center = find_mode(full, position[0])
    else:
        check_shapes(kernel.center, potential, "values of center")
        center = potential.flatten(kernel.center)
        refuse_point(potential, center, "values of center")
    return ControlVariate(gradient, center, *full(center))


def _warn_of_relaxation(kernel: Kernel) -> None:
    """Warn if a kernel can't keep a draw of its cycles, or can't know which to keep."""
    cycle = cycle_of(kernel.temperature)
    if cycle is None or cycle.exploration_steps == 0 or cycle.relaxation is not None:
        return
    name, sampling = type(kernel).__name__, range(cycle.exploration_steps, cycle.period)
    if kernel.relaxation(kernel.step_size_at(sampling[0])) == math.inf:
        message = (
            f"{name} has no friction, so it is not known how long the sampling phases of {cycle!r} take to "
            "relax from temperature 0, and all their draws are kept; their first ones are too narrow. Pass "
            "relaxation=, a number of steps"
        )
    else:
        relaxed = 0.0
        for step in sampling:
            relaxed += kernel.relaxation(kernel.step_size_at(step))
            if relaxed >= 1:
                return
        message = (
            f"no draw can be kept: a sampling phase of {cycle!r} has {len(sampling)} steps, which are "
            f"{relaxed:.2g} of a relaxation time at friction {getattr(kernel, 'friction', 0):g}. Raise "
            "period, sampling_fraction, floor or friction, or pass relaxation=, a number of steps"
        )
    warnings.warn(message, stacklevel=4)


def refuse_copies(chains: Chains, steps: int, *, given: bool) -> None:
    """Refuse chains that would stay copies of each other for all the ``steps`` of a run.

    Chains of equal states stay equal if nothing is drawn for each: at temperature 0 there is no noise, and a
    loader, a shared minibatch, or a model without subsampled plates shows all of them the same data. A few
    equal starts that were drawn, not ``given`` by the user, count as chance.
    """
    source, count = chains.source, len(chains.position)
    own_rows = isinstance(source, PlateRows) and source.plates and source.shape
    if count == 1 or own_rows or not any(chains.temperature_of_chain(chain) == 0 for chain in range(count)):
        return
    copies = _copies(chains)
    if not copies or (not given and len(copies) <= COPIES_BY_CHANCE * count):
        return
    if any(chains.temperature_of_chain(chain, step) > 0 for step in range(steps) for chain in copies[0]):
        return
    first, second = copies[0]
    if isinstance(source, Loader):
        why = "batches come from a loader that all chains share"
    elif source.plates:
        why = "shared_minibatch=True"
    else:
        why = "each step sees all the data"
    raise ValueError(
        f"chains {first} and {second} start at the same point and would stay copies of each other: at "
        f"temperature 0 there is no noise, and {why}. Start each somewhere else, by an init_strategy that "
        "draws (as init_to_sample) or initial_params that differ by chain; or let each draw its own rows, by "
        "a plate with subsample_size; or sample, at a temperature > 0"
    )


def _copies(chains: Chains) -> list[tuple[int, int]]:
    """Pairs of cold chains of equal states, each later chain with the first that it equals."""
    sums = chains.position.sum(-1).tolist()
    alike: dict[float, list[int]] = {}
    copies = []
    for chain, total in enumerate(sums):
        if chains.temperature_of_chain(chain) > 0:
            continue
        for other in alike.setdefault(total, []):
            if all(torch.equal(part[chain], part[other]) for part in chains.state):
                copies.append((other, chain))
                break
        else:
            alike[total].append(chain)
    return copies
