"""The minibatches of a run, from the model's own subsampled plates or from a loader."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym.model.program import SubsampledPlate

__all__ = ["Loader", "Minibatch", "PlateRows", "draw_indices", "draw_rows"]

# Rows that are drawn ahead, at most.
MAX_AHEAD = 2**16


@dataclass(frozen=True)
class Minibatch:
    """The part of the data that one step sees.

    ``indices`` are rows by subsampled plate, of shape ``(C, B)``, or ``(B,)`` if all chains share them.
    ``args`` replace the model's positional arguments for all chains; subsampled plates without indices then
    show the rows of the batch.
    """

    indices: Mapping[str, Tensor] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None

    def of(self, chains: int | slice) -> Minibatch:
        """The minibatch of one chain, or of a slice of them."""
        rows = {name: row if row.dim() == 1 else row[chains] for name, row in self.indices.items()}
        return Minibatch(rows, self.args)


NO_ROWS = Minibatch()


def draw_rows(plate: SubsampledPlate, shape: tuple[int, ...] = ()) -> Tensor:
    r"""Draw minibatches of a plate's rows, each uniformly and without replacement.

    One draw is the head of a random permutation. Many draws at once are windows of one random permutation at
    independent uniform offsets: each is an exactly uniform subset, and as two windows share :math:`B^2 / N`
    rows on average, as independent subsets do, the noise of their gradients is uncorrelated. If a
    permutation of all :math:`N` rows would cost more than the draws, rows are drawn one by one and repeats
    redrawn. Returns row numbers, of shape ``(*shape, B)``.
    """
    size, count, device = plate.size, plate.subsample_size, plate.device
    number = math.prod(shape)
    if number <= most_at_once(plate):
        return _without_repeats(size, (number, count), device).reshape(*shape, count)
    permutation = torch.randperm(size, device=device)
    if number == 1:
        return permutation[:count].reshape(*shape, count)
    circle = torch.cat([permutation, permutation[: count - 1]])
    windows = circle.unfold(0, count, 1)[torch.randint(size, (number,), device=device)]  # (number, B)
    return windows.reshape(*shape, count)


def most_at_once(plate: SubsampledPlate) -> int:
    """The most minibatches that are drawn row by row, so independent; a permutation is cheaper for more."""
    size = plate.size
    return (size - 1) // (4 * plate.subsample_size) if size > 5_000 else 0  # measured break-even


def draw_indices(plates: Mapping[str, SubsampledPlate], *shape: int) -> dict[str, Tensor]:
    """Minibatches of every plate's rows, by plate, each as :func:`draw_rows` draws them."""
    return {name: draw_rows(plate, shape) for name, plate in plates.items()}


