"""Rules that rewrite a simplified graph into one of less work; results agree up to rounding.

Products and affine functions are kept as such, and written as tensors only where an operation needs one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx

from pyro_sym._private import OpOverload, existing, returns_view, tree_map
from pyro_sym.graph.record import UntraceableError, aten
from pyro_sym.graph.simplify import Simplifier, alike, drop_unused

__all__ = ["cancelled", "fewer_passes", "rewritten"]


def rewritten(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Apply :func:`cancelled`, then :func:`fewer_passes`, at ``inputs``.

    An ``UntraceableError`` is raised if a rule fails.
    """
    try:
        return fewer_passes(cancelled(graph, inputs), inputs)
    except Exception as error:  # an operation that no rule expects: the graph can be used as it is
        raise UntraceableError(f"its graph can't be rewritten: {type(error).__name__}: {error}") from error


def cancelled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    r"""Cancel terms and factors; a graph that this makes no cheaper is returned as it is.

    A pathwise gradient computes a draw, :math:`x = \mu + \sigma \epsilon`, and undoes that to get its
    density. Elementwise, with tensors of one shape,

    .. math::

        (a + b) - a = b, \qquad \frac{(a b)^2}{2 a^2} = \frac{b^2}{2}, \qquad (a + b) c - b c = a c,

    so that the entropy of a mean-field guide costs one logarithm, and its gradient one reciprocal.
    """
    rewriter = _Canceller(graph)
    shorter = rewriter.run(inputs)
    after = sum(_work(n.target, rewriter.values[n]) for n in shorter.graph.nodes if n.op == "call_function")
    return shorter if after < rewriter.work else graph


