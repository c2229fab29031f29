"""What is recorded of an ELBO: loss and gradient as a graph of parameters and arguments, and its checks."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.poutine.runtime import am_i_wrapped, effectful
from torch import Tensor, fx
from torch.distributions import Transform, constraints, identity_transform, transform_to
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_sym._random import fork_random_state
from pyro_sym.graph.algebra import fewer_passes
from pyro_sym.graph.cancellation import cancelled
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.comparison import NEARER, NUDGES, nudge, relative_error, tolerance
from pyro_sym.graph.record import (
    Function,
    UntraceableError,
    drop_unused,
    message_of,
    refuse_side_effects,
    simplify,
    trace,
    without_writes,
)
from pyro_sym.model.gradient import unvalidated

__all__ = ["Call", "Recording", "Statement"]

Run = Callable[..., Any]


class Call:
    """Model, guide and their arguments, tensors apart from the rest."""

    def __init__(self, model: Run, guide: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        self.leaves, self.spec = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.reason = ""
        self.key = self._key()

    def _key(self) -> Any:
        """What a recording depends on besides the tensors' values."""
        if any(tensor.requires_grad for tensor in self.tensors):
            self.reason = "an argument requires a gradient of its own"
            return None
        leaves = tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
            if isinstance(leaf, Tensor)
            else (type(leaf), leaf)
            for leaf in self.leaves
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
        """The same with other tensors in place of these."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return Call(self.model, self.guide, args, kwargs)


class Statement(NamedTuple):
    """What ``pyro.param`` says: a name, the unconstrained value, and the way to the constrained one, if any.

    ``stored`` is whether it is in the parameter store, and not local to a module.
    """

    name: str
    parameter: Tensor
    transform: Transform | None
    stored: bool

    @classmethod
    def of(cls, name: str, site: Any) -> Statement:
        """What the trace of a call says of one."""
        store = pyro.get_param_store()
        constraint = store._constraints.get(name, site["kwargs"].get("constraint", constraints.real))
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
    """Loss and gradient for arguments of given shapes.

    Attributes:
        statements: of the parameters of model and guide.
        parameters: all inputs that are no arguments.
        trained: those that the loss depends on, in order of the gradients.
        run: from parameters and arguments to the loss, constrained parameters, and gradients.
        flags: which parameters required a gradient.
        run_loss: the same without the gradients, from the same random numbers.
        count: how many calls it has served.
    """

    statements: list[Statement]
    parameters: list[Tensor]
    trained: list[Tensor]
    run: Function
    flags: list[bool]
    run_loss: Function | None = None
    count: int = 1

    @classmethod
    def of(cls, elbo: ELBO, call: Call, statements: list[Statement]) -> Recording:
        """Record a call and compare the graph with the ELBO, or say why not."""
        spreads = (0.0, 0.1, 1.0, -1.0)
        with _noise_kept(call), unvalidated():
            graph, parameters, trained = _graph(elbo, call, statements)
            inputs = [*parameters, *call.tensors]
            flags = [parameter.requires_grad for parameter in parameters]
            count = len(cast(Any, graph.graph.output_node().args[0])) - len(trained)

            def recording(graph: fx.GraphModule) -> Recording:
                made = cls(statements, parameters, trained, straight_line(graph, inputs), flags)
                made.check(elbo, call, spreads)
                made.run_loss = straight_line(_first(graph, count), inputs)
                return made

            try:
                return recording(fewer_passes(cancelled(graph, inputs), inputs))
            except UntraceableError:  # the graph as it is may do
                return recording(graph)

    def in_force(self) -> bool:
        """Whether the parameters are still those of the parameter store, and the same of them are trained."""
        current = pyro.get_param_store()._params
        return self.flags == [p.requires_grad for p in self.parameters] and all(
            current.get(s.name) is s.parameter for s in self.statements if s.stored
        )

    def evaluate(self, tensors: list[Tensor], *, gradients: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and gradients; states the parameters to handlers outside, such as those of ``SVI.step``."""
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
        """Raise unless the graph gives what the ELBO gives, also at parameters so far from these."""
        for spread in spreads:
            there = call if spread == 0 else _elsewhere(call)
            for fraction in NEARER if spread else (1.0,):
                # A difference at a kink is gone at a nudged point, one that the graph makes isn't.
                shifts = [_Shift(fraction * spread, number) for number in range(1 + NUDGES)]
                expected = self._expected(elbo, there, shifts[0])
                if expected is None:
                    continue  # too far out for the model
                first = self._problem(there, shifts[0], expected)
                if first is not None and not any(
                    self._problem(there, shift, self._expected(elbo, there, shift)) is None
                    for shift in shifts[1:]
                ):
                    raise UntraceableError(first)
                break

    def _expected(self, elbo: ELBO, call: Call, shift: _Shift) -> list[Tensor] | None:
        """The ELBO's loss and gradients at shifted parameters, or None where they can't be compared."""
        with _moved(self.parameters, shift):
            try:
                expected = _reference(elbo, call, self.trained)
            except (RuntimeError, ValueError, ArithmeticError):
                if shift.spread == 0:
                    raise
                return None
        return expected if shift.spread == 0 or all(bool(e.isfinite().all()) for e in expected) else None

    def _problem(self, call: Call, shift: _Shift, expected: list[Tensor] | None) -> str | None:
        """What the graph gets wrong at shifted parameters, if anything."""
        if expected is None:
            return "the ELBO fails at nudged parameters"
        with _moved(self.parameters, shift):
            try:
                with _noise_kept(call), poutine.block():
                    loss, gradients = self.evaluate(call.tensors)
            except (RuntimeError, IndexError) as error:
                raise UntraceableError(
                    f"its graph fails elsewhere than where it was traced: {message_of(error)}"
                ) from error
        for what, wanted, result in zip(_names(len(expected)), expected, [loss, *gradients], strict=True):
            deviation = relative_error(result, wanted)
            if not deviation <= tolerance(wanted):
                return (
                    f"from the same random numbers model and guide give another {what} than when they "
                    f"were recorded (off by {deviation:.1g}, relative, also at {NUDGES} points close by). "
                    "This is so if they branch on values, keep a state from call to call, or use random "
                    "numbers or data that come neither from torch nor from their arguments"
                )
        return None


