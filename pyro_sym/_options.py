"""Options that several functions share, declared once and shown in full to whoever reads a signature."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

__all__ = ["write_out"]

F = TypeVar("F", bound=Callable[..., Any])

ENTRY = re.compile(r"^(?P<indent> *)\*\*options: .*\n(?:(?P=indent) +.*\n)*", re.MULTILINE)


def write_out(options: Any, defaults: Mapping[str, Any]) -> Callable[[F], F]:
    """Write a function's ``**options: Unpack[Options]`` out in its signature and docstring.

    Type checkers and editors read the ``TypedDict``; ``help``, notebooks and Sphinx read the signature and
    the docstring at run time. The decorator adds the names, types and defaults (``None`` unless in
    ``defaults``) to the signature, and replaces the entry ``**options`` of the docstring by the
    ``Attributes`` of that of ``Options``. It returns the function itself, so that a call costs what it did
    before.
    """
    entries = textwrap.dedent(inspect.cleandoc(options.__doc__ or "").partition("Attributes:\n")[2])
    types = get_type_hints(options)

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation
            )
            for name, annotation in types.items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
        own = {name: hint for name, hint in function.__annotations__.items() if name != "options"}
        function.__annotations__ = {**own, **types}
        function.__doc__ = ENTRY.sub(
            lambda entry: textwrap.indent(entries, entry["indent"]) + "\n", function.__doc__ or ""
        )
        return function

    return decorate
