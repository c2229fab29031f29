"""Symmetrised guides on products of permutations and signs, and guides whose units are not independent.

Covers also `guides.average`, `guides.choose` and `guides.density`.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalMessenger,
)
from pyro.optim import Adam
from torch import Tensor

from pyro_sym import AutoSymmetrized, Permutation, Product, SignFlip, Symmetry, SymmetryError
from pyro_sym.guides import average_by_blocks as blocks
from pyro_sym.guides.average import Enumeration, OneBlock, OrbitAverage, PartlyOneBlock, Uniform
from pyro_sym.guides.average_by_blocks import BlocksOfDensity, BlocksOfNormals
from pyro_sym.orbit.enumeration import enumerated
from tests.catalogue import COMPONENTS, components
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

Guide = Callable[..., Any]

FIRST = {"w1": -2, "b1": -1, "w2": -1}
SECOND = {"w2": -2, "b2": -1, "w3": -1}
LAYERS = Product(Permutation(FIRST), SignFlip(FIRST), Permutation(SECOND), SignFlip(SECOND))
STATES = Permutation({"init": -1, "trans": (-2, -1), "locs": -1})
X = torch.linspace(-1.0, 1.0, 6, dtype=torch.double).unsqueeze(-1).repeat(1, 3)
Y = X.sum(-1).tanh()


def mlp(widths: tuple[int, int, int, int] = (3, 4, 3, 2)) -> Guide:
    """A network with two hidden layers of tanh units, and a site that nothing moves."""
    d, h1, h2, o = widths
    shapes = {"w1": (h1, d), "b1": (h1,), "w2": (h2, h1), "b2": (h2,), "w3": (o, h2)}

    def model(x: Tensor | None = None, y: Tensor | None = None) -> None:
        w = {
            name: pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
        if x is None:
            return
        # Particles stand two dims in front of a weight, and one in front of the data.
        w = {
            name: value.squeeze(-len(shapes[name]) - 1) if noise.dim() else value for name, value in w.items()
        }
        hidden = (x @ w["w1"].mT + w["b1"].unsqueeze(-2)).tanh()
        hidden = (hidden @ w["w2"].mT + w["b2"].unsqueeze(-2)).tanh()
        with pyro.plate("data", len(x)):
            mean = (hidden @ w["w3"].mT).sum(-1)
            pyro.sample("y", dist.Normal(mean, noise), obs=y)

    return model


def hmm(simplex: bool) -> Guide:
    """Four hidden states, with transitions on a simplex or as free logits."""

    def model() -> None:
        if simplex:
            pyro.sample("init", dist.Dirichlet(torch.ones(4)))
            with pyro.plate("states", 4):
                pyro.sample("trans", dist.Dirichlet(torch.ones(4)))
        else:
            pyro.sample("init", dist.Normal(torch.zeros(4), 1.0).to_event(1))
            pyro.sample("trans", dist.Normal(torch.zeros(4, 4), 1.0).to_event(2))
        pyro.sample("locs", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("scale", dist.LogNormal(0.0, 1.0))

    return model


def wide(n: int = 20) -> Guide:
    return lambda: pyro.sample("w", dist.Normal(torch.zeros(n), 100.0).to_event(1))


def scattered(separation: float) -> Callable[[Any], Tensor]:
    def init(site: Any) -> Tensor:
        start = separation * torch.randn(site["fn"].shape())
        if site["name"] in ("noise", "scale"):
            return start.exp()
        return start.softmax(-1) if site["fn"].support is dist.constraints.simplex else start

    return init


def bracket(guide: AutoSymmetrized, count: int, num_elements: int) -> tuple[Tensor, Tensor]:
    """How far the bound and the unbiased estimate are from the exact average, at the guide's own draws."""
    with torch.no_grad():
        layout, draws = guide._draw(count, (), {})
        run = guide._run(layout, draws, (), {})
        exact = enumerated(guide.symmetry, run.density(), draws.values, draws.own)
        chosen = guide._chosen
        halves = chosen.bound(run, num_elements), chosen.unbiased(run, num_elements)
        return draws.own + halves[0] - exact, draws.own + halves[1] - exact


