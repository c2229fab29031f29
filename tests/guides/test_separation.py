"""Leaving the orbit average out where units lie far apart: the bound on what that costs, and when it is seen
to fail."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
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
from pyro_sym.guides.separation import Certificate, _Anchor, certificate
from pyro_sym.orbit.permanent import log_permanent
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


def coefficients(loc: Tensor, scale: Tensor, signed: bool) -> float:
    """The sum of the Bhattacharyya coefficients of all pairs but those of a unit with itself."""

    def all_pairs(other: Tensor) -> Tensor:
        variance = scale.square().unsqueeze(0) + scale.square().unsqueeze(1)
        distance = (loc.unsqueeze(0) - other.unsqueeze(1)).square() / (4 * variance)
        spread = (variance / (2 * scale.unsqueeze(0) * scale.unsqueeze(1))).log() / 2
        return (-distance - spread).sum(-1).exp()

    total = all_pairs(loc).fill_diagonal_(0.0).sum()
    return float(total + all_pairs(-loc).sum()) if signed else float(total)


def layer(n: int, separation: float) -> tuple[Tensor, Tensor]:
    return separation * torch.randn(n, 6), 0.5 + torch.rand(n, 6)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("n", "separation"), [(2, 2.0), (4, 3.0), (6, 4.0), (6, 1.0)])
def test_the_loss_is_within_the_coefficients_and_these_within_the_bound(
    n: int, separation: float, signed: bool
) -> None:
    """The loss in the mean over 20,000 draws, each by an exact permanent."""
    loc, scale = layer(n, separation)
    points = (loc + scale * torch.randn(20_000, n, 6)).unsqueeze(-3)
    unit = dist.Normal(loc.unsqueeze(-2), scale.unsqueeze(-2))
    pairs = unit.log_prob(points).sum(-1)
    own = pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
    if signed:
        pairs = torch.logaddexp(pairs, unit.log_prob(-points).sum(-1))
    loss = log_permanent(pairs) - own
    total = coefficients(loc, scale, signed)
    assert float(loss.min()) >= -1e-9
    assert float(loss.mean() - Z_LIMIT * loss.std() / 20_000**0.5) <= torch.expm1(torch.tensor(total))
    bound = Certificate({"w": -2}, signed, torch.inf).bound({"w": (loc, scale)})
    assert bound is not None and total <= bound


@pytest.mark.parametrize("signed", [False, True])
def test_an_old_anchor_bounds_the_coefficients_wherever_the_parameters_went(signed: bool) -> None:
    """Random walks of means and scales, in two sites with units along different axes."""
    for size in (0.01, 0.1, 0.3):
        loc, scale = layer(5, 8.0)
        watch = Certificate({"a": -2, "b": -1}, signed, torch.inf)
        informative = 0
        for _ in range(30):
            parts = {
                "a": (loc[:, :4], scale[:, :4]),
                "b": (loc[:, 4:].T.contiguous(), scale[:, 4:].T.contiguous()),
            }
            bound = watch.bound(parts)
            assert bound is not None and coefficients(loc, scale, signed) <= bound
            informative += bound < 1
            loc = loc + size * torch.randn(5, 6)
            scale = scale * (size * torch.randn(5, 6)).exp()
        assert informative > 0


class Compared(AutoSymmetrized):
    """Keeps what the certified average was off by, or None, at every step."""

    def _certified_ratio(self, captured: Any, draws: Any) -> float | None:
        known = super()._certified_ratio(captured, draws)
        assert self._layout is not None
        full = self._log_ratio(self._run(self._layout, draws, (), {}))
        error = None if known is None else float(known - full.detach())
        self.__dict__.setdefault("errors", []).append(error)
        return known


def pulled(width: float) -> Callable[[], None]:
    """Six units of two numbers; a wide prior leaves the units where they are."""

    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(6), width).to_event(1))
        with pyro.plate("units", 6):
            pyro.sample("b", dist.Gamma(4.0, 4.0 / width))

    return model


def train(width: float, steps: int, lr: float = 0.2) -> list[float | None]:
    """From means 4 apart; what the average was off by, step by step."""
    base = AutoNormal(pulled(width), init_loc_fn=spread_out, init_scale=0.1)
    guide = Compared(base, Permutation({"a": -1, "b": -1}))
    svi = SVI(pulled(width), guide, Adam({"lr": lr}), Trace_ELBO())
    for _ in range(steps):
        svi.step()
    return guide.__dict__["errors"]


def spread_out(site: Any) -> Tensor:
    return 4 * torch.arange(6.0) if site["name"] == "a" else torch.ones(6)


def test_a_run_that_stays_apart_is_certified_throughout() -> None:
    errors = train(width=100.0, steps=25, lr=0.01)
    assert all(error is not None and abs(error) < 1e-6 for error in errors)


def test_a_run_that_collides_is_left_in_time() -> None:
    """A narrow prior draws all units together: certified at first, never wrongly, and at last no more."""
    errors = train(width=0.3, steps=120)
    known = [error for error in errors if error is not None]
    assert errors[0] is not None and errors[-1] is None
    assert 5 <= len(known) < len(errors)
    # The tolerance bounds the mean: a draw beyond a thousand times it has odds of one in a thousand at most.
    assert min(known) > -1e-3 and max(known) < 1e-6


def test_an_anchor_that_does_not_look_at_the_parameters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same run, with the certificate of its first step."""
    moved = Certificate._moved

    def stale(self: Certificate, anchor: _Anchor, normals: Any) -> float:
        return moved(self, anchor, {name: (anchor.locs[name], anchor.scales[name]) for name in self.axes})

    monkeypatch.setattr(Certificate, "_moved", stale)
    errors = train(width=0.3, steps=120)
    assert min(error for error in errors if error is not None) < -1.0


