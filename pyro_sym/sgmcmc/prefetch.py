"""Random numbers drawn for many steps at once, so that they share what a call costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Prefetcher"]


class Prefetcher:
    """Random numbers drawn for many blocks of steps at once.

    ``draw`` makes tensors by name, with the given number of steps along the first dim; a step takes ``numel``
    numbers.
    """

    MAX_NUMEL, MAX_BLOCKS = 2**16, 64

    def __init__(self, draw: Callable[[int], dict[str, Tensor]], numel: int) -> None:
        self._draw = draw
        self._numel = numel
        self._blocks: deque[dict[str, Tensor]] = deque()
        self._steps = 0

    def take(self, steps: int) -> dict[str, Tensor]:
        """The numbers of the next block of steps."""
        if not self._blocks or steps != self._steps:
            count = max(1, min(self.MAX_BLOCKS, self.MAX_NUMEL // max(1, steps * self._numel)))
            drawn = self._draw(steps * count)
            chunks = zip(*(tensor.split(steps) for tensor in drawn.values()), strict=True)
            blocks = [dict(zip(drawn, chunk, strict=True)) for chunk in chunks] or [{}] * count
            self._blocks, self._steps = deque(blocks), steps
        return self._blocks.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The numbers drawn and not yet taken."""
        blocks = [{name: numbers.clone() for name, numbers in block.items()} for block in self._blocks]
        return {"steps": self._steps, "blocks": blocks}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue with these numbers."""
        self._steps = state["steps"]
        self._blocks = deque(
            {name: numbers.to(device) for name, numbers in block.items()} for block in state["blocks"]
        )
