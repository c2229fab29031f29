"""The recorded ELBO and guides.recorded_graph, against the ELBO itself, from the same random numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

import pyro_sym as ps
from pyro_sym import RecordedELBO
from pyro_sym.guides.recorded_graph import Recording
from tests import catalogue

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 9
DATA = torch.randn(ROWS, generator=torch.Generator().manual_seed(0)).double() + 2

Model = Callable[..., Any]

model = functools.partial(catalogue.normal_mean_and_scale, sd=10.0)


def subsampled(y: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    with pyro.plate("rows", len(y), subsample_size=4) as row:
        local = pyro.sample("local", dist.Normal(loc[0], 1.0))
        pyro.sample("y", dist.StudentT(4.0, local + loc[1], 1.0), obs=y[row])


mixture = functools.partial(catalogue.mixture, k=2, scale=10.0)


def by_hand(y: Tensor) -> None:
    """Random numbers whose law depends on parameters, in between those whose law doesn't."""
    a = pyro.param("a", torch.tensor(2.0), constraint=constraints.positive)
    b = pyro.param("b", torch.tensor(1.5))
    pyro.sample("scale", dist.Gamma(a, 3.0))
    pyro.sample("loc", dist.Normal(b, a))


def counts(y: Tensor) -> None:
    rate = pyro.param("rate", torch.tensor(1.5), constraint=constraints.positive)
    with pyro.plate("rows", len(y)):
        n = pyro.sample("n", dist.Poisson(2.0))
        pyro.sample("y", dist.Normal(n * rate, 1.0), obs=y)


def scored(y: Tensor) -> None:
    """No pathwise gradient: score function terms, and draws by comparison."""
    rates = pyro.param("rates", torch.full((ROWS,), 3.0), constraint=constraints.positive)
    with pyro.plate("rows", len(y)):
        pyro.sample("n", dist.Poisson(rates))


def dropped(y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(torch.zeros(ROWS), 1.0).to_event(1))
    loc = torch.nn.functional.dropout(y * weights, 0.25)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


class Encoder(torch.nn.Module):
    """Amortised inference: a module with ``pyro.module``, and parameters without any statement."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

    def forward(self, y: Tensor) -> None:
        pyro.module("encoder", self)
        loc, log_scale = self.net(y[:, None]).unbind(-1)
        pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), subsample=y):
            pyro.sample("local", dist.Normal(loc, log_scale.exp()))


def amortised(y: Tensor) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", len(y), subsample=y):
        local = pyro.sample("local", dist.Normal(loc, 1.0))
        pyro.sample("y", dist.Normal(local, 1.0), obs=y)


class Module(PyroModule):
    """A model with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = PyroParam(torch.tensor(2.0), constraint=constraints.positive)
        self.loc = PyroSample(dist.Normal(0.0, 3.0))
        self.shift = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, y: Tensor) -> None:
        loc = self.loc + self.shift
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(loc, self.scale), obs=y)


def parts(model: Model) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["scale"])))
    guide.append(AutoNormal(poutine.block(model, hide=["scale"])))
    return guide


CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], Model]]] = {
    "normal": (lambda: model, AutoNormal),
    "multivariate": (lambda: model, AutoMultivariateNormal),
    "low rank": (lambda: model, AutoLowRankMultivariateNormal),
    "flow": (lambda: model, lambda m: AutoIAFNormal(m, hidden_dim=[4])),
    "list": (lambda: model, parts),
    "by hand": (lambda: model, lambda m: by_hand),
    "subsampled": (lambda: subsampled, lambda m: AutoNormal(m, create_plates=rows_of)),
    "scored": (lambda: counts, lambda m: scored),
    "dropout": (lambda: dropped, AutoNormal),
    "amortised": (lambda: amortised, lambda m: Encoder()),
    "module": (Module, AutoNormal),
}
ELBOS: dict[str, Callable[[], Any]] = {
    "several": lambda: Trace_ELBO(num_particles=3),
    "vectorised": lambda: Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
}


def rows_of(y: Tensor) -> Any:
    return pyro.plate("rows", len(y), subsample_size=4)


