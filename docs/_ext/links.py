"""Every link and image of the built pages that points into them leads somewhere."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
# Pages that scripts fill in the browser.
WITHOUT_ANCHORS = {"search.html"}


class Page(HTMLParser):
    """The targets and the references of a page.

    Attributes:
        anchors: ids and names that a link may point at.
        references: what links and images point at.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.references: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag defines and what it refers to."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.references.append(value)


def dead(folder: Path) -> list[tuple[str, str]]:
    """Pages and the references on them that lead nowhere.

    Args:
        folder: the folder of the built pages.

    Returns:
        Pairs of a page's name and a reference.
    """
    pages = {
        path.resolve(): Page(path)
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }
    found = []
    for path, page in pages.items():
        for reference in page.references:
            link = urlsplit(reference)
            if link.scheme or link.netloc:
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            lands = target.exists()
            if lands and link.fragment and target in pages and target.name not in WITHOUT_ANCHORS:
                lands = unquote(link.fragment) in pages[target].anchors
            if not lands:
                found.append((path.relative_to(folder.resolve()).as_posix(), reference))
    return found


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of each dead reference, once the pages are written."""
    if exception is None and app.builder.format == "html":
        for page, reference in dead(Path(app.outdir)):
            logger.warning("%s links to %s, which is not there", page, reference)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
