"""What the benchmarks share: pieces of work timed in turns, their tables, and the command line of each.

A benchmark is a module with a ``TITLE``, a docstring whose first paragraphs the docs print, and
``measure(seconds, smoke, ...)``, which returns tables: rows by caption, each a dict of cells. Its own
options are ``OPTIONS``, by name what ``argparse`` takes, and become keyword arguments of ``measure``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

NAMES = (
    "svi_step",
    "bayesian_module",
    "orbit_bounds",
    "gradient",
    "sgmcmc",
    "references",
    "alignment",
    "log_likelihood",
    "store",
)
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "pyro-ppl", "numpy", "arviz", "posteriors", "blackjax", "jax")
Row = dict[str, Any]
"""Cells by column: strings, numbers, or None."""
Tables = dict[str, list[Row]]
"""Rows by caption."""


@dataclass(frozen=True)
class Ratio:
    """Ours against a peer on the same work in the same run.

    Attributes:
        case: what was done.
        ours: seconds of CPU time a step, median over the rounds.
        peer: the same for the peer.
        ratio: median over the rounds of ours over the peer's.
        spread: interquartile range of that ratio.
        wall: the ratio by wall-clock time.
        target: what the ratio should be at most, if there is a target.
        note: what else the row has to say.
    """

    case: str
    ours: float
    peer: float
    ratio: float
    spread: float
    wall: float
    target: float | None = None
    note: str = ""

    def row(self) -> Row:
        """As a row of a table."""
        cells: Row = {
            "case": self.case,
            "ours, ms": 1e3 * self.ours,
            "peer, ms": 1e3 * self.peer,
            "ratio": self.ratio,
            "IQR": self.spread,
            "by wall clock": self.wall,
            "target": self.target,
        }
        return cells | ({"note": self.note} if self.note else {})


def compare(
    case: str,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    seconds: float,
    block: int = 1,
    note: Callable[[], str] = str,
) -> Ratio:
    """Run blocks of both in turns, so that whatever else the machine does falls on both alike.

    Args:
        case: a name for the table.
        ours: one step.
        peer: one step of the peer.
        seconds: about how long to go on.
        block: steps a turn.
        note: called afterwards, for a remark.
    """
    turns = take_turns({"ours": (ours, 1), "peer": (peer, 1)}, seconds, block=block)
    return turns.ratio(case, "ours", "peer", note=note())


@dataclass(frozen=True)
class Turns:
    """What several contestants took, round by round.

    Attributes:
        seconds: by contestant, CPU and wall-clock seconds a step, for each round.
    """

    seconds: dict[str, list[tuple[float, float]]]

    def ratio(
        self, case: str, ours: str, peer: str, *, target: float | None = None, note: str | None = None
    ) -> Ratio:
        """One contestant against another."""
        rounds = list(zip(self.seconds[ours], self.seconds[peer], strict=True))
        quartiles = statistics.quantiles([own[0] / other[0] for own, other in rounds], n=4)
        if note is None:
            note = ""
            case = f"{case}: {ours} / {peer}"
        return Ratio(
            case,
            statistics.median(own[0] for own, _ in rounds),
            statistics.median(other[0] for _, other in rounds),
            quartiles[1],
            quartiles[2] - quartiles[0],
            statistics.median(own[1] / other[1] for own, other in rounds),
            target,
            note,
        )


def take_turns(
    contestants: dict[str, tuple[Callable[[], Any], int]], seconds: float, *, block: int | None = None
) -> Turns:
    """Run blocks of all contestants in turns.

    Args:
        contestants: by name, what to call, and for how many steps a call counts.
        seconds: about how long to go on.
        block: calls a turn; by default as many as take some 50 ms, after two to warm up.
    """
    blocks = {}
    for name, (run, _) in contestants.items():
        if block is None:
            run()
        blocks[name] = block or max(1, round(0.05 / _time(run, 1)[1]))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[next(iter(taken))]) < 3:
        for name, (run, steps) in contestants.items():
            cpu, wall = _time(run, blocks[name])
            taken[name].append((cpu / blocks[name] / steps, wall / blocks[name] / steps))
    return Turns(taken)


def _time(step: Callable[[], Any], block: int) -> tuple[float, float]:
    """CPU and wall-clock seconds of a block of steps."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(block):
        step()
    return time.process_time() - cpu, time.perf_counter() - wall


