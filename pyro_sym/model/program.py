"""A Pyro model as a function: its latent sites, its plates and its log joint.

All rooms evaluate models by :class:`Program`. It conditions the model on constrained values, sets the indices
of subsampled plates, sums enumerable discrete sites out, and returns plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Delta, Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.ops.rings import LogRing
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_sym._private import unvalidated
from pyro_sym._random import fork_random_state
from pyro_sym.model.enumeration import enumerating, marginal_terms, marginalised, variables
from pyro_sym.unwrap import base_of, is_plate, without_event_dims

__all__ = [
    "Args",
    "GivenIndices",
    "LatentSite",
    "Program",
    "RefusedError",
    "SubsampledPlate",
    "Term",
    "in_subsampled_plate",
    "init_to_prior",
    "is_data",
    "is_deterministic",
    "is_subsampled",
    "subsampled_plates",
    "traced",
    "uniform_draw",
]

# Draws at which the first run is tried, until one has valid parameters.
NUM_FIRST_DRAWS = 10

Values = Mapping[str, Tensor]

Args = tuple[Any, ...]
"""Positional arguments of a model."""

# Kinds of sites. A Pyro trace calls all of these "observed": data, the values of pyro.deterministic, factors,
# sites that a reparametrisation has replaced, and parameters that poutine.condition fixes. Only the functions
# here tell them apart.


def is_deterministic(site: Any) -> bool:
    """Whether a site of a model takes the value that the other sites give it.

    These are the sites of ``pyro.deterministic``, all ``Delta`` sites, observed or not, and the sites that
    ``poutine.reparam`` computes from new ones, also ``Delta``. In a guide an unobserved ``Delta`` is a
    latent site, a point mass: this function is for models only.
    """
    return bool((site["infer"] or {}).get("_deterministic")) or isinstance(base_of(site["fn"]), Delta)


def is_data(site: Any) -> bool:
    """Whether a site of a model holds data: observed, and no plate, factor or deterministic site.

    Parameters that ``poutine.condition`` fixes count as data here;
    :func:`pyro_sym.model.conditioned_sites.fixed_parameters` names them.
    """
    return (
        site["type"] == "sample"
        and site["is_observed"]
        and not is_deterministic(site)
        and not is_plate(site["fn"])
        and not isinstance(base_of(site["fn"]), Unit)
    )


class RefusedError(ValueError):
    """Raised by handlers of this package while a model runs; :func:`traced` shows it unchanged."""


def traced(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> poutine.Trace:
    """Run a model and return its trace.

    Pyro adds a table of the shapes so far to every error. It is removed if the error is a ``RefusedError``.
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
    """A continuous latent site, with a feasible constrained value and the plates (``frames``) around it."""

    name: str
    value: Tensor
    support: constraints.Constraint
    event_dim: int
    frames: tuple[CondIndepStackFrame, ...]

    @classmethod
    def of(cls, site: Any) -> LatentSite:
        """The latent site of a site of a trace."""
        fn, frames = site["fn"], tuple(site["cond_indep_stack"])
        return cls(site["name"], site["value"].detach(), fn.support, fn.event_dim, frames)


@dataclass(frozen=True)
class SubsampledPlate:
    """A plate that shows ``subsample_size`` of its ``size`` rows at a time, with indices on ``device``."""

    name: str
    size: int
    subsample_size: int
    device: torch.device


@dataclass(frozen=True)
class Term:
    """A term of the log joint: log probabilities of any shape, masked ones 0, and a scale that broadcasts."""

    elements: Tensor
    scale: float | Tensor


class GivenIndices(Messenger):
    """Sets the indices of subsampled plates, by name.

    With ``in_order``, plates without indices show their first rows: those of a batch.
    """

    def __init__(self, indices: Values, in_order: bool = False) -> None:
        super().__init__()
        self.indices, self.in_order = indices, in_order

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        if not is_subsampled(fn):
            return
        if name in self.indices:
            msg["value"] = self.indices[name]
        elif self.in_order:
            msg["value"] = torch.arange(fn.subsample_size)
        else:
            raise RefusedError(
                f"plate {name!r} shows {fn.subsample_size} of {fn.size} rows and has no indices; "
                f"pass a tensor of indices under {name!r}"
            )
        msg["done"] = True


