"""Read the permutations and sign flips of a module's parameters from its ATen graph."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from pyro_sym._private import OpOverload, operands_of, tree_map
from pyro_sym.errors import SymmetryError
from pyro_sym.network.aten_rules import RULES, STRUCTURAL, Operand, Operation, pointwise
from pyro_sym.network.atoms import Atoms, Axis, Factor
from pyro_sym.symmetry.elementary import Permutation, SignFlip

__all__ = ["Factors", "Traced", "trace"]

Factors = dict[str, tuple[tuple[int, ...], ...]]
"""By parameter or buffer, the sizes of the factors of each axis."""


@dataclass(frozen=True)
class Traced:
    """The symmetries read from the graph of a module.

    Attributes:
        shapes: the factors of the axes of all parameters and buffers that move.
        members: the permutations and sign flips that move them.
        pinned: by (cause, number of units), the axes whose order an operation fixes.
        failed: by operation and module, the error that its rule raised.
        dtypes: of the floating-point tensors in the graph.
    """

    shapes: Factors
    members: list[Permutation | SignFlip]
    pinned: dict[tuple[str, int], list[str]]
    failed: dict[str, Exception]
    dtypes: frozenset[torch.dtype]


FILLS = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0, "ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}
FILLED = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}
STATISTICS = slice(3, 5)  # where a batch norm has its running mean and variance
BY_HAND = (
    "Write the group by hand, as a Product of Permutation and SignFlip over the parameters, and let "
    "check_symmetry compare the model with its images"
)
MAX_COMBINED = 8  # all combinations are tried of up to so many independent sign flips of one class


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The symmetries of a module in eval mode, on factors of the axes of its parameters and buffers."""
    with (
        warnings.catch_warnings(),
        torch.enable_grad(),
    ):  # without gradients, attention is fused
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(module, args, kwargs, strict=False).run_decompositions()
        except Exception as error:  # export raises errors of many kinds
            reason = str(error).strip().partition("\n")[0]
            raise SymmetryError(
                f"torch.export can't make a graph of {type(module).__name__} ({type(error).__name__}: "
                f"{reason}); its symmetries are read from that graph, and control flow that depends on data "
                f"has no graph. {BY_HAND}"
            ) from error
    return _Walk(module, program).found()


