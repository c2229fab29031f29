"""Placeholder until the traced one is merged."""

from __future__ import annotations
import torch
from torch import Tensor
from pyro_sym.infer.minibatch import Minibatch
from pyro_sym.infer.potential import Potential


class Gradient:
    def __init__(self, potential: Potential, jit: str = "auto") -> None:
        self.potential = potential
        self.mode = "eager"

    def __call__(self, position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
        rows = []
        for c, point in enumerate(position):
            indices = {n: i if i.dim() == 1 else i[c] for n, i in minibatch.indices.items()}
            rows.append(self.potential.value_and_grad(point, indices))
        return torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])


from typing import Literal

Jit = Literal["auto", "eager", "trace", "compile"]
