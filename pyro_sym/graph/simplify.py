"""Graphs without operations that do nothing, are done twice, or depend on no input."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pyro_sym._private import existing, tree_leaves, tree_map
from pyro_sym.graph.record import CHECKS, OF_SHAPE, UntraceableError, aten, is_random

__all__ = ["Simplifier", "alike", "drop_unused", "layout", "simplify"]


def simplify(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Remove operations that do nothing, repeat another one, or depend on no input.

    The graph is run once at ``inputs``, so that shapes and constants are known; it must be free of side
    effects. Random operations keep their number and order.
    """
    try:
        return Simplifier(graph).run(inputs)
    except Exception as error:  # an operation that no rule expects: the caller runs the model instead
        raise UntraceableError(f"its graph can't be simplified: {type(error).__name__}: {error}") from error


class Simplifier:
    """Rebuilds a graph node by node, and keeps the value of each node beside it."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.old = graph
        self.new = fx.Graph()
        self.attributes: dict[str, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}  # of new nodes
        self.known: dict[Any, fx.Node] = {}  # common subexpressions, by what they compute
        self.constants: dict[Any, fx.Node] = {}

    def run(self, inputs: Sequence[Tensor]) -> fx.GraphModule:
        """Rebuild the graph."""
        given = iter(inputs)
        env: dict[fx.Node, Any] = {}  # from old nodes to new nodes or constants
        with torch.no_grad():
            for node in self.old.graph.nodes:
                if node.op == "placeholder":
                    new = env[node] = self.new.placeholder(node.name)
                    self.values[new] = next(given)
                elif node.op == "get_attr":
                    env[node] = getattr(self.old, str(node.target)).detach()
                elif node.op == "call_function":
                    args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                    env[node] = self._call(node.target, args, kwargs)
                else:
                    self.new.output(tuple(self._as_node(env[n]) for n in node.args[0]))
        drop_unused(self.new)
        root = torch.nn.Module()
        for name in {str(n.target) for n in self.new.nodes if n.op == "get_attr"}:
            root.register_buffer(name, self.attributes[name])
        return fx.GraphModule(root, self.new)

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A node for the call, or its value if that is constant."""
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        random = is_random(target)
        if not random and not any(isinstance(leaf, fx.Node) for leaf in tree_leaves((args, kwargs))):
            return target(*args, **kwargs)
        value = target(*self._values(args), **self._values(kwargs))
        if target in OF_SHAPE:
            return value
        if target is aten.fill.Scalar:
            return torch.full_like(value, args[1])
        same = self._unchanged(target, args, value)
        if same is not None:
            return same
        if target is aten.cat.default and len(args[0]) == 1:
            return args[0][0]
        args, kwargs = tree_map(self._placed, (args, kwargs))
        # Random operations are never the same.
        key = object() if random else _hashable((target, args, sorted(kwargs.items())))
        if key not in self.known:
            node = self.known[key] = self.new.call_function(target, args, kwargs)
            self.values[node] = value
        return self.known[key]

    def _unchanged(self, target: Any, args: Any, value: Any) -> fx.Node | None:
        """The operand that a call returns unchanged, if any."""
        if not isinstance(value, Tensor):
            return None
        if target is operator.getitem:
            parts = args[0].target
            whole = args[0].args[0] if parts in _SPLITS and len(self.values[args[0]]) == 1 else None
            return whole if isinstance(whole, fx.Node) else None
        first = args[0]
        if isinstance(first, fx.Node) and self._like(first, value):
            if target in _NOTHING:
                return first
            if target in _NEUTRAL_RIGHT and _is_all(args[1], _NEUTRAL_RIGHT[target]):
                return first
        if target in _NEUTRAL_LEFT and isinstance(args[1], fx.Node) and self._like(args[1], value):
            return args[1] if _is_all(first, _NEUTRAL_LEFT[target]) else None
        if target is aten.neg.default and first.target is aten.neg.default:
            return first.args[0]
        return None

    def _like(self, node: fx.Node, value: Tensor) -> bool:
        return alike(self.values[node], value)

    def _values(self, tree: Any) -> Any:
        return map_arg(tree, self.values.__getitem__)

    def _placed(self, leaf: Any) -> Any:
        return self._as_node(leaf) if isinstance(leaf, Tensor) else leaf

    def _as_node(self, value: Any) -> fx.Node:
        """A node for a constant tensor."""
        if isinstance(value, fx.Node):
            return value
        # Equal numbers are one constant if they are few; else the same memory is.
        key = (*layout(value), tuple(value.flatten().tolist()) if value.numel() <= 64 else value.data_ptr())
        if key not in self.constants:
            name = f"constant{len(self.attributes)}"
            self.attributes[name] = value
            node = self.constants[key] = self.new.create_node("get_attr", name)
            self.values[node] = value
        return self.constants[key]


_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor}
_NOTHING = existing(  # if the result is laid out as the operand is
    "alias.default",
    "clone.default",
    "detach.default",
    "expand.default",
    "lift_fresh_copy.default",
    "permute.default",
    "reshape.default",
    "_to_copy.default",
    "squeeze.dim",
    "sum.default",
    "_unsafe_view.default",
    "view.default",
)
_NEUTRAL_RIGHT = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.div.Scalar: 1,
    aten.pow.Tensor_Scalar: 1,
}
_NEUTRAL_LEFT = {aten.add.Tensor: 0, aten.mul.Tensor: 1}


def _is_all(value: Any, number: float) -> bool:
    """Whether a constant is one number throughout."""
    if isinstance(value, Tensor):
        return value.numel() > 0 and bool((value == number).all())
    return not isinstance(value, fx.Node) and value == number


def _hashable(tree: Any) -> Any:
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, *map(_hashable, tree))
    return (type(tree).__name__, tree)


def drop_unused(graph: fx.Graph) -> None:
    """Remove nodes that no output needs and that neither draw random numbers nor raise errors."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or node.target in CHECKS)


def alike(one: Any, other: Tensor) -> bool:
    """Whether two tensors have the same shape, layout, dtype and device."""
    return layout(one) == layout(other)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """The shape, strides, dtype and device of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
