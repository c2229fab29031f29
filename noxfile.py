"""Sessions of development and CI: ``nox --list``. Arguments after ``--`` go to the tool of the session."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    """Run the tests once, on one Python, and fail if they reach less than 97 % of the package's lines."""
    install(session, "test", extras="[plots]")
    workers = str(min(4, os.cpu_count() or 1))
    report = ["--cov", "--cov-report=term-missing", "--cov-fail-under=97"]
    session.run("pytest", "-n", workers, "--dist", "worksteal", *report, *session.posargs)


def lower_bounds() -> dict[str, str]:
    """The lower bound of each requirement in pyproject.toml: of the package, its extras and its tests."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [*PROJECT["project"]["dependencies"], *(r for extra in extras for r in extra)]
    requirements += nox.project.dependency_groups(PROJECT, "test")
    return dict(requirement.split(">=") for requirement in requirements if ">=" in requirement)


@nox.session(default=False, python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run the tests with every requirement at its lower bound, warnings shown and not raised."""
    constraints = Path(session.create_tmp()) / "lowest.txt"
    constraints.write_text("".join(f"{name}=={bound}\n" for name, bound in lower_bounds().items()))
    wanted = nox.project.dependency_groups(PROJECT, "test")
    session.install("-c", str(constraints), "-e", ".[plots,store]", *wanted)
    workers = str(min(4, os.cpu_count() or 1))
    session.run("pytest", "-n", workers, "--dist", "worksteal", "-W", "default", *session.posargs)


# What a release holds besides the package.
SHIPPED = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "constraints.txt",
    "noxfile.py",
)
INSTALLED = """
import importlib.metadata, pathlib, sys
import pyro_sym
version, expected = importlib.metadata.version("pyro-sym"), sys.argv[1]
assert version == expected, f"installed {version}, built {expected}"
assert "site-packages" in pyro_sym.__file__, f"imported from {pyro_sym.__file__}, not from the wheel"
missing = [name for name in pyro_sym.__all__ if not hasattr(pyro_sym, name)]
assert not missing, f"names without a value: {missing}"
print(f"pyro_sym {version} from {pathlib.Path(pyro_sym.__file__).parent}")
"""


@nox.session(default=False, python=PYTHONS[0], reuse_venv=False)
def release(session: nox.Session) -> None:
    """Build sdist and wheel in dist/, check what they hold, and try the wheel in a new environment."""
    version = PROJECT["project"]["version"]
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(PROJECT, "release"))
    dist = Path("dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))  # the wheel from the sdist
    sdist, wheel = dist / f"pyro_sym-{version}.tar.gz", dist / f"pyro_sym-{version}-py3-none-any.whl"

    package = {path.as_posix() for path in Path("pyro_sym").rglob("*.py")} | {"pyro_sym/py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    if in_wheel != package:
        session.error(f"the wheel differs from the package: {sorted(in_wheel ^ package)}")
    away = Path(session.create_tmp()).resolve()
    with tarfile.open(sdist) as archive:
        archive.extractall(away, filter="data")
    source = away / f"pyro_sym-{version}"
    wanted = package | {path.as_posix() for path in Path("tests").rglob("*.py")} | set(SHIPPED)
    if lacking := sorted(name for name in wanted if not (source / name).exists()):
        session.error(f"the sdist lacks {lacking}")

    tools = nox.project.dependency_groups(PROJECT, "test")
    session.install("-c", "constraints.txt", f"{wheel}[quickstart]", *tools)
    shutil.rmtree(source / "pyro_sym")  # so that its tests and its quickstart find the wheel
    session.chdir(source)
    session.run("python", "-c", INSTALLED, version)
    session.run("python", "tutorials/00_quickstart.py")
    session.run("pytest", "-q", "tests/test_import.py", "tests/symmetry", *session.posargs)


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
