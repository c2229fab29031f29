"""The private interfaces of torch and Pyro that the package uses, each with what is done without it.

docs/architecture.md lists them; ``tests/test_private.py`` takes each away in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import getattr_static
from itertools import count
from typing import Any, cast

import pyro
import torch
from pyro.poutine import messenger, runtime
from torch import Tensor
from torch.distributions import Distribution
from torch.fx.node import map_aggregate

from pyro_sym.errors import NoDensityError

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "active_handlers",
    "called_guide",
    "constraint_of",
    "direct_call",
    "existing",
    "forget_inverse",
    "has_run",
    "is_mutable",
    "mask_of_distribution",
    "operands_of",
    "parts_of",
    "replaced_in_this_thread",
    "returns_view",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unvalidated",
    "unwrapped",
    "without_validation",
]

# Nested lists, tuples and dicts of values


try:
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
except ImportError:  # lists, tuples and dicts only

    @dataclass(frozen=True)
    class TreeSpec:  # type: ignore[no-redef]
        """A nested container with numbers in place of its leaves."""

        tree: Any = field(compare=False)
        text: str

    def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:  # type: ignore[misc]
        """The container of a function's values at the leaves."""
        return map_aggregate(tree, function)

    def tree_leaves(tree: Any) -> list[Any]:  # type: ignore[misc]
        """The leaves of a container."""
        leaves: list[Any] = []
        map_aggregate(tree, leaves.append)
        return leaves

    def tree_flatten(tree: Any) -> tuple[list[Any], Any]:  # type: ignore[misc]
        """The leaves of a container, and what it is without them."""
        numbers = count()
        numbered = map_aggregate(tree, lambda leaf: next(numbers))
        return tree_leaves(tree), TreeSpec(numbered, repr(numbered))  # type: ignore[call-arg]

    def tree_unflatten(leaves: Sequence[Any], spec: Any) -> Any:  # type: ignore[misc]
        """A container of other leaves."""
        return map_aggregate(spec.tree, lambda number: leaves[cast(int, number)])


# Operations of torch


try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # nothing can be recorded, so models are run as they are

    class TorchDispatchMode:  # type: ignore[no-redef]
        """A mode that can't be entered."""

        def __enter__(self) -> Any:
            raise RuntimeError(f"torch {torch.__version__} has no TorchDispatchMode to record operations by")

        def __exit__(self, *error: Any) -> None: ...


OpOverload: Any = type(torch.ops.aten.add.Tensor)
"""The class of operations such as ``aten.add.Tensor``."""


def existing(*names: str) -> frozenset[Any]:
    """The operations of these names, such as ``"view.default"``, as far as this version of torch has them."""
    pairs = (name.split(".") for name in names)
    packets = ((getattr(torch.ops.aten, packet, None), overload) for packet, overload in pairs)
    return frozenset(op for packet, name in packets if (op := getattr(packet, name, None)) is not None)


def is_mutable(op: Any) -> bool:
    """Whether an operation writes into its first operand; told by its name where it has no schema."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        name, _, overload = op.name().partition(".")
        return name.endswith("_") or "out" in overload
    return cast(bool, schema.is_mutable)


def returns_view(op: Any) -> bool:
    """Whether an operation returns a view of its first operand; assumed where it has no schema."""
    schema = getattr(op, "_schema", None)
    return schema is None or any(out.alias_info is not None for out in schema.returns)


def operands_of(op: Any) -> Sequence[Any]:
    """The operands that an operation declares; none where it has no schema, and then no rule fits it."""
    schema = getattr(op, "_schema", None)
    return () if schema is None else schema.arguments


def direct_call(op: Any) -> Callable[..., Any]:
    """What an operation calls in the end, which takes less time than the operation; else the operation."""
    return cast(Callable[..., Any], getattr(op, "_op", op))


# Functions replaced for a while

_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


class _Patch:
    """A dispatcher in place of a function: each thread calls its own replacement, or else the original."""

    def __init__(self, owner: Any, name: str) -> None:
        self.static = getattr_static(owner, name)
        self.original = getattr(owner, name)
        self.own = threading.local()
        self.users = 0

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return self.current()(*args, **kwargs)

        setattr(owner, name, staticmethod(dispatch) if isinstance(self.static, staticmethod) else dispatch)

    def replacements(self) -> list[Callable[..., Any]]:
        """Those of this thread, the latest last."""
        return cast(list[Callable[..., Any]], self.own.__dict__.setdefault("replacements", []))

    def current(self) -> Callable[..., Any]:
        """What this thread calls."""
        return (self.replacements() or [self.original])[-1]


@contextmanager
def replaced_in_this_thread(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a function of a module or class in this thread; other threads go on calling the original.

    ``make`` takes the function and returns what is called instead. If there is none, nothing is replaced.
    """
    if not hasattr(owner, name):
        yield
        return
    key = (owner, name)
    with _lock:
        patch = _patches.get(key) or _patches.setdefault(key, _Patch(owner, name))
        patch.users += 1
    patch.replacements().append(make(patch.current()))
    try:
        yield
    finally:
        patch.replacements().pop()
        with _lock:
            patch.users -= 1
            if patch.users == 0:
                setattr(owner, name, _patches.pop(key).static)


