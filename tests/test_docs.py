"""What pages show runs as it stands, their Python blocks in order; their links to files lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def program(text: str) -> str:
    """The blocks of a page, each on the lines on which it stands there, so that a traceback names them."""
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        lines += [""] * (text.count("\n", 0, block.start(1)) - len(lines))
        lines += block[1].splitlines()
    return "\n".join(lines)


def dead_links(page: Path) -> list[str]:
    links = LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    files = [link.partition("#")[0] for link in links if "://" not in link]
    return [file for file in files if file and not (page.parent / file).exists()]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=by_name
)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile(program(page.read_text(encoding="utf-8")), page, "exec", dont_inherit=True)
    exec(code, {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_to_files(page: Path) -> None:
    assert dead_links(page) == []


def test_a_block_keeps_its_lines_and_other_code_is_left_out() -> None:
    text = "# Page\n\n```python\nx = 1\n```\n\n```text\nnot code\n```\n```python\nassert x == 1\n```\n"
    assert program(text).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "", "assert x == 1"]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[this](page.md#top) [that](missing.md) [out](https://pyro.ai)\n```\n[code](x)\n```\n")
    assert dead_links(page) == ["missing.md"]
