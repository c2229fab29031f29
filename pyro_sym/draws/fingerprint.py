"""What tells two runs apart: code, numbers and data that a model can reach, as words by place."""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import threading
import types
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.utils import lazy_property
from torch.utils.data import DataLoader

from pyro_sym.draws.referenced_code import (
    cell_contents,
    code_digest,
    file_of_module,
    is_installed,
    reached_globals,
)

__all__ = ["CODE", "COLLAPSED", "Fingerprint", "Part", "fingerprint"]

# A fingerprint names so many places; what lies deeper is one digest of the place above it.
MAX_WORDS = 400
# Beyond so many objects or bytes, or so deep, nothing is read any more, and the fingerprint says so.
MAX_OBJECTS, MAX_DEPTH, MAX_BYTES = 50_000, 60, 2**34
# Tensors of more values are read once more only if torch says that they were written to.
LARGE = 2**20
COLLAPSED = ", with all in it "
"""What stands before the digest of a place and all that is below it."""
CODE = ": code"
"""The end of the name of a place that holds byte code, which differs between versions of Python."""

_ATOMS: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    type(NotImplemented),
    range,
)
_ATOMS += (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, np.generic)
# They are part of no computation, and can't be compared.
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)
_CACHES = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes})


@dataclass(eq=False)
class Part:
    """A value: what it is in a word, a digest of its own contents, and its parts by the place they are at."""

    word: str
    digest: str = ""
    parts: list[tuple[str, Part]] = field(default_factory=list)
    # The name of a module's parameter ends with this path.
    parameter: str | None = None


def _kept(part: Part, left: tuple[str, ...]) -> list[tuple[str, Part]]:
    """The parts of a part, without parameters whose paths end in one of these ways."""
    return [
        (name, own) for name, own in part.parts if own.parameter is None or not own.parameter.endswith(left)
    ]


def _digest(part: Part, left: tuple[str, ...] = (), known: dict[int, str] | None = None) -> str:
    """A digest of a part and all that is in it."""
    known = {} if known is None else known
    if id(part) not in known:
        within = "".join(f"\0{name}\0{_digest(own, left, known)}" for name, own in _kept(part, left))
        known[id(part)] = _hash(f"{part.word}\0{part.digest}{within}".encode())
    return known[id(part)]


class Fingerprint:
    """Values as they were at one moment, in words that are the same in every process.

    Args:
        roots: names and parts.
        doubts: places that can't be read, with the reason.
        handlers: places of Pyro's effect handlers, which keep what they computed.
        tensors: digests of large tensors, to use again for those that did not change.
    """

    def __init__(
        self,
        roots: list[tuple[str, Part]],
        doubts: list[str],
        handlers: list[str],
        tensors: dict[int, tuple[Tensor, int, str]],
    ) -> None:
        self._roots = roots
        self.doubts = doubts
        self.handlers = handlers
        self.tensors = tensors

    def words(self, leave_out: Collection[str] = ()) -> dict[str, str]:
        """Say what is at each place.

        Args:
            leave_out: names of parameters of modules that make no difference, in whatever module they are.

        Returns:
            Words by place, as ``{"model": "Model", "model.loc": "0.5", ...}``. At most ``MAX_WORDS`` places
            are named, those nearest to the roots; the others are digested into the place above them.
        """
        left = tuple(f".{name}" for name in leave_out)
        digests: dict[int, str] = {}
        words: dict[str, str] = {}
        level = list(self._roots)
        for place, part in level:
            words[place] = part.word
        while level:
            deeper: list[tuple[str, Part]] = []
            for place, part in level:
                children = [(place + name, child) for name, child in _kept(part, left)]
                if not children:
                    words[place] = f"{part.word} {part.digest}".rstrip()
                elif len(words) + len(children) > MAX_WORDS:
                    words[place] = f"{part.word}{COLLAPSED}{_digest(part, left, digests)}"
                else:
                    words.update((name, child.word) for name, child in children)
                    deeper += children
            level = deeper
        return words


def fingerprint(roots: Mapping[str, Any], before: Fingerprint | None = None) -> Fingerprint:
    """Read values, and all that they reach.

    Tensors and arrays are read value by value; functions and classes of the user by their code, defaults,
    what they close over and the global variables that they name; functions and classes of installed packages
    by their names. Other objects are read by what ``pickle`` would keep of them: their attributes and items.
    The order of items in a ``dict`` counts, that in a ``set`` does not.

    What changes nothing is left out: locks, weak caches, the cache of ``functools.lru_cache``, and the
    random generators of a ``DataLoader``, which a run restores.

    Args:
        roots: the values by name.
        before: an earlier fingerprint; tensors that were not written to since are not read again.

    Returns:
        The fingerprint. Its ``doubts`` name what can't be read, such as an open file.

    Example:
        >>> def model(scale=1.0):
        ...     pyro.sample("m", dist.Normal(0.0, scale))
        >>> words = fingerprint({"model": model}).words()
        >>> words["model"], words["model: default scale"]
        ('model', '1.0')
    """
    reader = _Reader({} if before is None else before.tensors)
    parts = [(name, reader.read(value, name, 0)) for name, value in roots.items()]
    return Fingerprint(parts, reader.doubts, reader.handlers, reader.tensors)


