"""Rewritten graphs: each rule gives what the graph gave, by fewer operations, and only where it applies.

Covers also `graph.simplify`, which makes the graphs, and `graph.codegen`, which runs them.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pyro_sym.graph import rewrite
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.record import UntraceableError, aten, trace
from pyro_sym.graph.rewrite import cancelled, fewer_passes, rewritten
from pyro_sym.graph.simplify import simplify
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import Potential

pytestmark = pytest.mark.usefixtures("float64")

Function = Callable[..., tuple[Tensor, ...]]

GENERATOR = torch.Generator().manual_seed(0)
MATRIX, OTHER, SQUARE, COLUMNS = (
    torch.randn(shape, dtype=torch.float64, generator=GENERATOR) for shape in ((4, 3), (4, 3), (4, 4), (5, 4))
)
POSITIVE = tuple(torch.rand(3, 4, dtype=torch.float64, generator=GENERATOR) + 0.5 for _ in range(3))
LARGE = torch.zeros(2**17 + 1, dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 0])
ones, steps = torch.ones(4, 3, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def plain(function: Function, *inputs: Tensor) -> fx.GraphModule:
    return simplify(trace(function, inputs), inputs)


def targets(graph: fx.GraphModule) -> list[Any]:
    """The operations that make a tensor, views left out."""
    views = {operator.getitem, aten.t.default, aten.view.default, aten.unsqueeze.default}
    return [n.target for n in graph.graph.nodes if n.op == "call_function" and n.target not in views]


def assert_same(one: Function, other: Function, *inputs: Tensor) -> None:
    for scale in (1.0, -3.0):
        given = [scale * t if t.is_floating_point() else t for t in inputs]
        torch.testing.assert_close(one(*given), other(*given), rtol=1e-12, atol=1e-12)


REWRITTEN: dict[str, tuple[Function, list[Any]]] = {
    "numbers leave a sum": (
        lambda x, y, a: ((2 * x / (3 * ones) - 5 + y).sum(),),
        [aten.add.Tensor, aten.sum.default, aten.add.Tensor],
    ),
    "over some dims": (
        lambda x, y, a: ((2 * x.exp() / 3 - 5).sum(1),),
        [aten.exp.default, aten.sum.dim_IntList, aten.add.Tensor],
    ),
    "squares": (
        lambda x, y, a: (-(x**2).sum() / 2 - 1,),
        [aten.dot.default, aten.add.Tensor],
    ),
    "sums of sums": (
        lambda x, y, a: (-torch.stack([x.sum() / 2, 3 * y.sum() + 1, a.sum()]).sum(),),
        [aten.sum.default] * 3 + [aten.mul.Tensor, aten.add.Tensor, aten.add.Tensor, aten.add.Tensor],
    ),
    "a product that adds": (lambda x, y, a: (2 * x + a @ y,), [aten.addmm.default]),
    "a product that is added": (lambda x, y, a: (x - a.mm(y),), [aten.addmm.default]),
    "many products that add": (
        lambda x, y, a: (x[None] + 2 * torch.bmm(a[None], y[None]),),
        [aten.baddbmm.default],
    ),
    "logits": (lambda x, y, a: (x - x.logsumexp(-1, keepdim=True),), [aten._log_softmax.default]),
    "transposed twice": (lambda x, y, a: (x.t().mT + y,), [aten.add.Tensor]),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_fewer_passes(name: str) -> None:
    function, expected = REWRITTEN[name]
    graph = plain(function, MATRIX, OTHER, SQUARE)
    fewer = fewer_passes(graph, (MATRIX, OTHER, SQUARE))
    assert targets(fewer) == expected
    assert_same(graph, fewer, MATRIX, OTHER, SQUARE)


KEPT_BY_PASSES: dict[str, Function] = {
    "numbers that differ": lambda x, y, a: ((x * steps).sum(),),
    "a constant that widens": lambda x, y, a: ((x[0] * ones).sum(),),
    "a constant of another type": lambda x, y, a: ((x.float() * ones).sum(),),
    "whole numbers": lambda x, y, a: (((x > 0).long() * 2).sum(),),
    "a normaliser of other logits": lambda x, y, a: (x - y.logsumexp(-1, keepdim=True),),
    "a normaliser over all": lambda x, y, a: (x - x.logsumexp((0, 1), keepdim=True),),
    "a sum that widens": lambda x, y, a: (x[0] + a @ y,),
    "squares of too many": lambda x, y, a: (((x[0, 0] + LARGE) ** 2).sum(),),
    "a product by nothing": lambda x, y, a: ((x * (0 * ones)).sum(),),
    "a product by infinity": lambda x, y, a: ((x * torch.inf).sum(),),
}


@pytest.mark.parametrize("name", KEPT_BY_PASSES)
def test_where_no_rule_applies_passes_stay(name: str) -> None:
    graph = plain(KEPT_BY_PASSES[name], MATRIX, OTHER, SQUARE)
    fewer = fewer_passes(graph, (MATRIX, OTHER, SQUARE))
    assert len(targets(fewer)) == len(targets(graph))
    results = (g(MATRIX, OTHER, SQUARE) for g in (graph, fewer))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


ADD, DIV, EXP, MUL, POW = (
    aten.add.Tensor,
    aten.div.Tensor,
    aten.exp.default,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
)

SHORTER: dict[str, tuple[Function, list[Any]]] = {
    "a sum undone": (lambda a, b, c: ((a + b) - a + c.exp() - c.exp(),), []),
    "a product undone": (lambda a, b, c: (a * b / a * 3,), [MUL]),
    "a draw's own density": (lambda a, b, c: (-((a + b * c - a) ** 2) / (2 * b**2),), [POW, MUL]),
    "under a factor": (lambda a, b, c: ((a.exp() + b) * c - b * c,), [EXP, MUL]),
    "alike terms": (lambda a, b, c: (a * b + 2 * (b * a) - a * b * 5,), [MUL, MUL]),
    "powers": (lambda a, b, c: (a * a * b**2 / (b * a**3),), [DIV]),
    "a reciprocal": (lambda a, b, c: (a * b.reciprocal() / a * 2,), [aten.reciprocal.default, MUL]),
    "numbers": (lambda a, b, c: ((a - 3) * 2 - 2 * a + 3 * b,), [MUL, ADD]),
    "nothing left": (lambda a, b, c: (a - a + 0 * b.exp() + b / b,), []),
    "whether a draw is itself": (lambda a, b, c: ((a.exp() == a.exp()).to(b.dtype).log() + b,), []),
}


@pytest.mark.parametrize("name", SHORTER)
def test_what_cancels_is_not_computed(name: str) -> None:
    function, expected = SHORTER[name]
    graph = plain(function, *POSITIVE)
    shorter = cancelled(graph, POSITIVE)
    assert targets(shorter) == expected
    assert_same(graph, shorter, *POSITIVE)


KEPT_BY_CANCELLING: dict[str, Function] = {
    "different tensors": lambda a, b, c: (a + b - c,),
    "other shapes": lambda a, b, c: ((a + b[0]) - a,),
    "other layouts": lambda a, b, c: ((a.mT.exp() + b.mT.exp()).clone() - a.mT.contiguous().exp(),),
    "whole numbers": lambda a, b, c: (((a > 0).long() + (b > 0).long()) // (a > 0).long(),),
    "a sum that is used again": lambda a, b, c: ((a + b).exp() * (a + b),),
    "distinct draws": lambda a, b, c: (a + torch.rand_like(a) - torch.rand_like(a),),
    "divided by zero": lambda a, b, c: (a / torch.zeros(()),),
}


@pytest.mark.parametrize("name", KEPT_BY_CANCELLING)
def test_where_nothing_cancels_graphs_stay(name: str) -> None:
    graph = plain(KEPT_BY_CANCELLING[name], *POSITIVE)
    assert targets(cancelled(graph, POSITIVE)) == targets(graph)


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.neg,
    torch.tanh,
    lambda x: 2 * x,
    lambda x: x / 3 + 1,
    lambda x: x**2,
    lambda x: (1 + x**2).reciprocal(),
    lambda x: x.t().reshape(4, 4) @ SQUARE,
    lambda x: x - x.logsumexp(-1, keepdim=True),
    lambda x: x.sum(0, keepdim=True).expand(4, 4) - 2 * x,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, y: x - 2 * y,
    lambda x, y: x / (1 + y**2),
    lambda x, y: x + 0.5 * x @ y,
    lambda x, y: torch.stack([x.sum(), (y**2).sum() / 2]).sum() * x,
]


def random_function(seed: int) -> Function:
    """Twelve operations on earlier results, three of which are returned, in full and summed."""
    choose = random.Random(seed)

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        choose.seed(seed)
        values = list(inputs)
        for _ in range(12):
            if choose.random() < 0.4:
                values.append(choose.choice(UNARY)(choose.choice(values)))
            else:
                values.append(choose.choice(BINARY)(choose.choice(values), choose.choice(values)))
            values[-1] = values[-1] / (1 + values[-1].detach().abs().max())
        return (*values[-3:], sum(values).sum())  # type: ignore[union-attr]

    return function


def error(graph: fx.GraphModule, other: fx.GraphModule, inputs: tuple[Tensor, ...]) -> float:
    pairs = zip(graph(*inputs), other(*inputs), strict=True)
    return max(float((a - b).abs().max() / (1 + a.abs().max())) for a, b in pairs)


def test_random_graphs() -> None:
    """A hundred graphs, at other inputs than those of the recording, and most of them shorter."""
    shorter = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        inputs = tuple(torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)[0].unbind())
        graph = plain(random_function(seed), *inputs)
        short = rewritten(graph, inputs)
        other = tuple(2 * x.flip(0) for x in inputs)
        assert error(graph, short, other) < 1e-9, seed
        shorter += len(targets(short)) < len(targets(graph))
    assert shorter > 50


@pytest.mark.parametrize("rewriter", ["_Canceller", "_Regrouper"])
def test_control_a_wrong_rule_is_seen(rewriter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = getattr(rewrite, rewriter).rules
    monkeypatch.setitem(rules, aten.sub.Tensor, rules[aten.add.Tensor])
    with pytest.raises(AssertionError, match=r"assert .* < 1e-09"):
        test_random_graphs()


def test_a_product_of_two_uses_is_not_made_twice() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        product = a @ y
        return x + product, product.exp()

    graph = plain(function, MATRIX, OTHER, SQUARE)
    fewer = fewer_passes(graph, (MATRIX, OTHER, SQUARE))
    assert targets(fewer) == targets(graph) and targets(fewer).count(aten.mm.default) == 1


def test_views_of_gaps_keep_their_layout() -> None:
    """The view is of ``2 * x[:, ::2]``, which has no gaps; one of ``x[:, ::2]`` doesn't exist."""

    def function(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return ((2 * x[:, ::2]).view(-1).sum(),)

    graph = plain(function, MATRIX, OTHER, SQUARE)
    fewer = fewer_passes(graph, (MATRIX, OTHER, SQUARE))
    assert_same(graph, fewer, MATRIX, OTHER, SQUARE)


def test_long_products_are_shared() -> None:
    """Factors are not multiplied out again for each use."""

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        product = a * b * c * a.exp() * b.exp()
        return product * c.exp(), product * a.sin(), product * b.sin()

    graph = plain(function, *POSITIVE)
    shorter = cancelled(graph, POSITIVE)
    assert len(targets(shorter)) <= len(targets(graph))
    assert_same(graph, shorter, *POSITIVE)


def test_pathwise_gradient_of_a_normal() -> None:
    """The gradients of an entropy: nothing for the location, a reciprocal for the scale."""
    noise = torch.randn(3, 4, generator=GENERATOR)
    a, b, c = POSITIVE

    def entropy(loc: Tensor, scale: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        loc, scale = loc.detach().requires_grad_(), scale.detach().requires_grad_()
        with torch.enable_grad():
            draw = loc + noise * scale
            log_q = -((draw - loc) ** 2) / (2 * scale**2) - scale.log()
            loss = log_q.sum() + (draw * c).sum()
            return torch.autograd.grad(loss, [loc, scale])

    shorter = cancelled(plain(entropy, a, b, c), (a, b, c))
    assert sorted(targets(shorter), key=str) == [ADD, MUL, MUL, aten.reciprocal.default]
    torch.testing.assert_close(shorter(a, b, c), (c, noise * c - 1 / b), rtol=1e-12, atol=1e-12)


def test_both_rewriters_together() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return ((a**2) / 2 - b.log()).sum(), a + 2 * (b * c)

    graph = plain(function, *POSITIVE)
    short = rewritten(graph, POSITIVE)
    assert {aten.dot.default, aten.addcmul.default} <= set(targets(short)) and POW not in targets(short)
    torch.testing.assert_close(short(*POSITIVE), graph(*POSITIVE))


def network() -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(6, 4), 0.7).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.full((6,), 0.5), 2.0).to_event(1))
    v = pyro.sample("v", dist.Normal(torch.zeros(3, 6), torch.ones(3, 6)).to_event(2))
    with pyro.plate("rows", 5):
        pyro.sample("y", dist.Categorical(logits=torch.relu(F.linear(COLUMNS, w, b)) @ v.T), obs=LABELS)


