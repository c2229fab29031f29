"""Stored draws read by others: while they are written, after a crash, and when files are damaged.

Covers also `draws.readable` and `draws.reader`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pytest
import torch
import zarr
from pyro.infer import Predictive

from pyro_sym import Run, from_pyro, open_run
from pyro_sym.draws import store
from pyro_sym.draws.store import Store
from tests.catalogue import normals
from tests.draws.test_store import (
    Crash,
    X,
    Y,
    crash_at,
    crashed,
    inject_nan,
    kernel,
    mcmc,
    regression,
    run,
    same,
)

pytestmark = pytest.mark.usefixtures("float64")


def values(tree: Any, group: str, name: str) -> torch.Tensor:
    return torch.as_tensor(tree[group][name].values)


# --- what is read -------------------------------------------------------------------------------------------


def test_a_stored_run_has_the_draws_of_the_run(tmp_path: Path) -> None:
    sampler, seen = run(kernel(), store=tmp_path / "run"), open_run(tmp_path / "run")
    assert (seen.num_chains, seen.num_samples, seen.total, seen.finished) == (2, 9, 9, True)
    assert seen.sites == ["net/slope", "scale"] and seen.sampling_time == sampler.sampling_time
    assert repr(seen) == f"<BAOA run in {tmp_path / 'run'}: 9 of 9 draws of 2 chains>"
    for grouped in (True, False):
        assert same(seen.get_samples(group_by_chain=grouped), sampler.get_samples(group_by_chain=grouped))
    ours, theirs = seen.diagnostics(), sampler.diagnostics()
    assert same(ours["sample_stats"], theirs["sample_stats"]) and same(ours["scale"], theirs["scale"])
    assert ours["divergences"] == theirs["divergences"] == {"chain 0": [], "chain 1": []}


def test_predictions_need_draws_and_a_model_only(tmp_path: Path) -> None:
    run(kernel(), store=tmp_path / "run")
    predictive = Predictive(regression, open_run(tmp_path / "run").get_samples(), return_sites=["y"])
    assert predictive(X[:5], Y[:5])["y"].shape == (18, 5)


@pytest.mark.parametrize("how", [str, Path, open_run])
def test_the_exporter_reads_a_path(how: Callable[[Path], Any], tmp_path: Path) -> None:
    sampler = run(kernel(), store=tmp_path / "run")
    ours = from_pyro(how(tmp_path / "run"), model=regression, args=(X, Y), log_likelihood=True)
    theirs = from_pyro(sampler, log_likelihood=True)
    for group, name in (
        ("posterior", "net.slope"),
        ("sample_stats", "lp"),
        ("sample_stats", "site_kinetic_temperature"),
        ("observed_data", "y"),
        ("log_likelihood", "y"),
    ):
        assert ours[group][name].dims == theirs[group][name].dims
        assert torch.equal(values(ours, group, name), values(theirs, group, name)), name
    assert ours["sample_stats"]["latent_site"].values.tolist() == ["net/slope", "scale"]
    assert ours.attrs["kernel"] == theirs.attrs["kernel"] == "BAOA"
    for attr in ("kernel_settings", "unconstrained_sizes", "run"):
        assert json.loads(ours.attrs[attr]) == json.loads(theirs.attrs[attr])
    assert set(from_pyro(how(tmp_path / "run"))["posterior"].data_vars) == {"net.slope", "scale"}


def test_masked_chains_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_nan(monkeypatch, at_step=14)  # of the third draw
    sampler = run(kernel(), store=tmp_path / "run", on_divergence="mask")
    seen = open_run(tmp_path / "run")
    assert same(seen.get_samples(), sampler.get_samples()) and seen.get_samples()["scale"].shape == (11,)
    assert seen.diverged == sampler.diverged and list(seen.diverged) == [1]
    assert seen.diagnostics()["divergences"] == sampler.diagnostics()["divergences"]


# --- while it is written, and after a crash -----------------------------------------------------------------


def test_a_reader_sees_whole_blocks_and_keeps_what_it_saw(tmp_path: Path) -> None:
    seen: list[Run] = []
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 5 + 4, lambda: seen.append(open_run(tmp_path / "run")))
        with pytest.raises(Crash):
            run(kernel(), store=tmp_path / "run")
    (early,) = seen
    assert (early.num_samples, early.finished) == (3, False)
    run(kernel(), store=tmp_path / "run", resume=True)
    late = open_run(tmp_path / "run").get_samples(group_by_chain=True)
    assert early.get_samples(group_by_chain=True)["scale"].shape == (2, 3)
    assert same(early.get_samples(group_by_chain=True), {name: value[:, :3] for name, value in late.items()})


def test_before_the_first_draw(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 2)
    seen = open_run(tmp_path / "run")
    assert (seen.num_samples, seen.total) == (0, 9)
    with pytest.raises(ValueError, match=r"no draws in .*run yet"):
        seen.get_samples()
    with pytest.raises(ValueError, match=r"no draws in .*run yet"):
        from_pyro(seen)


READER = """
import sys, torch
from pyro_sym import from_pyro, open_run
print("ready", flush=True)
for line in sys.stdin:
    run = open_run(sys.argv[1])
    draws = run.get_samples(group_by_chain=True)["scale"] if run.num_samples else torch.zeros(2, 0)
    stored = from_pyro(sys.argv[1])["posterior"].sizes["draw"] if run.num_samples else 0
    print(run.num_samples, stored, run.finished, *draws.flatten().tolist(), flush=True)
