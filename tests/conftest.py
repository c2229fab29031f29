"""Fixtures shared by the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

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
