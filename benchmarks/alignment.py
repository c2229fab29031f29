r"""Does alignment recover what label switching hides? Mixtures of posteriordb, sampled without an ordering.

    python -m benchmarks.alignment                       # all tables, from the root of the repository
    python -m benchmarks.alignment --only low_dim_gauss_mix --samplers BAOA

``low_dim_gauss_mix``: two components under an exchangeable prior, four chains that start under both labels,
by NUTS and by BAOA. Aligned draws are set beside the reference draws of the ordered model: the largest error
of a mean in reference sd (target 0.1), the ratio of sd farthest from 1 (target 5 %), and the largest R-hat
(target 1.01); raw draws as well, which must fail.

``normal_5``: five components. Draws are aligned by parameters, by Stephens' divergence and by allocations;
the share of draws on which they agree up to one relabelling for all (target 99 %), and how many of the others
have a confidence below 0.9.

``planted``: 10 units 4 sd apart in each signed coordinate, labels and signs drawn anew in each of 10,000
draws; the share recovered, and the time it takes (targets 100 % and 5 s).

In float64, on one thread. Reference draws are found through the environment variable PYRO_SYM_DATA.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from benchmarks.references import laplace
from pyro_sym import (
    BAOA,
    Alignment,
    Diagonal,
    Permutation,
    Potential,
    Product,
    SignFlip,
    VectorizedMCMC,
    align,
    align_allocations,
    allocation_probabilities,
)
from pyro_sym.infer.gradient import Gradient
from pyro_sym.infer.minibatch import Minibatch
from pyro_sym.symmetry.allocations import Method
from tests.infer.posteriors import Agreement, Posterior, load, read_data, worst

Draws = dict[str, Tensor]

SYMMETRY = Permutation({"mu": -1, "sigma": -1, "theta": -1})
SAMPLERS = ("NUTS", "BAOA")


def mixture(y: Tensor, theta: dist.Distribution, mu: dist.Distribution, sigma: dist.Distribution) -> None:
    """A mixture of normals, its components exchangeable."""
    weights, locs, scales = pyro.sample("theta", theta), pyro.sample("mu", mu), pyro.sample("sigma", sigma)
    components = dist.Normal(locs, scales)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), components), obs=y)


def low_dim_gauss_mix(y: Tensor) -> None:
    """The model of posteriordb without its ordering."""
    locs, scales = dist.Normal(torch.zeros(2), 2.0), dist.HalfNormal(2.0 * torch.ones(2))
    mixture(y, dist.Dirichlet(5.0 * torch.ones(2)), locs.to_event(1), scales.to_event(1))


def normal_5(y: Tensor) -> None:
    """Five components under flat priors of weights and scales."""
    locs, scales = dist.Normal(torch.zeros(5), 10.0), dist.Uniform(torch.zeros(5), 10.0)
    mixture(y, dist.Dirichlet(torch.ones(5)), locs.to_event(1), scales.to_event(1))


class _Energy(torch.autograd.Function):
    """The potential energy, and its gradient by the recorded graph."""

    @staticmethod
    def forward(ctx: Any, position: Tensor, gradient: Gradient) -> Tensor:
        energy, slope = gradient(position.unsqueeze(0), Minibatch())
        ctx.save_for_backward(slope[0])
        return energy[0]

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return weight * ctx.saved_tensors[0], None


def nuts(posterior: Posterior, starts: Tensor, num_samples: int) -> Draws:
    """Chains from flat unconstrained positions, one after the other."""
    potential = Potential(posterior.model, posterior.args)
    gradient = Gradient(potential)
    chains = []
    for start in starts:
        kernel = NUTS(potential_fn=lambda values: _Energy.apply(potential.flatten(values), gradient))
        mcmc = MCMC(
            kernel,
            num_samples,
            num_samples // 2,
            initial_params=potential.unflatten(start),
            disable_progbar=True,
        )
        mcmc.run()
        with torch.no_grad():
            chains.append(potential.constrain(mcmc.get_samples()))
    return {site: torch.stack([chain[site] for chain in chains]) for site in chains[0]}


def baoa(posterior: Posterior, starts: Tensor, num_samples: int, curvature: Tensor) -> Draws:
    """The same chains side by side, 10 steps a draw."""
    kernel = BAOA(posterior.model, step_size=0.5, friction=1.0, preconditioner=Diagonal(1 / curvature))
    run = VectorizedMCMC(
        kernel,
        num_samples=num_samples,
        warmup_steps=num_samples // 10,
        num_chains=len(starts),
        thinning=10,
        initial_params=Potential(posterior.model, posterior.args).unflatten(starts),
        disable_progbar=True,
    )
    run.run(*posterior.args)
    return run.get_samples(group_by_chain=True)


def sample(posterior: Posterior, sampler: str, num_samples: int) -> Draws:
    """Four chains from a mode under labels of their own."""
    potential = Potential(posterior.model, posterior.args)
    mode, hessian = laplace(posterior)
    values = potential.constrain(potential.unflatten(mode))
    relabelled = [SYMMETRY.act(SYMMETRY.sample(values), values) for _ in range(4)]
    relabelled[:2] = values, SYMMETRY.act(SYMMETRY.inverse(torch.arange(len(values["mu"])).flip(0)), values)
    starts = torch.stack([potential.flatten(potential.unconstrain(v)) for v in relabelled])
    if sampler == "NUTS":
        return nuts(posterior, starts, num_samples)
    return baoa(posterior, starts, num_samples, hessian.diagonal())


def compare(samples: Draws) -> tuple[list[Agreement], float]:
    """Each component against the reference draws of the ordered model, and the largest R-hat."""
    reference = load("low_dim_gauss_mix").reference()
    ours = {f"{site}[{i + 1}]": samples[site][..., i] for site in ("mu", "sigma") for i in range(2)}
    ours["theta"] = samples["theta"][..., 0]
    r_hat = max(float(split_gelman_rubin(value, chain_dim=0, sample_dim=1)) for value in ours.values())
    return [Agreement.of(name, ours[name], reference[name]) for name in reference], r_hat


def ordered_reference() -> Draws:
    """Means of the reference draws, to take labels from."""
    draws = load("low_dim_gauss_mix").reference()
    point = {site: torch.stack([draws[f"{site}[{i}]"].mean() for i in (1, 2)]) for site in ("mu", "sigma")}
    return {**point, "theta": torch.stack([draws["theta"].mean(), 1 - draws["theta"].mean()])}


def two_components(samplers: list[str], num_samples: int) -> None:
    """The first table."""
    print(
        f"{'low_dim_gauss_mix':20} {'mean':>8} {'at':9} {'sd':>8} {'at':9} {'R-hat':>7} {'n_eff':>7} {'s':>7}"
    )
    posterior = Posterior(low_dim_gauss_mix, (read_data("low_dim_gauss_mix")["y"],), "")
    probabilities = allocation_probabilities(low_dim_gauss_mix, posterior.args)
    options: dict[str, Any] = {"group_by_chain": True, "reference": ordered_reference()}
    for sampler in samplers:
        pyro.set_rng_seed(0)
        samples, seconds = timed(partial(sample, posterior, sampler, num_samples))
        ways: dict[str, Callable[[], Draws]] = {
            "raw": partial(dict, samples),
            "align": partial(_samples, align, samples, SYMMETRY, **options),
            "kl": partial(_samples, align_allocations, samples, SYMMETRY, probabilities, **options),
        }
        for way, make in ways.items():
            moved, took = timed(make)
            agreements, r_hat = compare(moved)
            by_mean, by_sd = worst(agreements)
            print(
                f"{sampler + ' ' + way:20} {by_mean.mean_error:+8.3f} {by_mean.name:9} {by_sd.sd_ratio:8.3f} "
                f"{by_sd.name:9} {r_hat:7.3f} {min(a.n_eff for a in agreements):7.0f} "
                f"{seconds if way == 'raw' else took:7.1f}",
                flush=True,
            )


def _samples(way: Callable[..., Alignment], *args: Any, **kwargs: Any) -> Draws:
    return way(*args, **kwargs).samples


def agreement(first: Alignment, second: Alignment) -> Tensor:
    """Which draws were given the same labels, up to the one relabelling that suits most of them."""
    change = SYMMETRY.compose(first.elements, SYMMETRY.inverse(second.elements)).flatten(0, -2)
    kinds, kind = change.unique(dim=0, return_inverse=True)
    return kind == kind.bincount(minlength=len(kinds)).argmax()


def five_components(samplers: list[str], num_samples: int) -> None:
    """The second table."""
    posterior = Posterior(normal_5, (read_data("normal_5")["y"],), "")
    probabilities = allocation_probabilities(normal_5, posterior.args)
    for sampler in samplers:
        pyro.set_rng_seed(1)
        samples, seconds = timed(partial(sample, posterior, sampler, num_samples))
        print(f"normal_5 by {sampler}: {seconds:.1f} s")
        by_parameters, took = timed(partial(align, samples, SYMMETRY, group_by_chain=True))
        print(f"{'align':10} {by_parameters.summary()} {took:.1f} s")
        print_units(by_parameters.samples)
        methods: tuple[Method, ...] = get_args(Method)
        for method in methods:
            other, took = timed(
                partial(
                    align_allocations, samples, SYMMETRY, probabilities, method=method, group_by_chain=True
                )
            )
            same = agreement(by_parameters, other)
            least = torch.minimum(by_parameters.confidence, other.confidence).flatten()
            print(f"{method:10} {other.summary()} {took:.1f} s")
            print(
                f"{'':10} agrees on {same.double().mean():.2%}; of the other {int((~same).sum())} draws "
                f"{int((least[~same] < 0.9).sum())} are in doubt",
                flush=True,
            )


def print_units(samples: Mapping[str, Tensor]) -> None:
    """Mean and sd of each unit."""
    for site, value in samples.items():
        flat = value.flatten(0, 1)
        units = "  ".join(f"{m:6.2f} ± {s:.2f}" for m, s in zip(flat.mean(0), flat.std(0), strict=True))
        print(f"{'':10} {site:6} {units}")


def planted() -> None:
    """The third table."""
    pyro.set_rng_seed(0)
    spread = [4.0 * torch.arange(10) + 2.0 for _ in range(3)]
    centres = {
        "incoming": torch.stack([values[torch.randperm(10)] for values in spread[:2]], -1),
        "outgoing": spread[2][torch.randperm(10)].expand(2, 10),
    }
    axes = {"incoming": -2, "outgoing": -1}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    draws = {site: value + torch.randn(10_000, *value.shape) for site, value in centres.items()}
    elements = symmetry.sample(centres, (10_000,))
    begin = time.process_time()
    result, wall = timed(partial(align, symmetry.act(elements, draws), symmetry))
    cpu = time.process_time() - begin
    total = torch.cat([part.long() for part in symmetry.compose(result.elements, elements)], -1)
    share = float(total.unique(dim=0, return_counts=True)[1].max()) / len(total)
    print(f"planted: {share:.2%} recovered, {cpu:.1f} s of one core, {wall:.1f} s; {result.summary()}")


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and how long it took."""
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = ("low_dim_gauss_mix", "normal_5", "planted")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--num-samples", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if "planted" in options.only:
        planted()
    if "low_dim_gauss_mix" in options.only:
        two_components(options.samplers, options.num_samples)
    if "normal_5" in options.only:
        five_components(options.samplers, options.num_samples)


if __name__ == "__main__":
    main()
