"""Sites that ``poutine.condition`` fixes: some are data, others parameters that are held at a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_sym._private import active_handlers, unvalidated
from pyro_sym.model.program import Args, GivenIndices, init_to_prior, is_data, subsampled_plates, traced
from pyro_sym.unwrap import is_plate

__all__ = ["FromPrior", "fixed_parameters"]


class _MarkFixed(Messenger):
    """Collects the names of the sites that a ``poutine.condition`` inside of it fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        handlers = active_handlers() or [self]  # if Pyro doesn't say, all fixed sites count as data
        inside = handlers[handlers.index(self) + 1 :]
        conditions = [m.data for m in inside if isinstance(m, ConditionMessenger)]
        if any(_value(data, msg["name"]) is msg["value"] for data in conditions):
            self.names.add(msg["name"])


def _value(data: Any, name: str) -> Any:
    """The value that ``poutine.condition`` sets, from a dict or a trace; ``data`` itself if it sets none."""
    if isinstance(data, poutine.Trace):
        data = {key: node["value"] for key, node in data.nodes.items() if key == name}
    return data.get(name, data)


class FromPrior(Messenger):
    """Draws latent sites by :func:`init_to_prior`, also from improper priors.

    ``poutine.reparam`` doesn't see it. With Pyro's ``InitMessenger`` it would draw the replaced site from its
    prior, whatever the values of the new ones.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not is_plate(msg["fn"]):
            msg["value"] = init_to_prior(msg)


def fixed_parameters(
    model: Callable[..., Any],
    args: Args = (),
    kwargs: Mapping[str, Any] | None = None,
    draw: Mapping[str, Tensor] | None = None,
) -> frozenset[str]:
    r"""The sites at which ``poutine.condition`` holds a parameter, not data.

    The density of data, :math:`p(x \mid \theta)`, depends on the latent sites. A fixed site whose density is
    the same at two values of :math:`\theta` is a parameter, such as a noise scale held at 1. ``draw`` is one
    of the two values, constrained, by latent site; the other one, and sites without a value, are drawn from
    the prior, so that torch's global generator advances.
    """
    marks = _MarkFixed()

    def run(values: Mapping[str, Tensor]) -> poutine.Trace:
        with torch.no_grad(), unvalidated(), FromPrior():
            return traced(poutine.condition(marks(model), data=dict(values)), args, kwargs or {})

    with poutine.block():
        first = run(draw or {})
    fixed = [name for name in marks.names if name in first and is_data(first.nodes[name])]
    if not fixed:
        return frozenset()
    rows = {name: first.nodes[name]["value"] for name in subsampled_plates(first)}
    try:
        with poutine.block(), GivenIndices(rows):
            second = run({})
    except (RuntimeError, ValueError):  # the model doesn't run at a draw of its prior
        return frozenset()
    return frozenset(name for name in fixed if _same_density(first.nodes[name], second.nodes.get(name)))


def _same_density(site: Any, other: Any) -> bool:
    if other is None:
        return False
    before, after = (s["fn"].log_prob(s["value"]).nan_to_num() for s in (site, other))
    return torch.equal(before, after)
