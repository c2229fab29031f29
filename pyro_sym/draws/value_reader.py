"""Python values read into trees of words and digests that are the same in every process."""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import threading
import types
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.utils import lazy_property
from torch.utils.data import DataLoader, Sampler

from pyro_sym.draws.referenced_code import (
    cell_contents,
    code_digest,
    file_of_module,
    is_installed,
    reached_globals,
)

__all__ = ["CODE", "Part", "ValueReader"]

# The reader stops after this many objects or bytes, or at this depth, and reports a doubt.
MAX_OBJECTS, MAX_DEPTH, MAX_BYTES = 50_000, 60, 2**34
# Tensors with more values are read again only if torch's version counter says that they were written to.
LARGE = 2**20
CODE = ": code"
"""The end of the name of a place that holds byte code, which differs between versions of Python."""

_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes})
_ATOMS: tuple[type, ...] = (*_SIMPLE, type(...), type(NotImplemented), range, np.dtype, np.generic)
_ATOMS += (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
# Locks and weak caches take part in no computation, and can't be compared.
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)
_CACHES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(eq=False)
class Part:
    """A value: a word for it, a digest of its own contents, and its parts by place.

    If it is a parameter of a module, ``parameter`` is its full path.
    """

    word: str
    digest: str = ""
    parts: list[tuple[str, Part]] = field(default_factory=list)
    parameter: str | None = None

    def kept(self, left_out: tuple[str, ...]) -> list[tuple[str, Part]]:
        """The parts, without parameters whose paths end with one of ``left_out``."""
        return [(n, p) for n, p in self.parts if p.parameter is None or not p.parameter.endswith(left_out)]

    def full_digest(self, left_out: tuple[str, ...] = (), known: dict[int, str] | None = None) -> str:
        """A digest of the value and everything in it; ``known`` keeps digests of parts that are shared."""
        known = {} if known is None else known
        if id(self) not in known:
            inner = "".join(f"\0{n}\0{p.full_digest(left_out, known)}" for n, p in self.kept(left_out))
            known[id(self)] = _hash(f"{self.word}\0{self.digest}{inner}".encode())
        return known[id(self)]


