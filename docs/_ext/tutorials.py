"""Tutorials: the scripts of the project's folder ``tutorials`` become pages, which myst-nb runs and shows."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

SCRIPTS = "[0-9][0-9]_*.py"


def copy(app: Sphinx) -> None:
    """Copy the scripts that have changed into the sources of the pages, and drop those that are gone."""
    pages = Path(app.srcdir) / "tutorials"
    scripts = {
        script.name: script for script in (Path(app.srcdir).parent / "tutorials").glob(SCRIPTS)
    }
    for page in pages.glob(SCRIPTS):
        if page.name not in scripts:
            page.unlink()
    for name, script in scripts.items():
        page = pages / name
        if not page.exists() or page.read_bytes() != script.read_bytes():
            shutil.copy(script, page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
