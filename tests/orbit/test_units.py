"""Permanents, the guided bound on them, and guides whose density is one."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
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
from pyro_sym.infer import units
from pyro_sym.infer.average import OneBlock
from pyro_sym.infer.units import pair_log_probs
from pyro_sym.orbit import sequential
from pyro_sym.orbit.exact import enumerated
from pyro_sym.orbit.permanent import log_permanent
from pyro_sym.orbit.sequential import importance, importance_unbiased, sinkhorn
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


def brute_force(log_matrix: Tensor) -> Tensor:
    n = log_matrix.shape[-1]
    rows = [log_matrix[..., range(n), list(p)].sum(-1) for p in itertools.permutations(range(n))]
    return torch.stack(rows).logsumexp(0)


def gaussian_pairs(n: int, separation: float, draws: int) -> Tensor:
    """Units N(m_i, I_5) with m_i ~ N(0, s^2 I): the setting of the design's tables."""
    means = (separation * torch.randn(n, 5)).requires_grad_()
    points = (means + torch.randn(draws, n, 5)).unsqueeze(-3)
    return dist.Normal(means.unsqueeze(-2), 1.0).log_prob(points).sum(-1)


def gain(pairs: Tensor, log_average: Tensor) -> Tensor:
    return pairs.diagonal(dim1=-2, dim2=-1).sum(-1) - log_average


@pytest.mark.parametrize("n", range(1, 9))
def test_the_dynamic_programme_equals_enumeration(n: int) -> None:
    matrices = 4 * torch.randn(3, n, n)
    assert torch.allclose(log_permanent(matrices), brute_force(matrices), rtol=1e-12, atol=1e-12)


def test_wide_ranges_against_exact_rational_arithmetic() -> None:
    """Entries of lognormal spread 30, as fractions: the same recursion without any rounding."""
    n = 12
    log_matrix = 30 * torch.randn(n, n)
    exact = [[Fraction(x) for x in row] for row in log_matrix.exp().tolist()]
    layer = {0: Fraction(1)}
    for row in range(n):
        following: dict[int, Fraction] = {}
        for subset, value in layer.items():
            for j in range(n):
                if not subset >> j & 1:
                    key = subset | 1 << j
                    following[key] = following.get(key, Fraction(0)) + exact[row][j] * value
        layer = following
    (total,) = layer.values()
    expected = math.log(total.numerator) - math.log(total.denominator)
    assert float(log_permanent(log_matrix.exp().log())) == pytest.approx(expected, rel=1e-12)


def test_extreme_and_empty_entries_stay_finite() -> None:
    log_matrix = torch.tensor([[690.0, -690.0, -torch.inf], [-690.0, 690.0, 0.0], [-torch.inf, 0.0, 690.0]])
    log_matrix.requires_grad_()
    value = log_permanent(log_matrix)
    (marginals,) = torch.autograd.grad(value, log_matrix)
    assert torch.allclose(value, torch.tensor(2070.0))
    assert torch.allclose(marginals, torch.eye(3))
    assert log_permanent(torch.full((2, 2), -torch.inf)) == -torch.inf


def test_the_gradient_is_the_marginals() -> None:
    log_matrix = torch.randn(5, 5, requires_grad=True)
    assert torch.autograd.gradcheck(log_permanent, log_matrix)
    (marginals,) = torch.autograd.grad(log_permanent(log_matrix), log_matrix)
    assert torch.allclose(marginals.sum(0), torch.ones(5))
    assert torch.allclose(marginals.sum(1), torch.ones(5))


def test_what_is_no_permanent_is_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        log_permanent(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"max_size=15, or use the importance"):
        log_permanent(torch.zeros(15, 15))


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


@pytest.mark.parametrize(("count", "allowed"), [(8, 0.15), (64, 0.03)])
def test_the_bound_is_tight_where_uniform_elements_saturate(count: int, allowed: float) -> None:
    with torch.no_grad():
        pairs = gaussian_pairs(12, 1.0, 400)
        exact = gain(pairs, log_permanent(pairs) - math.lgamma(13)).mean()
        bound = gain(pairs, importance(pairs, count)).mean()
    assert exact > 12.0 > math.log(64)
    assert exact - bound < allowed


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


def tanh_layer() -> None:
    pyro.sample("incoming", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    pyro.sample("outgoing", dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))


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

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(20), 100.0).to_event(1))

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
    assert pair_log_probs(guide, both) is None, "stick-breaking mixes the coordinates of a simplex"
    assert pair_log_probs(guide, Permutation({"locs": (-2, -1)})) is None, "two axes are no permanent"
    assert pair_log_probs(guide, Permutation({"locs": -1})) is not None
    dense = AutoMultivariateNormal(mixture)
    dense()
    assert pair_log_probs(dense, Permutation({"locs": -1})) is None
