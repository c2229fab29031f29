"""The state of torch's global random generators: read, set, and kept while something else draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["fork_random_state", "random_state", "set_random_state"]


@contextmanager
def fork_random_state() -> Iterator[None]:
    """Restore torch's global generators on exit: the CPU's, and those of all CUDA devices in use.

    ``torch.random.fork_rng(devices=[])`` keeps the CPU's generator only, although ``torch.manual_seed`` and
    models on a GPU change CUDA's as well. CUDA is not initialised here: as long as nobody has used it, its
    generators have no state to keep.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def random_state() -> dict[str, Any]:
    """The states of the CPU's generator, and of those of all CUDA devices if CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to states that :func:`random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
