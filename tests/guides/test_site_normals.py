"""The guided bound on permanents, and guides whose density is one.

Covers also `orbit.guided_permutations`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry
from pyro_sym.guides import site_normals as units
from pyro_sym.guides.average import OneBlock
from pyro_sym.guides.site_normals import pair_normals
from pyro_sym.orbit import guided_permutations as sequential
from pyro_sym.orbit.enumeration import enumerated
from pyro_sym.orbit.guided_permutations import (
    importance,
    importance_bracket,
    importance_unbiased,
    propose,
    sinkhorn,
)
from pyro_sym.orbit.permanent import log_permanent
from tests.catalogue import normals
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


def gaussian_pairs(n: int, separation: float, draws: int) -> Tensor:
    """Units N(m_i, I_5) with m_i ~ N(0, s^2 I): the setting of the design's tables."""
    means = (separation * torch.randn(n, 5)).requires_grad_()
    points = (means + torch.randn(draws, n, 5)).unsqueeze(-3)
    return dist.Normal(means.unsqueeze(-2), 1.0).log_prob(points).sum(-1)


def gain(pairs: Tensor, log_average: Tensor) -> Tensor:
    return pairs.diagonal(dim1=-2, dim2=-1).sum(-1) - log_average


SETTINGS = [(n, s) for n in (4, 8, 10) for s in (0.3, 0.7, 1.0, 2.0)]


@pytest.mark.parametrize(("n", "separation"), SETTINGS)
def test_bounds_keep_their_direction(n: int, separation: float) -> None:
    """Differences to the exact value, in standard errors over 400 draws."""
    with torch.no_grad():
        pairs = gaussian_pairs(n, separation, 400)
        truth = log_permanent(pairs) - math.lgamma(n + 1)
        for count in (4, 32):
            above = importance(pairs, count) - truth
            below = importance_unbiased(pairs, count) - truth
            assert above.mean() > -Z_LIMIT * above.std() / 20
            assert below.mean() < Z_LIMIT * below.std() / 20


def test_what_breaks_the_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the unbiased estimate in the bound's place, and a proposal that looks at units'
    indices."""
    with torch.no_grad():
        pairs = gaussian_pairs(8, 1.0, 4000)
        truth = log_permanent(pairs) - math.lgamma(9)

        def breach(log_average: Tensor) -> float:
            error = log_average - truth
            return float(-error.mean() / (error.std() / math.sqrt(4000)))

        assert breach(importance(pairs, 3)) < Z_LIMIT
        assert breach(importance_unbiased(pairs, 3)) > Z_LIMIT
        # Weights that favour unit j in slot j know which element of the orbit they were given.
        monkeypatch.setattr(sequential, "sinkhorn", lambda pairs: sinkhorn(pairs - 3 * torch.eye(8)))
        assert breach(importance(pairs, 3)) < Z_LIMIT  # away from the identity: looser, still no breach
        monkeypatch.setattr(sequential, "sinkhorn", lambda pairs: sinkhorn(pairs + 3 * torch.eye(8)))
        assert breach(importance(pairs, 3)) > Z_LIMIT


def log_probability(log_matrix: Tensor, assignment: list[int], uniform: float = sequential.UNIFORM) -> float:
    """Of one assignment, by the definition: slot after slot, among the units left."""
    n = len(assignment)
    balanced = sinkhorn(log_matrix).exp()
    order = balanced.amax(-1).argsort(descending=True).tolist()
    left, total = list(range(n)), 0.0
    part = balanced
    for step, slot in enumerate(order):
        shares = part[slot, left] / part[slot, left].sum()
        odds = shares / (1 - shares).clamp(min=1e-9)
        guided = odds[left.index(assignment[slot])] / odds.sum()
        total += math.log((1 - uniform / n) * guided + uniform / n / len(left))
        left.remove(assignment[slot])
        if left:  # the rows and then the columns of what is left, to sums of one
            rest = order[step + 1 :]
            rows = part[rest][:, left].sum(-1)
            columns = (part[rest][:, left] / rows[:, None]).sum(0)
            part = part.clone()
            part[:, left] /= columns
    return total


def test_permutations_are_drawn_as_often_as_their_log_probabilities_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 24 of them, with so much of the uniform mixed in that it counts."""
    monkeypatch.setattr(sequential, "UNIFORM", 0.5)
    log_matrix = torch.randn(4, 4)
    assignments, log_proposals = propose(log_matrix.unsqueeze(0), 100_000)
    total = 0.0
    for assignment in itertools.permutations(range(4)):
        drawn = (assignments[0] == torch.tensor(assignment)).all(-1)
        expected = log_probability(log_matrix, list(assignment), uniform=0.5)
        assert torch.allclose(log_proposals[0, drawn], torch.tensor(expected))
        probability = math.exp(expected)
        error = float(drawn.double().mean()) - probability
        assert abs(error) < Z_LIMIT * math.sqrt(probability * (1 - probability) / 100_000)
        total += probability
    assert total == pytest.approx(1.0)