class _Reader:
    """Turns values into parts, each object once."""

    def __init__(self, tensors: dict[int, tuple[Tensor, int, str]]) -> None:
        self.doubts: list[str] = []
        self.handlers: list[str] = []
        self.tensors: dict[int, tuple[Tensor, int, str]] = {}
        self._known = tensors
        self._parts: dict[int, Part] = {}
        self._alive: list[Any] = []  # an id is that of one object for as long as the object lives
        self._within: list[int] = []
        self._bytes = 0

    def read(self, value: Any, place: str, depth: int) -> Part:
        """Read one value."""
        if isinstance(value, _ATOMS) and not isinstance(value, enum.Enum):
            return _atom(value)
        key = id(value)
        if key in self._within:  # as in a function that closes over itself
            return Part(f"round {len(self._within) - self._within.index(key)}")
        if key in self._parts:
            return self._parts[key]
        if len(self._parts) >= MAX_OBJECTS or depth > MAX_DEPTH:
            self._doubt_the_rest(place)
            return Part(_name(value))
        self._alive.append(value)
        self._within.append(key)
        try:
            part = self._parts[key] = self._part(value, place, depth + 1)
        finally:
            self._within.pop()
        return part

    def _part(self, value: Any, place: str, depth: int) -> Part:
        match value:
            case Tensor():
                return self._tensor(value, place)
            case np.ndarray():
                return self._array(value, place, depth)
            case list() | tuple() | set() | frozenset() if type(value) in (list, tuple, set, frozenset):
                return self._collection(value, place, depth)
            case dict() | types.MappingProxyType() if type(value) in (dict, types.MappingProxyType):
                keys = ", ".join(repr(key) if type(key) in _SIMPLE else "..." for key in value)
                own = self._pairs(value.items(), place, depth)
                return Part(f"{type(value).__name__} of {_short(keys) or 'nothing'}", parts=own)
            case bytearray() | memoryview():
                return Part(f"{type(value).__name__} of {len(value)}", _hash(bytes(value)))
            case nn.Module():
                return self._module(value, place, depth)
            case Distribution():
                return self._object(value, place, depth, _numbers(value))
            case Transform():
                kept = {name: own for name, own in vars(value).items() if name not in ("_inv", "_cached_x_y")}
                if type(value).__name__ == "_InverseTransform":
                    kept["_inv"] = value._inv
                return self._object(value, place, depth, kept)
            case DataLoader():
                names = ("batch_size", "drop_last", "collate_fn", "dataset", "sampler", "batch_sampler")
                return self._object(value, place, depth, {name: getattr(value, name) for name in names})
            case torch.utils.data.Sampler():
                kept = {name: own for name, own in vars(value).items() if not _is_generator(own)}
                return self._object(value, place, depth, kept)
            case functools.partial():
                own = self._sequence(value.args, place, depth)
                own += self._pairs(sorted(value.keywords.items()), place, depth)
                own += self._named({": function": value.func}, place, depth)
                return Part(f"partial of {_name(value.func)}", parts=own)
            case types.MethodType():
                own = self._named({".__self__": value.__self__}, place, depth)
                own += self._named({".__func__": value.__func__}, place, depth)
                return Part(_name(value), parts=own)
            case types.FunctionType():
                return self._function(value, place, depth)
            case types.CodeType():
                return Part("code", code_digest(value))
            case type():
                return self._class(value, place, depth)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                owner = getattr(value, "__self__", None)
                own = [] if isinstance(owner, types.ModuleType | type | None) else [owner]
                return Part(_name(value), parts=self._sequence(own, place, depth))
            case types.ModuleType():
                return Part(value.__name__)
            case property():
                return self._children(
                    "property", {n: getattr(value, n) for n in ("fget", "fset")}, place, depth
                )
            case staticmethod() | classmethod():
                return self._children(type(value).__name__, {"__func__": value.__func__}, place, depth)
            case weakref.ref():
                return self._children("weak reference", {"()": value()}, place, depth)
            case torch.Generator():
                return self._children("Generator", {"state": value.get_state()}, place, depth)
        if isinstance(value, _LOCKS + _CACHES):
            return Part(type(value).__qualname__)
        if isinstance(value, functools._lru_cache_wrapper | functools.cached_property):
            wrapped = getattr(value, "__wrapped__", None) or cast(Any, value).func
            return self._children(type(value).__qualname__, {"__wrapped__": wrapped}, place, depth)
        if isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType):
            return Part(value.__name__)
        if isinstance(value, enum.Enum):
            return Part(f"{type(value).__qualname__}.{value.name}")
        if isinstance(value, Messenger):
            self.handlers.append(place)
        return self._pickled(value, place, depth)

    def _is_too_much(self, size: int, place: str) -> bool:
        """Whether so many bytes are more than are still read."""
        if self._bytes + size > MAX_BYTES:
            self._doubt_the_rest(place)
            return True
        self._bytes += size
        return False

    def _doubt_the_rest(self, place: str) -> None:
        if not self.doubts or not self.doubts[-1].endswith("too much to read"):
            self.doubts.append(f"{place} and what comes after it: too much to read")

    # --- values ---------------------------------------------------------------------------------------------

    def _tensor(self, value: Tensor, place: str) -> Part:
        word = f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
        if value.device.type == "meta" or nn.parameter.is_lazy(value):
            return Part(word if value.device.type == "meta" else type(value).__name__)
        version = -1 if value.is_inference() else value._version
        known = self._known.get(id(value))
        large = value.numel() > LARGE  # some kernels, as of batch norm, write without a new version
        if large and known is not None and known[0] is value and known[1] == version >= 0:
            digest = known[2]
        elif self._is_too_much(value.numel() * value.element_size(), place):
            return Part(word)
        else:
            dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
            digest = _hash(_bytes(dense.dequantize() if dense.is_quantized else dense))
            if value.numel() == 1 and not value.is_quantized:
                digest = f"{dense.item()!r} {digest}"
        if large:
            self.tensors[id(value)] = (value, version, digest)
        return Part(word, digest)

    def _array(self, value: np.ndarray[Any, Any], place: str, depth: int) -> Part:
        word = f"{value.dtype} array of shape {value.shape}"
        if value.dtype.hasobject:
            return Part(word, parts=self._sequence(value.ravel().tolist(), place, depth))
        if self._is_too_much(value.nbytes, place):
            return Part(word)
        plain = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        kept = {"mask": np.ma.getmaskarray(value)} if isinstance(value, np.ma.MaskedArray) else {}
        return Part(word, _hash(plain), self._named(_dotted(kept), place, depth))

    def _collection(self, value: Any, place: str, depth: int) -> Part:
        word = f"{type(value).__name__} of {len(value)}"
        if _SIMPLE.issuperset(map(type, value)) and len(value) > 8:
            words = map(repr, value)
            return Part(word, _hash("\0".join(sorted(words) if _is_set(value) else words).encode()))
        if not _is_set(value):
            return Part(word, parts=self._sequence(value, place, depth))
        parts = [self.read(one, place, depth) for one in value]
        return Part(word, _hash("".join(sorted(_digest(part) for part in parts)).encode()))

    def _object(self, value: Any, place: str, depth: int, kept: Mapping[str, Any]) -> Part:
        return self._children(type(value).__qualname__, {"__class__": type(value), **kept}, place, depth)

    def _pickled(self, value: Any, place: str, depth: int) -> Part:
        """What ``pickle`` would keep, or the attributes of what refuses to be pickled."""
        word = type(value).__qualname__
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # whatever a class raises that is not to be pickled
            if isinstance(attributes := getattr(value, "__dict__", None), dict) and not _is_handle(value):
                return self._object(value, place, depth, attributes)
            self.doubts.append(f"{place}: a {type(value).__module__}.{word}")
            return Part(word)
        if isinstance(reduced, str):
            return Part(f"{word} {reduced}")
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        own = self._named({".__class__": type(value)}, place, depth)
        if make is not getattr(copyreg, "__newobj__", None) and make is not type(value):
            own += self._named({": made by": make}, place, depth)
        own += self._sequence([one for one in arguments if one is not type(value)], place, depth)
        slots: Any = None
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state, slots = state
        for some in (state, slots):
            if type(some) is dict and all(isinstance(name, str) for name in some):
                kept = {name: one for name, one in some.items() if not _is_cached(value, name)}
                own += self._named(_dotted(kept), place, depth)
            elif some is not None:
                own += self._named({": state": some}, place, depth)
        own += self._sequence([] if items is None else items, place, depth)
        own += self._pairs([] if pairs is None else pairs, place, depth)
        return Part(word, parts=own)

    def _module(self, module: nn.Module, place: str, depth: int) -> Part:
        if (original := vars(module).get("_modules", {}).get("_orig_mod")) is not None:  # by torch.compile
            return self.read(original, place, depth)
        base = vars(nn.Module())
        kept = {
            name: own
            for name, own in vars(module).items()
            if name not in base and name != "_pyro_context" and not _is_cached(module, name)
        }
        kept |= {"training": module.training, **module._buffers, **module._modules}
        kept |= {n: list(hooks.values()) for n in _HOOKS if (hooks := getattr(module, n, None))}
        part = self._object(module, place, depth, kept)
        for name, parameter in module._parameters.items():
            at = f"{place}.{name}"
            if parameter is not None:
                own = self._tensor(parameter, at)
                part.parts.append((f".{name}", Part(own.word, own.digest, own.parts, at)))
        return part

    # --- code -----------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, place: str, depth: int) -> Part:
        if (original := vars(function).get("_torchdynamo_orig_callable")) is not None:  # by torch.compile
            return self.read(original, place, depth)
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        kept = {f": variable {name}": cell_contents(cell) for name, cell in cells}
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        kept |= {f": default {name}": own for name, own in zip(names, defaults, strict=True)}
        kept |= {f": default {name}": own for name, own in (function.__kwdefaults__ or {}).items()}
        kept |= _dotted(vars(function))
        if is_installed(code.co_filename):
            return Part(
                f"{function.__module__}.{function.__qualname__}", parts=self._named(kept, place, depth)
            )
        kept[CODE] = code
        for name, own in reached_globals(code, function.__globals__).items():
            kept[f": global {name}"] = own
        return Part(function.__qualname__, parts=self._named(kept, place, depth))

    def _class(self, kind: type, place: str, depth: int) -> Part:
        """The attributes and methods of a class, if it is the user's, and its bases."""
        if is_installed(file_of_module(kind.__module__)):
            return Part(_name(kind))
        methods = (types.FunctionType, staticmethod, classmethod, property)
        kept = {
            name: own
            for name, own in vars(kind).items()
            if isinstance(own, methods) or not (name.startswith("__") and name.endswith("__"))
            if name != "_abc_impl"
        }
        part = self._children(kind.__qualname__, kept, place, depth)
        bases = {f": base {base.__qualname__}": base for base in kind.__bases__}
        part.parts += self._named(bases, place, depth)
        return part

    # --- parts ----------------------------------------------------------------------------------------------

    def _children(self, word: str, kept: Mapping[str, Any], place: str, depth: int) -> Part:
        return Part(word, parts=self._named(_dotted(kept), place, depth))

    def _named(self, values: Mapping[str, Any], place: str, depth: int) -> list[tuple[str, Part]]:
        return [(name, self.read(values[name], place + name, depth)) for name in sorted(values)]

    def _sequence(self, values: Any, place: str, depth: int) -> list[tuple[str, Part]]:
        return [(f"[{i}]", self.read(one, f"{place}[{i}]", depth)) for i, one in enumerate(values)]

    def _pairs(self, pairs: Any, place: str, depth: int) -> list[tuple[str, Part]]:
        parts = []
        for i, (key, value) in enumerate(pairs):
            simple = type(key) in _SIMPLE
            name = f"[{key!r}]" if simple else f"[{i}]"
            if not simple:
                parts.append((f"{name}: key", self.read(key, f"{place}{name}: key", depth)))
            parts.append((name, self.read(value, place + name, depth)))
        return parts


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _atom(value: Any) -> Part:
    return Part(_short(repr(value)))


