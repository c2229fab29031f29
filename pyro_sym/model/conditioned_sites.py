"""Sites that ``poutine.condition`` fixes: some are data, and some are parameters that are held at a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_sym.model.program import GivenIndices, init_to_prior, is_data, subsampled_plates, traced

__all__ = ["FromPrior", "fixed_parameters"]


class _MarkFixed(Messenger):
    """Collects the names of the sites that a ``poutine.condition`` inside of it fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        inside = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        if any(
            isinstance(m, ConditionMessenger) and _value(m.data, msg["name"]) is msg["value"] for m in inside
        ):
            self.names.add(msg["name"])


def _value(data: Any, name: str) -> Any:
    """What ``poutine.condition`` gives a site, from a dict or from a trace; itself where it gives nothing."""
    if isinstance(data, poutine.Trace):
        data = {key: node["value"] for key, node in data.nodes.items() if key == name}
    return data.get(name, data)


class FromPrior(Messenger):
    """Draws latent sites by :func:`init_to_prior`, also where the prior is improper.

    Unlike Pyro's ``InitMessenger`` it is not seen by ``poutine.reparam``, which would draw the replaced site
    from its prior, whatever the values of the new ones are.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not isinstance(msg["fn"], _Subsample):
            msg["value"] = init_to_prior(msg)


def fixed_parameters(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    draw: Mapping[str, Tensor] | None = None,
) -> frozenset[str]:
    r"""The sites at which ``poutine.condition`` holds a parameter, in contrast to those that it gives data.

    Data say something about the latent sites: their density :math:`p(x \mid \theta)` depends on them. A
    fixed site whose density is the same at two values of :math:`\theta` says nothing about them, as a noise
    scale held at 1, and is a parameter.

    Args:
        model: a Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        draw: one of the two values, constrained, by latent site; the other one is drawn from the prior, and
            so are sites without a value.

    Returns:
        The names of the sites. Torch's global generator advances.
    """
    marks = _MarkFixed()

    def run(values: Mapping[str, Tensor]) -> poutine.Trace:
        with torch.no_grad(), pyro.validation_enabled(False), FromPrior():
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
