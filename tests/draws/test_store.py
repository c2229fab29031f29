"""Draws on disk: a run that dies is resumed bit for bit, and its store can be read.

Covers also `draws.on_disk`, `draws.files`, `draws.memory` and `sgmcmc.prefetch`.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
import zarr
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from pyro_sym import from_pyro
from pyro_sym.draws import files, on_disk, store
from pyro_sym.draws.reader import StoredArrays
from pyro_sym.errors import DivergenceError
from pyro_sym.model import gradient
from pyro_sym.model.minibatch import Loader, PlateRows
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD
from pyro_sym.sgmcmc.preconditioners import PerSite, RMSprop
from pyro_sym.sgmcmc.prefetch import Prefetcher
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.schedules import Cyclical
from pyro_sym.sgmcmc.step_blocks import FusedSteps
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC
from tests.draws.store_runs import results

pytestmark = pytest.mark.usefixtures("float64")

WARMUP, DRAWS = 5, 9
X, Y = torch.linspace(-1, 1, 23, dtype=torch.float64), torch.linspace(1, -1, 23, dtype=torch.float64) ** 2


def regression(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("net/slope", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(slope.sum() * x[rows], scale), obs=y[rows])


def many_rows(x: Tensor, y: Tensor) -> None:
    """The plate is so large that the rows of several steps are drawn at once."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 6_000, subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(slope * x[rows % len(x)], 1.0), obs=y[rows % len(x)])


def on_batches(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(X), subsample_size=len(x)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True, **options)


class LazilyShuffled:
    """Draws each row when it is needed."""

    def __iter__(self) -> Any:
        left = list(range(len(X)))
        while left:
            row = left.pop(int(torch.randint(len(left), ())))
            yield X[row : row + 1], Y[row : row + 1]


def mcmc(sgmcmc: StochasticGradientKernel, **options: Any) -> VectorizedMCMC:
    given: dict[str, Any] = {"warmup_steps": WARMUP, "num_chains": 2, "thinning": 2}
    given["store_every"] = 3 if "store" in options else None
    return VectorizedMCMC(sgmcmc, **{"num_samples": DRAWS, "disable_progbar": True, **given, **options})


def run(sgmcmc: StochasticGradientKernel, *, seed: int = 1, **options: Any) -> VectorizedMCMC:
    pyro.set_rng_seed(seed)
    sampler = mcmc(sgmcmc, **options)
    sampler.run(*(() if sgmcmc.batches is not None else (X, Y)))
    return sampler


class Crash(BaseException):
    """The end of a process, simulated within it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, draw: int, do: Callable[[], None] | None = None) -> None:
    advance, calls = Chains.advance, 0

    def crashing(self: Chains, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == draw + 1:
            if do is not None:
                do()
            raise Crash
        advance(self, *args, **kwargs)

    monkeypatch.setattr(Chains, "advance", crashing)


def crashed(path: Path, sgmcmc: StochasticGradientKernel, draw: int, **options: Any) -> None:
    """Crash a run before a draw (counted with the warm-up); nothing is written afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, draw)
        patch.setattr(on_disk.DrawsOnDisk, "close", lambda self: self._store.close())
        with pytest.raises(Crash):
            run(sgmcmc, store=path, **options)


def same(ours: Any, theirs: Any) -> bool:
    (left, what), (right, others) = tree_flatten(ours), tree_flatten(theirs)
    return what == others and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def kernel(kind: type[Any] = BAOA, model: Any = regression, **options: Any) -> StochasticGradientKernel:
    """A kernel that starts quickly: nothing is traced."""
    made: StochasticGradientKernel = kind(model, **{"step_size": 0.01, "jit": "eager", **options})
    return made


def cyclical() -> StochasticGradientKernel:
    cycle = Cyclical(0.01, 10, relaxation=1)
    return kernel(SGLD, step_size=cycle.step_size, temperature=cycle.temperature)


