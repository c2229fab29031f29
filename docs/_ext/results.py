"""Pages of results, made of the JSON in ``benchmarks/results``: nothing is run, and no number is typed."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def provenance(kept: dict[str, Any]) -> str:
    """One sentence on where the numbers come from."""
    versions = ", ".join(f"{name} {number}" for name, number in kept["packages"].items())
    minutes = f" in {kept['minutes']:g} minutes" if "minutes" in kept else ""
    return (
        f"Computed on {kept['date']}{minutes} at commit `{kept['commit']}`, "
        f"with Python {kept['python']}, {versions} on {kept['machine']}."
    )


def study_page(name: str) -> str:
    """A study: what was asked, what was found, the figure, the tables, and how to make them again."""
    kept = json.loads((RESULTS / "studies" / f"{name}.json").read_text(encoding="utf-8"))
    study, results = import_module(f"benchmarks.studies.{name}"), kept["results"]
    parts = [
        f"# {study.TITLE}",
        f"```{{eval-rst}}\n{inspect.cleandoc(study.__doc__ or '')}\n```",
        "## What was found",
        "\n".join(f"- {sentence}" for sentence in study.findings(results)),
        f"```{{image}} {name}.png\n:alt: {study.TITLE}\n:class: figure\n```",
        *(table.markdown() for table in study.tables(results)),
        "## Make it again",
        f"{provenance(kept)} The raw numbers of every seed are in `benchmarks/results/studies/{name}.json`; "
        f"`python -m benchmarks.studies {name}` computes them anew, or with `--smoke` shows that it runs.",
    ]
    return "\n\n".join(parts) + "\n"


def studies() -> Iterator[str]:
    """Names of the studies with results, in the order in which they are listed; one without is warned of."""
    for name in import_module("benchmarks.studies.__main__").NAMES:
        if (RESULTS / "studies" / f"{name}.json").exists():
            yield name
        elif (ROOT / "benchmarks" / "studies" / f"{name}.py").exists():
            logger.warning(
                "the study %s has no results: python -m benchmarks.studies %s", name, name
            )


def benchmark_page() -> str:
    """All benchmarks, a section each."""
    markdown = getattr(import_module("benchmarks._runner"), "markdown", None)
    if markdown is None:
        return ""
    sections = [markdown(path) for path in sorted(RESULTS.glob("*.json"))]
    # Wide tables: no table of contents beside them, and a smaller font (section#benchmarks in custom.css).
    head = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n\n# Benchmarks"
    return "\n\n".join([head, *sections]) + "\n"


def write(path: Path, text: str) -> None:
    """Write a page that has changed; Sphinx reads again what is newer."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def generate(app: Sphinx) -> None:
    """Write the pages, and a list of them for the index."""
    pages = Path(app.srcdir) / "results"
    listed = []
    for name in studies():
        write(pages / f"{name}.md", study_page(name))
        shutil.copy(RESULTS / "studies" / f"{name}.png", pages / f"{name}.png")
        listed.append(name)
    if benchmarks := benchmark_page():
        write(pages / "benchmarks.md", benchmarks)
        listed.append("benchmarks")
    for page in pages.glob("*.md"):
        if page.stem not in {"index", *listed}:
            page.unlink()
    write(pages / "pages.txt", "```{toctree}\n:maxdepth: 1\n\n" + "\n".join(listed) + "\n```\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
