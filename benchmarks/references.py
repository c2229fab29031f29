r"""Do the samplers get real posteriors right? Seven posteriors of posteriordb against their reference draws.

On full data the targets are 0.1 reference sd for the largest error of a mean and 5 % for the sd farthest from
the reference's; on 5 % minibatches they are 0.15 and 10 %, with step sizes that halve.

    python -m benchmarks.references --tables full --only nes2000-nes hmm_example
    python -m benchmarks.references --tables minibatch --seeds 3

All in float64, on one thread, and by the package's own means: :func:`find_mode` for a mode :math:`\hat u`;
the Hessian :math:`H` of the potential energy there; ``Diagonal(1 / H_ii)``, so that step sizes are in
conditional sd :math:`H_{ii}^{-1/2}` and frictions per the same unit of time; ``VectorizedMCMC``. ``steps``
counts those of each chain after its warm-up.

The first table is on full data, from independent :math:`N(\hat u_i, 1 / H_{ii})`. ``mean`` is the largest
error of a mean, in reference sd, ``sd`` the ratio of sd that is farthest from 1, both over all components of
the reference draws; ``n_eff`` the least effective sample size.

The second is on 5 % minibatches, a set of rows for each chain at each step, with step sizes that halve at
one friction: gradient noise of variance :math:`V` heats by :math:`h V / 2 \gamma`.
Steps so small take thousands to cross a posterior whose coordinates are correlated, so these chains start at
draws of the Laplace approximation, :math:`N(\hat u, H^{-1})`, which has no heating: they have to find it in
warm-up.

Reference draws are found through the environment variable PYRO_SYM_DATA.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from benchmarks._runner import Row, Tables, command_line
from pyro_sym.errors import DivergenceError
from pyro_sym.model.full_data import FullGradient, find_mode
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import PlateRows
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.preconditioners import Diagonal
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC
from tests.sgmcmc.posteriors import NAMES, Agreement, Posterior, load, worst

TITLE = "Real posteriors against reference draws"
KERNELS: dict[str, Any] = {kind.__name__: kind for kind in (BAOA, SGHMC, LeimkuhlerMatthews, SGLD, SGNHT)}


@dataclass(frozen=True)
class Setting:
    """How a posterior is sampled."""

    step_size: float
    friction: float
    steps: int
    warmup: int
    chains: int = 64
    thinning: int = 10
    kernel: str = "BAOA"


#: On full data. Frictions are about 2 sqrt(least eigenvalue of the curvature in these units).
FULL = {
    "eight_schools_noncentered": Setting(0.4, 0.8, 4000, 1000, chains=256),
    "kidscore_momiq": Setting(0.7, 0.2, 4000, 500),
    "logearn_interaction_z": Setting(0.7, 0.6, 2000, 300),
    "sblrc-blr": Setting(0.7, 0.5, 2000, 300),
    "nes2000-nes": Setting(0.5, 0.3, 4000, 500, chains=128),
    "hmm_example": Setting(0.5, 0.3, 3000, 500),
    "low_dim_gauss_mix": Setting(0.7, 1.5, 1000, 100),
}


def laplace(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """A mode on all data, and the Hessian of the potential energy there."""
    potential = Potential(posterior.model, posterior.args)
    full = FullGradient(Gradient(potential), PlateRows(potential.program.plates, 1))
    mode = find_mode(full, potential.flatten(potential.initial()))
    return mode, torch.autograd.functional.hessian(lambda u: potential(potential.unflatten(u)), mode)


def kernel(
    posterior: Posterior, setting: Setting, curvature: Tensor, **options: Any
) -> StochasticGradientKernel:
    """The kernel of a setting, preconditioned by curvatures."""
    if setting.kernel not in ("SGLD", "LeimkuhlerMatthews"):
        options["friction"] = setting.friction
    made: StochasticGradientKernel = KERNELS[setting.kernel](
        posterior.model, step_size=setting.step_size, preconditioner=Diagonal(1 / curvature), **options
    )
    return made


def sample(
    posterior: Posterior,
    setting: Setting,
    mode: Tensor,
    hessian: Tensor,
    seed: int = 0,
    subsample_size: int | None = None,
    **options: Any,
) -> tuple[list[Agreement], float]:
    """Run chains; what they say against the reference draws, and seconds."""
    pyro.set_rng_seed(seed)
    potential = Potential(posterior.model, posterior.args)
    if options.get("gradient") == "control_variate":
        options["center"] = potential.unflatten(mode)
    curvature = hessian.diagonal()
    precision = curvature.diag() if subsample_size is None else hessian
    start = torch.distributions.MultivariateNormal(mode, precision_matrix=precision).sample((setting.chains,))
    run = VectorizedMCMC(
        kernel(posterior, setting, curvature, **options),
        num_samples=setting.steps // setting.thinning,
        warmup_steps=setting.warmup // setting.thinning,
        num_chains=setting.chains,
        thinning=setting.thinning,
        initial_params=potential.unflatten(start),
        on_divergence="mask",
        disable_progbar=True,
    )
    begin = time.perf_counter()
    run.run(*posterior.args, **({} if subsample_size is None else {"subsample_size": subsample_size}))
    seconds = time.perf_counter() - begin
    if run.diverged:
        raise DivergenceError(f"{len(run.diverged)} of {setting.chains} chains diverged")
    return posterior.compare(run.get_samples(group_by_chain=True)), seconds


def row(
    name: str, setting: Setting, agreements: list[Agreement], seconds: float, mean: float, sd: float
) -> Row:
    """One line of the table."""
    by_mean, by_sd = worst(agreements)
    passes = abs(by_mean.mean_error) <= mean and abs(by_sd.sd_ratio - 1) <= sd
    return _setting(name, setting) | {
        "mean": by_mean.mean_error,
        "of": by_mean.name,
        "sd": by_sd.sd_ratio,
        "of ": by_sd.name,
        "n_eff": min(a.n_eff for a in agreements),
        "s": seconds,
        "outcome": "within" if passes else "MISS",
    }


def _setting(name: str, setting: Setting) -> Row:
    """The first columns."""
    return {
        "posterior": name,
        "kernel": setting.kernel,
        "h": setting.step_size,
        "γ": setting.friction,
        "steps": setting.steps,
        "chains": setting.chains,
    }


def full_data(names: Sequence[str], kernels: Sequence[str], seeds: int) -> Iterator[Row]:
    """The first table."""
    for name in names:
        posterior = load(name)
        pyro.set_rng_seed(0)
        mode, hessian = laplace(posterior)
        for kind in kernels:
            setting = replace(FULL[name], kernel=kind)
            if kind in ("SGLD", "LeimkuhlerMatthews"):  # they move by h, those with momentum by h^2 / 2
                setting = replace(setting, step_size=setting.step_size**2 / 2)
            for seed in range(seeds):
                try:
                    yield row(name, setting, *sample(posterior, setting, mode, hessian, seed), 0.1, 0.05)
                except DivergenceError as error:
                    print(error, flush=True)
                    yield _setting(name, setting) | {"outcome": "MISS"}


#: On 5 % minibatches: the largest of the step sizes, how often it halves, and what goes with it.
MINIBATCH = {
    ("logearn_interaction_z", "plain"): (Setting(0.016, 0.66, 2000, 400, chains=128, thinning=20), 2),
    ("logearn_interaction_z", "control_variate"): (Setting(0.2, 0.66, 2000, 400), 1),
    ("nes2000-nes", "plain"): (Setting(0.008, 0.2, 4000, 1250, chains=256, thinning=50), 2),
    ("nes2000-nes", "control_variate"): (Setting(0.1, 0.6, 4000, 600, chains=128), 1),
}


def minibatches(names: Sequence[str], seeds: int) -> Iterator[Row]:
    """The second table: as the step size halves, the steps double."""
    for (name, gradient), (first, halvings) in MINIBATCH.items():
        if name not in names:
            continue
        posterior = load(name)
        rows = round(0.05 * len(posterior.args[1]))
        pyro.set_rng_seed(0)
        mode, hessian = laplace(posterior)
        for factor in (2**k for k in range(halvings + 1)):
            setting = replace(
                first,
                step_size=first.step_size / factor,
                steps=first.steps * factor,
                warmup=first.warmup * factor,
                thinning=first.thinning * factor,
            )
            for seed in range(seeds):
                agreements, seconds = sample(posterior, setting, mode, hessian, seed, rows, gradient=gradient)
                label = f"{name.split('_')[0].split('-')[0]}/{rows} {gradient}"
                yield row(label, setting, agreements, seconds, 0.15, 0.1)


OPTIONS: dict[str, dict[str, Any]] = {
    "tables": {"nargs": "+", "choices": ["full", "minibatch"], "default": ["full", "minibatch"]},
    "only": {"nargs": "+", "choices": NAMES, "default": NAMES},
    "kernels": {"nargs": "+", "choices": list(KERNELS), "default": ["BAOA"]},
    "seeds": {"type": int, "default": 1},
}


def measure(
    seconds: float = 0.0,
    smoke: bool = False,
    tables: Sequence[str] = ("full", "minibatch"),
    only: Sequence[str] = NAMES,
    kernels: Sequence[str] = ("BAOA",),
    seeds: int = 1,
) -> Tables:
    """Both tables; ``seconds`` changes nothing."""
    torch.set_default_dtype(torch.float64)
    if smoke:
        tables, only = ["full"], ["sblrc-blr"]
    made: Tables = {}
    if "full" in tables:
        made["Full data: largest error of a mean, in reference sd, and sd ratio farthest from 1."] = _told(
            full_data(only, kernels, seeds)
        )
    if "minibatch" in tables:
        made["The same on minibatches of 5 %."] = _told(minibatches(only, seeds))
    return made


def _told(rows: Iterator[Row]) -> list[Row]:
    """All rows, each announced when it is there."""
    kept = []
    for one in rows:
        print(one["posterior"], one["outcome"], flush=True)
        kept.append(one)
    return kept


if __name__ == "__main__":
    command_line("references")
