"""A shard: some chains of a run, on one device, that take each step together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_sym.sgmcmc.kernel import Factor, Kernel, State

__all__ = ["Shard"]


class Shard:
    """Some chains of a run, the ``rows``, on one device, that take each step together.

    Its noise comes from the global generator of its device. The run gives it what all shards share, such as
    the minibatch, the schedules and the preconditioner. If it is not ``alone``, the only shard of the run,
    its tensors are views of tensors of the whole run, which steps write over: so there are positions, momenta
    and gradients, of ``C d`` values each, and besides them the noise and intermediate results of one shard.

    Attributes:
        state: what the dynamics carries along, each part of shape ``(c, ·)``, the positions first.
        energy: the potential energy there, of shape ``(c,)``.
        gradient: its gradient, of shape ``(c, d)``.
        settings: step size, temperature and inverse mass of the next step, as the dynamics takes them.
    """

    state: State
    energy: Tensor
    gradient: Tensor

    def __init__(self, kernel: Kernel, rows: slice, position: Tensor, *, alone: bool) -> None:
        self.rows = rows
        self.alone = alone
        self.settings: dict[str, Any] = {}
        self._kernel = kernel
        like = position[rows]
        self.noise_shape = kernel.needs.noise_shape(like.shape)
        self.zeros = like.new_zeros(()).expand_as(like)  # (c, d), without memory of its own
        self.no_noise = like.new_zeros(()).expand(self.noise_shape)

    def draw_noise(self, *steps: int) -> Tensor:
        """Standard normal draws of a step, or of several with the steps along the first dim."""
        like = self.zeros
        return torch.randn((*steps, *self.noise_shape), dtype=like.dtype, device=like.device)

    def initial_state(
        self, position: Tensor, noise: Tensor, temperature: Factor, inverse_mass: Factor, sizes: list[int]
    ) -> State:
        """The state of the dynamics at a position ``(c, d)``."""
        parts = self._kernel.init(
            position, noise, temperature=temperature, inverse_mass=inverse_mass, sizes=sizes
        )
        return tuple(part.contiguous() for part in parts) if self.alone else parts

    def view(self, state: State, energy: Tensor, gradient: Tensor) -> None:
        """Let the chains be these rows of tensors of the whole run."""
        if self.alone:
            self.state, self.energy, self.gradient = state, energy, gradient
        else:
            self.state = tuple(part[self.rows] for part in state)
            self.energy, self.gradient = energy[self.rows], gradient[self.rows]

    def commit(self, state: State, energy: Tensor, gradient: Tensor) -> None:
        """Take over a new state."""
        if self.alone:
            self.state, self.energy, self.gradient = state, energy, gradient
        else:
            new = (*state, energy, gradient)
            for own, value in zip((*self.state, self.energy, self.gradient), new, strict=True):
                own.copy_(value)