def check_direction(above: Tensor, below: Tensor) -> None:
    root = math.sqrt(len(above))
    assert above.mean() > -Z_LIMIT * above.std() / root
    assert below.mean() < Z_LIMIT * below.std() / root


def importance(guide: Guide, symmetry: Symmetry, **kwargs: Any) -> AutoSymmetrized:
    return AutoSymmetrized(guide, symmetry, estimator="importance", **kwargs)


@pytest.mark.parametrize("separation", [0.3])
def test_two_hidden_layers(separation: float) -> None:
    guide = importance(AutoNormal(mlp(), init_loc_fn=scattered(separation), init_scale=0.7), LAYERS)
    above, below = bracket(guide, 5, 64)
    assert isinstance(guide._average, BlocksOfNormals) and guide.method == "importance"
    check_direction(above, below)
    assert above.mean() < 0.3


@pytest.mark.parametrize("separation", [0.0, 0.5])
@pytest.mark.parametrize("simplex", [False, True])
def test_hidden_states(simplex: bool, separation: float) -> None:
    base = AutoNormal(hmm(simplex), init_loc_fn=scattered(separation), init_scale=0.7)
    guide = importance(base, STATES)
    above, below = bracket(guide, 60, 64)
    assert isinstance(guide._average, BlocksOfDensity if simplex else BlocksOfNormals)
    check_direction(above, below)
    assert above.mean() < 0.1


def drifted(site: Any) -> Tensor:
    return (-0.7 * torch.arange(4.0)).softmax(-1) if site["name"] == "weights" else scattered(0.7)(site).exp()


@pytest.mark.parametrize("scale", [0.1, 0.7])
def test_weights_on_a_simplex_beside_units(scale: float) -> None:
    """By proposals that do not know the weights, whose density no permanent has."""
    guide = importance(AutoNormal(components(4), init_loc_fn=drifted, init_scale=scale), COMPONENTS)
    above, below = bracket(guide, 300, 32)
    assert isinstance(guide._average, PartlyOneBlock)
    check_direction(above, below)
    assert above.mean() < 0.25