def is_subsampled(fn: Any) -> bool:
    """Whether it is what a plate draws its rows from, and the plate shows some of its rows only."""
    return is_plate(fn) and fn.subsample_size is not None and fn.subsample_size < fn.size


def in_subsampled_plate(frames: Iterable[CondIndepStackFrame]) -> bool:
    """Whether one of the plates around a site shows some of its rows only."""
    return any(frame.full_size is not None and frame.size < frame.full_size for frame in frames)


def subsampled_plates(trace: poutine.Trace) -> dict[str, SubsampledPlate]:
    """The subsampled plates of a model's trace."""
    shown = [(s["name"], s["fn"], s["value"]) for s in _samples(trace) if is_subsampled(s["fn"])]
    return {name: SubsampledPlate(name, fn.size, fn.subsample_size, rows.device) for name, fn, rows in shown}


def init_to_prior(site: Any) -> Tensor:
    """Draw a site from its prior; from :func:`uniform_draw` if the prior is improper."""
    try:
        return site["fn"].sample().detach()
    except NotImplementedError:
        return uniform_draw(site["fn"])


def uniform_draw(fn: Any) -> Tensor:
    """Draw uniformly on (-2, 2) in the unconstrained space of a distribution."""
    bijection = biject_to(fn.support)
    return bijection(4 * torch.rand(bijection.inverse_shape(fn.shape())) - 2)