CASES: dict[str, Callable[[], StochasticGradientKernel]] = {
    "rows": kernel,
    "traced": lambda: kernel(jit="auto"),
    "shared rows, sgnht, rmsprop": lambda: kernel(
        SGNHT, thermostats="site", preconditioner=RMSprop(), shared_minibatch=True
    ),
    "mass learnt in warm-up": lambda: kernel(SGHMC, preconditioner=PerSite()),
    "cycles": cyclical,
    "control variate": lambda: kernel(
        gradient="control_variate", center={"net/slope": torch.zeros(2, 3), "scale": torch.zeros(())}
    ),
    "rows drawn ahead": lambda: kernel(model=many_rows),
    "loader": lambda: kernel(model=on_batches, batches=loader()),
    "loader with a generator": lambda: kernel(
        model=on_batches, batches=loader(generator=torch.Generator().manual_seed(3))
    ),
    "lazy order": lambda: kernel(model=on_batches, batches=LazilyShuffled()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_crashed_is_resumed_bit_for_bit(case: str, tmp_path: Path) -> None:
    expected = results(run(CASES[case](), store=tmp_path / "whole"))
    for draw in (4, 10):  # in the warm-up, and after it
        path = tmp_path / f"crashed{draw}"
        crashed(path, CASES[case](), draw)
        assert same(results(run(CASES[case](), store=path, resume=True, seed=2)), expected)


def test_a_run_may_crash_at_any_draw(tmp_path: Path) -> None:
    expected = results(run(kernel(), store=tmp_path / "whole"))
    for draw in (0, 3, 5, 6, 8, 13):  # before the first block; at its end; at the end of the warm-up; ...
        path = tmp_path / f"crashed{draw}"
        crashed(path, kernel(), draw)
        assert same(results(run(kernel(), store=path, resume=True, seed=2)), expected)


@pytest.mark.parametrize("case", ["rows", "loader"])
def test_a_store_changes_nothing(case: str, tmp_path: Path) -> None:
    in_memory, on_disk = results(run(CASES[case]())), results(run(CASES[case](), store=tmp_path / "run"))
    assert same(on_disk["samples"], in_memory["samples"]) and same(on_disk["next"], in_memory["next"])
    torch.testing.assert_close(on_disk["stats"], in_memory["stats"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("forgotten", ["random state", "gradient", "momentum", "epoch", "rows"])
def test_each_part_of_the_state_is_needed(
    forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without one of them the draws differ."""
    case = {"epoch": "loader", "rows": "rows drawn ahead"}.get(forgotten, "rows")
    expected = results(run(CASES[case](), store=tmp_path / "whole"))
    crashed(tmp_path / "crashed", CASES[case](), 7)
    load = Chains.load_state_dict
    if forgotten == "random state":
        monkeypatch.setattr(on_disk, "set_random_state", lambda state: None)
    elif forgotten == "gradient":
        forget = {"gradient": torch.zeros(2, 7)}
        monkeypatch.setattr(Chains, "load_state_dict", lambda self, state: load(self, {**state, **forget}))
    elif forgotten == "momentum":

        def without(self: Chains, state: Any) -> None:
            load(self, {**state, "state": [state["state"][0], self.state[1]]})

        monkeypatch.setattr(Chains, "load_state_dict", without)
    else:
        source = Loader if forgotten == "epoch" else PlateRows
        monkeypatch.setattr(source, "load_state_dict", lambda self, state: None)
    resumed = results(run(CASES[case](), store=tmp_path / "crashed", resume=True))
    assert not same(resumed["samples"], expected["samples"])


def test_runs_killed_at_random_moments(tmp_path: Path) -> None:
    """By ``kill -9``, in separate processes; PYRO_SYM_KILLS says how often."""
    kills = os.environ.get("PYRO_SYM_KILLS", "6")
    command = [sys.executable, "-m", "tests.draws.store_runs", str(tmp_path), kills]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, *others = (torch.load(tmp_path / name) for name in ("whole.pt", "killed0.pt"))
    others += [torch.load(path) for path in tmp_path.glob("killed[1-9].pt")]
    assert all(same(other, whole) for other in others), done.stdout
    assert len(done.stdout.split()) >= int(kills) // 2, "runs were killed before they had begun"


def test_large_chains_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "LARGE", 1)
    monkeypatch.setattr(store, "CHUNK_BYTES", 2 * 3 * 8)  # a weight a chunk
    expected = results(run(kernel(), store=tmp_path / "whole"))
    crashed(tmp_path / "crashed", kernel(), 10)
    assert same(results(run(kernel(), store=tmp_path / "crashed", resume=True, seed=2)), expected)


def test_numbers_drawn_ahead_for_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a block are taken one by one here, which needs no compiler."""

    def block(self: Any, *inputs: Any) -> Any:
        after, energy, slope = self.one_by_one(*inputs, gradient_at=self.gradient.eager)
        return after, energy, slope, float(after[0].sum())

    def compiled() -> StochasticGradientKernel:
        return kernel(jit="compile")

    monkeypatch.setattr(FusedSteps, "__call__", block)
    expected = results(run(compiled(), store=tmp_path / "whole"))
    for draw in (3, 10):
        path = tmp_path / f"crashed{draw}"
        crashed(path, compiled(), draw)
        assert len(torch.load(path / "state.pt")["chains"]["ahead"][0]["blocks"]) > 0
        assert same(results(run(compiled(), store=path, resume=True, seed=2)), expected)
    monkeypatch.setattr(Prefetcher, "load_state_dict", lambda self, state, device: None)
    crashed(tmp_path / "forgotten", compiled(), 10)
    forgotten = results(run(compiled(), store=tmp_path / "forgotten", resume=True))
    assert not same(forgotten["samples"], expected["samples"])


def test_a_fallback_is_restored(tmp_path: Path) -> None:
    """If a gradient had to fall back to the model itself, it does so after a crash too."""
    chains = CASES["traced"]().start((X, Y))
    state = chains.state_dict()
    state["gradients"] = [{"mode": "eager", "reason": "it branches"}]
    chains.load_state_dict(state)
    assert isinstance(chains.gradient_of, gradient.Gradient) and chains.gradient_of.mode == "eager"


# --- what ends a run ----------------------------------------------------------------------------------------


def inject_nan(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    evaluate = Chains._evaluate

    def spoiled(self: Chains, position: Tensor, minibatch: Any) -> tuple[Tensor, Tensor]:
        energy, slope = evaluate(self, position, minibatch)
        if self.step == at_step:
            slope = slope.clone()
            slope[1] = torch.nan
        return energy, slope

    monkeypatch.setattr(Chains, "_evaluate", spoiled)


def test_masked_chains_stay_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_nan(monkeypatch, at_step=14)  # of the third draw
    whole = run(kernel(), store=tmp_path / "whole", on_divergence="mask")
    in_memory = run(kernel(), on_divergence="mask")
    assert whole.diagnostics()["divergences"] == {"chain 0": [], "chain 1": list(range(2, 9))}
    assert whole.diagnostics()["divergences"] == in_memory.diagnostics()["divergences"]
    assert whole.get_samples()["scale"].shape == (9 + 2,)
    crashed(tmp_path / "crashed", kernel(), 12, on_divergence="mask")
    resumed = run(kernel(), store=tmp_path / "crashed", resume=True, on_divergence="mask")
    assert resumed.diverged == whole.diverged == in_memory.diverged
    ours, theirs = (m.get_samples()["net/slope"] for m in (resumed, whole))
    assert torch.equal(ours, theirs)


def test_a_divergence_or_interrupt_leaves_the_draws_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(run(kernel(), store=tmp_path / "whole"))
    sampler = mcmc(kernel(), store=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        inject_nan(patch, at_step=19)  # of the fifth draw
        pyro.set_rng_seed(1)
        with pytest.raises(DivergenceError, match="chain 1, step 19"):
            sampler.run(X, Y)
    assert sampler.get_samples(group_by_chain=True)["scale"].shape == (2, 4)
    assert sampler.diagnostics()["sample_stats"]["chain 0"]["lp"].shape == (4,)
    assert xr.open_datatree(tmp_path / "run", engine="zarr").attrs["draws"] == 4
    assert same(results(run(kernel(), store=tmp_path / "run", resume=True, seed=2)), expected)


@pytest.mark.parametrize("how", ["zarr", "limit"])
def test_a_full_disk_is_named_and_the_store_can_be_read(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(run(kernel(), store=tmp_path / "whole"))
    sampler = mcmc(kernel(), store=tmp_path / "run")
    pyro.set_rng_seed(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        if how == "limit":  # no file larger than some chunks of draws
            set_item = zarr.Array.__setitem__

            def limited(self: Any, key: Any, value: Any) -> None:
                if key[1].start == 6:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
                set_item(self, key, value)

            patch.setattr(zarr.Array, "__setitem__", limited)
        else:  # in the middle of the second block
            left = iter([True] * 20)

            def full(self: Any, key: Any, value: Any) -> None:
                if next(left, None) is None:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                set_item(self, key, value)

            set_item = zarr.Array.__setitem__
            patch.setattr(zarr.Array, "__setitem__", full)
        try:
            with pytest.raises(
                OSError, match=r"run can't be written \(.*run again with resume=True"
            ) as caught:
                sampler.run(X, Y)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == (errno.EFBIG if how == "limit" else errno.ENOSPC)
    written = 6 if how == "limit" else 3
    tree = xr.open_datatree(tmp_path / "run", engine="zarr")
    assert tree.attrs["draws"] == written
    slope = torch.from_numpy(tree["posterior"].to_dataset()["net.slope"].values[:, :written])
    assert torch.equal(slope, expected["samples"]["net/slope"][:, :written])
    assert torch.equal(sampler.get_samples(group_by_chain=True)["net/slope"], slope)
    assert same(results(run(kernel(), store=tmp_path / "run", resume=True, seed=2)), expected)


def test_a_record_that_cannot_be_written_raises_the_error_of_the_disk(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    files.save({"a": torch.ones(3)}, tmp_path / "state.pt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.save({"a": torch.ones(100_000)}, tmp_path / "state.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    assert same(torch.load(tmp_path / "state.pt"), {"a": torch.ones(3)})


# --- readers ------------------------------------------------------------------------------------------------


def test_the_store_opens_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = []
    crash_at(monkeypatch, WARMUP + 7, lambda: trees.append(look()))

    def look() -> Any:
        return xr.open_datatree(tmp_path / "run", engine="zarr").load()

    with pytest.raises(Crash):
        run(kernel(), store=tmp_path / "run")
    (tree,) = trees
    assert tree.attrs["draws"] == 6 and tree.attrs["latent_site"] == ["net/slope", "scale"]
    slope = tree["posterior"]["net.slope"]
    assert slope.dims == ("chain", "draw", "net.slope_dim_0", "net.slope_dim_1")
    assert slope.shape == (2, 9, 2, 3)
    assert slope[:, :6].notnull().all() and slope[:, 6:].isnull().all()
    assert tree["sample_stats"]["lp"][:, :6].notnull().all()
    assert not tree["sample_stats"]["diverging"].any()
    assert tree["sample_stats"]["site_kinetic_temperature"].dims == ("chain", "draw", "latent_site")


def test_arviz_has_the_same_draws_from_the_run_and_from_the_store(tmp_path: Path) -> None:
    sampler = run(kernel(), store=tmp_path / "run")
    exported = from_pyro(sampler)
    with xr.open_dataset(tmp_path / "run", engine="zarr", group="posterior") as posterior:
        for name in ("net.slope", "scale"):
            assert (exported["posterior"][name].values == posterior[name].values).all()
    with xr.open_dataset(tmp_path / "run", engine="zarr", group="sample_stats") as stats:
        assert (exported["sample_stats"]["lp"].values == stats["lp"].values).all()


def test_sites_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = run(kernel(), store=tmp_path / "run")
    read, paths = StoredArrays.read, []

    def reading(self: Any, path: str, draws: int) -> Tensor:
        paths.append(path)
        return read(self, path, draws)

    monkeypatch.setattr(StoredArrays, "read", reading)
    draws = sampler._drawn().samples()
    assert list(draws) == ["net/slope", "scale"] and paths == []
    assert draws["scale"].shape == (2, 9) and paths == ["posterior/scale"]


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    sampler = run(kernel(), store=tmp_path / "run")
    assert isinstance(sampler._draws, on_disk.DrawsOnDisk)
    assert len(sampler._draws._positions) == 3
    recorder: Any = sampler._draws._recorder
    assert recorder._blocks == {} and recorder._pending == []


def test_chunks_hold_whole_blocks_and_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks(shape: tuple[int, ...], block: int) -> tuple[int, ...]:
        variable = store.Variable("posterior", "w", shape, (), torch.zeros(()).numpy().dtype)
        return variable.chunks(block)

    assert chunks((2, 100), 5) == (2, 5)
    assert chunks((2, 100, 10, 10), 5) == (2, 5, 10, 10)
    assert chunks((2, 100, 1000, 1000), 4) == (2, 4, 65, 1000)
    assert chunks((2, 100, 1000, 1000, 3), 4) == (2, 4, 21, 1000, 3)
    assert chunks((2, 100, 3, 10**6), 4) == (2, 4, 1, 65536)


def test_blocks_are_a_twentieth_of_the_run_or_64_megabytes() -> None:
    chains = kernel().start((X, Y), num_chains=2)
    assert on_disk.block_of_draws(chains, 1000) == 50
    assert on_disk.block_of_draws(chains, 7) == 1
    chains.shards[0].state = (torch.zeros(2, 1_000_000),)
    assert on_disk.block_of_draws(chains, 1000) == 4


# --- what is refused ----------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run(kernel(), store=tmp_path / "run")
    with pytest.raises(FileExistsError, match="already holds a run; pass resume=True"):
        run(kernel(), store=tmp_path / "run")
    (tmp_path / "thesis").mkdir()
    with pytest.raises(FileExistsError, match="thesis exists and is no store of draws"):
        mcmc(kernel(), store=tmp_path / "thesis", resume=True)


def test_a_finished_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(kernel(), store=tmp_path / "run")
    expected, seconds = results(first), first.sampling_time
    monkeypatch.setattr(Chains, "advance", None)
    again = run(kernel(), store=tmp_path / "run", resume=True, seed=7)
    assert same(results(again), expected)
    assert again.sampling_time == seconds > 0


def test_sampling_time_goes_on_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("pyro_sym.sgmcmc.vectorized.time.perf_counter", lambda: float(next(ticks)))
    assert run(kernel()).sampling_time == 14
    crashed(tmp_path / "run", kernel(), 9)  # of which the last block has 3 of the warm-up and 3
    resumed = run(kernel(), store=tmp_path / "run", resume=True)
    assert resumed.sampling_time == 14
    assert xr.open_datatree(tmp_path / "run", engine="zarr").attrs["sampling_time"] == 14


def test_two_processes_do_not_write_to_one_store(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 10)
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BlockingIOError, match=r"another process is writing to .*run; wait for it"):
            run(kernel(), store=tmp_path / "run", resume=True)
    run(kernel(), store=tmp_path / "run", resume=True)


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="store_every is 0; pass an integer >= 1"):
        mcmc(kernel(), store=tmp_path / "run", store_every=0)
    with pytest.raises(ValueError, match="need a store, but none is given"):
        mcmc(kernel(), store_every=None, resume=True)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro-sym\[store\]'"):
        mcmc(kernel(), store=tmp_path / "run")
