"""Hand-written guides whose density factorises over units, and those that only look like it.

Covers also `guides.capture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch.distributions import constraints

from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry
from pyro_sym.guides.average import OneBlock
from pyro_sym.orbit.enumeration import enumerated
from tests.catalogue import normals
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

Guide = Callable[..., Any]
MIXTURE = Permutation({"weights": -1, "locs": -2, "scales": -1, "shares": -2, "tied": -2})


def mixture(k: int) -> Guide:
    def model() -> None:
        pyro.sample("weights", dist.Dirichlet(torch.ones(k)))
        pyro.sample("noise", dist.Gamma(2.0, 2.0))
        with pyro.plate("components", k):
            pyro.sample("locs", dist.Normal(torch.zeros(2), 10.0).to_event(1))
            pyro.sample("scales", dist.Gamma(2.0, 2.0))
            pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
            pyro.sample("tied", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))

    return model


def by_hand(k: int, separation: float) -> Guide:
    """A simplex over units, numbers, vectors and simplices of units; in plates and without."""
    start, first, second = torch.randn(k, 2), torch.rand(k), torch.rand(k)

    def guide() -> None:
        positive = {"constraint": constraints.positive}
        alpha = pyro.param("alpha", 1.0 + 3 * first, **positive)
        means = pyro.param("means", separation * start)
        rate = pyro.param("rate", 0.5 + second, **positive)
        pyro.sample("weights", dist.Dirichlet(alpha))
        pyro.sample("locs", dist.Normal(means, 0.8).to_event(2))
        pyro.sample("noise", dist.Gamma(2.0, 1.0))
        with pyro.plate("components", k):
            pyro.sample("scales", dist.Gamma(3.0, rate))
            pyro.sample("shares", dist.Dirichlet(1 + alpha.unsqueeze(-1) * torch.tensor([1.0, 2.0, 0.5])))
            pyro.sample("tied", dist.MultivariateNormal(means, torch.tensor([[1.0, 0.5], [0.5, 2.0]])))

    return guide


@pytest.mark.parametrize("k", [3, 6])
def test_a_mixture_is_a_permanent(k: int) -> None:
    """Values and gradients against enumeration."""
    guide = AutoSymmetrized(by_hand(k, 0.5), MIXTURE, model=mixture(k))
    run = guide.draw(5)
    assert isinstance(guide._average, OneBlock) and guide.method == "exact"
    density = run.density()
    values = guide.log_average(run)
    reference = enumerated(MIXTURE, density, run.draws.values, density(run.draws.values))
    assert torch.allclose(values, reference, rtol=0, atol=1e-10)
    assert (values - run.draws.own).min() > -math.lgamma(k + 1) + 1e-3, "the case must have overlap"
    parameters = [p.unconstrained() for p in pyro.get_param_store().values()]
    ours, theirs = (torch.autograd.grad(v.sum(), parameters, retain_graph=True) for v in (values, reference))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("vectorise", [False, True])
def test_it_trains(vectorise: bool) -> None:
    def model() -> None:
        pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    def guide() -> None:
        alpha = pyro.param("alpha", torch.tensor([1.0, 2.0, 3.0]), constraint=constraints.positive)
        pyro.sample("weights", dist.Dirichlet(alpha))
        pyro.sample("locs", dist.Normal(pyro.param("means", torch.arange(3.0)), 1.0).to_event(1))

    symmetrised = AutoSymmetrized(guide, Permutation({"weights": -1, "locs": -1}), model=model)
    count = 500 if vectorise else 2
    elbo = Trace_ELBO(num_particles=count, vectorize_particles=vectorise, max_plate_nesting=0)
    svi = SVI(model, symmetrised, Adam({"lr": 0.05}), elbo)
    with torch.no_grad():
        before = elbo.loss(model, symmetrised)
    for _ in range(30 if vectorise else 1):
        after = svi.step()
    assert isinstance(symmetrised._average, OneBlock)
    assert after < before if vectorise else math.isfinite(after)


def test_many_separate_units_gain_all_of_their_labels() -> None:
    """log 20! is 42.3 nats; 16 uniform elements could report 2.8."""
    guide = AutoSymmetrized(by_hand(20, 100.0), MIXTURE, model=mixture(20))
    gain = guide.symmetry_gain(num_samples=30)
    assert isinstance(guide._average, OneBlock) and gain.method == "importance"
    assert gain.lower == pytest.approx(math.lgamma(21), abs=0.05)
    assert gain.lower <= gain.upper + 2 * Z_LIMIT * gain.standard_error


TANH = {"incoming": -2, "outgoing": -1}

tanh_layer = normals({"incoming": (4, 3), "outgoing": (2, 4)})


def test_signs_on_the_units() -> None:
    means = torch.randn(4, 3)

    def guide() -> None:
        pyro.sample("incoming", dist.StudentT(5.0, means, 1.0).to_event(2))
        pyro.sample("outgoing", dist.Laplace(means[:, :2].T, 1.0).to_event(2))

    symmetry = Product(Permutation(TANH), SignFlip(TANH))
    symmetrised = AutoSymmetrized(guide, symmetry, model=tanh_layer)
    run = symmetrised.draw(5)
    assert isinstance(symmetrised._average, OneBlock)
    density = run.density()
    reference = enumerated(symmetry, density, run.draws.values, run.draws.own)
    ours = symmetrised.log_average(run)
    assert torch.allclose(ours, reference, rtol=0, atol=1e-10)


def upstream(depends: bool) -> Guide:
    """Locations whose scale is another site's value; or, for control, is not."""

    def guide() -> None:
        noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
        pyro.sample("locs", dist.Normal(torch.arange(3.0), noise if depends else 1.0).to_event(1))

    return guide