def test_the_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without them the average is another."""
    guide = importance(AutoNormal(components(4), init_loc_fn=drifted, init_scale=0.7), COMPONENTS)
    monkeypatch.setattr(PartlyOneBlock, "_of_rest", lambda self, run: None)
    above, _ = bracket(guide, 300, 32)
    assert above.mean() > 0.5


def by_hand() -> None:
    """Two units tied by a chain: no density factorises over them."""
    scale = pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
    trans = pyro.sample("trans", dist.Normal(torch.eye(4), scale).to_event(2))
    pyro.sample("locs", dist.Normal(trans.sum(-1), scale).to_event(1))
    pyro.sample("init", dist.Dirichlet(torch.arange(1.0, 5.0)))
    pyro.sample("scale", dist.LogNormal(0.0, 1.0))


def listed(model: Guide) -> AutoGuideList:
    guides = AutoGuideList(model)
    guides.append(AutoMultivariateNormal(pyro.poutine.block(model, expose=["trans", "init"]), init_scale=0.7))
    guides.append(AutoNormal(pyro.poutine.block(model, hide=["trans", "init"]), init_scale=0.7))
    return guides


GUIDES = [
    pytest.param(lambda: AutoMultivariateNormal(hmm(True), init_scale=0.7), id="mvn"),
    pytest.param(lambda: AutoLowRankMultivariateNormal(hmm(True), init_scale=0.3), id="low rank"),
    pytest.param(lambda: AutoIAFNormal(hmm(True)), id="flow"),
    pytest.param(lambda: AutoNormalMessenger(hmm(True)), id="messenger"),
    pytest.param(lambda: listed(hmm(True)), id="list"),
    pytest.param(lambda: by_hand, id="by hand"),
]


@pytest.mark.parametrize("make", GUIDES)
def test_any_guide_with_a_density(make: Callable[[], Guide]) -> None:
    guide = importance(make(), STATES, model=hmm(True))
    above, below = bracket(guide, 40, 32)
    assert isinstance(guide._average, BlocksOfDensity)
    check_direction(above, below)
    assert above.mean() < 0.5


def test_the_unbiased_half_is_no_bound() -> None:
    """Negative control: without the identity the direction is the other one."""
    guide = importance(AutoMultivariateNormal(hmm(False), init_scale=0.5), STATES)
    above, below = bracket(guide, 200, 2)
    check_direction(above, below)
    with pytest.raises(AssertionError):
        check_direction(below, above)


def correlated() -> None:
    covariance = 0.5 * torch.eye(20) + 0.5
    start = pyro.param("start", 10.0 * torch.arange(20.0))
    pyro.sample("w", dist.MultivariateNormal(start, covariance))


@pytest.mark.parametrize(
    "make",
    [
        lambda init: AutoMultivariateNormal(wide(), init_loc_fn=init, init_scale=1.0),
        lambda init: AutoLowRankMultivariateNormal(wide(), init_loc_fn=init, init_scale=1.0),
        lambda init: correlated,
    ],
)
def test_the_gain_is_tight_where_uniform_elements_saturate(make: Callable[..., Guide]) -> None:
    """log 20! is 42.3 nats; 16 uniform elements could report 2.8."""
    base = make(lambda site: 10 * torch.arange(20.0))
    guide = AutoSymmetrized(base, Permutation({"w": -1}), model=wide())
    gain = guide.symmetry_gain(num_samples=50)
    assert gain.method == "importance", "chosen by itself"
    assert gain.lower == pytest.approx(math.lgamma(21), abs=0.1)
    assert gain.lower <= gain.upper + 2 * Z_LIMIT * gain.standard_error


@pytest.mark.parametrize("base", [AutoNormal, AutoMultivariateNormal])
def test_it_trains(base: Callable[[Guide], Guide]) -> None:
    guide = AutoSymmetrized(base(mlp((3, 4, 3, 1))), LAYERS, num_elements=4)
    before = None
    for elbo in (Trace_ELBO(), Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)):
        svi = SVI(mlp((3, 4, 3, 1)), guide, Adam({"lr": 0.01}), elbo)
        assert math.isfinite(svi.step(X, Y)) and math.isfinite(svi.step(X, Y))
        parameters = torch.cat([p.detach().flatten() for p in guide.parameters()])
        assert parameters.isfinite().all()
        assert before is None or not torch.equal(parameters, before)
        before = parameters
    assert guide.method == "importance", "18,432 elements are too many to enumerate unasked"


def test_vectorised_particles_mean_the_same() -> None:
    model = mlp((3, 4, 3, 1))
    guide = importance(AutoMultivariateNormal(model, init_scale=0.5), LAYERS, num_elements=8)
    losses = []
    for elbo in (
        Trace_ELBO(num_particles=4),
        Trace_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1),
    ):
        with torch.no_grad():
            losses.append(torch.tensor([elbo.loss(model, guide, X, Y) for _ in range(12)]))
    error = math.sqrt(sum(float(x.var()) / 12 for x in losses))
    assert abs(losses[0].mean() - losses[1].mean()) < Z_LIMIT * error


def test_fitting_the_normals_takes_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And uses none of those that come next: else the proposals would know what they are given."""
    guide = importance(AutoMultivariateNormal(hmm(True)), STATES)
    guide()
    fitted: list[Tensor] = []
    redraw = guide._redraw

    def spy(count: int, *rest: Any) -> dict[str, Tensor]:
        fitted.append(redraw(count, *rest)["locs"])
        return redraw(count, *rest)

    monkeypatch.setattr(guide, "_redraw", spy)
    with torch.no_grad():
        layout, draws = guide._draw(3, (), {})
        before = torch.get_rng_state()
        chosen = guide._chosen
        assert isinstance(chosen, BlocksOfDensity)
        chosen._moments(guide._run(layout, draws, (), {}))
        assert torch.equal(before, torch.get_rng_state())
        next_ones = guide._redraw(blocks.NUM_FITTED, (), {})["locs"]
    assert fitted[0].shape == next_ones.shape
    assert not torch.isin(fitted[0], next_ones).any()


