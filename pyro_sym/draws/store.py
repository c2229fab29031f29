"""A directory of draws in Zarr's format, with a record from which a run can be resumed."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym.draws import files
from pyro_sym.draws.divergence import Divergence
from pyro_sym.draws.reader import (
    FORMAT,
    GROUPS,
    METADATA,
    StoredArrays,
    import_zarr,
    local_path,
    read_metadata,
)

__all__ = ["Store", "Variable", "to_numpy"]

# The most bytes in a chunk, which is what a reader of a single number has to read.
CHUNK_BYTES = 2**22

RECORD, LOCK = "state.pt", "lock"


@dataclass(frozen=True)
class Variable:
    """An array of the store; its first two dims are chains and draws."""

    group: str
    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]

    def chunks(self, block: int) -> tuple[int, ...]:
        """The shape of a chunk: a block of draws of all chains, and as many leading rows as fit in it."""
        chains, _, *event = self.shape
        chunk = [1] * len(event)
        size = chains * block * self.dtype.itemsize
        for axis in reversed(range(len(event))):
            chunk[axis] = max(1, min(event[axis], CHUNK_BYTES // size))
            size *= chunk[axis]
        return (chains, block, *chunk)


class Store:
    """A directory (path or ``file://`` URL) of draws, statistics and a record of the state of the run.

    It is a Zarr hierarchy with the groups ``posterior`` and ``sample_stats``, as in ArviZ. Its arrays have
    the size of the whole run from the start, so ``xarray.open_datatree(path, engine="zarr")`` opens it at any
    time; draws that are not taken yet are NaN. The attribute ``draws`` of the root says how many there are.

    Chunks are blocks of draws, each with a checksum. They are written before the record, which is replaced
    atomically: a run that dies leaves the record of the last whole block, and is resumed from there.
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

    def record(self) -> dict[str, Any]:
        """The record that was committed last."""
        path = self.path / RECORD
        try:
            with zipfile.ZipFile(path) as file:
                if (broken := file.testzip()) is not None:  # torch.load doesn't compare checksums
                    raise zipfile.BadZipFile(f"{broken!r} has a wrong checksum")
            record: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            version = record["format"]
        except OSError:
            raise
        except Exception as error:  # whatever zipfile, pickle and torch raise for a file that was cut short
            raise ValueError(
                f"the run in {self.path} can't be resumed: its record {RECORD} is damaged ({error}). Its "
                "draws can be read with pyro_sym.open_run(path)"
            ) from error
        if version != FORMAT:
            raise ValueError(
                f"{self.path} has format {version!r}, this version of pyro_sym resumes format {FORMAT}; "
                "resume the run with the version that began it, or read it with pyro_sym.open_run(path)"
            )
        return record

    def lock(self) -> None:
        """Acquire the write lock; raise a ``BlockingIOError`` if another process is writing."""
        try:
            import fcntl
        except ImportError:  # Windows
            return
        with self._explain_disk_errors():
            self._lock = (self.path / LOCK).open("w")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except OSError as error:
            self.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise OSError(error.errno, f"{self.path} can't be locked ({error.strerror})") from error
            raise BlockingIOError(
                error.errno, f"another process is writing to {self.path}; wait for it, or end it first"
            ) from error

    def close(self) -> None:
        """Release the write lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def create(
        self, variables: list[Variable], block: int, record: dict[str, Any], attrs: Mapping[str, Any]
    ) -> None:
        """Create the store atomically, lock and open it."""
        from zarr.codecs import Crc32cCodec

        new = self.path.with_name(f".{self.path.name}.new")
        with self._explain_disk_errors("created"):
            shutil.rmtree(new, ignore_errors=True)  # left by a run that died here
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
                    chunks=variable.chunks(block),
                    dtype=variable.dtype,
                    fill_value=math.nan if variable.dtype.kind == "f" else variable.dtype.type(0),
                    dimension_names=variable.dims,
                    compressors=Crc32cCodec(),  # no compression: the digits of draws are noise
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Zarr's format 3 doesn't specify consolidated metadata yet
                self._zarr.consolidate_metadata(new)
            files.save(record, new / RECORD)
            new.rename(self.path)
        self.lock()
        self.open()

    def open(self) -> None:
        """Open the arrays for reading and writing."""
        self.arrays = StoredArrays(self.path, writable=True)

    def extend(self, num_samples: int) -> None:
        """Resize the arrays for ``num_samples`` draws of each chain, one by one.

        Readers take shapes from the metadata of the root, which are replaced last, atomically.
        """
        with self._explain_disk_errors():
            metadata = read_metadata(self.path)
            for name, shown in metadata["consolidated_metadata"]["metadata"].items():
                group, _, variable = name.rpartition("/")
                if group not in GROUPS or variable == "chain":
                    continue
                shown["shape"][0 if variable == "draw" else 1] = num_samples
                path = self.path / name / METADATA
                with files.replacing(path) as new:
                    new.write_text(json.dumps(json.loads(path.read_text()) | {"shape": shown["shape"]}))
                if variable == "draw":
                    array = self._zarr.open_array(self.path / name, mode="r+", zarr_format=3)
                    array[:] = np.arange(num_samples)
            self._replace_metadata(metadata)
        self.open()

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Write a block of draws; each value has the shape ``(C, draws, ...)``."""
        with self._explain_disk_errors():
            for path, value in values.items():
                self.arrays[path][:, start : start + value.shape[1]] = to_numpy(value)
            chunk = f"c/0/{start // self.arrays.block}"
            written = [file for path in values for file in files.files_in(self.path / path / chunk)]
            files.sync([*written, *{file.parent for file in written}])

    def commit(self, record: dict[str, Any]) -> None:
        """Replace the record: a run is resumed from here."""
        with self._explain_disk_errors():
            files.save(record, self.path / RECORD)

    def note(self, draws: int, sampling_time: float, diverged: Mapping[int, Divergence]) -> None:
        """Tell readers how many draws there are, and which chains have ended."""
        ended = {str(chain): astuple(divergence) for chain, divergence in diverged.items()}
        with self._explain_disk_errors():
            metadata = read_metadata(self.path)
            metadata["attributes"] |= {"draws": draws, "sampling_time": sampling_time, "diverged": ended}
            self._replace_metadata(metadata)

    def _replace_metadata(self, metadata: dict[str, Any]) -> None:
        with files.replacing(self.path / METADATA) as new:
            new.write_text(json.dumps(metadata, indent=2))

    @contextmanager
    def _explain_disk_errors(self, what: str = "written") -> Iterator[None]:
        """Re-raise OSError with the path of the store and advice."""
        try:
            yield
        except OSError as error:
            cure = "Check the disk and the folder above it, or pass another path"
            if what == "written":
                cure = "It can be read up to its last block; check the disk, and run again with resume=True"
            message = f"the store {self.path} can't be {what} ({error.strerror}). {cure}"
            raise OSError(error.errno, message) from error


def to_numpy(values: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as an array; bfloat16, which NumPy doesn't have, as float32."""
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
