"""Every public name has an entry in the API pages; a build without one fails and names it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

MODULES = ("pyro_sym", "pyro_sym.nn", "pyro_sym.diagnostics", "pyro_sym.testing")
logger = logging.getLogger(__name__)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page describes."""
    described = {name for name, *_ in env.domains["py"].get_objects()}
    for module in MODULES:
        if find_spec(module) is None:
            continue
        for name in import_module(module).__all__:
            value = getattr(import_module(module), name)
            # The name that Sphinx knows a class by that is offered twice.
            canonical = f"{value.__module__}.{getattr(value, '__qualname__', name)}"
            if not described & {f"{module}.{name}", canonical}:
                logger.warning(
                    "%s.%s is public and has no entry: add it to a table of docs/api", module, name
                )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
