"""The recording of an ELBO: loss and gradient as a graph of parameters and arguments."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, fx
from torch.distributions import Transform, constraints, identity_transform, transform_to

from pyro_sym._private import (
    constraint_of,
    replaced_in_this_thread,
    tree_flatten,
    tree_unflatten,
    unvalidated,
)
from pyro_sym._random import fork_random_state
from pyro_sym.graph.checked import NUDGES, Probe, check, nudge, rewritten_if_right
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.record import Function, UntraceableError, refuse_side_effects, trace, without_writes
from pyro_sym.graph.simplify import drop_unused, layout, simplify

__all__ = ["Call", "Recording", "Statement"]

Run = Callable[..., Any]


class Call:
    """Model, guide and their arguments, with ``tensors`` apart from the rest.

    ``key`` is what a recording depends on besides their values, ``None`` if the call can't be recorded for
    a ``reason``.
    """

    def __init__(self, model: Run, guide: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.reason = ""
        self.key = self._key()

    def _key(self) -> Any:
        if any(tensor.requires_grad for tensor in self.tensors):
            self.reason = "an argument requires a gradient of its own"
            return None
        leaves = tuple(
            layout(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in self.leaves
        )
        modes = tuple(getattr(run, "training", None) for run in (self.model, self.guide))
        # The structure in words: a TreeSpec has no hash in older releases of torch.
        key = (self.model, self.guide, modes, torch.get_default_dtype(), repr(self.spec), leaves)
        try:
            hash(key)
        except TypeError as error:
            self.reason = f"an argument can't be told from others ({error})"
            return None
        return key

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return Call(self.model, self.guide, args, kwargs)


class Statement(NamedTuple):
    """A ``pyro.param`` statement."""

    name: str
    parameter: Tensor  # unconstrained
    transform: Transform | None  # to the constrained value, None for the identity
    stored: bool  # whether the parameter is in the parameter store, and not local to a module

    @classmethod
    def of(cls, name: str, site: Any) -> Statement:
        """The statement of a site of a trace."""
        store = pyro.get_param_store()
        constraint = constraint_of(store, name, site["kwargs"].get("constraint", constraints.real))
        transform = transform_to(constraint)
        value = site["value"]
        return cls(
            name,
            value.unconstrained() if hasattr(value, "unconstrained") else value,
            None if transform is identity_transform else transform,
            name in store,
        )


@dataclass
class Recording:
    """Loss and gradient for arguments of given shapes."""

    statements: list[Statement]
    parameters: list[Tensor]  # all inputs that are no arguments
    trained: list[Tensor]  # those that the loss depends on, in the order of the gradients
    run: Function  # from parameters and arguments to the loss, constrained parameters, and gradients
    flags: list[bool]  # which parameters required a gradient
    run_loss: Function | None = None  # the same without gradients, from the same random numbers
    count: int = 1  # calls served

    @classmethod
    def of(cls, elbo: ELBO, call: Call, statements: list[Statement]) -> Recording:
        """Record a call and compare the graph with the ELBO; raise an ``UntraceableError`` if that fails."""
        with fork_random_state(), unvalidated():
            graph, parameters, trained = _graph(elbo, call, statements)
            inputs = [*parameters, *call.tensors]
            flags = [parameter.requires_grad for parameter in parameters]
            count = len(cast(Any, graph.graph.output_node().args[0])) - len(trained)

            def recording(graph: fx.GraphModule) -> Recording:
                made = cls(statements, parameters, trained, straight_line(graph, inputs), flags)
                made.check(elbo, call, (0.0, 0.1, 1.0, -1.0))
                made.run_loss = straight_line(_first(graph, count), inputs)
                return made

            return rewritten_if_right(graph, inputs, recording)

    def in_force(self) -> bool:
        """Whether the store still holds these parameters, and the same of them are trained."""
        current = pyro.get_param_store().named_parameters().mapping
        return self.flags == [p.requires_grad for p in self.parameters] and all(
            current.get(s.name) is s.parameter for s in self.statements if s.stored
        )

    def evaluate(self, tensors: list[Tensor], *, gradients: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and gradients; handlers outside, such as those of ``SVI.step``, see the param statements."""
        run = self.run if gradients or self.run_loss is None else self.run_loss
        with torch.no_grad():
            loss, *rest = run(*self.parameters, *tensors)
            constrained = iter(rest)
            wrapped = am_i_wrapped()
            for name, parameter, transform, _ in self.statements:
                value = parameter if transform is None else next(constrained)
                if wrapped:
                    _state(parameter, value, name=name)
        return loss, tuple(constrained)

    def check(self, elbo: ELBO, call: Call, spreads: Sequence[float]) -> None:
        """Raise an ``UntraceableError`` if the graph is wrong at parameters moved by about these spreads."""

        def results(*tensors: Tensor) -> tuple[Tensor, ...]:
            loss, gradients = self.evaluate(list(tensors))
            return loss, *gradients

        check(results, [_Probe(elbo, call, self, spread) for spread in spreads])


