"""Potential energy and gradient of many chains at once, by a graph of the model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_sym._private import TreeSpec, tree_flatten, tree_unflatten, unvalidated
from pyro_sym._random import fork_random_state
from pyro_sym.graph.batching import UnbatchableError, over_chains
from pyro_sym.graph.checked import Probe, check, nudge, rewritten_if_right
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.record import Function, UntraceableError, refuse_side_effects, trace, without_writes
from pyro_sym.graph.simplify import simplify
from pyro_sym.model.minibatch import Minibatch, draw_rows
from pyro_sym.model.potential import Potential
from pyro_sym.model.program import SubsampledPlate

__all__ = ["ChainGradient", "CheckedGraph", "Gradient", "Jit", "chain_slices"]

Jit = Literal["auto", "eager", "trace", "compile"]


class ChainGradient(Protocol):
    """From positions ``(C, d)`` and a minibatch to energies ``(C,)`` and gradients ``(C, d)``."""

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Evaluate for all chains."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What results depend on besides the arguments and the model: the state of the evaluation."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        ...


# Chains of more values than this are evaluated one after the other.
LARGE = 50_000

_Mode = Literal["eager", "trace", "compile"]


class Gradient:
    r"""Potential energy and gradient of :math:`C` chains at once, each on its own minibatch.

    It is :meth:`Potential.value_and_grad <pyro_sym.Potential.value_and_grad>` for rows of positions,

    .. math::

        (u_c, b_c) \mapsto \left( U(u_c; b_c), \; \nabla U(u_c; b_c) \right), \qquad c = 1, \dots, C,

    without running the model each time. On the first call for positions and minibatches of given shapes, the
    model's tensor operations are recorded (``torch.fx``), vectorised over the chains and simplified; the
    graph is then compared with the potential at other positions and on other minibatches, and used
    only if they agree. If they don't, or the model can't be recorded, each gradient runs the model,
    and a warning says why. If torch can't vectorise an operation over chains, the graph is that of one
    chain and is called for each in turn, and a warning names the operation.

    The graph holds what the model's data, ``pyro.param`` s and buffers were on the first call: make a new
    ``Gradient`` after changing them.

    With ``jit="trace"`` it uses the graph, with ``"compile"`` the graph compiled by ``torch._inductor`` (it
    needs a C++ compiler, and seconds on the first run), with ``"eager"`` the model itself, with ``"auto"``
    the graph where possible. A call may change ``mode``, the one in use; ``reason`` then says why.
    """

    def __init__(self, potential: Potential, jit: Jit = "auto") -> None:
        if jit not in get_args(Jit):
            raise ValueError(f"jit is {jit!r}; pass one of {', '.join(map(repr, get_args(Jit)))}")
        self.potential = potential
        self.jit = jit
        self.mode: _Mode = "trace" if jit == "auto" else jit
        self.reason: str | None = None
        self._prepared: dict[Any, Function] = {}
        self._alone = False  # whether the graph is of one chain, because torch can't vectorise it

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Energies ``(C,)`` and gradients ``(C, d)``, detached, at flat unconstrained positions ``(C, d)``.

        Raises an ``UntraceableError`` if ``jit`` is ``"trace"`` and the model can't be traced.
        """
        if self.mode == "eager":
            return self.eager(position, minibatch)
        if len(several := chain_slices(*position.shape, alone=self._alone)) > 1:
            energy, gradient = position.new_empty(len(position)), torch.empty_like(position)
            for one in several:
                energy[one], gradient[one] = self(position[one], minibatch.of(one))
            return energy, gradient
        if minibatch.args is None:
            tensors = list(minibatch.indices.values())
            key: Any = (position.shape, *minibatch.indices, *[i.shape for i in tensors])
        else:
            inputs = _Inputs.of(minibatch)
            tensors, key = inputs.tensors, (position.shape, position.dtype, *inputs.signature())
        run = self._prepared.get(key)
        if run is None:
            self._prepare(key, position, minibatch)
            return self(position, minibatch)
        with torch.no_grad():
            return cast(tuple[Tensor, Tensor], run(position, *tensors))

    def state_dict(self) -> dict[str, Any]:
        """The mode in use: another mode rounds differently."""
        return {"mode": self.mode, "reason": self.reason, "alone": self._alone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fall back to the mode of a state."""
        self._alone = self._alone or state.get("alone", False)
        if state["reason"] is not None:
            self.mode, self.reason = state["mode"], state["reason"]

    def eager(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Energies and gradients by running the model for each chain: the reference of the graph."""
        with unvalidated():
            results = [
                self.potential.value_and_grad(row, minibatch.of(chain).indices, minibatch.args)
                for chain, row in enumerate(position)
            ]
        energies, gradients = zip(*results, strict=True)
        return torch.stack(energies), torch.stack(gradients)

    def graph(self, position: Tensor, minibatch: Minibatch) -> fx.GraphModule:
        """The simplified graph for inputs of these shapes, not yet compared with the model.

        It takes the position ``(C, d)``, the indices in order of ``minibatch.indices`` and the tensors within
        ``minibatch.args``, and returns energies and gradients. Raises an ``UntraceableError`` if the model
        can't be traced.
        """
        inputs = _Inputs.of(minibatch)

        def one_chain(row: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return self.potential.value_and_grad(row, *inputs.rebuild(tensors))

        # Indices of a chain's own have shape (C, B), shared ones (B,).
        per_chain = [n < len(inputs.names) and t.dim() == 2 for n, t in enumerate(inputs.tensors)]
        rows = [t[0] if own else t for t, own in zip(inputs.tensors, per_chain, strict=True)]
        # Attention by plain products: torch's fused kernel has no rule for many chains at once.
        plain = sdpa_kernel(SDPBackend.MATH)
        with unvalidated(), plain, fork_random_state():
            single = trace(one_chain, [position[0], *rows])
        refuse_side_effects(single)
        single = without_writes(single, [position[0], *rows])  # vmap takes many writes chain by chain
        in_dims = (0, *[0 if own else None for own in per_chain])
        if len(position) == 1:

            def chains(rows: Tensor, *tensors: Tensor) -> Any:
                firsts = [t[0] if own else t for t, own in zip(tensors, per_chain, strict=True)]
                return tuple(result.unsqueeze(0) for result in single(rows[0], *firsts))  # (1,) and (1, d)

        else:
            chains = over_chains(single, [position[0], *rows], in_dims)
        everything = [position, *inputs.tensors]
        with torch.no_grad():
            return simplify(without_writes(trace(chains, everything), everything), everything)

    def checked(self, position: Tensor, minibatch: Minibatch) -> CheckedGraph | None:
        """The graph for inputs of these shapes, compared with the model; ``None`` after a fallback.

        Raises an ``UnbatchableError`` if torch can't vectorise the graph over chains, another
        ``UntraceableError`` if ``jit`` is ``"trace"`` and the model can't be traced.
        """
        start = time.perf_counter()
        self.eager(position[:1], minibatch.of(slice(1)))  # an error here is the model's own
        seconds = time.perf_counter() - start
        probes = self.probes(position, minibatch)
        inputs = [position, *_Inputs.of(minibatch).tensors]

        def code(graph: fx.GraphModule) -> Function:
            return check(straight_line(graph, inputs), probes)

        try:
            graph = self.graph(position, minibatch)
            run = code(graph) if self.mode == "compile" else rewritten_if_right(graph, inputs, code)
        except UnbatchableError:
            raise
        except UntraceableError as error:
            if self.jit == "trace":
                raise
            cost = f"each gradient runs it, at {_duration(seconds)} a chain and step"
            message = f"the model can't be traced, so {cost}: {error}. jit='eager' avoids this warning"
            self._fall_back("eager", message, error)
            return None
        return CheckedGraph(graph, run, probes)

    def probes(self, position: Tensor, minibatch: Minibatch) -> list[Probe]:
        """Other positions and minibatches, at which a graph is compared with the potential."""
        with fork_random_state():
            torch.default_generator.manual_seed(0)
            return [
                _Probe(
                    self,
                    position,
                    # around the start, and once around 0
                    spread * torch.randn_like(position) - (position if spread < 0 else 0.0),
                    _redraw(minibatch, self.potential.program.plates),
                    chain=int(torch.randint(len(position), ())),
                )
                for spread in (0.0, 1.0, -1.0, 5.0)
            ]

    def _prepare(self, key: Any, position: Tensor, minibatch: Minibatch) -> None:
        """Make the function for inputs of these shapes, or fall back."""
        try:
            checked = self.checked(position, minibatch)
        except UnbatchableError as error:
            self._alone = True
            message = "the gradient is traced for one chain at a time, so steps of many take longer"
            warnings.warn(f"{message}: {error}", stacklevel=3)
            return
        if checked is None:
            return
        self._prepared[key] = checked.run
        if self.mode == "compile":
            from pyro_sym.graph.aot import CompilationError, compiled

            try:
                inputs = [position, *_Inputs.of(minibatch).tensors]
                self._prepared[key] = check(compiled(checked.graph, inputs), checked.probes)
            except (CompilationError, UntraceableError) as error:
                self.do_not_compile(error)

    def do_not_compile(self, error: RuntimeError) -> None:
        """Fall back to the traced gradient, with a warning."""
        self._fall_back("trace", f"the gradient is traced, but not compiled: {error}", error)

    def _fall_back(self, mode: _Mode, message: str, error: Exception) -> None:
        self.mode, self.reason = mode, str(error)
        warnings.warn(message, stacklevel=5)  # at the call of this object, or of FusedSteps


@dataclass(frozen=True)
class CheckedGraph:
    """A graph of a gradient, its fastest right code, and the probes that it was compared at."""

    graph: fx.GraphModule
    run: Function
    probes: Sequence[Probe]


_TENSOR = object()


@dataclass(frozen=True)
class _Inputs:
    """The tensors of a minibatch, and how to make a minibatch of other such tensors."""

    names: tuple[str, ...]
    tensors: list[Tensor]  # indices by plate, then the tensors within args
    rest: tuple[Any, ...]  # the other leaves of args, with _TENSOR in place of tensors
    spec: TreeSpec | None

    @classmethod
    def of(cls, minibatch: Minibatch) -> _Inputs:
        names, indices = tuple(minibatch.indices), list(minibatch.indices.values())
        if minibatch.args is None:
            return cls(names, indices, (), None)
        leaves, spec = tree_flatten(minibatch.args)
        rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(names, indices + [leaf for leaf in leaves if isinstance(leaf, Tensor)], rest, spec)

    def signature(self) -> tuple[Any, ...]:
        """What a graph depends on besides the tensors' values."""
        return (self.names, *[(t.shape, t.dtype) for t in self.tensors], self.rest, str(self.spec))

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Any, ...] | None]:
        """Indices by plate and positional arguments, made of other tensors."""
        count = len(self.names)
        indices = dict(zip(self.names, tensors[:count], strict=True))
        if self.spec is None:
            return indices, None
        given = iter(tensors[count:])
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.rest]
        return indices, tree_unflatten(leaves, self.spec)


