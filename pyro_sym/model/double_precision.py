"""Models and networks in double precision, with their own casts overridden."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["CastsToDouble", "all_in_double", "default_dtype", "to_double"]

CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
MOVES = {Tensor.cuda, Tensor.xpu}
DOUBLE = {torch.float64, torch.complex128}


def to_double(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, in double precision if it is real or complex."""
    return tensor.detach().to("cpu", _wider(tensor.dtype))


def all_in_double(module: nn.Module) -> nn.Module:
    """Change a module so that it computes on the CPU and in double precision throughout.

    Its parameters and buffers are converted, and so are the tensors that are plain attributes. While it runs,
    each cast to another floating-point dtype becomes a cast to float64, and each move to another device
    becomes a move to the CPU. What it computes is the same function, up to rounding. Pass a copy.
    """
    module.to("cpu", torch.float64)
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                setattr(part, name, to_double(value))
    forward = module.forward

    @functools.wraps(forward)
    def in_double(*args: Any, **kwargs: Any) -> Any:
        with _AllInDouble():
            return forward(*args, **kwargs)

    module.forward = in_double
    return module


class CastsToDouble(TorchFunctionMode):
    """Replaces floating-point dtypes by float64 in calls of torch; ``found`` says if there were others."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in CASTS:
            self.found = True
            return args[0].double()
        # Dtypes are arguments of their own, never in a tuple, and a torch.Size must stay one.
        kwargs = kwargs or {}
        if any(_wider(leaf) is not leaf for leaf in (*args, *kwargs.values())):
            self.found = True
            args = tuple(map(_wider, args))
            kwargs = {name: _wider(leaf) for name, leaf in kwargs.items()}
        return func(*args, **kwargs)


class _AllInDouble(CastsToDouble):
    """Also replaces devices by the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in MOVES:
            return args[0].cpu()
        if func is Tensor.to:
            args = tuple(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return super().__torch_function__(func, types, args, kwargs)


def _wider(leaf: Any) -> Any:
    if not isinstance(leaf, torch.dtype) or leaf in DOUBLE:
        return leaf
    if leaf.is_complex:
        return torch.complex128
    return torch.float64 if leaf.is_floating_point else leaf


def _on_cpu(device: Any) -> Any:
    """The CPU in place of another device, except the meta device, whose tensors have no numbers."""
    return device if device is None or torch.device(device).type == "meta" else "cpu"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
