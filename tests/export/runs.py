"""Runs, models and accessors that the tests of the exporter share."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_sym import Permutation, dataset

Y = torch.cat([torch.linspace(-6.0, -4.0, 10), torch.linspace(4.0, 6.0, 10)])
SYMMETRY = Permutation({"locs": -1, "weights": -1})


def event_dims(*dims: str) -> Any:
    """For ``infer``, whose type doesn't know the key."""
    return {"event_dims": list(dims)}


def mixture(y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.full((2,), 5.0)), infer=event_dims("part"))
    with pyro.plate("component", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    pyro.deterministic("gap", locs[1] - locs[0])
    pyro.factor("nothing", torch.zeros(()))
    with pyro.plate("data", len(y)):
        both = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0))
        pyro.sample("y", both, obs=y)


def run(kernel: Any, *args: Any, num_samples: int = 20, warmup_steps: int = 20, **kwargs: Any) -> MCMC:
    mcmc = MCMC(kernel, num_samples, warmup_steps, disable_progbar=True, **kwargs)
    mcmc.run(*args)
    return mcmc


class Given(MCMCKernel):
    """A kernel that returns draws made before, and statistics with them."""

    def __init__(self, draws: dict[str, Tensor], stats: dict[str, Tensor] | None = None, model: Any = None):
        self.draws, self.stats, self.model = draws, stats, model
        self.transforms: dict[str, Any] = {}
        self.chain = -1

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        self.chain, self.draw = self.chain + 1, -1

    @property  # type: ignore[misc]
    def initial_params(self) -> dict[str, Tensor]:
        return {site: value[self.chain, 0] for site, value in self.draws.items()}

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        self.draw += 1
        return {site: value[self.chain, self.draw] for site, value in self.draws.items()}

    def diagnostics(self) -> dict[str, Any]:
        if self.stats is None:
            return {}
        return {"sample_stats": {name: value[self.chain] for name, value in self.stats.items()}}


def given(
    draws: dict[str, Tensor], stats: dict[str, Tensor] | None = None, model: Any = None, args: tuple = ()
) -> MCMC:
    num_chains, num_samples = next(iter(draws.values())).shape[:2]
    kernel = Given(draws, stats, model)
    mcmc = MCMC(kernel, num_samples, 0, disable_progbar=True)
    # In one process whatever the number of CPUs, so that the kernel's counters are its own.
    mcmc.num_chains = mcmc.sampler.num_chains = num_chains
    mcmc._diagnostics = [None] * num_chains
    mcmc.run(*args)
    return mcmc


def names(data: Any, group: str) -> set[str]:
    return set(dataset(data, group).data_vars)


def groups(data: Any) -> set[str]:
    return set(data.children) if hasattr(data, "children") else set(data.groups())


def two_copies() -> dict[str, Tensor]:
    """Four chains of one posterior, two of them with the labels swapped."""
    locs = torch.tensor([-5.0, 5.0]) + 0.3 * torch.randn(4, 100, 2)
    weights = torch.tensor([0.3, 0.7]) + 0.02 * torch.randn(4, 100, 2)
    swapped = torch.tensor([0, 1, 1, 0], dtype=torch.bool)
    draws = {"locs": locs, "weights": weights}
    return {n: torch.where(swapped[:, None, None], v.flip(-1), v) for n, v in draws.items()}