def trained(case: str, loss: Any, steps: int = 10) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of SVI and the parameters at its end."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    make_model, make_guide = CASES[case]
    made = make_model()
    svi = SVI(made, make_guide(made), Adam({"lr": 0.05}), loss)
    losses = torch.tensor([svi.step(DATA) for _ in range(steps)])
    return losses, {name: value.detach() for name, value in pyro.get_param_store().items()}


def assert_same_run(case: str, elbo: Callable[[], Any], steps: int = 10) -> None:
    loss = RecordedELBO(elbo())
    expected, result = trained(case, elbo(), steps), trained(case, loss, steps)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    assert loss.reason is None and len(loss._recorded) == 1
    assert next(iter(loss._recorded.values())).count == steps


@pytest.mark.parametrize("case", ["multivariate", "by hand"])
@pytest.mark.parametrize("elbo", ["several", "vectorised"])
def test_a_run_of_svi_is_the_same_with_several_particles(case: str, elbo: str) -> None:
    assert_same_run(case, ELBOS[elbo])


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_svi_is_the_same(case: str) -> None:
    assert_same_run(case, Trace_ELBO, 50 if case == "normal" else 10)


def test_other_elbos(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_run("normal", TraceMeanField_ELBO)
    enumerated = poutine.block(mixture, hide=["z"])
    monkeypatch.setitem(CASES, "enumerated", (lambda: mixture, lambda m: AutoNormal(enumerated)))
    assert_same_run("enumerated", lambda: TraceEnum_ELBO(max_plate_nesting=1))


@pytest.mark.parametrize("hidden", ["fixed", "param"])
def test_networks(hidden: Any) -> None:
    def run(loss: Any) -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
        bayesian = ps.BayesianModule(
            net,
            ps.nn.IIDPrior(dist.Normal(0.0, 1.0)),
            ps.nn.Categorical(num_data=50),
            hide="0.weight",
            hidden=hidden,
        )
        svi = SVI(bayesian, AutoNormal(bayesian), Adam({"lr": 0.05}), loss)
        x, y = torch.randn(8, 3), torch.randint(3, (8,))
        return torch.tensor([svi.step(x, y) for _ in range(10)])

    loss = RecordedELBO()
    torch.testing.assert_close(run(loss), run(Trace_ELBO()), rtol=1e-10, atol=1e-10)
    assert loss.reason is None


def test_differentiable_loss_for_optimisers_of_torch() -> None:
    def run(elbo: Any) -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        made = Module()
        pair = elbo(made, AutoNormal(made))
        pair(DATA)
        optimiser = torch.optim.Adam(pair.parameters(), lr=0.05)
        losses = []
        for _ in range(10):
            optimiser.zero_grad()
            loss = 2 * pair(DATA)
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    loss = RecordedELBO()
    torch.testing.assert_close(run(loss), run(Trace_ELBO()), rtol=1e-10, atol=1e-10)
    assert loss.reason is None and len(loss._recorded) == 1


def test_parameters_local_to_modules() -> None:
    with pyro.settings.context(module_local_params=True):
        test_differentiable_loss_for_optimisers_of_torch()


def test_loss_alone() -> None:
    guide = AutoNormal(model)
    recorded, plain = RecordedELBO(), Trace_ELBO()
    svi = SVI(model, guide, Adam({"lr": 0.05}), recorded)
    svi.step(DATA)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        expected = plain.loss(model, guide, DATA)
        pyro.set_rng_seed(seed)
        assert svi.evaluate_loss(DATA) == pytest.approx(expected, rel=1e-12)
    assert recorded.reason is None and len(recorded._recorded) == 1


def test_gradients_are_added() -> None:
    guide, loss = AutoNormal(model), RecordedELBO()
    loss.loss_and_grads(model, guide, DATA)
    once = [p.grad.clone() for p in guide.parameters() if p.grad is not None]
    pyro.set_rng_seed(0)
    loss.loss_and_grads(model, guide, DATA)
    twice = [p.grad.clone() for p in guide.parameters() if p.grad is not None]
    for p in guide.parameters():
        p.grad = None
    pyro.set_rng_seed(0)
    Trace_ELBO().loss_and_grads(model, guide, DATA)
    for parameter, one, two in zip(guide.parameters(), once, twice, strict=True):
        torch.testing.assert_close(two, one + parameter.grad)


def test_svi_sees_the_parameters() -> None:
    guide, loss = AutoNormal(model), RecordedELBO()
    stated = []
    for _ in range(2):
        with poutine.trace(param_only=True) as capture:
            loss.loss_and_grads(model, guide, DATA)
        stated.append({name: site["value"] for name, site in capture.trace.nodes.items()})
    assert set(stated[0]) == set(stated[1]) and len(stated[0]) == 4
    for name, value in stated[1].items():
        torch.testing.assert_close(value.detach(), stated[0][name].detach())
        assert value.unconstrained() is stated[0][name].unconstrained()


def test_other_shapes_and_values_are_recorded_anew() -> None:
    def tempered(y: Tensor, *, power: float = 1.0) -> None:
        with poutine.scale(scale=power):
            model(y)

    guide, loss = AutoNormal(tempered), RecordedELBO()
    guide(DATA)
    calls = [
        (DATA, 1.0),
        (DATA[:4], 1.0),
        (DATA, 0.5),
        (DATA.float(), 1.0),
        (-DATA, 1.0),
        (DATA[:4] + 1, 1.0),
    ]
    for y, power in calls * 2:
        pyro.set_rng_seed(0)
        result = loss.loss_and_grads(tempered, guide, y, power=power)
        pyro.set_rng_seed(0)
        assert result == pytest.approx(Trace_ELBO().loss(tempered, guide, y, power=power), rel=1e-10)
    assert loss.reason is None and len(loss._recorded) == 4
    assert max(recording.count for recording in loss._recorded.values()) == 4


def test_few_graphs_are_kept() -> None:
    guide, loss = AutoNormal(model), RecordedELBO(cache_size=2)
    for size in (1, 2, 3, 4):
        loss.loss(model, guide, DATA[:size])
    assert [recording.count for recording in loss._recorded.values()] == [1, 1]
    loss.loss(model, guide, DATA[:3])
    loss.loss(model, guide, DATA[:5])
    assert [recording.count for recording in loss._recorded.values()] == [2, 1], "the least used went"


def test_arguments_that_never_repeat() -> None:
    guide, loss = AutoNormal(model), RecordedELBO(cache_size=1)
    for size in (1, 2, 3, 4):
        loss.loss(model, guide, DATA[:size])
    with pytest.warns(UserWarning, match="pass numbers that change as tensors"):
        loss.loss(model, guide, DATA[:5])
    assert not loss._recorded


def falls_back(model: Model, guide: Model, match: str, *args: Any, steps: int = 8) -> None:
    """One warning, and the results of the ELBO itself."""
    guide(*args)
    loss = RecordedELBO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(steps):
            pyro.set_rng_seed(seed)
            result = loss.loss_and_grads(model, guide, *args)
            pyro.set_rng_seed(seed)
            assert result == pytest.approx(Trace_ELBO().loss(model, guide, *args), rel=1e-10)
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "the ELBO isn't recorded, so each step runs model and guide"
    ]
    assert match in (loss.reason or "")


