"""What the benchmarks share: two pieces of work timed in turns, and a table with the versions beside it."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "pyro-ppl", "numpy")


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
        note: what else the row has to say.
    """

    case: str
    ours: float
    peer: float
    ratio: float
    spread: float
    wall: float
    note: str = ""


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
    rounds: list[tuple[float, float, float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 3:
        rounds.append((*_time(ours, block), *_time(peer, block)))
    cpu = [ours_cpu / peer_cpu for ours_cpu, _, peer_cpu, _ in rounds]
    quartiles = statistics.quantiles(cpu, n=4)
    return Ratio(
        case,
        statistics.median(r[0] for r in rounds) / block,
        statistics.median(r[2] for r in rounds) / block,
        quartiles[1],
        quartiles[2] - quartiles[0],
        statistics.median(r[1] / r[3] for r in rounds),
        note(),
    )


def _time(step: Callable[[], Any], block: int) -> tuple[float, float]:
    """CPU and wall-clock seconds of a block of steps."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(block):
        step()
    return time.process_time() - cpu, time.perf_counter() - wall


def show(rows: list[Ratio]) -> None:
    """Print one line a case."""
    if not rows:
        return
    width = max(len(row.case) for row in rows)
    print(f"{'case':{width}}  {'ours ms':>8} {'peer ms':>8} {'ratio':>6} {'iqr':>5} {'wall':>6}")
    for row in rows:
        print(
            f"{row.case:{width}}  {1e3 * row.ours:8.2f} {1e3 * row.peer:8.2f} {row.ratio:6.2f} "
            f"{row.spread:5.2f} {row.wall:6.2f}  {row.note}"
        )


def save(path: Path, rows: list[Ratio], **more: Any) -> None:
    """Write the results as JSON, with the versions of everything that took part."""
    path.write_text(json.dumps({"rows": [asdict(r) for r in rows], **more, **_provenance()}, indent=2) + "\n")


def _provenance() -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "packages": {name: version(name) for name in PACKAGES},
    }
