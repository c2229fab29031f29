"""Graphs without what cancels: products are known by their factors, sums by their terms."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from pyro_sym.graph.record import Simplifier, UntraceableError, aten

__all__ = ["cancelled"]


def cancelled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    r"""Write a simplified graph anew without what cancels; finite results agree up to rounding.

    A pathwise gradient computes a draw, :math:`x = \mu + \sigma \epsilon`, and undoes that to get its
    density. Elementwise, with tensors of one shape,

    .. math::

        (a + b) - a = b, \qquad \frac{(a b)^2}{2 a^2} = \frac{b^2}{2}, \qquad (a + b) c - b c = a c,

    so that the entropy of a mean-field guide costs one logarithm, and its gradient one reciprocal. Where that
    makes for more work, the graph is given back as it is.
    """
    try:
        rewriter = _Canceller(graph)
        shorter = rewriter.run(inputs)
    except Exception as error:  # an operation that no rule foresaw
        raise UntraceableError(f"its terms can't be cancelled: {type(error).__name__}: {error}") from error
    return shorter if rewriter.work_after() < rewriter.work_before else graph


Factors = frozenset[tuple[fx.Node, int]]
"""Tensors of one shape with their powers, neither of them 0."""

Terms = dict[Factors, float]
"""A sum of products, with their coefficients."""


@dataclass(frozen=True)
class _Product:
    """``coefficient`` times the factors, for as long as nobody needs it as a tensor; ``value`` is that."""

    factors: Factors
    coefficient: float
    value: Tensor

    @property
    def terms(self) -> Terms:
        return {self.factors: self.coefficient}


class _Canceller(Simplifier):
    """Rebuilds a graph with products that are not written before they are used."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.sums: dict[fx.Node, Terms] = {}  # what was added to get a node
        self.work_before = 0  # elements written

    def work_after(self) -> int:
        """The same for the new graph."""
        return sum(_work(n.target, self.values[n]) for n in self.new.nodes if n.op == "call_function")

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _RULES and set(kwargs) <= {"alpha"}:
            value = target(*self._values(args), **kwargs)
            self.work_before += _work(target, value)
            if isinstance(value, Tensor) and value.is_floating_point():
                result = _RULES[target](self, value, *args, **kwargs)
                if result is not None:
                    return result
            return self._node(target, args, kwargs)
        if target is aten.eq.Tensor and args[0] is args[1]:  # as a point mass asks of its own draw
            return torch.ones_like(self._values(args[0]), dtype=torch.bool)
        result = self._node(target, args, kwargs)
        if isinstance(result, fx.Node):
            self.work_before += _work(target, self.values[result])
        return result

    def _node(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super()._call(target, *tree_map(self._write, (args, kwargs)))

    def _as_node(self, value: Any) -> fx.Node:
        return super()._as_node(self._write(value))

    def _values(self, tree: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.value if isinstance(leaf, _Product) else leaf, super()._values(tree)
        )

    def _product(self, arg: Any, value: Tensor) -> _Product | None:
        """An operand of an operation with that result as a product, a number included, if it can be one."""
        if isinstance(arg, _Product):
            return arg if _alike(arg.value, value) else None
        if isinstance(arg, Tensor) and arg.numel() > 0 and bool((arg == arg.flatten()[0]).all()):
            arg = arg.flatten()[0].item()
        if isinstance(arg, (int, float)):
            return _Product(frozenset(), float(arg), value) if math.isfinite(arg) else None
        own = self.values[arg] if isinstance(arg, fx.Node) else arg
        if isinstance(own, Tensor) and _alike(own, value):
            return _Product(frozenset({(self._as_node(arg), 1)}), 1.0, own)
        return None

    def _times(self, value: Tensor, left: Any, right: Any, power: int = 1) -> _Product | None:
        one, other = self._product(left, value), self._product(right, value)
        if one is None or other is None or (power < 0 and other.coefficient == 0):
            return None
        powers = Counter(dict(one.factors))
        for node, exponent in other.factors:
            powers[node] += power * exponent
        factors = frozenset((node, exponent) for node, exponent in powers.items() if exponent)
        if len(factors) > _LONGEST or any(abs(exponent) > _LONGEST for _, exponent in factors):
            return None
        return _Product(factors, one.coefficient * other.coefficient**power, value)

    def _over(self, value: Tensor, left: Any, right: Any) -> _Product | None:
        return self._times(value, left, right, -1)

    def _inverse(self, value: Tensor, arg: Any) -> _Product | None:
        return self._times(value, 1.0, arg, -1)

    def _negative(self, value: Tensor, arg: Any) -> _Product | None:
        return self._times(value, -1.0, arg)

    def _power(self, value: Tensor, arg: Any, power: Any) -> _Product | None:
        return self._times(value, 1.0, arg, int(power)) if power in (2, 3) else None

    def _minus(self, value: Tensor, left: Any, right: Any, alpha: float = 1) -> Any:
        return self._plus(value, left, right, -alpha)

    def _plus(self, value: Tensor, left: Any, right: Any, alpha: float = 1) -> Any:
        one, other = self._product(left, value), self._product(right, value)
        if one is None or other is None:
            return None
        other = _Product(other.factors, alpha * other.coefficient, other.value)
        parts = [*one.terms.items(), *other.terms.items()]
        opened = [term for part in parts for term in self._open(*part)]
        for terms in (parts, opened):
            total = _collect(terms)
            if len(total) < len(terms):
                return self._sum(total, value)
        return self._sum(_collect(parts), value)

    def _open(self, factors: Factors, coefficient: float) -> list[tuple[Factors, float]]:
        """A product with a sum among its factors as a sum of products."""
        for node, power in factors:
            if power == 1 and node in self.sums:
                rest = factors - {(node, 1)}
                whole = self.values[node]
                result: list[tuple[Factors, float]] = []
                for term, own in self.sums[node].items():
                    product = self._times(
                        whole, _Product(rest, coefficient, whole), _Product(term, own, whole)
                    )
                    if product is None:
                        return [(factors, coefficient)]
                    result += product.terms.items()
                return result
        return [(factors, coefficient)]

    def _sum(self, terms: Terms, value: Tensor) -> Any:
        """A sum of products: no tensor yet if it is one product only."""
        products = [_Product(factors, own, value) for factors, own in terms.items()]
        if len(products) <= 1:
            return products[0] if products else torch.zeros_like(value)
        nodes: list[Any] = [p.coefficient if not p.factors else self._write(p) for p in products]
        nodes.sort(key=lambda node: isinstance(node, float))  # the number last
        node: Any = functools.reduce(
            lambda a, b: super(_Canceller, self)._call(aten.add.Tensor, (a, b), {}), nodes
        )
        self.sums.setdefault(node, terms)
        return node

    def _write(self, leaf: Any) -> Any:
        """A product as a node, or a number as a constant tensor."""
        if not isinstance(leaf, _Product):
            return leaf
        call = super()._call
        above = [(node, power) for node, power in leaf.factors if power > 0]
        below = [(node, -power) for node, power in leaf.factors if power < 0]
        top, bottom = self._chain(above), self._chain(below)
        if top is None and bottom is None:
            return torch.full_like(leaf.value, leaf.coefficient)
        if top is None:
            result = call(aten.reciprocal.default, (bottom,), {})
        else:
            result = top if bottom is None else call(aten.div.Tensor, (top, bottom), {})
        return result if leaf.coefficient == 1 else call(aten.mul.Tensor, (result, leaf.coefficient), {})

    def _chain(self, factors: Iterable[tuple[fx.Node, int]]) -> Any:
        """The product of powers, the oldest node first, so that equal products are found equal."""
        order = {node: number for number, node in enumerate(self.values)}
        powers = [
            node if power == 1 else super(_Canceller, self)._call(aten.pow.Tensor_Scalar, (node, power), {})
            for node, power in sorted(factors, key=lambda factor: order[factor[0]])
        ]
        if not powers:
            return None
        return functools.reduce(
            lambda a, b: super(_Canceller, self)._call(aten.mul.Tensor, (a, b), {}), powers
        )


_LONGEST = 4  # factors of a product, and their powers: beyond, it is worth a tensor of its own


def _collect(terms: Iterable[tuple[Factors, float]]) -> Terms:
    total: Terms = {}
    for factors, coefficient in terms:
        total[factors] = total.get(factors, 0.0) + coefficient
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype, one.device) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    )


def _work(target: Any, value: Any) -> int:
    """Elements that an operation writes."""
    if not isinstance(value, Tensor) or not isinstance(target, OpOverload):
        return 0
    view = any(out.alias_info is not None for out in target._schema.returns)
    return 0 if view else value.numel()


_RULES: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _Canceller._plus,
    aten.div.Scalar: _Canceller._over,
    aten.div.Tensor: _Canceller._over,
    aten.mul.Scalar: _Canceller._times,
    aten.mul.Tensor: _Canceller._times,
    aten.neg.default: _Canceller._negative,
    aten.pow.Tensor_Scalar: _Canceller._power,
    aten.reciprocal.default: _Canceller._inverse,
    aten.sub.Tensor: _Canceller._minus,
}
