"""Terms of the log likelihood at one draw: by datum, or joint for data that share an enumerated site."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.ops import packed as packed_ops
from pyro.ops.contract import contract_tensor_tree
from torch import Tensor

from pyro_sym._private import mask_of_distribution
from pyro_sym.export.log_sum import LogSum
from pyro_sym.export.sites import infer_of
from pyro_sym.model.all_rows import Window
from pyro_sym.model.program import is_data
from pyro_sym.unwrap import layers

__all__ = ["Data", "Term", "mask_of", "picks_rows", "terms_of"]


@dataclass(frozen=True)
class Data:
    """The plates around the data of a term, and its entries that are not masked; ``None`` for all."""

    frames: tuple[Any, ...]
    kept: Tensor | None


@dataclass(frozen=True)
class Term:
    """Log likelihoods at one draw and one window, of the batch shape."""

    name: str
    log_prob: Tensor
    data: Data

    @property
    def masked_out(self) -> Tensor:
        """The log likelihoods, with NaN for masked entries."""
        return self.log_prob if self.data.kept is None else self.log_prob.where(self.data.kept, torch.nan)


def picks_rows(site: Any, window: Window, seen: dict[str, Tensor]) -> bool:
    """Whether a site in a subsampled plate shows the rows of the window, as far as one can tell.

    Indexing by row numbers makes a copy, so a value that is the same tensor in two windows was not indexed.
    ``seen`` keeps the values of the first window, by site.
    """
    subsampled = [f for f in site["cond_indep_stack"] if f.full_size is not None and f.size < f.full_size]
    if any(frame.name not in window for frame in subsampled):
        return False
    if not isinstance(value := site["value"], Tensor):
        return True
    # Keep the tensor, or its memory could be reused in the next window.
    return seen.setdefault(site["name"], value).data_ptr() != value.data_ptr() or all(
        int(window[frame.name][0]) == 0 for frame in subsampled
    )


def terms_of(trace: poutine.Trace, given: Set[str]) -> Iterator[Term]:
    """The terms of a trace with log probabilities; the ``given`` sites, drawn or fixed, are not data."""
    observed = {name: site for name, site in trace.nodes.items() if is_data(site) and name not in given}
    samples = [site for site in trace.nodes.values() if site["type"] == "sample"]
    enumerated = [site for site in samples if infer_of(site).get("_enumerate_dim") is not None]
    tied: set[str] = set()
    if enumerated:
        trace.pack_tensors()
        for component in _components(samples, {site["infer"]["_enumerate_symbol"] for site in enumerated}):
            if own := {site["name"] for site in component.sites} & observed.keys():
                tied |= own
                yield _marginal(trace, component, own)
    for name, site in observed.items():
        if name not in tied:
            log_prob = site["unscaled_log_prob"]
            data = Data(tuple(site["cond_indep_stack"]), mask_of(site, log_prob.shape))
            yield Term(name, log_prob, data)


def mask_of(site: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Which entries of a batch are not masked, by a handler or by the distribution; ``None`` for all."""
    fn = site["fn"]
    event_dim = fn.event_dim
    masks = [] if site["mask"] is None or site["mask"] is True else [torch.as_tensor(site["mask"])]
    for layer in layers(fn):
        if (own := mask_of_distribution(layer)) is not True:
            mask = torch.as_tensor(own).expand(layer.batch_shape)
            inside = event_dim - layer.event_dim  # batch dims of this one that are event dims of the site
            masks.append(mask.flatten(-inside).any(-1) if inside else mask)
    if not masks:
        return None
    return torch.stack(torch.broadcast_tensors(*[mask.bool() for mask in masks])).all(0).expand(shape)


# Summing enumerated sites out


class _Component(NamedTuple):
    """Sites that share enumerated sites, and the symbols of these."""

    sites: list[Any]
    symbols: frozenset[str]


def _components(sites: list[Any], summed: set[str]) -> list[_Component]:
    components: list[_Component] = []
    for site in sites:
        log_prob: Any = site["packed"].get("log_prob")  # a plate has none
        symbols = frozenset(summed & set(getattr(log_prob, "_pyro_dims", "")))
        if not symbols:
            continue
        touching = [component for component in components if component.symbols & symbols]
        components = [component for component in components if not component.symbols & symbols]
        together = [s for component in touching for s in component.sites] + [site]
        components.append(_Component(together, symbols.union(*[component.symbols for component in touching])))
    return components


