"""Selecting parameters of a network by name, type or instance."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["Selector", "named", "select"]

Selector = str | type[nn.Module] | nn.Module | nn.Parameter
"""Parameters of a network: by their name, a pattern of it (``"*.bias"``) or the name of a module; all in
modules of a type; all in a module; one."""


def named(selector: str, name: str) -> bool:
    """Whether a selector is the parameter's name, a pattern of it, or the name of a module that holds it."""
    return fnmatchcase(name, selector) or name.startswith(f"{selector}.")


def select(net: nn.Module, selectors: Selector | Sequence[Selector]) -> frozenset[str]:
    """The names of the parameters that any selector selects; a tied one is selected by any of its names."""
    several = selectors if isinstance(selectors, (list, tuple)) else (selectors,)
    return frozenset().union(*(_selected(net, selector) for selector in several))


def _selected(net: nn.Module, selector: Selector) -> frozenset[str]:
    chosen = {id(parameter) for parameter in _parameters(net, selector)}
    keys = {name: id(parameter) for name, parameter in net.named_parameters()}
    if names := frozenset(name for name, key in keys.items() if key in chosen):
        return names
    raise ValueError(f"{selector!r} selects no parameter of the network; its parameters are {list(keys)}")


def _parameters(net: nn.Module, selector: Selector) -> list[nn.Parameter]:
    match selector:
        case str():
            everywhere = net.named_parameters(remove_duplicate=False)
            return [parameter for name, parameter in everywhere if named(selector, name)]
        case nn.Parameter():
            return [selector]
        case nn.Module():
            return list(selector.parameters())
        case type() if issubclass(selector, nn.Module):
            modules = [module for module in net.modules() if isinstance(module, selector)]
            return [parameter for module in modules for parameter in module.parameters()]
    raise TypeError(
        f"{selector!r} selects no parameters; pass a name, a pattern such as '*.bias', a type of module, a "
        "module of the network, or one of its parameters"
    )