def _short(word: str) -> str:
    return word if len(word) <= 60 else f"{word[:40]}... {_hash(word.encode())}"


def _name(value: Any) -> str:
    if isinstance(value, types.MethodType):
        return f"{type(value.__self__).__qualname__}.{value.__name__}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    module = getattr(value, "__module__", None)
    return f"{module}.{name}" if isinstance(value, type | types.BuiltinFunctionType) and module else str(name)


def _dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f".{name}": value for name, value in values.items()}


def _hash(data: Any) -> str:
    return hashlib.blake2b(data).hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    # A copy: one element is contiguous whatever its strides are, and a view of bytes minds them.
    dense = tensor.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).numpy()


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _is_set(value: Any) -> bool:
    return isinstance(value, set | frozenset)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _is_handle(value: Any) -> bool:
    """Whether an object stands for something outside of Python, as an open file does."""
    return hasattr(value, "fileno") or hasattr(value, "__next__")


def _numbers(value: Distribution) -> dict[str, Any]:
    """What a distribution was made of, without what it computed from that and keeps."""
    kind = type(value)
    lazy = {name for name in dir(kind) if isinstance(getattr(kind, name, None), lazy_property)}
    kept = {name: own for name, own in vars(value).items() if name not in lazy and name != "_validate_args"}
    if not any(name == "_param" or name.startswith("_unbroadcasted") for name in kept):
        numbers = lazy & set(cast(Any, value).arg_constraints)
        kept |= {name: getattr(value, name) for name in sorted(numbers)}
    return kept
