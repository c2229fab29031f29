"""Symmetrised guides on factors of axes, on nested groups, and on the group with one element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.autoguide.initialization import init_to_mean
from pyro.optim import Adam
from torch import Tensor

from pyro_sym import (
    AutoSymmetrized,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    SymmetryError,
    SymmetryGain,
    Viewed,
    from_pyro_svi,
)
from pyro_sym.guides.average import OneBlock, PartlyOneBlock, Trivial, Uniform
from pyro_sym.guides.average_by_blocks import BlocksOfDensity, BlocksOfNormals
from pyro_sym.orbit.enumeration import enumerated
from pyro_sym.symmetry.base import leaves
from pyro_sym.symmetry.flat import flatten, nest
from tests.catalogue import normals
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

Guide = Callable[..., Any]

# A convolution of 4 channels, a flatten to (4, 2), a linear layer of 3 tanh units, and one behind it.
SHAPES = {"conv": (4, 1, 2, 2), "bias": (4,), "linear": (3, 8), "out": (2, 3)}
FLATTENED = {"linear": (3, (4, 2))}
CHANNELS = {"conv": -4, "bias": -1, "linear": -2}
HIDDEN = {"linear": -3, "out": -1}
NETWORK = Viewed(Product(Permutation(CHANNELS), Permutation(HIDDEN), SignFlip(HIDDEN)), FLATTENED)
CONVOLUTION = Viewed(Permutation(CHANNELS), FLATTENED)
SIGNED = Viewed(Product(Permutation(CHANNELS), SignFlip(CHANNELS)), FLATTENED)

model = normals(SHAPES)


def scattered(site: Any) -> Tensor:
    return 0.4 * torch.randn(site["fn"].shape())


def mean_field() -> AutoNormal:
    return AutoNormal(model, init_loc_fn=scattered, init_scale=0.7)


def by_hand() -> Guide:
    """Independent entries, in plates and without, beside a site that is not moved."""
    start = {name: 0.4 * torch.randn(shape) for name, shape in SHAPES.items()}

    def guide() -> None:
        loc = {name: pyro.param(f"loc_{name}", value) for name, value in start.items()}
        pyro.sample("conv", dist.Normal(loc["conv"], 0.7).to_event(4))
        with pyro.plate("channels", 4):
            pyro.sample("bias", dist.Normal(loc["bias"], 0.5))
        pyro.sample("linear", dist.Normal(loc["linear"], 0.6).to_event(2))
        pyro.sample("out", dist.MultivariateNormal(loc["out"], torch.eye(3) + 0.3).to_event(1))

    return guide


def halves(guide: AutoSymmetrized, count: int, num_elements: int) -> tuple[Tensor, Tensor]:
    """How far the bound and the unbiased estimate are from enumeration, at the guide's own draws."""
    with torch.no_grad():
        run = guide.draw(count)
        exact = enumerated(guide.symmetry, run.density(), run.draws.values, run.draws.own)
        chosen = guide.average
        above, below = chosen.bound(run, num_elements), chosen.unbiased(run, num_elements)
        return run.draws.own + above - exact, run.draws.own + below - exact


def check_direction(above: Tensor, below: Tensor) -> None:
    root = math.sqrt(len(above))
    assert above.mean() > -Z_LIMIT * above.std() / root
    assert below.mean() < Z_LIMIT * below.std() / root


@pytest.mark.parametrize("symmetry", [CONVOLUTION, SIGNED], ids=["labels", "signs"])
@pytest.mark.parametrize("base", [mean_field, by_hand], ids=["mean-field", "by hand"])
def test_channels_behind_a_flatten_are_a_permanent(symmetry: Symmetry, base: Callable[[], Guide]) -> None:
    guide = AutoSymmetrized(base(), symmetry, model=model)
    exact, _ = halves(guide, 5, 4)
    assert isinstance(guide._average, OneBlock) and guide.method == "exact"
    assert exact.abs().max() < 1e-10
    assert guide.symmetry_gain(num_samples=20).estimate > 0.1, "the case must have overlap and gain"


