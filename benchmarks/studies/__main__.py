"""Run studies: ``python -m benchmarks.studies [NAME ...] [--smoke]``, from the root of the repository.

Full runs write NAME.json and NAME.png to benchmarks/results/studies, where the docs read them; smoke runs to
build/studies. ``--draw`` makes figures and tables of the JSON that is there, without running anything. Data
are looked for in the folder that the environment variable PYRO_SYM_DATA names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import cast

import matplotlib

from benchmarks._runner import provenance
from benchmarks.studies._study import Study

NAMES = (
    "mode_interpolation",
    "tractable_bnn",
    "mnist_widths",
    "overlap",
    "cold_posteriors",
    "deep_ensembles",
    "pima",
)
ROOT = Path(__file__).resolve().parents[2]
FULL, SMOKE = ROOT / "benchmarks" / "results" / "studies", ROOT / "build" / "studies"


def load(name: str) -> Study:
    """The module of a study."""
    return cast(Study, import_module(f"benchmarks.studies.{name}"))


def run(name: str, *, smoke: bool, draw: bool, out: Path) -> None:
    """Run one study, or read what it found, and write its figure and print its tables."""
    study, path = load(name), out / f"{name}.json"
    if not draw:
        import torch

        torch.set_num_threads(1)
        start = time.perf_counter()
        results = study.run("smoke" if smoke else "full")
        kept = {"study": name, "size": "smoke" if smoke else "full", "results": results, **provenance()}
        kept["minutes"] = round((time.perf_counter() - start) / 60, 1)
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    results = json.loads(path.read_text())["results"]
    print(f"\n# {study.TITLE}\n")
    for sentence in study.findings(results):
        print(f"- {sentence}")
    for table in study.tables(results):
        print(f"\n{table.text()}")
    study.figure(results).savefig(out / f"{name}.png", dpi=160)
    print(f"\nwrote {path.name} and {name}.png to {out}")


def run_apart(name: str, arguments: list[str]) -> tuple[str, int, str]:
    """The same in a process of its own: studies share no state, and none can stop another."""
    command = [sys.executable, "-m", "benchmarks.studies", name, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return name, done.returncode, done.stdout


def main() -> int:
    """Read the command line; run one study here, or several in processes of their own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="a small size: does it run?")
    parser.add_argument("--draw", action="store_true", help="figures and tables of results that are there")
    parser.add_argument("--jobs", type=int, default=2, help="studies at a time, one thread each")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no study is named {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    matplotlib.use("Agg")
    if len(args.names) == 1:
        run(args.names[0], smoke=args.smoke, draw=args.draw, out=SMOKE if args.smoke else FULL)
        return 0
    arguments = [f"--{flag}" for flag in ("smoke", "draw") if getattr(args, flag)]
    failed = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, code, output in pool.map(lambda name: run_apart(name, arguments), args.names):
            print(output, flush=True)
            if code:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
