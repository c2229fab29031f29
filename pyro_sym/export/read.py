"""Read draws, and what is known of them, from an MCMC run, a guide, or a dict."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor

from pyro_sym.draws.open_run import Run, open_run
from pyro_sym.errors import NoDensityError
from pyro_sym.export.attrs import run_settings
from pyro_sym.export.guide_density import draw_symmetrized, log_joint, log_q
from pyro_sym.export.sites import latents, unseen
from pyro_sym.guides.symmetrized import AutoSymmetrized
from pyro_sym.model.minibatch import Loader
from pyro_sym.model.program import Args, in_subsampled_plate

__all__ = ["Fit", "from_draws", "from_guide", "from_mcmc"]


Model = Callable[..., Any] | None
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """Draws and their statistics, by name, and the model with its arguments, if there is one."""

    draws: dict[str, Tensor]  # (num_chains, num_samples, *shape)
    model: Model
    args: Args
    kwargs: Kwargs
    stats: dict[str, Tensor] = field(default_factory=dict)  # (num_chains, num_samples, *shape)
    attrs: dict[str, Any] = field(default_factory=dict)  # of the export
    shows_all: bool = True  # whether the model can show any row of its subsampled plates
    other_args: Args | None = None  # with another batch, if args hold one batch of a loader
    latent_sites: list[str] = field(default_factory=list)  # of statistics by site, in their order

    @property
    def sample_shape(self) -> torch.Size:
        """``(num_chains, num_samples)``."""
        return next(iter(self.draws.values())).shape[:2]

    @property
    def flat(self) -> dict[str, Tensor]:
        """The draws of all chains, of shape ``(num_chains * num_samples, *shape)``."""
        return {name: value.flatten(0, 1) for name, value in self.draws.items()}

    @functools.cached_property
    def first_finite(self) -> dict[str, Tensor]:
        """The first draw of which all values are finite, or nothing if there is none."""
        flat = self.flat
        for i in range(self.sample_shape.numel()):
            draw = {name: value[i] for name, value in flat.items()}
            if all(value.isfinite().all() for value in draw.values()):
                return draw
        return {}


def from_draws(draws: Mapping[str, Any], model: Model, args: Args | None, kwargs: Kwargs | None) -> Fit:
    """Read a dict of draws, each of shape ``(num_chains, num_samples, *shape)``."""
    values = {name: torch.as_tensor(value) for name, value in draws.items()}
    if not values:
        raise ValueError("there are no draws to export: the dict is empty")
    first = next(iter(values))
    for name, value in values.items():
        if 0 in value.shape[:2]:
            raise ValueError(f"there are no draws: those of site {name!r} have shape {tuple(value.shape)}")
        if value.dim() < 2 or value.shape[:2] != values[first].shape[:2]:
            other = "" if name == first else f", and those of {first!r} {tuple(values[first].shape)}"
            found = f"draws of site {name!r} have shape {tuple(value.shape)}{other}"
            raise ValueError(f"{found}; pass (num_chains, num_samples, *shape), alike for all sites")
    return Fit(values, model, args or (), kwargs or {})


def from_mcmc(mcmc: Any, model: Model, args: Args | None, kwargs: Kwargs | None) -> Fit:
    """Read a run of Pyro's ``MCMC``, of :class:`~pyro_sym.VectorizedMCMC`, or a stored one."""
    if isinstance(mcmc, str | os.PathLike | Run):
        return _from_store(mcmc if isinstance(mcmc, Run) else open_run(mcmc), model, args or (), kwargs or {})
    draws = _mcmc_draws(mcmc)
    kernel = mcmc.kernel
    model = model if model is not None else getattr(kernel, "model", None)
    batches = getattr(kernel, "batches", None) if args is None else None
    other_args = None
    if batches is not None:  # a batch is among the model's arguments
        args, *others = (Loader([batch]).first().args for batch in islice(batches, 2))
        other_args = others[0] if others else None
    args = args if args is not None else getattr(mcmc, "_args", None) or ()
    kwargs = kwargs if kwargs is not None else getattr(mcmc, "_kwargs", None) or {}
    reports = _reports(mcmc)
    attrs = run_settings(mcmc)
    if rates := [float(report["acceptance rate"]) for report in reports if "acceptance rate" in report]:
        attrs["acceptance_rate"] = rates
    stats = _mcmc_stats(reports, draws)
    transforms = getattr(kernel, "transforms", None) or {}
    if transforms and stats.keys() - {"diverging"}:  # a kernel of this package
        # The number of values that a temperature of a site averages over.
        attrs["unconstrained_sizes"] = {
            name: math.prod(transform.forward_shape(draws[name].shape[2:]))
            for name, transform in transforms.items()
        }
    return Fit(draws, model, args, kwargs, stats, attrs, batches is None, other_args, list(transforms))


def _from_store(run: Run, model: Model, args: Args, kwargs: Kwargs) -> Fit:
    """Read a stored run, which has neither its model nor its data."""
    if run.num_samples == 0:
        raise ValueError(f"there are no draws in {run.path} yet; export it again when there are")
    draws = run.get_samples(group_by_chain=True)
    stats = _mcmc_stats(_reports(run), draws)
    return Fit(draws, model, args, kwargs, stats, run.attrs, latent_sites=run.sites)


