"""Where chains start: at finite points that fit the model, whose sites all have a density."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_sym._random import fork_random_state
from pyro_sym.model.gradient import Gradient, chain_slices
from pyro_sym.model.minibatch import Loader, Minibatch, PlateRows
from pyro_sym.model.potential import Potential

__all__ = [
    "as_tensors",
    "check_shapes",
    "refuse_flat_sites",
    "refuse_point",
    "starting_points",
    "unconstrained_values",
]

# How many points are tried to find out whether the log density depends on a site.
NUM_PROBES = 20
# Messages show values of at most this many numbers.
MOST_SHOWN = 4


def starting_points(
    gradient: Gradient,
    potential: Potential,
    source: PlateRows | Loader,
    num_chains: int,
    given: Mapping[str, Tensor] | None,
    what: str = "initial_params",
) -> Tensor:
    """Flat positions ``(C, d)`` with finite energies and gradients.

    ``given`` are unconstrained values by site, each of shape ``(C, *shape)``, by the argument ``what``;
    without them the model's ``init_strategy`` draws each chain.
    """
    if given is not None:
        check_shapes(given, potential, what, num_chains)
        given = {n: given[n].to(site.value.dtype) for n, site in potential.program.latents.items()}
    position = torch.empty(0)
    for chain in range(num_chains):
        if given is None:
            row = potential.unconstrain(potential.program.draw()[0])
        else:
            row = {name: value[chain] for name, value in given.items()}
        flat = potential.flatten(row).detach()
        position = flat.new_empty(num_chains, len(flat)) if chain == 0 else position
        position[chain] = flat
    minibatch = source.first()
    refuse_flat_sites(potential, minibatch.of(0))
    fine = torch.empty(num_chains, dtype=torch.bool, device=position.device)
    for group in chain_slices(*position.shape):
        with torch.no_grad(), pyro.validation_enabled(False):
            energy, slope = gradient(position[group], minibatch.of(group))
        fine[group] = energy.isfinite() & slope.isfinite().all(-1) & position[group].isfinite().all(-1)
    for chain in (~fine).nonzero().flatten().tolist():
        if given is not None:
            refuse_point(potential, position[chain], what, f" of chain {chain}")
        position[chain] = potential.flatten(potential.initial())
    return position


def as_tensors(given: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """Starting values as floating-point tensors by site; arrays, lists and integers are converted."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{what} is a {type(given).__name__}; pass a dict of tensors by site, with the chains in front"
        )
    tensors = {}
    for name, value in given.items():
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{what} of site {name!r} is a {type(value).__name__} that is no tensor ({error}); pass a "
                "tensor with the chains in front"
            ) from None
        tensors[name] = tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
    return tensors


def unconstrained_values(
    given: Mapping[str, Tensor], potential: Potential, num_chains: int
) -> dict[str, Tensor]:
    """The unconstrained values of ``initial_values``, which have to lie inside the supports.

    Outside of a support some transforms return NaN, and others a value of another point; so values are
    compared with their round trip. The ``ValueError`` names site, chain and value.
    """
    what = "initial_values"
    check_shapes(given, potential, what, num_chains, constrained=True)
    latents = potential.program.latents
    given = {name: given[name].to(site.value.dtype) for name, site in latents.items()}
    params = potential.unconstrain(given)
    for name, back in potential.constrain(params).items():
        value = given[name]  # (C, *shape)
        rounding = 1e-4 * float(value.nan_to_num().abs().max())
        same = torch.isclose(back, value, rtol=1e-3, atol=rounding).reshape(num_chains, -1).all(-1)
        fits = same & params[name].isfinite().reshape(num_chains, -1).all(-1)  # (C,)
        for chain in (~fits).nonzero().flatten().tolist():
            few = value[chain].numel() <= MOST_SHOWN
            shown = f" (= {value[chain].tolist()})" if few else ""
            raise ValueError(
                f"{what} of site {name!r} in chain {chain}{shown} are not inside the support of the site, "
                f"{latents[name].support}; give values inside it"
            )
    return params


