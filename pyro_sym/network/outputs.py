"""Advice on how to wrap a network that returns something other than a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["described", "how_to_wrap"]

SNIPPET = """
class Wrapped(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *args, **kwargs):
        return self.net(*args, **kwargs){access}
"""


def described(value: Any) -> str:
    """A value by its type, with the names of its parts."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if dataclasses.is_dataclass(value):
        return f"a {type(value).__name__} with fields {[field.name for field in dataclasses.fields(value)]}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def how_to_wrap(net: nn.Module, output: Any) -> str:
    """The advice to wrap a network so that it returns one tensor, with the code."""
    return (
        f"{type(net).__name__} returns {described(output)}. Return one tensor, as the logits; wrap the "
        f"module, and pass Wrapped(net):\n{SNIPPET.format(access=_access(output))}"
    )


def _access(output: Any) -> str:
    """The code that takes the logits, or else the first tensor, from an output."""
    if isinstance(output, Mapping):
        return f"[{_first(dict(output), 'logits')!r}]"
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return f"[{_first(dict(enumerate(output)), 0)}]"
    names = [field.name for field in dataclasses.fields(output)] if dataclasses.is_dataclass(output) else []
    parts = {name: getattr(output, name, None) for name in [*names, *getattr(output, "_fields", ())]}
    return f".{_first(parts, 'logits')}"


def _first(parts: dict[Any, Any], default: Any) -> Any:
    """The key of the logits, or of the first tensor."""
    tensors = [key for key, part in parts.items() if isinstance(part, Tensor)]
    return default if default in parts or not tensors else tensors[0]