def test_the_identity_stands_where_it_is_asked_for() -> None:
    """In several matrices of separate and of overlapping units, and in any place."""
    pairs = torch.cat([gaussian_pairs(5, separation, 2).detach() for separation in (0.3, 1.0, 6.0)])
    identity = torch.rand(6, 7) < 0.5
    assignments, log_proposals = propose(pairs, 7, identity)
    assert (assignments.sort(-1).values == torch.arange(5)).all()
    assert (assignments[identity] == torch.arange(5)).all()
    for i, k in itertools.product(range(6), range(7)):
        expected = log_probability(pairs[i], assignments[i, k].tolist())
        assert float(log_proposals[i, k]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_proposals_follow_the_units_and_the_seed() -> None:
    """Relabelled units are proposed with the probabilities they had; a seed gives its draws again."""
    pairs = gaussian_pairs(6, 1.0, 1).detach()
    relabelling = torch.randperm(6)
    probabilities = [
        propose(matrix, 1, torch.ones(1, 1, dtype=torch.bool))[1]
        for matrix in (pairs[..., relabelling], pairs[:, relabelling.argsort()])
    ]
    assert torch.allclose(probabilities[0], probabilities[1])
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append(propose(pairs, 3)[0])
    assert (draws[0] == draws[1]).all()


def test_scaling_survives_entries_beyond_the_range_of_numbers() -> None:
    for log_matrix in (1e3 * torch.randn(3, 40, 40), -1e5 * (1 - torch.eye(9)) + 1e6 * torch.rand(9, 9)):
        assert sinkhorn(log_matrix).isfinite().all()
        batch = log_matrix.reshape(-1, *log_matrix.shape[-2:])
        assignments, log_proposals = propose(batch, 8)
        assert (assignments.sort(-1).values == torch.arange(batch.shape[-1])).all()
        assert log_proposals.isfinite().all() and (log_proposals <= 1e-12).all()
    balanced = sinkhorn(torch.randn(8, 8), sweeps=200).exp()
    assert torch.allclose(balanced.sum(0), torch.ones(8)) and torch.allclose(balanced.sum(1), torch.ones(8))


@pytest.mark.parametrize(("count", "allowed"), [(8, 0.15), (64, 0.03)])
def test_the_bound_is_tight_where_uniform_elements_saturate(count: int, allowed: float) -> None:
    with torch.no_grad():
        pairs = gaussian_pairs(12, 1.0, 400)
        exact = gain(pairs, log_permanent(pairs) - math.lgamma(13)).mean()
        bound = gain(pairs, importance(pairs, count)).mean()
    assert exact > 12.0 > math.log(64)
    assert exact - bound < allowed


def test_both_halves_share_their_permutations() -> None:
    with torch.no_grad():
        pairs = gaussian_pairs(8, 1.0, 400)
        truth = log_permanent(pairs) - math.lgamma(9)
        below, above = (half - truth for half in importance_bracket(pairs, 4))
    assert above.mean() > -Z_LIMIT * above.std() / 20
    assert below.mean() < Z_LIMIT * below.std() / 20


@pytest.mark.parametrize(("n", "separation", "allowed"), [(64, 1.0, 0.5), (64, 2.0, 1.0), (128, 2.0, 3.0)])
def test_looking_ahead_brackets_many_units(n: int, separation: float, allowed: float) -> None:
    """Without it the same number of permutations leaves 2 to 25 nats, and the control says so."""
    with torch.no_grad():
        pairs = gaussian_pairs(n, separation, 4)
        below, above = importance_bracket(pairs, 32)
    assert abs(above.mean() - below.mean()) < allowed


def test_without_looking_ahead_the_bracket_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: scales that stay those of the whole matrix."""
    monkeypatch.setattr(sequential, "_rescale", lambda left, scales, free: free.clone())
    with torch.no_grad():
        below, above = importance_bracket(gaussian_pairs(128, 2.0, 4), 32)
    assert above.mean() - below.mean() > 10


@pytest.mark.parametrize(("count", "allowed"), [(8, 0.25), (64, 0.05)])
def test_the_gradient_is_close_to_the_exact_one(count: int, allowed: float) -> None:
    means = (0.7 * torch.randn(8, 5)).requires_grad_()
    points = (means + torch.randn(400, 8, 5)).unsqueeze(-3)
    pairs = dist.Normal(means.unsqueeze(-2), 1.0).log_prob(points).sum(-1)
    gradients = [
        torch.autograd.grad(gain(pairs, average).mean(), means, retain_graph=True)[0]
        for average in (log_permanent(pairs), importance(pairs, count))
    ]
    assert (gradients[1] - gradients[0]).norm() < allowed * gradients[0].norm()


# Guides


def layer() -> None:
    with pyro.plate("units", 4):
        pyro.sample("incoming", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("gain", dist.LogNormal(0.0, 1.0))
    pyro.sample("outgoing", dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
    pyro.sample("elsewhere", dist.Normal(0.0, 1.0))


tanh_layer = normals({"incoming": (4, 3), "outgoing": (2, 4)})

SIGNED = {"incoming": -2, "outgoing": -1}
LAYERS: list[tuple[Any, Symmetry]] = [
    (layer, Permutation({"incoming": -2, "gain": -1, "outgoing": -1})),
    (tanh_layer, Product(Permutation(SIGNED), SignFlip(SIGNED))),
]


@pytest.mark.parametrize("limit", [2**22, 0])
@pytest.mark.parametrize(("model", "symmetry"), LAYERS)
def test_a_mean_field_layer_is_a_permanent(
    model: Any, symmetry: Symmetry, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same average by enumeration; gradients too, with pairs by differences and by matrix products."""
    monkeypatch.setattr(units, "MAX_DIFFERENCES", limit)
    guide = AutoSymmetrized(AutoNormal(model, init_scale=1.0), symmetry)
    layout, draws = guide._draw(5, (), {})
    assert guide.method == "exact" and isinstance(guide._average, OneBlock)
    log_prob = guide._log_density(layout, draws, (), {})
    values = [
        guide._log_orbit_average(layout, draws, (), {}),
        enumerated(symmetry, log_prob, draws.values, draws.own),
    ]
    assert torch.allclose(values[0], values[1], rtol=0, atol=1e-11)
    parameters = [p for p in guide.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(v.sum(), parameters, retain_graph=True) for v in values]
    for ours, reference in zip(*gradients, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-8, atol=1e-10)


def test_a_wide_layer_gains_more_than_any_uniform_average() -> None:
    """log 20! is 42.3 nats; 16 uniform elements could report 2.8."""

    model = normals({"w": (20,)}, 100.0)

    apart = AutoNormal(model, init_loc_fn=lambda site: 10 * torch.arange(20.0), init_scale=1.0)
    guide = AutoSymmetrized(apart, Permutation({"w": -1}))
    result = guide.symmetry_gain(num_samples=50)
    assert result.method == "importance"
    assert result.lower == pytest.approx(math.lgamma(21), abs=0.02)
    assert result.lower <= result.upper + 2 * Z_LIMIT * result.standard_error
    assert result.estimate == pytest.approx((result.lower + result.upper) / 2)
    assert result.upper <= result.log_order
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert math.isfinite(svi.step())


def test_what_does_not_factorise_is_not_taken_for_it() -> None:
    def mixture() -> None:
        pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        pyro.sample("locs", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))

    both = Permutation({"weights": -1, "locs": -1})
    guide = AutoNormal(mixture)
    guide()
    assert pair_normals(guide, both) is None, "stick-breaking mixes the coordinates of a simplex"
    assert pair_normals(guide, Permutation({"locs": (-2, -1)})) is None, "two axes are no permanent"
    assert pair_normals(guide, Permutation({"locs": -1})) is not None
    dense = AutoMultivariateNormal(mixture)
    dense()
    assert pair_normals(dense, Permutation({"locs": -1})) is None


def test_matrix_products_lose_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision, where the terms that cancel have a hundred thousand nats."""
    loc, scale = torch.randn(30, 800).float(), 0.05 + 0.01 * torch.rand(30, 800).float()
    points = loc + scale * torch.randn(2, 30, 800).float()
    exact = dist.Normal(loc.double()[:, None], scale.double()[:, None])
    pairs = exact.log_prob(points.double().unsqueeze(1)).sum(-1)
    assert pairs.min() < -1e5
    monkeypatch.setattr(units, "MAX_DIFFERENCES", 0)
    assert torch.allclose(units._normal_pairs(loc, scale, points), pairs, rtol=0, atol=1e-8)
    # Negative control: the same without double precision.
    monkeypatch.setattr(torch.Tensor, "double", lambda tensor: tensor)
    lossy = units._normal_pairs(loc, scale, points)
    assert (lossy - pairs).abs().max() > 1e-3
