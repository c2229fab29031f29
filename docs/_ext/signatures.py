"""API pages speak of what a reader can import: aliases of types spelled out, private bases passed over."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sphinx.application import Sphinx


def spell_out(app: Sphinx, function: Callable[..., Any], bound: bool) -> None:
    """Put types in place of their names, which autodoc leaves as they are in the constructors of classes."""
    known: dict[str, Any] = {}
    with suppress(TypeError, AttributeError, StopIteration):
        while True:
            try:
                function.__annotations__ = typing.get_type_hints(
                    function, localns=known, include_extras=True
                )
                return
            except NameError as error:  # imported for type checkers only
                modules = [
                    module for name, module in sys.modules.items() if name.startswith("pyro_sym.")
                ]
                known[error.name] = next(
                    vars(m)[error.name] for m in modules if error.name in vars(m)
                )


def public_bases(app: Sphinx, name: str, obj: type, options: Any, bases: list[Any]) -> None:
    """Put the bases of a private base in its place."""
    while any(base.__name__.startswith("_") for base in bases if isinstance(base, type)):
        at = next(i for i, base in enumerate(bases) if base.__name__.startswith("_"))
        bases[at : at + 1] = bases[at].__bases__


def own_members(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what other packages define, and fields of named tuples: the list of attributes has them."""
    foreign = not (getattr(obj, "__module__", None) or "pyro_sym").startswith("pyro_sym")
    field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if foreign or field else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-before-process-signature", spell_out)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", own_members)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
