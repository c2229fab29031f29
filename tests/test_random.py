"""Looking at a model leaves torch's random generators alone, CUDA's included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyro_sym._random import fork_random_state


def fake_cuda(monkeypatch: pytest.MonkeyPatch, initialized: bool) -> list[Any]:
    """Two CUDA devices whose generators are numbers in a list; an untouched device must not be asked."""
    states = [10, 20]

    def state_of(device: Any) -> int:
        assert initialized, "CUDA would be initialised"
        return states[torch.device(device).index if isinstance(device, str) else int(device)]

    def set_state(state: int, device: Any) -> None:
        states[torch.device(device).index if isinstance(device, str) else int(device)] = state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", state_of)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    return states


def test_generators_of_all_devices_in_use_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    states = fake_cuda(monkeypatch, initialized=True)
    before = torch.get_rng_state()
    with fork_random_state():
        torch.randn(3)
        states[:] = [1, 2]
    assert torch.equal(torch.get_rng_state(), before) and states == [10, 20]
    with torch.random.fork_rng(devices=[]):  # the control: this keeps the CPU's alone
        states[:] = [1, 2]
    assert states == [1, 2]


def test_cuda_is_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, initialized=False)
    before = torch.get_rng_state()
    with fork_random_state():
        torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
