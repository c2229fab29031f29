"""The traced gradient against the potential itself, and what is refused.

Covers also `graph.checked`, which guides/test_recorded_elbo.py tests as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_median
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_sym.graph import simplify as graph
from pyro_sym.graph.checked import NEARER, Probe, check
from pyro_sym.graph.record import UntraceableError, message_of
from pyro_sym.model.gradient import Gradient, Jit, _duration
from pyro_sym.model.minibatch import Minibatch, draw_indices
from pyro_sym.model.potential import Potential

pytestmark = pytest.mark.usefixtures("float64")

ROWS, COLUMNS = 9, 7
DATA = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).double()
LABELS = (DATA[:, 0] + DATA[:, 1] > 0).double()


def logistic_model() -> None:
    weights = pyro.sample("weights", dist.Normal(torch.zeros(COLUMNS), 1.0).to_event(1))
    with pyro.plate("rows", ROWS, subsample_size=4) as row:
        pyro.sample("y", dist.Bernoulli(logits=DATA[row] @ weights), obs=LABELS[row])


def crossed_and_nested_model() -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    columns = pyro.plate("columns", COLUMNS, subsample_size=3, dim=-1)
    rows = pyro.plate("rows", ROWS, subsample_size=4, dim=-2)
    with columns as column:
        pyro.sample("x", dist.Normal(loc, 2.0), obs=DATA[0, column])
    with rows as row:
        pyro.sample("w", dist.Normal(0.0, scale), obs=DATA[row, :1])
        with columns as column:
            pyro.sample("y", dist.Normal(loc, scale), obs=DATA[row[:, None], column])
            with pyro.plate("depth", 5, subsample_size=2, dim=-3) as depth:
                shift = depth.reshape(2, 1, 1) * 0.1
                pyro.sample("z", dist.Normal(loc + shift, 1.0), obs=DATA[row[:, None], column])


def masked_and_scaled_model() -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.poutine.scale(scale=2.5):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", ROWS, subsample_size=4) as row, pyro.poutine.mask(mask=LABELS[row] > 0):
        pyro.sample("y", dist.Normal(loc, rate), obs=DATA[row, 0])


def mixture_model() -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    with pyro.plate("rows", ROWS, subsample_size=4) as row:
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=DATA[row, 0])


def hmm_model() -> None:
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    x: Any = 0
    for t in pyro.markov(range(4)):
        x = pyro.sample(f"x{t}", dist.Categorical(transition[x]))
        pyro.sample(f"y{t}", dist.Normal(locs[x], 1.0), obs=DATA[t, 0])


def parallel_hmm_model() -> None:
    """Its likelihood clamps a maximum, the first of two results, in place."""
    transition = pyro.sample("transition", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    hmm = dist.DiscreteHMM(torch.zeros(2), transition.log(), dist.Normal(locs, 1.0), duration=ROWS)
    pyro.sample("y", hmm, obs=DATA[:, 0])


def constrained_model() -> None:
    scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(2)).to_event(1))
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    corr = pyro.sample("corr", dist.LKJCholesky(2, 2.0))
    covariance = scale[:, None] * corr
    with pyro.plate("rows", ROWS, subsample_size=4) as row:
        law = dist.MultivariateNormal(weights[:2], scale_tril=covariance)
        pyro.sample("y", law, obs=DATA[row, :2])


class Net(PyroModule):
    """A layer of random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = PyroModule[torch.nn.Linear](COLUMNS, 2)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, COLUMNS]).to_event(2))
        self.layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.out = torch.nn.Linear(2, 1)

    def forward(self) -> None:
        mean = self.out(torch.tanh(self.layer(DATA))).squeeze(-1)
        with pyro.plate("rows", ROWS, subsample_size=4) as row:
            pyro.sample("y", dist.Normal(mean[row], 1.0), obs=LABELS[row])


def param_model() -> None:
    scale = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
    x = pyro.sample("x", dist.StudentT(3.0, torch.zeros(3), scale).to_event(1))
    pyro.factor("bound", -(x.exp().sum()))


MODELS: list[Callable[[], Any]] = [
    logistic_model,
    crossed_and_nested_model,
    masked_and_scaled_model,
    mixture_model,
    hmm_model,
    parallel_hmm_model,
    constrained_model,
    Net,
    param_model,
]


def minibatch_of(potential: Potential, chains: int, shared: bool = False) -> Minibatch:
    shape = () if shared else (chains,)
    return Minibatch(draw_indices(potential.program.plates, *shape))


