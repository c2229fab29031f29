"""What tells two runs apart: words for numbers and names, and digests of code and data."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["describe"]


def describe(value: Any, leave_out: Collection[str] = ()) -> str:
    """Say what something is, in words that are the same in every process.

    Tensors and arrays are read value by value, functions by their code, defaults and what they close over,
    modules by their code, numbers, parameters and buffers, distributions by their parameters, containers,
    dataclasses, data loaders and objects of this package by what they hold.
    Anything else counts by the name of its type, and global variables that code reads do not count.

    Args:
        value: anything.
        leave_out: names of parameters of modules that make no difference, whatever module they are in.

    Returns:
        What it is, with a digest where words would not do.

    Example:
        >>> describe(0.1), describe(Cyclical(peak=0.1, period=10).temperature)[:20]
        ('0.1', 'Cyclical.temperature')
        >>> describe(torch.zeros(2)) == describe(torch.zeros(2)), describe(torch.zeros(2))[:6]
        (True, 'Tensor')
        >>> describe(lambda x: x + 1) == describe(lambda x: x + 2)
        False
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    digest = _Digest(leave_out)
    digest.add(value)
    return f"{_name(value)} {digest.hash.hexdigest()[:16]}"


def _name(value: Any) -> str:
    if isinstance(value, types.MethodType):
        return f"{type(value.__self__).__qualname__}.{value.__name__}"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class _Digest:
    """A hash that values of many kinds are fed to."""

    def __init__(self, leave_out: Collection[str]) -> None:
        self.hash = hashlib.blake2b()
        self._leave_out = leave_out
        self._within: list[int] = []

    def add(self, value: Any) -> None:
        """Feed one value."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._word(repr(value))
            return
        if id(value) in self._within:  # as a function that closes over itself
            self._word(f"round {self._within.index(id(value))}")
            return
        self._within.append(id(value))
        self._word(_name(value))
        for part in self._parts(value):
            self.add(part)
        self._within.pop()

    def _word(self, word: str) -> None:
        data = word.encode()
        self.hash.update(len(data).to_bytes(8, "little") + data)

    def _parts(self, value: Any) -> tuple[Any, ...]:
        match value:
            case Tensor():
                self._word(f"{value.dtype} {tuple(value.shape)}")
                self.hash.update(_bytes(value))
                return ()
            case np.ndarray():
                return (str(value.dtype), value.shape, value.tobytes())
            case Mapping():
                return tuple(part for item in value.items() for part in item)
            case list() | tuple() | TensorDataset():
                return tuple(value.tensors if isinstance(value, TensorDataset) else value)
            case set() | frozenset():
                return tuple(sorted(map(repr, value)))
            case nn.Module():
                return self._module(value)
            case DataLoader():
                return (value.batch_size, value.drop_last, value.dataset, type(value.sampler))
            case Distribution():
                numbers = tuple(getattr(value, name, None) for name in cast(Any, value).arg_constraints)
                base = getattr(value, "base_dist", None)
                return (tuple(value.batch_shape), tuple(value.event_shape), base, numbers)
            case functools.partial():
                return (value.func, value.args, value.keywords)
            case types.MethodType():
                return (value.__self__, value.__func__)
            case types.FunctionType():
                cells = tuple(_contents(cell) for cell in value.__closure__ or ())
                return (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
            case types.CodeType():
                return (value.co_code, value.co_names, value.co_consts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
        if type(value).__module__.startswith("pyro_sym."):
            return tuple(part for item in vars(value).items() for part in item)
        call = vars(type(value)).get("__call__")
        return (call,) if isinstance(call, types.FunctionType) else ()

    def _module(self, module: nn.Module) -> tuple[Any, ...]:
        state = {
            name: tensor
            for name, tensor in module.state_dict().items()
            if not any(name == left or name.endswith("." + left) for left in self._leave_out)
        }
        parts = tuple(
            (name, type(part), getattr(type(part).forward, "__code__", None), _own(part))
            for name, part in module.named_modules()
        )
        return (state, parts)


def _own(module: nn.Module) -> dict[str, Any]:
    """What a module has besides what torch keeps for every one."""
    return {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled, as a name that is bound later
        return None


def _bytes(tensor: Tensor) -> Any:
    # A copy: one element is contiguous whatever its strides are, and a view of bytes minds them.
    dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy()
