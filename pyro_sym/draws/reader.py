"""Reading a store of draws: its path, its metadata, and its arrays with checks."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np
import torch
from torch import Tensor

from pyro_sym.draws.contract import Draws

__all__ = [
    "FORMAT",
    "GROUPS",
    "METADATA",
    "StoredArrays",
    "StoredDraws",
    "import_zarr",
    "local_path",
    "read_metadata",
    "variable_names",
]

FORMAT = 2
"""The format that this version writes. Format 1, whose chunks have no checksums, is read but not resumed."""
GROUPS = ("posterior", "sample_stats")
METADATA = "zarr.json"


def local_path(store: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a store, from a path (``~`` is the home directory) or a ``file://`` URL.

    URLs of other machines, whose files can't be locked and replaced atomically, raise a ``ValueError``.
    """
    try:
        text = os.fsdecode(os.fspath(store))
    except TypeError as error:
        raise TypeError(f"store is {store!r}; pass the path of a local directory") from error
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(:|/)", text):
        parts = urlsplit(text)
        if parts.scheme.lower() != "file" or parts.netloc not in ("", "localhost"):
            raise ValueError(
                f"store is {os.fspath(store)!r}, which is not on a local disk, where files can be locked and "
                "replaced atomically. Pass a local path, and copy the store when the run is done"
            )
        text = url2pathname(unquote(parts.path))
    if not text:
        raise ValueError("store is empty; pass the path of a local directory")
    return Path(os.path.abspath(os.path.expanduser(text)))


def variable_names(sites: Iterable[str]) -> dict[str, str]:
    """Return the variable of each site, in whose name ``/`` can't be; raise if two would share one."""
    names: dict[str, str] = {}
    taken = {"chain": "the dim of chains", "draw": "the dim of draws"}
    for site in sites:
        name = names[site] = site.replace("/", ".")
        if name in taken:
            raise ValueError(
                f"site {site!r} would be stored as {name!r}, which is {taken[name]}; rename the site"
            )
        taken[name] = f"site {site!r}"
    return names


class StoredArrays:
    """The arrays of a store, as they were at one moment, with ``attrs``, the attributes of the root.

    The metadata of the root, a file that is replaced atomically, hold the shapes of all arrays and the number
    of draws. They are read once, so reads are consistent while another process writes. Of each chain
    ``num_draws`` draws can be read, of ``num_samples`` when the run is finished; ``block`` are written at
    once.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        zarr = import_zarr()
        if not path.exists():
            raise FileNotFoundError(f"there is no store of draws at {path}")
        if not (path / METADATA).is_file():
            raise ValueError(f"{path} is no store of draws: it has no file {METADATA}")
        try:
            # Also write chunks that are all fill value ("no divergence"), so that a lost chunk is noticed.
            with zarr.config.set({"array.write_empty_chunks": True}):
                mode = "r+" if writable else "r"
                root = zarr.open_group(path, mode=mode, zarr_format=3, use_consolidated=True)
                self.attrs: dict[str, Any] = dict(root.attrs)
                self._arrays = {
                    f"{group}/{name}": array for group in GROUPS for name, array in root[group].arrays()
                }
            diverging = self._arrays["sample_stats/diverging"]
        except OSError:
            raise
        except Exception as error:  # whatever Zarr and JSON raise for a file that was cut short
            raise ValueError(
                f"{path} is damaged, or no store of draws: its {METADATA} can't be read "
                f"({type(error).__name__}: {error})"
            ) from error
        if self.attrs.get("format", 1) not in (1, FORMAT):
            raise ValueError(
                f"{path} has format {self.attrs['format']!r}, this version of pyro_sym reads up to {FORMAT}; "
                "read it with a newer version"
            )
        self.num_chains, self.num_samples = diverging.shape
        self.block: int = diverging.chunks[1]
        self.num_draws = min(int(self.attrs.get("draws", 0)), self.num_samples)

    def __getitem__(self, name: str) -> Any:
        """The Zarr array with a name such as ``posterior/w``."""
        return self._arrays[name]

    def names(self, group: str) -> list[str]:
        """Names of the variables of a group."""
        found = [name.removeprefix(f"{group}/") for name in self._arrays if name.startswith(f"{group}/")]
        return [name for name in found if name not in ("chain", "draw")]

    def read(self, name: str, draws: int) -> Tensor:
        """Return the first draws of a variable such as ``posterior/w``, of shape ``(C, draws, ...)``.

        A chunk that is lost or damaged raises a ``ValueError``.
        """
        if self.attrs.get("format", 1) > 1:  # format 1 left out chunks of fill values
            for start, stop, file in self._chunks(name, draws):
                if not file.is_file():
                    raise ValueError(
                        f"{self.path} is damaged: draws {start} to {stop - 1} of {name!r} are lost: there is "
                        f"no file {file.relative_to(self.path)}. {_CURE}"
                    )
        array = self._arrays[name]
        try:
            return torch.from_numpy(np.asarray(array[:, :draws]))
        except OSError:
            raise
        except Exception as error:
            raise ValueError(self._damaged(name, draws)) from error

    def _damaged(self, name: str, draws: int) -> str:
        """Say which draws can't be read."""
        for start in range(0, draws, self.block):
            stop = min(start + self.block, draws)
            try:
                self._arrays[name][:, start:stop]
            except Exception as error:
                which = f"draws {start} to {stop - 1}"
                return f"{self.path} is damaged: {which} of {name!r} can't be read ({error}). {_CURE}"
        return f"{self.path} is damaged: {name!r} can't be read. {_CURE}"

    def _chunks(self, name: str, draws: int) -> Iterator[tuple[int, int, Path]]:
        """First draw, end and file of each chunk of the first draws of a variable."""
        array = self._arrays[name]
        _, block, *event = array.chunks
        counts = [math.ceil(size / chunk) for size, chunk in zip(array.shape[2:], event, strict=True)]
        for k in range(math.ceil(draws / block)):
            for rest in itertools.product(*map(range, counts)):
                file = self.path.joinpath(name, "c", "0", *map(str, (k, *rest)))
                yield k * block, min((k + 1) * block, draws), file


