"""A stored run that is extended: old draws stay, and new ones are those of a single long run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr

from pyro_sym import open_run
from pyro_sym.draws import files
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.preconditioners import PerSite
from pyro_sym.sgmcmc.schedules import Cyclical
from pyro_sym.sgmcmc.underdamped import SGHMC
from tests.draws.test_store import CASES, Crash, crash_at, crashed, inject_nan, kernel, results, run, same

pytestmark = pytest.mark.usefixtures("float64")


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Draws and the next random number bit for bit, statistics up to rounding, as their blocks differ."""
    torch.testing.assert_close(ours["stats"], theirs["stats"], rtol=1e-12, atol=1e-12)
    return same(ours["samples"], theirs["samples"]) and same(ours["next"], theirs["next"])


@pytest.mark.parametrize(
    "case", ["rows", "traced", "shared rows, sgnht, rmsprop", "cycles", "rows drawn ahead", "loader"]
)
def test_an_extended_run_is_one_long_run(case: str, tmp_path: Path) -> None:
    expected = results(run(CASES[case](), store=tmp_path / "whole"))
    first = results(run(CASES[case](), store=tmp_path / "run", num_samples=5))
    extended = results(run(CASES[case](), store=tmp_path / "run", resume=True, seed=2))
    assert equal(extended, expected)
    assert same({name: value[:, :5] for name, value in extended["samples"].items()}, first["samples"])


@pytest.mark.parametrize("options", [{}, {"store_every": None}, {"warmup_steps": None, "store_every": None}])
def test_defaults_are_those_of_the_run_that_is_extended(options: dict[str, Any], tmp_path: Path) -> None:
    """Block and warm-up have defaults that depend on num_samples."""
    run(kernel(), store=tmp_path / "run", num_samples=5, **options)
    extended = run(kernel(), store=tmp_path / "run", num_samples=9, resume=True, seed=2, **options)
    assert extended.warmup_steps == 5
    assert same(results(extended)["samples"], results(run(kernel()))["samples"])


def test_learnt_masses_and_momenta_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without either, the draws differ."""

    def sghmc() -> Any:
        return kernel(SGHMC, preconditioner=PerSite())

    expected = results(run(sghmc(), store=tmp_path / "whole"))
    load = Chains.load_state_dict

    def forgetting(what: str) -> bool:
        def without(self: Chains, state: Any) -> None:
            fresh: dict[str, Any] = {
                "momentum": {"state": [state["state"][0], self.state[1]]},
                "masses": {"tuning": self._tuning},
            }
            load(self, {**state, **fresh.get(what, {})})

        monkeypatch.setattr(Chains, "load_state_dict", without)
        run(sghmc(), store=tmp_path / what, num_samples=5)
        extended = results(run(sghmc(), store=tmp_path / what, resume=True))
        return same(extended["samples"], expected["samples"])

    assert [forgetting(what) for what in ("nothing", "momentum", "masses")] == [True, False, False]


def test_a_run_that_is_not_finished_is_extended(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 8, num_samples=6)
    assert equal(
        results(run(kernel(), store=tmp_path / "run", resume=True, seed=2)),
        results(run(kernel(), store=tmp_path / "whole")),
    )


def test_extended_twice_and_with_a_crash(tmp_path: Path) -> None:
    expected = results(run(kernel(), store=tmp_path / "whole", num_samples=14))
    for num_samples in (4, 5):
        run(kernel(), store=tmp_path / "run", num_samples=num_samples, resume=True)
    crashed(tmp_path / "run", kernel(), 2, num_samples=14, resume=True)  # with a block begun, not ended
    assert open_run(tmp_path / "run").num_samples == 6
    assert equal(results(run(kernel(), store=tmp_path / "run", num_samples=14, resume=True)), expected)


def test_a_crash_at_any_file_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(run(kernel(), store=tmp_path / "whole"))
    replacing, left = files.replacing, 0

    def crashing(path: Path) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Crash
        return replacing(path)

    run(kernel(), store=tmp_path / "run", num_samples=5)
    sizes = []
    for count in range(40):
        left = count
        with monkeypatch.context() as patch:
            patch.setattr(files, "replacing", crashing)
            crash_at(patch, 0)
            with pytest.raises(Crash):
                run(kernel(), store=tmp_path / "run", resume=True)
        with xr.open_dataset(tmp_path / "run", engine="zarr", group="posterior") as posterior:
            sizes.append(posterior.sizes["draw"])
            assert posterior["draw"].values.tolist() == list(range(sizes[-1]))
            assert posterior["scale"][:, :5].notnull().all()
        seen = open_run(tmp_path / "run")
        assert (seen.num_samples, seen.total) == (5, sizes[-1])
        if left >= 0:  # the crash came after all files were written
            break
    assert sorted(set(sizes)) == [5, 9] and sizes == sorted(sizes) and len(sizes) > 10
    with pytest.raises(ValueError, match=r"num_samples is 5, and the run in .* is one of 9 draws"):
        run(kernel(), store=tmp_path / "run", resume=True, num_samples=5)
    assert equal(results(run(kernel(), store=tmp_path / "run", resume=True, seed=2)), expected)


def test_fewer_draws_are_refused(tmp_path: Path) -> None:
    run(kernel(), store=tmp_path / "run")
    with pytest.raises(ValueError, match=r"num_samples is 8, and .*run is one of 9 draws; pass at least 9"):
        run(kernel(), store=tmp_path / "run", num_samples=8, resume=True)


def test_a_schedule_made_for_another_length_is_refused(tmp_path: Path) -> None:
    def annealed(steps: int) -> Any:
        return kernel(step_size=Cyclical(0.01, steps).step_size)

    run(annealed(20), store=tmp_path / "run", num_samples=5)
    with pytest.raises(ValueError, match=r"step_size.__self__.period was 20 when .* and is 28 now"):
        run(annealed(28), store=tmp_path / "run", resume=True)


def test_masked_chains_stay_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_nan(monkeypatch, at_step=14)  # of the third draw
    whole = run(kernel(), store=tmp_path / "whole", on_divergence="mask")
    run(kernel(), store=tmp_path / "run", num_samples=5, on_divergence="mask")
    extended = run(kernel(), store=tmp_path / "run", resume=True, on_divergence="mask")
    assert extended.diverged == whole.diverged
    assert torch.equal(extended.get_samples()["scale"], whole.get_samples()["scale"])
