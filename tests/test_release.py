"""What a release says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROW = re.compile(r"^\| ([\w-]+)(?: \(extra\))? \| ([^|]*) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def table() -> dict[str, tuple[str, str, str]]:
    """The rows of the page: the lower bound, and the versions tested on Python 3.11 and on 3.12."""
    text = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    return {name: (oldest, *tested) for name, oldest, *tested in ROW.findall(text)}


def pinned(text: str, python: str) -> dict[str, str]:
    """Versions by package in constraints for a Python."""
    found = {}
    for name, version, marker in re.findall(r"^([\w.-]+)==([^\s;]+)(?:; (.*))?$", text, re.MULTILINE):
        old = 'python_version < "3.12"'
        if not marker or (marker == old) == (python == "3.11"):
            found[name] = version
    return found


def bounds(requirements: list[str]) -> dict[str, str]:
    return dict(r.split(">=") for r in requirements if ">=" in r)


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [version]
    assert re.findall(r"^license: (.*)$", citation, re.MULTILINE) == [PROJECT["license"]]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_table_of_versions_has_the_lower_bounds() -> None:
    shown = {name: oldest for name, (oldest, *_) in table().items()}
    extras = [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
    assert shown == bounds(extras) | bounds(PROJECT["dependencies"])


@pytest.mark.parametrize(("column", "python"), [(1, "3.11"), (2, "3.12")])
def test_the_table_of_versions_has_what_is_tested(column: int, python: str) -> None:
    versions = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"), python)
    assert {name: row[column] for name, row in table().items()} == {name: versions[name] for name in table()}


def test_versions_are_read_by_python() -> None:
    text = 'a==1\nb==2; python_version < "3.12"\nb==3; python_version >= "3.12"\n'
    assert pinned(text, "3.11") == {"a": "1", "b": "2"}
    assert pinned(text, "3.12") == {"a": "1", "b": "3"}