def check_shapes(
    given: Mapping[str, Tensor],
    potential: Potential,
    what: str,
    num_chains: int | None = None,
    *,
    constrained: bool = False,
) -> None:
    """Refuse values that don't have the shapes of the model's sites."""
    check_sites(given, potential, what)
    chains = () if num_chains is None else (num_chains,)
    kind = "constrained" if constrained else "unconstrained"
    for name, latent in potential.program.latents.items():
        shape = latent.value.shape if constrained else potential.shapes[name]
        if given[name].shape != (*chains, *shape):
            raise ValueError(
                f"{what} of site {name!r} have shape {tuple(given[name].shape)}; {kind} values of "
                f"{'one chain' if num_chains is None else f'{num_chains} chains'} have shape "
                f"{(*chains, *shape)}"
            )


def check_sites(given: Mapping[str, Tensor], potential: Potential, what: str) -> None:
    """Refuse values that are given for other sites than the model's latent ones."""
    if set(given) != set(potential.shapes):
        raise ValueError(
            f"{what} are given for {sorted(given)}; the model's latent sites are {sorted(potential.shapes)}"
        )


def refuse_point(potential: Potential, position: Tensor, what: str, whose: str = "") -> None:
    """Refuse a position where the energy or its gradient is not finite."""
    problem = potential.problem_at(potential.unflatten(position), potential.draw_indices())
    if problem is not None:
        taken = "" if what == "initial_values" else ". They are taken as unconstrained values"
        raise ValueError(f"no chain can start at the {what}{whose}; not finite there: {problem}{taken}")


def refuse_flat_sites(potential: Potential, minibatch: Minibatch) -> None:
    """Refuse a model whose log joint does not depend on a site, unless the site's support is bounded.

    To tell such a model from one that is flat at some points only, a site is refused if its gradient is
    absent or zero at all of ``NUM_PROBES`` points. Where a step sees a part of the data, zeros prove nothing,
    and only absent gradients count. A site whose log Jacobian alone is integrable, as on an interval, is not
    refused.
    """
    program = potential.program
    sees_all = not potential.program.plates and minibatch.args is None
    prototype = {
        name: u.detach()
        for name, u in potential.unconstrain({n: s.value for n, s in program.latents.items()}).items()
    }
    flat = [name for name in prototype if _is_improper_alone(potential, name)]
    with fork_random_state(), pyro.validation_enabled(False), torch.enable_grad():
        for probe in range(NUM_PROBES):
            if not flat:
                return
            spread = 0.0 if probe == 0 else 2.0
            at = {n: u + spread * (2 * torch.rand_like(u) - 1) for n, u in prototype.items()}
            values = {n: v.detach().requires_grad_() for n, v in potential.constrain(at).items()}
            try:
                joint = program.log_joint(values, minibatch.indices, minibatch.args)
                slopes = (
                    torch.autograd.grad(joint, [values[name] for name in flat], allow_unused=True)
                    if joint.requires_grad
                    else [None] * len(flat)
                )
            except (RuntimeError, ValueError, ArithmeticError):
                return  # what fails here fails again, where it is the model's own error
            flat = [
                name
                for name, slope in zip(flat, slopes, strict=True)
                if slope is None or (sees_all and not slope.any())
            ]
    if flat:
        raise ValueError(
            f"the log density does not depend on site {', '.join(map(repr, flat))}: no prior that counts (it "
            "is improper, or masked), and no likelihood that uses the values (or only through detach()). "
            "Chains would drift there for ever; give a proper prior, or leave the site out of the model"
        )


def _is_improper_alone(potential: Potential, name: str) -> bool:
    """Whether the log Jacobian of a site alone has no finite integral, as on all supports without bounds."""
    like = potential.program.latents[name].value
    bijection = potential.transforms[name].inv

    def log_det(value: float) -> float:
        u = torch.full(potential.shapes[name], value, dtype=like.dtype, device=like.device)
        return float(bijection.log_abs_det_jacobian(u, bijection(u)).sum())

    return max(log_det(40.0), log_det(-40.0)) > log_det(0.0) - 10
