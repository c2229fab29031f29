"""Run benchmarks: ``python -m benchmarks [NAME ...] [--smoke]``, from the root of the repository.

Each runs in a process of its own, one after the other, and writes NAME.json to benchmarks/results, where
the docs read it; smoke runs go to build/benchmarks. ``python -m benchmarks.NAME --help`` lists the options
of one. Peers (posteriors, BlackJAX) that aren't installed are left out, and the results say so. Data are
looked for in the folder that the environment variable PYRO_SYM_DATA names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._runner import NAMES, RESULTS, ROOT, missed

SMOKE = ROOT / "build" / "benchmarks"


def main() -> int:
    """Run what is asked for, and say at the end what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each comparison of speeds")
    parser.add_argument("--smoke", action="store_true", help="a small size: does it run?")
    parser.add_argument("--out", type=Path, help="folder for the results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    out = options.out or (SMOKE if options.smoke else RESULTS)
    summary = []
    for name in options.names:
        start, path = time.perf_counter(), out / f"{name}.json"
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}"]
        command += ["--seconds", str(options.seconds), "--json", str(path)]
        done = subprocess.run(command + ["--smoke"] * options.smoke, cwd=ROOT)
        minutes = (time.perf_counter() - start) / 60
        summary.append((name, minutes, "failed" if done.returncode else _outcome(path)))
    print(f"\n{'benchmark':18} {'minutes':>7}")
    for name, minutes, outcome in summary:
        print(f"{name:18} {minutes:7.1f}  {outcome}")
    return int(any(outcome == "failed" for _, _, outcome in summary))


def _outcome(path: Path) -> str:
    """How many rows there are, and which are outside of their targets."""
    kept = json.loads(path.read_text())
    rows = sum(len(rows) for rows in kept["tables"].values())
    outside = missed(kept["tables"])
    return f"{rows} rows" + (f"; outside of their targets: {', '.join(outside)}" if outside else "")


if __name__ == "__main__":
    raise SystemExit(main())
