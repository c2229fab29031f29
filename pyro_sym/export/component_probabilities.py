"""Allocation probabilities of a Pyro model: those of the values of an enumerated site, by datum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import MixtureSameFamily

from pyro_sym.export.log_sum import LogSum
from pyro_sym.export.sites import unseen
from pyro_sym.export.vmap_draws import at_draws
from pyro_sym.model.conditioned_sites import fixed_parameters
from pyro_sym.model.enumeration import marginal_terms
from pyro_sym.model.program import Program, is_data, traced

__all__ = ["allocation_probabilities"]


def allocation_probabilities(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    site: str | None = None,
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    r"""Probabilities that data come from components, as a function of draws, for :func:`align_allocations`.

    For an enumerable discrete latent site :math:`z` of shape :math:`N` they are

    .. math::

        p_{mij} = \mathrm{P}(z_i = j \mid \theta_m, D)
                = \frac{\partial}{\partial \varepsilon_{ij}} \log \sum_z p(z, D \mid \theta_m)
                    \prod_i e^{\varepsilon_{i z_i}} \Big|_{\varepsilon = 0},

    with all enumerable sites summed out. This holds for mixtures and for hidden Markov models alike (where
    the derivative of the forward algorithm is the forward-backward algorithm). Observed sites of
    ``MixtureSameFamily`` need no enumeration:

    .. math::

        p_{mij} = \frac{w_j f_j(y_i)}{\sum_k w_k f_k(y_i)}.

    Args:
        model: a Pyro model.
        args: its positional arguments.
        kwargs: its keyword arguments, as a dict.
        site: the discrete latent site, or the observed mixture; by default all enumerable latent sites, or,
            if there are none, all observed mixtures, concatenated.

    Returns:
        A function from constrained values ``(m, *shape)`` by latent site to probabilities ``(m, N, K)``, with
        all plates flattened to one. It evaluates all draws at once, by ``torch.func.vmap``, where the model
        allows, and raises ``ValueError`` if draws have other shapes or a site has no draws.

    Raises:
        TypeError: if ``args`` is no tuple or list, or ``kwargs`` no dict.
        ValueError: if the model has no such site, the sites disagree on the number of components, or a plate
            is subsampled.

    Example:
        >>> def model(y):
        ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 10.0).to_event(1))
        ...     with pyro.plate("data", len(y)):
        ...         z = pyro.sample("z", dist.Categorical(torch.ones(2) / 2))
        ...         pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)
        >>> probabilities = allocation_probabilities(model, (torch.tensor([0.1, 0.3, 4.8]),))
        >>> probabilities({"locs": torch.tensor([[0.0, 5.0]])}).round(decimals=2)
        tensor([[[1., 0.],
                 [1., 0.],
                 [0., 1.]]])
    """
    kwargs = {} if kwargs is None else kwargs
    if not (isinstance(args, tuple | list) and isinstance(kwargs, Mapping)):
        raise TypeError(
            f"args is a {type(args).__name__} and kwargs a {type(kwargs).__name__}; pass a tuple and a dict "
            "of the model's arguments, and draws to the result: allocation_probabilities(model, (x,))(draws)"
        )
    args = tuple(args)
    with unseen(), pyro.validation_enabled(False):
        program = Program(model, args, kwargs)
        for name, plate in program.plates.items():
            rows = f"{plate.subsample_size} of its {plate.size} rows"
            raise ValueError(f"plate {name!r} shows {rows}; pass a model without subsample_size")
        nodes = program.trace({name: latent.value for name, latent in program.latents.items()}).nodes
        no_data = {*program.latents, *fixed_parameters(model, args, kwargs)}
    observed = {name: node["fn"] for name, node in nodes.items() if is_data(node) and name not in no_data}
    mixtures = [name for name, fn in observed.items() if isinstance(fn, MixtureSameFamily)]
    sites = [site] if site is not None else list(program.enumerated) or mixtures
    if not sites or not set(sites) <= {*program.enumerated, *mixtures}:
        raise ValueError(
            f"the model has no discrete site {'to enumerate' if site is None else repr(site)}: enumerable "
            f"latent sites are {list(program.enumerated)}, observed mixtures {mixtures}; pass a function of "
            "draws to align_allocations instead"
        )

    def one(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        if sites[0] in mixtures:
            trace = traced(poutine.condition(model, data=draw), program.args, program.kwargs)
            parts = [_mixture_probabilities(trace.nodes[name]) for name in sites]
        else:
            parts = _marginals(program, draw, {name: nodes[name] for name in sites})
        if len(sizes := {part.shape[-1] for part in parts}) > 1:
            found = f"the sites have different numbers of components, {sorted(sizes)}"
            raise ValueError(f"{found}; name one as site")
        return {"p": torch.cat(parts)}

    def probabilities(draws: Mapping[str, Tensor]) -> Tensor:
        for name, latent in program.latents.items():
            if name not in draws:
                raise ValueError(f"there are no draws of the latent site {name!r}, but of {list(draws)}")
            found, shape = tuple(draws[name].shape), tuple(latent.value.shape)
            if found[1:] != shape:
                raise ValueError(
                    f"draws of site {name!r} have shape {found}, where (m, *shape) with shape {shape} is "
                    "expected; flatten a dim of chains into that of the draws"
                )
        latents = {name: draws[name] for name in program.latents}
        with unseen():
            return at_draws(one, latents, len(next(iter(latents.values()))))["p"]

    return probabilities


def _marginals(program: Program, draw: Mapping[str, Tensor], nodes: Mapping[str, Any]) -> list[Tensor]:
    """Probabilities ``(N, K)`` by site: derivatives of the log joint with respect to log probabilities."""

    def log_joint(shifts: dict[str, Tensor]) -> Tensor:
        trace = program.trace(draw)
        for name, shift in shifts.items():
            trace.nodes[name]["unscaled_log_prob"] = trace.nodes[name]["unscaled_log_prob"] + shift
        return torch.stack(list(marginal_terms(trace, LogSum()).values())).sum()

    like = next(iter(draw.values()))
    gradients = torch.func.grad(log_joint)({name: _zeros(node, like) for name, node in nodes.items()})
    return [_by_datum(gradients[name], node) for name, node in nodes.items()]


def _mixture_probabilities(node: Any) -> Tensor:
    fn, value = node["fn"], node["value"]
    by_component = fn.component_distribution.log_prob(value.unsqueeze(-1 - len(fn.event_shape)))
    joint = fn.mixture_distribution.logits + by_component  # (*batch_shape, K)
    return joint.softmax(-1).reshape(-1, joint.shape[-1])


def _zeros(node: Any, like: Tensor) -> Tensor:
    """Zeros for every value of a site in every plate, broadcastable to its log probability."""
    dim = node["infer"]["_enumerate_dim"]
    plates = {frame.dim: frame.size for frame in node["cond_indep_stack"] if frame.vectorized}
    shape = [plates.get(d, 1) for d in range(min([dim, *plates]), 0)]
    shape[dim] = node["value"].shape[dim]
    return like.new_zeros(shape)


def _by_datum(marginal: Tensor, node: Any) -> Tensor:
    """Probabilities of shape ``(N, K)``; a common scale of the log joint cancels."""
    by_value = marginal.movedim(node["infer"]["_enumerate_dim"], -1)
    by_value = by_value.reshape(-1, by_value.shape[-1])  # (N, K)
    return by_value / by_value.sum(-1, keepdim=True)