@pytest.mark.parametrize("chains", [1, 3])
def test_a_network_has_no_pass_for_its_prior(chains: int) -> None:
    """The gradient of the weights is their prior's and the data's at once, for one chain."""
    gradient = Gradient(Potential(network))
    position = torch.randn(chains, gradient.potential.size)
    graph = gradient.graph(position, Minibatch())
    fewer = rewritten(graph, [position])
    assert_same(graph, fewer, position)
    if chains == 1:
        assert aten.mm.default in targets(graph) and targets(fewer).count(aten.addmm.default) == 3
        assert aten.pow.Tensor_Scalar in targets(graph) and aten.dot.default in targets(fewer)
    torch.testing.assert_close(gradient(position, Minibatch()), gradient.eager(position, Minibatch()))


def test_a_wrong_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a wrong rule the graph is wrong, and the gradient does without it."""
    monkeypatch.setattr(rewrite._Affine, "times", lambda self, number: self)
    gradient = Gradient(Potential(network), jit="trace")
    position = torch.randn(1, gradient.potential.size)
    graph = gradient.graph(position, Minibatch())
    wrong = rewritten(graph, [position])
    assert (wrong(position)[1] - graph(position)[1]).abs().max() > 0.1
    torch.testing.assert_close(gradient(position, Minibatch()), gradient.eager(position, Minibatch()))


def test_what_no_rule_expects_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise KeyError("unheard of")

    monkeypatch.setattr(rewrite._Regrouper, "_add_within_products", fail)
    gradient = Gradient(Potential(network), jit="trace")
    position = torch.randn(1, gradient.potential.size)
    with pytest.raises(UntraceableError, match="rewritten: KeyError: 'unheard of'"):
        rewritten(gradient.graph(position, Minibatch()), [position])
    torch.testing.assert_close(gradient(position, Minibatch()), gradient.eager(position, Minibatch()))
    assert gradient.mode == "trace"


@pytest.mark.parametrize("model", [network, lambda: pyro.sample("x", dist.Normal(0.0, 1.0))])
def test_results_belong_to_the_caller(model: Callable[[], Any]) -> None:
    """Neither later calls nor changes of the inputs reach them, even where the slope is the input itself."""
    gradient = Gradient(Potential(model), jit="trace")
    position = torch.randn(1, gradient.potential.size)
    held = gradient(position, Minibatch())
    copies = [t.clone() for t in held]
    gradient(torch.randn_like(position), Minibatch())
    position.add_(1.0)
    torch.testing.assert_close(list(held), copies, rtol=0, atol=0)
    for tensor in held:
        tensor.zero_()
    position.sub_(1.0)
    torch.testing.assert_close(list(gradient(position, Minibatch())), copies)


def test_constants_are_not_shared() -> None:
    """The slope of a line is a constant of the graph."""
    line = straight_line(trace(lambda x: (x.sum(), ones), [MATRIX]), [MATRIX])
    line(MATRIX)[1].zero_()
    assert line(MATRIX)[1].sum() == 12