def test_negative_control_another_factor_is_another_average() -> None:
    """Columns by row of the image rather than by channel."""
    wrong = Viewed(Permutation({"conv": -4, "bias": -1, "linear": -1}), {"linear": (3, (2, 4))})
    guide = AutoSymmetrized(mean_field(), CONVOLUTION)
    with torch.no_grad():
        run = guide.draw(5)
        other = enumerated(wrong, run.density(), run.draws.values, run.draws.own)
        assert (run.draws.own + guide.average.bound(run, 4) - other).abs().max() > 0.01


def test_a_correlated_guide_is_enumerated() -> None:
    base = AutoMultivariateNormal(model, init_loc_fn=scattered, init_scale=0.5)
    guide = AutoSymmetrized(base, CONVOLUTION, estimator="exact")
    exact, _ = halves(guide, 5, 4)
    assert exact.abs().max() < 1e-10


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        (mean_field, BlocksOfNormals),
        (lambda: AutoMultivariateNormal(model, init_loc_fn=scattered, init_scale=0.5), BlocksOfDensity),
    ],
)
def test_guided_elements_bracket_the_average(base: Callable[[], Guide], kind: type) -> None:
    guide = AutoSymmetrized(base(), NETWORK, estimator="importance")
    above, below = halves(guide, 40, 64)
    assert isinstance(guide._average, kind)
    check_direction(above, below)
    assert above.mean() < 0.3


UNITS = {"conv": -4, "bias": -1}


def plain() -> None:
    pyro.sample("conv", dist.Normal(torch.zeros(4, 1, 2, 2), 1.0).to_event(4))
    pyro.sample("bias", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    pyro.sample("weights", dist.Dirichlet(torch.ones(4)))


def plain_by_hand() -> None:
    pyro.sample("conv", dist.Normal(torch.arange(16.0).reshape(4, 1, 2, 2) / 8, 1.0).to_event(4))
    pyro.sample("bias", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    pyro.sample("weights", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0, 4.0])))


def normal_guide() -> Guide:
    return AutoNormal(plain, init_loc_fn=scattered_plain)


def scattered_plain(site: Any) -> Tensor:
    value = torch.randn(site["fn"].shape())
    return value.softmax(-1) if site["name"] == "weights" else value


SAME = [
    (normal_guide, Permutation(UNITS), "exact", OneBlock),
    (normal_guide, Permutation(UNITS), "importance", OneBlock),
    (normal_guide, Permutation({**UNITS, "weights": -1}), "importance", PartlyOneBlock),
    (normal_guide, Product(Permutation({"conv": -4}), SignFlip({"bias": -1})), "exact", BlocksOfNormals),
    (normal_guide, Permutation(UNITS), "uniform", Uniform),
    (lambda: plain_by_hand, Permutation({**UNITS, "weights": -1}), "exact", OneBlock),
    (lambda: AutoMultivariateNormal(plain), Permutation(UNITS), "importance", BlocksOfDensity),
]


@pytest.mark.parametrize(("base", "symmetry", "estimator", "kind"), SAME)
def test_a_view_that_changes_nothing_changes_nothing(
    base: Callable[[], Guide], symmetry: Symmetry, estimator: Any, kind: type
) -> None:
    def gain(of: Symmetry) -> SymmetryGain:
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = AutoSymmetrized(base(), of, estimator=estimator, model=plain)
        result = guide.symmetry_gain(num_samples=10)
        assert isinstance(guide._average, kind)
        return result

    same = gain(symmetry)
    assert gain(Viewed(symmetry, {})) == same
    assert gain(Product(Viewed(symmetry, {"conv": ((1, 4), 1, 2, 2)}), Product())) == same


