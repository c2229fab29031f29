"""Graphs of tensor operations as straight-line Python code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import BuiltinFunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pyro_sym._private import OpOverload, direct_call
from pyro_sym.graph.record import Function
from pyro_sym.graph.simplify import alike

__all__ = ["straight_line"]


def straight_line(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Function:
    """Compile a graph to a Python function that only calls its operations, one after the other.

    If the function of the same name in ``torch`` gives the same result at ``inputs``, it is called instead,
    as its call takes less time. Results share no memory with inputs.
    """
    names: dict[str, Any] = {}  # the function's globals
    lines: list[str] = []
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    nodes = list(graph.graph.nodes)
    last_use = {operand: node for node in nodes for operand in node.all_input_nodes}

    def bound(value: Any) -> str:
        name = f"_{len(names)}"
        names[name] = value
        return name

    def text(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, (list, tuple)):
            inner = ", ".join(map(text, arg))
            return f"({inner},)" if isinstance(arg, tuple) and arg else f"[{inner}]"
        if arg is None or type(arg) in (bool, int, str):
            return repr(arg)
        return bound(arg)  # floats, too: inf has no literal

    def aliases_input(node: fx.Node) -> bool:
        """Whether an output shares the memory of an input or a constant."""
        memory = values[node].untyped_storage().data_ptr()
        owners = [values[n] for n in nodes if n.op in ("placeholder", "get_attr")]
        return memory in [owner.untyped_storage().data_ptr() for owner in owners]

    with torch.no_grad():
        for node in nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = names[node.name] = getattr(graph, str(node.target)).detach()
            elif node.op == "call_function":
                args = map_arg(node.args, values.__getitem__)
                kwargs = map_arg(node.kwargs, values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                function = _fastest_call(node.target, args, kwargs, values[node])
                if node.target is operator.getitem:
                    call = f"{text(node.args[0])}[{text(node.args[1])}]"
                else:
                    arguments = [text(a) for a in node.args]
                    arguments += [f"{name}={text(a)}" for name, a in node.kwargs.items()]
                    call = f"{bound(function)}({', '.join(arguments)})"
                lines.append(f"{node.name} = {call}")
            else:
                outputs = [text(n) + (".clone()" if aliases_input(n) else "") for n in node.args[0]]
                lines.append(f"return {', '.join(outputs)},")
                continue
            spent = [n.name for n in node.all_input_nodes if last_use[n] is node and n.op == "call_function"]
            if spent:
                lines.append(f"del {', '.join(spent)}")
    parameters = ", ".join(n.name for n in nodes if n.op == "placeholder")
    code = f"def run({parameters}):\n    " + "\n    ".join(lines)
    exec(compile(code, "<gradient>", "exec"), names)
    run: Function = names["run"]
    return run


def _fastest_call(target: Any, args: Any, kwargs: Any, value: Any) -> Callable[..., Any]:
    """The function to call for an operation with that value."""
    if not isinstance(target, OpOverload):
        return cast(Callable[..., Any], target)
    short = getattr(torch, target.name().removeprefix("aten::").partition(".")[0], None)
    if isinstance(short, BuiltinFunctionType) and isinstance(value, Tensor):
        with suppress(TypeError, RuntimeError):
            other = short(*args, **kwargs)
            same = isinstance(other, Tensor) and alike(other, value)
            if same and torch.equal(other.nan_to_num(), value.nan_to_num()):
                return short
    return direct_call(target)