"""


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    reader = [sys.executable, "-W", "error::UserWarning:pyro_sym", "-c", READER, str(tmp_path / "run")]
    with subprocess.Popen(reader, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        lines = []

        def ask() -> None:
            assert other.stdin is not None and other.stdout is not None
            print(file=other.stdin, flush=True)
            lines.append(other.stdout.readline().split())

        with pytest.MonkeyPatch.context() as patch:
            note = Store.note

            def noting(self: Store, *args: Any) -> None:
                note(self, *args)
                ask()

            patch.setattr(Store, "note", noting)
            sampler = run(kernel(), store=tmp_path / "run")
        other.stdin.close()
        assert other.wait() == 0
    assert [(int(line[0]), int(line[1])) for line in lines] == [(n, n) for n in (0, 0, 3, 6, 9)]
    assert [line[2] for line in lines] == ["False"] * 4 + ["True"]
    draws = sampler.get_samples(group_by_chain=True)["scale"]
    for count, _, _, *numbers in lines:
        assert [float(number) for number in numbers] == draws[:, : int(count)].flatten().tolist()


# --- damage -------------------------------------------------------------------------------------------------


def flip(path: Path, at: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0b0100_0000
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


SCALE, SLOPE, DIVERGING = (
    "posterior/scale/c/0/1",
    "posterior/net.slope/c/0/1/0/0",
    "sample_stats/diverging/c/0/1",
)


@pytest.mark.parametrize(
    ("chunk", "damage", "what"),
    [
        (SCALE, flip, "can't be read"),
        (DIVERGING, flip, "can't be read"),
        (SLOPE, cut, "can't be read"),
        (SCALE, empty, "can't be read"),
        (SLOPE, Path.unlink, "are lost"),
        (DIVERGING, Path.unlink, "are lost"),  # in which all values are the fill value
    ],
)
def test_damaged_chunks_are_named(
    chunk: str, damage: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    """Negative control: the undamaged store can be read."""
    sampler = run(kernel(), store=tmp_path / "run")
    open_run(tmp_path / "run").get_samples()
    damage(tmp_path / "run" / chunk)
    name = chunk.split("/c/")[0]
    message = rf"run is damaged: draws 3 to 5 of '{name}' .*{what}"
    with pytest.raises(ValueError, match=message):
        open_run(tmp_path / "run").diagnostics()
    with pytest.raises(ValueError, match=message):
        sampler.diagnostics()
    with pytest.raises(ValueError, match=message):
        mcmc(kernel(), store=tmp_path / "run", resume=True), from_pyro(tmp_path / "run")


def test_draws_that_are_not_taken_yet_are_no_damage(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 12)
    assert not (tmp_path / "run" / "posterior/scale/c/0/2").exists()
    assert open_run(tmp_path / "run").get_samples()["scale"].shape == (12,)


@pytest.mark.parametrize("damage", [cut, empty])
def test_damaged_metadata_are_named(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run(kernel(), store=tmp_path / "run")
    damage(tmp_path / "run" / "zarr.json")
    for read in (open_run, from_pyro, lambda path: run(kernel(), store=path, resume=True)):
        with pytest.raises(ValueError, match=r"run is damaged.* its zarr.json can't be read"):
            read(tmp_path / "run")


@pytest.mark.parametrize("damage", [cut, empty, lambda path: flip(path, path.stat().st_size // 2)])
def test_a_damaged_record_is_named_and_the_draws_are_read(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    run(kernel(), store=tmp_path / "run")
    damage(tmp_path / "run" / "state.pt")
    with pytest.raises(ValueError, match=r"run can't be resumed: its record state.pt is damaged"):
        run(kernel(), store=tmp_path / "run", resume=True)
    assert open_run(tmp_path / "run").finished


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no store of draws at .*nothing"):
        open_run(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder is no store of draws"):
        from_pyro(str(tmp_path / "folder"))
    zarr.create_group(tmp_path / "other")
    with pytest.raises(ValueError, match="other is damaged, or no store of draws"):
        open_run(tmp_path / "other")


def test_stores_without_checksums_are_read_and_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first versions wrote them: no codec, no chunk where all is False, no format in the metadata."""
    sampler = run(kernel(), store=tmp_path / "run")
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "run", old)
    root: Any = zarr.open_group(old, mode="r+", zarr_format=3, use_consolidated=False)
    for group in ("posterior", "sample_stats"):
        for name, array in list(root[group].arrays()):
            if name not in ("chain", "draw"):
                kept = array[:]
                root[group].create_array(
                    name,
                    data=kept,
                    chunks=array.chunks,
                    fill_value=array.fill_value,
                    dimension_names=array.metadata.dimension_names,
                    compressors=None,
                    overwrite=True,
                )
    attrs = dict(root.attrs)
    for name in ("format", "unconstrained_sizes", "kernel_settings", "run"):
        del attrs[name]
    root.attrs.put(attrs)
    for name in ("lock", "state.pt"):  # of which Zarr would warn
        (old / name).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Zarr's format 3 has no consolidated metadata on paper yet
        zarr.consolidate_metadata(old)
    torch.save({**torch.load(tmp_path / "run" / "state.pt"), "format": 1}, old / "state.pt")
    assert not (old / "sample_stats/diverging/c").exists()
    assert same(open_run(old).get_samples(), sampler.get_samples())
    assert from_pyro(old)["posterior"].sizes["draw"] == 9
    with pytest.raises(ValueError, match=r"has format 1, this version .* resumes format 2"):
        run(kernel(), store=old, resume=True)


