"""Groups that the package doesn't have."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_sym import FiniteGroup, Permutation


class Cyclic(FiniteGroup):
    """Cyclic shifts of ``size`` entries: element k moves each entry k places on."""

    def __init__(self, axes: dict[str, int], size: int) -> None:
        self.all, self.n = Permutation({**axes}), size
        self.axes = self.all.axes

    def __repr__(self) -> str:
        return f"Cyclic({self.n})"

    def check_values(self, values: Any) -> None:
        self.all.check_values(values)

    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        return self.all._act((torch.arange(self.n) - element) % self.n, values)

    def inverse(self, element: Tensor) -> Tensor:
        return -element % self.n

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return (first + second) % self.n

    def identity(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros(*batch_shape, 1, dtype=torch.long)

    def sample(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(self.n, (*batch_shape, 1))

    def elements(self, values: Any) -> Tensor:
        return torch.arange(self.n).unsqueeze(-1)

    def generators(self, values: Any) -> list[tuple[str, Tensor]]:
        return [("a shift by one", torch.ones(1, dtype=torch.long))]

    def log_order(self, values: Any) -> float:
        return math.log(self.n)
