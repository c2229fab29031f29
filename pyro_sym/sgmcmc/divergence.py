"""Chains that are no longer finite: how they are found, and what is done about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyro_sym.draws.divergence import Divergence
from pyro_sym.errors import DivergenceError
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import Potential

__all__ = ["EARLY", "Divergence", "Divergences", "Start"]

# Steps after which a divergence has little to do with the start.
EARLY = 500


@dataclass
class Start:
    """Where chains started, as long as it may explain a divergence."""

    energy: Tensor  # (C,)
    slopes: Tensor  # (C, sites), the norm of the gradient by site
    position: Tensor  # (C, d)

    @classmethod
    def of(cls, energy: Tensor, gradient: Tensor, position: Tensor, sizes: list[int]) -> Start:
        """Keep what describes the start of chains."""
        by_site = gradient.split(sizes, -1)  # each (C, size of the site)
        return cls(energy.clone(), torch.stack([slope.norm(dim=-1) for slope in by_site], -1), position)


class Divergences:
    """Which chains of a run have diverged, and what is done about it.

    ``on_divergence="mask"`` leaves a chain where it last was finite, instead of raising an error. ``explain``
    takes a chain and its minibatch to a sentence on the cause and the cure. ``ended`` says by chain how it
    ended.
    """

    def __init__(
        self,
        potential: Potential,
        num_chains: int,
        on_divergence: Literal["raise", "mask"],
        explain: Callable[[int, Minibatch], str],
    ) -> None:
        self.ended: dict[int, Divergence] = {}
        self.on_divergence = on_divergence
        self._potential = potential
        self._num_chains = num_chains
        self._explain = explain

    def check_finite(
        self,
        what: str,
        values: Tensor,
        rows: slice,
        step: int,
        minibatch: Minibatch,
        position: Tensor | None = None,
    ) -> None:
        """Find chains with values that are not finite, and raise an error, or note their end.

        ``values``, in words ``what``, have shape ``(c, d)``, or ``(c,)`` for energies, which come with their
        ``position`` ``(c, d)``. They are those of the chains ``rows`` after ``step``.
        """
        finite = values.reshape(len(values), -1).isfinite().all(-1)  # (c,)
        chains = range(self._num_chains)[rows]
        for row in (~finite).nonzero().flatten().tolist():
            chain = chains[row]
            if chain in self.ended:
                continue
            if position is None:
                sites = self._potential.unflatten(values[row])
            else:
                sites = self._log_joint_terms(position[row], minibatch.of(row))
            first = next((name for name, value in sites.items() if not value.isfinite().all()), None)
            where = "the sum over sites" if first is None else f"site {first!r}"
            divergence = Divergence(step, f"the {what} of {where} is not finite")
            if self.on_divergence == "raise":
                who = f"chain {chain}, " if self._num_chains > 1 else ""
                cure = self._explain(chain, minibatch)
                raise DivergenceError(f"{who}step {step}: {divergence.what}; {cure}")
            self.ended[chain] = divergence

    def _log_joint_terms(self, position: Tensor, minibatch: Minibatch) -> dict[str, Tensor]:
        potential = self._potential
        values = potential.constrain(potential.unflatten(position))
        return potential.program.log_joint_terms(values, minibatch.indices, minibatch.args)

    def freeze(self, rows: slice, now: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep diverged chains where they last were finite. Chains are the first dim of each tensor."""
        if not self.ended:
            return now
        ended = torch.zeros(self._num_chains, dtype=torch.bool, device=now[0].device)
        ended[list(self.ended)] = True
        return tuple(
            torch.where(ended[rows].reshape(-1, *(1,) * (new.dim() - 1)), old, new)  # (c, 1, …)
            for new, old in zip(now, before, strict=False)
        )
