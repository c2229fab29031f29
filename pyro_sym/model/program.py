"""What a Pyro model says about itself: its latent sites, its plates and its log joint.

Everything in the package that evaluates a model goes through :class:`Program`: the symmetry check, the
potential of the samplers, the exporter. It conditions the model on constrained values, hands the indices of
subsampled plates in, sums enumerable discrete sites out, and returns plain tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from opt_einsum import shared_intermediates
from pyro import poutine
from pyro.distributions import Delta, Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer import config_enumerate
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.ops import packed as packed_ops
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.rings import LogRing
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.distributions import Independent, biject_to, constraints

from pyro_sym._random import fork_random_state

__all__ = [
    "GivenIndices",
    "LatentSite",
    "Program",
    "RefusedError",
    "SubsampledPlate",
    "Term",
    "base_of",
    "in_subsampled_plate",
    "init_to_prior",
    "is_data",
    "is_deterministic",
    "marginal_terms",
    "subsampled_plates",
    "support_of_entries",
    "traced",
    "uniform_draw",
]

# Draws at which a model is looked at, until one has valid parameters.
NUM_FIRST_DRAWS = 10

Values = Mapping[str, Tensor]


# What a site of a model is. A Pyro trace calls all of these "observed": data, the values of
# pyro.deterministic, factors, sites that a reparametrisation has replaced, and parameters that
# poutine.condition holds. They are told apart here, and nowhere else.


def base_of(fn: Any) -> Any:
    """The distribution inside of wrappers: masks, expansions, event dims and transforms."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def is_deterministic(site: Any) -> bool:
    """Whether a site of a model takes the value that the other sites give it.

    This holds for ``pyro.deterministic``, for every ``Delta``, observed or not, and for the sites that
    ``poutine.reparam`` computes from new ones, which are ``Delta`` too. Don't ask it of a guide, in which an
    unobserved ``Delta`` is a latent site (a point mass).
    """
    return bool((site["infer"] or {}).get("_deterministic")) or isinstance(base_of(site["fn"]), Delta)


def is_data(site: Any) -> bool:
    """Whether a site of a model holds data: observed, and no plate, factor or deterministic site.

    Sites at which ``poutine.condition`` holds a parameter are not told apart here;
    :func:`pyro_sym.model.conditioned_sites.fixed_parameters` names them.
    """
    return (
        site["type"] == "sample"
        and site["is_observed"]
        and not is_deterministic(site)
        and not isinstance(base_of(site["fn"]), _Subsample | Unit)
    )


class RefusedError(ValueError):
    """Raised by handlers of this package inside of a model's run; :func:`traced` shows it as it is."""


