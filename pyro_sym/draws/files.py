"""Files that survive a crash: replaced atomically, and flushed to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["files_in", "replacing", "save", "sync"]


def save(record: dict[str, Any], path: Path) -> None:
    """``torch.save`` with checksums, which replaces the file atomically."""
    checks = torch.serialization.get_crc32_options()
    with replacing(path) as new, new.open("wb") as file:
        torch.serialization.set_crc32_options(True)
        try:
            torch.save(record, file)
        except RuntimeError as error:  # in which torch hides the error of the file
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        finally:
            torch.serialization.set_crc32_options(checks)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a temporary file, then replace ``path`` with it once it is on the disk."""
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        sync([new])
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync([path.parent])


def files_in(path: Path) -> list[Path]:
    """The file at a path, or all files in the directory there; none if there is neither."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def sync(paths: list[Path]) -> None:
    """Flush files and directories to the disk, in parallel: they share writes to the disk's journal."""

    def flush(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(flush, paths))
