"""The networks that a model calls, with the inputs that it calls them on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from pyro_sym.model.program import Program

__all__ = ["Network", "networks"]


@dataclass(frozen=True)
class Network:
    """A module whose parameters are latent sites, with the inputs of its first call."""

    module: nn.Module
    prefix: str  # the site of its parameter "weight" is called prefix + "weight"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def networks(program: Program) -> list[Network]:
    """The outermost modules with parameters that are sites of a model, in the order in which it calls them.

    Modules in closures and under ``functional_call`` are found. Networks made of ``PyroSample``s are not:
    torch does not count those as parameters. The model is run twice.
    """
    values, indices = program.draw()
    prefixes: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()

    def look(module: nn.Module, args: Any) -> None:
        prefix = None if module in inside else _prefix(module, program.latents)
        if prefix is not None:
            prefixes.setdefault(module, prefix)
            inside.update(module.modules())

    # A global hook, because we only learn which modules exist when they are called ...
    with _hooks([register_module_forward_pre_hook(look)]):
        program.trace(values, indices)
    found: dict[nn.Module, Network] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(module, Network(module, prefixes[module], args, kwargs))

    # ... and then hooks of their own, because only those get keyword arguments.
    with _hooks([m.register_forward_pre_hook(note, with_kwargs=True) for m in prefixes]):
        program.trace(values, indices)
    return list(found.values())


def _prefix(module: nn.Module, sites: Collection[str]) -> str | None:
    """The prefix under which most parameters of a module are sites; None if none is."""
    if any(getattr(part, "_pyro_samples", None) for part in module.modules()):
        return None
    names = [name for name, _ in module.named_parameters()]
    prefixes = {site.removesuffix(name) for name in names for site in sites if site.endswith(name)}
    return max(prefixes, key=lambda prefix: sum(prefix + name in sites for name in names), default=None)


@contextmanager
def _hooks(handles: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