_users: list[int] = []  # the thread of each context that keeps validation off
_settings = ExitStack()


@contextmanager
def unvalidated() -> Iterator[None]:
    """Switch validation off, in this thread also that of existing distributions: it branches on values.

    Pyro's own switch is one for all threads. It goes back when the last context is left.
    """
    with replaced_in_this_thread(Distribution, "_validate_sample", lambda _: lambda self, value: None):
        with _lock:
            if not _users:
                _settings.enter_context(pyro.validation_enabled(False))
            _users.append(threading.get_ident())
        try:
            yield
        finally:
            with _lock:
                _users.pop()
                if not _users:
                    _settings.close()


# Handlers, guides and modules of Pyro


def active_handlers() -> Sequence[Any] | None:
    """The effect handlers in force, the outermost first; ``None`` where Pyro doesn't say."""
    return getattr(runtime, "_PYRO_STACK", None)


def unwrapped(fn: Any) -> tuple[Any, Callable[..., Any]] | None:
    """The outermost handler around a function and the function inside of it; ``None`` if none is seen."""
    bound, wrap = (getattr(messenger, name, None) for name in ("_bound_partial", "_context_wrap"))
    inner = fn.func if bound is not None and isinstance(fn, bound) else fn
    if wrap is None or not (isinstance(inner, partial) and inner.func is wrap):
        return None
    handler, function = inner.args
    return handler, function


def mask_of_distribution(distribution: Any) -> Tensor | bool:
    """The mask of a ``MaskedDistribution``, its one boolean tensor if renamed; ``True`` of others."""
    if not isinstance(distribution, pyro.distributions.MaskedDistribution):
        return True
    attributes = vars(distribution)
    if "_mask" in attributes:
        return cast("Tensor | bool", attributes["_mask"])
    return next(a for a in attributes.values() if isinstance(a, Tensor) and a.dtype == torch.bool)


def constraint_of(store: Any, name: str, default: Any) -> Any:
    """The constraint of a parameter of a store, or that of its statement."""
    return getattr(store, "_constraints", {}).get(name, default)


def parts_of(guide: Any, *names: str) -> list[Any]:
    """Attributes of an autoguide that its density is made of; a ``NoDensityError`` if it lacks one."""
    for name in names:
        if not hasattr(guide, name):
            kind, version = type(guide).__name__, pyro.__version__
            raise NoDensityError(f"{kind} of Pyro {version} has no {name}, which its density is made of")
    return [getattr(guide, name) for name in names]


def called_guide(part: Any) -> Callable[..., Any]:
    """The function inside of an ``AutoCallable``, or what calls it."""
    return cast(Callable[..., Any], getattr(part, "_guide", part.forward))


def forget_inverse(transform: Any) -> None:
    """Let a copy of a transform make an inverse of its own."""
    if hasattr(transform, "_inv"):
        transform._inv = None


def without_validation(distribution: Any) -> None:
    """Switch the validation of one distribution off; harmless if it has another switch."""
    distribution._validate_args = False


def has_run(module: Any) -> bool:
    """Whether a ``PyroModule`` has run, so that its parameters have names; ``False`` if it doesn't say."""
    return bool(getattr(getattr(module, "_pyro_context", None), "used", False))
