"""The layout of the package, read from its source: who imports whom, what is private, how long files are.

Each rule is a function from the files of a package to the list of what breaks it. Each is also run on a small
package that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACES = {"", "nn", "diagnostics", "testing"}
"""Rooms whose ``__init__`` has the public names; that of the others holds a docstring only."""
MAX_LINES = 500
FOREIGN = {"_parameters", "_mask", "_factors"}
"""Private attributes of torch's modules and of Pyro's distributions and guides, which rooms use as well."""


@dataclass(frozen=True)
class File:
    """A file of the package.

    Attributes:
        name: the dotted name inside of the package, as ``graph.record``; ``graph`` for its ``__init__``, and
            the empty name for the package's own.
        path: as shown, ``graph/record.py``.
        source: the text.
    """

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def room(self) -> str:
        """The first part of the name: a folder, or a file beside the folders."""
        return self.name.partition(".")[0]

    @property
    def is_init(self) -> bool:
        return self.path.endswith("__init__.py")


Files = Mapping[str, File]
Rule = Callable[[Files], list[str]]


@dataclass(frozen=True)
class Import:
    """One imported file.

    Attributes:
        source: the dotted name of the file that is imported from.
        member: the name that is taken from it; None if it is the file itself.
        line: where.
    """

    source: str
    member: str | None
    line: int


def read(package: Path) -> Files:
    """The files of a package by dotted name."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        parts = inside.parts[:-1] if inside.name == "__init__.py" else (*inside.parts[:-1], inside.stem)
        file = File(".".join(parts), str(inside), path.read_text())
        files[file.name] = file
    return files


def imports(file: File, files: Files, package: str = "pyro_sym") -> Iterator[Import]:
    """What a file imports of its own package, wherever it stands: in a function, or for the type checker."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            source = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{source}.{alias.name}".lstrip(".")
                origin, member = (inner, None) if inner in files else (source, alias.name)
                yield Import(origin, member, node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == package:
                    source = alias.name.partition(".")[2]
                    yield Import(source, None, node.lineno)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_definitions(file: File) -> set[str]:
    """Private functions, classes, variables, methods and attributes that a file defines."""
    names: set[str] = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def is_own(value: ast.expr) -> bool:
    """Whether an expression is the object or class itself, whose private names its subclasses may use."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("super", "type")
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_names_across_rooms(files: Files) -> list[str]:
    """A room's private names are used in it alone, ``x._y`` as much as ``from room.file import _y``.

    Of what class ``x`` is can't be read: ``x._y`` counts if other rooms define ``_y`` and this one doesn't.
    """
    owners: dict[str, set[str]] = {}
    for file in files.values():
        for name in private_definitions(file):
            owners.setdefault(name, set()).add(file.room)
    broken = []
    for file in files.values():
        for found in imports(file, files):
            if found.source.partition(".")[0] != file.room and found.member and is_private(found.member):
                broken.append(f"{file.path}:{found.line} imports {found.member} of {found.source}")
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
                rooms = owners.get(node.attr, set()) if node.attr not in FOREIGN else set()
                if rooms and file.room not in rooms:
                    where = ", ".join(sorted(rooms))
                    broken.append(f"{file.path}:{node.lineno} uses {ast.unparse(node)}, private to {where}")
    return broken


def circles(edges: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The sets of nodes that reach each other, with the edges inside; ``edges[a][b]`` says where one is."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        reached[start] = set()
        rest = [start]
        while rest:
            new = set(edges.get(rest.pop(), ())) - reached[start]
            reached[start] |= new
            rest += new
    broken, seen = [], set()
    for start in sorted(edges):
        circle = {node for node in reached[start] if start in reached.get(node, ())}
        if circle and start not in seen:
            seen |= circle
            inside = [edges[a][b] for a in sorted(circle) for b in sorted(edges[a]) if b in circle]
            broken.append("; ".join(inside))
    return broken


def circles_of_files(files: Files) -> list[str]:
    """No file imports itself by way of others."""
    return circles(
        {
            file.name: {
                found.source: f"{file.path}:{found.line} imports {found.source}"
                for found in imports(file, files)
            }
            for file in files.values()
        }
    )


def circles_of_rooms(files: Files) -> list[str]:
    """Rooms are in layers: none imports from one that imports from it."""
    edges: dict[str, dict[str, str]] = {}
    for file in files.values():
        for found in imports(file, files):
            room = found.source.partition(".")[0]
            if room != file.room:
                line = f"{file.path}:{found.line} imports {found.source}"
                edges.setdefault(file.room, {}).setdefault(room, line)
    return circles(edges)


def code_in_init_files(files: Files) -> list[str]:
    """The ``__init__`` of a room holds a docstring only, but for those with the public names."""
    return [
        f"{file.path} holds more than a docstring"
        for file in files.values()
        if file.is_init
        and file.name not in FACES
        and (len(file.tree.body) != 1 or not ast.get_docstring(file.tree))
    ]


def long_files(files: Files) -> list[str]:
    """A file has 500 lines at most."""
    lengths = {file.path: len(file.source.splitlines()) for file in files.values()}
    return [f"{path} has {length} lines" for path, length in lengths.items() if length > MAX_LINES]


def untested_files(files: Files, tests: Path = ROOT / "tests") -> list[str]:
    """Each file has a test file of its name, or the docstring of another names it, as ``graph.record``."""
    docstrings = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in tests.rglob("test_*.py")]
    broken = []
    for file in files.values():
        *room, name = file.name.split(".")
        if file.is_init or (tests.joinpath(*room) / f"test_{name.lstrip('_')}.py").exists():
            continue
        called = file.name if room else f"pyro_sym.{file.name}"
        if not any(re.search(rf"\b{re.escape(called)}\b(?!\.\w)", text) for text in docstrings):
            broken.append(f"{file.path} has no test file, and no test file's docstring names {called}")
    return broken


