"""Deterministic sites of a model: which have one value a draw, and their values at every draw."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_sym.export.joined_windows import Shown, on_all_rows
from pyro_sym.export.names import event_dim_of, shown
from pyro_sym.export.sites import unseen, variables
from pyro_sym.export.vmap_draws import at_finite_draws
from pyro_sym.model.all_rows import Window, windows
from pyro_sym.model.program import (
    Args,
    GivenIndices,
    SubsampledPlate,
    in_subsampled_plate,
    init_to_prior,
    is_deterministic,
    subsampled_plates,
    traced,
)

__all__ = ["Deterministic"]

Values = Mapping[str, Tensor]

# Sites without draws are redrawn this often, to find what depends on them: a fair coin shows the same side
# each time with a probability of 2e-6.
NUM_RUNS = 20
# At most this many draws, and about this many numbers, are evaluated at once.
MOST_DRAWS, CHUNK_NUMEL = 64, 2**20


class Deterministic:
    """The deterministic sites of a model, whose trace ``first`` is at ``draw``.

    A site has one value a draw if it is a function of sites that have draws. It has not if it depends on
    sites that are summed out, or if it lies outside of a subsampled plate and depends on the rows that the
    plate or a loader happens to show.

    Attributes:
        sites: by name, those that have one value a draw, as far as :meth:`compare` has found.
        left_out: the names of the others.
        given: those of ``sites`` that have draws of their own, and can be computed nonetheless.
    """

    def __init__(
        self, model: Any, args: Args, kwargs: Mapping[str, Any], first: poutine.Trace, draw: Values
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        every = {name: site for name, site in variables(first) if is_deterministic(site)}
        # Latent sites without draws, and their values in the first trace.
        self._others = {
            name: site["value"]
            for name, site in variables(first)
            if not site["is_observed"] and name not in every and name not in draw
        }
        # If a model is reparametrised after the run, there are draws of the replaced sites, not the new ones.
        self.given = frozenset() if self._others else frozenset(every.keys() & draw.keys())
        self.sites = {name: site for name, site in every.items() if name in self.given or name not in draw}
        self.left_out: set[str] = set()
        self._numel = sum(torch.as_tensor(site["value"]).numel() for _, site in variables(first))
        self._draw = {name: value for name, value in draw.items() if name not in self.given}
        self._expected = {name: torch.as_tensor(site["value"]) for name, site in self.sites.items()}
        if self.sites:
            self._leave_out_random({name: first.nodes[name]["value"] for name in subsampled_plates(first)})

    @property
    def in_subsampled_plates(self) -> list[str]:
        """The sites that have a value for each row of a subsampled plate."""
        return [n for n, site in self.sites.items() if in_subsampled_plate(site["cond_indep_stack"])]

    def compare(self, window: Window, args: Args | None = None) -> poutine.Trace:
        """Run the model on other rows, those of a window or in ``args``, and leave out sites that change."""
        trace = self._run(self._draw, window, self.args if args is None else args)
        for name, site in self.sites.items():
            frames, value = site["cond_indep_stack"], self._expected[name]
            inside = in_subsampled_plate(frames)
            if inside and window:
                event_dim = event_dim_of(site, tuple(value.shape))
                if all(event_dim - f.dim <= value.dim() for f in frames if f.vectorized and f.name in window):
                    continue
            if inside or not _equal(value, trace.nodes.get(name)):
                self._leave_out([name])
        return trace

    def leave_out_in(self, plates: Collection[str]) -> None:
        """Leave out the sites in one of these plates."""
        inside = {n: {frame.name for frame in site["cond_indep_stack"]} for n, site in self.sites.items()}
        self._leave_out([name for name, around in inside.items() if not around.isdisjoint(plates)])

    def at(
        self, draws: Values, plates: Mapping[str, SubsampledPlate], wanted: Collection[str]
    ) -> dict[str, Tensor]:
        """Wanted sites ``(M, *shape)`` on all rows of subsampled plates; NaN at draws that are not finite."""
        wanted = [name for name in self.sites if name in wanted]
        if not wanted:
            return {}
        held = {name: value for name, value in draws.items() if name not in self.given}
        chunk_size = max(1, min(MOST_DRAWS, CHUNK_NUMEL // max(1, self._numel)))
        by_row = not set(wanted).isdisjoint(self.in_subsampled_plates)
        needed = list(windows(plates))[: None if by_row else 1]  # other values are the same in all windows

        def one(draw: dict[str, Tensor], window: Window) -> dict[str, Shown]:
            nodes = self._run(draw, window, self.args).nodes
            return {name: shown(nodes[name]) for name in wanted}

        with unseen():
            return at_finite_draws(partial(on_all_rows, one, needed, chunk_size), held)

    def _run(self, draw: Values, window: Window, args: Args) -> poutine.Trace:
        with GivenIndices(window) if window else nullcontext():
            held = poutine.condition(self.model, data={**self._others, **draw})
            return traced(held, args, self.kwargs)

    def _leave_out(self, names: Collection[str]) -> None:
        self.left_out.update(names)
        self.sites = {name: site for name, site in self.sites.items() if name not in names}

    def _leave_out_random(self, rows: Window) -> None:
        """Leave out the sites that depend on sites without draws."""
        for _ in range(NUM_RUNS if self._others else 0):
            with pyro.validation_enabled(False), _Redraw(self._others), GivenIndices(rows):
                trace = traced(poutine.condition(self.model, data=self._draw), self.args, self.kwargs)
            self._leave_out([n for n in self.sites if not _equal(self._expected[n], trace.nodes.get(n))])


class _Redraw(Messenger):
    """Draws sites again: uniformly from all of their values where these can be listed."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self.names or msg["value"] is not None:
            return
        fn = msg["fn"]
        if not fn.has_enumerate_support:
            msg["value"] = init_to_prior(msg)
            return
        support = fn.enumerate_support(expand=False).reshape(-1, *fn.event_shape)  # (K, *event_shape)
        msg["value"] = support[torch.randint(len(support), fn.batch_shape, device=support.device)]


def _equal(value: Tensor, site: Any) -> bool:
    other = None if site is None else torch.as_tensor(site["value"])
    if other is None or value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not value.is_floating_point() or not value.numel():
        return torch.equal(value, other)
    # Sums on a GPU are not reproducible to the last bit.
    rounding = 8 * torch.finfo(value.dtype).eps * float(value.nan_to_num().abs().max())
    return torch.allclose(value, other, rtol=0.0, atol=rounding, equal_nan=True)
