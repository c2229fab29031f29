"""Graphs of fewer passes over memory: numbers moved out of sums, and sums moved into matrix products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, fx
from torch.utils._pytree import tree_map

from pyro_sym.graph.record import Simplifier, UntraceableError, aten, drop_unused

__all__ = ["fewer_passes"]


def fewer_passes(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    r"""Write a simplified graph anew with fewer passes over large tensors; results agree up to rounding.

    With numbers :math:`a, b`, tensors :math:`x, y` of :math:`n` elements, and matrices :math:`A, B`,

    .. math::

        \textstyle\sum (a x + b) = a \sum x + n b, \qquad \sum x^2 = x \cdot x, \qquad x + a A B, \qquad
        x + a y z,

    the last two by one call each, and :math:`x - \log \sum \exp x` by another. The graph is run once at
    ``inputs``, as :func:`~pyro_sym.graph.record.simplify` does.
    """
    try:
        return _Regrouper(graph).run(inputs)
    except Exception as error:  # an operation that no rule foresaw
        raise UntraceableError(f"its graph can't be regrouped: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Affine:
    """``scale * node + shift``, for as long as nobody needs it as a tensor."""

    node: fx.Node
    scale: float = 1.0
    shift: float = 0.0

    def times(self, number: float) -> _Affine:
        return _Affine(self.node, number * self.scale, number * self.shift)

    def plus(self, number: float) -> _Affine:
        return _Affine(self.node, self.scale, self.shift + number)


class _Regrouper(Simplifier):
    """Rebuilds a graph with numbers carried along beside its tensors."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.written: dict[fx.Node, _Affine] = {}  # what a node that had to be made stands for

    def run(self, inputs: Sequence[Tensor]) -> fx.GraphModule:
        graph = super().run(inputs)
        self._add_within_products(graph.graph)
        graph.recompile()
        return graph

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in _RULES and not kwargs:
            result = _RULES[target](self, target, *args)
            if result is not None:
                return result
        return super()._call(target, *tree_map(self._write, (args, kwargs)))

    def _as_node(self, value: Any) -> fx.Node:
        return super()._as_node(self._write(value))

    def _write(self, leaf: Any) -> Any:
        """A node for what is affine, by one pass."""
        if not isinstance(leaf, _Affine):
            return leaf
        if leaf.scale == 1 and leaf.shift == 0:
            return leaf.node
        if leaf.shift == 0:
            node = super()._call(aten.mul.Tensor, (leaf.node, leaf.scale), {})
        elif leaf.scale == 1:
            node = super()._call(aten.add.Tensor, (leaf.node, leaf.shift), {})
        else:
            shift = self.values[leaf.node].new_tensor(leaf.shift)
            node = super()._call(aten.add.Tensor, (shift, leaf.node), {"alpha": leaf.scale})
        self.written[node] = leaf
        return node

    def _affine(self, arg: Any) -> _Affine | None:
        """What stands for a floating-point tensor that varies."""
        if isinstance(arg, fx.Node):
            arg = self.written.get(arg, _Affine(arg))
        if not isinstance(arg, _Affine):
            return None
        value = self.values[arg.node]
        return arg if isinstance(value, Tensor) and value.is_floating_point() else None

    def _number(self, arg: Any, beside: _Affine) -> float | None:
        """A constant as one number, if it leaves shape and type of the tensor beside it."""
        if isinstance(arg, Tensor) and arg.numel() > 0:
            tensor, first = self.values[beside.node], arg.flatten()[0]
            both = tensor * arg
            fits = (both.shape, both.dtype) == (tensor.shape, tensor.dtype)
            arg = first.item() if fits and bool((arg == first).all()) else None
        return float(arg) if isinstance(arg, (int, float)) and math.isfinite(arg) else None

    def _negative(self, target: Any, arg: Any) -> _Affine | None:
        affine = self._affine(arg)
        return None if affine is None else affine.times(-1)

    def _product(self, target: Any, left: Any, right: Any) -> _Affine | None:
        for one, other in ((left, right), (right, left)):
            affine = self._affine(one)
            number = None if affine is None else self._number(other, affine)
            if affine is not None and number:
                return affine.times(number)
        return None

    def _quotient(self, target: Any, left: Any, right: Any) -> _Affine | None:
        affine = self._affine(left)
        number = None if affine is None else self._number(right, affine)
        return affine.times(1 / number) if affine is not None and number else None

    def _difference(self, target: Any, left: Any, right: Any) -> Any:
        if isinstance(right, fx.Node) and right.target is aten.logsumexp.default:
            logits, dims, *keepdim = cast(Any, right.args)
            if logits is left and len(dims) == 1 and keepdim == [True]:
                return super()._call(aten._log_softmax.default, (logits, dims[0], False), {})
        negative = self._negative(None, right) or (
            -right if isinstance(right, (Tensor, int, float)) else None
        )
        return None if negative is None else self._sum_of_two(None, left, negative)

    def _sum_of_two(self, target: Any, left: Any, right: Any) -> _Affine | None:
        one, other = self._affine(left), self._affine(right)
        if one is not None and other is not None:
            return self._plus(one, other)
        affine, number = (other, left) if one is None else (one, right)
        shift = None if affine is None else self._number(number, affine)
        return None if affine is None or shift is None else affine.plus(shift)

    def _plus(self, one: _Affine, other: _Affine) -> _Affine:
        """The sum of two tensors: one pass where a scale is 1 or the scales are alike, else two."""
        shift = one.shift + other.shift
        if one.scale == other.scale:
            return _Affine(super()._call(aten.add.Tensor, (one.node, other.node), {}), one.scale, shift)
        if other.scale == 1:
            one, other = other, one
        first = self._write(replace(one, shift=0.0))
        node = super()._call(aten.add.Tensor, (first, other.node), {"alpha": other.scale})
        return _Affine(node, shift=shift)

    def _sum(self, target: Any, arg: Any, *how: Any) -> _Affine | None:
        affine = self._affine(arg)
        if affine is None:
            return None
        value = self.values[affine.node]
        total = target(value, *how)
        result = self._sum_of_all(affine.node) if total.dim() == 0 else None
        if result is None:
            result = _Affine(super()._call(target, (affine.node, *how), {}))
        count = value.numel() // max(1, total.numel())
        return result.times(affine.scale).plus(affine.shift * count)

    def _sum_of_all(self, node: fx.Node) -> _Affine | None:
        """The sum of all elements, where there is a shorter way to it."""
        while node.target in _VIEWS:
            node = cast(fx.Node, node.args[0])
        if node.target is aten.stack.default and self.values[node].dim() == 1:
            parts = [self._affine(part) for part in cast(list[Any], node.args[0])]
            terms = [part for part in parts if part is not None]
            return functools.reduce(self._plus, terms) if len(terms) == len(parts) else None
        if node.target is aten.add.Tensor and any(map(self._is_square, node.args)):
            one, other = [self._affine(part) for part in node.args]
            shape = self.values[node].shape
            if one and other and self.values[one.node].shape == self.values[other.node].shape == shape:
                first, second = [cast(_Affine, self._sum(aten.sum.default, part)) for part in (one, other)]
                return self._plus(first, second.times(cast(float, node.kwargs.get("alpha", 1))))
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            base = cast(fx.Node, node.args[0])
            if self.values[base].is_contiguous() and self.values[base].numel() <= _EXACT:
                flat = super()._call(aten.view.default, (base, [-1]), {})
                return _Affine(super()._call(aten.dot.default, (flat, flat), {}))
        return None

    def _is_square(self, arg: Any) -> bool:
        affine = self._affine(arg)
        return (
            affine is not None
            and affine.node.target is aten.pow.Tensor_Scalar
            and affine.node.args[1:] == (2,)
        )

    def _view(self, target: Any, arg: Any, *how: Any) -> Any:
        if isinstance(arg, fx.Node):  # if laid out as what it is a view of, it is that: transposed twice
            whole = cast(fx.Node, arg.args[0]) if arg.target in _VIEWS else None
            return whole if whole is not None and self._like(whole, target(self.values[arg], *how)) else None
        affine = self._affine(arg)
        if affine is None or not self.values[affine.node].is_contiguous():
            return None
        return replace(affine, node=super()._call(target, (affine.node, *how), {}))

    def _add_within_products(self, graph: fx.Graph) -> None:
        """Let products add what is added to them."""
        sums = [node for node in graph.nodes if node.target is aten.add.Tensor]
        for node in sums:
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


# A dot product has few partial sums: of 10⁵ numbers in single precision it is right to 3e-7, of 10⁶ to 3e-6.
_EXACT = 2**17

_VIEWS = {
    aten.permute.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten._unsafe_view.default,
    aten.view.default,
}
_ADDING = {
    aten.bmm.default: aten.baddbmm.default,
    aten.mm.default: aten.addmm.default,
    aten.mul.Tensor: aten.addcmul.default,
}
_RULES: dict[Any, Callable[..., Any]] = {
    aten.neg.default: _Regrouper._negative,
    aten.mul.Tensor: _Regrouper._product,
    aten.mul.Scalar: _Regrouper._product,
    aten.div.Tensor: _Regrouper._quotient,
    aten.div.Scalar: _Regrouper._quotient,
    aten.add.Tensor: _Regrouper._sum_of_two,
    aten.sub.Tensor: _Regrouper._difference,
    aten.sum.default: _Regrouper._sum,
    aten.sum.dim_IntList: _Regrouper._sum,
    **dict.fromkeys(_VIEWS, _Regrouper._view),
}
