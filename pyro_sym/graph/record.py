"""Functions of tensors recorded as graphs of torch operations, replayed, and freed of in-place writes."""

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
from torch.fx.node import map_arg

from pyro_sym._private import (
    OpOverload,
    TorchDispatchMode,
    existing,
    is_mutable,
    operands_of,
    returns_view,
    tree_leaves,
    tree_map,
)

__all__ = [
    "CHECKS",
    "OF_SHAPE",
    "Function",
    "Rule",
    "UntraceableError",
    "aten",
    "is_random",
    "message_of",
    "refuse_side_effects",
    "replay",
    "trace",
    "without_writes",
]

aten = torch.ops.aten

Function = Callable[..., tuple[Tensor, ...]]

Rule = Callable[..., Any]
"""Replaces an operation by other operations; it takes the node, then the operation's arguments."""

OF_SHAPE = existing(
    "ones_like.default",
    "zeros_like.default",
    "full_like.default",
    "new_zeros.default",
    "new_ones.default",
    "new_full.default",
)
"""Operations whose result depends on the shape of their operand only."""

CHECKS = existing("_linalg_check_errors.default")
"""Operations that raise an error or do nothing."""


class UntraceableError(RuntimeError):
    """A function can't be replaced by a graph of torch operations; the message says why."""


def message_of(error: BaseException | str) -> str:
    """An error's message on one line of 300 characters at most, without Pyro's table of shapes."""
    text = " ".join(str(error).partition("Trace Shapes:")[0].split())
    return text if len(text) <= 300 else f"{text[:300]} …"


def trace(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record the operations of ``function`` at ``inputs``; tensors that it closes over become constants.

    ``make_fx`` does the same with symbolic shapes, whose import takes longer than all the rest.
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
    """Records every operation below autograd and vmap; tensors are told apart by ``id``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []  # so that no id is used twice
        self.varying: set[fx.Node] = set()  # nodes that depend on inputs or random numbers
        for number, tensor in enumerate(inputs):
            node = self._name(tensor, self.graph.placeholder(f"input{number}"))
            self.varying.add(node)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.lift_fresh.default:  # a tensor that the function makes from Python numbers
            func, args = aten.lift_fresh_copy.default, (args[0].detach(),)
        given = tree_map(self._node_of, (args, kwargs or {}))
        random = is_random(func)
        of_inputs = any(n in self.varying for n in tree_leaves(given) if isinstance(n, fx.Node))
        varying = random or (of_inputs and func not in OF_SHAPE)
        result = func(*args, **kwargs or {})
        tensors = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        of_values = torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXING
        if varying and (of_values or not tensors) and func not in CHECKS:
            raise UntraceableError(
                "the model branches on the value of a tensor, as by an if or item() "
                f"({func}{_comma(_origin())}); write it with torch.where"
            )
        if random and is_mutable(func):
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
        """Record in-place random numbers as a new tensor, if they fill one that the function has made."""
        if args[0].op != "call_function":
            raise UntraceableError(f"the model changes a tensor in place ({func}{_comma(_origin())})")
        if func in _STANDARD and args[1:] in ((), _STANDARD[func][1]):
            like: dict[str, Any] = {"dtype": result.dtype, "device": result.device}
            return self.graph.call_function(_STANDARD[func][0], (list(result.shape),), like)
        packet, _, overload = func.name().removeprefix("aten::").partition(".")  # "normal_", "" or "float"
        name = "normal_functional" if packet == "normal_" else packet.removesuffix("_")
        overload = {"": "default", "float": "p"}.get(overload, overload)
        defaults = [a.default_value for a in operands_of(func)[len(args) :] if not a.kwarg_only]
        return self.graph.call_function(getattr(getattr(aten, name), overload), (*args, *defaults), kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default imports torch's compiler

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


# os stands for the standard library
_LIBRARIES = tuple(os.path.join(Path(str(module.__file__)).parent, "") for module in (torch, pyro, os))
_HERE = os.path.join(Path(__file__).parent, "")
_PACKAGE = os.path.join(Path(__file__).parent.parent, "")


@lru_cache(maxsize=1024)
def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, _PACKAGE, "<"))


def _origin() -> str:
    """Where in the model the current operation stands: a line of the user's code, or a site."""
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
    """The name of an operation and its place in the model."""
    return f"{node.target}{_comma(node.meta.get('origin', ''))}"


_INDEXING = {aten.index.Tensor}  # tagged so for boolean masks, which read values: nonzero is recorded, too
_STANDARD = {
    aten.normal_.default: (aten.randn.default, (0.0, 1.0)),
    aten.uniform_.default: (aten.rand.default, (0.0, 1.0)),
}


def is_random(target: Any) -> bool:
    """Whether an operation draws random numbers."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def replay(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    rules: Mapping[Any, Rule] | None = None,
    constants: Mapping[str, Tensor] | None = None,
) -> tuple[Any, ...]:
    """The outputs of a graph, run node by node, with replacements of operations and of its own tensors.

    If an operation fails, an ``UntraceableError`` names it and its place in the model.
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
                rule = rules.get(node.target)
                values[node] = rule(node, *args, **kwargs) if rule else node.target(*args, **kwargs)
            except Exception as error:  # torch raises all sorts
                raise UntraceableError(f"{_named(node)}: {message_of(error)}") from error
    outputs: Any = graph.graph.output_node().args[0]
    return tuple(map_arg(outputs, values.__getitem__))


def without_writes(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Replace in-place operations by others; the graph must be free of side effects."""
    if not any(isinstance(n.target, OpOverload) and is_mutable(n.target) for n in graph.graph.nodes):
        return graph
    names = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    tensors = [getattr(graph, name) for name in names]

    # Copies of constants are written to as well, and torch rewrites writes to inputs only.
    def pure(*given: Tensor) -> tuple[Any, ...]:
        constants = dict(zip(names, given[len(inputs) :], strict=True))
        return replay(graph, given[: len(inputs)], constants=constants)

    rewritten = torch.func.functionalize(pure, remove="mutations")
    with torch.no_grad():
        return trace(lambda *given: rewritten(*given, *tensors), inputs)


def refuse_side_effects(graph: fx.GraphModule, *, random: bool = False) -> None:
    """Raise if a graph changes a tensor that outlives the call or, unless it may, draws random numbers."""
    fresh: set[fx.Node] = set()  # tensors made within the call
    for node in graph.graph.nodes:
        if node.target is operator.getitem and node.args[0] in fresh:
            fresh.add(node)
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        if is_random(node.target) and not random:
            raise UntraceableError(f"the model draws random numbers ({_named(node)})")
        if "batch_norm" in node.target.name() and node.args[5] is True:
            raise UntraceableError("batch normalisation in training mode updates its running statistics")
        if is_mutable(node.target) and node.args[0] not in fresh:
            problem = "the model changes a tensor in place that outlives the call"
            raise UntraceableError(f"{problem} ({_named(node)})")
        if not returns_view(node.target) or node.args[0] in fresh:
            fresh.add(node)
