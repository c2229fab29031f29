"""The settings of a kernel as plain values, which JSON can hold."""

from __future__ import annotations

import inspect
import math
from dataclasses import is_dataclass
from typing import Any

import torch

from pyro_sym.sgmcmc.kernel import Options

__all__ = ["kernel_settings"]

# Arguments of kernels that are no settings, or too large to repeat.
NO_SETTINGS = {"self", "model", "potential_fn", "initial_params", "transforms", "options", "center"}


def kernel_settings(kernel: Any) -> dict[str, Any]:
    """The arguments of a kernel, by name.

    A kernel keeps what it was given under the names of its arguments, Pyro's and this package's alike; what a
    kernel of Pyro adapts, as ``step_size``, is shown as adapted.
    """
    names = {*inspect.signature(type(kernel).__init__).parameters, *Options.__annotations__} - NO_SETTINGS
    return {name: _plain(getattr(kernel, name)) for name in sorted(names) if hasattr(kernel, name)}


def _plain(value: Any) -> Any:
    """A setting as JSON has it: numbers and words as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):  # as temperatures by chain
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_dataclass(value):  # schedules and preconditioners, whose repr is how they are made
        return repr(value)
    if inspect.ismethod(value) and is_dataclass(value.__self__):
        return f"{value.__self__!r}.{value.__name__}"
    return getattr(value, "__qualname__", type(value).__qualname__)