# --- where it is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["s3://bucket/run.zarr", "memory://run", "gs:/b/run", "zip::file://a", "file://host/run"]
)
def test_urls_are_refused(url: str) -> None:
    paths = [] if url.startswith("file") else [Path(url)]  # whose slashes are one
    for place in (url, *paths):
        with pytest.raises(ValueError, match=r"store is .*not on a local disk.*Pass a local path"):
            mcmc(kernel(), store=place)
    for make in (lambda: open_run(url), lambda: from_pyro(url)):
        with pytest.raises(ValueError, match=r"store is .*not on a local disk.*Pass a local path"):
            make()


def test_local_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, path in [
        ("a/run.zarr/", tmp_path / "a" / "run.zarr"),
        ("~/run.zarr", tmp_path / "home" / "run.zarr"),
        ((tmp_path / "with space").as_uri(), tmp_path / "with space"),
        (b"bytes", tmp_path / "bytes"),
    ]:
        sampler = mcmc(kernel(), store=given, num_samples=2, warmup_steps=0)
        with monkeypatch.context() as elsewhere:
            elsewhere.chdir("/")  # a relative path is resolved at the start
            pyro.set_rng_seed(1)
            sampler.run(X, Y)
        assert (path / "state.pt").is_file() and open_run(given).finished  # type: ignore[arg-type]
    for nowhere, error, message in [("", ValueError, "is empty"), (3, TypeError, "is 3; pass the path")]:
        with pytest.raises(error, match=message):
            mcmc(kernel(), store=nowhere)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file exists and is no store"):
        mcmc(kernel(), store="file")
    with pytest.raises(
        OSError, match=r"the store .*file/run can't be created \((File exists|Not a directory)\)"
    ):
        mcmc(kernel(), store="file/run").run(X, Y)


def test_a_place_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    sampler = mcmc(kernel(), store=tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"the store .*run can't be created \(Permission denied\)"):
        sampler.run(X, Y)


@pytest.mark.parametrize(
    ("names", "message"), [(["draw"], "site 'draw' would .* dim of draws"), (["a/b", "a.b"], "is site 'a/b'")]
)
def test_sites_that_share_a_variable_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    model = normals(dict.fromkeys(names, ()))

    with pytest.raises(ValueError, match=message):
        run(kernel(model=model), store=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_site_without_values(tmp_path: Path) -> None:
    def chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
        return store.Variable("posterior", "w", shape, (), torch.zeros(()).numpy().dtype).chunks(5)

    assert chunks((2, 100, 0)) == (2, 5, 1)
