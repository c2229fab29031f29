"""A model run at one draw: its sites and plates, and its data on all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_sym.export.deterministic import Deterministic
from pyro_sym.export.joined_windows import JoinedWindows
from pyro_sym.export.names import Variable, model_dims
from pyro_sym.export.pointwise import mask_of, picks_rows
from pyro_sym.export.read import Fit
from pyro_sym.export.sites import unseen, variables
from pyro_sym.model.all_rows import windows
from pyro_sym.model.conditioned_sites import FromPrior, fixed_parameters
from pyro_sym.model.program import in_subsampled_plate, is_data, is_deterministic, subsampled_plates, traced

__all__ = ["ShownModel"]


class ShownModel:
    """What a model shows at the first finite draw of a fit; sites without draws are drawn from their prior.

    Attributes:
        sites: the model's random variables and deterministic sites, by name.
        plates: its subsampled plates; none if the data are batches of a loader, which choose the rows.
        fixed: sites that are parameters at values fixed by ``poutine.condition``.
        left_out: the observed sites of which it shows only some rows.
        observed: the data, by site.
        deterministic: its deterministic sites.
    """

    def __init__(self, program: Callable[..., Any], fit: Fit) -> None:
        self.program, self._fit, draw = program, fit, fit.first_finite
        with unseen():
            self.fixed = fixed_parameters(program, fit.args, fit.kwargs, draw)
            first = self.trace(FromPrior()(poutine.condition(program, data=dict(draw))))
            self.sites = dict(variables(first))
            _refuse_flat_draws(self.sites, draw)
            self.plates = subsampled_plates(first) if fit.shows_all else {}
            self.deterministic = Deterministic(program, fit.args, fit.kwargs, first, draw)
            self._read(first, draw)
            if not fit.shows_all:
                self.deterministic.leave_out_in(subsampled_plates(first))
            if fit.other_args is not None:
                self.deterministic.compare({}, fit.other_args)

    def trace(self, handled: Any) -> poutine.Trace:
        """The trace of the model under handlers."""
        return traced(handled, self._fit.args, self._fit.kwargs)

    def _read(self, first: poutine.Trace, draw: Mapping[str, Tensor]) -> None:
        data, kept = JoinedWindows(), JoinedWindows()
        seen: dict[str, Tensor] = {}
        shown: dict[str, Any] = {}
        left_out = set()
        for window in windows(self.plates):
            trace = self.deterministic.compare(window) if window else first
            for name, site in variables(trace):
                # Latent sites are conditioned on the draw, and so "observed" too.
                if not is_data(site) or name in draw or name in self.fixed:
                    continue
                shown[name] = site
                frames, fn = site["cond_indep_stack"], site["fn"]
                if in_subsampled_plate(frames) and not picks_rows(site, window, seen):
                    left_out.add(name)
                    continue
                value = torch.as_tensor(site["value"])
                if (mask := mask_of(site, fn.batch_shape)) is not None:
                    value = value.expand(torch.broadcast_shapes(value.shape, fn.batch_shape + fn.event_shape))
                    kept.put(name, mask, frames, window)
                data.put(name, value, frames, window, fn.event_dim)
        self.sites = {**self.sites, **shown}
        self.left_out = sorted(left_out)
        # Sites in a plate whose rows the arguments choose are left out, whether they are data or not.
        plates = {f.name for name in left_out for f in shown[name]["cond_indep_stack"] if f.vectorized}
        self.deterministic.leave_out_in(plates)
        self.observed = {
            name: self.variable(name, value, 0, kept.values.get(name))
            for name, value in data.values.items()
            if name not in left_out
        }

    def variable(
        self, name: str, value: Tensor, sample_ndim: int = 2, kept: Tensor | None = None
    ) -> Variable:
        """Values of a site, with the names of their dims as far as the model has them."""
        site = self.sites.get(name)
        if site is None:
            return Variable(value)
        sequential = tuple(frame.name for frame in site["cond_indep_stack"] if not frame.vectorized)
        return Variable(value, model_dims(site, tuple(value.shape[sample_ndim:])), kept, sequential)

    def kept(self, name: str) -> Tensor | None:
        """Which entries of a site's data are not masked; ``None`` for all, or if it has no data."""
        return self.observed[name].kept if name in self.observed else None

    def ndim(self, name: str) -> int | None:
        """Number of dims of one value of a site."""
        return torch.as_tensor(self.sites[name]["value"]).dim() if name in self.sites else None


def _refuse_flat_draws(sites: Mapping[str, Any], draw: Mapping[str, Tensor]) -> None:
    """Refuse draws without a dim of chains: if all sites have dims, draws would pass for chains."""
    for name in sites.keys() & draw.keys():
        fn = sites[name]["fn"]
        if is_deterministic(sites[name]):  # its plates may be among its batch dims and its event dims
            continue
        shape = tuple(fn.batch_shape + fn.event_shape)
        if draw[name].dim() < len(shape):
            raise ValueError(
                f"a draw of site {name!r} has shape {tuple(draw[name].shape)}, and {shape} in the model; "
                "pass draws (num_chains, num_samples, *shape), as from get_samples(group_by_chain=True)"
            )