def fewer_passes(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    r"""Pass over large tensors fewer times.

    With numbers :math:`a, b`, tensors :math:`x, y, z` of :math:`n` elements, and matrices :math:`A, B`,

    .. math::

        \textstyle\sum (a x + b) = a \sum x + n b, \qquad \sum x^2 = x \cdot x, \qquad x + a A B, \qquad
        x + a y z, \qquad x - \log \sum \exp x,

    the last three by one call each.
    """
    return _Regrouper(graph).run(inputs)


class _Rewriter(Simplifier):
    """Rebuilds a graph by rules whose results may be lazy: neither nodes nor constants yet.

    A rule takes the operation, the value of its result, and its arguments. It returns what stands for the
    result, or ``None`` if it doesn't apply.
    """

    rules: ClassVar[dict[Any, Callable[..., Any]]]

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.work = 0  # elements that the operations of the old graph write

    def _write(self, leaf: Any) -> Any:
        """A node or constant for a lazy result, and any other leaf as it is."""
        raise NotImplementedError

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        rule = self.rules.get(target)
        if rule is not None and set(kwargs) <= {"alpha"}:
            value = target(*self._values(args), **kwargs)
            if isinstance(value, Tensor) and value.is_floating_point():
                result = rule(self, target, value, *args, **kwargs)
                if result is not None:
                    self.work += _work(target, value)
                    return result
        result = self._node(target, *args, **kwargs)
        if isinstance(result, fx.Node):
            self.work += _work(target, self.values[result])
        return result

    def _node(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The node of an operation, without rules."""
        return super()._call(target, *tree_map(self._write, (args, kwargs)))

    def _as_node(self, value: Any) -> fx.Node:
        return super()._as_node(self._write(value))


def _work(target: Any, value: Any) -> int:
    """Elements that an operation writes."""
    if not isinstance(value, Tensor) or not isinstance(target, OpOverload) or returns_view(target):
        return 0
    return value.numel()


def _as_number(arg: Any) -> Any:
    """A constant tensor of equal entries as a number; anything else as it is."""
    if isinstance(arg, Tensor) and arg.numel() > 0 and bool((arg == (first := arg.flatten()[0])).all()):
        return first.item()
    return arg


# Terms and factors that cancel

Factors = frozenset[tuple[fx.Node, int]]
"""Tensors of one shape with their powers, none of them 0."""

Terms = dict[Factors, float]
"""A sum of products, with their coefficients."""

_LONGEST = 4  # factors of a product, and their powers: a longer product becomes a node


@dataclass(frozen=True)
class _Product:
    """A lazy product: ``coefficient`` times the factors; ``value`` is the tensor."""

    factors: Factors
    coefficient: float
    value: Tensor

    @property
    def terms(self) -> Terms:
        return {self.factors: self.coefficient}


class _Canceller(_Rewriter):
    """Knows products by their factors and sums by their terms."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.sums: dict[fx.Node, Terms] = {}  # the terms of nodes that are sums

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.eq.Tensor and args[0] is args[1]:  # a point mass compares its draw with itself
            return torch.ones_like(self._values(args[0]), dtype=torch.bool)
        return super()._call(target, args, kwargs)

    def _values(self, tree: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.value if isinstance(leaf, _Product) else leaf, super()._values(tree)
        )

    def _product(self, arg: Any, value: Tensor) -> _Product | None:
        """An operand as a product, if it is a number or laid out as the result ``value`` is."""
        if isinstance(arg, _Product):
            return arg if alike(arg.value, value) else None
        arg = _as_number(arg)
        if isinstance(arg, (int, float)):
            return _Product(frozenset(), float(arg), value) if math.isfinite(arg) else None
        own = self.values[arg] if isinstance(arg, fx.Node) else arg
        if isinstance(own, Tensor) and alike(own, value):
            return _Product(frozenset({(self._as_node(arg), 1)}), 1.0, own)
        return None

    def _times(self, _: Any, value: Tensor, left: Any, right: Any, power: int = 1) -> _Product | None:
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

    def _power(self, _: Any, value: Tensor, arg: Any, power: Any) -> _Product | None:
        return self._times(_, value, 1.0, arg, int(power)) if power in (2, 3) else None

    def _plus(self, _: Any, value: Tensor, left: Any, right: Any, alpha: float = 1) -> Any:
        one, other = self._product(left, value), self._product(right, value)
        if one is None or other is None:
            return None
        parts = [*one.terms.items(), *replace(other, coefficient=alpha * other.coefficient).terms.items()]
        opened = [term for part in parts for term in self._open(*part)]
        for terms in (parts, opened):
            total = _collect(terms)
            if len(total) < len(terms):
                return self._sum(total, value)
        return self._sum(_collect(parts), value)

    def _open(self, factors: Factors, coefficient: float) -> list[tuple[Factors, float]]:
        """A product that has a sum among its factors as a sum of products."""
        for node, power in factors:
            if power == 1 and node in self.sums:
                whole = self.values[node]
                rest = _Product(factors - {(node, 1)}, coefficient, whole)
                terms = self.sums[node].items()
                products = [self._times(None, whole, rest, _Product(term, own, whole)) for term, own in terms]
                if None in products:
                    return [(factors, coefficient)]
                return [term for product in products for term in cast(_Product, product).terms.items()]
        return [(factors, coefficient)]

    def _sum(self, terms: Terms, value: Tensor) -> Any:
        """A sum of products: lazy if it is one product only."""
        products = [_Product(factors, own, value) for factors, own in terms.items()]
        if len(products) <= 1:
            return products[0] if products else torch.zeros_like(value)
        nodes: list[Any] = [p.coefficient if not p.factors else self._write(p) for p in products]
        nodes.sort(key=lambda node: isinstance(node, float))  # the number last
        node = reduce(partial(self._node, aten.add.Tensor), nodes)
        self.sums.setdefault(node, terms)
        return node

    def _write(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Product):
            return leaf
        top = self._chain((node, power) for node, power in leaf.factors if power > 0)
        bottom = self._chain((node, -power) for node, power in leaf.factors if power < 0)
        if top is None and bottom is None:
            return torch.full_like(leaf.value, leaf.coefficient)
        if top is None:
            result = self._node(aten.reciprocal.default, bottom)
        else:
            result = top if bottom is None else self._node(aten.div.Tensor, top, bottom)
        return result if leaf.coefficient == 1 else self._node(aten.mul.Tensor, result, leaf.coefficient)

    def _chain(self, factors: Iterable[tuple[fx.Node, int]]) -> Any:
        """The product of powers, the oldest node first, so that equal products become one node."""
        age = {node: number for number, node in enumerate(self.values)}
        powers = [
            node if power == 1 else self._node(aten.pow.Tensor_Scalar, node, power)
            for node, power in sorted(factors, key=lambda factor: age[factor[0]])
        ]
        return reduce(partial(self._node, aten.mul.Tensor), powers) if powers else None

    rules: ClassVar[dict[Any, Callable[..., Any]]] = {
        aten.add.Tensor: _plus,
        aten.sub.Tensor: lambda self, _, value, x, y, alpha=1: self._plus(_, value, x, y, -alpha),
        **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _times),
        **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), lambda self, *args: self._times(*args, -1)),
        aten.neg.default: lambda self, _, value, x: self._times(_, value, -1.0, x),
        aten.pow.Tensor_Scalar: _power,
        aten.reciprocal.default: lambda self, _, value, x: self._times(_, value, 1.0, x, -1),
    }


