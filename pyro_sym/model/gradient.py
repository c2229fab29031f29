"""Potential energy and gradient of many chains at once, by a graph of the model."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor, fx
from torch.distributions import Distribution
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyro_sym._random import fork_random_state
from pyro_sym.graph.algebra import fewer_passes
from pyro_sym.graph.batching import UnbatchableError, over_chains
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.comparison import NEARER, NUDGES, nudge, relative_error, tolerance
from pyro_sym.graph.record import (
    Function,
    UntraceableError,
    message_of,
    refuse_side_effects,
    simplify,
    trace,
    without_writes,
)
from pyro_sym.model.minibatch import Minibatch, draw_indices
from pyro_sym.model.potential import Potential

__all__ = [
    "ChainGradient",
    "Gradient",
    "Jit",
    "groups",
    "potential_on",
    "unvalidated",
]

Jit = Literal["auto", "eager", "trace", "compile"]


class ChainGradient(Protocol):
    """From positions ``(C, d)`` and a minibatch to energies ``(C,)`` and gradients ``(C, d)``."""

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """Evaluate for all chains."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What results depend on besides the arguments and the model."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        ...


# Chains of more values than this are worked on one after the other.
LARGE = 50_000

_Mode = Literal["eager", "trace", "compile"]


class Gradient:
    r"""Potential energy and gradient of :math:`C` chains at once, each on its own minibatch.

    It is :meth:`Potential.value_and_grad <pyro_sym.Potential.value_and_grad>` for rows of
    positions,

    .. math::

        (u_c, b_c) \mapsto \left( U(u_c; b_c), \; \nabla U(u_c; b_c) \right), \qquad c = 1, \dots, C,

    without running the model each time. On the first call for positions and minibatches of given shapes, the
    model's tensor operations are recorded (``torch.fx``), vectorised over the chains and simplified; the
    graph is then compared with the potential itself at other positions and on other minibatches, and used
    only if they agree. Where they don't, or the model can't be recorded, the model is run for each gradient,
    and a warning says why. Where torch can't vectorise an operation over chains, the graph is that of one
    chain, which is used for each in turn, and a warning names the operation.

    The graph holds what the model's data, ``pyro.param`` s and buffers were on the first call: make a new
    ``Gradient`` after changing them.

    Args:
        potential: of the model.
        jit: ``"trace"`` for the graph, ``"compile"`` for the graph compiled by ``torch._inductor`` (it needs
            a C++ compiler, and seconds on the first run), ``"eager"`` for the model itself, ``"auto"`` for
            the graph where possible.

    Attributes:
        mode: what is in use, ``"eager"``, ``"trace"`` or ``"compile"``; it may fall back on a call.
        reason: why it isn't what ``jit`` asks for, else None.

    Raises:
        ValueError: if ``jit`` is none of these.

    Example:
        >>> def model():
        ...     pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        >>> gradient = Gradient(Potential(model))
        >>> gradient(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), Minibatch())
        (tensor([1.8379, 4.3379]), tensor([[0., 0.],
                [1., 2.]]))
        >>> gradient.mode
        'trace'
    """

    def __init__(self, potential: Potential, jit: Jit = "auto") -> None:
        if jit not in get_args(Jit):
            raise ValueError(f"jit is {jit!r}; pass one of {', '.join(map(repr, get_args(Jit)))}")
        self.potential = potential
        self.jit = jit
        self.mode: _Mode = "trace" if jit == "auto" else jit
        self.reason: str | None = None
        self._prepared: dict[Any, Function] = {}
        self._alone = False  # whether the graph is of one chain, as torch can't vectorise it

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """The potential energy and its gradient for each chain.

        Args:
            position: flat unconstrained values, of shape ``(C, d)``.
            minibatch: what the chains see of the data.

        Returns:
            The energies, of shape ``(C,)``, and the gradients, of shape ``(C, d)``; both detached.

        Raises:
            pyro_sym.graph.record.UntraceableError: if ``jit`` is ``"trace"`` and the model can't be traced.
        """
        if self.mode == "eager":
            return self.eager(position, minibatch)
        if len(several := groups(*position.shape, alone=self._alone)) > 1:
            return self._one_by_one(position, minibatch, several)
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

    def _one_by_one(
        self, position: Tensor, minibatch: Minibatch, chains: list[slice]
    ) -> tuple[Tensor, Tensor]:
        energy, gradient = position.new_empty(len(position)), torch.empty_like(position)
        for one in chains:
            energy[one], gradient[one] = self(position[one], minibatch.of(one))
        return energy, gradient

    def state_dict(self) -> dict[str, Any]:
        """What is in use, if not what was asked for: another way rounds otherwise."""
        return {"mode": self.mode, "reason": self.reason, "alone": self._alone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fall back to what is in use there."""
        self._alone = self._alone or state.get("alone", False)
        if state["reason"] is not None:
            self.mode, self.reason = state["mode"], state["reason"]

    def eager(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        """The same by running the model once a chain: the reference that the graph is held to."""
        potential = potential_on(self.potential, minibatch)
        with unvalidated():
            results = [
                potential.value_and_grad(row, minibatch.of(chain).indices)
                for chain, row in enumerate(position)
            ]
        energies, gradients = zip(*results, strict=True)
        return torch.stack(energies), torch.stack(gradients)

    def graph(self, position: Tensor, minibatch: Minibatch) -> fx.GraphModule:
        """The simplified graph for inputs of these shapes, not yet compared with the model.

        Args:
            position: of shape ``(C, d)``.
            minibatch: what the chains see of the data.

        Returns:
            A module that takes the position, the indices in order of ``minibatch.indices`` and the tensors
            within ``minibatch.args``, and returns energies and gradients.

        Raises:
            pyro_sym.graph.record.UntraceableError: if the model can't be traced.
        """
        inputs = _Inputs.of(minibatch)

        def one_chain(row: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            indices, args = inputs.rebuild(tensors)
            return potential_on(self.potential, Minibatch(indices, args)).value_and_grad(row, indices)

        per_chain = [n < inputs.num_indices and t.dim() == 2 for n, t in enumerate(inputs.tensors)]
        rows = [t[0] if own else t for t, own in zip(inputs.tensors, per_chain, strict=True)]
        # Attention by plain products: torch's fused kernel has no rule for many chains at once.
        plain = sdpa_kernel(SDPBackend.MATH)
        with unvalidated(), plain, fork_random_state():
            single = trace(one_chain, [position[0], *rows])
        refuse_side_effects(single)
        single = without_writes(single, [position[0], *rows])  # vmap does many of them chain by chain
        in_dims = (0, *[0 if own else None for own in per_chain])
        if len(position) == 1:

            def chains(rows: Tensor, *tensors: Tensor) -> Any:
                firsts = [t[0] if own else t for t, own in zip(tensors, per_chain, strict=True)]
                return tuple(result.unsqueeze(0) for result in single(rows[0], *firsts))

        else:
            chains = over_chains(single, [position[0], *rows], in_dims)
        everything = [position, *inputs.tensors]
        with torch.no_grad():
            return simplify(without_writes(trace(chains, everything), everything), everything)

    def _prepare(self, key: Any, position: Tensor, minibatch: Minibatch) -> None:
        """Make the function for inputs of these shapes, or fall back."""
        inputs = [position, *_Inputs.of(minibatch).tensors]
        reference = _Reference(self, position, minibatch)
        try:
            graph = self.graph(position, minibatch)
            function = straight_line(graph, inputs)
            reference.check(function)
        except UnbatchableError as error:
            self._take_chains_alone(error)
            return
        except UntraceableError as error:
            self._run_the_model(error, reference.seconds)
            return
        if self.mode == "compile":
            from pyro_sym.graph.aot import CompilationError, compiled

            try:
                fast = compiled(graph, inputs)
                reference.check(fast)
                function = fast
            except (CompilationError, UntraceableError) as error:
                self._do_not_compile(error)
        else:
            with suppress(UntraceableError):  # the graph as it is will do
                fast = straight_line(fewer_passes(graph, inputs), inputs)
                reference.check(fast)
                function = fast
        self._prepared[key] = function

    def _run_the_model(self, error: UntraceableError, seconds: float) -> None:
        if self.jit == "trace":
            raise error
        self._fall_back(
            "eager",
            f"the model can't be traced, so that each gradient runs it anew, at {_duration(seconds)} a chain "
            f"and step: {error}. jit='eager' does the same without this warning",
            error,
        )

    def _take_chains_alone(self, error: UnbatchableError) -> None:
        """Trace one chain, where torch can't vectorise the graph over chains."""
        self._alone = True
        warnings.warn(
            f"the gradient is traced for one chain at a time, so that a step of many takes longer: {error}",
            stacklevel=4,
        )

    def _do_not_compile(self, error: RuntimeError) -> None:
        self._fall_back("trace", f"the gradient is traced, but not compiled: {error}", error)

    def _fall_back(self, mode: _Mode, message: str, error: Exception) -> None:
        self.mode, self.reason = mode, str(error)
        warnings.warn(message, stacklevel=5)


_TENSOR = object()


@dataclass(frozen=True)
class _Inputs:
    """The tensors of a minibatch, and how to make a minibatch of such tensors again."""

    names: tuple[str, ...]
    tensors: list[Tensor]  # indices by plate, then the tensors within args
    rest: tuple[Any, ...]  # what else args hold; _TENSOR in the place of one
    spec: TreeSpec | None

    @classmethod
    def of(cls, minibatch: Minibatch) -> _Inputs:
        names, indices = tuple(minibatch.indices), list(minibatch.indices.values())
        if minibatch.args is None:
            return cls(names, indices, (), None)
        leaves, spec = tree_flatten(minibatch.args)
        rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(names, indices + [leaf for leaf in leaves if isinstance(leaf, Tensor)], rest, spec)

    @property
    def num_indices(self) -> int:
        return len(self.names)

    def signature(self) -> tuple[Any, ...]:
        """What a graph depends on besides the tensors' values."""
        return (self.names, *[(t.shape, t.dtype) for t in self.tensors], self.rest, str(self.spec))

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Any, ...] | None]:
        """Indices by plate and positional arguments with other tensors in place of these."""
        count = self.num_indices
        indices = dict(zip(self.names, tensors[:count], strict=True))
        if self.spec is None:
            return indices, None
        given = iter(tensors[count:])
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.rest]
        return indices, tree_unflatten(leaves, self.spec)