class Program:
    r"""A Pyro model and its arguments as a function of its continuous latent sites.

    The log joint is

    .. math::

        \log p(\theta, D) = \sum_s c_s \log p(x_s \mid \mathrm{pa}(x_s)),

    over all sample sites :math:`s`, with the scales :math:`c_s` of subsampled plates and ``poutine.scale``,
    and enumerable discrete latent sites summed out (inside the scale, as :class:`~pyro.infer.TraceEnum_ELBO`
    does). ``init_strategy`` maps a site to its prototype value, as in Pyro's autoguides. A latent site that
    is discrete and can't be enumerated raises a ``ValueError``.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: Args = (),
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
        latents = [s for s in variables(trace) if not s["is_observed"] and not is_deterministic(s)]
        self.enumerated = tuple(s["name"] for s in latents if s["fn"].has_enumerate_support)
        continuous = [LatentSite.of(s) for s in latents if not s["fn"].has_enumerate_support]
        self.latents = {site.name: site for site in continuous}
        for name, latent in self.latents.items():
            if latent.support.is_discrete:
                raise ValueError(
                    f"latent site {name!r} is discrete and can't be enumerated (support {latent.support}); "
                    "marginalise it in the model, or give it a distribution with finite support"
                )
        if self.enumerated:
            model = enumerating(model, -1 - self.max_plate_nesting)
        self._runnable = model

    def _run_first(self) -> poutine.Trace:
        """Run the model at the first of some draws where its distributions have valid parameters.

        At others a scale may underflow to 0, which Pyro's validation refuses.
        """
        for _ in range(NUM_FIRST_DRAWS - 1):
            try:
                return self._run_prototype()
            except ValueError as error:
                if "Expected parameter" not in str(error):  # from torch's validation of parameters
                    raise
        return self._run_prototype()

    def _run_prototype(self) -> poutine.Trace:
        """Run the model at a draw, without gradients and unseen by handlers outside."""
        with torch.no_grad(), poutine.block():
            return traced(InitMessenger(self._initial)(self.model), self.args, self.kwargs)

    def _initial(self, site: Any) -> Tensor:
        """The value of a latent site; a ``Delta`` has its own, whatever the strategy."""
        return init_to_prior(site) if is_deterministic(site) else self.init_strategy(site)

    def draw(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw constrained values by ``init_strategy``, by site, and indices, by subsampled plate.

        Unlike construction, this advances torch's global generator. Parameters of distributions are not
        validated: the caller has to check the point. A run that lacks a site raises a ``ValueError``.
        """
        with unvalidated():
            trace = self._run_prototype()
        missing = [name for name in [*self.latents, *self.plates] if name not in trace.nodes]
        if missing:
            raise ValueError(
                f"the model has site {missing[0]!r} in some of its runs and not in others; sample it in "
                "every run, and use it only where it is needed"
            )
        values = {name: trace.nodes[name]["value"].detach() for name in self.latents}
        return values, {name: trace.nodes[name]["value"] for name in self.plates}

    def trace(self, values: Values, indices: Values | None = None, args: Args | None = None) -> poutine.Trace:
        """The model's trace with log probabilities, at ``values`` of each latent site, constrained.

        ``indices`` are ``subsample_size`` row numbers for every subsampled plate. ``args`` replace the
        arguments of construction by a batch of the data; subsampled plates without indices then show the
        rows of the batch in order. A missing value or missing indices raise a ``ValueError``.
        """
        trace = self._run(values, indices, args)
        trace.compute_log_prob()
        return trace

    def _run(self, values: Values, indices: Values | None, args: Args | None) -> poutine.Trace:
        """The trace without log probabilities; arguments as of :meth:`trace`."""
        missing = [name for name in self.latents if name not in values]
        if missing:
            raise ValueError(
                f"no value for latent site {missing[0]!r}; the model's latent sites are {list(self.latents)}"
            )
        given = {name: values[name] for name in self.latents}
        with poutine.block(), GivenIndices(indices or {}, in_order=args is not None):
            conditioned = poutine.condition(self._runnable, data=given)
            return traced(conditioned, self.args if args is None else args, self.kwargs)

    def log_joint_terms(
        self,
        values: Values,
        indices: Values | None = None,
        args: Args | None = None,
        *,
        ring: LogRing | None = None,
    ) -> dict[str, Tensor]:
        """The log joint by site, each a scalar; sites that depend on summed-out ones share one term.

        A joint term of sites ``y`` and ``z`` is named ``"z+y"``. ``ring`` says how enumerated sites are
        summed out; by default as Pyro does, which is differentiable, but fails under ``vmap``.
        """
        trace = self.trace(values, indices, args)
        if not self.enumerated:
            return {site["name"]: site["log_prob_sum"] for site in variables(trace)}
        return marginal_terms(trace, ring)

    def log_joint_elements(self, values: Values, indices: Values | None = None) -> dict[str, Term]:
        """The terms of the log joint, element by element: the finest parts that the model has.

        An element is an entry of a site, also if ``to_event`` makes many entries one event. For summed-out
        sites it is an entry of the plates that remain, such as a row of the data. The names are those of
        :meth:`log_joint_terms`, whose values are the sums of the scaled elements. A value outside the support
        of its site raises a ``ValueError``.
        """
        if not self.enumerated:
            trace = self._run(values, indices, None)
            return {site["name"]: _elements(site) for site in variables(trace)}
        alone, joint, scale, parts = marginalised(self.trace(values, indices), None)
        terms = {site["name"]: _elements(site) for site in alone}
        terms[joint] = Term(torch.cat([part.flatten() for part in parts]), scale)
        return terms

    def log_joint(
        self,
        values: Values,
        indices: Values | None = None,
        args: Args | None = None,
        *,
        ring: LogRing | None = None,
    ) -> Tensor:
        """The log joint, a scalar; arguments as for :meth:`log_joint_terms`."""
        return torch.stack(list(self.log_joint_terms(values, indices, args, ring=ring).values())).sum()


def _samples(trace: poutine.Trace) -> list[Any]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]


def _elements(site: Any) -> Term:
    """The log probability of a site, entry by entry."""
    fn = without_event_dims(site["fn"])
    extra = site["fn"].event_dim - fn.event_dim
    try:
        elements = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    except ValueError as error:
        problem = f"the log probability of site {site['name']!r} can't be computed: {error}"
        raise ValueError(problem) from error

    def aligned(of_batch: Any) -> Any:
        """A number or tensor of the site's batch shape, with dims of 1 for the entries of an event."""
        return of_batch[(..., *(None,) * extra)] if isinstance(of_batch, Tensor) and extra else of_batch

    return Term(scale_and_mask(elements, mask=aligned(site["mask"])), aligned(site["scale"]))
