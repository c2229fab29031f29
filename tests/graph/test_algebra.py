"""Graphs of fewer passes: equal to the graphs that they were, and only where a rule holds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pyro_sym.graph import algebra
from pyro_sym.graph.algebra import fewer_passes
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.record import UntraceableError, aten, simplify, trace
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import Potential

pytestmark = pytest.mark.usefixtures("float64")

Function = Callable[..., tuple[Tensor, ...]]


def graphs(function: Function, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The simplified graph, and the same of fewer passes."""
    plain = simplify(trace(function, inputs), inputs)
    return plain, fewer_passes(plain, inputs)


def targets(graph: fx.GraphModule) -> list[Any]:
    """The operations that make a tensor, views left out."""
    views = {operator.getitem, aten.t.default, aten.view.default, aten.unsqueeze.default}
    return [n.target for n in graph.graph.nodes if n.op == "call_function" and n.target not in views]


def assert_same(one: Function, other: Function, *inputs: Tensor) -> None:
    for scale in (1.0, -3.0):
        given = [scale * t if t.is_floating_point() else t for t in inputs]
        torch.testing.assert_close(one(*given), other(*given), rtol=1e-12, atol=1e-12)


GENERATOR = torch.Generator().manual_seed(0)
MATRIX, OTHER, SQUARE, COLUMNS = (
    torch.randn(shape, dtype=torch.float64, generator=GENERATOR) for shape in ((4, 3), (4, 3), (4, 4), (5, 4))
)
LARGE = torch.zeros(2**17 + 1, dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 0])
ones, steps = torch.ones(4, 3, dtype=torch.float64), torch.arange(12.0, dtype=torch.float64).reshape(4, 3)

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
def test_rules_give_the_same_in_fewer_passes(name: str) -> None:
    function, expected = REWRITTEN[name]
    plain, fewer = graphs(function, MATRIX, OTHER, SQUARE)
    assert targets(fewer) == expected
    assert_same(plain, fewer, MATRIX, OTHER, SQUARE)


KEPT: dict[str, Function] = {
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


@pytest.mark.parametrize("name", KEPT)
def test_where_no_rule_holds_nothing_is_changed(name: str) -> None:
    plain, fewer = graphs(KEPT[name], MATRIX, OTHER, SQUARE)
    assert len(targets(fewer)) == len(targets(plain))
    torch.testing.assert_close(
        plain(MATRIX, OTHER, SQUARE), fewer(MATRIX, OTHER, SQUARE), rtol=0, atol=0, equal_nan=True
    )


def test_a_product_of_two_uses_is_not_made_twice() -> None:
    def function(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        product = a @ y
        return x + product, product.exp()

    plain, fewer = graphs(function, MATRIX, OTHER, SQUARE)
    assert targets(fewer) == targets(plain) and targets(fewer).count(aten.mm.default) == 1


def test_views_of_gaps_keep_their_layout() -> None:
    """The view is of ``2 * x[:, ::2]``, which has no gaps; one of ``x[:, ::2]`` doesn't exist."""

    def function(x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return ((2 * x[:, ::2]).view(-1).sum(),)

    plain, fewer = graphs(function, MATRIX, OTHER, SQUARE)
    assert_same(plain, fewer, MATRIX, OTHER, SQUARE)


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
    plain = gradient.graph(position, Minibatch())
    fewer = fewer_passes(plain, [position])
    assert_same(plain, fewer, position)
    if chains == 1:
        assert aten.mm.default in targets(plain) and targets(fewer).count(aten.addmm.default) == 3
        assert aten.pow.Tensor_Scalar in targets(plain) and aten.dot.default in targets(fewer)
    torch.testing.assert_close(gradient(position, Minibatch()), gradient.eager(position, Minibatch()))


def test_a_wrong_rule_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a rule that is wrong the graph is, and the gradient does without it."""
    monkeypatch.setattr(algebra._Affine, "times", lambda self, number: self)
    gradient = Gradient(Potential(network), jit="trace")
    position = torch.randn(1, gradient.potential.size)
    plain = gradient.graph(position, Minibatch())
    wrong = fewer_passes(plain, [position])
    assert (wrong(position)[1] - plain(position)[1]).abs().max() > 0.1
    torch.testing.assert_close(gradient(position, Minibatch()), gradient.eager(position, Minibatch()))


def test_what_no_rule_foresaw_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise KeyError("unheard of")

    monkeypatch.setattr(algebra._Regrouper, "_add_within_products", fail)
    gradient = Gradient(Potential(network), jit="trace")
    position = torch.randn(1, gradient.potential.size)
    with pytest.raises(UntraceableError, match="regrouped: KeyError: 'unheard of'"):
        fewer_passes(gradient.graph(position, Minibatch()), [position])
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


def test_constants_are_not_lent() -> None:
    """The slope of a line is a constant of the graph."""
    line = straight_line(trace(lambda x: (x.sum(), ones), [MATRIX]), [MATRIX])
    line(MATRIX)[1].zero_()
    assert line(MATRIX)[1].sum() == 12
