"""An ELBO and its gradient by a graph of model and guide, recorded once."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.runtime import _PYRO_STACK, am_i_wrapped, effectful
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.util import warn_if_nan
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributions import Transform, constraints, identity_transform, transform_to
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_sym.infer.algebra import fewer_passes
from pyro_sym.infer.cancellation import cancelled
from pyro_sym.infer.gradient import _relative_error, _tolerance, _unvalidated
from pyro_sym.infer.graph import (
    Function,
    UntraceableError,
    changes_tensors,
    drop_unused,
    refuse_side_effects,
    simplify,
    straight_line,
    trace,
)

__all__ = ["RecordedELBO"]

Run = Callable[..., Any]


class RecordedELBO(ELBO):
    r"""A Pyro ELBO whose loss and gradient are recorded once, and then computed without Pyro.

    It takes the place of the ELBO that it is given, in :class:`~pyro.infer.SVI` and elsewhere, and computes
    the same unbiased estimates, from the same random numbers,

    .. math::

        \widehat{\mathcal L}(\phi, \epsilon) \quad \text{and} \quad
        \nabla_\phi \widehat{\mathcal L}(\phi, \epsilon), \qquad \epsilon \sim \text{noise anew in each step},

    without running model and guide in each step. The first call with arguments of given shapes is that of
    the ELBO itself; then the tensor operations of model, guide and gradient are recorded, with parameters and
    arguments as inputs and random draws as operations, and simplified. The graph is compared with the
    ELBO at other parameters, arguments and random numbers before it is used, and again at the 2nd, 4th,
    8th, … call. Where they differ, or model or guide can't be recorded (as their course depends on the values
    of tensors), the ELBO itself is used from then on, and a warning says why.

    As with Pyro's ``JitTrace_ELBO``, what model and guide use besides their arguments and parameters is
    recorded as it was: pass as arguments what changes, such as data or a temperature. Arguments
    that are no tensors belong to what is recorded: with another value the graph is recorded anew, so pass
    numbers that change as tensors. A recording takes as long as some forty steps without it; on calls that
    record or compare, model and guide are run several times.

    Of :class:`AutoSymmetrized` guides those that compute their average exactly, or from uniform elements, are
    recorded, with the average in every step; those whose elements are guided, or whose units lie so far apart
    that the average is left out, run as they are.

    Args:
        elbo: a Pyro ELBO that has ``differentiable_loss``: ``Trace_ELBO``, ``TraceMeanField_ELBO``, or
            ``TraceEnum_ELBO`` with sites that are enumerated in the model only; ``Trace_ELBO()`` if ``None``.
        cache_size: how many graphs are kept, for as many shapes of arguments.

    Attributes:
        reason: why nothing is recorded any more, else ``None``.

    Raises:
        ValueError: if the ELBO has no ``differentiable_loss``, or ``cache_size`` is less than 1.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> loss = RecordedELBO()
        >>> svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.01}), loss)
        >>> for _ in range(3):
        ...     _ = svi.step(torch.tensor([-1.0, 1.0, 2.0]))
        >>> loss.reason is None
        True
    """

    def __init__(self, elbo: ELBO | None = None, *, cache_size: int = 8) -> None:
        elbo = Trace_ELBO() if elbo is None else elbo
        if not hasattr(elbo, "differentiable_loss"):
            raise ValueError(
                f"{type(elbo).__name__} has no differentiable_loss that could be recorded; pass Trace_ELBO, "
                "TraceMeanField_ELBO or TraceEnum_ELBO"
            )
        if cache_size < 1:
            raise ValueError(f"cache_size={cache_size} must be at least 1")
        super().__init__(num_particles=elbo.num_particles)
        self.elbo = elbo
        self.cache_size = cache_size
        self.reason: str | None = None
        self._recorded: OrderedDict[Any, _Recording] = OrderedDict()
        self._num_recorded = 0

    def loss_and_grads(self, model: Run, guide: Run, *args: Any, **kwargs: Any) -> float:
        """Estimate the loss, and add its gradient to the parameters' ``grad``.

        Args:
            model: the model.
            guide: the guide.
            *args: positional arguments of both.
            **kwargs: keyword arguments of both.

        Returns:
            The loss, minus the ELBO, in nats.
        """
        call = _Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(float, self._plainly(call, self.elbo.loss_and_grads))
        loss, gradients = recording.evaluate(call.tensors)
        for parameter, gradient in zip(recording.trained, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        return warn_if_nan(loss.item(), "loss")

    def differentiable_loss(self, model: Run, guide: Run, *args: Any, **kwargs: Any) -> Tensor:
        """Estimate the loss as a tensor to be differentiated once.

        Args:
            model: the model.
            guide: the guide.
            *args: positional arguments of both.
            **kwargs: keyword arguments of both.

        Returns:
            The loss, a scalar, in nats.
        """
        call = _Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(Tensor, self._plainly(call, cast(Any, self.elbo).differentiable_loss))
        loss = cast(Tensor, _Differentiable.apply(recording, call.tensors, *recording.trained))
        warn_if_nan(loss.detach(), "loss")
        return loss

    def loss(self, model: Run, guide: Run, *args: Any, **kwargs: Any) -> float:
        """Estimate the loss.

        Args:
            model: the model.
            guide: the guide.
            *args: positional arguments of both.
            **kwargs: keyword arguments of both.

        Returns:
            The loss, minus the ELBO, in nats.
        """
        call = _Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(float, self._plainly(call, self.elbo.loss))
        loss, _ = recording.evaluate(call.tensors, gradients=False)
        return warn_if_nan(loss.item(), "loss")

    def _get_trace(self, model: Run, guide: Run, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)

    def _find(self, call: _Call) -> _Recording | None:
        """What was recorded for a call, if it is still in force."""
        if self.reason is not None or call.key is None or _handled():
            return None
        recording = self._recorded.get(call.key)
        if recording is None or not recording.in_force():
            return None
        self._recorded.move_to_end(call.key)
        recording.count += 1
        if recording.count & (recording.count - 1) == 0:  # a power of two
            try:
                recording.check(self.elbo, call, spreads=(0.0,))
            except UntraceableError as error:
                self._give_up(_first_line(error))
                return None
        return recording

    def _plainly(self, call: _Call, method: Callable[..., Any]) -> Any:
        """A call of the ELBO itself, which is recorded if it can be."""
        if self.reason is not None:
            return method(call.model, call.guide, *call.args, **call.kwargs)
        with poutine.trace(param_only=True) as stated:
            result = method(call.model, call.guide, *call.args, **call.kwargs)
        if call.key is None:
            self._give_up(call.reason)
        elif _handled():
            self._give_up("effect handlers around the step would act on model and guide")
        elif self._num_recorded >= 4 * self.cache_size:
            self._give_up(
                f"arguments came in more than {self._num_recorded} combinations of shapes and values; pass "
                "numbers that change as tensors"
            )
        else:
            try:
                statements = [
                    _Statement.of(*node) for node in stated.trace.nodes.items() if node[1]["type"] == "param"
                ]
                recording = _Recording.of(self.elbo, call, statements)
            except UntraceableError as error:
                self._give_up(_first_line(error))
            else:
                self._num_recorded += 1
                self._recorded[call.key] = recording
                if len(self._recorded) > self.cache_size:
                    self._recorded.popitem(last=False)
        return result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._recorded.clear()
        warnings.warn(
            f"the ELBO isn't recorded, so that each step runs model and guide anew: {reason}", stacklevel=4
        )


class _Call:
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
        key = (self.model, self.guide, modes, torch.get_default_dtype(), self.spec, leaves)
        try:
            hash(key)
        except TypeError as error:
            self.reason = f"an argument can't be told from others ({error})"
            return None
        return key

    def with_tensors(self, tensors: Sequence[Tensor]) -> _Call:
        """The same with other tensors in place of these."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return _Call(self.model, self.guide, args, kwargs)


