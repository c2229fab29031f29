"""The settings of a kernel as plain values, which JSON can hold."""

from __future__ import annotations

import inspect
import math
from dataclasses import is_dataclass
from typing import Any

import torch

__all__ = ["kernel_settings"]

# Arguments of kernels that are no settings, or too large to repeat.
NO_SETTINGS = {"self", "model", "potential_fn", "initial_params", "transforms", "center"}


def kernel_settings(kernel: Any) -> dict[str, Any]:
    """The arguments of a kernel, by name.

    Kernels of Pyro and of this package keep their arguments as attributes of the same names. What a kernel
    of Pyro adapts, as ``step_size``, is shown as adapted.
    """
    names = _arguments(type(kernel)) - NO_SETTINGS
    return {name: _plain(getattr(kernel, name)) for name in sorted(names) if hasattr(kernel, name)}


def _arguments(kind: type) -> set[str]:
    """Names of the arguments of a class, and of its bases as long as they get ``**options``."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            names |= {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _plain(value: Any) -> Any:
    """A setting as JSON has it: numbers and strings as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):  # as temperatures by chain
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_dataclass(value):  # schedules and preconditioners, whose repr shows their arguments
        return repr(value)
    if inspect.ismethod(value) and is_dataclass(value.__self__):
        return f"{value.__self__!r}.{value.__name__}"
    return getattr(value, "__qualname__", type(value).__qualname__)
