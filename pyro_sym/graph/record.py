"""Functions of tensors as graphs of plain torch operations: traced, free of writes, simplified."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "Rule",
    "Simplifier",
    "UntraceableError",
    "drop_unused",
    "message_of",
    "refuse_side_effects",
    "replay",
    "simplify",
    "trace",
    "without_writes",
]

aten = torch.ops.aten

Function = Callable[..., tuple[Tensor, ...]]


Rule = Callable[..., Any]
"""Does what an operation does by other operations; it takes the node, then the operation's arguments."""


class UntraceableError(RuntimeError):
    """A function that a graph of torch operations can't stand for; the message is the reason."""


def message_of(error: BaseException) -> str:
    """An error's message on one line, without the table of shapes that Pyro's handlers append to it."""
    lines = str(error).partition("Trace Shapes:")[0].split("\n")
    text = " ".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= 300 else f"{text[:300]} …"


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record what ``function`` does at ``inputs``; tensors that it closes over become the graph's.

    It is what ``make_fx`` does, less symbolic shapes: importing those takes longer than all the rest.
    """
    recorder = _Recorder(inputs)
    try:
        with recorder:
            outputs = function(*inputs)
    except UntraceableError as error:
        raise type(error)(message_of(error)) from error
    except Exception as error:  # torch and the model raise all sorts
        raise UntraceableError(f"{type(error).__name__}: {message_of(error)}") from error
    return recorder.finish(outputs)


class _Recorder(TorchDispatchMode):
    """Notes every operation below autograd and vmap; a tensor is known by its identity."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # so that no identity is used twice
        self.varying: set[fx.Node] = set()
        for number, tensor in enumerate(inputs):
            node = self._name(tensor, self.graph.placeholder(f"input{number}"))
            self.varying.add(node)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.lift_fresh.default:  # a tensor that the function makes from Python numbers
            func, args = aten.lift_fresh_copy.default, (args[0].detach(),)
        given = tree_map(self._node_of, (args, kwargs or {}))
        random = _is_random(func)
        of_inputs = any(n in self.varying for n in tree_leaves(given) if isinstance(n, fx.Node))
        varying = random or (of_inputs and func not in _OF_SHAPE)
        result = func(*args, **kwargs or {})
        tensors = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        of_values = torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING
        if varying and (of_values or not tensors) and func not in _CHECKS:
            raise UntraceableError(
                "the model's course depends on the value of a tensor, as by an if or item() "
                f"({func}{_comma(_origin())}); write it with torch.where"
            )
        if random and func._schema.is_mutable:
            node = self._draw(func, given[0], given[1], result)
        else:
            node = self.graph.call_function(func, *given)
        node.meta["origin"] = _origin()
        if varying:
            self.varying.add(node)
        if isinstance(result, Tensor):
            self._name(result, node)
        else:
            for number, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
                if isinstance(part, Tensor):
                    item = self._name(part, self.graph.call_function(operator.getitem, (node, number)))
                    if varying:
                        self.varying.add(item)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> fx.Node:
        """Random numbers as a new tensor, where the function fills one that it has just made."""
        if args[0].op != "call_function":
            raise UntraceableError(f"the model changes a tensor in place ({func}{_comma(_origin())})")
        if func in _STANDARD and args[1:] in ((), _STANDARD[func][1]):
            like: dict[str, Any] = {"dtype": result.dtype, "device": result.device}
            return self.graph.call_function(_STANDARD[func][0], (list(result.shape),), like)
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        packet = aten.normal_functional if name == "normal" else getattr(aten, name)
        overload = {"float": "p"}.get(func._overloadname, func._overloadname)
        defaults = [a.default_value for a in func._schema.arguments[len(args) :] if not a.kwarg_only]
        return self.graph.call_function(getattr(packet, overload), (*args, *defaults), kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for that

    def _name(self, tensor: Tensor, node: fx.Node) -> fx.Node:
        self.alive.append(tensor)
        if id(tensor) not in self.nodes or node.op == "call_function":
            self.nodes[id(tensor)] = node
        if tensor.layout == torch.strided:
            node.meta["layout"] = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return node

    def _node_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.nodes:
            name = f"tensor{len(self.alive)}"
            self.root.register_buffer(name, leaf)
            self._name(leaf, self.graph.create_node("get_attr", name))
        return self.nodes[id(leaf)]

    def finish(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        self.graph.output(tuple(self._node_of(output) for output in outputs))
        return fx.GraphModule(self.root, self.graph)


_LIBRARIES = tuple(
    os.path.join(Path(str(module.__file__)).parent, "")
    for module in (torch, pyro, os)  # os: the standard library
)
_HERE = os.path.join(Path(__file__).parent, "")
_PACKAGE = os.path.join(Path(__file__).parent.parent, "")


@lru_cache(maxsize=1024)
def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _PACKAGE, "<"))