class _Shift(NamedTuple):
    """Where parameters are moved to: so far away, and by which nudge."""

    spread: float
    nudge: int


@effectful(type="param")  # type: ignore[misc,unused-ignore]
def _state(parameter: Tensor, value: Any) -> Tensor:
    """What ``pyro.param`` does for a parameter that is there."""
    value.unconstrained = weakref.ref(parameter)
    return cast(Tensor, value)


def _graph(
    elbo: ELBO, call: Call, statements: list[Statement]
) -> tuple[fx.GraphModule, list[Tensor], list[Tensor]]:
    """The simplified graph, its parameters and those that the loss depends on."""
    parameters = list({id(s.parameter): s.parameter for s in statements}.values())
    given = [tensor.detach() for tensor in call.tensors]  # known apart from each other and from globals
    trained: list[Tensor] = []

    def loss_and_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        # Parameters are known by their identity, so nothing need be put in the place of any.
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
    """Let an ELBO keep tensors where it takes numbers from them, and not look whether they are NaN."""

    def as_it_is(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    def unseen(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x

    instead = {"torch_item": as_it_is, "warn_if_nan": unseen}
    modules = {sys.modules[cls.__module__] for cls in type(elbo).__mro__}
    before = [
        (module, name, getattr(module, name))
        for module in modules
        for name in instead
        if hasattr(module, name)
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, instead[name])
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _reference(elbo: ELBO, call: Call, parameters: list[Tensor]) -> list[Tensor]:
    """Loss and gradients by the ELBO itself, leaving gradients and random numbers as they are."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with _noise_kept(call), poutine.block(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = cast(Any, elbo).loss_and_grads(call.model, call.guide, *call.args, **call.kwargs)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    return [gradients[0].new_tensor(loss), *gradients]


@contextmanager
def _noise_kept(call: Call) -> Iterator[None]:
    """Leave random numbers where they were."""
    with fork_random_state():
        yield


@contextmanager
def _moved(parameters: list[Tensor], shift: _Shift) -> Iterator[None]:
    """Parameters elsewhere for a while, with other random numbers if far away."""
    before = [parameter.detach().clone() for parameter in parameters]
    with fork_random_state(), torch.no_grad():
        if shift.spread:
            torch.manual_seed(0)
            for parameter in parameters:
                parameter += shift.spread * torch.randn_like(parameter)
        if shift.nudge:
            for parameter in parameters:
                parameter += nudge(parameter, shift.nudge)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _elsewhere(call: Call) -> Call:
    """A call with the rows of its tensors in reverse."""
    return call.with_tensors([tensor.flip(0) if tensor.dim() else tensor for tensor in call.tensors])


def _names(count: int) -> list[str]:
    return ["loss", *["gradient"] * (count - 1)]
