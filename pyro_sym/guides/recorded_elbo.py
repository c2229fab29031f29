"""An ELBO and its gradient from a graph of model and guide that is recorded once."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.util import warn_if_nan
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_sym._private import active_handlers
from pyro_sym.graph.record import UntraceableError, message_of
from pyro_sym.guides.recorded_graph import Call, Recording, Statement

__all__ = ["RecordedELBO"]

Run = Callable[..., Any]


class RecordedELBO(ELBO):
    r"""A Pyro ELBO whose loss and gradient are recorded once, and then computed without Pyro.

    It replaces the ELBO that it wraps, in :class:`~pyro.infer.SVI` and elsewhere, and computes the same
    unbiased estimates from the same random numbers,

    .. math::

        \widehat{\mathcal L}(\phi, \epsilon) \quad \text{and} \quad
        \nabla_\phi \widehat{\mathcal L}(\phi, \epsilon), \qquad \epsilon \sim \text{new noise in each step},

    without running model and guide in each step. The first call with arguments of given shapes is a call of
    the ELBO itself. Then the tensor operations of model, guide and gradient are recorded, with parameters and
    arguments as inputs and random draws as operations, and simplified. The graph is compared with the
    ELBO at other parameters, arguments and random numbers before it is used, and again at the 2nd, 4th,
    8th, … call. If they differ, or model or guide can't be recorded (for example, they branch on values of
    tensors), the ELBO itself is used from then on, and a warning says why.

    As with Pyro's ``JitTrace_ELBO``, all that model and guide use besides arguments and parameters is
    recorded as a constant: pass what changes, such as data or a temperature, as arguments. Arguments
    that aren't tensors are constants, too; each new value means a new recording, so pass
    numbers that change as tensors. A recording takes as long as some forty steps without it; calls that
    record or compare run model and guide several times.

    :class:`AutoSymmetrized` guides are recorded if they compute their average exactly or from uniform
    elements, with the average in every step. Guides with guided elements, or with units so far apart
    that the average is left out, run as they are.

    Args:
        elbo: a Pyro ELBO that has ``differentiable_loss``: ``Trace_ELBO``, ``TraceMeanField_ELBO``, or
            ``TraceEnum_ELBO`` with sites that are enumerated in the model only; ``Trace_ELBO()`` if ``None``.
        cache_size: how many graphs are kept, one for each combination of argument shapes.

    Attributes:
        reason: why nothing is recorded any more; ``None`` while recordings are used.

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
                f"{type(elbo).__name__} has no differentiable_loss to record; pass Trace_ELBO, "
                "TraceMeanField_ELBO or TraceEnum_ELBO"
            )
        if cache_size < 1:
            raise ValueError(f"cache_size={cache_size} must be at least 1")
        super().__init__(num_particles=elbo.num_particles)
        self.elbo = elbo
        self.cache_size = cache_size
        self.reason: str | None = None
        self._recorded: OrderedDict[Any, Recording] = OrderedDict()
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
        call = Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(float, self._by_elbo(call, self.elbo.loss_and_grads))
        loss, gradients = recording.evaluate(call.tensors)
        for parameter, gradient in zip(recording.trained, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        return warn_if_nan(loss.item(), "loss")

    def differentiable_loss(self, model: Run, guide: Run, *args: Any, **kwargs: Any) -> Tensor:
        """Estimate the loss as a scalar tensor that can be differentiated once; see ``loss_and_grads``."""
        call = Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(Tensor, self._by_elbo(call, cast(Any, self.elbo).differentiable_loss))
        loss = cast(Tensor, _Differentiable.apply(recording, call.tensors, *recording.trained))
        warn_if_nan(loss.detach(), "loss")
        return loss

    def loss(self, model: Run, guide: Run, *args: Any, **kwargs: Any) -> float:
        """Estimate the loss, minus the ELBO, in nats; arguments are those of ``loss_and_grads``."""
        call = Call(model, guide, args, kwargs)
        recording = self._find(call)
        if recording is None:
            return cast(float, self._by_elbo(call, self.elbo.loss))
        loss, _ = recording.evaluate(call.tensors, gradients=False)
        return warn_if_nan(loss.item(), "loss")

    def _get_trace(self, model: Run, guide: Run, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)

    def _find(self, call: Call) -> Recording | None:
        """The recording for a call, if it is still valid."""
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
                self._give_up(message_of(error))
                return None
        return recording

    def _by_elbo(self, call: Call, method: Callable[..., Any]) -> Any:
        """Call the ELBO itself, and record the call if possible."""
        if self.reason is not None:
            return method(call.model, call.guide, *call.args, **call.kwargs)
        with poutine.trace(param_only=True) as stated:
            result = method(call.model, call.guide, *call.args, **call.kwargs)
        if call.key is None:
            self._give_up(call.reason)
        elif _handled():
            self._give_up("effect handlers around the step would act on model and guide")
        elif getattr(call.guide, "proposes_elements", False):
            # Its proposals are refitted now and then, and steps may leave the average out.
            self._give_up("the guide's average is of guided elements (method 'importance')")
        elif self._num_recorded >= 4 * self.cache_size:
            many = f"more than {self._num_recorded} combinations of shapes and values"
            self._give_up(f"arguments came in {many}; pass numbers that change as tensors")
        else:
            try:
                statements = [
                    Statement.of(*node) for node in stated.trace.nodes.items() if node[1]["type"] == "param"
                ]
                recording = Recording.of(self.elbo, call, statements)
            except UntraceableError as error:
                self._give_up(message_of(error))
            else:
                self._num_recorded += 1
                self._recorded[call.key] = recording
                if len(self._recorded) > self.cache_size:
                    self._recorded.popitem(last=False)
        return result

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._recorded.clear()
        warnings.warn(f"the ELBO isn't recorded, so each step runs model and guide: {reason}", stacklevel=4)


class _Differentiable(torch.autograd.Function):
    """The loss, with the gradient that is computed along with it."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, tensors: list[Tensor], *trained: Tensor) -> Tensor:
        loss, gradients = recording.evaluate(tensors)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[misc,unused-ignore]
    def backward(ctx: Any, outer: Tensor) -> Any:
        return None, None, *[outer * gradient for gradient in ctx.saved_tensors]


def _handled() -> bool:
    """Whether effect handlers around the call would act on model and guide; assumed if Pyro doesn't say."""
    handlers = active_handlers()
    return handlers is None or not all(
        isinstance(handler, BlockMessenger) or (isinstance(handler, TraceMessenger) and handler.param_only)
        for handler in handlers
    )