def test_units_far_apart_are_certified_through_a_view() -> None:
    def apart(site: Any) -> Tensor:
        value = torch.zeros(site["fn"].shape())
        if site["name"] == "linear":
            value.view(3, 4, 2).add_(100.0 * torch.arange(4.0).unsqueeze(-1))
        return value

    rows = Viewed(Permutation({"conv": -4, "bias": -1, "linear": -1}), {"linear": (3, (2, 4))})
    for symmetry, certified in ((CONVOLUTION, True), (rows, False)):
        guide = AutoSymmetrized(AutoNormal(model, init_loc_fn=apart), symmetry)
        loss = Trace_ELBO().loss(model, guide)
        assert guide._certificate is not None and math.isfinite(loss)
        assert (guide._certificate._anchor is not None) == certified


PARTS = Product(CONVOLUTION, Permutation({"linear": -2, "out": -1}), SignFlip({"out": -2}))


def test_products_of_views_are_flattened() -> None:
    """Native axes of one member, factors of another's, one element for both."""
    group = flatten(PARTS)
    assert group is not None
    assert [type(member) for member in group.members] == [Permutation, Permutation, SignFlip]
    assert group.shapes == {"linear": ((3,), (4, 2))}
    assert group.members[1].axes == {"linear": (-3,), "out": (-1,)}
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    element = PARTS.sample(values)
    flat = group.act(tuple(leaves(element)), values)
    assert nest(PARTS, leaves(element)) == element
    assert all(torch.equal(image, flat[site]) for site, image in PARTS.act(element, values).items())


def test_products_of_views_are_averaged_exactly() -> None:
    alone = Product(CONVOLUTION, SignFlip({"out": -2}))
    guide = AutoSymmetrized(mean_field(), alone)
    exact, _ = halves(guide, 5, 4)
    assert isinstance(guide._average, BlocksOfNormals) and guide.method == "exact"
    assert exact.abs().max() < 1e-10


def test_views_of_views_are_averaged_over_uniform_elements() -> None:
    twice = Viewed(CONVOLUTION, {"linear": (3, 8)})
    assert flatten(twice) is None
    guide = AutoSymmetrized(mean_field(), twice)
    guide()
    assert guide.method == "exact", "by enumeration, as it is small"
    with pytest.raises(SymmetryError, match="uniform"):
        AutoSymmetrized(mean_field(), twice, estimator="importance")()


@pytest.mark.filterwarnings("ignore:the labels of")  # the guide has not been trained
def test_exports_name_the_members_inside() -> None:
    guide = AutoSymmetrized(mean_field(), NETWORK)
    exported = from_pyro_svi(guide, num_samples=20)
    assert {"permutation_0", "permutation_1", "sign"} <= set(exported["sample_stats"].data_vars)
    trivial = from_pyro_svi(guide, num_samples=20, symmetry=Product())
    aligned, raw = trivial["posterior_aligned"]["conv"], trivial["posterior"]["conv"]
    assert (aligned.values == raw.values).all()


@pytest.mark.parametrize("trivial", [Product(), Viewed(Product(), {}), Permutation({"one": -1})])
@pytest.mark.parametrize("estimator", ["auto", "exact", "importance", "uniform"])
def test_the_trivial_group_is_worth_nothing_and_costs_nothing(trivial: Symmetry, estimator: Any) -> None:
    small = normals({"one": (1,)})

    guide = AutoSymmetrized(AutoNormal(small, init_loc_fn=init_to_mean), trivial, estimator=estimator)
    gain = guide.symmetry_gain(num_samples=5)
    assert isinstance(guide._average, Trivial)
    assert (gain.lower, gain.estimate, gain.upper, gain.log_order) == (0.0, 0.0, 0.0, 0.0)
    assert guide.sample_posterior(sample_shape=(3,))["one"].shape == (3, 1)
    plain_guide = AutoNormal(small, init_loc_fn=init_to_mean)
    plain_guide()
    losses = []
    for each in (guide, plain_guide):
        pyro.set_rng_seed(1)
        losses.append(SVI(small, each, Adam({"lr": 0.1}), Trace_ELBO()).step())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