def _collect(terms: Iterable[tuple[Factors, float]]) -> Terms:
    total: Terms = {}
    for factors, coefficient in terms:
        total[factors] = total.get(factors, 0.0) + coefficient
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


# Numbers that leave sums, and sums within products

# A dot product has few partial sums: of 10⁵ numbers in single precision it is right to 3e-7, of 10⁶ to 3e-6.
_EXACT = 2**17

_VIEWS = existing(
    "permute.default",
    "reshape.default",
    "t.default",
    "transpose.int",
    "unsqueeze.default",
    "_unsafe_view.default",
    "view.default",
)
_ADDING = {
    aten.bmm.default: aten.baddbmm.default,
    aten.mm.default: aten.addmm.default,
    aten.mul.Tensor: aten.addcmul.default,
}


@dataclass(frozen=True)
class _Affine:
    """A lazy affine function of a tensor: ``scale * node + shift``."""

    node: fx.Node
    scale: float = 1.0
    shift: float = 0.0

    def times(self, number: float) -> _Affine:
        return _Affine(self.node, number * self.scale, number * self.shift)

    def plus(self, number: float) -> _Affine:
        return _Affine(self.node, self.scale, self.shift + number)


class _Regrouper(_Rewriter):
    """Carries numbers along beside tensors."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.written: dict[fx.Node, _Affine] = {}  # the affine functions that nodes were written for

    def run(self, inputs: Sequence[Tensor]) -> fx.GraphModule:
        graph = super().run(inputs)
        self._add_within_products(graph.graph)
        graph.recompile()
        return graph

    def _values(self, tree: Any) -> Any:
        return super()._values(tree_map(self._value, tree))

    def _value(self, leaf: Any) -> Any:
        return leaf.scale * self.values[leaf.node] + leaf.shift if isinstance(leaf, _Affine) else leaf

    def _write(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Affine):
            return leaf
        if leaf.scale == 1 and leaf.shift == 0:
            return leaf.node
        if leaf.shift == 0:
            node = self._node(aten.mul.Tensor, leaf.node, leaf.scale)
        elif leaf.scale == 1:
            node = self._node(aten.add.Tensor, leaf.node, leaf.shift)
        else:
            shift = self.values[leaf.node].new_tensor(leaf.shift)
            node = self._node(aten.add.Tensor, shift, leaf.node, alpha=leaf.scale)
        self.written[node] = leaf
        return node

    def _affine(self, arg: Any) -> _Affine | None:
        """A floating-point tensor that is no constant as an affine function."""
        if isinstance(arg, fx.Node):
            arg = self.written.get(arg, _Affine(arg))
        if not isinstance(arg, _Affine):
            return None
        value = self.values[arg.node]
        return arg if isinstance(value, Tensor) and value.is_floating_point() else None

    def _number(self, arg: Any, beside: _Affine | None) -> float | None:
        """A constant as a number, if an operation with it keeps shape and dtype of the tensor beside it."""
        if beside is None:
            return None
        if isinstance(arg, Tensor):
            tensor, both = self.values[beside.node], self.values[beside.node] * arg
            arg = _as_number(arg) if (both.shape, both.dtype) == (tensor.shape, tensor.dtype) else None
        return float(arg) if isinstance(arg, (int, float)) and math.isfinite(arg) else None

    def _product(self, target: Any, value: Any, left: Any, right: Any) -> _Affine | None:
        for one, other in ((left, right), (right, left)):
            affine = self._affine(one)
            number = self._number(other, affine)
            if affine is not None and number:
                return affine.times(number)
        return None

    def _quotient(self, target: Any, value: Any, left: Any, right: Any) -> _Affine | None:
        affine = self._affine(left)
        number = self._number(right, affine)
        return affine.times(1 / number) if affine is not None and number else None

    def _difference(self, target: Any, value: Any, left: Any, right: Any, alpha: float = 1) -> Any:
        if alpha == 1 and isinstance(right, fx.Node) and right.target is aten.logsumexp.default:
            logits, dims, *keepdim = cast(Any, right.args)
            if logits is left and len(dims) == 1 and keepdim == [True]:
                return self._node(aten._log_softmax.default, logits, dims[0], False)
        return self._sum_of_two(target, value, left, right, -alpha)

    def _sum_of_two(self, target: Any, value: Any, left: Any, right: Any, alpha: float = 1) -> _Affine | None:
        one, other = self._affine(left), self._affine(right)
        if one is not None and other is not None:
            return self._plus(one, other.times(alpha))
        if one is not None:
            shift = self._number(right, one)
            return None if shift is None else one.plus(alpha * shift)
        shift = self._number(left, other)
        return None if other is None or shift is None else other.times(alpha).plus(shift)

    def _plus(self, one: _Affine, other: _Affine) -> _Affine:
        """The sum of two tensors: one pass if a scale is 1 or the scales are equal, else two."""
        shift = one.shift + other.shift
        if one.scale == other.scale:
            return _Affine(self._node(aten.add.Tensor, one.node, other.node), one.scale, shift)
        if other.scale == 1:
            one, other = other, one
        first = self._write(replace(one, shift=0.0))
        return _Affine(self._node(aten.add.Tensor, first, other.node, alpha=other.scale), shift=shift)

    def _sum(self, target: Any, value: Tensor, arg: Any, *how: Any) -> _Affine | None:
        affine = self._affine(arg)
        if affine is None:
            return None
        result = self._sum_of_all(affine.node) if value.dim() == 0 else None
        if result is None:
            result = _Affine(self._node(target, affine.node, *how))
        count = self.values[affine.node].numel() // max(1, value.numel())
        return result.times(affine.scale).plus(affine.shift * count)

    def _sum_of_all(self, node: fx.Node) -> _Affine | None:
        """The sum of all elements without a pass over the node, if possible."""
        while node.target in _VIEWS:
            node = cast(fx.Node, node.args[0])
        if node.target is aten.stack.default and self.values[node].dim() == 1:
            parts = [self._affine(part) for part in cast(list[Any], node.args[0])]
            terms = [part for part in parts if part is not None]
            return reduce(self._plus, terms) if len(terms) == len(parts) else None
        if node.target is aten.add.Tensor and any(map(self._is_square, node.args)):
            one, other = map(self._affine, node.args)
            shape = self.values[node].shape
            if one and other and self.values[one.node].shape == self.values[other.node].shape == shape:
                total, alpha = self.values[node].sum(), cast(float, node.kwargs.get("alpha", 1))
                first, second = (self._sum(aten.sum.default, total, part) for part in (one, other))
                return self._plus(cast(_Affine, first), cast(_Affine, second).times(alpha))
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            base = cast(fx.Node, node.args[0])
            if self.values[base].is_contiguous() and self.values[base].numel() <= _EXACT:
                flat = self._node(aten.view.default, base, [-1])
                return _Affine(self._node(aten.dot.default, flat, flat))
        return None

    def _is_square(self, arg: Any) -> bool:
        affine = self._affine(arg)
        power = aten.pow.Tensor_Scalar
        return affine is not None and affine.node.target is power and bool(affine.node.args[1] == 2)

    def _view(self, target: Any, value: Any, arg: Any, *how: Any) -> Any:
        if isinstance(arg, fx.Node):  # transposed twice
            whole = cast(fx.Node, arg.args[0]) if arg.target in _VIEWS else None
            return whole if whole is not None and self._like(whole, value) else None
        affine = self._affine(arg)
        if affine is None or not self.values[affine.node].is_contiguous():
            return None
        return replace(affine, node=self._node(target, affine.node, *how))

    def _add_within_products(self, graph: fx.Graph) -> None:
        """Replace the sum of a tensor and a product by one call."""
        for node in [node for node in graph.nodes if node.target is aten.add.Tensor]:
            factor = node.kwargs.get("alpha", 1)
            left, right = node.args
            for one, other, of_one, of_other in ((left, right, 1, factor), (right, left, factor, 1)):
                if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
                    break
                if one.target not in _ADDING or len(one.users) > 1 or not self._like(other, self.values[one]):
                    continue
                factors = {"alpha": of_one, "beta": of_other}
                if one.target is aten.mul.Tensor:
                    if of_other != 1 or not all(map(self._affine, one.args)):
                        continue
                    factors = {"value": of_one}
                with graph.inserting_before(node):
                    at_once = graph.call_function(_ADDING[one.target], (other, *one.args), factors)
                self.values[at_once] = self.values[node]
                node.replace_all_uses_with(at_once)
                break
        drop_unused(graph)

    rules: ClassVar[dict[Any, Callable[..., Any]]] = {
        aten.add.Tensor: _sum_of_two,
        aten.sub.Tensor: _difference,
        aten.neg.default: lambda self, target, value, x: self._product(target, value, x, -1),
        **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
        **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _quotient),
        **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
        **dict.fromkeys(_VIEWS, _view),
    }
