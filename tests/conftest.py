"""Fixtures shared by the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyro
import pytest
import torch

#: The chance that a stochastic assert fails by bad luck; 4.3 standard errors of a normal mean, two-sided.
FAILURE_RATE = 2e-5
Z_LIMIT = 4.27


torch.set_num_threads(1)  # the tests' tensors are small: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Every test starts from the same seed and an empty parameter store, and leaves the dtype as it was."""
    dtype = torch.get_default_dtype()
    pyro.set_rng_seed(20261130)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64(_fresh: None) -> None:
    """Run a test in double precision; `_fresh` puts the dtype back."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(scope="session")
def _compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One directory for the session, so that headers are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture
def own_packages(_compiler_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test's own for compiled steps."""
    from pyro_sym.graph import aot

    monkeypatch.setattr(aot, "cache_dir", lambda: tmp_path)
    return tmp_path