def traced(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> poutine.Trace:
    """Run a model and return its trace.

    To every error in a run Pyro adds a table of the shapes so far. It helps where the model failed, and is
    left out where a handler of this package refused.
    """
    try:
        return poutine.trace(model).get_trace(*args, **kwargs)
    except RefusedError as error:
        said: BaseException = error
        while isinstance(said.__cause__, RefusedError):
            said = said.__cause__
        raise ValueError(str(said)) from None


@dataclass(frozen=True)
class LatentSite:
    """One continuous latent site, as the model's trace shows it.

    Attributes:
        name: the site's name.
        value: a feasible constrained value, of the site's native shape.
        support: the constraint of the site's support.
        event_dim: number of event dims of the site's distribution.
        frames: the plates around the site.
    """

    name: str
    value: Tensor
    support: constraints.Constraint
    event_dim: int
    frames: tuple[CondIndepStackFrame, ...]


@dataclass(frozen=True)
class SubsampledPlate:
    """A plate that sees ``subsample_size`` of its ``size`` rows at a time, with indices on ``device``."""

    name: str
    size: int
    subsample_size: int
    device: torch.device


@dataclass(frozen=True)
class Term:
    """A term of the log joint, element by element.

    Attributes:
        elements: log probabilities without the scale, of any shape; masked ones are 0.
        scale: what the elements are multiplied with; a number, or a tensor that broadcasts with them.
    """

    elements: Tensor
    scale: float | Tensor


class GivenIndices(Messenger):
    """Hands the indices of subsampled plates to the model, in place of Pyro's own random ones."""

    def __init__(self, indices: Values) -> None:
        super().__init__()
        self.indices = indices

    def _pyro_sample(self, msg: Any) -> None:
        if not isinstance(msg["fn"], _Subsample) or not _is_subsampled(msg["fn"]):
            return
        if msg["name"] not in self.indices:
            raise RefusedError(
                f"plate {msg['name']!r} sees {msg['fn'].subsample_size} of {msg['fn'].size} rows and no "
                f"indices were given for it; pass a tensor of indices under {msg['name']!r}"
            )
        msg["value"] = self.indices[msg["name"]]
        msg["done"] = True


class _StandIns(Messenger):
    """Shows a handler inside of it values without contents, where ``vmap`` would have it see none at all."""

    def __init__(self, hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden = hidden

    def _pyro_post_sample(self, msg: Any) -> None:
        try:
            msg["value"].data  # noqa: B018
        except RuntimeError:
            self.hidden[msg["name"]] = msg["value"]
            msg["value"] = torch.empty(msg["value"].shape, device="meta")


class _Originals(Messenger):
    """Puts the values back."""

    def __init__(self, hidden: dict[str, Tensor]) -> None:
        super().__init__()
        self.hidden = hidden

    def _pyro_post_sample(self, msg: Any) -> None:
        msg["value"] = self.hidden.pop(msg["name"], msg["value"])


def _enumerating(model: Callable[..., Any], first_available_dim: int) -> Callable[..., Any]:
    """The model with discrete sites enumerated. Pyro's handler asks for ``value.data``, to see its shape."""
    hidden: dict[str, Tensor] = {}
    enumerated = poutine.enum(
        _Originals(hidden)(config_enumerate(model)), first_available_dim=first_available_dim
    )
    return _StandIns(hidden)(enumerated)


def _is_subsampled(fn: _Subsample) -> bool:
    return fn.subsample_size is not None and fn.subsample_size < fn.size


def in_subsampled_plate(frames: Iterable[CondIndepStackFrame]) -> bool:
    """Whether one of the plates around a site shows a part of its rows only."""
    return any(frame.full_size is not None and frame.size < frame.full_size for frame in frames)


def subsampled_plates(trace: poutine.Trace) -> dict[str, SubsampledPlate]:
    """The plates of a model's trace that choose which of their rows they show."""
    return {
        site["name"]: SubsampledPlate(
            site["name"], site["fn"].size, site["fn"].subsample_size, site["value"].device
        )
        for site in _samples(trace)
        if isinstance(site["fn"], _Subsample) and _is_subsampled(site["fn"])
    }


def support_of_entries(support: Any) -> Any:
    """The support without the dims that it only repeats over."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def init_to_prior(site: Any) -> Tensor:
    """Draw a site from its prior, or uniformly on (-2, 2) in unconstrained space where it is improper."""
    try:
        return site["fn"].sample().detach()
    except NotImplementedError:
        return uniform_draw(site["fn"])


def uniform_draw(fn: Any) -> Tensor:
    """Draw uniformly on (-2, 2) in unconstrained space, without a draw of the distribution."""
    bijection = biject_to(fn.support)
    return bijection(4 * torch.rand(bijection.inverse_shape(fn.shape())) - 2)


class Program:
    r"""A Pyro model with its arguments, seen as a function of its continuous latent sites.

    The log joint is

    .. math::

        \log p(\theta, D) = \sum_s c_s \log p(x_s \mid \mathrm{pa}(x_s)),

    over all sample sites :math:`s`, with the scales :math:`c_s` of subsampled plates and ``poutine.scale``,
    and enumerable discrete latent sites summed out (inside the scale, as :class:`~pyro.infer.TraceEnum_ELBO`
    does).

    Args:
        model: a Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        init_strategy: a per-site function of the message, as in Pyro's autoguides, that gives the prototype
            values of the latent sites.

    Raises:
        ValueError: if a latent site is discrete and can't be enumerated.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        init_strategy: Callable[[Any], Tensor] = init_to_prior,
    ) -> None:
        self.model = model
        self.args = args
        self.kwargs = dict(kwargs or {})
        self.init_strategy = init_strategy
        with fork_random_state():
            trace = self._run_first()
        nesting = [-f.dim for s in _samples(trace) for f in s["cond_indep_stack"] if f.vectorized]
        self.max_plate_nesting: int = max(nesting, default=0)
        self.plates = subsampled_plates(trace)
        self.params = tuple(trace.param_nodes)
        latents = [
            s
            for s in _samples(trace)
            if not s["is_observed"] and not isinstance(s["fn"], _Subsample) and not is_deterministic(s)
        ]
        self.enumerated = tuple(s["name"] for s in latents if s["fn"].has_enumerate_support)
        self.latents = {
            s["name"]: LatentSite(
                s["name"],
                s["value"].detach(),
                s["fn"].support,
                s["fn"].event_dim,
                tuple(s["cond_indep_stack"]),
            )
            for s in latents
            if not s["fn"].has_enumerate_support
        }
        for name, latent in self.latents.items():
            if latent.support.is_discrete:
                raise ValueError(
                    f"latent site {name!r} is discrete and can't be enumerated (support {latent.support}); "
                    "marginalise it in the model, or give it a distribution with finite support"
                )
        if self.enumerated:
            model = _enumerating(model, -1 - self.max_plate_nesting)
        self._runnable = model

    def _run_first(self) -> poutine.Trace:
        """Run the model at a draw where its distributions have valid parameters, if a few draws have one.

        At some draws a scale may underflow to 0, which Pyro's validation refuses.
        """
        for _ in range(NUM_FIRST_DRAWS - 1):
            try:
                return self._run_prototype()
            except ValueError as error:
                if "Expected parameter" not in str(error):  # of torch's validation of parameters
                    raise
        return self._run_prototype()

    def _run_prototype(self) -> poutine.Trace:
        """Run the model once to look at it: no gradients, and nothing seen by handlers outside."""
        with torch.no_grad(), poutine.block():
            return traced(InitMessenger(self._initial)(self.model), self.args, self.kwargs)

    def _initial(self, site: Any) -> Tensor:
        """The value of a latent site; a ``Delta`` has its own, whatever the strategy."""
        return init_to_prior(site) if is_deterministic(site) else self.init_strategy(site)

    def draw(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw the latent sites by ``init_strategy``, and indices for the subsampled plates.

        Unlike construction, this advances torch's global generator, as every draw does. Parameters of
        distributions are not validated there: whether the point will do is for the caller to see.

        Returns:
            The constrained values by site, and the indices by plate.

        Raises:
            ValueError: if a site is not there in this run.
        """
        with pyro.validation_enabled(False):
            trace = self._run_prototype()
        missing = [name for name in [*self.latents, *self.plates] if name not in trace.nodes]
        if missing:
            raise ValueError(
                f"the model has site {missing[0]!r} in some of its runs and not in others; the sites have to "
                "be the same in every run. Sample this site in every run, and use it only where it is needed"
            )
        values = {name: trace.nodes[name]["value"].detach() for name in self.latents}
        return values, {name: trace.nodes[name]["value"] for name in self.plates}

    def trace(self, values: Values, indices: Values | None = None) -> poutine.Trace:
        """Run the model at given constrained values and plate indices.

        Args:
            values: constrained values by latent site, each of the site's native shape.
            indices: a tensor of ``subsample_size`` indices for every subsampled plate.

        Returns:
            The trace, with log probabilities computed.

        Raises:
            ValueError: if a latent site has no value, or a subsampled plate no indices.
        """
        trace = self._run(values, indices)
        trace.compute_log_prob()
        return trace

    def _run(self, values: Values, indices: Values | None) -> poutine.Trace:
        """The trace at given values and plate indices, without log probabilities."""
        missing = [name for name in self.latents if name not in values]
        if missing:
            raise ValueError(
                f"no value for latent site {missing[0]!r}; the model's latent sites are {list(self.latents)}"
            )
        given = {name: values[name] for name in self.latents}
        with poutine.block(), GivenIndices(indices or {}):
            conditioned = poutine.condition(self._runnable, data=given)
            return traced(conditioned, self.args, self.kwargs)

    def log_joint_terms(
        self, values: Values, indices: Values | None = None, *, ring: LogRing | None = None
    ) -> dict[str, Tensor]:
        """The log joint, a scalar a site; sites that depend on summed-out ones are one term together.

        Args:
            values: constrained values by latent site, each of the site's native shape.
            indices: indices by subsampled plate.
            ring: how enumerated sites are summed out; by default Pyro's way, which gradients flow through,
                but which ``vmap`` refuses.

        Returns:
            Scalars by site name, in the model's order. A joint term of sites ``y`` and ``z`` is named
            ``"z+y"``.
        """
        trace = self.trace(values, indices)
        if not self.enumerated:
            return {
                s["name"]: s["log_prob_sum"] for s in _samples(trace) if not isinstance(s["fn"], _Subsample)
            }
        return marginal_terms(trace, ring)

    def log_joint_elements(self, values: Values, indices: Values | None = None) -> dict[str, Term]:
        """The terms of the log joint, element by element: the finest parts that the model shows.

        An element is an entry of a site, also where ``to_event`` makes many entries one event. Of summed-out
        sites it is an entry of what is left of their plates, such as a row of the data.

        Args:
            values: constrained values by latent site, each of the site's native shape.
            indices: indices by subsampled plate.

        Returns:
            Terms by name, with the names of :meth:`log_joint_terms`, whose values are the sums of the scaled
            elements.

        Raises:
            ValueError: if a value is outside of the support of its site.
        """
        if not self.enumerated:
            trace = self._run(values, indices)
            return {s["name"]: _elements(s) for s in _samples(trace) if not isinstance(s["fn"], _Subsample)}
        alone, joint, scale, parts = _marginalised(self.trace(values, indices), None)
        terms = {site["name"]: _elements(site) for site in alone}
        terms[joint] = Term(torch.cat([part.flatten() for part in parts]), scale)
        return terms

    def log_joint(
        self, values: Values, indices: Values | None = None, *, ring: LogRing | None = None
    ) -> Tensor:
        """The log joint, as a scalar tensor; arguments as in :meth:`log_joint_terms`."""
        return torch.stack(list(self.log_joint_terms(values, indices, ring=ring).values())).sum()


def _samples(trace: poutine.Trace) -> list[Any]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]


def _elements(site: Any) -> Term:
    """The log probability of a site, entry by entry."""
    fn, extra = site["fn"], 0
    while isinstance(fn, Independent):
        extra += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    try:
        elements = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    except ValueError as error:
        raise ValueError(
            f"the log probability of site {site['name']!r} can't be computed: {error}"
        ) from error

    def aligned(of_batch: Any) -> Any:
        """A number or tensor of the site's batch shape, with dims of 1 for the entries of an event."""
        return of_batch[(..., *(None,) * extra)] if isinstance(of_batch, Tensor) and extra else of_batch

    return Term(scale_and_mask(elements, mask=aligned(site["mask"])), aligned(site["scale"]))


def marginal_terms(trace: poutine.Trace, ring: LogRing | None = None) -> dict[str, Tensor]:
    """Sum the enumerated sites of a trace out; masks go inside the sum, the common scale outside.

    Args:
        trace: of a model in which some sites are enumerated, with log probabilities computed.
        ring: as for :meth:`Program.log_joint_terms`.

    Returns:
        As :meth:`Program.log_joint_terms`.
    """
    alone, joint, scale, parts = _marginalised(trace, ring)
    terms: dict[str, Tensor] = {site["name"]: site["log_prob_sum"] for site in alone}
    total: Any = sum(part.sum() for part in parts)
    terms[joint] = scale * total
    return terms


def _marginalised(
    trace: poutine.Trace, ring: LogRing | None
) -> tuple[list[Any], str, float | Tensor, list[Tensor]]:
    """Sites that depend on no summed-out one; the name, scale and parts of the term of all others."""
    trace.pack_tensors()
    sites = [s for s in _samples(trace) if not isinstance(s["fn"], _Subsample)]
    plates = {
        s["name"]: frozenset(trace.plate_to_symbol[f.name] for f in s["cond_indep_stack"] if f.vectorized)
        for s in sites
    }
    summed = {s["infer"]["_enumerate_symbol"] for s in sites if s["infer"].get("_enumerate_dim") is not None}
    factors: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    alone, joint, scales = [], [], []
    for site in sites:
        packed = site["packed"]
        if summed.isdisjoint(packed["log_prob"]._pyro_dims):
            alone.append(site)
            continue
        factor = packed["unscaled_log_prob"]
        # A masked row counts nothing: its likelihood is 1, and its enumerated prior sums to 1 unmasked.
        if packed["mask"] is not None and site["infer"].get("_enumerate_dim") is None:
            factor = packed_ops.scale_and_mask(factor, mask=packed["mask"])
        factors.setdefault(plates[site["name"]], []).append(factor)
        scales.append(site["scale"])
        joint.append(site["name"])
    if len({float(scale) for scale in scales}) > 1:
        raise ValueError(
            f"the sites {joint} are summed out together but carry different scales {scales}; "
            "put them into the same subsampled plate or poutine.scale"
        )
    with shared_intermediates():
        contracted = contract_tensor_tree(factors, summed, ring=ring)
    return alone, "+".join(joint), scales[0], [term for group in contracted.values() for term in group]