def test_failed_looks_become_rare_and_are_forgotten_once_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Certificate._measure

    def counted(self: Certificate, normals: Any) -> _Anchor:
        looks.append(normals)
        return look(self, normals)

    monkeypatch.setattr(Certificate, "_measure", counted)
    watch = Certificate({"w": -2}, False, 1e-6)
    together, apart = layer(4, 0.1), layer(4, 100.0)
    assert all(watch.bound({"w": together}) is None for _ in range(1000))
    assert len(looks) < 30
    assert any(watch.bound({"w": apart}) is not None for _ in range(65))
    assert watch.bound({"w": together}) is None
    assert watch.bound({"w": apart}) is None and watch.bound({"w": apart}) is not None


def test_parameters_that_are_no_numbers_or_another_shape() -> None:
    watch = Certificate({"w": -2}, False, 1e-6)
    loc, scale = layer(4, 100.0)
    assert watch.bound({"w": (loc, scale)}) is not None
    assert watch.bound({"w": (loc.float(), scale.float())}) is not None
    assert watch.bound({"w": (loc * torch.nan, scale)}) is None
    watch = Certificate({"w": -2}, False, 1e-6)
    assert watch.bound({"w": (loc, scale)}) is not None
    assert watch.bound({"w": layer(5, 100.0)}) is not None
    assert Certificate({"w": -2}, False, 1e-6).bound({"w": layer(1, 1.0)}) == 0.0


def test_it_is_not_asked_while_a_program_is_traced() -> None:
    watch = Certificate({"w": -2}, False, 1e-6)
    loc, scale = layer(4, 100.0)
    answers = []

    def program(loc: Tensor) -> Tensor:
        answers.append(watch.bound({"w": (loc, scale)}))
        return loc

    program(loc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch announces the end of its tracer
        torch.jit.trace(program, loc, check_trace=False)
    assert answers[0] is not None and answers[1] is None


def apart() -> AutoSymmetrized:
    base = AutoNormal(pulled(100.0), init_loc_fn=spread_out, init_scale=0.1)
    guide = AutoSymmetrized(base, Permutation({"a": -1, "b": -1}))
    SVI(pulled(100.0), guide, Adam({"lr": 0.01}), Trace_ELBO()).step()
    return guide


def is_certified(guide: Any) -> bool:
    with pyro.poutine.trace():
        _, captured = guide._capture((), {})
    return guide._certified_ratio(captured, captured.draws(guide._layout.native_dims)) is not None


def collide(guide: Any) -> None:
    state = guide.state_dict()
    state["guide.locs.a_unconstrained"] = torch.zeros(6)
    guide.load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))])
