"""Draws on disk: blocks of draws in Zarr's format, and a record from which a run goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym.draws.identity import Identity
from pyro_sym.draws.kernel_settings import kernel_settings
from pyro_sym.draws.memory import keep
from pyro_sym.draws.reader import (
    FORMAT,
    GROUPS,
    METADATA,
    StoredArrays,
    StoredDraws,
    import_zarr,
    local_path,
    read_metadata,
)
from pyro_sym.sgmcmc.chains import Chains, Divergence
from pyro_sym.sgmcmc.statistics import Recorder

__all__ = ["DrawsOnDisk", "Store", "block_of_draws", "random_state", "set_random_state"]

# A block of draws is at most so large, and a run at least so many blocks.
BLOCK_BYTES, NUM_BLOCKS = 2**26, 20
# What a reader of one number has to read with it.
CHUNK_BYTES = 2**22

RECORD, LOCK = "state.pt", "lock"


@dataclass(frozen=True)
class Variable:
    """An array of the store, with chains and draws in front."""

    group: str
    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]


class Store:
    r"""A directory of draws, statistics and a record of where the run is.

    It is a Zarr hierarchy with the groups ``posterior`` and ``sample_stats``, as ArviZ has them, whose arrays
    have the size of the whole run from the start: ``xarray.open_datatree(path, engine="zarr")`` opens it at
    any time, and draws to come are NaN. The attribute ``draws`` of its root says how many draws there are.

    Chunks are blocks of draws, each with a checksum, written before the record, which is replaced in one go:
    a run that dies leaves the record of the last whole block, and writes what came after it again.

    Args:
        path: the directory; a path or a ``file://`` URL.

    Attributes:
        arrays: what can be read of it, once it was opened.

    Raises:
        ImportError: if Zarr is not installed.
        FileExistsError: if there is something else at ``path``.
        ValueError: if ``path`` is a URL of something that is no local disk.
    """

    arrays: StoredArrays

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        self._zarr = import_zarr()
        self._lock: Any = None
        if self.path.exists() and not (self.path / RECORD).is_file():
            raise FileExistsError(
                f"{self.path} exists and is no store of draws; pass another path, or remove what is there"
            )

    def exists(self) -> bool:
        """Whether a run has been stored."""
        return self.path.exists()

    def record(self) -> dict[str, Any]:
        """What was last committed."""
        path = self.path / RECORD
        try:
            with zipfile.ZipFile(path) as file:
                if (broken := file.testzip()) is not None:  # torch compares no checksums
                    raise zipfile.BadZipFile(f"the checksum of {broken!r} is another")
            record: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            version = record["format"]
        except OSError:
            raise
        except Exception as error:  # whatever zipfile, pickle and torch make of a file that was cut short
            raise ValueError(
                f"the run in {self.path} can't be resumed: its record {RECORD} is damaged ({error}). Its "
                "draws can be read with pyro_sym.open_run(path)"
            ) from error
        if version != FORMAT:
            raise ValueError(
                f"{self.path} has format {version!r}, this version of pyro_sym goes on with {FORMAT}; resume "
                "the run with the version that began it, or read its draws with pyro_sym.open_run(path)"
            )
        return record

    def lock(self) -> None:
        """Keep other processes from writing.

        Raises:
            BlockingIOError: if another process is writing.
            OSError: if the file of the lock can't be written.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            return
        with self._room():
            self._lock = (self.path / LOCK).open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except OSError as error:
            self.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise OSError(error.errno, f"{self.path} can't be locked ({error.strerror})") from error
            raise BlockingIOError(
                error.errno, f"another process is writing to {self.path}; wait for it, or end it first"
            ) from error

    def close(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(
        self,
        variables: list[Variable],
        block: int,
        record: dict[str, Any],
        attrs: Mapping[str, Any],
    ) -> None:
        """Make the store, whole or not at all."""
        from zarr.codecs import Crc32cCodec

        new = self.path.with_name(f".{self.path.name}.new")
        with self._room("created"):
            shutil.rmtree(new, ignore_errors=True)  # of a run that died just here
            new.parent.mkdir(parents=True, exist_ok=True)
            root = self._zarr.create_group(new, attributes={"format": FORMAT, **attrs})
            groups = {name: root.create_group(name) for name in GROUPS}
            for name, group in groups.items():
                shape = next(variable.shape for variable in variables if variable.group == name)
                for dim, size in zip(("chain", "draw"), shape[:2], strict=True):
                    group.create_array(dim, data=np.arange(size), dimension_names=(dim,), compressors=None)
            for variable in variables:
                groups[variable.group].create_array(
                    variable.name,
                    shape=variable.shape,
                    chunks=_chunks(variable, block),
                    dtype=variable.dtype,
                    fill_value=False if variable.dtype == bool else math.nan,
                    dimension_names=variable.dims,
                    compressors=Crc32cCodec(),  # nothing is compressed: the digits of draws are noise
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Zarr's format 3 has no consolidated metadata on paper yet
                self._zarr.consolidate_metadata(new)
            _save(record, new / RECORD)
            new.rename(self.path)

    def open(self) -> None:
        """Get ready to write, and to read."""
        self.arrays = StoredArrays(self.path, writable=True)

    def extend(self, num_samples: int) -> None:
        """Make room for more draws.

        Arrays get their new shape one by one. The metadata of the root, from which readers have the shapes,
        are replaced at last and in one go.

        Args:
            num_samples: how many draws of each chain there are to be.
        """
        with self._room():
            metadata = read_metadata(self.path)
            for name, shown in metadata["consolidated_metadata"]["metadata"].items():
                group, _, variable = name.rpartition("/")
                if group not in GROUPS or variable == "chain":
                    continue
                shown["shape"][0 if variable == "draw" else 1] = num_samples
                path = self.path / name / METADATA
                with _replacing(path) as new:
                    new.write_text(json.dumps(json.loads(path.read_text()) | {"shape": shown["shape"]}))
                if variable == "draw":
                    array = self._zarr.open_array(self.path / name, mode="r+", zarr_format=3)
                    array[:] = np.arange(num_samples)
            with _replacing(self.path / METADATA) as new:
                new.write_text(json.dumps(metadata, indent=2))
        self.open()

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Write a block of draws, each value of shape ``(C, draws, ...)``."""
        with self._room():
            for path, value in values.items():
                self.arrays[path][:, start : start + value.shape[1]] = _to_numpy(value)
            chunk = f"c/0/{start // self.arrays.block}"
            files = [file for path in values for file in _files(self.path / path / chunk)]
            folders = {file.parent for file in files}
            _sync([*files, *folders])

    def commit(self, record: dict[str, Any]) -> None:
        """Make what was written, and the state after it, the place to go on from."""
        with self._room():
            _save(record, self.path / RECORD)

    def note(self, draws: int, sampling_time: float, diverged: Mapping[int, Divergence]) -> None:
        """Tell readers how many draws there are, and which chains have ended."""
        ended = {str(chain): astuple(divergence) for chain, divergence in diverged.items()}
        with self._room():
            metadata = read_metadata(self.path)
            metadata["attributes"] |= {"draws": draws, "sampling_time": sampling_time, "diverged": ended}
            with _replacing(self.path / METADATA) as new:
                new.write_text(json.dumps(metadata, indent=2))

    @contextmanager
    def _room(self, what: str = "written") -> Iterator[None]:
        """Name the store, and say what to do where the disk refuses."""
        try:
            yield
        except OSError as error:
            cure = "See to the disk and to the folder above it, or pass another path"
            if what == "written":
                cure = "It can be read up to its last block; see to the disk, and run again with resume=True"
            message = f"the store {self.path} can't be {what} ({error.strerror}). {cure}"
            raise OSError(error.errno, message) from error


class DrawsOnDisk(StoredDraws):
    """Draws that are written to a store, a block at a time.

    Args:
        store: a directory; if there is a run in it, the chains are set to where that has come to.
        chains: the chains that draw, just started.
        num_samples: how many draws each; more than the store was made for extend it.
        block: how many draws to write at once, in a store that is made anew.
        identity: what the run was started with.
        start: torch's random state before the chains were started.
        record: the record of the store, if there is a run in it.

    Raises:
        ValueError: if the store is one of another run, or was made for more draws.
    """

    def __init__(
        self,
        store: Store,
        chains: Chains,
        num_samples: int,
        block: int,
        identity: Identity,
        start: Mapping[str, Any],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._chains = chains
        self._recorder = Recorder(chains)
        self._num_samples = num_samples
        sites = {name: name.replace("/", ".") for name in chains.potential.shapes}
        _check_names(sites)
        self._about: dict[str, Any] = {
            "format": FORMAT,
            "identity": identity.record(),
            "start": dict(start),
        }
        if record is None:
            variables = _variables(chains, sites, num_samples)
            store.create(variables, block, self._record(), _attrs(chains, identity))
            store.lock()
            store.open()
        else:
            store.open()
            self._resume(identity, record)
        super().__init__(store.arrays, sites, chains.position.device)
        self.done, self.num_draws, self.sampling_time = (
            (0, 0, 0.0) if record is None else (record[name] for name in ("done", "draws", "sampling_time"))
        )
        block = store.arrays.block
        self._positions = chains.position.new_empty(block, *chains.position.shape)
        self._diverging = torch.zeros(block, len(chains.position), dtype=torch.bool)
        self._held = 0
        identity.warn(store.path)
        self._note()

    def append(self) -> None:
        """Keep the draw where the chains stand."""
        keep(self._chains, self._positions[self._held], self._diverging[self._held])
        self._recorder.append()
        self._held += 1

    def proceed(self, sampling_time: float) -> None:
        """Note that a draw is done; after the last one of a block, commit it.

        Blocks end where chunks do: the first one after an extension may be short.
        """
        super().proceed(sampling_time)
        draws, block = self.num_draws + self._held, len(self._positions)
        if draws == self._num_samples or (draws if self._held else self.done) % block == 0:
            self._write()
            self._store.commit(self._record())
            self._note()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left of a run cut short. The record stays: chains may be between two draws."""
        try:
            if self._held:
                self._write()
                self._note()
        finally:
            self._store.close()

    def _write(self) -> None:
        if not (held := self._held):
            return
        self._held = 0  # whatever comes of it, it is not tried twice
        potential = self._chains.potential
        values = potential.constrain(potential.unflatten(self._positions[:held].transpose(0, 1)))
        block = {f"posterior/{self._sites[name]}": value for name, value in values.items()}
        stats = {**self._recorder.take(), "diverging": self._diverging.clone()}
        self._diverging[:] = False
        block |= {f"sample_stats/{name}": value[:held].transpose(0, 1) for name, value in stats.items()}
        self._store.write(self.num_draws, block)
        self.num_draws += held

    def _note(self) -> None:
        self._store.note(self.num_draws, self.sampling_time, self._chains.diverged)

    def _record(self) -> dict[str, Any]:
        return {
            **self._about,
            "done": self.done,
            "draws": self.num_draws,
            "sampling_time": self.sampling_time,
            "chains": self._chains.state_dict(),
            "random": random_state(),
        }

    def _resume(self, identity: Identity, record: Mapping[str, Any]) -> None:
        """Check that this is the run that is stored, before anything is written, and go on with it."""
        path, stored = self._store.path, self._store.arrays.num_samples
        if differences := identity.differences(record["identity"]):
            raise ValueError(
                f"{path} holds another run: {'; '.join(differences)}. Resume it with what it was begun with, "
                "or pass another path"
            )
        if self._num_samples < stored:
            raise ValueError(
                f"num_samples is {self._num_samples}, and the run in {path} is one of {stored} draws; pass "
                f"at least {stored}, or read what there is with pyro_sym.open_run(path)"
            )
        identity.warn_of_versions(record["identity"], path)
        if self._num_samples > stored:
            self._store.extend(self._num_samples)
        self._about = {name: record[name] for name in self._about}
        self._chains.load_state_dict(record["chains"])
        set_random_state(record["random"])


def _check_names(sites: Mapping[str, str]) -> None:
    """Refuse sites that would share a variable."""
    taken = {"chain": "the dim of chains", "draw": "the dim of draws"}
    for site, variable in sites.items():
        if variable in taken:
            raise ValueError(
                f"site {site!r} would be stored as {variable!r}, which is {taken[variable]}; rename the site"
            )
        taken[variable] = f"site {site!r}"


def _attrs(chains: Chains, identity: Identity) -> dict[str, Any]:
    """What the store says of the run, for readers."""
    potential = chains.potential
    return {
        "inference_library": "pyro",
        "kernel": type(chains.kernel).__name__,
        "latent_site": list(potential.shapes),
        "unconstrained_sizes": dict(potential.sizes),
        "kernel_settings": kernel_settings(chains.kernel),
        "run": {name: int(identity.words[name]) for name in ("num_chains", "warmup_steps", "thinning")},
    }


def block_of_draws(chains: Chains, num_samples: int) -> int:
    """How many draws to write at once, by default."""
    draw = chains.position.numel() * chains.position.element_size()
    return max(1, min(BLOCK_BYTES // draw, math.ceil(num_samples / NUM_BLOCKS)))


def random_state() -> dict[str, Any]:
    """The states of torch's global generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the states of torch's global generators."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def _variables(chains: Chains, sites: Mapping[str, str], num_samples: int) -> list[Variable]:
    """What there is to store, as the start of the chains shows it."""
    potential = chains.potential
    values = potential.constrain(potential.unflatten(chains.position[:1]))
    recorder = Recorder(chains)
    recorder.append()
    stats = {name: stat.transpose(0, 1)[:, 0] for name, stat in recorder.take().items()}
    stats["diverging"] = torch.zeros(len(chains.position), dtype=torch.bool)
    lead = (len(chains.position), num_samples)
    variables = []
    for site, value in values.items():
        dims = ("chain", "draw", *(f"{sites[site]}_dim_{axis}" for axis in range(value.dim() - 1)))
        shape, dtype = (*lead, *value.shape[1:]), _to_numpy(value[:0]).dtype
        variables.append(Variable("posterior", sites[site], shape, dims, dtype))
    for name, stat in stats.items():
        dims = ("chain", "draw", "latent_site")[: stat.dim() + 1]
        dtype = _to_numpy(stat[:0]).dtype
        variables.append(Variable("sample_stats", name, (*lead, *stat.shape[1:]), dims, dtype))
    return variables


def _chunks(variable: Variable, block: int) -> tuple[int, ...]:
    """A block of draws of all chains; of a large site as many leading rows as make a chunk."""
    chains, _, *event = variable.shape
    chunk = [1] * len(event)
    size = chains * block * variable.dtype.itemsize
    for axis in reversed(range(len(event))):
        chunk[axis] = max(1, min(event[axis], CHUNK_BYTES // size))
        size *= chunk[axis]
    return (chains, block, *chunk)


def _to_numpy(values: Tensor) -> np.ndarray[Any, Any]:
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


def _save(record: dict[str, Any], path: Path) -> None:
    checks = torch.serialization.get_crc32_options()
    with _replacing(path) as new, new.open("wb") as file:
        torch.serialization.set_crc32_options(True)  # a reader compares the checksums
        try:
            torch.save(record, file)
        except RuntimeError as error:  # torch hides what the file had to say
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        finally:
            torch.serialization.set_crc32_options(checks)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write another file, and put it in the place of this one once it is on the disk."""
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        _sync([new])
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    _sync([path.parent])


def _files(path: Path) -> list[Path]:
    """A file, or the files in a directory; none if there is neither."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def _sync(paths: list[Path]) -> None:
    """Wait until files are on the disk: side by side, as one write to a disk's journal serves many."""

    def one(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, paths))