def test_models_that_branch_on_values() -> None:
    def branching(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        law = dist.Normal(loc, 1.0) if loc > 0 else dist.StudentT(3.0, loc, 1.0)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", law, obs=y)

    falls_back(branching, AutoNormal(branching), "branches on the value of a tensor", DATA)


def test_models_that_branch_on_parameters_in_hiding() -> None:
    """A branch that a graph can't see, as it is taken on numbers that left torch."""

    def branching(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        far = pyro.param("edge", torch.tensor(0.0)).detach().numpy() > 0.2
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(loc, 2.0 if far else 1.0), obs=y)

    falls_back(branching, AutoNormal(branching), "if they branch on values", DATA)


def test_models_with_a_state() -> None:
    calls = []

    def counting(y: Tensor) -> None:
        calls.append(1)
        pyro.sample("x", dist.Normal(0.0, float(len(calls))))

    guide = AutoNormal(counting)
    with pytest.warns(UserWarning, match="keep a state from call to call"):
        RecordedELBO().loss_and_grads(counting, guide, DATA)


def test_models_whose_state_changes_later() -> None:
    """What changes after the recording is found at a call whose number is a power of two."""
    settings = {"scale": 1.0}

    def changing(y: Tensor) -> None:
        pyro.sample("x", dist.Normal(0.0, settings["scale"]))

    loss, guide = RecordedELBO(), AutoNormal(changing)
    for _ in range(5):
        loss.loss(changing, guide, DATA)
    settings["scale"] = 2.0
    for _ in range(2):
        loss.loss(changing, guide, DATA)
    with pytest.warns(UserWarning, match="keep a state from call to call"):
        result = loss.loss(changing, guide, DATA)
    assert result > 0 and loss.reason is not None


def test_models_that_change_tensors() -> None:
    total = torch.zeros(())

    def accumulating(y: Tensor) -> None:
        pyro.sample("x", dist.Normal(0.0, 1.0))
        total.add_(1.0)

    falls_back(accumulating, AutoNormal(accumulating), "changes a tensor in place", DATA)


def test_handlers_around_the_step() -> None:
    guide, loss = AutoNormal(model), RecordedELBO()
    plain = loss.loss_and_grads(model, guide, DATA)
    pyro.set_rng_seed(0)
    with poutine.scale(scale=0.5), pytest.warns(UserWarning, match="effect handlers around the step"):
        scaled = loss.loss(model, guide, DATA)
    pyro.set_rng_seed(0)
    assert scaled == pytest.approx(0.5 * Trace_ELBO().loss(model, guide, DATA)) and scaled != plain


def test_arguments_that_cannot_be_recorded() -> None:
    guide = AutoNormal(model)
    falls_back(model, guide, "requires a gradient of its own", DATA.clone().requires_grad_())

    def of_a_set(y: Tensor, names: set[str]) -> None:
        model(y)

    falls_back(of_a_set, AutoNormal(of_a_set), "can't be told from others", DATA, {"y"})


def test_new_parameters_are_followed() -> None:
    """Values that are put in the store, or a store that is cleared, are not missed."""
    guide, loss = by_hand, RecordedELBO()
    for _ in range(3):
        loss.loss(model, guide, DATA)
    pyro.get_param_store()["b"] = torch.tensor(-4.0)
    for _ in range(2):
        pyro.set_rng_seed(0)
        result = loss.loss(model, guide, DATA)
        pyro.set_rng_seed(0)
        assert result == pytest.approx(Trace_ELBO().loss(model, guide, DATA), rel=1e-10)
    pyro.clear_param_store()
    loss.loss(model, guide, DATA)
    assert set(pyro.get_param_store().keys()) == {"a", "b"} and loss.reason is None


def test_frozen_parameters_are_followed() -> None:
    """They are inputs, without a gradient; freed, they have one again."""
    made = Module()
    guide, loss = AutoNormal(made), RecordedELBO()
    guide(DATA)
    for frozen in (True, False):
        made.shift.requires_grad_(not frozen)
        for value in (0.5, 3.0):
            made.shift.data.fill_(value)
            made.shift.grad = None
            pyro.set_rng_seed(0)
            result = loss.loss_and_grads(made, guide, DATA)
            assert (made.shift.grad is None) == frozen
            pyro.set_rng_seed(0)
            assert result == pytest.approx(Trace_ELBO().loss(made, guide, DATA), rel=1e-10)
    assert loss.reason is None


def test_arguments_are_known_apart() -> None:
    """From each other, though the same tensor at first, and from the same tensor as a global one."""

    def two(x: Tensor, y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(DATA.mean(), 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(loc * x, 1.0), obs=y)

    guide, loss = AutoNormal(two), RecordedELBO()
    guide(DATA, DATA)
    for args in ((DATA, DATA), (DATA, DATA + 1), (2 * DATA, DATA)):
        pyro.set_rng_seed(0)
        result = loss.loss(two, guide, *args)
        pyro.set_rng_seed(0)
        assert result == pytest.approx(Trace_ELBO().loss(two, guide, *args), rel=1e-10)
    assert loss.reason is None and len(loss._recorded) == 1


def test_random_numbers_and_gradients_are_left_alone() -> None:
    """Recording draws many random numbers, and none of the user's."""
    guide = AutoNormal(model)
    states = []
    for loss in (Trace_ELBO(), RecordedELBO(), RecordedELBO()):
        guide(DATA)
        pyro.set_rng_seed(3)
        for _ in range(4):
            loss.loss_and_grads(model, guide, DATA)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(ValueError, match=r"RenyiELBO has no differentiable_loss.*pass Trace_ELBO"):
        RecordedELBO(RenyiELBO())
    with pytest.raises(ValueError, match="cache_size=0 must be at least 1"):
        RecordedELBO(cache_size=0)


def test_control_a_wrong_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were gradients off by a relative 1e-6, nothing would be recorded."""
    evaluate = Recording.evaluate

    def off(self: Recording, *args: Any, **kwargs: Any) -> Any:
        loss, gradients = evaluate(self, *args, **kwargs)
        return loss, tuple(gradient * (1 + 1e-6) for gradient in gradients)

    monkeypatch.setattr(Recording, "evaluate", off)
    with pytest.warns(UserWarning, match="another gradient than when they were recorded"):
        RecordedELBO().loss_and_grads(model, AutoNormal(model), DATA)


def test_a_difference_at_a_kink_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides on the slope of a ReLU at its kink; at parameters nudged by far more it doesn't.

    Controls are a gradient that is off close by, too, and one that is off as much in a rare branch, for one
    set of random numbers.
    """
    evaluate = Recording.evaluate
    kinks: list[Tensor] = []

    def kinked(self: Recording, *args: Any, **kwargs: Any) -> Any:
        loss, gradients = evaluate(self, *args, **kwargs)
        here = torch.cat([p.detach().flatten() for p in self.parameters])
        if len(kinks) < 1 and self.count == 4:
            kinks.append(here)
        off = any((here - kink).abs().max() <= radius for kink in kinks)
        return loss, tuple(gradient + 0.1 * off for gradient in gradients)

    monkeypatch.setattr(Recording, "evaluate", kinked)
    for radius in (0.0, 1e-6):
        kinks.clear()
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide, loss = AutoNormal(model), RecordedELBO()
        guide(DATA)
        svi = SVI(model, guide, Adam({"lr": 0.05}), loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(9):
                svi.step(DATA)
        assert len(kinks) == 1
        assert bool(caught) == (loss.reason is not None) == (radius > 0)


def test_reasons_are_of_the_model() -> None:
    """Not of the shapes of its sites, which Pyro appends to errors that pass its handlers."""

    def failing(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(loc, 1.0 + float(loc > 0)), obs=y.sum())

    guide, loss = AutoNormal(failing), RecordedELBO()
    guide(DATA)
    with pytest.warns(UserWarning, match=r"test_recorded_elbo\.py:\d+") as caught:
        loss.loss(failing, guide, DATA)
    assert "Trace Shapes" not in str(caught[0].message)


@pytest.mark.parametrize("estimator", ["exact", "uniform", "importance"])
def test_symmetrised_guides(estimator: Any) -> None:
    """Averages are recorded, unless their course depends on random numbers, as guided elements' does."""

    components = functools.partial(catalogue.mixture, scale=10.0, allocations=False, equal_weights=True)

    def run(loss: Any) -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        group = ps.Permutation({"locs": -1})
        guide = ps.AutoSymmetrized(AutoNormal(components), group, estimator=estimator)
        svi = SVI(components, guide, Adam({"lr": 0.05}), loss)
        return torch.tensor([svi.step(DATA) for _ in range(20)])

    loss = RecordedELBO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.testing.assert_close(run(loss), run(Trace_ELBO()), rtol=1e-10, atol=1e-10)
    assert len(caught) == (estimator == "importance") and (loss.reason is None) == (not caught)
    assert not caught or "guided elements" in str(caught[0].message)