def test_a_copy_watches_its_own_parameters(copied: Any) -> None:
    guide = apart()
    pyro.clear_param_store()
    other = copied(guide)
    collide(other)
    assert not is_certified(other)
    pyro.clear_param_store()  # their parameters have one name, and the store would hand on the other's
    assert is_certified(guide)
    collide(guide)
    pyro.clear_param_store()
    assert not is_certified(guide)


def test_parameters_put_back_from_a_store_are_seen() -> None:
    guide = apart()
    store = pyro.get_param_store()
    assert is_certified(guide)
    state = store.get_state()
    name = "AutoSymmetrized.guide.locs.a"
    state["params"] = {**state["params"], name: torch.zeros(6).requires_grad_()}
    store.set_state(state)
    assert not is_certified(guide)


TANH = {"incoming": -2, "outgoing": -1}


def tanh_layer() -> None:
    pyro.sample("incoming", dist.Normal(torch.zeros(4, 3), 5.0).to_event(2))
    pyro.sample("outgoing", dist.Normal(torch.zeros(2, 4), 5.0).to_event(2))


def mixture() -> None:
    pyro.sample("weights", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("components", 4):
        pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
        pyro.sample("scales", dist.LogNormal(0.0, 1.0))


GUIDES: list[tuple[Any, Symmetry, Any]] = [
    (tanh_layer, Product(Permutation(TANH), SignFlip(TANH)), "exact"),
    (tanh_layer, Product(Permutation(TANH), SignFlip(TANH)), "importance"),
    (mixture, Permutation({"weights": -1, "locs": -2, "scales": -1}), "exact"),
]


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize(("model", "symmetry", "estimator"), GUIDES)
def test_loss_and_gradients_are_those_of_the_full_average(
    model: Any, symmetry: Symmetry, estimator: Any, vectorise: bool
) -> None:
    """Three particles, and all that a group moves: signs, sites along other axes, a simplex."""
    elbo = Trace_ELBO(num_particles=3, vectorize_particles=vectorise, max_plate_nesting=1)
    outcomes = []
    for tolerance in (None, 1e-6):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        base = AutoNormal(model, init_loc_fn=lambda site: site["fn"].sample(), init_scale=0.05)
        guide = AutoSymmetrized(base, symmetry, estimator=estimator, tolerance=tolerance)
        guide()
        # A seed for each particle: proposals of permutations draw numbers too.
        pyro.set_rng_seed(4)
        if estimator == "importance" and not vectorise:
            elbo = Trace_ELBO(num_particles=1)
        loss = elbo.differentiable_loss(model, guide)
        gradients = torch.autograd.grad(loss, [p for p in guide.parameters() if p.requires_grad])
        outcomes.append((loss, gradients))
        if tolerance:
            assert guide._certificate is not None and guide._certificate._anchor is not None
    (full, full_gradients), (lazy, lazy_gradients) = outcomes
    # The importance bound has slack of its own even far apart: a twentieth of a nat of its uniform choices.
    assert torch.allclose(lazy, full, rtol=0, atol=2e-6 if estimator == "exact" else 0.05)
    for ours, reference in zip(lazy_gradients, full_gradients, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-5, atol=1e-5)


def test_what_has_no_certificate() -> None:
    base = AutoNormal(tanh_layer)
    base()
    permutation, signs = Permutation(TANH), SignFlip(TANH)
    assert certificate(base, permutation, 1e-6) is not None
    assert certificate(base, permutation, None) is None
    assert certificate(base, permutation, 0.0) is None
    assert certificate(base, signs, 1e-6) is None
    assert certificate(base, Product(permutation, SignFlip({"incoming": -1})), 1e-6) is None
    assert (
        certificate(base, Product(Permutation({"incoming": -2}), Permutation({"outgoing": -2})), 1e-6) is None
    )
    assert certificate(base, Permutation({"incoming": (-2, -1)}), 1e-6) is None
    dense = AutoMultivariateNormal(tanh_layer)
    dense()
    assert certificate(dense, permutation, 1e-6) is None
    with pytest.raises(ValueError, match=r"tolerance=-1\.0"):
        AutoSymmetrized(base, permutation, tolerance=-1.0)
