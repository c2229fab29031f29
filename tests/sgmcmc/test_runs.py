"""What users do with a run: callbacks, tables of few draws, temperatures by chain.

Covers `sgmcmc.progress`, `sgmcmc.ladder`, `draws.summaries` and `draws.divergence`.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyro
import pytest
import torch
from pyro.infer.mcmc.util import diagnostics as pyro_diagnostics
from pyro.infer.mcmc.util import print_summary
from pyro.ops.stats import hpdi

from pyro_sym.errors import DivergenceError
from pyro_sym.export.api import from_pyro
from pyro_sym.graph import aot as package
from pyro_sym.graph.codegen import straight_line
from pyro_sym.model import gradient
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.preconditioners import PerSite
from pyro_sym.sgmcmc.progress import Bar, Progress
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC, deep_ensemble
from tests.catalogue import normals, quartic, slope
from tests.catalogue import real_and_positive as model
from tests.sgmcmc.test_vectorized import STARTS

pytestmark = pytest.mark.usefixtures("float64")

ALL_KERNELS = [SGLD, LeimkuhlerMatthews, SGHMC, BAOA, SGNHT]

regression = functools.partial(slope, size=5)


def sampler(kernel: StochasticGradientKernel, num_samples: int = 10, **options: Any) -> VectorizedMCMC:
    pyro.set_rng_seed(0)
    return VectorizedMCMC(kernel, num_samples, **{"warmup_steps": 0, "disable_progbar": True, **options})


# --- tables of no draws, and of few -------------------------------------------------------------------------

narrow = normals({"x": ()}, 1e-3)


def refused(mcmc: VectorizedMCMC, why: str) -> None:
    for ask in (mcmc.summary, mcmc.diagnostics, mcmc.get_samples, lambda: mcmc.get_samples(3, True)):
        with pytest.raises(ValueError, match=f"there are no draws: .*{why}"):
            ask()


def test_without_draws_tables_raise_an_error_that_says_why() -> None:
    refused(sampler(BAOA(model, step_size=0.1)), r"call run\(\) first")
    diverged = sampler(BAOA(narrow, step_size=1.0), warmup_steps=50, num_chains=2)
    with pytest.raises(DivergenceError):
        diverged.run()
    refused(diverged, r"DivergenceError: chain \d, step \d+: .* is not finite")

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    interrupted = sampler(BAOA(model, step_size=0.1), warmup_steps=9, callback=interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    refused(interrupted, "KeyboardInterrupt")
    stopped = sampler(BAOA(model, step_size=0.1), warmup_steps=9, callback=lambda p: True, callback_every=4)
    stopped.run()
    refused(stopped, "callback stopped the run after 4 draws of the warm-up")


def test_a_run_that_fails_again_keeps_nothing_of_the_run_before() -> None:
    mcmc = sampler(BAOA(regression, step_size=0.01))
    mcmc.run(torch.ones(20), torch.ones(20))
    with pytest.raises(TypeError):
        mcmc.run()
    refused(mcmc, "TypeError")


@pytest.mark.parametrize("num_chains", [1, 3])
@pytest.mark.parametrize("draws", [1, 2, 3, 4])
def test_tables_of_few_draws(num_chains: int, draws: int, capsys: pytest.CaptureFixture[str]) -> None:
    mcmc = sampler(BAOA(model, step_size=0.1), draws, num_chains=num_chains)
    mcmc.run()
    report = mcmc.diagnostics()
    assert report["b"]["r_hat"].shape == (2,) and report["a"]["n_eff"].shape == ()
    assert bool(report["b"]["r_hat"].isfinite().all()) == (draws == 4)
    assert report["sample_stats"]["chain 0"]["lp"].shape == (draws,)
    mcmc.summary()
    rows = {
        line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()
    }
    values = mcmc.get_samples()["b"][:, 1]
    assert float(rows["b[1]"][0]) == pytest.approx(float(values.mean()), abs=0.006)
    assert rows["b[1]"][-1] == "nan" or draws == 4
    if len(values) > 1:
        assert float(rows["b[1]"][1]) == pytest.approx(float(values.std()), abs=0.006)
    else:
        assert rows["b[1]"][1] == "nan"


def test_tables_are_pyros(capsys: pytest.CaptureFixture[str]) -> None:
    mcmc = sampler(BAOA(model, step_size=0.1), 20, num_chains=3)
    mcmc.run()
    mcmc.summary(prob=0.8)
    ours = capsys.readouterr().out
    print_summary(mcmc.get_samples(group_by_chain=True), prob=0.8)
    assert ours == capsys.readouterr().out
    with pytest.raises(ValueError, match=r"prob is 1\.5; pass the probability"):
        mcmc.summary(prob=1.5)


def test_tables_leave_out_what_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    """Chain 1 starts where no step is small enough, and is NaN from its first draws on."""

    starts = {"x": torch.tensor([0.1, 300.0, 0.2])}
    mcmc = sampler(
        BAOA(quartic(), step_size=0.1), 20, num_chains=3, on_divergence="mask", initial_params=starts
    )
    mcmc.run()
    assert list(mcmc.diverged) == [1]
    mcmc.summary(prob=0.8)
    shown = capsys.readouterr().out.split("chain 1 diverged")[0].split("x")[1].split()
    draws = mcmc.get_samples()["x"]  # without NaN
    low, high = hpdi(draws, 0.8)
    whole = mcmc.get_samples(group_by_chain=True)["x"][[0, 2]]
    known = pyro_diagnostics({"x": whole})["x"]
    expected = [
        draws.mean(),
        draws.std(),
        draws.median(),
        low,
        high,
        known["n_eff"],
        known["r_hat"],
    ]
    assert shown == [f"{float(value):.2f}" for value in expected]
    report = mcmc.diagnostics()["x"]
    assert report["r_hat"] == known["r_hat"] and report["n_eff"] == known["n_eff"]


def test_a_table_of_chains_that_all_diverged_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    mcmc = sampler(
        BAOA(normals({"x": ()}, 1e-30), step_size=1e4), 5, num_chains=2, warmup_steps=9, on_divergence="mask"
    )
    mcmc.run()
    mcmc.summary()
    row = capsys.readouterr().out.split("chain 0 diverged")[0].split("\n")[2]
    assert row.split() == ["x", *["nan"] * 7]


def test_a_deep_ensemble_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    ensemble = deep_ensemble(model, num_members=4, num_steps=5, lr=0.1, num_data=1)
    ensemble.summary()
    assert "b[1]" in capsys.readouterr().out and ensemble.diagnostics()["a"]["r_hat"].isnan()


# --- callbacks ----------------------------------------------------------------------------------------------

DATA = torch.linspace(-1, 1, 20, dtype=torch.float64), torch.linspace(-2, 2, 20, dtype=torch.float64)


@pytest.mark.parametrize("thinning", [1, 3])
def test_a_callback_sees_the_run_and_does_not_change_it(thinning: int) -> None:
    seen: list[dict[str, Any]] = []

    def look(progress: Progress) -> None:
        torch.randn(7)  # must not change the run
        seen.append(
            {
                "done": progress.done,
                "draws": progress.num_draws,
                "warming up": progress.warming_up,
                "step": progress.step,
                "energy": progress.potential_energy,
                "here": progress.values()["slope"],
                "kept": progress.get_samples(group_by_chain=True) if progress.num_draws else None,
            }
        )

    runs = []
    for options in ({}, {"callback": look, "callback_every": 3}):
        kernel = BAOA(regression, step_size=0.01)
        mcmc = sampler(kernel, 10, warmup_steps=4, num_chains=2, thinning=thinning, **options)
        mcmc.run(*DATA)
        runs.append(mcmc.get_samples(group_by_chain=True)["slope"])
    assert torch.equal(*runs)
    assert [(s["done"], s["draws"], s["warming up"]) for s in seen] == [
        (3, 0, True),
        (6, 2, False),
        (9, 5, False),
        (12, 8, False),
    ]
    assert [s["step"] for s in seen] == [thinning * s["done"] for s in seen]
    for s in seen[1:]:
        assert torch.equal(s["kept"]["slope"], runs[0][:, : s["draws"]])
        assert torch.equal(s["here"], runs[0][:, s["draws"] - 1]) and s["energy"].shape == (2,)


def raising_stop(progress: Progress) -> None:
    if progress.num_draws == 4:
        raise StopIteration


@pytest.mark.parametrize(
    "callback",
    [
        lambda p: p.num_draws == 4,
        lambda p: np.bool_(p.num_draws == 4),
        lambda p: torch.tensor(p.num_draws == 4),
        raising_stop,
    ],
)
def test_a_callback_stops_a_run(callback: Any) -> None:
    whole = sampler(BAOA(model, step_size=0.1), num_chains=2)
    whole.run()
    stopped = sampler(BAOA(model, step_size=0.1), num_chains=2, callback=callback)
    stopped.run()
    draws = stopped.get_samples(group_by_chain=True)["b"]
    assert torch.equal(draws, whole.get_samples(group_by_chain=True)["b"][:, :4])
    assert dict(from_pyro(stopped)["posterior"].sizes)["draw"] == 4


@pytest.mark.parametrize("answer", [None, 1, 0.5, "stop", torch.ones(()), torch.ones(3) > 0])
def test_an_answer_that_is_no_truth_value_does_not_stop_a_run(answer: Any) -> None:
    mcmc = sampler(BAOA(model, step_size=0.1), callback=lambda progress: answer)
    mcmc.run()
    assert len(mcmc.get_samples()["a"]) == 10


def test_an_error_in_a_callback_is_raised_and_keeps_the_draws() -> None:
    def fail(progress: Progress) -> None:
        if progress.num_draws == 6:
            raise RuntimeError("the logger is down")

    mcmc = sampler(BAOA(model, step_size=0.1), callback=fail, num_chains=2)
    with pytest.raises(RuntimeError, match="the logger is down"):
        mcmc.run()
    assert mcmc.get_samples(group_by_chain=True)["b"].shape == (2, 6, 2)


def test_a_run_in_a_store_that_a_callback_stopped_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("zarr")

    def stored(path: str, **options: Any) -> VectorizedMCMC:
        kernel = BAOA(regression, step_size=0.01)
        mcmc = sampler(kernel, 12, num_chains=2, store=tmp_path / path, store_every=4, resume=True, **options)
        mcmc.run(*DATA)
        return mcmc

    whole = stored("whole").get_samples(group_by_chain=True)["slope"]
    stopped = stored("part", callback=lambda progress: progress.num_draws == 6)
    assert torch.equal(stopped.get_samples(group_by_chain=True)["slope"], whole[:, :6])
    assert torch.equal(stored("part").get_samples(group_by_chain=True)["slope"], whole)


def test_callbacks_out_of_range() -> None:
    with pytest.raises(ValueError, match="callback_every is 0"):
        sampler(BAOA(model, step_size=0.1), callback=print, callback_every=0)
    with pytest.raises(TypeError, match="callback is 3; pass a function"):
        sampler(BAOA(model, step_size=0.1), callback=3)


# --- the progress bar ---------------------------------------------------------------------------------------


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_the_bar_is_redrawn_by_time_also_within_a_draw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mcmc = sampler(BAOA(model, step_size=0.1))
    mcmc.run()
    assert mcmc._chains is not None
    clock = Clock(monkeypatch)
    shown = []

    def report(self: Chains) -> dict[str, str]:
        shown.append(clock.now)
        return {}

    monkeypatch.setattr(type(mcmc._chains), "report", report)
    with Bar(draws=3, done=0, thinning=1000, disable=False) as bar:
        for _ in range(2000):
            clock.now += Bar.SECONDS / 400
            bar.tick(mcmc._chains, 1, warming_up=True)
    assert 5 <= len(shown) <= 6  # of 2,000 ticks
    err = capsys.readouterr().err
    assert "2000/3000" in err and "Warmup" in err


def test_there_is_no_bar_where_it_is_disabled(capsys: pytest.CaptureFixture[str]) -> None:
    sampler(BAOA(model, step_size=0.1)).run()
    assert capsys.readouterr().err == ""
    sampler(BAOA(model, step_size=0.1), disable_progbar=False, thinning=2).run()
    assert "20/20" in capsys.readouterr().err


# --- temperatures by chain ----------------------------------------------------------------------------------

LADDER = (0.0, 0.25, 1.0)


def laddered(kind: Any, temperature: Any, **options: Any) -> VectorizedMCMC:
    starts = {name: value.double() for name, value in STARTS.items()}
    kernel = kind(model, step_size=0.05, temperature=temperature, **options)
    mcmc = sampler(kernel, 6, num_chains=3, thinning=2, initial_params=starts)
    mcmc.run()
    return mcmc


@pytest.mark.parametrize("options", [{}, {"preconditioner": PerSite()}], ids=["plain", "masses"])
@pytest.mark.parametrize("kind", ALL_KERNELS)
def test_each_chain_of_a_ladder_is_that_of_its_temperature(
    kind: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise; at T = 0 bit for bit, as there is none."""
    ladder = laddered(kind, torch.tensor(LADDER), **options)
    samples, stats = ladder.get_samples(group_by_chain=True), ladder.diagnostics()["sample_stats"]
    for chain, temperature in enumerate(LADDER):
        alone = laddered(kind, temperature, **options)
        for name, value in alone.get_samples(group_by_chain=True).items():
            if temperature == 0:
                assert torch.equal(samples[name][chain], value[chain])
            else:
                torch.testing.assert_close(samples[name][chain], value[chain])
        theirs = alone.diagnostics()["sample_stats"][f"chain {chain}"]
        assert (stats[f"chain {chain}"]["temperature"] == temperature).all()
        torch.testing.assert_close(stats[f"chain {chain}"], theirs)
    # negative control: another ladder has other chains
    other = laddered(kind, (0.0, 0.5, 1.0), **options).get_samples(group_by_chain=True)["b"]
    same = [torch.equal(other[chain], samples["b"][chain]) for chain in range(3)]
    assert same == [True, False, True]


