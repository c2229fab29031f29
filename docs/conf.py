"""Settings of the documentation: ``python -m nox -s docs``."""

from __future__ import annotations

import hashlib
import os
import sys
import tomllib
from pathlib import Path

import pyro_sym

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [
    str(DOCS / "_ext"),
    str(ROOT),
]  # the extensions below, and the benchmarks, whose results are shown

project = "pyro_sym"
author = "the pyro_sym authors"
copyright = author
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "version"
]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    # Of this folder.
    "tutorials",
    "results",
    "signatures",
    "blocks",
    "public_names",
    "links",
]
exclude_patterns = ["conf.py", "_ext", "_figures", "_templates"]
templates_path = ["_templates"]
nitpicky = True

# Types of other packages are shown by name and not linked: a build fetches no inventory and needs no network.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(abc|arviz|collections|matplotlib|numpy|os|pandas|pd|pyro|torch|warnings|xarray)\..*",
    ),
    (r"py:class", r"pathlib\.Path"),
    (r"py:class", r"Axes|ELBO|Parameter|Tensor"),  # the same, imported by name for type checkers
]

# API pages: a page for each name, types in the list of parameters rather than in an unreadable signature.
autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False  # methods of a contract are described once, where it is
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath", "attrs_inline"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Tutorials are scripts in jupytext's percent format, run when they or the package have changed.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_timeout = 3600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = (
    "warn"  # a cell that means to warn says so: # %% mystnb={"output_stderr": "show"}
)
# Two notices that are no business of a reader: of progress bars, and of the next ArviZ.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found,ignore::FutureWarning:arviz"
size = os.environ.setdefault("PYRO_SYM_TUTORIALS", "small")
sources = b"".join(
    path.read_bytes() for path in sorted(Path(pyro_sym.__file__).parent.rglob("*.py"))
)
nb_execution_cache_path = str(
    ROOT / "build" / "tutorials" / f"{size}-{hashlib.sha256(sources).hexdigest()[:12]}"
)

html_theme = "pydata_sphinx_theme"
html_title = "pyro_sym"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navbar_persistent": ["search-button-field"],
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "installation": [], "getting_started": [], "changelog": []}