class _Statement(NamedTuple):
    """What ``pyro.param`` says: a name, the unconstrained value, and the way to the constrained one, if any.

    ``stored`` is whether it is in the parameter store, and not local to a module.
    """

    name: str
    parameter: Tensor
    transform: Transform | None
    stored: bool

    @classmethod
    def of(cls, name: str, site: Any) -> _Statement:
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
class _Recording:
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

    statements: list[_Statement]
    parameters: list[Tensor]
    trained: list[Tensor]
    run: Function
    flags: list[bool]
    run_loss: Function | None = None
    count: int = 1

    @classmethod
    def of(cls, elbo: ELBO, call: _Call, statements: list[_Statement]) -> _Recording:
        """Record a call and compare the graph with the ELBO, or say why not."""
        spreads = (0.0, 0.1, 1.0, -1.0)
        with _noise_kept(call), _unvalidated():
            graph, parameters, trained = _graph(elbo, call, statements)
            inputs = [*parameters, *call.tensors]
            flags = [parameter.requires_grad for parameter in parameters]
            count = len(cast(Any, graph.graph.output_node().args[0])) - len(trained)

            def recording(graph: fx.GraphModule) -> _Recording:
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

    def check(self, elbo: ELBO, call: _Call, spreads: Sequence[float]) -> None:
        """Raise unless the graph gives what the ELBO gives, also at parameters so far from these."""
        for spread in spreads:
            there = call if spread == 0 else _elsewhere(call)
            with _moved(self.parameters, spread):
                try:
                    expected = _reference(elbo, there, self.trained)
                except (RuntimeError, ValueError, ArithmeticError):
                    if spread == 0:
                        raise
                    continue  # too far out for the model
                try:
                    with _noise_kept(there), poutine.block():
                        loss, gradients = self.evaluate(there.tensors)
                except (RuntimeError, IndexError) as error:
                    raise UntraceableError(
                        f"its graph fails elsewhere than where it was traced: {error}"
                    ) from error
            if spread and not all(bool(e.isfinite().all()) for e in expected):
                continue
            for what, wanted, result in zip(_names(len(expected)), expected, [loss, *gradients], strict=True):
                deviation = _relative_error(result, wanted)
                if not deviation <= _tolerance(wanted):
                    raise UntraceableError(
                        f"from the same random numbers model and guide give another {what} than when they "
                        f"were recorded (off by {deviation:.1g}, relative): they branch on values, keep a "
                        "state from call to call, or use other sources of random numbers or of data"
                    )