def assert_as_eager(gradient: Gradient, position: Tensor, minibatch: Minibatch) -> None:
    energy, slope = gradient(position, minibatch)
    expected = gradient.eager(position, minibatch)
    torch.testing.assert_close((energy, slope), expected, rtol=1e-10, atol=1e-10)
    assert not energy.requires_grad and not slope.requires_grad


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("chains", [1, 5])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_trace_is_the_potential(model: Callable[[], Any], chains: int, shared: bool) -> None:
    potential = Potential(model() if isinstance(model, type) else model)
    gradient = Gradient(potential, jit="trace")
    for _ in range(3):
        position = torch.randn(chains, potential.size)
        assert_as_eager(gradient, position, minibatch_of(potential, chains, shared))
    assert gradient.mode == "trace" and gradient.reason is None


def test_keyword_arguments() -> None:
    def model(data: Tensor, *, scale: float, offset: Tensor | None = None) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, scale))
        mean = loc if offset is None else loc + offset
        pyro.sample("y", dist.Normal(mean, 1.0), obs=data)

    potential = Potential(model, (torch.tensor(1.0),), {"scale": 3.0, "offset": torch.tensor(0.5)})
    assert_as_eager(Gradient(potential, jit="trace"), torch.randn(2, 1), Minibatch())


def test_batches_of_a_loader_are_inputs() -> None:
    def model(x: Tensor, y: Tensor, name: str = "y") -> None:
        weights = pyro.sample("weights", dist.Normal(torch.zeros(COLUMNS), 1.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=len(x)):
            pyro.sample(name, dist.Bernoulli(logits=x @ weights), obs=y)

    potential = Potential(model, (DATA[:4], LABELS[:4]))
    gradient = Gradient(potential, jit="trace")
    position = torch.randn(3, COLUMNS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA, LABELS), batch_size=4)
    sizes = []
    for batch in [*loader, *loader]:
        sizes.append(len(batch[0]))
        minibatch = Minibatch({}, tuple(batch))
        assert_as_eager(gradient, position, minibatch)
        expected, _ = Potential(lambda b=batch: model(*b)).value_and_grad(
            position[1], {"rows": torch.arange(len(batch[0]))}
        )
        torch.testing.assert_close(gradient(position, minibatch)[0][1], expected)
    assert sizes == [4, 4, 1] * 2
    assert len(gradient._prepared) == 2, "a graph for whole batches and one for the last"


def test_arguments_beside_a_batch() -> None:
    """None stays None, and a plate's own indices stay in force; their order in the minibatch is no matter."""

    def model(x: Tensor, offset: Tensor | None, y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        shift = torch.zeros(()) if offset is None else offset
        with pyro.plate("a", ROWS, subsample_size=3) as a:
            pyro.sample("y", dist.Normal(loc + shift, 1.0), obs=x[a] * y[a])
        with pyro.plate("b", ROWS, subsample_size=3) as b:
            pyro.sample("z", dist.Normal(2 * loc, 1.0), obs=x[b])

    first, second = torch.tensor([[7, 1, 5]]), torch.tensor([[0, 8, 2]])
    args = (DATA[:, 0], None, LABELS)
    potential = Potential(model, args)
    expected, _ = potential.value_and_grad(torch.ones(1), {"a": first[0], "b": second[0]})
    gradient = Gradient(potential, jit="trace")
    for given in (args, None):
        for minibatch in (
            Minibatch({"a": first, "b": second}, given),
            Minibatch({"b": second, "a": first}, given),
        ):
            torch.testing.assert_close(gradient(torch.ones(1, 1), minibatch)[0][0], expected)


def test_float32_is_kept() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3, dtype=torch.float32), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x.sum(), 1.0), obs=torch.tensor(1.0, dtype=torch.float32))

    torch.set_default_dtype(torch.float32)
    gradient = Gradient(Potential(model), jit="trace")
    energy, slope = gradient(torch.ones(2, 3), Minibatch())
    assert energy.dtype == slope.dtype == torch.float32


def test_tracing_leaves_generator_and_validation_alone() -> None:
    potential = Potential(logistic_model)
    minibatch = minibatch_of(potential, 2)
    position = torch.randn(2, COLUMNS)
    before = torch.get_rng_state()
    with pyro.validation_enabled(True):
        Gradient(potential)(position, minibatch)
        assert pyro.distributions.is_validation_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def hidden_branch() -> None:
    """Branches where no tracer can see it: NumPy has the value."""
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    factor = 2.0 if np.mean(x.detach().numpy()) > 0 else 5.0
    pyro.factor("f", -factor * (x**2).sum())


def open_branch() -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    factor = 2.0 if x.mean().item() > 0 else 5.0
    pyro.factor("f", -factor * (x**2).sum())