class _Walk:
    """A walk over the graph from inputs to outputs, which gives each tensor its axes."""

    def __init__(self, module: nn.Module, program: torch.export.ExportedProgram) -> None:
        self.atoms = Atoms()
        self.state: dict[str, Operand] = {}  # parameters and buffers by name, shared ones by their first name
        self.bits: dict[int, tuple[str, int]] = {}  # by sign bit, the parameter or buffer and its axis
        self.results: dict[fx.Node, list[Operand]] = {}
        self.failed: dict[str, Exception] = {}
        self.dtypes: set[torch.dtype] = set()
        self.buffers = {name for name, _ in module.named_buffers()}
        signature = program.graph_signature
        self.names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        first = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        self.first_names = {
            name: first[id(tensor)]
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self.constants = signature.inputs_to_lifted_tensor_constants
        # A shared parameter has a placeholder for each of its names, some without users.
        self.used = {self._first_name(node) for node in program.graph.nodes if node.users}
        for node in program.graph.nodes:
            self.atoms.cause = ""  # inputs and outputs are no hidden units
            self.dtypes |= _floating(node)
            if node.op == "placeholder":
                self.results[node] = self._input(node)
            elif node.op == "output":
                self._pin_arguments(node)
            elif node.target is operator.getitem:
                self.atoms.cause = _place(node.args[0])
                self.results[node] = self._item(node)
            elif node.op == "call_function":
                self.atoms.cause = _place(node)
                self.results[node] = self._call(node)
            else:
                self.results[node] = []

    def _input(self, node: fx.Node) -> list[Operand]:
        name = self._first_name(node)
        if name is None:
            self.atoms.cause = (
                f"a constant, {self.constants[node.name]}" if node.name in self.constants else ""
            )
            return self._pinned(node)
        if name not in self.state:
            is_buffer = name in self.buffers
            movable = (node.users and _is_statistic(node)) if is_buffer else name in self.used
            self.atoms.cause = f"buffer {name}" if name in self.buffers else ""
            (self.state[name],) = self._movable(name, node) if movable else self._pinned(node)
        return [self.state[name]]

    def _first_name(self, node: fx.Node) -> str | None:
        """The first name of the parameter or buffer that a placeholder stands for, if it stands for one."""
        return self.first_names.get(self.names.get(node.name, ""))

    def _movable(self, name: str, node: fx.Node) -> list[Operand]:
        shape = _shapes(node)[0]
        bits = [self.atoms.bit() for _ in shape]
        self.bits.update({bit: (name, k) for k, bit in enumerate(bits)})
        return [Operand(shape, [self.atoms.fresh(n, bit) for n, bit in zip(shape, bits, strict=True)])]

    def _pinned(self, node: fx.Node) -> list[Operand]:
        return [Operand(shape, [self.atoms.pinned(size) for size in shape]) for shape in _shapes(node)]

    def _constant(self, shape: tuple[int, ...], fill: float) -> Operand:
        """A constant is the same in any order, and zeros with any signs: each use gets fresh axes."""
        signs = [self.atoms.bit() if fill == 0.0 else 0 for _ in shape]
        return Operand(shape, [self.atoms.fresh(n, s) for n, s in zip(shape, signs, strict=True)], fill)

    def _operand(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        result = self.results[argument]
        if len(result) != 1:
            return None
        return result[0] if result[0].fill is None else self._constant(result[0].shape, result[0].fill)

    def _pin_arguments(self, node: fx.Node) -> None:
        for result in (self.results[source] for source in node.all_input_nodes):
            for axis in (axis for operand in result if operand.fill is None for axis in operand.axes):
                self.atoms.pin(axis)

    def _item(self, node: fx.Node) -> list[Operand]:
        arguments: tuple[Any, ...] = node.args
        source, index = arguments
        if index < len(self.results[source]):
            return [self.results[source][index]]
        self._pin_arguments(source)  # the rule gave no axes for this result
        return self._pinned(node)

    def _call(self, node: fx.Node) -> list[Operand]:
        if _asserts(node):
            return []
        try:
            found = self._by_rule(node)
            for x in found:
                if [self.atoms.size(axis) for axis in x.axes] != list(x.shape) and x.fill is None:
                    raise ValueError(f"the rule gives axes {x.axes} to a result of shape {x.shape}")
        except Exception as error:  # a failing rule must not stop the walk
            self.failed.setdefault(self.atoms.cause, error)
            found = []
        if not found:
            self._pin_arguments(node)
            return self._pinned(node)
        return found

    def _by_rule(self, node: fx.Node) -> list[Operand]:
        """The results of an operation, or only the first ones; empty if it has no rule."""
        shapes, target = _shapes(node), node.target
        if not isinstance(target, OpOverload) or not shapes:
            return []
        name = target.name().removeprefix("aten::").partition(".")[0]
        operands = operands_of(target)
        arguments = {a.name: a.default_value for a in operands if a.has_default_value()}
        arguments |= dict(zip((a.name for a in operands), node.args, strict=False)) | node.kwargs
        op = Operation(self.atoms, name, tree_map(self._operand, arguments), shapes[0])

        elementwise = (
            torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags
        )
        fill = FILLS[name] if name in FILLS else op[FILLED[name]] if name in FILLED else None
        if isinstance(fill, int | float):
            return [Operand(shape, (), float(fill)) for shape in shapes]
        if (
            op.operands
            and all(x.fill is not None for x in op.operands)
            and (elementwise or name in STRUCTURAL)
        ):
            kept = op.operands[0].fill if name in STRUCTURAL else math.nan
            return [Operand(shape, (), kept) for shape in shapes]
        rule = RULES.get(name, pointwise if elementwise else None)
        if rule is None:
            return []
        axes: Any = rule(op)
        several = axes if isinstance(node.meta["val"], tuple | list) else [axes]
        found = [Operand(shape, each) for shape, each in zip(shapes, several, strict=False)]
        empty = self._pinned(node)
        return [e if 0 in e.shape else x for x, e in zip(found, empty, strict=False)]

    # The result of the walk -------------------------------------------------------------------------------

    def found(self) -> Traced:
        """The members that move parameters and buffers, and what pins the rest."""
        axes = {name: [self.atoms.expand(axis) for axis in x.axes] for name, x in self.state.items()}
        where: dict[int, list[tuple[str, int]]] = {}
        for name, several in axes.items():
            for k, axis in enumerate(several):
                for atom in dict.fromkeys(factor.atom for factor in axis):
                    where.setdefault(atom, []).append((name, k))
        constraints = self.atoms.constraints()
        flips = {atom: self._flips(places, constraints.get(atom, [])) for atom, places in where.items()}
        permuted = {
            atom
            for atom, places in where.items()
            if not self.atoms.is_pinned(atom) and any(name not in self.buffers for name, _ in places)
        }
        moving = permuted | {atom for atom, several in flips.items() if several}

        shapes: Factors = {}
        positions: dict[tuple[str, int, int], list[int]] = {}  # by (name, axis, atom): finer axes
        for name, several in axes.items():
            merged = [_merge(self.atoms, axis, moving) for axis in several]
            total = sum(map(len, merged))
            flat = [(k, atom) for k, axis in enumerate(merged) for atom, _ in axis]
            for i, (k, atom) in enumerate(flat):
                if atom in moving:
                    positions.setdefault((name, k, atom), []).append(i - total)
            if any(atom in moving for _, atom in flat):
                shapes[name] = tuple(tuple(size for _, size in axis) for axis in merged)

        def table(atom: int, places: Iterable[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
            by_site: dict[str, tuple[int, ...]] = {}
            for name, k in places:
                by_site[name] = (*by_site.get(name, ()), *positions[name, k, atom])
            return by_site

        members: list[Permutation | SignFlip] = []
        for atom, places in where.items():
            if atom in permuted:
                members.append(Permutation(table(atom, places)))
            members += [SignFlip(table(atom, flipped)) for flipped in flips[atom]]
        moved = {name for member in members for name in member.axes}
        shapes = {name: shape for name, shape in shapes.items() if name in moved}
        return Traced(shapes, members, self._lost(axes), self.failed, frozenset(self.dtypes))

    def _lost(self, axes: dict[str, list[Axis]]) -> dict[tuple[str, int], list[str]]:
        """By cause and number of units, the axes of parameters all of whose atoms are pinned."""
        lost: dict[tuple[str, int], dict[str, None]] = {}
        for name, several in axes.items():
            for k, axis in enumerate(several):
                if name in self.buffers or not all(self.atoms.is_pinned(atom) for atom, _ in axis):
                    continue
                for cause in dict.fromkeys(self.atoms.cause_of(atom) for atom, _ in axis):
                    if cause:
                        lost.setdefault((cause, self.atoms.size(axis)), {})[f"{name}[{k}]"] = None
        return {key: list(places) for key, places in lost.items()}

    def _flips(self, places: list[tuple[str, int]], constraints: list[int]) -> list[list[tuple[str, int]]]:
        """Disjoint sets of axes that flip together, preferring sets without buffers, then small ones."""
        mine = {bit: place for bit, place in self.bits.items() if place in places}
        free = sum(mine)
        basis = [vector & free for vector in null_space(constraints, mine)]
        basis = [vector for vector in basis if vector]
        spanned = set(basis)
        if len(basis) <= MAX_COMBINED:
            for vector in basis:
                spanned |= {vector ^ other for other in spanned if vector != other}
        buffers = sum(bit for bit, (name, _) in mine.items() if name in self.buffers)
        chosen: list[int] = []
        for vector in sorted(spanned, key=lambda v: ((v & buffers).bit_count(), v.bit_count(), v)):
            if all(vector & other == 0 for other in chosen):
                chosen.append(vector)
        return [[place for bit, place in mine.items() if bit & vector] for vector in chosen]


def _merge(atoms: Atoms, axis: Iterable[Factor], moving: set[int]) -> list[tuple[int, int]]:
    """The atoms of an axis and their sizes; neighbours that don't move become one."""
    merged: list[tuple[int, int]] = []
    for stays, run in groupby(axis, lambda factor: factor.atom not in moving):
        factors = [(factor.atom, atoms.sizes[factor.atom]) for factor in run]
        merged += [(factors[0][0], math.prod(size for _, size in factors))] if stays else factors
    return merged or [(-1, 1)]


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of a node's results; ``()`` for a result that is no tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in values]
    for size in (size for shape in shapes for size in shape):
        if not isinstance(size, int):
            raise SymmetryError(
                f"the result of {node.target} has a shape that depends on data, {shapes}, so its axes "
                "can't be followed. " + BY_HAND
            )
    return shapes


def _asserts(node: fx.Node) -> bool:
    """Whether a node is an assertion: it returns nothing and mutates nothing."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.returns and not schema.is_mutable


def _place(node: fx.Node) -> str:
    """The name of an operation and the path of the module that calls it."""
    target: Any = node.target
    name = str(getattr(target, "_opname", None) or getattr(target, "__name__", target))
    stack = node.meta.get("nn_module_stack") or {}
    path, _ = list(stack.values())[-1] if stack else ("", None)
    return f"{name} in {path}" if path else name


def _floating(node: fx.Node) -> set[torch.dtype]:
    """The floating-point dtypes of a node's results."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return {v.dtype for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point}


def _is_statistic(buffer: fx.Node) -> bool:
    """Whether a buffer is used as a running mean or variance only."""
    return all(
        "batch_norm" in str(user.target) and buffer in user.args[STATISTICS] and user.args.count(buffer) == 1
        for user in buffer.users
    )