def test_normals_are_fitted_again_as_the_guide_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "REFIT_EVERY", 4)
    guide = importance(AutoMultivariateNormal(hmm(False)), STATES)
    seen = set()
    for _ in range(blocks.REFIT_EVERY + 2):
        guide.symmetry_gain(num_samples=2)
        chosen = guide._chosen
        assert isinstance(chosen, BlocksOfDensity)
        seen.add(float(chosen._fitted["locs"][0][0]))
        with torch.no_grad():
            guide.guide.loc.add_(1.0)  # type: ignore[attr-defined]
    assert 2 <= len(seen) < blocks.REFIT_EVERY


def test_copies_fit_normals_of_their_own() -> None:
    guide = importance(AutoMultivariateNormal(hmm(True)), STATES)
    guide.symmetry_gain(num_samples=2)
    for other in (pickle.loads(pickle.dumps(guide)), copy.deepcopy(guide)):
        assert other._chosen.guide is other.guide
        assert math.isfinite(other.symmetry_gain(num_samples=2).lower)


class Mirror(Symmetry):
    """Reversal of a site: a group of two elements that this package does not know."""

    def __init__(self) -> None:
        self.axes = {"w": (-1,)}

    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        w = values["w"]
        flip = element.reshape(*element.shape[:-1], *(1,) * (w.dim() - element.dim() + 1)) < 0
        return {"w": torch.where(flip, w.flip(-1), w)}

    def check_values(self, values: Any) -> None: ...

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second

    def identity(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.ones(*batch_shape, 1)

    def sample(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return 1.0 - 2 * torch.randint(2, (*batch_shape, 1))

    def elements(self, values: Any) -> Tensor:
        return torch.tensor([[1.0], [-1.0]])

    def generators(self, values: Any) -> list[tuple[str, Tensor]]:
        return [("mirror", torch.tensor([-1.0]))]

    def log_order(self, values: Any) -> float:
        return 10.0  # claimed large, so that it isn't enumerated


APART = Product(Permutation({"w1": -2}), SignFlip({"w3": -1}))
CHOICES: list[tuple[Callable[[], Guide], Symmetry, type[OrbitAverage], str]] = [
    (lambda: AutoNormal(wide(14)), Permutation({"w": -1}), OneBlock, "exact"),
    (lambda: AutoNormal(wide(15)), Permutation({"w": -1}), OneBlock, "importance"),
    (lambda: AutoNormal(components(6)), COMPONENTS, Enumeration, "exact"),
    (lambda: AutoNormal(components(7)), COMPONENTS, PartlyOneBlock, "importance"),
    (lambda: AutoMultivariateNormal(wide(6)), Permutation({"w": -1}), Enumeration, "exact"),
    (lambda: AutoMultivariateNormal(wide(7)), Permutation({"w": -1}), BlocksOfDensity, "importance"),
    (lambda: AutoNormal(mlp()), LAYERS, BlocksOfNormals, "importance"),
    (lambda: AutoNormal(mlp((3, 9, 9, 2))), APART, BlocksOfNormals, "exact"),
    (lambda: AutoNormal(wide(3)), Mirror(), Uniform, "uniform"),
]


@pytest.mark.parametrize(("make", "symmetry", "kind", "method"), CHOICES)
def test_what_is_chosen(
    make: Callable[[], Guide], symmetry: Symmetry, kind: type[OrbitAverage], method: str
) -> None:
    guide = AutoSymmetrized(make(), symmetry)
    assert guide.method is None, "not yet"
    guide()
    assert isinstance(guide._average, kind)
    assert guide.method == method


def test_uncoupled_blocks_are_exact() -> None:
    apart = Product(Permutation({"w1": -2}), Permutation({"w2": -2, "b2": -1}), SignFlip({"w3": -1}))
    guide = AutoSymmetrized(AutoNormal(mlp(), init_scale=1.0), apart)
    above, below = bracket(guide, 5, 2)
    assert guide.method == "exact"
    assert torch.allclose(above, torch.zeros(5), rtol=0, atol=1e-9)
    assert torch.equal(above, below)


def test_importance_needs_permutations_and_signs() -> None:
    with pytest.raises(
        SymmetryError, match=r"importance' draws permutations and sign flips.*use estimator='un"
    ):
        importance(AutoNormal(wide(3)), Mirror())()