def branch_on_rows() -> None:
    x = pyro.sample("x", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", ROWS, subsample_size=4) as row:
        scale = 1.0 if 0 in row.numpy() else 2.0
        pyro.sample("y", dist.Normal(x, scale), obs=DATA[row, 0])


def dropout_model() -> None:
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.factor("f", -(torch.nn.functional.dropout(x, 0.5).sum() ** 2))


def counting_model(norm: torch.nn.Module | None = None) -> None:
    norm = torch.nn.BatchNorm1d(3) if norm is None else norm
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.factor("f", -(norm(x + DATA[:, :3]) ** 2).sum())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (hidden_branch, "right only where it was traced"),
        (open_branch, "branches on the value of a tensor"),
        (branch_on_rows, "right only where it was traced"),
        (dropout_model, "draws random numbers"),
        (counting_model, "changes a tensor in place|running statistics"),
    ],
)
def test_fallbacks_say_why(model: Callable[[], None], reason: str) -> None:
    potential = Potential(model)
    position = torch.randn(2, potential.size)
    minibatch = minibatch_of(potential, 2)
    gradient = Gradient(potential)
    with pytest.warns(UserWarning, match=rf"each gradient runs it, at .* ms a chain.*({reason})") as caught:
        gradient(position, minibatch)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert gradient.mode == "eager" and gradient.reason is not None
    gradient(position, minibatch)  # no second warning: the suite makes warnings errors
    with pytest.raises(UntraceableError, match=reason):
        Gradient(potential, jit="trace")(position, minibatch)
    Gradient(potential, jit="eager")(position, minibatch)


def test_without_the_comparison_a_hidden_branch_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the comparison is for: the graph is silently that of one branch."""
    monkeypatch.setattr(Probe, "compare", lambda self, function: True)
    potential = Potential(hidden_branch)
    gradient = Gradient(potential)
    gradient(torch.ones(1, 3), Minibatch())
    _, wrong = gradient(-torch.ones(1, 3), Minibatch())
    _, right = gradient.eager(-torch.ones(1, 3), Minibatch())
    assert (wrong - right).abs().min() > 1.0


def test_buffers_are_still_updated_after_a_fallback() -> None:
    norm = torch.nn.BatchNorm1d(3)
    potential = Potential(lambda: counting_model(norm))
    gradient = Gradient(potential)
    with pytest.warns(UserWarning, match="each gradient runs it"):
        gradient(torch.zeros(1, 3), Minibatch())
    before = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    gradient(torch.zeros(1, 3), Minibatch())
    assert norm.num_batches_tracked == before + 1


def test_errors_of_the_model_are_its_own() -> None:
    potential = Potential(logistic_model)
    with pytest.raises(ValueError, match="plate 'rows' shows 4 of 9 rows and has no indices"):
        Gradient(potential)(torch.zeros(1, COLUMNS), Minibatch())


def test_unknown_jit_is_refused() -> None:
    jit: Any = "fast"
    with pytest.raises(ValueError, match="jit is 'fast'; pass one of 'auto'"):
        Gradient(Potential(open_branch), jit)


def test_modes_that_need_no_fallback_do_not_warn() -> None:
    potential = Potential(logistic_model)
    modes: list[Jit] = ["auto", "trace", "eager"]
    results = [
        Gradient(potential, jit)(torch.ones(2, COLUMNS), Minibatch({"rows": torch.arange(4)}))
        for jit in modes
    ]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


def test_an_operation_that_no_rule_foresaw_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, inputs: Any) -> None:
        raise KeyError("aten.unheard_of")

    monkeypatch.setattr(graph.Simplifier, "run", fail)
    gradient = Gradient(Potential(lambda: pyro.sample("x", dist.Normal(0.0, 1.0))))
    with pytest.warns(UserWarning, match=r"can't be simplified: KeyError: 'aten\.unheard_of'"):
        _, slope = gradient(torch.ones(1, 1), Minibatch())
    assert gradient.mode == "eager" and slope.item() == 1.0


def test_attention_is_traced_for_many_chains() -> None:
    """Torch picks a fused kernel for it, which counts as random and has no rule under ``vmap``."""
    queries = torch.randn(1, 1, 5, 4)

    def model() -> None:
        keys = pyro.sample("keys", dist.Normal(torch.zeros(1, 1, 5, 4), 1.0).to_event(4))
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, queries)
        pyro.factor("f", -attended.square().sum())

    gradient = Gradient(Potential(model))
    for chains in (1, 3):
        position = torch.randn(chains, 20)
        results = gradient(position, Minibatch({}))
        torch.testing.assert_close(results, gradient.eager(position, Minibatch({})))
    assert gradient.mode == "trace"


@pytest.mark.parametrize("model", [mixture_model, constrained_model, hmm_model], ids=lambda m: m.__name__)
def test_a_simplex_is_no_reason_to_go_chain_by_chain(
    model: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Stick-breaking writes into a tensor in its backward pass, for which ``vmap`` would loop over chains."""
    potential = Potential(model)
    gradient = Gradient(potential)
    lengths = {
        len(gradient.graph(torch.randn(chains, potential.size), minibatch_of(potential, chains)).graph.nodes)
        for chains in (3, 12)
    }
    assert len(lengths) == 1, "a graph that grows with the number of chains takes them one by one"
    assert "BatchedFallback" not in capfd.readouterr().err