class _Reference:
    """The potential itself at a few positions and minibatches other than those of the trace."""

    def __init__(self, gradient: Gradient, position: Tensor, minibatch: Minibatch) -> None:
        start = time.perf_counter()
        gradient.eager(position[:1], minibatch.of(slice(1)))  # what raises here is the model's own
        self.seconds = time.perf_counter() - start
        self.probes = []
        with fork_random_state():
            torch.default_generator.manual_seed(0)
            for spread in (0.0, 1.0, -1.0, 5.0):
                other = _redraw(minibatch, gradient.potential)
                # Around the start, and once around 0.
                away = spread * torch.randn_like(position) - (position if spread < 0 else 0.0)
                chain = int(torch.randint(len(position), ()))
                self.probes.append(_Probe(gradient, position, away, other, chain))

    def check(self, function: Function) -> None:
        """Raise unless a function gives what the potential gave."""
        compared = [probe.compare(function) for probe in self.probes]
        if not any(compared):
            raise UntraceableError(
                "the model fails at every point where its graph could be compared with it, close to the "
                "start and on other rows, too"
            )


class _Probe:
    """A place to compare a graph with the potential, nearer the start where the potential can't be had.

    Args:
        gradient: whose potential is the reference.
        start: where the chains are, of shape ``(C, d)``.
        away: from there to the probe, of shape ``(C, d)``.
        minibatch: what the chains see of the data.
        chain: the one that is compared; the potential is not run for the others.
    """

    def __init__(
        self, gradient: Gradient, start: Tensor, away: Tensor, minibatch: Minibatch, chain: int
    ) -> None:
        self.gradient, self.start, self.away, self.minibatch = gradient, start, away, minibatch
        self.chain = chain
        self.fractions = list(NEARER if away.any() else NEARER[:1])  # yet to be tried, the current one first
        self.known: dict[tuple[float, int], tuple[Tensor, Tensor] | None] = {}

    def compare(self, function: Function) -> bool:
        """Raise if a function is wrong; return whether there was a point to compare it at."""
        while self.fractions:
            if self._expected(0) is None:
                self.fractions.pop(0)
                continue
            try:
                # A difference at a kink is gone at a nudged point, one that the graph makes isn't.
                problems = (self._problem(function, number) for number in range(1 + NUDGES))
                first = next(problems)
                if first is None or None in problems:
                    return True
            except (RuntimeError, IndexError) as error:
                if self._model_fails():
                    self.fractions.pop(0)
                    continue
                raise UntraceableError(
                    f"its graph fails elsewhere than where it was traced: {message_of(error)}"
                ) from error
            raise UntraceableError(first)
        return False

    def _position(self, number: int) -> Tensor:
        position = self.start + self.fractions[0] * self.away
        return position + nudge(position, number)

    def _expected(self, number: int) -> tuple[Tensor, Tensor] | None:
        """The potential's energy and gradient, or None where it has none that can be compared."""
        key = (self.fractions[0], number)
        if key not in self.known:
            self.known[key] = self._evaluate(self._position(number), self.chain)
        return self.known[key]

    def _evaluate(self, position: Tensor, chain: int) -> tuple[Tensor, Tensor] | None:
        one = slice(chain, chain + 1)
        try:
            (energy,), (slope,) = self.gradient.eager(position[one], self.minibatch.of(one))
        except (RuntimeError, ValueError, ArithmeticError):
            return None  # as where a matrix has no Cholesky factor
        finite = bool(slope.isfinite().all() and energy.isfinite())
        return (energy, slope) if finite or not self.away.any() else None

    def _problem(self, function: Function, number: int) -> str | None:
        """What a function gets wrong at a nudged point, if anything."""
        expected = self._expected(number)
        if expected is None:
            return "the model fails at a nudged point"
        with torch.no_grad():
            results = function(self._position(number), *_Inputs.of(self.minibatch).tensors)
        for what, wanted, result in zip(("energy", "gradient"), expected, results, strict=True):
            deviation = relative_error(result[self.chain], wanted)
            if not deviation <= tolerance(wanted):
                return (
                    f"its graph is right only where it was traced (elsewhere the {what} is off by "
                    f"{deviation:.1g}, relative), as is so where a model branches on values or indices that "
                    "have left torch, by numpy() or tolist(), or isn't deterministic"
                )
        return None

    def _model_fails(self) -> bool:
        """Whether the potential can't be had for one of the chains, so that their graph must fail, too."""
        position = self._position(0)
        return any(self._evaluate(position, chain) is None for chain in range(len(position)))


