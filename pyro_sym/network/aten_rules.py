"""How each ATen operation moves axes: a table of rules, one small function per family of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pyro_sym.network.atoms import Atoms, Axis

__all__ = ["RULES", "STRUCTURAL", "Axes", "Operand", "Operation", "Rule", "pointwise"]

Axes = Sequence[Axis]
"""The axes of a tensor."""


@dataclass(frozen=True)
class Operand:
    """A tensor as a rule sees it; ``fill`` is its value if all its entries are one constant, or NaN."""

    shape: tuple[int, ...]
    axes: Axes
    fill: float | None = None


@dataclass(frozen=True)
class Operation:
    """One operation of the graph: its arguments by the names in its schema, and the shape that it returns."""

    atoms: Atoms
    name: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def operands(self) -> list[Operand]:
        """All tensors among the arguments, those in lists too."""
        found: list[Operand] = []
        for argument in self.arguments.values():
            entries = argument if isinstance(argument, (list, tuple)) else [argument]
            found += [entry for entry in entries if isinstance(entry, Operand)]
        return found


Rule = Callable[[Operation], "Axes | list[Axes]"]
"""The axes of the result; of each of the first results, in a list, where there are several."""

RULES: dict[str, Rule] = {}
"""Rules by the names of ATen operations. An operation without a rule pins all axes of its arguments."""

STRUCTURAL: set[str] = set()
"""Operations that return entries of their first argument, so that a constant stays the same constant."""

AnyRule = TypeVar("AnyRule", bound=Rule)


def rule(*names: str, structural: bool = False) -> Callable[[AnyRule], AnyRule]:
    """Enter a rule into the table."""

    def enter(function: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names, function))
        STRUCTURAL.update(names if structural else ())
        return function

    return enter


# Functions of single entries --------------------------------------------------------------------------------

Combine = Callable[[Atoms, Axis, Axis], Axis]


def broadcast(op: Operation, operands: Sequence[Operand], combine: Combine) -> list[Axis]:
    """The axes of a result to which operands are broadcast; ``combine`` joins the axes of the operands.

    Along an axis that no operand has, as where a scalar fills a tensor, the result is constant, so the axis
    is a fresh one.
    """
    result: list[Axis] = []
    for j, size in enumerate(op.shape):
        offsets = [j - len(op.shape) + len(x.shape) for x in operands]
        having = [x.axes[i] for x, i in zip(operands, offsets, strict=True) if i >= 0 and x.shape[i] == size]
        if size == 1:
            result.append(())
            continue
        axis = having[0] if having else op.atoms.fresh(size)
        for other in having[1:]:
            axis = combine(op.atoms, axis, other)
        result.append(axis)
    return result


def pointwise(op: Operation) -> Axes:
    """Any elementwise function: it commutes with permutations, but not with signs."""
    return [op.atoms.unsigned(axis) for axis in broadcast(op, unsigned(op, op.operands), Atoms.equal)]


def unsigned(op: Operation, operands: Sequence[Operand]) -> list[Operand]:
    """The operands with fixed signs."""
    return [Operand(x.shape, [op.atoms.unsigned(axis) for axis in x.axes], x.fill) for x in operands]


def total(op: Operation, operands: Sequence[Operand]) -> Axes:
    """A sum of terms: their signs agree, and are fixed along axes that a term lacks."""
    terms = [x for x in operands if x.fill != 0.0]
    result = []
    for k, axis in enumerate(broadcast(op, operands, Atoms.equal)):
        offset = k - len(op.shape)
        lacking = [x for x in terms if len(x.shape) + offset < 0 or x.shape[offset] != op.shape[k]]
        result.append(op.atoms.unsigned(axis) if lacking else axis)
    return result


@rule("add", "sub", "rsub")
def _sum(op: Operation) -> Axes:
    terms = (op["self"], op["other"])  # either may be a number
    return total(op, [x if isinstance(x, Operand) else Operand((), (), x) for x in terms])


@rule("mul", "div")
def _product(op: Operation) -> Axes:
    if op["rounding_mode"] is not None:
        return pointwise(op)
    return broadcast(op, op.operands, Atoms.multiply)


@rule("alias", "clone", "detach", "lift_fresh_copy", structural=True)
@rule("neg", "positive", "reciprocal", "sign", "trunc", "round", "softshrink", "hardshrink", "erf", "erfinv")
@rule("tanh", "sin", "tan", "asin", "atan", "sinh", "asinh", "atanh")
def _odd(op: Operation) -> Axes:
    return list(op["self"].axes)


@rule("abs", "cos", "cosh")
def _even(op: Operation) -> Axes:
    return [op.atoms.forget_signs(axis) for axis in op["self"].axes]


@rule("pow")
def _power(op: Operation) -> Axes:
    exponent = op["exponent"]
    if isinstance(exponent, Operand) or not isinstance(op["self"], Operand) or exponent % 1:
        return pointwise(op)
    return _odd(op) if exponent % 2 else _even(op)


@rule("clamp", "hardtanh")
def _clamp(op: Operation) -> Axes:
    low, high = (op["min"], op["max"]) if op.name == "clamp" else (op["min_val"], op["max_val"])
    symmetric = isinstance(low, int | float) and isinstance(high, int | float) and low == -high
    return _odd(op) if symmetric else pointwise(op)


@rule("_to_copy")
def _convert(op: Operation) -> Axes:
    # Rounding and truncation are odd functions; the cast to bool is even.
    dtype = op["dtype"]
    if dtype == torch.bool:
        return _even(op)
    return pointwise(op) if dtype is not None and not dtype.is_signed else _odd(op)


@rule("where")
def _where(op: Operation) -> Axes:
    if not all(isinstance(op[name], Operand) for name in ("condition", "self", "other")):
        return pointwise(op)
    value = Operand(op.shape, total(op, [op["self"], op["other"]]))
    return broadcast(op, [value, *unsigned(op, [op["condition"]])], Atoms.multiply)


# Other arrangements of the same entries ---------------------------------------------------------------------


@rule("permute", structural=True)
def _permute(op: Operation) -> Axes:
    return [op["self"].axes[i] for i in op["dims"]]


@rule("t", structural=True)
def _transpose(op: Operation) -> Axes:
    return list(op["self"].axes)[::-1]


@rule("transpose", structural=True)
def _swap(op: Operation) -> Axes:
    axes = list(op["self"].axes)
    i, j = op["dim0"], op["dim1"]
    axes[i], axes[j] = axes[j], axes[i]
    return axes


@rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "contiguous", structural=True)
def _reshape(op: Operation) -> Axes:
    return op.atoms.reshape(op["self"].axes, op.shape)


@rule("expand", structural=True)
def _expand(op: Operation) -> Axes:
    # Along an expanded axis the tensor is constant, so that axis is a fresh one.
    x, new = op["self"], len(op.shape) - len(op["self"].shape)
    kept = [k >= new and x.shape[k - new] == size for k, size in enumerate(op.shape)]
    return [x.axes[k - new] if kept[k] else op.atoms.fresh(size) for k, size in enumerate(op.shape)]


@rule("repeat", structural=True)
def _repeat(op: Operation) -> Axes:
    x, repeats = op["self"], op["repeats"]
    axes = [()] * (len(repeats) - len(x.shape)) + list(x.axes)
    return [op.atoms.fresh(copies) + tuple(axis) for copies, axis in zip(repeats, axes, strict=True)]


@rule("select", structural=True)
def _select(op: Operation) -> Axes:
    axes = list(op["self"].axes)
    op.atoms.pin(axes.pop(op["dim"]))
    return axes


@rule("slice", structural=True)
def _slice(op: Operation) -> Axes:
    x, dim = op["self"], op["dim"]
    axes, whole, length = list(x.axes), x.shape[dim], op.shape[dim]
    if length == whole:
        return axes
    start = min(op["start"] or 0, whole)
    start += whole if start < 0 else 0
    size = math.gcd(whole, start, length) if op["step"] == 1 else 1
    axes[dim] = _repeated(op, op.atoms.chunk(axes[dim], whole, size), length, size)
    return axes


@rule("split_with_sizes", structural=True)
def _split(op: Operation) -> list[Axes]:
    x, dim, sizes = op["self"], op["dim"], op["split_sizes"]
    size = math.gcd(*sizes)
    inner = op.atoms.chunk(x.axes[dim], x.shape[dim], size)
    results: list[Axes] = []
    for length in sizes:
        axes = list(x.axes)
        axes[dim] = _repeated(op, inner, length, size)
        results.append(axes)
    return results


@rule("cat")
def _cat(op: Operation) -> Axes:
    # Pieces of sizes 8 and 16 become one and two chunks of 8, which all move alike.
    xs = [x for x in op["tensors"] if 0 not in x.shape]
    dim = op["dim"] % len(op.shape)
    size = math.gcd(*(x.shape[dim] for x in xs))
    inner = op.atoms.chunk(xs[0].axes[dim], xs[0].shape[dim], size)
    axes = list(xs[0].axes)
    for x in xs[1:]:
        inner = op.atoms.equal(inner, op.atoms.chunk(x.axes[dim], x.shape[dim], size))
        axes = [axis if k == dim else op.atoms.equal(axis, x.axes[k]) for k, axis in enumerate(axes)]
    axes[dim] = _repeated(op, inner, op.shape[dim], size)
    return axes


def _repeated(op: Operation, inner: Axis, length: int, size: int) -> Axis:
    """The axis of chunks in a fixed order, whose units move as ``inner``."""
    return op.atoms.pinned(length // size, cause="" if size > 1 else None) + inner


@rule("flip", "roll", "cumsum", "constant_pad_nd", "index_select")
def _along(op: Operation) -> Axes:
    # These treat some axes by position, and are linear along all others.
    x = op["self"]
    if op.name == "constant_pad_nd":
        padded = range(len(x.shape) - len(op["pad"]) // 2, len(x.shape))
        touched = {k for k in padded if x.shape[k] != op.shape[k]}
    else:
        dims = op["dims"] if op.name in ("flip", "roll") else [op["dim"]]
        touched = {k % len(x.shape) for k in dims} if dims else set(range(len(x.shape)))
    for other in op.operands:
        if other is not x:
            pin_all(op, other)
    for k in touched:
        op.atoms.pin(x.axes[k])
    axes = [op.atoms.pinned(op.shape[k]) if k in touched else axis for k, axis in enumerate(x.axes)]
    return [op.atoms.unsigned(axis) for axis in axes] if op["value"] else axes


@rule("max", "min", "median", "sort", "topk")
def _ordered_with_indices(op: Operation) -> list[Axes]:
    axes = _ordered(op)
    return [axes, axes]


@rule("argmax", "argmin", "cumprod")
def _ordered(op: Operation) -> Axes:
    x, touched = op["self"], _reduced(op)
    for k in touched:
        op.atoms.pin(x.axes[k])
    axes = unsigned(op, [x])[0].axes
    if len(op.shape) < len(x.shape):
        return [axis for k, axis in enumerate(axes) if k not in touched]
    return [op.atoms.pinned(op.shape[k]) if k in touched else axis for k, axis in enumerate(axes)]


@rule("index", "_unsafe_index")
def _index(op: Operation) -> Axes:
    x, indices = op["self"], op["indices"]
    indexed = [k for k, index in enumerate(indices) if index is not None]
    for k in indexed:
        op.atoms.pin(x.axes[k])
        pin_all(op, indices[k])
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        pin_all(op, x)
        return [op.atoms.pinned(size) for size in op.shape]
    before, after = list(x.axes[: indexed[0]]), list(x.axes[indexed[-1] + 1 :])
    between = op.shape[len(before) : len(op.shape) - len(after)]
    return [*before, *(op.atoms.pinned(size) for size in between), *after]


@rule("embedding")
def _embedding(op: Operation) -> Axes:
    pin_all(op, op["indices"])
    rows, dim = op["weight"].axes
    op.atoms.pin(rows, cause="")  # rows of a table are no units
    return [*(op.atoms.pinned(size) for size in op["indices"].shape), dim]


def pin_all(op: Operation, x: Operand) -> None:
    """Pin all axes of an operand."""
    for axis in x.axes:
        op.atoms.pin(axis)


# Sums over axes ---------------------------------------------------------------------------------------------


def _reduced(op: Operation) -> set[int]:
    """The axes over which an operation reduces."""
    rank = len(op["self"].shape)
    dim = op["dim"]
    dims = [dim] if isinstance(dim, int) else list(dim or range(rank))
    return {k % rank for k in dims}


def _without(op: Operation, axes: Axes, reduced: set[int]) -> Axes:
    keep = bool(op["keepdim"])
    return [() if k in reduced else axis for k, axis in enumerate(axes) if keep or k not in reduced]


@rule("sum", "mean")
def _linear_reduction(op: Operation) -> Axes:
    reduced = _reduced(op)
    for k in reduced:
        op.atoms.unsigned(op["self"].axes[k])
    return _without(op, op["self"].axes, reduced)


@rule("amax", "amin", "var", "any", "all", "prod", "logsumexp")
def _reduction(op: Operation) -> Axes:
    return _without(op, unsigned(op, [op["self"]])[0].axes, _reduced(op))


@rule("linalg_vector_norm")
def _norm(op: Operation) -> Axes:
    return _without(op, _even(op), _reduced(op))


@rule("_softmax", "_log_softmax")
def _softmax(op: Operation) -> Axes:
    return unsigned(op, [op["self"]])[0].axes


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
def _matmul(op: Operation) -> Axes:
    x, y = op.operands[-2:]
    inner = -2 if len(y.shape) > 1 else -1
    op.atoms.equal(x.axes[-1], y.axes[inner])
    batch = [op.atoms.multiply(a, b) for a, b in zip(x.axes[:-2], y.axes[:-2], strict=True)]
    axes = [*batch, *x.axes[-2:-1], *(y.axes[-1:] if len(y.shape) > 1 else ())]
    return total(op, [Operand(op.shape, axes), op["self"]]) if len(op.operands) == 3 else axes


@rule("convolution")
def _convolution(op: Operation) -> Axes:
    x, w, groups = op["input"], op["weight"], op["groups"]
    slow, fast = op.atoms.reshape(x.axes[1:2], [groups, x.shape[1] // groups])
    w_slow, w_fast = op.atoms.reshape(w.axes[:1], [groups, w.shape[0] // groups])
    inner, outer = (w_fast, w.axes[1]) if op["transposed"] else (w.axes[1], w_fast)
    op.atoms.equal(fast, inner)
    for axis in x.axes[2:]:
        op.atoms.pin(axis)
    for axis in w.axes[2:]:
        op.atoms.pin(axis, cause="")  # positions in the window are no units
    spatial = [op.atoms.pinned(size, cause="") for size in op.shape[2:]]
    axes = [x.axes[0], op.atoms.multiply(slow, w_slow) + tuple(outer), *spatial]
    return _plus_channels(op, axes, op["bias"])


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def _average_pool(op: Operation) -> Axes:
    return _pool(op, op["self"])


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _max_pool(op: Operation) -> list[Axes]:
    axes = _pool(op, unsigned(op, [op["self"]])[0])
    return [axes, axes]


def _pool(op: Operation, x: Operand) -> Axes:
    pooled = int(op.name.split("pool")[1][0])
    for axis in x.axes[-pooled:]:
        op.atoms.pin(axis)
    return [*x.axes[:-pooled], *(op.atoms.pinned(size, cause="") for size in op.shape[-pooled:])]


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def _upsample(op: Operation) -> Axes:
    x = op["self"] or op["input"]
    for axis in x.axes[2:]:
        op.atoms.pin(axis)
    return [*x.axes[:2], *(op.atoms.pinned(size, cause="") for size in op.shape[2:])]


# Normalisations ---------------------------------------------------------------------------------------------


def _plus_channels(op: Operation, axes: Axes, bias: Operand | None) -> Axes:
    """Add a bias along the second axis."""
    if bias is None:
        return axes
    return [op.atoms.equal(a, bias.axes[0]) if k == 1 else op.atoms.unsigned(a) for k, a in enumerate(axes)]


def _times_channels(op: Operation, axes: Axes, weight: Operand | None) -> Axes:
    """Multiply by a weight along the second axis."""
    if weight is None:
        return axes
    return [op.atoms.multiply(a, weight.axes[0]) if k == 1 else a for k, a in enumerate(axes)]


@rule("_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
@rule("_native_batch_norm_legit_functional")
def _batch_norm(op: Operation) -> list[Axes]:
    # In train mode the mean over all axes but the second is subtracted: signs along those are fixed.
    axes = [axis if k == 1 else op.atoms.unsigned(axis) for k, axis in enumerate(op["input"].axes)]
    axes = list(_plus_channels(op, axes, op["running_mean"]))
    if op["running_var"] is not None:
        (variance,) = unsigned(op, [op["running_var"]])
        axes = list(_times_channels(op, axes, variance))
    return [_plus_channels(op, _times_channels(op, axes, op["weight"]), op["bias"])]


@rule("native_layer_norm")
def _layer_norm(op: Operation) -> list[Axes]:
    x, weight, bias = op["input"], op["weight"], op["bias"]
    first = len(x.shape) - len(op["normalized_shape"])
    axes = [axis if k < first else op.atoms.unsigned(axis) for k, axis in enumerate(x.axes)]
    if weight is not None:
        axes = broadcast(op, [Operand(x.shape, axes), weight], Atoms.multiply)
    return [total(op, [Operand(x.shape, axes), bias]) if bias is not None else axes]


@rule("native_group_norm")
def _group_norm(op: Operation) -> list[Axes]:
    x, groups = op["input"], op["group"]
    slow, fast = op.atoms.reshape(x.axes[1:2], [groups, x.shape[1] // groups])
    inner = [op.atoms.unsigned(axis) for axis in (fast, *x.axes[2:])]
    axes = [x.axes[0], slow + inner[0], *inner[1:]]
    return [_plus_channels(op, _times_channels(op, axes, op["weight"]), op["bias"])]
