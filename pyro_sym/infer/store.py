"""Draws on disk: blocks of draws in Zarr's format, and a record from which a run goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym.infer.chains import Chains
from pyro_sym.infer.draws import Draws, keep
from pyro_sym.infer.recorder import Recorder

__all__ = ["DrawsOnDisk", "Store", "block_of_draws", "random_state", "set_random_state"]

# A block of draws is at most so large, and a run at least so many blocks.
BLOCK_BYTES, NUM_BLOCKS = 2**26, 20
# What a reader of one number has to read with it.
CHUNK_BYTES = 2**22

FORMAT = 1
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

    Chunks are blocks of draws, written before the record, which is replaced in one go: a run that dies leaves
    the record of the last whole block, and writes what came after it again.

    Args:
        path: the directory.

    Raises:
        ImportError: if Zarr is not installed.
        FileExistsError: if there is something else at ``path``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._zarr = _zarr()
        self._arrays: dict[str, Any] = {}
        self._block = 0
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
        record: dict[str, Any] = torch.load(self.path / RECORD, map_location="cpu", weights_only=True)
        if record["format"] != FORMAT:
            raise ValueError(
                f"{self.path} has format {record['format']!r}, this version of pyro_sym reads {FORMAT}; "
                "resume the run with the version that began it"
            )
        return record

    def lock(self) -> None:
        """Keep other processes from writing."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._lock = (self.path / LOCK).open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except OSError as error:
            self.close()
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
        new = self.path.with_name(f".{self.path.name}.new")
        shutil.rmtree(new, ignore_errors=True)  # of a run that died just here
        new.parent.mkdir(parents=True, exist_ok=True)
        root = self._zarr.create_group(new, attributes=dict(attrs))
        groups = {name: root.create_group(name) for name in ("posterior", "sample_stats")}
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
                compressors=None,  # the digits of draws are noise
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr's format 3 has no consolidated metadata on paper yet
            self._zarr.consolidate_metadata(new)
        _save(record, new / RECORD)
        new.rename(self.path)

    def open(self, block: int) -> None:
        """Get ready to write blocks of so many draws, and to read."""
        self._block = block
        root = self._zarr.open_group(self.path, mode="r+")
        self._arrays = {
            f"{group}/{name}": array
            for group in ("posterior", "sample_stats")
            for name, array in root[group].arrays()
        }

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Write a block of draws, each value of shape ``(C, draws, ...)``."""
        with self._room():
            for path, value in values.items():
                self._arrays[path][:, start : start + value.shape[1]] = _to_numpy(value)
            chunk = f"c/0/{start // self._block}"
            files = [file for path in values for file in _files(self.path / path / chunk)]
            _sync([*files, *{file.parent for file in files}])

    def commit(self, record: dict[str, Any]) -> None:
        """Make what was written, and the state after it, the place to go on from."""
        with self._room():
            _save(record, self.path / RECORD)

    def note(self, draws: int, sampling_time: float) -> None:
        """Tell readers how many draws there are."""
        path = self.path / "zarr.json"
        with self._room():
            metadata = json.loads(path.read_text())
            metadata["attributes"] |= {"draws": draws, "sampling_time": sampling_time}
            with _replacing(path) as new:
                new.write_text(json.dumps(metadata, indent=2))

    def read(self, path: str, draws: int) -> Tensor:
        """The first draws of an array, of shape ``(C, draws, ...)``."""
        return torch.from_numpy(np.asarray(self._arrays[path][:, :draws]))

    @property
    def statistics(self) -> list[str]:
        """Names of the statistics."""
        paths = (path.split("/", 1) for path in self._arrays)
        return [name for group, name in paths if group == "sample_stats" and name not in ("chain", "draw")]

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Say what to do where the disk has none."""
        try:
            yield
        except OSError as error:
            message = (
                f"the store {self.path} can't be written ({error.strerror}). It can be read up to its last "
                "block; see to the disk, and run again with resume=True"
            )
            raise OSError(error.errno, message) from error


