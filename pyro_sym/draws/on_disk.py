"""Draws written to a store, a block at a time, by a run that can be resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym._random import random_state, set_random_state
from pyro_sym.draws.contract import DrawingChains, StatisticsRecorder, copy_draw
from pyro_sym.draws.identity import Identity
from pyro_sym.draws.reader import FORMAT, StoredDraws, variable_names
from pyro_sym.draws.store import Store, Variable, to_numpy

__all__ = ["DrawsOnDisk", "block_of_draws"]

# By default a block has at most this many bytes, and a run at least this many blocks.
BLOCK_BYTES, NUM_BLOCKS = 2**26, 20


class DrawsOnDisk(StoredDraws):
    """Draws that are written to a store, ``block`` draws at a time.

    If ``record`` is given, the store holds a run: the chains, just started, are set to its state, and a
    larger ``num_samples`` extends it. A ``ValueError`` is raised if it is another run or was created for more
    draws. ``start`` is torch's random state before the chains were started; ``attrs`` is what readers are
    told.
    """

    def __init__(
        self,
        store: Store,
        chains: DrawingChains,
        recorder: StatisticsRecorder,
        num_samples: int,
        *,
        block: int,
        identity: Identity,
        start: Mapping[str, Any],
        attrs: Mapping[str, Any],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._chains = chains
        self._recorder = recorder
        self._num_samples = num_samples
        potential = chains.potential
        sites = variable_names(potential.shapes)
        self._about = {"format": FORMAT, "identity": identity.record(), "start": dict(start)}
        if record is None:
            by_site = {"latent_site": list(sites), "unconstrained_sizes": dict(potential.sizes)}
            variables = _variables(chains, recorder, sites, num_samples)
            store.create(variables, block, self._record(), {**attrs, **by_site})
        else:
            self._resume(identity, record)
        super().__init__(store.arrays, sites, chains.position.device)
        self.done, self.num_draws, self.sampling_time = (
            (0, 0, 0.0) if record is None else (record[name] for name in ("done", "draws", "sampling_time"))
        )
        block = store.arrays.block
        self._positions = chains.position.new_empty(block, *chains.position.shape)  # (block, C, d)
        self._diverging = torch.zeros(block, len(chains.position), dtype=torch.bool)  # (block, C)
        self._pending = 0  # draws that are not written yet
        identity.warn(store.path)
        self._note()

    def append(self) -> None:
        """Keep the current position of each chain as a draw."""
        copy_draw(self._chains, self._positions[self._pending], self._diverging[self._pending])
        self._recorder.append()
        self._pending += 1

    def proceed(self, sampling_time: float) -> None:
        """Count a draw; after the last one of a block, write the block and commit.

        Blocks end where chunks do, so the first one after an extension may be short.
        """
        super().proceed(sampling_time)
        draws, block = self.num_draws + self._pending, len(self._positions)
        if draws == self._num_samples or (draws if self._pending else self.done) % block == 0:
            self._write()
            self._store.commit(self._record())
            self._note()

    def close(self) -> None:
        """Write the draws of an unfinished block, without a commit: chains may be between two draws."""
        try:
            if self._pending:
                self._write()
                self._note()
        finally:
            self._store.close()

    def _write(self) -> None:
        if not (pending := self._pending):
            return
        self._pending = 0  # if it fails, it is not tried again
        potential = self._chains.potential
        positions = self._positions[:pending].transpose(0, 1)  # (C, draws, d)
        values = potential.constrain(potential.unflatten(positions))
        block = {f"posterior/{self._sites[name]}": value for name, value in values.items()}
        stats = {**self._recorder.take(), "diverging": self._diverging.clone()}
        self._diverging[:] = False
        block |= {f"sample_stats/{name}": value[:pending].transpose(0, 1) for name, value in stats.items()}
        self._store.write(self.num_draws, block)
        self.num_draws += pending

    def _note(self) -> None:
        self._store.note(self.num_draws, self.sampling_time, self._chains.diverged)

    def _record(self) -> dict[str, Any]:
        return {
            **self._about,
            "done": self.done,
            "draws": self.num_draws,
            "sampling_time": self.sampling_time,
            "chains": self._chains.state_dict(),
            "random": random_state(),
        }

    def _resume(self, identity: Identity, record: Mapping[str, Any]) -> None:
        """Check that the stored run is this one before anything is written, and restore its state."""
        self._store.open()
        path, stored = self._store.path, self._store.arrays.num_samples
        if differences := identity.differences(record["identity"]):
            raise ValueError(
                f"{path} holds another run: {'; '.join(differences)}. Resume it with what it was begun with, "
                "or pass another path"
            )
        if self._num_samples < stored:
            raise ValueError(
                f"num_samples is {self._num_samples}, and the run in {path} is one of {stored} draws; pass "
                f"at least {stored}, or read what there is with pyro_sym.open_run(path)"
            )
        identity.warn_of_versions(record["identity"], path)
        if self._num_samples > stored:
            self._store.extend(self._num_samples)
        self._about = {name: record[name] for name in self._about}
        self._chains.load_state_dict(record["chains"])
        set_random_state(record["random"])


def block_of_draws(chains: DrawingChains, num_samples: int) -> int:
    """How many draws to write at once, by default."""
    draw = chains.position.numel() * chains.position.element_size()
    return max(1, min(BLOCK_BYTES // draw, math.ceil(num_samples / NUM_BLOCKS)))


def _variables(
    chains: DrawingChains, recorder: StatisticsRecorder, sites: Mapping[str, str], num_samples: int
) -> list[Variable]:
    """The arrays of the store, found by recording the start of the chains as if it were a draw."""
    potential = chains.potential
    values = potential.constrain(potential.unflatten(chains.position[:1]))  # each (1, *shape)
    recorder.append()
    stats = {name: stat[0] for name, stat in recorder.take().items()}  # each (C, ...)
    stats["diverging"] = torch.zeros(len(chains.position), dtype=torch.bool)

    def variable(group: str, name: str, value: Tensor) -> Variable:
        shape = (len(chains.position), num_samples, *value.shape[1:])
        dims = [f"{name}_dim_{axis}" for axis in range(value.dim() - 1)]
        if group == "sample_stats" and value.shape[1:] == (len(sites),):
            dims = ["latent_site"]
        return Variable(group, name, shape, ("chain", "draw", *dims), to_numpy(value[:0]).dtype)

    posterior = [variable("posterior", sites[site], value) for site, value in values.items()]
    return posterior + [variable("sample_stats", name, value) for name, value in stats.items()]