def _without_repeats(size: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw rows with replacement and redraw repeats until none remain; every subset is equally likely."""
    rows = torch.randint(size, shape)
    drawn = rows.numpy()  # NumPy sorts many short rows ten times as fast as torch
    drawn.sort(axis=1)
    changed = np.arange(shape[0])
    while len(changed):
        again, at = np.nonzero(drawn[changed, 1:] == drawn[changed, :-1])
        again = changed[again]
        drawn[again, at + 1] = torch.randint(size, (len(again),)).numpy()
        changed = np.unique(again)
        drawn[changed] = np.sort(drawn[changed], axis=1)
    return rows.to(device)


class PlateRows:
    """Fresh rows for every subsampled plate at each step, the same for all chains if ``shared``."""

    def __init__(self, plates: Mapping[str, SubsampledPlate], num_chains: int, shared: bool = False) -> None:
        self.plates = plates
        self.shape = () if shared else (num_chains,)
        self._ahead: deque[Minibatch] = deque()
        each = math.prod(self.shape)
        rows = each * sum(plate.subsample_size for plate in plates.values())
        # Beyond, windows of a permutation are cheaper (measured); repeats are rare in an eighth of the rows.
        one_by_one = each <= 32 and all(8 * plate.subsample_size <= plate.size for plate in plates.values())
        self._steps_ahead = max(1, min(64, MAX_AHEAD // max(1, rows))) if one_by_one else 1

    def draw(self) -> Minibatch:
        """The minibatch of one step, independent of those of all others."""
        if not self.plates:
            return NO_ROWS
        if not self._ahead:
            drawn = {name: self._draw_ahead(plate) for name, plate in self.plates.items()}
            steps = zip(*(rows.unbind() for rows in drawn.values()), strict=True)
            self._ahead.extend(Minibatch(dict(zip(drawn, rows, strict=True))) for rows in steps)
        return self._ahead.popleft()

    first = draw  # a minibatch to try the model on

    def _draw_ahead(self, plate: SubsampledPlate) -> Tensor:
        """Independent minibatches of the next steps in one call, of shape ``(steps, *shape, B)``."""
        if self._steps_ahead == 1:
            return draw_rows(plate, self.shape).unsqueeze(0)
        number, count = self._steps_ahead * math.prod(self.shape), plate.subsample_size
        rows = _without_repeats(plate.size, (number, count), plate.device)
        return rows.reshape(self._steps_ahead, *self.shape, count)

    def cover(self) -> Iterator[tuple[float, Minibatch]]:
        """Minibatches of equal weights in which every row of every plate occurs equally often."""
        blocks = {name: _windows(plate) for name, plate in self.plates.items()}
        weight = 1 / math.prod(map(len, blocks.values()))
        for rows in itertools.product(*blocks.values()):
            yield weight, Minibatch(dict(zip(blocks, rows, strict=True)))

    def draw_many(self, steps: int) -> dict[str, Tensor]:
        """Rows of several steps at once, by plate, with the steps along the first dim."""
        return draw_indices(self.plates, steps, *self.shape)

    def state_dict(self) -> dict[str, Any]:
        """The minibatches that are drawn already; later ones depend on torch's random state only."""
        return {"ahead": [minibatch.indices for minibatch in self._ahead]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._ahead = deque(Minibatch(indices) for indices in state["ahead"])


class Loader:
    """Batches of a ``DataLoader``, or of any iterable that can be iterated over repeatedly.

    A batch that is a tuple or list becomes the model's positional arguments, anything else its only one. All
    chains see the same batch. The model has to declare the number of rows in all:
    ``pyro.plate("data", num_data, subsample_size=len(batch))``.

    Each pass is one epoch, with its own random stream, seeded from torch's generator. Its batches depend on
    that seed only, not on what the chains draw meanwhile, so they can be repeated. For a run to be resumed,
    they must depend on no random state but torch's and a ``DataLoader``'s own ``generator``.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        if iter(batches) is batches:
            raise ValueError(
                f"batches is {batches!r}, which can be iterated over once only; pass a DataLoader or a list"
            )
        self._begin(_seed())

    def cover(self) -> Iterator[tuple[float, Minibatch]]:
        """The batches of one epoch, weighted by their number of rows."""
        batches = [_as_args(batch) for batch in self.batches]
        sizes = [len(args[0]) for args in batches]
        for args, size in zip(batches, sizes, strict=True):
            yield size / sum(sizes), Minibatch(args=args)

    def first(self) -> Minibatch:
        """The first batch of an epoch; the run's position in its own epoch stays."""
        batch = next(iter(self.batches), None)
        if batch is None:
            raise ValueError(f"batches is {self.batches!r}, which yields no batch")
        return Minibatch(args=_as_args(batch))

    def draw(self) -> Minibatch:
        """The next batch; after the last one, the first of a new epoch."""
        if (batch := self._next()) is None:
            self._begin(_seed())
            batch = self._next()
        return Minibatch(args=_as_args(batch))

    def _begin(self, seed: int) -> None:
        """Begin an epoch; the iterator is made with its first batch, as making it may draw numbers."""
        self._seed, self._seen = seed, 0
        self._stream = torch.Generator().manual_seed(seed).get_state()
        self._running: Iterator[Any] | None = None

    def _next(self) -> Any:
        if self._running is None:
            self._began = [generator.get_state() for generator in _generators(self.batches)]
        with self._in_stream():
            self._running = iter(self.batches) if self._running is None else self._running
            self._seen += 1
            return next(self._running, None)

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self._stream)
        try:
            yield
        finally:
            self._stream = torch.get_rng_state()
            torch.set_rng_state(outside)

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch, and the state at its beginning."""
        return {"seed": self._seed, "seen": self._seen, "generators": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the epoch again and skip the batches that were seen."""
        for generator, began in zip(_generators(self.batches), state["generators"], strict=True):
            generator.set_state(began)
        self._begin(state["seed"])
        for _ in range(state["seen"]):
            self._next()


def _seed() -> int:
    return int(torch.randint(2**63 - 1, ()))


def _generators(batches: Any) -> list[torch.Generator]:
    """The generators that a ``DataLoader`` was given, for itself or its sampler, each once."""
    owners = (batches, getattr(batches, "sampler", None))
    found = [generator for owner in owners if (generator := getattr(owner, "generator", None)) is not None]
    return list({id(generator): generator for generator in found}.values())


def _as_args(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _windows(plate: SubsampledPlate) -> Tensor:
    """Successive windows around the plate until all rows occur equally often, of shape ``(windows, B)``."""
    size, count = plate.size, plate.subsample_size
    starts = count * torch.arange(size // math.gcd(size, count), device=plate.device)
    return (starts.unsqueeze(-1) + torch.arange(count, device=plate.device)) % size