class DrawsOnDisk(Draws):
    """Draws that are written to a store, a block at a time.

    Args:
        store: a directory; if there is a run in it, the chains are set to where that has come to.
        chains: the chains that draw, just started.
        num_samples: how many draws each.
        block: how many draws to write at once.
        fingerprint: what tells this run from others.
        start: torch's random state before the chains were started.

    Raises:
        ValueError: if the store is one of another run.
    """

    def __init__(
        self,
        store: Store,
        chains: Chains,
        num_samples: int,
        block: int,
        fingerprint: Mapping[str, str],
        start: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._chains = chains
        self._recorder = Recorder(chains)
        self._num_samples = num_samples
        self._about: dict[str, Any] = {
            "format": FORMAT,
            "torch": str(torch.__version__),
            "fingerprint": dict(fingerprint),
            "start": dict(start),
        }
        self._sites = {name: name.replace("/", ".") for name in chains.potential.shapes}
        self._positions = chains.position.new_empty(block, *chains.position.shape)
        self._diverging = torch.zeros(block, len(chains.position), dtype=torch.bool)
        self._held = 0
        if store.exists():
            self._resume(store.record())
        else:
            store.create(_variables(chains, self._sites, num_samples), block, self._record(), self._attrs())
            store.lock()
        store.open(block)
        store.note(self.num_draws, self.sampling_time)

    def append(self) -> None:
        """Keep the draw where the chains stand."""
        keep(self._chains, self._positions[self._held], self._diverging[self._held])
        self._recorder.append()
        self._held += 1

    def proceed(self, sampling_time: float) -> None:
        """Note that a draw is done; after the last one of a block, commit it."""
        super().proceed(sampling_time)
        block = len(self._positions)
        last = self.num_draws + self._held == self._num_samples
        if last or self._held == block or (self._held == 0 and self.done % block == 0):
            self._write()
            self._store.commit(self._record())
            self._store.note(self.num_draws, self.sampling_time)

    def samples(self) -> Mapping[str, Tensor]:
        """Constrained values by site, each read when it is asked for."""
        return _Samples(self._store, self._sites, self.num_draws, self._chains.position.device)

    def statistics(self) -> dict[str, Tensor]:
        """Statistics, of shape ``(draws, C)`` or ``(draws, C, sites)``."""
        names = self._store.statistics
        return {n: self._read(n) for n in names if n != "diverging"}

    def diverging(self) -> Tensor:
        """Which draws are NaN as their chain had ended, of shape ``(draws, C)``."""
        return self._read("diverging")

    def _read(self, name: str) -> Tensor:
        return self._store.read(f"sample_stats/{name}", self.num_draws).transpose(0, 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left of a run cut short. The record stays: chains may be between two draws."""
        try:
            if self._held:
                self._write()
                self._store.note(self.num_draws, self.sampling_time)
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

    def _record(self) -> dict[str, Any]:
        return {
            **self._about,
            "done": self.done,
            "draws": self.num_draws,
            "sampling_time": self.sampling_time,
            "chains": self._chains.state_dict(),
            "random": random_state(),
        }

    def _resume(self, record: Mapping[str, Any]) -> None:
        then, now = record["fingerprint"], self._about["fingerprint"]
        if then != now:
            names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
            changes = "; ".join(f"{name} was {then.get(name)} and is {now.get(name)}" for name in names)
            raise ValueError(
                f"{self._store.path} holds another run: {changes}. Resume it with what it was begun with, or "
                "pass another path"
            )
        if record["torch"] != str(torch.__version__):
            warnings.warn(
                f"the run in {self._store.path} was begun with torch {record['torch']} and goes on with "
                f"{torch.__version__}, which may round otherwise",
                stacklevel=4,
            )
        self.done, self.num_draws = record["done"], record["draws"]
        self.sampling_time = record["sampling_time"]
        self._chains.load_state_dict(record["chains"])
        set_random_state(record["random"])

    def _attrs(self) -> dict[str, Any]:
        return {
            "inference_library": "pyro",
            "kernel": type(self._chains.kernel).__name__,
            "latent_site": list(self._sites),
        }


class _Samples(Mapping[str, Tensor]):
    """Draws by site, read from a store when they are asked for."""

    def __init__(self, store: Store, sites: Mapping[str, str], draws: int, device: torch.device) -> None:
        self._store, self._sites, self._draws, self._device = store, sites, draws, device

    def __getitem__(self, site: str) -> Tensor:
        return self._store.read(f"posterior/{self._sites[site]}", self._draws).to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


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
        chunk[axis] = min(event[axis], max(1, CHUNK_BYTES // size))
        size *= chunk[axis]
    return (chains, block, *chunk)


def _to_numpy(values: Tensor) -> np.ndarray[Any, Any]:
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


def _save(record: dict[str, Any], path: Path) -> None:
    with _replacing(path) as new, new.open("wb") as file:
        try:
            torch.save(record, file)
        except RuntimeError as error:  # torch hides what the file had to say
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


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


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError(
            "a store of draws needs Zarr, which is not installed: pip install 'pyro-sym[store]'"
        ) from error
    return zarr