def correlated_model() -> None:
    """Its matrix has a Cholesky factor close to the start only."""
    x = pyro.sample("x", dist.Normal(torch.zeros(3), 0.5).to_event(1))
    pair = torch.eye(3)[[1, 2, 0]] * x
    factor = torch.linalg.cholesky(torch.eye(3) + pair + pair.T)
    with pyro.plate("rows", ROWS, subsample_size=4) as row:
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=factor), obs=DATA[row, :3])


@pytest.mark.parametrize("chains", [1, 8])
def test_a_model_that_fails_far_from_the_start_is_compared_nearer(chains: int) -> None:
    """At one chain's point or another's: the graph of all chains fails where one does."""
    potential = Potential(correlated_model, init_strategy=init_to_median)
    gradient = Gradient(potential)
    position = 0.05 * torch.randn(chains, 3)
    minibatch = minibatch_of(potential, chains)
    assert_as_eager(gradient, position, minibatch)
    assert gradient.mode == "trace"
    probes = gradient.probes(position, minibatch)
    function = gradient._prepared[next(iter(gradient._prepared))]
    assert all(probe.compare(function) for probe in probes)
    assert any(0 < len(probe.fractions) < len(NEARER) for probe in probes[1:])


def test_a_graph_that_can_be_compared_nowhere_is_not_trusted() -> None:
    calls: list[int] = []

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        calls.append(1)
        if sum(calls) > 2:  # once at the start, once to be recorded
            raise RuntimeError("out of luck")
        pyro.factor("f", -x.square().sum())

    calls.append(-1000)
    gradient = Gradient(Potential(model))
    calls.clear()
    with (
        pytest.warns(UserWarning, match="fails at every point where its graph could be compared"),
        pytest.raises(RuntimeError, match="out of luck"),
    ):
        gradient(torch.zeros(1, 3), Minibatch())
    assert gradient.mode == "eager"


class Kinked:
    """A function that at points exactly as given is off, as at a kink where rounding decides."""

    def __init__(self, function: Any, where: Callable[[Tensor], bool]) -> None:
        self.function, self.where = function, where

    def __call__(self, position: Tensor, *tensors: Tensor) -> Any:
        energy, slope = self.function(position, *tensors)
        return energy, slope + 0.1 * self.where(position)


def test_a_difference_at_a_kink_does_not_count() -> None:
    """One that stays at a nudged point does, be it on one chain or near the probe only."""
    potential = Potential(logistic_model)
    gradient = Gradient(potential)
    position, minibatch = torch.randn(2, COLUMNS), minibatch_of(potential, 2)
    gradient(position, minibatch)
    function = gradient._prepared[next(iter(gradient._prepared))]
    probes: list[Any] = gradient.probes(position, minibatch)
    there = probes[1].position(1.0, 0)
    check(Kinked(function, lambda x: torch.equal(x, there)), probes)

    def close_by(x: Tensor) -> bool:
        return bool((x - there).abs().max() < 1e-6)

    for where in (close_by, lambda x: True):
        with pytest.raises(UntraceableError, match="the gradient is off by"):
            check(Kinked(function, where), probes)


def matching_model() -> None:
    edges = pyro.sample("edges", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
    pyro.sample("pairs", dist.OneOneMatching(edges, bp_iters=5), obs=torch.tensor([0, 2, 1]))


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (open_branch, r"at test_gradient\.py:\d+"),
        (matching_model, "in the log probability of site 'pairs'"),
    ],
)
def test_reasons_name_the_line_or_the_site(model: Callable[[], None], where: str) -> None:
    potential = Potential(model)
    gradient = Gradient(potential)
    with pytest.warns(UserWarning, match=rf"{where}\); write it with torch\.where"):
        gradient(torch.ones(1, potential.size), Minibatch())
    assert "Trace Shapes" not in (gradient.reason or "")


def test_messages_are_plain() -> None:
    """Seconds without an exponent, and errors without the table that Pyro appends."""
    assert [_duration(s) for s in (2e-4, 0.0123, 0.123, 12.34)] == ["0.2 ms", "12 ms", "123 ms", "12.3 s"]

    def failing() -> None:
        raise RuntimeError("first line\n  second line")

    with pytest.raises(RuntimeError, match="Trace Shapes") as caught:
        pyro.poutine.trace(failing).get_trace()
    assert message_of(caught.value) == "first line second line"
