"""Stored draws opened without a model: in another process, while the run goes on, or after a crash."""

from __future__ import annotations

import os
from typing import Any

import torch

from pyro_sym.draws.contract import Draws
from pyro_sym.draws.divergence import Divergence
from pyro_sym.draws.readable import ReadableRun
from pyro_sym.draws.reader import StoredArrays, StoredDraws, local_path, variable_names

__all__ = ["Run", "open_run"]

# Attributes of the store that describe its run; the oldest stores have fewer.
KEPT = ("kernel", "kernel_settings", "unconstrained_sizes")


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the draws that a run of :class:`~pyro_sym.VectorizedMCMC` has stored, for reading.

    It needs no model and takes no lock, so another process may be writing the run. It shows the draws that
    were complete when it was called; call it again to see later ones.

    Args:
        path: the store; a path or a ``file://`` URL.

    Returns:
        The run so far.

    Raises:
        FileNotFoundError: if there is nothing at the path.
        ValueError: if it holds no store of draws, or the store is damaged.
        ImportError: if Zarr is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> from pyro.infer import Predictive
        >>> def model(y=None):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.zarr"
        >>> mcmc = VectorizedMCMC(
        ...     BAOA(model, step_size=0.1), num_samples=20, num_chains=2, disable_progbar=True, store=path
        ... )
        >>> mcmc.run(torch.tensor(1.0))
        >>> run = open_run(path)
        >>> run.num_chains, run.num_samples, run.finished
        (2, 20, True)
        >>> Predictive(model, run.get_samples())()["y"].shape
        torch.Size([40])
    """
    return Run(StoredArrays(local_path(path)))


class Run(ReadableRun):
    """A stored run at one moment, as :func:`open_run` opens it.

    It has the methods of :class:`~pyro_sym.VectorizedMCMC` that read draws. Each call reads from the disk.

    Args:
        arrays: of the store.

    Attributes:
        path: of the store.
        num_chains: :math:`C`.
        num_samples: draws of each chain so far.
        total: draws of each chain when the run is finished.
        sites: names of the latent sites.
        sampling_time: seconds that the draws took, warm-up included.
        attrs: the kernel's name and settings, and how it was run, as :func:`~pyro_sym.from_pyro` exports
            them.
        diverged: by chain, a :class:`~pyro_sym.draws.divergence.Divergence` with step and reason.
    """

    def __init__(self, arrays: StoredArrays) -> None:
        attrs = arrays.attrs
        self.path = arrays.path
        self.num_chains: int = arrays.num_chains
        self.num_samples: int = arrays.num_draws
        self.total: int = arrays.num_samples
        self.sites: list[str] = list(attrs["latent_site"])
        self.sampling_time = float(attrs.get("sampling_time", 0.0))
        self.attrs: dict[str, Any] = {
            **{name: attrs[name] for name in KEPT if name in attrs},
            "run": {**attrs.get("run", {}), "num_chains": self.num_chains, "num_samples": self.num_samples},
            "sampling_time": self.sampling_time,
        }
        self._draws = StoredDraws(arrays, variable_names(self.sites), torch.device("cpu"))
        ends, missing = attrs.get("diverged", {}), self._draws.diverging()
        self.diverged = {  # the oldest stores don't say how a chain ended
            chain: Divergence(*ends.get(str(chain), (0, "a draw is not finite")))
            for chain in range(self.num_chains)
            if missing[:, chain].any()
        }

    @property
    def finished(self) -> bool:
        """Whether all draws of the run are there."""
        return self.num_samples == self.total

    def __repr__(self) -> str:
        """Kernel, path, and how many draws there are."""
        return (
            f"<{self.attrs['kernel']} run in {self.path}: {self.num_samples} of {self.total} draws of "
            f"{self.num_chains} chains>"
        )

    def _drawn(self) -> Draws:
        if self.num_samples == 0:
            raise ValueError(f"there are no draws in {self.path} yet; open it again when there are")
        return self._draws