class ValueReader:
    """Turns values into parts, reading each object once.

    ``doubts`` are places that could not be read, with the reason, ``handlers`` those of Pyro's effect
    handlers. ``tensors`` has large tensors, their versions and digests by id; those of an earlier reader are
    reused.
    """

    def __init__(self, known_tensors: dict[int, tuple[Tensor, int, str]]) -> None:
        self.doubts: list[str] = []
        self.handlers: list[str] = []
        self.tensors: dict[int, tuple[Tensor, int, str]] = {}
        self._known_tensors = known_tensors
        self._parts: dict[int, Part] = {}
        self._alive: list[Any] = []  # keeps objects alive, as ids may be reused otherwise
        self._open: list[int] = []  # ids of the objects that are being read, the outermost first
        self._place = ""  # of the innermost of them
        self._bytes = 0

    def read(self, value: Any, place: str) -> Part:
        """Read the value at a place."""
        if isinstance(value, _ATOMS) and not isinstance(value, enum.Enum):
            return Part(_short(repr(value)))
        key = id(value)
        if key in self._open:  # a cycle, as in a function that closes over itself
            return Part(f"round {len(self._open) - self._open.index(key)}")
        if key in self._parts:
            return self._parts[key]
        if len(self._parts) >= MAX_OBJECTS or len(self._open) > MAX_DEPTH:
            self._doubt_the_rest(place)
            return Part(_name(value))
        self._alive.append(value)
        self._open.append(key)
        outer, self._place = self._place, place
        try:
            part = self._parts[key] = self._part(value)
        finally:
            self._open.pop()
            self._place = outer
        return part

    def _part(self, value: Any) -> Part:
        match value:
            case Tensor():
                return self._tensor(value)
            case np.ndarray():
                return self._array(value)
            case list() | tuple() | set() | frozenset() if type(value) in (list, tuple, set, frozenset):
                return self._collection(value)
            case dict() | types.MappingProxyType() if type(value) in (dict, types.MappingProxyType):
                keys = ", ".join(repr(key) if type(key) in _SIMPLE else "..." for key in value)
                word = f"{type(value).__name__} of {_short(keys) or 'nothing'}"
                return Part(word, parts=self._pairs(value.items()))
            case bytearray() | memoryview():
                return Part(f"{type(value).__name__} of {len(value)}", _hash(bytes(value)))
            case nn.Module():
                return self._module(value)
            case Distribution():
                return self._object(value, _arguments(value))
            case Transform():
                kept = {name: own for name, own in vars(value).items() if name not in ("_inv", "_cached_x_y")}
                if type(value).__name__ == "_InverseTransform":
                    kept["_inv"] = value._inv
                return self._object(value, kept)
            case DataLoader():
                names = ("batch_size", "drop_last", "collate_fn", "dataset", "sampler", "batch_sampler")
                return self._object(value, {name: getattr(value, name) for name in names})
            case Sampler():  # without its generator, which a run restores
                kept = {n: own for n, own in vars(value).items() if not isinstance(own, torch.Generator)}
                return self._object(value, kept)
            case functools.partial():
                own = self._sequence(value.args) + self._pairs(sorted(value.keywords.items()))
                own += self._named({": function": value.func})
                return Part(f"partial of {_name(value.func)}", parts=own)
            case types.MethodType():
                own = self._named({".__self__": value.__self__}) + self._named({".__func__": value.__func__})
                return Part(_name(value), parts=own)
            case types.FunctionType():
                return self._function(value)
            case types.CodeType():
                return Part("code", code_digest(value))
            case type():
                return self._class(value)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                owner = getattr(value, "__self__", None)
                owners = [] if isinstance(owner, types.ModuleType | type | None) else [owner]
                return Part(_name(value), parts=self._sequence(owners))
            case types.ModuleType() | types.GetSetDescriptorType() | types.MemberDescriptorType():
                return Part(value.__name__)
            case property():
                return self._attributes("property", {"fget": value.fget, "fset": value.fset})
            case staticmethod() | classmethod():
                return self._attributes(type(value).__name__, {"__func__": value.__func__})
            case weakref.ref():
                return self._attributes("weak reference", {"()": value()})
            case torch.Generator():
                return self._attributes("Generator", {"state": value.get_state()})
            case enum.Enum():
                return Part(f"{type(value).__qualname__}.{value.name}")
        if isinstance(value, _LOCKS + _CACHES):
            return Part(type(value).__qualname__)
        if isinstance(value, functools._lru_cache_wrapper | functools.cached_property):
            wrapped = getattr(value, "__wrapped__", None) or cast(Any, value).func
            return self._attributes(type(value).__qualname__, {"__wrapped__": wrapped})
        if isinstance(value, Messenger):
            self.handlers.append(self._place)
        return self._pickled(value)

    def _is_too_much(self, size: int) -> bool:
        """Count bytes that are to be read; whether they exceed the limit."""
        if self._bytes + size > MAX_BYTES:
            self._doubt_the_rest(self._place)
            return True
        self._bytes += size
        return False

    def _doubt_the_rest(self, place: str) -> None:
        if not self.doubts or not self.doubts[-1].endswith("too much to read"):
            self.doubts.append(f"{place} and what comes after it: too much to read")

    # --- values ---------------------------------------------------------------------------------------------

    def _tensor(self, value: Tensor) -> Part:
        word = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
        if value.device.type == "meta" or nn.parameter.is_lazy(value):
            return Part(word if value.device.type == "meta" else type(value).__name__)
        version = -1 if value.is_inference() else value._version
        known = self._known_tensors.get(id(value))
        large = value.numel() > LARGE  # small ones are always read: batch norm writes without a new version
        if large and known is not None and known[0] is value and known[1] == version >= 0:
            digest = known[2]
        elif self._is_too_much(value.numel() * value.element_size()):
            return Part(word)
        else:
            dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
            digest = _hash(_bytes(dense.dequantize() if dense.is_quantized else dense))
            if value.numel() == 1 and not value.is_quantized:
                digest = f"{dense.item()!r} {digest}"
        if large:
            self.tensors[id(value)] = (value, version, digest)
        return Part(word, digest)

    def _array(self, value: np.ndarray[Any, Any]) -> Part:
        word = f"{value.dtype} array of shape {value.shape}"
        if value.dtype.hasobject:
            return Part(word, parts=self._sequence(value.ravel().tolist()))
        if self._is_too_much(value.nbytes):
            return Part(word)
        plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)  # (nbytes,)
        mask = {".mask": np.ma.getmaskarray(value)} if isinstance(value, np.ma.MaskedArray) else {}
        return Part(word, _hash(plain), self._named(mask))

    def _collection(self, value: Any) -> Part:
        word = f"{type(value).__name__} of {len(value)}"
        is_set = isinstance(value, set | frozenset)
        if _SIMPLE.issuperset(map(type, value)) and len(value) > 8:
            words = map(repr, value)
            return Part(word, _hash("\0".join(sorted(words) if is_set else words).encode()))
        if not is_set:
            return Part(word, parts=self._sequence(value))
        digests = sorted(self.read(one, self._place).full_digest() for one in value)
        return Part(word, _hash("".join(digests).encode()))

    def _object(self, value: Any, kept: Mapping[str, Any]) -> Part:
        return self._attributes(type(value).__qualname__, {"__class__": type(value), **kept})

    def _pickled(self, value: Any) -> Part:
        """What ``pickle`` would keep, or the attributes of an object that refuses to be pickled."""
        word = type(value).__qualname__
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # whatever a class raises if it can't be pickled
            # An object with a file descriptor or an iterator stands for something outside of Python.
            outside = hasattr(value, "fileno") or hasattr(value, "__next__")
            if isinstance(attributes := getattr(value, "__dict__", None), dict) and not outside:
                return self._object(value, attributes)
            self.doubts.append(f"{self._place}: a {type(value).__module__}.{word}")
            return Part(word)
        if isinstance(reduced, str):
            return Part(f"{word} {reduced}")
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        own = self._named({".__class__": type(value)})
        if make is not getattr(copyreg, "__newobj__", None) and make is not type(value):
            own += self._named({": made by": make})
        own += self._sequence([one for one in arguments if one is not type(value)])
        slots: Any = None
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state, slots = state
        for some in (state, slots):
            if type(some) is dict and all(isinstance(name, str) for name in some):
                own += self._named({f".{n}": one for n, one in some.items() if not _is_cached(value, n)})
            elif some is not None:
                own += self._named({": state": some})
        own += self._sequence([] if items is None else items)
        own += self._pairs([] if pairs is None else pairs)
        return Part(word, parts=own)

    def _module(self, module: nn.Module) -> Part:
        if (original := vars(module).get("_modules", {}).get("_orig_mod")) is not None:  # by torch.compile
            return self.read(original, self._place)
        base = {*vars(nn.Module()), "_pyro_context"}
        kept = {n: own for n, own in vars(module).items() if n not in base and not _is_cached(module, n)}
        kept |= {"training": module.training, **module._buffers, **module._modules}
        kept |= {n: list(hooks.values()) for n in _HOOKS if (hooks := getattr(module, n, None))}
        part = self._object(module, kept)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                own = replace(self._tensor(parameter), parameter=f"{self._place}.{name}")
                part.parts.append((f".{name}", own))
        return part

    # --- code -----------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> Part:
        if (original := vars(function).get("_torchdynamo_orig_callable")) is not None:  # by torch.compile
            return self.read(original, self._place)
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        kept = {f": variable {name}": cell_contents(cell) for name, cell in cells}
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        kept |= {f": default {name}": own for name, own in zip(names, defaults, strict=True)}
        kept |= {f": default {name}": own for name, own in (function.__kwdefaults__ or {}).items()}
        kept |= {f".{name}": own for name, own in vars(function).items()}
        word = function.__qualname__
        if is_installed(code.co_filename):
            word = f"{function.__module__}.{word}"
        else:
            kept[CODE] = code
            reached = reached_globals(code, function.__globals__)
            kept |= {f": global {name}": own for name, own in reached.items()}
        return Part(word, parts=self._named(kept))

    def _class(self, kind: type) -> Part:
        """The attributes, methods and bases of a class of the user's; the name of any other class."""
        if is_installed(file_of_module(kind.__module__)):
            return Part(_name(kind))
        methods = (types.FunctionType, staticmethod, classmethod, property)
        kept = {
            name: own
            for name, own in vars(kind).items()
            if isinstance(own, methods) or not (name.startswith("__") and name.endswith("__"))
            if name != "_abc_impl"
        }
        part = self._attributes(kind.__qualname__, kept)
        part.parts += self._named({f": base {base.__qualname__}": base for base in kind.__bases__})
        return part

    # --- parts of the object that is being read -------------------------------------------------------------

    def _attributes(self, word: str, values: Mapping[str, Any]) -> Part:
        return Part(word, parts=self._named({f".{name}": value for name, value in values.items()}))

    def _named(self, values: Mapping[str, Any]) -> list[tuple[str, Part]]:
        return [(name, self.read(values[name], self._place + name)) for name in sorted(values)]

    def _sequence(self, values: Any) -> list[tuple[str, Part]]:
        return [(f"[{i}]", self.read(one, f"{self._place}[{i}]")) for i, one in enumerate(values)]

    def _pairs(self, pairs: Any) -> list[tuple[str, Part]]:
        parts = []
        for i, (key, value) in enumerate(pairs):
            name = f"[{key!r}]" if type(key) in _SIMPLE else f"[{i}]"
            if type(key) not in _SIMPLE:
                parts.append((f"{name}: key", self.read(key, f"{self._place}{name}: key")))
            parts.append((name, self.read(value, self._place + name)))
        return parts


def _short(word: str) -> str:
    return word if len(word) <= 60 else f"{word[:40]}... {_hash(word.encode())}"


def _name(value: Any) -> str:
    if isinstance(value, types.MethodType):
        return f"{type(value.__self__).__qualname__}.{value.__name__}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if isinstance(value, type | types.BuiltinFunctionType) and module else str(name)


def _hash(data: Any) -> str:
    return hashlib.blake2b(data).hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor, from a contiguous copy: one element may have any strides, views refuse some."""
    dense = tensor.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy()  # (nbytes,)


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _arguments(value: Distribution) -> dict[str, Any]:
    """What a distribution was made of, without the properties that it computed from that and cached."""
    kind = type(value)
    lazy = {name for name in dir(kind) if isinstance(getattr(kind, name, None), lazy_property)}
    kept = {name: own for name, own in vars(value).items() if name not in lazy and name != "_validate_args"}
    if not any(name == "_param" or name.startswith("_unbroadcasted") for name in kept):
        numbers = lazy & set(cast(Any, value).arg_constraints)
        kept |= {name: getattr(value, name) for name in sorted(numbers)}
    return kept