_CURE = "Restore the store from a copy, or pass another path and run again"


class StoredDraws(Draws):
    """Draws and statistics in a store, with the variables by site in ``sites``; moved to ``device``."""

    def __init__(self, arrays: StoredArrays, sites: Mapping[str, str], device: torch.device) -> None:
        self._arrays = arrays
        self._sites = sites
        self._device = device
        self.num_draws = arrays.num_draws

    def append(self) -> None:
        """Raise an error: the draws are read-only."""
        raise RuntimeError(f"the draws in {self._arrays.path} were opened for reading")

    def samples(self) -> Mapping[str, Tensor]:
        """Constrained values by site, each read when it is accessed."""
        return _Samples(self._arrays, self._sites, self.num_draws, self._device)

    def statistics(self) -> dict[str, Tensor]:
        """Statistics by name, of shape ``(draws, C, ...)``."""
        names = self._arrays.names("sample_stats")
        return {name: self._read(name) for name in names if name != "diverging"}

    def diverging(self) -> Tensor:
        """Which draws are NaN because their chain had ended, of shape ``(draws, C)``."""
        return self._read("diverging")

    def _read(self, name: str) -> Tensor:
        return self._arrays.read(f"sample_stats/{name}", self.num_draws).transpose(0, 1)


class _Samples(Mapping[str, Tensor]):
    """Draws by site, read from a store when they are accessed."""

    def __init__(
        self, arrays: StoredArrays, sites: Mapping[str, str], draws: int, device: torch.device
    ) -> None:
        self._arrays, self._sites, self._draws, self._device = arrays, sites, draws, device

    def __getitem__(self, site: str) -> Tensor:
        return self._arrays.read(f"posterior/{self._sites[site]}", self._draws).to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of the root as a dict."""
    try:
        metadata: dict[str, Any] = json.loads((path / METADATA).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: its {METADATA} can't be read ({error})") from error
    return metadata


def import_zarr() -> Any:
    """Import Zarr; without it, raise an error that says how to install it."""
    try:
        import zarr
    except ImportError as error:
        raise ImportError(
            "a store of draws needs Zarr, which is not installed: pip install 'pyro-sym[store]'"
        ) from error
    return zarr
