"""Graphs without what cancels: equal to the graphs that they were, and only where that is less work."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from pyro_sym.graph import cancellation
from pyro_sym.graph.algebra import fewer_passes
from pyro_sym.graph.cancellation import cancelled
from pyro_sym.graph.record import UntraceableError, aten, simplify, trace

pytestmark = pytest.mark.usefixtures("float64")

Function = Callable[..., tuple[Tensor, ...]]
GENERATOR = torch.Generator().manual_seed(0)
A, B, C = (torch.rand(3, 4, dtype=torch.float64, generator=GENERATOR) + 0.5 for _ in range(3))


def graphs(function: Function, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The simplified graph, and the same without what cancels."""
    plain = simplify(trace(function, inputs), inputs)
    return plain, cancelled(plain, inputs)


def targets(graph: fx.GraphModule) -> list[Any]:
    """The operations of a graph."""
    return [
        n.target for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    ]


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
    plain, graph = graphs(function, A, B, C)
    assert targets(graph) == expected
    for scale in (1.0, -3.0):
        inputs = scale * A, scale * B, scale * C
        torch.testing.assert_close(graph(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)


KEPT: dict[str, Function] = {
    "different tensors": lambda a, b, c: (a + b - c,),
    "other shapes": lambda a, b, c: ((a + b[0]) - a,),
    "other layouts": lambda a, b, c: ((a.mT.exp() + b.mT.exp()).clone() - a.mT.contiguous().exp(),),
    "whole numbers": lambda a, b, c: (((a > 0).long() + (b > 0).long()) // (a > 0).long(),),
    "a sum that is used again": lambda a, b, c: ((a + b).exp() * (a + b),),
    "distinct draws": lambda a, b, c: (a + torch.rand_like(a) - torch.rand_like(a),),
    "divided by zero": lambda a, b, c: (a / torch.zeros(()),),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_graphs_stay_as_they_are(name: str) -> None:
    plain, graph = graphs(KEPT[name], A, B, C)
    assert targets(graph) == targets(plain)


def test_long_products_are_shared() -> None:
    """Factors are not multiplied out again for each use."""

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        product = a * b * c * a.exp() * b.exp()
        return product * c.exp(), product * a.sin(), product * b.sin()

    plain, graph = graphs(function, A, B, C)
    assert len(targets(graph)) <= len(targets(plain))
    torch.testing.assert_close(graph(A, B, C), plain(A, B, C))


def test_pathwise_gradient_of_a_normal() -> None:
    """The gradients of an entropy: nothing for the location, a reciprocal for the scale."""
    noise = torch.randn(3, 4, generator=GENERATOR)

    def entropy(loc: Tensor, scale: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        loc, scale = loc.detach().requires_grad_(), scale.detach().requires_grad_()
        with torch.enable_grad():
            draw = loc + noise * scale
            log_q = -((draw - loc) ** 2) / (2 * scale**2) - scale.log()
            loss = log_q.sum() + (draw * c).sum()
            return torch.autograd.grad(loss, [loc, scale])

    plain, graph = graphs(entropy, A, B, C)
    assert sorted(map(str, targets(graph))) == [
        "aten.add.Tensor",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.reciprocal.default",
    ]
    torch.testing.assert_close(graph(A, B, C), (C, noise * C - 1 / B), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(graph(A, B, C), plain(A, B, C), rtol=1e-12, atol=1e-12)


def test_sums_of_squares_and_others_are_taken_apart() -> None:
    plain, graph = graphs(lambda a, b, c: (((a**2) / 2 - b.log()).sum(),), A, B, C)
    short = fewer_passes(graph, (A, B, C))
    assert aten.dot.default in targets(short) and POW not in targets(short)
    torch.testing.assert_close(short(A, B, C), plain(A, B, C))


def test_products_add() -> None:
    plain, graph = graphs(lambda a, b, c: (a + 2 * (b * c), a * b - c), A, B, C)
    short = fewer_passes(graph, (A, B, C))
    assert targets(short).count(aten.addcmul.default) == 1
    torch.testing.assert_close(short(A, B, C), plain(A, B, C))


def test_control_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cancellation._RULES, aten.sub.Tensor, cancellation._Canceller._plus)
    plain, graph = graphs(lambda a, b, c: ((a + b) / a * a - a,), A, B, C)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(graph(A, B, C), plain(A, B, C))


def test_a_rule_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setitem(cancellation._RULES, ADD, fails)
    with pytest.raises(UntraceableError, match=r"can't be cancelled: KeyError.*no such thing"):
        graphs(lambda a, b, c: (a + b,), A, B, C)
