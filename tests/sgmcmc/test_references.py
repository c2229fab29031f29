"""The samplers against reference draws of real posteriors: means, standard deviations, and what breaks them.

``benchmarks/references.py`` runs all seven posteriors, with these settings and more steps. Here are those
that a few seconds settle: effective sample sizes are such that tolerances are four standard errors or more.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.references import FULL, MINIBATCH, kernel, laplace, sample
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC
from tests.sgmcmc.posteriors import DATA, NAMES, Agreement, load, worst

MISSING = not (DATA / "posteriordb").is_dir() and os.environ.get("PYRO_SYM_REQUIRE_DATA") != "1"
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(MISSING, reason="no reference draws: PYRO_SYM_DATA names no folder with posteriordb"),
]

SHORT = {
    "eight_schools_noncentered": replace(FULL["eight_schools_noncentered"], steps=1500, warmup=400),
    "sblrc-blr": FULL["sblrc-blr"],
}


def assert_agrees(agreements: list[Agreement], mean: float, sd: float) -> None:
    by_mean, by_sd = worst(agreements)
    assert abs(by_mean.mean_error) <= mean, by_mean
    assert abs(by_sd.sd_ratio - 1) <= sd, by_sd


@pytest.mark.parametrize("name", NAMES)
def test_models_have_the_components_and_the_density_of_the_reference(name: str) -> None:
    """The mode lies among the reference draws."""
    posterior = load(name)
    mode, _ = laplace(posterior)
    potential = Potential(posterior.model, posterior.args)
    values = potential.constrain(potential.unflatten(mode.expand(1, 1, -1)))
    components, reference = posterior.components(values), posterior.reference()
    assert set(components) == set(reference)
    for component, draws in reference.items():
        assert draws.shape == (10, 1000)
        assert draws.min() <= components[component] <= draws.max(), component


@pytest.mark.parametrize("name", list(SHORT))
def test_full_data(name: str) -> None:
    posterior = load(name)
    agreements, _ = sample(posterior, SHORT[name], *laplace(posterior))
    assert min(a.n_eff for a in agreements) > 4000
    assert_agrees(agreements, mean=0.1, sd=0.05)


def test_half_the_temperature_fails_by_its_root() -> None:
    posterior = load("sblrc-blr")
    agreements, _ = sample(posterior, SHORT["sblrc-blr"], *laplace(posterior), temperature=0.5)
    for agreement in agreements:
        assert agreement.sd_ratio == pytest.approx(0.5**0.5, rel=0.05), agreement
    with pytest.raises(AssertionError):
        assert_agrees(agreements, mean=0.1, sd=0.05)


def test_a_symmetric_mixture_from_anywhere_relabelled() -> None:
    """From random rows chains end up under both labels; in order, draws have the law of the ordered model."""
    posterior = load("low_dim_gauss_mix")
    _, hessian = laplace(posterior)
    (y,) = posterior.args
    starts = {
        "mu": y[torch.randint(len(y), (24, 2))],
        "sigma": torch.full((24, 2), 2.0),
        "theta": torch.full((24,), 0.5),
    }
    run = VectorizedMCMC(
        kernel(posterior, FULL["low_dim_gauss_mix"], hessian.diagonal()),
        num_samples=100,
        warmup_steps=150,
        num_chains=24,
        thinning=4,
        initial_values=starts,
        disable_progbar=True,
    )
    run.run(*posterior.args)
    samples = run.get_samples(group_by_chain=True)
    mu: Tensor = samples["mu"]
    in_order = mu[..., 0] < mu[..., 1]
    assert (in_order == in_order[:, :1]).all() and 0 < in_order[:, 0].double().mean() < 1
    agreements = posterior.compare(samples)
    assert min(a.n_eff for a in agreements) > 700
    assert_agrees(agreements, mean=0.15, sd=0.1)


def test_minibatches_with_control_variates_and_without() -> None:
    """At a step size where centred gradients do, plain ones heat far beyond the tolerance."""
    posterior = load("logearn_interaction_z")
    rows = round(0.05 * len(posterior.args[1]))
    setting, _ = MINIBATCH["logearn_interaction_z", "control_variate"]
    fit = laplace(posterior)
    agreements, _ = sample(posterior, setting, *fit, 0, rows, gradient="control_variate")
    assert_agrees(agreements, mean=0.15, sd=0.1)
    plain, _ = sample(posterior, replace(setting, steps=500, warmup=100), *fit, 0, rows)
    assert worst(plain)[1].sd_ratio > 1.3