class _Probe(Probe):
    """Compares a graph with the potential for one ``chain``, at positions ``start + away``, ``(C, d)``."""

    def __init__(
        self, gradient: Gradient, start: Tensor, away: Tensor, minibatch: Minibatch, chain: int
    ) -> None:
        super().__init__(moves=bool(away.any()))
        self.gradient, self.start, self.away, self.minibatch = gradient, start, away, minibatch
        self.chain = chain

    def position(self, fraction: float, number: int) -> Tensor:
        """Where the chains are at a nudged point, of shape ``(C, d)``."""
        position = self.start + fraction * self.away
        return position + nudge(position, number)

    def reference(self, fraction: float, nudge: int) -> tuple[Tensor, Tensor] | None:
        return self._evaluate(self.position(fraction, nudge), self.chain)

    def _evaluate(self, position: Tensor, chain: int) -> tuple[Tensor, Tensor] | None:
        one = slice(chain, chain + 1)
        try:
            (energy,), (slope,) = self.gradient.eager(position[one], self.minibatch.of(one))
        except (RuntimeError, ValueError, ArithmeticError):
            return None  # for example, a matrix has no Cholesky factor
        finite = bool(slope.isfinite().all() and energy.isfinite())
        return (energy, slope) if finite or not self.moves else None

    def results(self, function: Function, fraction: float, nudge: int) -> list[Tensor]:
        outputs = function(self.position(fraction, nudge), *_Inputs.of(self.minibatch).tensors)
        return [output[self.chain] for output in outputs]

    def may_fail(self, fraction: float) -> bool:
        """Whether the potential fails for one of the chains: the graph of all chains fails with it."""
        position = self.position(fraction, 0)
        return any(self._evaluate(position, chain) is None for chain in range(len(position)))

    def problem(self, number: int, deviation: float) -> str:
        return (
            f"its graph is right only where it was traced (elsewhere the {('energy', 'gradient')[number]} is "
            f"off by {deviation:.1g}, relative): the model isn't deterministic, or branches on values that "
            "have left torch, by numpy() or tolist()"
        )


def _duration(seconds: float) -> str:
    """Seconds in words: 0.4 ms, 120 ms, 2.5 s."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.1g} ms"


def chain_slices(num_chains: int, size: int, *, alone: bool = False) -> list[slice]:
    """The chains that are evaluated together: all, or, to save memory, each alone if it has many values."""
    if num_chains == 1 or (size <= LARGE and not alone):
        return [slice(None)]
    return [slice(chain, chain + 1) for chain in range(num_chains)]


def _redraw(minibatch: Minibatch, plates: Mapping[str, SubsampledPlate]) -> Minibatch:
    """A minibatch of the same shapes: other rows, or the rows of the batch in reverse."""
    if minibatch.args is None:
        given = minibatch.indices.items()
        return Minibatch({name: draw_rows(plates[name], rows.shape[:-1]) for name, rows in given})
    leaves, spec = tree_flatten(minibatch.args)
    leaves = [leaf.flip(0) if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
    return Minibatch(minibatch.indices, tree_unflatten(leaves, spec))
