"""Blocks fit the page: a long message wraps, and a line of code that would be cut off is warned of."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
WIDTH = 100  # characters beside both sidebars in a window of 1280 px, by _static/custom.css
CODE = ("python", "ipython3", "py", "sh")
DRAWING = "default"  # a block without a language: a picture in characters, which scrolls


def fit(app: Sphinx, doctree: nodes.document) -> None:
    """Let what a block prints wrap if it is too long, and warn of code that is."""
    for block in doctree.findall(nodes.literal_block):
        longest = max(block.astext().splitlines(), key=len, default="")
        if len(longest) <= WIDTH:
            continue
        if block.get("language") in CODE:
            logger.warning(
                "a line of code has over %d characters: %s", WIDTH, longest, location=block
            )
        elif block.get("language") != DRAWING:
            block["classes"].append("message")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("doctree-read", fit)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
