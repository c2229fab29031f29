"""The state of torch's global random generators, kept while something else draws from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fork_random_state"]


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
