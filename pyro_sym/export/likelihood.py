"""The log likelihood of every datum at every draw."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.ops import packed as packed_ops
from pyro.ops.contract import contract_tensor_tree
from torch import Tensor

from pyro_sym.export.at_draws import at_draws
from pyro_sym.export.rows import Window, Windows, windows
from pyro_sym.export.sites import infer_of, stochastic, unseen
from pyro_sym.program import Program, in_subsampled_plate

__all__ = ["Data", "Likelihood", "log_likelihood", "mask_of", "picks_rows"]

# By default so many terms are computed at once: large enough for torch, small enough for the cache.
CHUNK_NUMEL = 2**18

Values = Mapping[str, Tensor]


def log_likelihood(
    model: Callable[..., Any],
    draws: Values,
    *args: Any,
    group_by_chain: bool = False,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    r"""The log likelihood of every datum at every draw, as leave-one-out cross-validation asks for it.

    For each observed site and each entry :math:`n` of its batch shape this is

    .. math::

        \ell_{mn} = \log p(y_n \mid \theta_m)
                  = \log \sum_z p(z \mid \theta_m) \, p(y_n \mid z, \theta_m),

    with the sum over enumerable discrete sites that :math:`y_n` depends on and that have no draws. If several
    data share such a site, as all steps of one sequence do in a hidden Markov model, their log likelihood is
    one joint term, with the plates that the shared site has; observed sites tied together in this way are
    one entry, named ``"x+y"``.

    * Scales (``poutine.scale``, and those of subsampled plates) weigh inference, and are left out here.
    * A subsampled plate is shown window after window, so that the result covers all its rows.
    * Masked entries are NaN: they are no data. (The exporter drops them.) In a joint term masked parts count
      nothing.
    * Factors and deterministic sites are no data either.

    Draws are evaluated many at once, by ``torch.func.vmap``, or one by one, with a warning, where the model's
    control flow depends on their values. Random state and handlers outside are left alone.

    Args:
        model: a Pyro model.
        draws: constrained values of its latent sites, of shape ``(num_samples, *shape)``.
        *args: the model's positional arguments.
        group_by_chain: whether draws have a chain dim in front, ``(num_chains, num_samples, *shape)``.
        chunk_size: how many draws are evaluated at once; by default as many as make about 260,000 terms.
        **kwargs: the model's keyword arguments.

    Returns:
        Nats by observed site, of shape ``(num_samples, *batch_shape)``, or ``(num_chains, num_samples,
        *batch_shape)``.

    Raises:
        ValueError: if a latent site has no draws and can't be summed out, or the rows of a subsampled plate
            are chosen by the model's arguments rather than by the plate.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y), subsample_size=2) as rows:
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y[rows])
        >>> log_likelihood(model, {"loc": torch.zeros(10)}, torch.arange(5.0))["y"].shape
        torch.Size([10, 5])

    References:
        Vehtari, Gelman and Gabry (2017), "Practical Bayesian model evaluation using leave-one-out
        cross-validation and WAIC".
    """
    sample_ndim = 2 if group_by_chain else 1
    flat = {name: value.flatten(0, sample_ndim - 1) for name, value in draws.items()}
    if not flat:
        raise ValueError("there are no draws: draws is empty")
    first = {name: value[0] for name, value in flat.items()}
    terms = Likelihood(model, first, args, kwargs).at(flat, chunk_size)
    lead = next(iter(draws.values())).shape[:sample_ndim]
    return {name: term.reshape(*lead, *term.shape[1:]) for name, term in terms.items()}


@dataclass(frozen=True)
class Data:
    """What a term of the likelihood is about.

    Attributes:
        frames: the plates around it.
        kept: which entries are not masked, of the term's batch shape; ``None`` for all.
    """

    frames: tuple[Any, ...]
    kept: Tensor | None


@dataclass(frozen=True)
class _Term:
    """Log likelihoods at one draw and one window, of the batch shape."""

    name: str
    log_prob: Tensor
    data: Data

    @property
    def masked_out(self) -> Tensor:
        """The same with NaN where nothing was observed."""
        return self.log_prob if self.data.kept is None else self.log_prob.where(self.data.kept, torch.nan)


class _Held:
    """A model held at the draw of the moment."""

    def __init__(self, model: Callable[..., Any], draw: Values) -> None:
        self.model, self.draw = model, draw

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return poutine.condition(self.model, data=dict(self.draw))(*args, **kwargs)


class Likelihood:
    """A model's data, term by term.

    Args:
        model: a Pyro model.
        draw: constrained values of its latent sites, without dims of draws.
        args: the model's positional arguments.
        kwargs: its keyword arguments.

    Attributes:
        data: what each term is about, by name, over all rows.

    Raises:
        ValueError: as :func:`log_likelihood` does.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        draw: Values,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._held = _Held(model, draw)
        with unseen(), pyro.validation_enabled(False):
            self._program = Program(self._held, args, kwargs)
            if self._program.latents:
                raise ValueError(
                    f"there are no draws of the latent sites {list(self._program.latents)}, without which "
                    "there is no likelihood; pass draws of all sites that can't be summed out"
                )
            self.data = self._look()

    def at(self, draws: Values, chunk_size: int | None = None) -> dict[str, Tensor]:
        """The log likelihood at draws of shape ``(M, *shape)``, as tensors of shape ``(M, *batch_shape)``."""
        whole = Windows()
        size = chunk_size or max(1, CHUNK_NUMEL // self._numel)
        with unseen():
            for window in windows(self._program.plates):
                frames: dict[str, tuple[Any, ...]] = {}

                def one(
                    draw: dict[str, Tensor], window: Window = window, frames: dict[str, Any] = frames
                ) -> dict[str, Tensor]:
                    terms = list(self._terms(draw, window))
                    frames.update({term.name: term.data.frames for term in terms})
                    return {term.name: term.masked_out for term in terms}

                for name, part in at_draws(one, draws, size).items():
                    whole.put(name, part, frames[name], window)
        return whole.values

    def _look(self) -> dict[str, Data]:
        """See at one draw what there is, and that the rows shown are those asked for."""
        whole, frames, seen = Windows(), {}, {}
        self._numel = 1
        for window in windows(self._program.plates):
            trace = self._program.trace({}, window)
            for name, site in stochastic(trace):
                if name in self._held.draw or not in_subsampled_plate(site["cond_indep_stack"]):
                    continue
                if site["is_observed"] and not picks_rows(site, window, seen):
                    raise ValueError(
                        f"site {name!r} shows some rows of a subsampled plate, and the model's arguments say "
                        "which, not the plate; pass args and kwargs with all rows"
                    )
            terms = list(_terms(trace, self._held.draw.keys()))
            self._numel = max(self._numel, sum(term.log_prob.numel() for term in terms))
            for term in terms:
                frames[term.name] = term.data.frames
                if term.data.kept is not None:
                    whole.put(term.name, term.data.kept, term.data.frames, window)
        return {name: Data(several, whole.values.get(name)) for name, several in frames.items()}

    def _terms(self, draw: Values, window: Window) -> Iterator[_Term]:
        self._held.draw = draw
        return _terms(self._program.trace({}, window), draw.keys())


def picks_rows(site: Any, window: Window, seen: dict[str, Tensor]) -> bool:
    """Whether a site in a subsampled plate shows the rows of the window, as far as can be told.

    What is picked by row numbers is a copy; the very same tensor for other rows was not picked by them.

    Args:
        site: the site.
        window: the rows asked for.
        seen: what to remember from window to window, empty at first.
    """
    subsampled = [f for f in site["cond_indep_stack"] if f.full_size is not None and f.size < f.full_size]
    if any(frame.name not in window for frame in subsampled):
        return False
    value = site["value"]
    if not isinstance(value, Tensor):
        return True
    # The tensor itself is kept, or its memory would be another's by the next window.
    return seen.setdefault(site["name"], value).data_ptr() != value.data_ptr() or all(
        int(window[frame.name][0]) == 0 for frame in subsampled
    )


def _terms(trace: poutine.Trace, given: Set[str]) -> Iterator[_Term]:
    """The terms of a trace whose log probabilities are computed; draws are given for some sites."""
    observed = {name: site for name, site in stochastic(trace) if site["is_observed"] and name not in given}
    samples = [site for site in trace.nodes.values() if site["type"] == "sample"]
    enumerated = [site for site in samples if infer_of(site).get("_enumerate_dim") is not None]
    tied: set[str] = set()
    if enumerated:
        trace.pack_tensors()
        for component in _components(samples, {site["infer"]["_enumerate_symbol"] for site in enumerated}):
            own = {site["name"] for site in component.sites} & observed.keys()
            if own:
                tied |= own
                yield _marginal(trace, component, own)
    for name, site in observed.items():
        if name not in tied:
            log_prob = site["unscaled_log_prob"]
            data = Data(tuple(site["cond_indep_stack"]), mask_of(site, log_prob.shape))
            yield _Term(name, log_prob, data)


def mask_of(site: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Which entries of a batch are not masked, by a handler or by the distribution; ``None`` for all."""
    fn = site["fn"]
    event_dim = fn.event_dim
    masks = [] if site["mask"] is None or site["mask"] is True else [torch.as_tensor(site["mask"])]
    while hasattr(fn, "base_dist"):
        if isinstance(fn, MaskedDistribution) and fn._mask is not True:
            mask = torch.as_tensor(fn._mask).expand(fn.batch_shape)
            inside = event_dim - fn.event_dim  # batch dims of this one that are event dims of the site
            masks.append(mask.flatten(-inside).any(-1) if inside else mask)
        fn = fn.base_dist
    if not masks:
        return None
    return torch.stack(torch.broadcast_tensors(*[mask.bool() for mask in masks])).all(0).expand(shape)


# Summing enumerated sites out


@dataclass(frozen=True)
class _Component:
    """Sites that depend on each other through enumerated ones, and the symbols of these."""

    sites: list[Any]
    symbols: frozenset[str]


def _components(sites: list[Any], summed: set[str]) -> list[_Component]:
    components: list[_Component] = []
    for site in sites:
        log_prob = site["packed"].get("log_prob")
        symbols = (
            frozenset(summed & set(log_prob._pyro_dims)) if isinstance(log_prob, Tensor) else frozenset()
        )
        if not symbols:
            continue
        touching = [component for component in components if component.symbols & symbols]
        components = [component for component in components if component not in touching]
        components.append(
            _Component(
                [s for component in touching for s in component.sites] + [site],
                symbols.union(*[component.symbols for component in touching]),
            )
        )
    return components


def _marginal(trace: poutine.Trace, component: _Component, observed: set[str]) -> _Term:
    r"""Log p(y | θ) of observed sites that share summed-out ones.

    It is the sum over everything, less the sum over everything but :math:`y`. That is zero, unless sites with
    draws, or factors, depend on :math:`z` as well.
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
    if all(mask is not None for mask in masks):  # a joint term counts if any part of it does
        parts = [
            _over(m.float(), _plates(s), root) for m, s in zip(masks, data, strict=True) if m is not None
        ]
        kept = (torch.stack(torch.broadcast_tensors(*parts)).sum(0) > 0).expand(log_prob.shape)
    common = tuple(
        frame
        for frame in data[0]["cond_indep_stack"]
        if (frame.name in root or not frame.vectorized) and all(frame in s["cond_indep_stack"] for s in data)
    )
    return _Term(_joint_name([site["name"] for site in data]), log_prob, Data(common, kept))


def _contract(
    trace: poutine.Trace, sites: list[Any], symbols: frozenset[str]
) -> list[tuple[frozenset[str], Tensor]]:
    """What is left after summing symbols out, by the plates in which it is left; right-aligned."""
    to_name = {symbol: name for name, symbol in trace.plate_to_symbol.items()}
    to_dim = {}
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for site in sites:
        plates = _plates(site)
        to_dim |= {trace.plate_to_symbol[frame.name]: frame.dim for frame in plates}
        factor = site["packed"]["unscaled_log_prob"]
        # A masked row counts nothing: its likelihood is 1, and its enumerated prior sums to 1 unmasked.
        if site["packed"]["mask"] is not None and infer_of(site).get("_enumerate_dim") is None:
            factor = packed_ops.scale_and_mask(factor, mask=site["packed"]["mask"])
        factors.setdefault(frozenset(trace.plate_to_symbol[f.name] for f in plates), []).append(factor)
    contracted = contract_tensor_tree(factors, set(symbols))
    return [
        (frozenset(to_name[symbol] for symbol in plates), packed_ops.unpack(term, to_dim))
        for plates, terms in contracted.items()
        for term in terms
    ]


def _total(
    terms: list[tuple[frozenset[str], Tensor]], root: frozenset[str], frames: Mapping[str, Any]
) -> Tensor:
    """Terms added up, of the batch shape of the root plates."""
    parts = [_over(term, [frames[name] for name in plates], root) for plates, term in terms]
    shape = _batch_shape([frames[name] for name in root])
    return torch.stack([part.expand(shape) for part in parts]).sum(0)


def _over(term: Tensor, plates: list[Any], root: frozenset[str]) -> Tensor:
    """A right-aligned term in some plates, summed over those outside of the root ones."""
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
