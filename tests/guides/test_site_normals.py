"""Registered normals of guides: Pyro's own, a user's, and wrong ones, which guides.checks refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.guides import AutoCallable
from pyro.nn import PyroParam
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_sym import AutoSymmetrized, Permutation
from pyro_sym.guides import symmetrized
from pyro_sym.guides.average import OneBlock
from pyro_sym.guides.average_by_blocks import BlocksOfNormals
from pyro_sym.guides.site_normals import SiteNormal, SiteNormals, site_normals
from pyro_sym.orbit.enumeration import enumerated
from tests.catalogue import normals as normal_sites
from tests.conftest import Z_LIMIT
from tests.guides.test_average_by_blocks import LAYERS, mlp

pytestmark = pytest.mark.usefixtures("float64")

UNITS = Permutation({"locs": -2, "scales": -1})


def units(n: int) -> Callable[[], None]:
    """Units of a vector and a positive number, beside a simplex and a number that nothing moves."""

    def model() -> None:
        pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
        with pyro.plate("units", n):
            pyro.sample("locs", dist.Normal(torch.zeros(3), 2.0).to_event(1))
            pyro.sample("scales", dist.LogNormal(0.0, 1.0))
        pyro.sample("noise", dist.Normal(0.0, 1.0))

    return model


def listed(model: Callable[[], None]) -> AutoGuideList:
    """Independent normals beside a site that has none."""
    guides = AutoGuideList(model)
    guides.append(AutoDiagonalNormal(pyro.poutine.block(model, hide=["shares"]), init_scale=0.5))
    guides.append(AutoMultivariateNormal(pyro.poutine.block(model, expose=["shares"])))
    return guides


def called() -> None:
    """A guide for an ``AutoCallable``."""
    pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))


@pytest.mark.parametrize(
    ("make", "sites"),
    [
        (AutoNormal, {"shares", "locs", "scales", "noise"}),
        (AutoDiagonalNormal, {"shares", "locs", "scales", "noise"}),
        (listed, {"locs", "scales", "noise"}),
        (AutoMultivariateNormal, set()),
    ],
)
def test_normals_of_pyros_guides(make: Any, sites: set[str]) -> None:
    """Their sum is the log density that the guide gave to its draws; that of what is left is constant."""
    guide = AutoSymmetrized(make(units(5)), UNITS, estimator="uniform")
    run = guide.draw(6)
    found = site_normals(guide.guide, ["shares", "locs", "scales", "noise"])
    assert set(found) == sites
    told = torch.zeros(6)
    for name, normal in found.items():
        told = told + normal.log_prob(run.draws.values[name])
    if len(sites) == 4:
        torch.testing.assert_close(told, run.draws.own)
    elif sites:
        others = {**run.draws.values, **{name: run.draws.values[name].roll(1, 0) for name in sites}}
        torch.testing.assert_close(told.roll(1, 0) - told, run.density()(others) - run.draws.own)


def test_only_sites_asked_for_are_read() -> None:
    guide = AutoNormal(units(3))
    guide()
    assert set(site_normals(guide, ["locs", "unknown"])) == {"locs"}
    assert site_normals(AutoCallable(units(3), called), ["locs"]) == {}


@pytest.mark.parametrize("n", [5, 9])
def test_a_flat_guide_is_averaged_as_one_site_by_site(n: int) -> None:
    """``AutoDiagonalNormal`` at the parameters of an ``AutoNormal``: one average at the same draws."""
    first = AutoSymmetrized(AutoNormal(units(n), init_scale=0.8), UNITS)
    second = AutoSymmetrized(AutoDiagonalNormal(units(n), init_scale=0.8), UNITS)
    first(), second()
    for guide in (first, second):
        assert isinstance(guide.average, OneBlock) and guide.method == "exact"
    with torch.no_grad():
        theirs = [site_normals(first.guide, [name])[name] for name in ("shares", "locs", "scales", "noise")]
        second.guide.loc.copy_(torch.cat([normal.loc.flatten() for normal in theirs]))  # type: ignore[attr-defined]
        run = first.draw(20)
        torch.testing.assert_close(second.average.bound(run, 2), first.average.bound(run, 2))


def test_a_flat_guide_of_two_layers_is_summed_over_exactly_in_part() -> None:
    guide = AutoSymmetrized(AutoDiagonalNormal(mlp(), init_scale=0.7), LAYERS, estimator="importance")
    run = guide.draw(5)
    assert isinstance(guide.average, BlocksOfNormals)
    exact = enumerated(LAYERS, run.density(), run.draws.values, run.draws.own)
    above = guide.log_average(run) - exact
    assert above.mean() > -Z_LIMIT * above.std() / 5**0.5


def test_a_flat_guide_far_apart_is_certified() -> None:
    base = AutoDiagonalNormal(normal_sites({"w": (6,)}, scale=50.0), lambda site: 9.0 * torch.arange(6.0))
    guide = AutoSymmetrized(base, Permutation({"w": -1}))
    svi = SVI(base.model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    svi.step()
    assert guide._certificate is not None and guide._certificate._anchor is not None


# Guides of one's own


class Handwritten:
    """A guide as a class: normal vectors and log-normal numbers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def parameters(self) -> dict[str, Tensor]:
        positive = {"constraint": constraints.positive}
        start = 0.5 * torch.arange(float(self.n))
        return {
            "locs": pyro.param("locs.loc", start.unsqueeze(-1).repeat(1, 3)),
            "scales": pyro.param("scales.loc", start / 3),
            "spread": pyro.param("spread", torch.tensor(0.6), **positive),
        }

    def __call__(self) -> None:
        at = self.parameters()
        joint = dist.Normal(at["locs"], at["spread"]).to_event(2)
        pyro.sample("shares", dist.Dirichlet(torch.ones(4)))
        # One site for all units: from its distribution alone nobody sees that units are independent.
        pyro.sample("locs", dist.TransformedDistribution(joint, []))
        pyro.sample("scales", dist.LogNormal(at["scales"], at["spread"]).to_event(1))
        pyro.sample("noise", dist.Normal(0.0, 1.0))


