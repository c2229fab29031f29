"""A graph of one chain as a function of many, by ``torch.func.vmap`` and by rules for what that can't do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pyro_sym.graph.record import Function, Rule, UntraceableError, replay, trace

__all__ = ["UnbatchableError", "over_chains"]

aten = torch.ops.aten


class UnbatchableError(UntraceableError):
    """Torch can't vectorise the graph of one chain over chains; the message names the operation."""


def over_chains(graph: fx.GraphModule, inputs: list[Tensor], in_dims: tuple[int | None, ...]) -> Function:
    """Return a graph of one chain, without in-place operations, as a function of many by ``in_dims``.

    ``vmap`` has no rule for some operations, or a rule that fails or runs chain by chain. These are first
    replaced by others: writes into views, in the functional form that ``without_writes`` gives them
    (``copy``, ``fill``, ``slice_scatter``, ``as_strided``), writes through boolean masks (``torch.where``),
    and the cross entropy of logits. ``inputs`` are those of one chain; ``in_dims`` is 0 for an input whose
    first dim is that of the chains, ``None`` if chains share it. The function raises an ``UnbatchableError``
    if ``vmap`` has no rule for an operation.
    """
    if any(node.target in _RULES for node in graph.graph.nodes):
        one, rules = graph, {**_RULES, **_OF_LAYOUT}
        with torch.no_grad():
            graph = trace(lambda *given: replay(one, given, rules=rules), inputs)
    many = torch.func.vmap(lambda *given: replay(graph, given, rules=_OF_LAYOUT), in_dims=in_dims)

    def function(*given: Tensor) -> Any:
        try:
            return many(*given)
        except UntraceableError as error:
            raise UnbatchableError(f"torch can't vectorise {_in_words(str(error))}") from error

    return function


def _in_words(error: str) -> str:
    if "dynamic shape" not in error:
        return error
    operation = error.partition(": ")[0]
    return (
        f"{operation}: how many elements a boolean mask selects depends on latent values; write "
        "torch.where(mask, x, 0.0) in place of x[mask] or x[mask] = y"
    )


def _cross_entropy(
    node: fx.Node,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Tensor:
    """By its formula, without weights and reduction; ``vmap`` would use more and in-place operations."""
    if weight is not None or pos_weight is not None or reduction != 0:
        return aten.binary_cross_entropy_with_logits(logits, labels, weight, pos_weight, reduction)
    return (1 - labels) * logits - aten.log_sigmoid_forward(logits)[0]


def _view_or_copy(node: fx.Node, x: Tensor, size: list[int]) -> Tensor:
    """A view or copy: replacements of operations may have other strides than the originals."""
    return x.reshape(size)


def _copy(node: fx.Node, into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    return values.to(into.dtype).expand(into.shape)


def _fill(node: fx.Node, into: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _copy(node, into, value)
    return torch.full(into.shape, value, dtype=into.dtype, device=into.device)


def _slice_scatter(
    node: fx.Node,
    into: Tensor,
    values: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """With bounds inside the tensor: with others the rule of ``vmap`` overflows."""
    start, end, _ = slice(start, end, step).indices(into.shape[dim])
    return aten.slice_scatter(into, values, dim, start, max(start, end), step)


def _index_put(
    node: fx.Node, into: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Write through a mask by ``torch.where``, if ``values`` has no dim for the selected elements."""
    *before, mask = indices
    if any(i is not None for i in before) or mask is None or mask.dtype != torch.bool:
        return aten.index_put(into, indices, values, accumulate)
    after = into.dim() - len(before) - mask.dim()
    if values.dim() > after:
        if values.shape[-1 - after] != 1 or any(size != 1 for size in values.shape[: -1 - after]):
            return aten.index_put(into, indices, values, accumulate)
        values = values.reshape(values.shape[values.dim() - after :])
    # (*before, *mask, *after), where mask has its own dims and values those after it
    mask = mask.reshape(*mask.shape, *(1,) * after)
    values = values.to(into.dtype)
    return torch.where(mask, into + values if accumulate else values, into)


def _masked_scatter(node: fx.Node, into: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    mask = mask.expand(into.shape)
    values = source.reshape(-1).index_select(0, _rank(mask, source.numel())).reshape(into.shape)
    return torch.where(mask, values, into)


def _masked_scatter_backward(node: fx.Node, grad: Tensor, mask: Tensor, sizes: list[int]) -> Tensor:
    mask = mask.expand(grad.shape)
    source = grad.new_zeros(sizes).reshape(-1)
    chosen = torch.where(mask, grad, 0.0).reshape(-1)
    return source.scatter_add(0, _rank(mask, source.numel()), chosen).reshape(sizes)


def _rank(mask: Tensor, count: int) -> Tensor:
    """The number of the last selected element so far, by element of a flat mask."""
    return (mask.reshape(-1).cumsum(0) - 1).clamp(0, count - 1)


def _as_strided(
    node: fx.Node, x: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    """By the numbers of the elements: strides differ with chains."""
    elements = _elements(node, size, stride, offset)
    if np.array_equal(elements.ravel(), np.arange(x.numel())):
        return x.reshape(size)
    return x.reshape(-1).index_select(0, torch.from_numpy(elements.ravel()).to(x.device)).reshape(size)


def _as_strided_scatter(
    node: fx.Node, into: Tensor, values: Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> Tensor:
    elements = _elements(node, size, stride, offset)
    values = values.to(into.dtype).expand(size)
    if np.array_equal(elements.ravel(), np.arange(into.numel())):
        return values.reshape(into.shape)
    chosen = torch.from_numpy(elements.ravel()).to(into.device)
    return into.reshape(-1).scatter(0, chosen, values.reshape(-1)).reshape(into.shape)


def _elements(node: fx.Node, size: list[int], stride: list[int], offset: int | None) -> Any:
    """The numbers of the elements of a node's first operand that a strided view shows."""
    own_size, own_stride, own_offset = node.args[0].meta["layout"]  # type: ignore[union-attr]
    offset = own_offset if offset is None else offset
    extent = max(_end(own_size, own_stride, own_offset), _end(size, stride, offset))
    memory = np.full(extent, -1, dtype=np.int64)  # the number of the element at each place in memory
    count = int(np.prod(own_size, dtype=np.int64))
    _view(memory, own_size, own_stride, own_offset)[...] = np.arange(count).reshape(own_size)
    elements = _view(memory, size, stride, offset).copy()
    if (elements < 0).any():
        raise UntraceableError("a strided view shows memory outside of its tensor")
    return elements


def _end(size: Any, stride: Any, offset: int) -> int:
    return offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if all(size) else 0


def _view(memory: Any, size: Any, stride: Any, offset: int) -> Any:
    bytes_ = [memory.itemsize * step for step in stride]
    return np.lib.stride_tricks.as_strided(memory[offset:], tuple(size), bytes_)


_RULES: dict[Any, Rule] = {
    aten.as_strided.default: _as_strided,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.binary_cross_entropy_with_logits.default: _cross_entropy,
    aten.copy.default: _copy,
    aten.fill.Scalar: _fill,
    aten.fill.Tensor: _fill,
    aten.index_put.default: _index_put,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.slice_scatter.default: _slice_scatter,
}
_OF_LAYOUT: dict[Any, Rule] = {aten.view.default: _view_or_copy}