class _Differentiable(torch.autograd.Function):
    """The loss, whose gradient is computed along with it."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, tensors: list[Tensor], *trained: Tensor) -> Tensor:
        loss, gradients = recording.evaluate(tensors)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[misc,unused-ignore]
    def backward(ctx: Any, outer: Tensor) -> Any:
        return None, None, *[outer * gradient for gradient in ctx.saved_tensors]


@effectful(type="param")  # type: ignore[misc,unused-ignore]
def _state(parameter: Tensor, value: Any) -> Tensor:
    """What ``pyro.param`` does for a parameter that is there."""
    value.unconstrained = weakref.ref(parameter)
    return cast(Tensor, value)


def _handled() -> bool:
    """Whether effect handlers around the call would act on model and guide."""
    return not all(
        isinstance(handler, BlockMessenger) or (isinstance(handler, TraceMessenger) and handler.param_only)
        for handler in _PYRO_STACK
    )


def _graph(
    elbo: ELBO, call: _Call, statements: list[_Statement]
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
        if changes_tensors(graph):  # simplification is for operations that don't
            graph = trace(torch.func.functionalize(graph, remove="mutations"), inputs)
        graph = simplify(graph, inputs)
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


def _reference(elbo: ELBO, call: _Call, parameters: list[Tensor]) -> list[Tensor]:
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
def _noise_kept(call: _Call) -> Iterator[None]:
    """Leave random numbers where they were."""
    devices = {tensor.device for tensor in call.tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        yield


@contextmanager
def _moved(parameters: list[Tensor], spread: float) -> Iterator[None]:
    """Parameters so far from where they are, for a while, and other random numbers."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if spread:
            torch.manual_seed(0)
            for parameter in parameters:
                parameter += spread * torch.randn_like(parameter)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _elsewhere(call: _Call) -> _Call:
    """A call with the rows of its tensors in reverse."""
    return call.with_tensors([tensor.flip(0) if tensor.dim() else tensor for tensor in call.tensors])


def _first_line(error: Exception) -> str:
    """The reason itself: Pyro's handlers append the shapes of all sites."""
    return str(error).partition("\n")[0]


def _names(count: int) -> list[str]:
    return ["loss", *["gradient"] * (count - 1)]