def within() -> None:
    """A moved site whose scales are another's: every unit has its own, but they aren't parameters."""
    noise = pyro.sample("noise", dist.Gamma(2.0, 1.0))
    scales = pyro.sample("scales", dist.Gamma(torch.ones(3), 1.0).to_event(1))
    pyro.sample("locs", dist.Normal(noise * 0 + torch.arange(3.0), scales).to_event(1))


def dense() -> None:
    pyro.sample("noise", dist.Gamma(2.0, 1.0))
    pyro.sample("locs", dist.MultivariateNormal(torch.zeros(3), torch.eye(3) + 0.5))


def downstream() -> None:
    """A site that no element moves, but whose scale depends on what they do move."""
    locs = pyro.sample("locs", dist.Normal(torch.arange(3.0), 1.0).to_event(1))
    pyro.sample("noise", dist.Gamma(2.0, locs[0].exp()))


CASES: list[tuple[Guide, Symmetry, bool]] = [
    (upstream(False), Permutation({"locs": -1}), True),
    (upstream(True), Permutation({"locs": -1}), False),
    (within, Permutation({"locs": -1, "scales": -1}), False),
    (dense, Permutation({"locs": -1}), False),
    (downstream, Permutation({"locs": -1}), False),
]


@pytest.mark.parametrize(("guide", "symmetry", "factorises"), CASES)
def test_what_does_not_factorise_is_not_taken_for_it(
    guide: Guide, symmetry: Symmetry, factorises: bool
) -> None:
    """Negative controls; the average is right all the same, by another way."""

    def model() -> None:
        pyro.sample("noise", dist.Gamma(2.0, 1.0))
        for site in symmetry.sites:
            prior = dist.Normal(torch.zeros(3), 1.0) if site == "locs" else dist.Gamma(torch.ones(3), 1.0)
            pyro.sample(site, prior.to_event(1))

    symmetrised = AutoSymmetrized(guide, symmetry, model=model)
    run = symmetrised.draw(5)
    assert isinstance(symmetrised._average, OneBlock) == factorises
    density = run.density()
    reference = enumerated(symmetry, density, run.draws.values, run.draws.own)
    ours = symmetrised.log_average(run)
    assert torch.allclose(ours, reference, rtol=0, atol=1e-10)


def test_looking_at_the_guide_takes_no_random_numbers() -> None:
    def model() -> None:
        pyro.sample("noise", dist.Gamma(2.0, 1.0))
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    draws = []
    for looked_before in (True, False):
        guide = AutoSymmetrized(upstream(False), Permutation({"locs": -1}), model=model)
        if looked_before:
            guide()
        pyro.set_rng_seed(3)
        draws.append(guide()["locs"])
    assert torch.equal(*draws)
