"""The global variables that code refers to, and which code is the user's."""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch

__all__ = ["cell_contents", "code_digest", "file_of_module", "is_installed", "reached_globals"]


def cell_contents(cell: types.CellType) -> Any:
    """The value of a closure's cell; ``None`` if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def code_digest(code: types.CodeType) -> str:
    """A digest of byte code, without file names and line numbers."""
    consts = list(map(_constant, code.co_consts))
    flags = code.co_flags & 0x0F  # *args, **kwargs and kinds of scope
    names = (code.co_names, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return hashlib.blake2b(repr((code.co_code, names, consts, flags)).encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return repr(sorted(map(_constant, value)))
    return repr(tuple(map(_constant, value))) if isinstance(value, tuple) else repr(value)


@functools.cache
def _global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of globals that code looks up, of modules that it imports, and all names that it uses."""
    looked_up, imported, used = set(), set(), set(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            looked_up.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            for names, inner in zip((looked_up, imported, used), _global_names(const), strict=True):
                names |= inner
    return frozenset(looked_up), frozenset(imported), frozenset(used)


def reached_globals(code: types.CodeType, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Global variables that code refers to, and attributes of the user's modules that it refers to."""
    looked_up, imported, used = _global_names(code)
    found = {name: scope[name] for name in sorted(looked_up) if name in scope}
    modules = {name: own for name, own in found.items() if isinstance(own, types.ModuleType)}
    for name in sorted(imported):
        full = f"{scope.get('__package__') or ''}.{name}"  # of an import like "from .data import x"
        modules |= {one: sys.modules[one] for one in (name, full) if one in sys.modules}
    pending = list(modules.items())
    for place, module in pending:
        found.pop(place, None)
        if is_installed(getattr(module, "__file__", None) or file_of_module(module.__name__)):
            continue
        for name in sorted(used & vars(module).keys()):
            own = vars(module)[name]
            if not isinstance(own, types.ModuleType):
                found[f"{place}.{name}"] = own
            elif own not in [known for _, known in pending]:
                pending.append((f"{place}.{name}", own))
    return found


def file_of_module(module: str) -> str | None:
    """The file of a module; ``None`` for one of the user's without a file, as in a notebook."""
    found = sys.modules.get(module)
    if module == "__main__" or found is None:
        return None
    if (file := getattr(found, "__file__", None)) is not None:
        return str(file)
    return "<frozen built-in>" if getattr(found, "__spec__", None) is not None else None


@functools.cache
def is_installed(file: str | None) -> bool:
    """Whether code belongs to Python or an installed package, so that its name identifies it."""
    if file is None or file.startswith("<"):
        return file is not None and file.startswith("<frozen")
    path = Path(file)
    in_packages = "site-packages" in path.parts or "dist-packages" in path.parts
    return in_packages or not _folders().isdisjoint(path.parents)


@functools.cache
def _folders() -> set[Path]:
    """The folders of Python's standard library, of this package, and of torch, Pyro and NumPy."""
    modules: tuple[Any, ...] = (torch, pyro, np)
    paths = {Path(path) for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    return {*paths, Path(__file__).parents[1], *(Path(module.__file__).parent for module in modules)}
