"""What the benchmarks share: two pieces of work timed in turns, and a table with the versions beside it."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
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
            note = f"target {target:.3g}" if target is not None else ""
            case = f"{case}: {ours} / {peer}"
        return Ratio(
            case,
            statistics.median(own[0] for own, _ in rounds),
            statistics.median(other[0] for _, other in rounds),
            quartiles[1],
            quartiles[2] - quartiles[0],
            statistics.median(own[1] / other[1] for own, other in rounds),
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


def show(rows: list[Ratio]) -> None:
    """Print one line a case."""
    if not rows:
        return
    width = max(len(row.case) for row in rows)
    print(f"{'case':{width}}  {'ours ms':>8} {'peer ms':>8} {'ratio':>6} {'iqr':>5} {'wall':>6}")
    for row in rows:
        print(
            f"{row.case:{width}}  {1e3 * row.ours:8.4f} {1e3 * row.peer:8.4f} {row.ratio:6.3f} "
            f"{row.spread:5.2f} {row.wall:6.2f}  {row.note}"
        )


def save(path: Path, rows: list[Ratio], **more: Any) -> None:
    """Write the results as JSON, with the versions of everything that took part."""
    path.write_text(json.dumps({"rows": [asdict(r) for r in rows], **more, **provenance()}, indent=2) + "\n")


def provenance() -> dict[str, Any]:
    """Date, commit and versions: what a reader needs to make a result again."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def peak_memory() -> float:
    """Bytes of memory that this process had at most.

    From ``/proc`` where there is one: what ``getrusage`` says begins with the peak of the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
