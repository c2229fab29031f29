"""Draws on disk at the size of a network: what they cost beside the steps, in memory, and to be read.

Run it with ``python -m nox -s bench_store``, or ``python benchmarks/store.py [--json FILE] [--thinning N]``:
2 chains of a network of 10⁶ weights, 128 of 2,000 rows a step, 200 draws each, in blocks of 8 draws (64 MB).

* ``write``: seconds that the run with a store took, against those of its steps alone;
* ``memory``: peak of a process that runs it, above that of one that takes steps and keeps one draw;
* ``summary``: seconds for ``az.summary`` of a small site, and of 6 weights in the midst of the largest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _runner import peak_memory
from torch import nn

from pyro_sym import BAOA, BayesianModule, VectorizedMCMC
from pyro_sym.infer.chains import Chains
from pyro_sym.nn import Categorical, FanInPrior

ROWS, CHAINS, DRAWS = 2_000, 2, 200


def run(store: str | None, draws: int, thinning: int) -> dict[str, float]:
    """Seconds and peak memory of a run in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 784), torch.randint(10, (ROWS,))
    net = nn.Sequential(nn.Linear(784, 1258), nn.ReLU(), nn.Linear(1258, 10))
    model = BayesianModule(net, FanInPrior(), Categorical(num_data=ROWS), batch_size=128)
    kernel = BAOA(model, step_size=1e-3, init_strategy=model.init_to_pretrained)
    mcmc = VectorizedMCMC(
        kernel, draws, 0, CHAINS, thinning, on_divergence="mask", disable_progbar=True, store=store
    )
    seconds = 0.0
    advance = Chains.advance

    def timed(*args: Any, **kwargs: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        advance(*args, **kwargs)
        seconds += time.perf_counter() - start

    Chains.advance = timed  # type: ignore[method-assign]
    mcmc.run(x, y)
    return {"steps": seconds, "run": mcmc.sampling_time, "peak": peak_memory()}


def in_a_process(*arguments: Any) -> dict[str, float]:
    """The figures of :func:`run` in a fresh process, which has one peak."""
    command = [sys.executable, __file__, "--probe", json.dumps(arguments)]
    result: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return result


def summaries(store: str) -> dict[str, float]:
    """Seconds to summarise a few numbers of a store, opened anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import arviz as az
    import xarray as xr

    figures = {}
    few = {"0.weight_dim_0": [700], "0.weight_dim_1": range(6)}
    for name, where in {"2.bias": {}, "0.weight": few}.items():
        start = time.perf_counter()
        with xr.open_dataset(store, engine="zarr", group="posterior", chunks=None) as posterior:
            az.summary(posterior[[name]].isel({dim: list(rows) for dim, rows in where.items()}).load())
        figures[f"summary, {name} (s, < 2)"] = time.perf_counter() - start
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--thinning", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--probe", type=json.loads)
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(run(*options.probe)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = f"{folder}/run.zarr"
        bare = in_a_process(None, 1, 20)
        stored = in_a_process(store, DRAWS, options.thinning)
        size = sum(file.stat().st_size for file in Path(store).rglob("*") if file.is_file())
        files = sum(file.is_file() for file in Path(store).rglob("*"))
        figures = {
            "steps (s)": stored["steps"],
            "write (s)": stored["run"] - stored["steps"],
            "write / steps (< 2)": stored["run"] / stored["steps"] - 1,
            "size (GB)": size / 1e9,
            "files": files,
            "memory above the steps' own (GB, < 1.5)": (stored["peak"] - bare["peak"]) / 1e9,
            **summaries(store),
        }
    for name, value in figures.items():
        print(f"{name:45} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps({"thinning": options.thinning, **figures}, indent=1))


if __name__ == "__main__":
    main()
