"""The elements of a product that bring draws closest to a point: coordinate descent over its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_sym.symmetry.base import Element, Values, leaves, map_element
from pyro_sym.symmetry.blocks import Block, Increment, Moments, blocks_of

__all__ = ["LEAST_GAIN", "Nearest", "State"]

# A draw is moved only for a gain above rounding: then equal costs can't make the descent go in circles.
LEAST_GAIN = 1e-9
NUM_RESTARTS = 6
SEED = 0x5EED


class State(NamedTuple):
    """Elements, and the draws moved by them."""

    elements: Element
    images: dict[str, Tensor]

    def take(self, rows: Tensor) -> State:
        """Some of the draws."""
        return State(
            map_element(lambda part: part[rows], self.elements),
            {site: value[rows] for site, value in self.images.items()},
        )

    def put(self, rows: Tensor, some: State) -> State:
        """The state with some of its draws replaced."""
        return State(
            map_element(lambda part, new: part.index_put((rows,), new), self.elements, some.elements),
            {site: value.index_put((rows,), some.images[site]) for site, value in self.images.items()},
        )


class Nearest:
    r"""Block coordinate descent on the distance :math:`\sum_c ((g \cdot \theta)_c - \mu_c)^2 / \sigma_c^2`.

    ``group`` is a :class:`~pyro_sym.Product`; draws have shape ``(M, *shape)``, in float64 on the CPU.
    """

    def __init__(self, group: Any, draws: Values) -> None:
        self.group = group
        self.blocks = blocks_of(group.members, group.carriers)
        self.draws = {site: draws[site] for site in draws if any(site in b.axes for b in self.blocks)}
        self.num_draws = len(next(iter(draws.values())))

    def closest(self, moments: Moments, num_restarts: int = NUM_RESTARTS) -> State:
        """The draws brought closest to a mean: from where they are, and from several orders of the blocks."""
        state = self._settle(self.start(), moments, torch.arange(self.num_draws))
        for order in self.orders(num_restarts):
            state, _ = self.restart(state, moments, order)
        return state

    def margin(self, images: Values, moments: Moments) -> Tensor:
        """By how many nats the closest rivals bring draws farther from the mean, at least 0.

        For one block with the best choice the rivals are all other elements; else those that differ in one
        such block, by one swap, or by one flip.
        """
        per_block = [block.margin(images, moments) for block in self.blocks]
        return torch.stack(per_block).amin(0).clamp(min=0)

    def start(self) -> State:
        """The draws as they are."""
        return State(self._identity(self.num_draws), self.draws)

    def at(self, elements: Element) -> State:
        """The draws moved by given elements."""
        return State(elements, self.group.act(elements, self.draws))

    def place(self, moments: Moments, order: Sequence[Block]) -> State:
        """Match all draws to a mean, block by block from scratch.

        A site between two blocks, as the weights between two layers are, says nothing about the first while
        the labels of the second are arbitrary, so it waits until the second has been placed.
        """
        elements, images = self.start()
        for i, block in enumerate(order):
            later = {site for other in order[i + 1 :] for site in other.axes}
            usable = block.axes.keys() - later or block.axes.keys()
            increment = block.propose(images, moments, usable)
            elements = self._compose(increment, elements)
            images = {**images, **block.act(increment, {site: images[site] for site in block.axes})}
        return State(elements, images)

    def orders(self, num_restarts: int) -> list[list[Block]]:
        """Orders of the blocks to restart with; none for a single block whose choice is the best."""
        if len(self.blocks) == 1 and self.blocks[0].is_best:
            return []
        generator = torch.Generator().manual_seed(SEED)
        size = len(self.blocks)
        orders = [torch.randperm(size, generator=generator).tolist() for _ in range(10 * num_restarts)]
        distinct = list(dict.fromkeys(map(tuple, orders)))[:num_restarts]
        return [[self.blocks[b] for b in order] for order in distinct]

    def restart(self, state: State, moments: Moments, order: Sequence[Block]) -> tuple[State, bool]:
        """Place all draws again, keep those that come closer, and say whether any did."""
        distance, trial = moments.distance(state.images), self.place(moments, order)
        least = LEAST_GAIN * (1 + distance)
        farther = (moments.distance(trial.images) > distance + least).nonzero().squeeze(-1)
        trial = self._settle(trial, moments, farther)
        better = (moments.distance(trial.images) < distance - least).nonzero().squeeze(-1)
        return state.put(better, trial.take(better)), len(better) > 0

    def sweep(self, state: State, moments: Moments) -> tuple[State, Tensor]:
        """Improve block by block, and say which draws moved, ``(M,)``."""
        any_moved = torch.zeros(len(next(iter(state.images.values()))), dtype=torch.bool)
        for block in self.blocks:
            state, moved = self._improve(block, state, moments)
            any_moved |= moved
        return state, any_moved

    def _settle(self, state: State, moments: Moments, rows: Tensor) -> State:
        """Sweep over some draws at fixed moments until none of them moves."""
        while len(rows):
            some, moved = self.sweep(state.take(rows), moments)
            state = state.put(rows, some)
            rows = rows[moved]
        return state

    def _improve(self, block: Block, state: State, moments: Moments) -> tuple[State, Tensor]:
        """Move the draws that a better choice in one block brings closer to the mean."""
        elements, images = state
        current = {site: images[site] for site in block.axes}
        distance = moments.distance(current)
        any_moved = torch.zeros_like(distance, dtype=torch.bool)
        for increment in block.increments(current, moments):
            trial = block.act(increment, current)
            trial_distance = moments.distance(trial)
            better = trial_distance < distance - LEAST_GAIN * (1 + distance)
            if not better.any():
                continue
            any_moved |= better
            moved = self._compose(increment, elements)
            elements = map_element(lambda new, old, b=better: _where(b, new, old), moved, elements)
            # In place, for the increments that follow to be found from here.
            current.update({site: _where(better, trial[site], value) for site, value in current.items()})
            distance = torch.where(better, trial_distance, distance)
        return State(elements, {**images, **current}), any_moved

    def _identity(self, num_draws: int) -> Element:
        return self.group.identity({site: value[0] for site, value in self.draws.items()}, (num_draws,))

    def _compose(self, increment: Increment, elements: Element) -> Element:
        count = len(leaves(next(iter(increment.values())))[0])
        neutral = self._identity(count)
        parts = tuple(increment.get(member, part) for member, part in enumerate(neutral))
        return self.group.compose(parts, elements)


def _where(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(chosen.reshape(-1, *(1,) * (old.dim() - 1)), new, old)
