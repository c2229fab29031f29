"""API pages show what a reader can pass: types and options spelled out, private bases left out."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sphinx.application import Sphinx

import pyro_sym

KEYWORDS = re.compile(
    r"^( *)\*\*options: .*(?:\n\1 +.*)*", re.MULTILINE
)  # the entry in a docstring
ENTRY = r"^( *){}: (.*(?:\n\1 +.*)*)"


def spell_out(app: Sphinx, function: Callable[..., Any], bound: bool) -> None:
    """Put types and options in place of their names, which autodoc leaves as they are."""
    with suppress(TypeError, AttributeError, StopIteration):
        function.__annotations__ = hints(function)
        if not (options := options_of(function.__annotations__)):
            return
        signature, own = inspect.signature(function), function.__doc__ or ""
        named = {n: p for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        for name, parameter in home(options).items():
            # With an entry of its own it has a default of its own.
            default = ... if re.search(ENTRY.format(name), own, re.MULTILINE) else parameter.default
            named.setdefault(name, parameter.replace(default=default))
        function.__signature__ = signature.replace(parameters=list(named.values()))  # type: ignore[attr-defined]


def hints(function: Any) -> dict[str, Any]:
    """The annotations of a function, names that are imported for type checkers only included."""
    known: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(function, localns=known, include_extras=True)
        except NameError as error:
            modules = [
                module for name, module in sys.modules.items() if name.startswith("pyro_sym.")
            ]
            known[error.name] = next(vars(m)[error.name] for m in modules if error.name in vars(m))


def options_of(types: dict[str, Any]) -> Any:
    """``Options`` among the annotations of a function with ``**options: Unpack[Options]``, or None."""
    for hint in types.values():
        if typing.get_origin(hint) is typing.Unpack:
            return typing.get_args(hint)[0]
    return None


def home(options: Any) -> dict[str, inspect.Parameter]:
    """The parameters that options are for the function or class that spells them out, beside ``Options``."""
    for member in vars(sys.modules[options.__module__]).values():
        function = vars(member).get("__init__") if inspect.isclass(member) else member
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters
            if set(options.__annotations__) <= set(parameters):
                types = hints(function)
                return {
                    n: parameters[n].replace(annotation=types[n]) for n in options.__annotations__
                }
    raise LookupError(f"no function of {options.__module__} spells out {options.__qualname__}")


def entries(options: Any) -> dict[str, str]:
    """What the documentation says of each option.

    That is an entry for each in the docstring of ``Options`` or of a public class, or words in that class's
    entry of ``**options``, each after the option's name in code.
    """
    names = list(options.__annotations__)
    for owner in (options, *(getattr(pyro_sym, name) for name in pyro_sym.__all__)):
        text = inspect.getdoc(owner) or ""
        found = {name: re.search(ENTRY.format(name), text, re.MULTILINE) for name in names}
        if all(found.values()):
            return {name: match[2] for name, match in found.items() if match}
        if keywords := KEYWORDS.search(text):
            _, *parts = re.split(r"``(\w+)``: ", keywords[0])
            if set(names) <= set(parts[::2]):
                return dict(zip(parts[::2], parts[1::2], strict=True))
    raise LookupError(f"no docstring describes each of {names}")


def write_out(app: Sphinx, what: str, name: str, obj: Any, _: Any, lines: list[str]) -> None:
    """Put an entry for each option in place of the entry of ``**options``."""
    function = obj.__init__ if inspect.isclass(obj) else getattr(obj, "__func__", obj)
    keywords = KEYWORDS.search(text := "\n".join(lines))
    if keywords is None or not inspect.isfunction(function):
        return
    if options := options_of(hints(function)):
        written = [
            f"{keywords[1]}{option}: {' '.join(entry.split())}"
            for option, entry in entries(options).items()
            if not re.search(ENTRY.format(option), text, re.MULTILINE)
        ]
        lines[:] = (text[: keywords.start()] + "\n".join(written) + text[keywords.end() :]).split(
            "\n"
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
    app.connect(
        "autodoc-process-docstring", write_out, priority=400
    )  # before napoleon reads the sections
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-skip-member", own_members)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