def _marginal(trace: poutine.Trace, component: _Component, observed: set[str]) -> Term:
    r"""Log p(y | θ) of observed sites that share enumerated sites z.

    It is log Σ_z of all factors less log Σ_z of all factors but those of y. The latter is zero, unless sites
    with draws, or factors, depend on z as well.
    """
    data = [site for site in component.sites if site["name"] in observed]
    others = [site for site in component.sites if site["name"] not in observed]
    frames = {frame.name: frame for site in component.sites for frame in _plates(site)}
    joint = _contract(trace, component.sites, component.symbols)
    root = frozenset.intersection(*[plates for plates, _ in joint])
    log_prob = _total(joint, root, frames)
    if any(infer_of(site).get("_enumerate_dim") is None for site in others):
        log_prob = log_prob - _total(_contract(trace, others, component.symbols), root, frames)
    masks = [mask_of(site, _batch_shape(_plates(site))) for site in data]
    kept: Tensor | None = None
    if all(mask is not None for mask in masks):  # a joint term is kept if any of its data is
        pairs = [(m.float(), _plates(s)) for m, s in zip(masks, data, strict=True) if m is not None]
        parts = [_over(mask, plates, root) for mask, plates in pairs]
        kept = (torch.stack(torch.broadcast_tensors(*parts)).sum(0) > 0).expand(log_prob.shape)
    common = tuple(
        frame
        for frame in data[0]["cond_indep_stack"]
        if (frame.name in root or not frame.vectorized) and all(frame in s["cond_indep_stack"] for s in data)
    )
    return Term(_joint_name([site["name"] for site in data]), log_prob, Data(common, kept))


def _contract(
    trace: poutine.Trace, sites: list[Any], symbols: frozenset[str]
) -> list[tuple[frozenset[str], Tensor]]:
    """Right-aligned log factors after summing symbols out, each with its plates."""
    to_name = {symbol: name for name, symbol in trace.plate_to_symbol.items()}
    to_dim: dict[str, int] = {}
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for site in sites:
        plates = _plates(site)
        to_dim |= {trace.plate_to_symbol[frame.name]: frame.dim for frame in plates}
        factor = site["packed"]["unscaled_log_prob"]
        # The likelihood of a masked row is 1. Its enumerated prior stays unmasked, and so sums to 1.
        if site["packed"]["mask"] is not None and infer_of(site).get("_enumerate_dim") is None:
            factor = packed_ops.scale_and_mask(factor, mask=site["packed"]["mask"])
        factors.setdefault(frozenset(trace.plate_to_symbol[f.name] for f in plates), []).append(factor)
    contracted = contract_tensor_tree(factors, set(symbols), ring=LogSum())
    return [
        (frozenset(to_name[symbol] for symbol in plates), packed_ops.unpack(term, to_dim))
        for plates, terms in contracted.items()
        for term in terms
    ]


def _total(
    terms: list[tuple[frozenset[str], Tensor]], root: frozenset[str], frames: Mapping[str, Any]
) -> Tensor:
    """The sum of terms, of the batch shape of the root plates."""
    parts = [_over(term, [frames[name] for name in plates], root) for plates, term in terms]
    shape = _batch_shape([frames[name] for name in root])
    return torch.stack([part.expand(shape) for part in parts]).sum(0)


def _over(term: Tensor, plates: list[Any], root: frozenset[str]) -> Tensor:
    """A right-aligned term, summed over its plates that are not root plates."""
    shape = torch.broadcast_shapes(term.shape, _batch_shape(plates))
    outside = [frame.dim for frame in plates if frame.name not in root]
    summed = term.expand(shape).sum(outside, keepdim=True) if outside else term.expand(shape)
    depth = len(_batch_shape([frame for frame in plates if frame.name in root]))
    return summed.reshape(summed.shape[summed.dim() - depth :])


def _batch_shape(plates: list[Any]) -> tuple[int, ...]:
    shape = [1] * max((-frame.dim for frame in plates), default=0)
    for frame in plates:
        shape[frame.dim] = frame.size
    return tuple(shape)


def _plates(site: Any) -> list[Any]:
    return [frame for frame in site["cond_indep_stack"] if frame.vectorized]


def _joint_name(names: list[str]) -> str:
    """``"y"`` for the steps ``y_0``, ``y_1``, … of a sequence, ``"x+y"`` for different sites."""
    if len(names) == 1:
        return names[0]
    stems = [re.sub(r"_?\d+$", "", name) or name for name in names]
    return "+".join(dict.fromkeys(stems))
