r"""Do the samplers get real posteriors right? Seven posteriors of posteriordb against their reference draws.

    python -m benchmarks.references                      # both tables, from the root of the repository
    python -m benchmarks.references --full --only nes2000-nes hmm_example
    python -m benchmarks.references --minibatch --seeds 1

All in float64, on one thread, and by the package's own means: :func:`find_mode` for a mode :math:`\hat u`;
the Hessian :math:`H` of the potential energy there; ``Diagonal(1 / H_ii)``, so that step sizes are in
conditional sd :math:`H_{ii}^{-1/2}` and frictions per the same unit of time; ``VectorizedMCMC``. ``steps``
counts those of each chain after its warm-up.

The first table is on full data, from independent :math:`N(\hat u_i, 1 / H_{ii})`. ``mean`` is the largest
error of a mean, in reference sd, ``sd`` the ratio of sd that is farthest from 1, both over all components of
the reference draws; ``n_eff`` the least effective sample size. The targets are 0.1 and 5 %.

The second is on 5 % minibatches, a set of rows for each chain at each step, with targets 0.15 and 10 %, and
step sizes that halve at one friction: gradient noise of variance :math:`V` heats by :math:`h V / 2 \gamma`.
Steps so small take thousands to cross a posterior whose coordinates are correlated, so these chains start at
draws of the Laplace approximation, :math:`N(\hat u, H^{-1})`, which has no heating: they have to find it in
warm-up.

Reference draws are found through the environment variable PYRO_SYM_DATA.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_sym.errors import DivergenceError
from pyro_sym.infer.control_variate import FullGradient, find_mode
from pyro_sym.infer.gradient import Gradient
from pyro_sym.infer.kernels import BAOA, SGHMC, SGLD, SGNHT, LeimkuhlerMatthews
from pyro_sym.infer.minibatch import PlateRows
from pyro_sym.infer.potential import Potential
from pyro_sym.infer.preconditioners import Diagonal
from pyro_sym.infer.skeleton import StochasticGradientKernel
from pyro_sym.infer.vectorized import VectorizedMCMC
from tests.infer.posteriors import NAMES, Agreement, Posterior, load, worst

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


HEADER = (
    f"{'posterior':26} {'kernel':20} {'h':>6} {'gamma':>5} {'steps':>6} {'warm-up':>7} {'chains':>6} "
    f"{'mean':>6} {'at':9} {'sd':>6} {'at':9} {'n_eff':>7} {'s':>6}"
)


def row(
    name: str, setting: Setting, agreements: list[Agreement], seconds: float, mean: float, sd: float
) -> str:
    """One line of the table."""
    by_mean, by_sd = worst(agreements)
    passes = abs(by_mean.mean_error) <= mean and abs(by_sd.sd_ratio - 1) <= sd
    return (
        f"{name:26} {setting.kernel:20} {setting.step_size:6.3g} {setting.friction:5.3g} {setting.steps:6} "
        f"{setting.warmup:7} {setting.chains:6} {by_mean.mean_error:+6.3f} {by_mean.name:9} "
        f"{by_sd.sd_ratio:6.3f} {by_sd.name:9} {min(a.n_eff for a in agreements):7.0f} {seconds:6.1f} "
        f"{'pass' if passes else 'MISS'}"
    )


def full_data(names: list[str], kernels: list[str], seeds: int) -> Iterator[str]:
    """The first table."""
    for name in names:
        posterior = load(name)
        pyro.set_rng_seed(0)
        mode, hessian = laplace(posterior)
        for kind in kernels:
            setting = replace(FULL[name], kernel=kind)
            if kind in (
                "SGLD",
                "LeimkuhlerMatthews",
            ):  # a step moves by h, where those with momentum do by h^2 / 2
                setting = replace(setting, step_size=setting.step_size**2 / 2)
            for seed in range(seeds):
                try:
                    yield row(name, setting, *sample(posterior, setting, mode, hessian, seed), 0.1, 0.05)
                except DivergenceError as error:
                    yield f"{name:26} {setting.kernel:20} {setting.step_size:6.3g} MISS: {error}"


#: On 5 % minibatches: the largest of the step sizes, how often it halves, and what goes with it.
MINIBATCH = {
    ("logearn_interaction_z", "plain"): (Setting(0.016, 0.66, 2000, 400, chains=128, thinning=20), 2),
    ("logearn_interaction_z", "control_variate"): (Setting(0.2, 0.66, 2000, 400), 1),
    ("nes2000-nes", "plain"): (Setting(0.008, 0.2, 4000, 1250, chains=256, thinning=50), 2),
    ("nes2000-nes", "control_variate"): (Setting(0.1, 0.6, 4000, 600, chains=128), 1),
}


def minibatches(names: list[str], seeds: int) -> Iterator[str]:
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the first table only")
    parser.add_argument("--minibatch", action="store_true", help="the second table only")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=["BAOA"])
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    print(HEADER)
    if not options.minibatch:
        for line in full_data(options.only, options.kernels, options.seeds):
            print(line, flush=True)
    if not options.full:
        for line in minibatches(options.only, options.seeds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
