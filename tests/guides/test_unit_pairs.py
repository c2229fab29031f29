"""Mean-field guides whose density is a permanent."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from pyro.optim import Adam

from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry
from pyro_sym.guides import unit_pairs as units
from pyro_sym.guides.average import OneBlock
from pyro_sym.guides.unit_pairs import pair_normals
from pyro_sym.orbit.enumeration import enumerated
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


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
@pytest.mark.parametrize("base", [AutoNormal, AutoDiagonalNormal])
@pytest.mark.parametrize(("model", "symmetry"), LAYERS)
def test_a_mean_field_layer_is_a_permanent(
    model: Any, symmetry: Symmetry, base: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same average by enumeration; gradients too, with pairs by differences and by matrix products."""
    monkeypatch.setattr(units, "MAX_DIFFERENCES", limit)
    guide = AutoSymmetrized(base(model, init_scale=1.0), symmetry)
    run = guide.draw(5)
    assert guide.method == "exact" and isinstance(guide._average, OneBlock)
    log_prob = run.density()
    values = [
        guide.log_average(run),
        enumerated(symmetry, log_prob, run.draws.values, run.draws.own),
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