class _Probe(Probe):
    """Compares a recording with the ELBO at moved parameters and other data, with the same random numbers."""

    def __init__(self, elbo: ELBO, call: Call, recording: Recording, spread: float) -> None:
        super().__init__(moves=spread != 0)
        self.elbo, self.recording, self.spread = elbo, recording, spread
        # away from the recording with the rows of all tensors in reverse
        self.call = call.with_tensors([t.flip(0) if spread and t.dim() else t for t in call.tensors])

    def reference(self, fraction: float, nudge: int) -> list[Tensor] | None:
        with _moved(self.recording.parameters, fraction * self.spread, nudge):
            try:
                expected = _by_elbo(self.elbo, self.call, self.recording.trained)
            except (RuntimeError, ValueError, ArithmeticError):
                if self.moves:
                    return None
                raise
        return expected if not self.moves or all(bool(e.isfinite().all()) for e in expected) else None

    def results(self, function: Function, fraction: float, nudge: int) -> tuple[Tensor, ...]:
        moved = _moved(self.recording.parameters, fraction * self.spread, nudge)
        with moved, fork_random_state(), poutine.block():
            return function(*self.call.tensors)

    def problem(self, number: int, deviation: float) -> str:
        return (
            f"from the same random numbers model and guide give another {'gradient' if number else 'loss'} "
            f"than when they were recorded (off by {deviation:.1g}, relative, also at {NUDGES} points close "
            "by). This is so if they branch on values, keep a state from call to call, or use random numbers "
            "or data that come neither from torch nor from their arguments"
        )


@effectful(type="param")  # type: ignore[misc,unused-ignore]
def _state(parameter: Tensor, value: Any) -> Tensor:
    """What ``pyro.param`` does for an existing parameter."""
    value.unconstrained = weakref.ref(parameter)
    return cast(Tensor, value)


def _graph(
    elbo: ELBO, call: Call, statements: list[Statement]
) -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
    """The simplified graph, its parameters and those that the loss depends on."""
    parameters = list({id(s.parameter): s.parameter for s in statements}.values())
    given = [tensor.detach() for tensor in call.tensors]  # new ids: an argument may be a global, too
    trained: list[Tensor] = []

    def loss_and_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        # The recorder knows parameters by id, so they are not replaced.
        there = call.with_tensors(inputs[len(parameters) :])
        with poutine.block(), _tensors_for_numbers(elbo), torch.enable_grad():
            loss = cast(Any, elbo).differentiable_loss(there.model, there.guide, *there.args, **there.kwargs)
            if not (isinstance(loss, Tensor) and loss.requires_grad):
                raise UntraceableError("the loss depends on no parameter")
            wanted = [parameter for parameter in parameters if parameter.requires_grad]
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, wanted, allow_unused=True)
            constrained = [s.transform(s.parameter).detach() for s in statements if s.transform]
        trained[:] = [p for p, gradient in zip(wanted, gradients, strict=True) if gradient is not None]
        return (loss.detach(), *constrained, *[gradient for gradient in gradients if gradient is not None])

    graph = trace(loss_and_gradients, [*parameters, *given])
    others = [tensor for tensor in graph.buffers() if tensor.requires_grad]
    if others:  # trained without a param statement, as parameters of plain modules are
        parameters.extend(others)
        graph = trace(loss_and_gradients, [*parameters, *given])
    refuse_side_effects(graph, random=True)
    inputs = [*parameters, *given]
    with torch.no_grad():
        graph = simplify(without_writes(graph, inputs), inputs)
    return graph, parameters, trained


def _first(graph: fx.GraphModule, count: int) -> fx.GraphModule:
    """The same graph for its first outputs only."""
    part = fx.Graph()
    outputs = part.graph_copy(graph.graph, {})
    part.output(cast(Any, outputs)[:count])
    drop_unused(part)
    return fx.GraphModule(graph, part)


@contextmanager
def _tensors_for_numbers(elbo: ELBO) -> Iterator[None]:
    """Let an ELBO keep tensors where it reads numbers from them or checks them for NaN, in this thread."""

    def detached(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    with ExitStack() as stack:
        for module in {sys.modules[cls.__module__] for cls in type(elbo).__mro__}:
            stack.enter_context(replaced_in_this_thread(module, "torch_item", lambda _: detached))
            unwarned = replaced_in_this_thread(module, "warn_if_nan", lambda _: lambda x, *a, **k: x)
            stack.enter_context(unwarned)
        yield


def _by_elbo(elbo: ELBO, call: Call, parameters: list[Tensor]) -> list[Tensor]:
    """Loss and gradients by the ELBO itself; parameters' ``grad`` and random numbers stay as they are."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with fork_random_state(), poutine.block(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = cast(Any, elbo).loss_and_grads(call.model, call.guide, *call.args, **call.kwargs)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    return [gradients[0].new_tensor(loss), *gradients]


@contextmanager
def _moved(parameters: list[Tensor], spread: float, number: int) -> Iterator[None]:
    """Move parameters for a while, by about ``spread`` and by a nudge; other random numbers if ``spread``."""
    before = [parameter.detach().clone() for parameter in parameters]
    with fork_random_state(), torch.no_grad():
        if spread:
            torch.manual_seed(0)
            for parameter in parameters:
                parameter += spread * torch.randn_like(parameter)
        if number:
            for parameter in parameters:
                parameter += nudge(parameter, number)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
