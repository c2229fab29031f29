"""Runs that are killed: ``python -m tests.draws.store_runs FOLDER KILLS``.

It saves the results of an uninterrupted run in ``whole.pt``, and those of killed and resumed runs in
``killed0.pt`` and so on. Each run is a fork of this process, so modules are imported once.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import zarr  # noqa: F401
from torch import Tensor

from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.preconditioners import PerSite
from pyro_sym.sgmcmc.underdamped import BAOA
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC


def model(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, scale), obs=y[rows])


def results(mcmc: VectorizedMCMC) -> dict[str, Any]:
    """Draws, statistics, and the next random number."""
    return {
        "samples": mcmc.get_samples(group_by_chain=True),
        "stats": mcmc.diagnostics()["sample_stats"],
        "next": torch.rand(()),
    }


def run(store: Path, target: Path, seed: int, begun: int) -> None:
    """Run to the end; a byte is written to ``begun`` when the steps begin."""
    pyro.set_rng_seed(seed)
    data = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*shape, generator=data) for shape in ((20, 3), (20,)))
    kernel = BAOA(model, step_size=0.01, preconditioner=PerSite())
    advance = Chains.advance

    def first(self: Chains, *args: Any, **kwargs: Any) -> None:
        os.write(begun, b".")
        Chains.advance = advance  # type: ignore[method-assign]
        advance(self, *args, **kwargs)

    Chains.advance = first  # type: ignore[method-assign]
    mcmc = VectorizedMCMC(
        kernel, 150, 45, 2, 2, disable_progbar=True, store=store, resume=True, store_every=6
    )
    mcmc.run(x, y)
    torch.save(results(mcmc), target)


def fork(
    store: Path, target: Path, seed: int, seconds: float | None = None, among_steps: bool = False
) -> bool:
    """Run in a forked process, killed some seconds after its start or first step; whether it ended itself."""
    heard, begun = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            run(store, target, seed, begun)
        finally:
            os._exit(not target.exists())
    os.close(begun)
    if among_steps:
        os.read(heard, 1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(heard)
    return not os.WIFSIGNALED(status)


def main(folder: Path, kills: int) -> None:
    """An uninterrupted run, then runs that are killed and resumed until no kills are left."""
    begun = time.perf_counter()
    assert fork(folder / "whole.zarr", folder / "whole.pt", seed=1)
    seconds = time.perf_counter() - begun
    moments = random.Random(0)
    for killed in itertools.count():
        store, target = folder / f"killed{killed}.zarr", folder / f"killed{killed}.pt"
        done = []  # draws after each kill
        while kills > 0:
            seed = 100 + kills if store.exists() else 1
            if fork(store, target, seed, moments.uniform(0, 0.15 * seconds), among_steps=kills % 4 > 0):
                break
            kills -= 1
            if store.exists():
                done.append(torch.load(store / "state.pt")["done"])
        if kills == 0:
            assert fork(store, target, seed=999)
        print(*done)
        if kills == 0:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