def test_large_chains_of_a_ladder_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.randn(12, 3, 3)  # they draw it in another order
    monkeypatch.setattr(Chains, "_noise", lambda self, shard: noise[self.step][shard.rows])
    together = laddered(BAOA, LADDER).get_samples(group_by_chain=True)
    monkeypatch.setattr(gradient, "LARGE", 1)
    torch.testing.assert_close(laddered(BAOA, LADDER).get_samples(group_by_chain=True), together)


@pytest.mark.parametrize(
    "given",
    [list(LADDER), LADDER, np.array(LADDER), torch.tensor(LADDER).float(), lambda step: LADDER],
    ids=["list", "tuple", "array", "float32", "schedule"],
)
def test_a_ladder_can_be_given_in_many_ways(given: Any) -> None:
    expected = laddered(BAOA, torch.tensor(LADDER))
    assert torch.equal(laddered(BAOA, given).get_samples()["b"], expected.get_samples()["b"])


@pytest.mark.parametrize("given", [torch.tensor(0.5), np.float64(0.5), 0.5])
def test_one_number_is_a_number(given: Any) -> None:
    kernel = BAOA(model, step_size=cast(float, torch.tensor(0.1)), temperature=given)
    assert kernel.temperature == 0.5 and isinstance(kernel.step_size, float)