def from_guide(
    guide: Any, model: Model, args: Args, kwargs: Kwargs, num_samples: int, densities: bool
) -> Fit:
    """Draw from a guide, as one chain; with ``densities``, compute ``log_p`` and ``log_q`` of the draws."""
    with unseen():
        first = latents(poutine.trace(guide).get_trace(*args, **kwargs))
    local = [name for name, site in first.items() if in_subsampled_plate(site["cond_indep_stack"])]
    kept = [name for name in first if name not in local]
    attrs: dict[str, Any] = {"guide": type(guide).__name__}
    if local:
        warnings.warn(
            f"sites {local} of the guide are inside subsampled plates and left out of the export: each draw "
            "has other rows. To export them, pass args and kwargs that switch subsampling off",
            stacklevel=3,
        )
        attrs["left_out"] = local
    if not kept:
        raise ValueError(f"the guide {guide} has no latent sites to export")
    model = model if model is not None else _without_initial_values(getattr(guide, "model", None))
    draws, own_density = _guide_draws(guide, kept, args, kwargs, num_samples, densities)
    stats = {}
    if densities:
        try:
            stats["log_q"] = own_density if own_density is not None else log_q(guide, draws, args, kwargs)
        except NoDensityError as error:
            attrs["log_q"] = f"left out: {error}"
        if model is not None:
            stats["log_p"] = log_joint(model, draws, args, kwargs)
    one_chain = [{name: value.unsqueeze(0) for name, value in several.items()} for several in (draws, stats)]
    return Fit(one_chain[0], model, args, kwargs, one_chain[1], attrs)


def _without_initial_values(model: Any) -> Any:
    """Take off the handler under which an autoguide keeps its model: it replaces draws by initial values."""
    while isinstance(model, functools.partial) and isinstance(next(iter(model.args), None), InitMessenger):
        model = model.args[1]
    return model


def _guide_draws(
    guide: Any, kept: list[str], args: Args, kwargs: Kwargs, num_samples: int, densities: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Draws of shape ``(num_samples, *shape)``, and their log density if the guide computes both."""
    if densities and isinstance(guide, AutoSymmetrized):
        values, density = draw_symmetrized(guide, num_samples, args, kwargs)
        return {name: values[name] for name in kept}, density
    with unseen():
        if hasattr(guide, "sample_posterior"):
            values = guide.sample_posterior(*args, sample_shape=(num_samples,), **kwargs)
        else:
            # Predictive would pad values with dims of plates that their sites are not in.
            rows = [latents(poutine.trace(guide).get_trace(*args, **kwargs)) for _ in range(num_samples)]
            values = {name: torch.stack([row[name]["value"] for row in rows]) for name in kept}
    return {name: values[name] for name in kept}, None


def _mcmc_draws(mcmc: Any) -> dict[str, Tensor]:
    if not hasattr(mcmc, "get_samples"):
        kind = type(mcmc).__name__
        raise TypeError(f"{kind} keeps no draws to export; use MCMC, a dict, or, for a guide, from_pyro_svi")
    if getattr(mcmc, "_samples", True) is None:
        raise ValueError("the MCMC has no draws yet: call its run() first")
    draws = dict(mcmc.get_samples(group_by_chain=True))
    if not draws:
        raise ValueError("the MCMC has no latent sites to export")
    if not math.prod(next(iter(draws.values())).shape[:2]):
        raise ValueError(
            "the MCMC has no draws, as its run ended in the warm-up: run it again; after a divergence, with "
            "a smaller step_size or from another start"
        )
    return draws


def _reports(mcmc: Any) -> list[dict[str, Any]]:
    """The kernel's reports by chain; ``mcmc.diagnostics()`` would compute ESS, and fail on few draws."""
    return [report or {} for report in getattr(mcmc, "_diagnostics", [])]


def _mcmc_stats(reports: list[dict[str, Any]], draws: dict[str, Tensor]) -> dict[str, Tensor]:
    """Statistics of draws, of any shape ``(num_chains, num_samples, *shape)``, by the kernel's names."""
    num_chains, num_samples = next(iter(draws.values())).shape[:2]
    stats: dict[str, Tensor] = {}
    if reports and all("divergences" in report for report in reports):
        stats["diverging"] = torch.zeros(num_chains, num_samples, dtype=torch.bool)
        for chain, report in enumerate(reports):
            stats["diverging"][chain, report["divergences"]] = True
    if not reports or not all("sample_stats" in report for report in reports):
        return stats
    for name in reports[0]["sample_stats"]:
        by_chain = [torch.as_tensor(report["sample_stats"][name]) for report in reports]
        for chain, values in enumerate(by_chain):
            if values.shape[:1] != (num_samples,):
                found = f"the statistic {name!r} of chain {chain} has shape {tuple(values.shape)}"
                raise ValueError(f"{found}, expected one value for each of {num_samples} draws")
        stats[name] = torch.stack(by_chain)  # (num_chains, num_samples, *shape)
    return stats
