"""Statistics that only the recorder knows are stored, resumed, extended, read and exported.

Covers also `draws.contract`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_sym import from_pyro, open_run
from pyro_sym.draws.contract import DrawingChains
from pyro_sym.sgmcmc import vectorized
from tests.draws.test_store import crashed, kernel, run

pytestmark = pytest.mark.usefixtures("float64")

OWN = ("thermostat", "site_thermostat", "winding", "accepted", "count")


class OwnStatistics:
    """A recorder of statistics of its own, each of which has its own shape and type."""

    def __init__(self, chains: DrawingChains) -> None:
        self.chains = chains
        self.rows: list[dict[str, Tensor]] = []

    def append(self) -> None:
        position = self.chains.position.clone()  # (C, d)
        self.rows.append(
            {
                "thermostat": position[:, 0],  # (C,)
                "site_thermostat": position[:, -2:],  # (C, sites)
                "winding": position[:, :3].float(),  # (C, k)
                "accepted": position[:, 0] > 0,
                "count": position[:, 0].mul(100).long(),
            }
        )

    def statistics(self) -> dict[str, Tensor]:
        return {name: torch.stack([row[name] for row in self.rows]) for name in OWN}  # (draws, C, ...)

    def take(self) -> dict[str, Tensor]:
        taken, self.rows = self.statistics(), []
        return taken


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectorized, "Recorder", OwnStatistics)


def stats(mcmc: Any) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = mcmc.diagnostics()["sample_stats"]
    return found


def test_own_statistics_are_stored_resumed_extended_and_read(own: None, tmp_path: Path) -> None:
    expected = stats(run(kernel()))  # in memory
    first = expected["chain 0"]
    assert {name: value.shape[1:] for name, value in first.items()} == {
        "thermostat": (),
        "site_thermostat": (2,),
        "winding": (3,),
        "accepted": (),
        "count": (),
    }
    crashed(tmp_path / "crashed", kernel(), 10)
    run(kernel(), store=tmp_path / "extended", num_samples=5)
    for path in ("whole", "crashed", "extended"):
        stored = run(kernel(), store=tmp_path / path, resume=True, seed=1 if path == "whole" else 2)
        for read in (stored, open_run(tmp_path / path)):
            for chain, values in expected.items():
                for name, value in values.items():
                    other = stats(read)[chain][name]
                    assert torch.equal(other, value) and other.dtype == value.dtype, (path, chain, name)


def test_own_statistics_are_exported_with_dims(own: None, tmp_path: Path) -> None:
    sampler = run(kernel(), store=tmp_path / "run")
    exports = [from_pyro(sampler), from_pyro(tmp_path / "run"), from_pyro(run(kernel()))]
    for exported in exports:
        found = exported["sample_stats"]
        assert found["thermostat"].dims == ("chain", "draw")
        assert found["site_thermostat"].dims == ("chain", "draw", "latent_site")
        assert found["winding"].dims == ("chain", "draw", "winding_dim_0")
        for name in OWN:
            assert (found[name].values == exports[0]["sample_stats"][name].values).all()


def test_statistics_that_are_not_taken_show(
    own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a recorder that doesn't forget what was taken repeats its first rows."""
    expected = stats(run(kernel()))["chain 0"]["thermostat"]
    monkeypatch.setattr(OwnStatistics, "take", OwnStatistics.statistics)
    stored = stats(run(kernel(), store=tmp_path / "run"))["chain 0"]["thermostat"]
    assert len(stored) == len(expected) and not torch.equal(stored, expected)