@site_normals.register
def _(guide: Handwritten, sites: Collection[str]) -> SiteNormals:
    at = guide.parameters()
    return {
        "locs": SiteNormal(at["locs"], at["spread"].expand_as(at["locs"]), constraints.real),
        "scales": SiteNormal(at["scales"], at["spread"].expand_as(at["scales"]), constraints.positive),
    }


class Whitened(AutoGuide):
    """An autoguide that draws the unconstrained value of its one site as an auxiliary site."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        (site,) = (site for _, site in self.prototype_trace.iter_stochastic_nodes())
        self.loc = PyroParam(0.4 * torch.arange(float(site["value"].numel())))
        self.log_scale = PyroParam(torch.full_like(site["value"], -0.5))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        fn = dist.Normal(self.loc, self.log_scale.exp()).to_event(1)
        z = pyro.sample("z", fn, infer={"is_auxiliary": True})
        return {"w": pyro.sample("w", dist.Delta(z, event_dim=1))}


@site_normals.register
def _whitened(guide: Whitened, sites: Collection[str]) -> SiteNormals:
    return {"w": SiteNormal(guide.loc, guide.log_scale.exp(), constraints.real)}


OWN = [
    pytest.param(Handwritten, units, UNITS, id="class"),
    pytest.param(lambda n: Whitened(normal_sites({"w": (n,)})), lambda n: normal_sites({"w": (n,)}),
                 Permutation({"w": -1}), id="autoguide"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "model", "symmetry"), OWN)
def test_a_guide_of_ones_own_is_averaged_exactly(base: Any, model: Any, symmetry: Permutation) -> None:
    """At 4 units as by enumeration, gradients too; at 9 between both bounds of importance sampling."""
    guide = AutoSymmetrized(base(4), symmetry, model=model(4))
    run = guide.draw(5)
    assert isinstance(guide.average, OneBlock) and guide.method == "exact"
    values = guide.log_average(run), enumerated(symmetry, run.density(), run.draws.values, run.draws.own)
    torch.testing.assert_close(*values)
    assert (values[0] - run.draws.own).max() > -3.0, "the case must have overlap"
    parameters = [p.unconstrained() for p in pyro.get_param_store().values()]
    gradients = [torch.autograd.grad(v.sum(), parameters, retain_graph=True) for v in values]
    for ours, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, reference)

    pyro.clear_param_store()
    large = base(9)
    guide = AutoSymmetrized(large, symmetry, model=model(9))
    plain = AutoSymmetrized(large, symmetry, estimator="importance", num_elements=32, model=model(9))
    with torch.no_grad():
        run = guide.draw(200)
        plain()
        assert guide.method == "exact" and plain.method == "importance"
        exact = guide.average.bound(run, 0)
        above, below = plain.average.bound(run, 32) - exact, plain.average.unbiased(run, 32) - exact
    assert above.mean() > -Z_LIMIT * above.std() / 200**0.5
    assert below.mean() < Z_LIMIT * below.std() / 200**0.5
    assert above.mean() < 0.2


class Wrong(Handwritten):
    """The same guide, with normals that the fault spoils."""

    fault: Callable[[SiteNormal], SiteNormal]


@site_normals.register
def _wrong(guide: Wrong, sites: Collection[str]) -> SiteNormals:
    normals = site_normals.dispatch(Handwritten)(guide, sites)
    return {**normals, "scales": guide.fault(normals["scales"])}


FAULTS: dict[str, tuple[Callable[[SiteNormal], SiteNormal], str]] = {
    "log of the scale": (lambda n: n._replace(scale=n.scale.log().abs()), "Site 'scales' fits worst"),
    "constrained mean": (lambda n: n._replace(loc=n.loc.exp() + 3), "Site 'scales' fits worst"),
    "another support": (lambda n: n._replace(support=constraints.real), "Site 'scales' fits worst"),
    "one number": (
        lambda n: n._replace(scale=n.scale[0]),
        "loc and scale of site 'scales' have shapes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_normals_are_refused(fault: str) -> None:
    change, message = FAULTS[fault]
    base = Wrong(5)
    base.fault = change  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=rf"site_normals of Wrong.*{message}"):
        AutoSymmetrized(base, UNITS, model=units(5))()


def test_unchecked_wrong_normals_are_another_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what the check is for."""
    monkeypatch.setattr(symmetrized, "check_site_normals", lambda *given: None)
    base = Wrong(4)
    base.fault = FAULTS["constrained mean"][0]  # type: ignore[method-assign]
    guide = AutoSymmetrized(base, UNITS, model=units(4))
    run = guide.draw(5)
    exact = enumerated(UNITS, run.density(), run.draws.values, run.draws.own)
    assert (guide.log_average(run) - exact).abs().max() > 0.1


class Stretched(AutoNormal):
    """A subclass that inherits the normals, but draws something else."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        loc = self.locs.w
        return {"w": pyro.sample("w", dist.StudentT(3.0, loc, 5.0).to_event(1))}


def test_inherited_normals_are_compared_too() -> None:
    model = normal_sites({"w": (5,)})
    with pytest.raises(ValueError, match=r"site_normals of Stretched.*Site 'w' fits worst"):
        AutoSymmetrized(Stretched(model), Permutation({"w": -1}))()