def _origin() -> str:
    """Where in the model the operation of now is done: a line of the user's code, or a site."""
    frame: Any = sys._getframe(2)
    while frame is not None and not (
        frame.f_code.co_filename.startswith(_HERE) and frame.f_code is not replay.__code__
    ):
        if frame.f_code is replay.__code__:
            return str(frame.f_locals["node"].meta.get("origin", ""))
        if frame.f_code.co_name == "compute_log_prob" and "site" in frame.f_locals:
            return f"in the log probability of site {frame.f_locals['site']['name']!r}"
        if not _is_library(frame.f_code.co_filename):
            return f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _comma(origin: str) -> str:
    return f", {origin}" if origin else ""


def _named(node: fx.Node) -> str:
    """An operation and where in the model it comes from, in words."""
    return f"{node.target}{_comma(node.meta.get('origin', ''))}"


_INDEXING = {aten.index.Tensor}  # so tagged for boolean indices; those are found out by their values
_CHECKS = {aten._linalg_check_errors.default}  # raise or do nothing
_STANDARD = {
    aten.normal_.default: (aten.randn.default, (0.0, 1.0)),
    aten.uniform_.default: (aten.rand.default, (0.0, 1.0)),
}


def _is_random(target: Any) -> bool:
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def drop_unused(graph: fx.Graph) -> None:
    """Take out what has no effect: neither on the outputs, nor on random numbers, nor by raising."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure() or node.target in _CHECKS)


def replay(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    rules: Mapping[Any, Rule] | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Do what a graph does, node by node.

    Args:
        graph: the graph.
        inputs: its inputs.
        rules: by operation, what is done in its place.
        constants: by name, what takes the place of the graph's own tensors.

    Returns:
        The graph's outputs.

    Raises:
        UntraceableError: if an operation fails; the message names it and where in the model it comes from.
    """
    rules, constants = rules or {}, constants or {}
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            name = str(node.target)
            values[node] = constants[name] if name in constants else getattr(graph, name)
        elif node.op == "call_function":
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            try:
                if node.target in rules:
                    values[node] = rules[node.target](node, *args, **kwargs)
                else:
                    values[node] = node.target(*args, **kwargs)
            except Exception as error:  # torch raises all sorts
                raise UntraceableError(f"{_named(node)}: {message_of(error)}") from error
    outputs: Any = graph.graph.output_node().args[0]
    return tuple(map_arg(outputs, values.__getitem__))


