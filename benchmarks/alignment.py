r"""Does alignment recover what label switching hides? Mixtures of posteriordb, sampled without an ordering.

Every table says what was aligned, how far the aligned draws are from what is known, and how long it took.

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

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from benchmarks._runner import Row, Tables, command_line, figure
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
from pyro_sym.alignment.by_allocations import Method
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from tests.sgmcmc.posteriors import Agreement, Posterior, load, read_data, worst

Draws = dict[str, Tensor]

TITLE = "Alignment of mixtures"
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


def two_components(samplers: Sequence[str], num_samples: int) -> list[Row]:
    """The first table."""
    posterior = Posterior(low_dim_gauss_mix, (read_data("low_dim_gauss_mix")["y"],), "")
    probabilities = allocation_probabilities(low_dim_gauss_mix, posterior.args)
    options: dict[str, Any] = {"group_by_chain": True, "reference": ordered_reference()}
    rows = []
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
            passes = abs(by_mean.mean_error) <= 0.1 and abs(by_sd.sd_ratio - 1) <= 0.05 and r_hat <= 1.01
            rows.append(
                {
                    "draws": f"{sampler}, {way}",
                    "mean": by_mean.mean_error,
                    "of": by_mean.name,
                    "sd": by_sd.sd_ratio,
                    "of ": by_sd.name,
                    "R-hat": r_hat,
                    "n_eff": min(a.n_eff for a in agreements),
                    "s": seconds if way == "raw" else took,
                    "outcome": "within" if passes else "outside, as it must" if way == "raw" else "MISS",
                }
            )
    return rows


def _samples(way: Callable[..., Alignment], *args: Any, **kwargs: Any) -> Draws:
    return way(*args, **kwargs).samples


def agreement(first: Alignment, second: Alignment) -> Tensor:
    """Which draws were given the same labels, up to the one relabelling that suits most of them."""
    change = SYMMETRY.compose(first.elements, SYMMETRY.inverse(second.elements)).flatten(0, -2)
    kinds, kind = change.unique(dim=0, return_inverse=True)
    return kind == kind.bincount(minlength=len(kinds)).argmax()


def five_components(samplers: Sequence[str], num_samples: int) -> list[Row]:
    """The second table."""
    posterior = Posterior(normal_5, (read_data("normal_5")["y"],), "")
    probabilities = allocation_probabilities(normal_5, posterior.args)
    rows: list[Row] = []
    for sampler in samplers:
        pyro.set_rng_seed(1)
        samples, seconds = timed(partial(sample, posterior, sampler, num_samples))
        rows.append({"draws": f"{sampler}, sampling", "s": seconds})
        by_parameters, took = timed(partial(align, samples, SYMMETRY, group_by_chain=True))
        rows.append({"draws": f"{sampler}, align", "s": took})
        options: dict[str, Any] = {"group_by_chain": True}
        methods: tuple[Method, ...] = get_args(Method)
        for method in methods:
            make = partial(align_allocations, samples, SYMMETRY, probabilities, method=method, **options)
            other, took = timed(make)
            same = agreement(by_parameters, other)
            least = torch.minimum(by_parameters.confidence, other.confidence).flatten()
            share = float(same.double().mean())
            rows.append(
                {
                    "draws": f"{sampler}, {method}",
                    "s": took,
                    "agrees with align": f"{share:.2%}",
                    "of the others, in doubt": f"{int((least[~same] < 0.9).sum())} of {int((~same).sum())}",
                    "outcome": "within" if share >= 0.99 else "MISS",
                }
            )
    return rows


def planted() -> list[Row]:
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
    result = align(symmetry.act(elements, draws), symmetry)
    cpu = time.process_time() - begin
    total = torch.cat([part.long() for part in symmetry.compose(result.elements, elements)], -1)
    lost = 1 - float(total.unique(dim=0, return_counts=True)[1].max()) / len(total)
    return [figure("draws not recovered", 100 * lost, "%", 0), figure("CPU time", cpu, "s", 5)]


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and how long it took."""
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


PARTS = ("low_dim_gauss_mix", "normal_5", "planted")
OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"nargs": "+", "choices": PARTS, "default": PARTS},
    "samplers": {"nargs": "+", "choices": SAMPLERS, "default": SAMPLERS},
    "num_samples": {"type": int, "default": 1000},
}


def measure(
    seconds: float = 0.0,
    smoke: bool = False,
    only: Sequence[str] = PARTS,
    samplers: Sequence[str] = SAMPLERS,
    num_samples: int = 1000,
) -> Tables:
    """The tables; ``seconds`` changes nothing."""
    torch.set_default_dtype(torch.float64)
    if smoke:
        only, samplers, num_samples = ["low_dim_gauss_mix"], ["BAOA"], 100
    makers: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "planted": ("10,000 draws of 10 units, planted.", planted),
        "low_dim_gauss_mix": (
            "low_dim_gauss_mix: errors of means in reference sd, ratios of sd, largest R-hat.",
            partial(two_components, samplers, num_samples),
        ),
        "normal_5": ("normal_5: agreement of labels.", partial(five_components, samplers, num_samples)),
    }
    return {caption: make() for name, (caption, make) in makers.items() if name in only}


if __name__ == "__main__":
    command_line("alignment")