RULES: list[Rule] = [
    private_names_across_rooms,
    circles_of_files,
    circles_of_rooms,
    code_in_init_files,
    long_files,
]


@pytest.fixture(scope="module")
def files() -> Files:
    """The files of this package."""
    return read(ROOT / "pyro_sym")


@pytest.mark.parametrize("rule", [*RULES, untested_files])
def test_the_package_keeps(rule: Rule, files: Files) -> None:
    broken = rule(files)
    assert not broken, "\n".join([f"{len(broken)} breaks of: {rule.__doc__}", *broken])


# --- each rule on a package that breaks it ------------------------------------------------------------------

SOUND = {
    "__init__.py": "from pyro_sym.high.user import use",
    "_common.py": "def shared(): ...",
    "low/__init__.py": '"""A room."""',
    "low/base.py": "class Base:\n    _own = 1\n    def act(self): return self._own\ndef _help(): ...",
    "low/more.py": "from pyro_sym.low.base import _help\n_help()",
    "high/__init__.py": '"""Another."""',
    "high/user.py": "from pyro_sym import _common\nfrom pyro_sym.low.base import Base\n"
    "class Sub(Base):\n    def use(self): return self._own, super()._own\ndef use(): _common.shared()",
}


def package(tmp_path: Path, changed: Mapping[str, str] = {}) -> Files:
    """The sound package with some files changed."""
    for name, source in {**SOUND, **changed}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    return read(tmp_path)


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_package_breaks_no_rule(rule: Rule, tmp_path: Path) -> None:
    assert rule(package(tmp_path)) == []


@pytest.mark.parametrize(
    ("rule", "name", "source", "message"),
    [
        (
            private_names_across_rooms,
            "high/other.py",
            "from pyro_sym.low.base import _help",
            "imports _help of low.base",
        ),
        (
            private_names_across_rooms,
            "high/other.py",
            "from pyro_sym.low import base\nbase._help()",
            "uses base._help, private to low",
        ),
        (
            private_names_across_rooms,
            "high/other.py",
            "from pyro_sym.low.base import Base\ndef f(x: Base): return x._own",
            "uses x._own, private to low",
        ),
        (
            circles_of_files,
            "low/base.py",
            "def late():\n    from pyro_sym.low.more import x",
            "low/base.py:2 imports low.more; low/more.py:1 imports low.base",
        ),
        (
            circles_of_rooms,
            "low/types.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pyro_sym.high.user",
            "high/user.py:2 imports low.base; low/types.py:3 imports high.user",
        ),
        (code_in_init_files, "low/__init__.py", '"""A room."""\nx = 1', "low/__init__.py holds more than"),
        (code_in_init_files, "low/__init__.py", "x = 1", "low/__init__.py holds more than a docstring"),
        (long_files, "low/long.py", "\n" * 501, "low/long.py has 501 lines"),
    ],
)
def test_each_rule_sees_a_break(rule: Rule, name: str, source: str, message: str, tmp_path: Path) -> None:
    (broken,) = rule(package(tmp_path, {name: source}))
    assert message in broken


def test_files_without_tests_are_seen(tmp_path: Path) -> None:
    files = package(tmp_path / "pyro_sym")
    tests = tmp_path / "tests"
    (tests / "low").mkdir(parents=True)
    (tests / "low" / "test_base.py").write_text('"""Also :mod:`pyro_sym.low.more`, and ``high.userly``."""')
    (tests / "test_common.py").touch()
    (broken,) = untested_files(files, tests)
    assert broken == "high/user.py has no test file, and no test file's docstring names high.user"
    (tests / "test_common.py").write_text('"""And high.user."""')
    assert untested_files(files, tests) == []