def test_a_ladder_may_begin_after_a_common_temperature() -> None:
    mcmc = laddered(BAOA, lambda step: LADDER if step >= 6 else 0.5)
    stats = mcmc.diagnostics()["sample_stats"]
    assert stats["chain 2"]["temperature"].tolist() == [0.5] * 3 + [1.0] * 3
    assert stats["chain 0"]["temperature"].tolist() == [0.5] * 3 + [0.0] * 3


@pytest.mark.parametrize("large", [False, True])
def test_blocks_of_a_ladder_are_its_steps(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that is compiled, without the compiler."""
    monkeypatch.setattr(package, "compiled", straight_line)
    if large:
        monkeypatch.setattr(gradient, "LARGE", 1)
    options: dict[str, Any] = {"num_samples": 1, "num_chains": 3, "thinning": 10}
    draws = []
    for jit in ("compile", "auto"):
        kernel = SGHMC(model, step_size=0.05, temperature=[0.0, 1.0, 0.0], jit=jit)
        mcmc = sampler(kernel, **options, initial_params={n: v.double() for n, v in STARTS.items()})
        mcmc.run()
        assert mcmc._chains is not None and mcmc._chains._compiles(False) == (jit == "compile")
        draws.append(mcmc.get_samples(group_by_chain=True)["b"])
    torch.testing.assert_close(draws[0][[0, 2]], draws[1][[0, 2]], rtol=1e-10, atol=1e-10)
    assert (draws[0][1] - draws[0][0]).abs().max() > 0.01


def test_a_ladder_is_exported_and_stored(tmp_path: Path) -> None:
    data = from_pyro(laddered(BAOA, list(LADDER)))
    assert '"temperature": [0.0, 0.25, 1.0]' in data.attrs["kernel_settings"]
    by_chain = data["sample_stats"]["temperature"].values
    assert (by_chain == np.array(LADDER)[:, None]).all()
    pytest.importorskip("zarr")

    def stored(ladder: Any) -> VectorizedMCMC:
        kernel = BAOA(regression, step_size=0.01, temperature=ladder)
        mcmc = sampler(kernel, num_chains=3, store=tmp_path / "run", resume=True)
        mcmc.run(*DATA)
        return mcmc

    first = stored(torch.tensor(LADDER)).get_samples()["slope"]
    assert torch.equal(stored(list(LADDER)).get_samples()["slope"], first)
    with pytest.raises(ValueError, match=r"holds another run: temperature\[1\] was 0.25"):
        stored((0.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("temperature", "error", "message"),
    [
        ([1.0, -1.0, 0.5], ValueError, r"temperature is \(1.0, -1.0, 0.5\); pass finite numbers >= 0"),
        ([1.0, torch.inf, 0.5], ValueError, "pass finite numbers >= 0"),
        (torch.ones(2), ValueError, "temperature has 2 values, and there are 3 chains; pass one for each"),
        (lambda step: [1.0], ValueError, "temperature has 1 values, and there are 3 chains"),
        (torch.ones(3, 1), ValueError, r"temperature has the shape \(3, 1\); pass a number"),
        ([], ValueError, r"temperature has the shape \(0,\)"),
        ("hot", TypeError, "temperature is 'hot'; pass a number"),
    ],
)
def test_ladders_out_of_range(temperature: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        laddered(BAOA, temperature)


def test_a_ladder_is_not_for_pyros_driver_nor_for_step_sizes() -> None:
    with pytest.raises(ValueError, match=r"Pyro's drivers run one chain.*VectorizedMCMC"):
        pyro.infer.MCMC(BAOA(model, step_size=0.1, temperature=[1.0]), 5, disable_progbar=True).run()
    with pytest.raises(ValueError, match=r"step_size is \(0.1, 0.2\); pass a finite number"):
        BAOA(model, step_size=[0.1, 0.2])  # type: ignore[arg-type]


def test_a_ladder_with_too_large_a_noise_estimate_is_refused() -> None:
    """As one temperature is; the estimate takes more off than the coldest warm chain injects."""
    with pytest.raises(ValueError, match="leaves noise of variance"):
        laddered(BAOA, (0.0, 0.01, 1.0), noise_estimate=20.0)
    laddered(BAOA, (0.0, 1.0, 1.0), noise_estimate=1.0)