RATIOS = (
    "Milliseconds of CPU time a step, medians over rounds in which all take turns; the ratio is the median "
    "over the rounds, with its interquartile range"
)


def ratios(rows: Iterable[Ratio], left_out: Iterable[str] = (), caption: str = RATIOS) -> Tables:
    """The table of some ratios; its caption says which peers weren't there."""
    absent = "".join(f"; {name} is not installed and left out" for name in left_out)
    return {f"{caption}{absent}.": [ratio.row() for ratio in rows]}


def figure(name: str, value: float, unit: str, target: float | None = None) -> Row:
    """A row of a table of single figures; a target is what the value should be at most."""
    return {"figure": name, "value": value, "unit": unit, "target": target}


def missed(tables: Tables) -> list[str]:
    """Rows whose ratio or value is above its target, or whose outcome says so."""

    def fails(row: Row) -> bool:
        target = row.get("target")
        return row.get("outcome") == "MISS" or (
            target is not None and row.get("ratio", row.get("value")) > target
        )

    return [str(next(iter(row.values()))) for rows in tables.values() for row in rows if fails(row)]


def columns(rows: list[Row]) -> list[str]:
    """Of all rows, in the order in which they appear, without those that are empty throughout."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(row.get(name) not in (None, "") for row in rows)]


def cell(value: Any) -> str:
    """Numbers to three or four digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def text(tables: Tables) -> str:
    """Tables for a terminal."""
    lines = []
    for caption, rows in tables.items():
        header = columns(rows)
        cells = [header, *([cell(row.get(name)) for name in header] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
        lines.append(f"\n{caption}")
        for line in cells:
            first, *others = (part.rjust(width) for part, width in zip(line, widths, strict=True))
            lines.append("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)


def markdown(path: Path) -> str:
    """What the docs show of one result: title, what was done, tables, and where the numbers come from."""
    kept = json.loads(Path(path).read_text())
    blocks = [f"## {kept['title']}", f"```{{eval-rst}}\n{kept['about']}\n```"]
    for caption, rows in kept["tables"].items():
        header = columns(rows)
        rule = [":--"] + ["--:"] * (len(header) - 1)
        lines = [header, rule, *([cell(row.get(name)) for name in header] for row in rows)]
        blocks += [caption, "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    packages = ", ".join(f"{name} {number}" for name, number in kept["packages"].items())
    blocks.append(
        f"*{kept['date']}, commit {kept['commit']}, Python {kept['python']} on {kept['machine']}, "
        f"one thread; {packages}.*"
    )
    return "\n\n".join(blocks) + "\n"


def save(path: Path, name: str, tables: Tables) -> None:
    """Write the results as JSON, with the versions of everything that took part."""
    module = import_module(f"benchmarks.{name}")
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    prose = takewhile(lambda paragraph: paragraph[0] not in " *", paragraphs)
    about = " ".join(" ".join(prose).split())
    kept = {"benchmark": name, "title": module.TITLE, "about": about, "tables": tables, **provenance()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def command_line(name: str) -> None:
    """Run one benchmark by its command line, from ``python -m benchmarks.NAME``."""
    import torch

    module = import_module(f"benchmarks.{name}")  # not as __main__: processes find it again
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each comparison of speeds")
    parser.add_argument("--smoke", action="store_true", help="a small size: does it run?")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    for option, settings in getattr(module, "OPTIONS", {}).items():
        parser.add_argument(f"--{option.replace('_', '-')}", **settings)
    options = vars(parser.parse_args())
    path = options.pop("json")
    torch.set_num_threads(1)
    tables = module.measure(**options)
    print(f"\n# {module.TITLE}\n{text(tables)}", flush=True)
    if path is not None:
        save(path, name, tables)


def apart(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """What a function of a module returns in a fresh process; arguments and result are what JSON can hold."""
    code = (
        "import json, sys, torch; torch.set_num_threads(1); "
        f"from {function.__module__} import {function.__name__} as function; "
        "print(json.dumps(function(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps(arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, cwd=ROOT, env=os.environ | dict(environment or {})
    )
    return json.loads(done.stdout.splitlines()[-1])


def provenance() -> dict[str, Any]:
    """Date, commit and versions: what a reader needs to make a result again."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def peak_memory() -> float:
    """Bytes of memory that this process had at most.

    From ``/proc`` where there is one: what ``getrusage`` says begins with the peak of the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
