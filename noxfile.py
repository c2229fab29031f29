"""Sessions of development and CI: ``nox --list``. Arguments after ``--`` go to the tool of the session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "typing", "tests"]
# pip obeys the settings of the machine (indexes, local wheels, caps); uv knows none of them.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PYTHONS = ["3.11", "3.12"]
PROJECT = nox.project.load_toml("pyproject.toml")


def runs(python: str) -> bool:
    """Whether a Python can be started here. A version manager may leave a command on the path that can't."""
    if python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return True
    command = shutil.which(f"python{python}")
    return command is not None and subprocess.run([command, "-c", ""], capture_output=True).returncode == 0


# nox makes a missing Python an error where CI is set. Here one of the two is enough, on CI as well; a machine
# that has neither is an error everywhere, as a run that tests nothing must not pass.
nox.options.error_on_missing_interpreters = not any(runs(python) for python in PYTHONS)


def install(session: nox.Session, *groups: str, extras: str = "") -> None:
    """Install the package, extras and dependency groups, at the versions in constraints.txt."""
    wanted = nox.project.dependency_groups(PROJECT, *groups)
    session.install("-c", "constraints.txt", "-e", f".{extras}", *wanted)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Run the quickstart: a mixture on real data, from a Pyro model to an ArviZ report in quickstart/."""
    install(session, extras="[quickstart]")
    session.run("python", "tutorials/00_quickstart.py", *session.posargs)


@nox.session(default=False)
def tutorials(session: nox.Session) -> None:
    """Run the other tutorials at a small size; with ``-- --full``, at the size that they report."""
    install(session, extras="[quickstart,store]")
    size = "full" if "--full" in session.posargs else "small"
    for script in sorted(Path("tutorials").glob("[0-9][0-9]_*.py")):
        if script.name != "00_quickstart.py":
            session.run("python", str(script), env={"PYRO_SYM_TUTORIALS": size})


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests on each supported Python that is here: ArviZ 0.23 on 3.11, ArviZ 1.x from 3.12 on."""
    install(session, "test", extras="[plots]")
    # A few workers, each with one thread; with "-- -n 0" there are none.
    workers = str(min(4, os.cpu_count() or 1))
    session.run("pytest", "-n", workers, "--dist", "worksteal", *session.posargs)


@nox.session(default=False, python=PYTHONS[0])
def coverage(session: nox.Session) -> None:
    """Run the tests once, on one Python, and fail if they reach less than 95 % of the package's lines."""
    install(session, "test", extras="[plots]")
    workers = str(min(4, os.cpu_count() or 1))
    report = ["--cov", "--cov-report=term-missing", "--cov-fail-under=95"]
    session.run("pytest", "-n", workers, "--dist", "worksteal", *report, *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure speeds beside those of peers, memory, agreement: ``-- [NAME ...] [--seconds S] [--smoke]``."""
    install(session, "bench", extras="[quickstart,store]")
    session.run("python", "-W", "ignore", "-m", "benchmarks", *session.posargs)


@nox.session(default=False)
def studies(session: nox.Session) -> None:
    """Make the experiments of the papers again, figures and tables; with ``-- --smoke``, at a small size."""
    install(session, "bench", extras="[quickstart]")
    session.run("python", "-W", "ignore", "-m", "benchmarks.studies", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation in build/docs, tutorials run at a small size; ``-- --full`` at full size."""
    install(session, "docs", extras="[quickstart,store]")
    size = "full" if "--full" in session.posargs else "small"
    data = os.environ.get("PYRO_SYM_DATA", "../shared/data")
    env = {"PYRO_SYM_TUTORIALS": size, "PYRO_SYM_DATA": str(Path(data).resolve()), "OMP_NUM_THREADS": "1"}
    session.run("sphinx-build", "-W", "-n", "--keep-going", "docs", "build/docs", env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, docstrings and format with ruff; with ``-- --fix``, mend what can be mended."""
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))


@nox.session
def typing(session: nox.Session) -> None:
    """Check the types of package and tests with mypy."""
    install(session, "test", "typing", extras="[plots]")
    session.run("mypy", *session.posargs)