def _duration(seconds: float) -> str:
    """Seconds in words: 0.4 ms, 120 ms, 2.5 s."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 1e-3 else f"{1e3 * seconds:.1g} ms"


def groups(num_chains: int, size: int, *, alone: bool = False) -> list[slice]:
    """Which chains of so many values are worked on together: all, or each alone, as takes less memory."""
    if num_chains == 1 or (size <= LARGE and not alone):
        return [slice(None)]
    return [slice(chain, chain + 1) for chain in range(num_chains)]


def _redraw(minibatch: Minibatch, potential: Potential) -> Minibatch:
    """A minibatch of the same shapes: other rows, or the rows of the batch in reverse."""
    plates = potential.program.plates
    if minibatch.args is None:
        indices = {
            name: draw_indices({name: plates[name]}, *i.shape[:-1])[name]
            for name, i in minibatch.indices.items()
        }
        return Minibatch(indices)
    leaves, spec = tree_flatten(minibatch.args)
    leaves = [leaf.flip(0) if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
    return Minibatch(minibatch.indices, tree_unflatten(leaves, spec))


def potential_on(potential: Potential, minibatch: Minibatch) -> Potential:
    """The potential with a minibatch's positional arguments."""
    if minibatch.args is None:
        return potential
    other = copy.copy(potential)
    other.program = copy.copy(potential.program)
    other.program.args = minibatch.args
    runnable = other.program._runnable
    other.program._runnable = lambda *a, **k: _AllRows(minibatch.indices)(runnable)(*a, **k)
    return other


@contextmanager
def unvalidated() -> Iterator[None]:
    """Switch validation off, for distributions that were made before, too: it branches on values."""
    validate = Distribution._validate_sample
    Distribution._validate_sample = lambda self, value: None  # type: ignore[method-assign]
    try:
        with pyro.validation_enabled(False):
            yield
    finally:
        Distribution._validate_sample = validate  # type: ignore[method-assign]


class _AllRows(Messenger):
    """Lets subsampled plates see the rows of a batch in order, where nobody gave them indices."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.given = given

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["name"] in self.given:
            return
        if isinstance(fn, _Subsample) and fn.subsample_size is not None and fn.subsample_size < fn.size:
            msg["value"] = torch.arange(fn.subsample_size)
            msg["done"] = True
            msg["stop"] = True  # handlers outside would ask for indices
