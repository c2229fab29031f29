"""What can be read of a run, whether its draws are in memory or on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pyro.infer.mcmc.util import select_samples
from torch import Tensor

from pyro_sym.draws.contract import Draws
from pyro_sym.draws.divergence import Divergence
from pyro_sym.draws.summaries import diagnose, print_table, without_diverged

__all__ = ["ReadableRun"]


class ReadableRun(ABC):
    """A run with the methods of ``pyro.infer.MCMC`` that read draws."""

    num_chains: int
    diverged: dict[int, Divergence]

    @abstractmethod
    def _drawn(self) -> Draws:
        """The draws, of which there is at least one; otherwise an error that says why."""

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> dict[str, Tensor]:
        """The draws, in constrained space.

        Args:
            num_samples: how many to pick at random, with replacement; by default all of them.
            group_by_chain: whether to keep the chains apart.

        Returns:
            Values by site, of shape ``(C, draws, *shape)`` if grouped by chain, otherwise ``(draws, *shape)``
            without the draws of masked chains that are NaN.

        Raises:
            ValueError: if there are no draws; the message says why.
        """
        draws = self._drawn()
        samples = dict(draws.samples())
        if not group_by_chain and self.diverged:
            finite = ~draws.diverging().transpose(0, 1)  # (C, draws)
            samples = {name: values[finite].unsqueeze(0) for name, values in samples.items()}
        return select_samples(samples, num_samples, group_by_chain)

    def diagnostics(self) -> dict[str, Any]:
        """Effective sample size and split R-hat by site, and statistics by draw.

        Returns:
            As ``pyro.infer.MCMC.diagnostics()`` has it: ``{site: {"n_eff": …, "r_hat": …}}``, with
            ``"sample_stats"`` and ``"divergences"`` by ``"chain 0"``, ``"chain 1"``, …; the statistics are
            those of the kernel's :meth:`~pyro_sym.StochasticGradientKernel.diagnostics`. Effective sample
            size and R-hat are those of the chains that did not diverge; with fewer than four draws a chain
            they are NaN.

        Raises:
            ValueError: if there are no draws; the message says why.
        """
        draws = self._drawn()
        report = diagnose(without_diverged(draws.samples(), draws.diverging()))
        reports = self._diagnostics
        for name in ("divergences", "sample_stats"):
            report[name] = {f"chain {chain}": own[name] for chain, own in enumerate(reports)}
        return report

    def summary(self, prob: float = 0.9) -> None:
        """Print mean, sd, quantiles, effective sample size and R-hat by coordinate, as Pyro does.

        Draws of masked chains that are NaN are left out. Effective sample size and R-hat are those of the
        chains that did not diverge.

        Args:
            prob: the probability of the interval shown.

        Raises:
            ValueError: if there are no draws, which the message explains, or ``prob`` is out of range.
        """
        draws = self._drawn()
        print_table(draws.samples(), prob, draws.diverging())
        for chain, divergence in self.diverged.items():
            print(f"chain {chain} diverged at step {divergence.step}: {divergence.what}")

    @property
    def _diagnostics(self) -> list[dict[str, Any]]:
        """A report a chain, under the name and in the format that Pyro's ``MCMC`` has."""
        draws = self._drawn()
        stats, diverging = draws.statistics(), draws.diverging()
        return [
            {
                "divergences": diverging[:, chain].nonzero().flatten().tolist(),
                "sample_stats": {name: values[:, chain] for name, values in stats.items()},  # (draws, ...)
            }
            for chain in range(self.num_chains)
        ]
