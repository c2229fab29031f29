"""Draws of a network on disk: the cost of writing them, in time and memory, and of reading them.

Two chains of a network of 10⁶ weights, with 128 of 2,000 rows a step and 200 draws each, in blocks of 8
draws (64 MB).

* ``writing``: seconds that the run with a store took beyond those of its steps;
* ``memory``: peak of a process that runs it, above that of one that takes steps and keeps one draw;
* ``summary``: seconds for ``az.summary`` of a small site, and of 6 weights in the middle of the largest.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._runner import Tables, apart, command_line, figure, peak_memory
from pyro_sym import BAOA, BayesianModule, VectorizedMCMC
from pyro_sym.nn import Categorical, FanInPrior
from pyro_sym.sgmcmc.chains import Chains

TITLE = "Draws on disk"
OPTIONS: dict[str, dict[str, Any]] = {
    "thinning": {"type": int, "default": 10},
    "folder": {"type": Path, "help": "a folder on the disk to measure"},
}
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


def summaries(store: str) -> dict[str, float]:
    """Seconds to open a store and summarise a few numbers."""
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
        figures[f"summary, {name}"] = time.perf_counter() - start
    return figures


def measure(
    seconds: float = 0.0, smoke: bool = False, thinning: int = 10, folder: Path | None = None
) -> Tables:
    """The figures; ``seconds`` changes nothing."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = f"{place}/run.zarr"
        bare = apart(run, None, 1, 20)
        stored = apart(run, store, 10 if smoke else DRAWS, thinning)
        files = [file.stat().st_size for file in Path(store).rglob("*") if file.is_file()]
        summary = summaries(store)
    rows = [
        figure("steps", stored["steps"], "s"),
        figure("writing", stored["run"] - stored["steps"], "s"),
        figure("writing, of the steps", stored["run"] / stored["steps"] - 1, "ratio", 2),
        figure("size", sum(files) / 1e9, "GB"),
        figure("files", len(files), ""),
        figure("memory above the steps' own", (stored["peak"] - bare["peak"]) / 1e9, "GB", 1.5),
        *(figure(name, took, "s", 2) for name, took in summary.items()),
    ]
    return {f"By wall clock, {thinning} steps a draw.": rows}


if __name__ == "__main__":
    command_line("store")