def without_writes(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The same in operations that write into no tensor; it must be free of side effects."""
    if not any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes):
        return graph
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    tensors = [getattr(graph, name) for name in names]

    # A copy of a constant is written to as well, so constants are inputs of what torch rewrites.
    def pure(*given: Tensor) -> tuple[Any, ...]:
        constants = dict(zip(names, given[len(inputs) :], strict=True))
        return replay(graph, given[: len(inputs)], constants=constants)

    rewritten = torch.func.functionalize(pure, remove="mutations")
    with torch.no_grad():
        return trace(lambda *given: rewritten(*given, *tensors), inputs)


def refuse_side_effects(graph: fx.GraphModule, *, random: bool = False) -> None:
    """Raise where a graph changes a tensor that outlives the call, or draws random numbers, unless it may."""
    fresh: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.target is operator.getitem and node.args[0] in fresh:
            fresh.add(node)
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if _is_random(node.target) and not random:
            raise UntraceableError(f"the model draws random numbers ({_named(node)})")
        if "batch_norm" in node.target.name() and node.args[5] is True:
            raise UntraceableError("batch normalisation in training mode updates its running statistics")
        if node.target._schema.is_mutable and node.args[0] not in fresh:
            raise UntraceableError(
                f"the model changes a tensor in place that outlives the call ({_named(node)})"
            )
        # A view of a tensor made here is as fresh as the tensor itself.
        view = any(out.alias_info is not None for out in node.target._schema.returns)
        if not view or node.args[0] in fresh:
            fresh.add(node)


def simplify(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Take out of a graph what does nothing, what is done twice and what depends on no input.

    The graph is run once at ``inputs``, so that shapes and constants are known; it must be free of side
    effects. Random numbers are drawn anew in each run, as many and in the same order as before.
    """
    try:
        return Simplifier(graph).run(inputs)
    except Exception as error:  # an operation that no rule foresaw: the model can still be run as it is
        raise UntraceableError(f"its graph can't be simplified: {type(error).__name__}: {error}") from error


class Simplifier:
    """Rebuilds a graph node by node, each beside its value."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.old = graph
        self.new = fx.Graph()
        self.attributes: dict[str, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}  # of new nodes
        self.known: dict[Any, fx.Node] = {}  # common subexpressions, by what they compute
        self.constants: dict[Any, fx.Node] = {}

    def run(self, inputs: Sequence[Tensor]) -> fx.GraphModule:
        """The new graph."""
        given = iter(inputs)
        env: dict[fx.Node, Any] = {}  # old nodes: a new node, or a constant
        with torch.no_grad():
            for node in self.old.graph.nodes:
                if node.op == "placeholder":
                    new = env[node] = self.new.placeholder(node.name)
                    self.values[new] = next(given)
                elif node.op == "get_attr":
                    env[node] = getattr(self.old, str(node.target)).detach()
                elif node.op == "call_function":
                    env[node] = self._call(
                        node.target,
                        map_arg(node.args, env.__getitem__),
                        map_arg(node.kwargs, env.__getitem__),
                    )
                else:
                    self.new.output(
                        tuple(self._as_node(env[n]) for n in node.args[0]),
                    )
        drop_unused(self.new)
        used = {str(n.target) for n in self.new.nodes if n.op == "get_attr"}
        root = torch.nn.Module()
        for name in used:
            root.register_buffer(name, self.attributes[name])
        return fx.GraphModule(root, self.new)

    def _call(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A node for the call, or its value where that's constant."""
        leaves = tree_leaves((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        random = _is_random(target)
        if not operands and not random:
            return target(*args, **kwargs)
        value = target(*self._values(args), **self._values(kwargs))
        if target in _OF_SHAPE:
            return value
        if target is aten.fill.Scalar:
            return torch.full_like(value, args[1])
        same = self._unchanged(target, args, value)
        if same is not None:
            return same
        if target is aten.cat.default and len(args[0]) == 1:
            return args[0][0]
        args, kwargs = tree_map(self._placed, (args, kwargs))
        # Two draws of the same law are two draws.
        key = object() if random else _hashable((target, args, sorted(kwargs.items())))
        if key not in self.known:
            node = self.known[key] = self.new.call_function(target, args, kwargs)
            self.values[node] = value
        return self.known[key]

    def _unchanged(self, target: Any, args: Any, value: Any) -> fx.Node | None:
        """The operand that a call gives back as it is, if any."""
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
        own = self.values[node]
        return (own.shape, own.stride(), own.dtype, own.device) == (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
        )

    def _values(self, tree: Any) -> Any:
        return map_arg(tree, self.values.__getitem__)

    def _placed(self, leaf: Any) -> Any:
        return self._as_node(leaf) if isinstance(leaf, Tensor) else leaf

    def _as_node(self, value: Any) -> fx.Node:
        """A node for a constant tensor."""
        if isinstance(value, fx.Node):
            return value
        layout = (value.shape, value.stride(), value.dtype, value.device)
        # Equal numbers are one constant if they are few; else the same memory is.
        key = (*layout, tuple(value.flatten().tolist()) if value.numel() <= 64 else value.data_ptr())
        if key not in self.constants:
            name = f"constant{len(self.attributes)}"
            self.attributes[name] = value
            node = self.constants[key] = self.new.create_node("get_attr", name)
            self.values[node] = value
        return self.constants[key]


_OF_SHAPE = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor}
_NOTHING = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.lift_fresh_copy.default,
    aten.permute.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.squeeze.dim,
    aten.sum.default,  # of a scalar
    aten._unsafe_view.default,
    aten.view.default,
}
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
