"""From Pyro to ArviZ: conversion only.

A source (an MCMC run, a guide) is read into a :class:`_Fit`, which holds tensors and knows nothing of ArviZ.
Each group of the result is then one function of the fit.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor

from pyro_sym import _arviz
from pyro_sym.program import in_subsampled_plate, init_to_prior
from pyro_sym.symmetry.align import align
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation
from pyro_sym.symmetry.flat import flatten, leaves

__all__ = ["dataset", "from_pyro", "from_pyro_svi"]

Group = dict[str, Tensor]
Dims = Mapping[str, Sequence[str | None]]
# The dim of statistics that this package's kernels keep by latent site.
LATENT_SITE = "latent_site"


@dataclass(frozen=True)
class _Fit:
    """What the groups are made of.

    Attributes:
        draws: posterior draws by site, of shape ``(num_chains, num_samples, *shape)``.
        stats: statistics of the sampler by name, of the same first two dims.
        trace: the model's trace at one of the draws, if there is a model.
        attrs: what is said of the whole.
    """

    draws: Group
    stats: Group
    trace: poutine.Trace | None
    attrs: dict[str, Any] = field(default_factory=dict)


def from_pyro(
    mcmc: Any,
    *,
    symmetry: Symmetry | None = None,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
) -> Any:
    r"""Convert an MCMC run to ArviZ, with draws aligned modulo a symmetry beside the raw ones.

    The groups are

    * ``posterior``: the draws as they are;
    * ``posterior_aligned``, with a symmetry: draw :math:`\theta_m` moved to :math:`g_m \cdot \theta_m`
      (:func:`~pyro_sym.align`, all chains to the same labels);
    * ``sample_stats``: ``diverging`` if the kernel reports divergences, the per-draw statistics of this
      package's kernels, those by site along ``latent_site``, and the elements :math:`g_m` as integers
      ``permutation`` and ``sign`` (numbered ``permutation_0``, ``permutation_1``, ... if there are several);
    * ``observed_data``: the model's observed sites, without deterministic sites and factors.

    Dims are named after the plates, and event dims after ``infer={"event_dims": ["feature"]}`` of the site;
    what has no name is called ``site_dim_0`` and so on. Slashes in names, as from
    ``pyro.contrib.autoname.scope``, become dots.

    A site inside a subsampled plate shows a few of its rows only, so it is left out of ``observed_data`` and
    named in the attribute ``left_out``. Pass ``args`` and ``kwargs`` that switch subsampling off to have it.

    The model is run once, at the first draw; torch's random state is left as it was.

    Args:
        mcmc: a :class:`pyro.infer.MCMC` that has been run, with any kernel, or a
            :class:`~pyro_sym.VectorizedMCMC`.
        symmetry: what to align modulo; by default nothing is aligned.
        args: positional arguments of the model; by default those of ``mcmc.run``.
        kwargs: keyword arguments of the model; by default those of ``mcmc.run``.
        model: the model; by default the kernel's. Without one (a kernel given a potential) there are no
            observed data and no dims from plates.
        coords: labels by dim.
        dims: dim names by site, one a dim (``None`` for the default name), in place of those from the model.

    Returns:
        An ``arviz.InferenceData`` with ArviZ 0.23, an ``xarray.DataTree`` with ArviZ 1.x.

    Raises:
        ValueError: if there are no draws, a dim would have two sizes or the name of a variable, names clash,
            or a statistic is not one value a draw.
        TypeError: if ``mcmc`` keeps no draws.
        SymmetryError: if the symmetry can't act on the draws.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("city", len(y)):
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> mcmc = MCMC(NUTS(model), num_samples=20, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run(torch.tensor([1.0, 2.0, 3.0]))
        >>> from_pyro(mcmc, coords={"city": ["Bern", "Genf", "Chur"]})["observed_data"]["y"].dims
        ('city',)
    """
    draws = _mcmc_draws(mcmc)
    kernel = mcmc.kernel
    model = model if model is not None else getattr(kernel, "model", None)
    args = args if args is not None else getattr(mcmc, "_args", None) or ()
    kwargs = kwargs if kwargs is not None else getattr(mcmc, "_kwargs", None) or {}
    reports = [report or {} for report in getattr(mcmc, "_diagnostics", [])]
    attrs: dict[str, Any] = {"kernel": type(kernel).__name__}
    if rates := [float(report["acceptance rate"]) for report in reports if "acceptance rate" in report]:
        attrs["acceptance_rate"] = rates
    trace = None if model is None else _model_trace(model, args, kwargs, draws)
    stats = _mcmc_stats(reports, draws)
    by_site = [name for name in stats if name.startswith("site_")]
    if by_site and getattr(kernel, "transforms", None):  # this package's kernels, in the order of their sites
        coords = {LATENT_SITE: list(kernel.transforms), **(coords or {})}
        dims = {**{name: [LATENT_SITE] for name in by_site}, **(dims or {})}
    return _convert(_Fit(draws, stats, trace, attrs), symmetry, coords, dims)


def from_pyro_svi(
    guide: Callable[..., Any],
    *,
    symmetry: Symmetry | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    model: Callable[..., Any] | None = None,
    num_samples: int = 1000,
    coords: Mapping[str, Any] | None = None,
    dims: Dims | None = None,
) -> Any:
    r"""Convert a guide to ArviZ: independent draws :math:`\theta_m \sim q` as one chain.

    Groups, dims and names are as in :func:`from_pyro`. A guide with ``sample_posterior``
    (:class:`~pyro_sym.AutoSymmetrized`) is asked for draws, and its own symmetry is the default; any other
    guide is run ``num_samples`` times, and its sample sites are read, auxiliary ones excepted.

    Draws of sites inside subsampled plates belong to other rows every time; a warning says that they are
    left out, and the attribute ``left_out`` names them.

    The draws start from torch's random state, which is then put back: two calls give the same draws.

    Args:
        guide: a Pyro guide, trained.
        symmetry: what to align modulo; by default the guide's symmetry, if it has one.
        args: positional arguments of the guide and the model.
        kwargs: their keyword arguments.
        model: the model; by default the guide's. Without one there are no observed data and no dims from
            plates.
        num_samples: number of draws.
        coords: labels by dim.
        dims: dim names by site, as in :func:`from_pyro`.

    Returns:
        An ``arviz.InferenceData`` with ArviZ 0.23, an ``xarray.DataTree`` with ArviZ 1.x.

    Raises:
        ValueError: if ``num_samples`` is not positive, the guide has no latent sites, or as in
            :func:`from_pyro`.
        SymmetryError: if the symmetry can't act on the draws.

    Example:
        >>> def model(y):
        ...     loc = pyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("city", len(y)):
        ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> y = torch.tensor([1.0, 2.0, 3.0])
        >>> from_pyro_svi(AutoNormal(model), args=(y,), num_samples=50)["posterior"]["loc"].shape
        (1, 50)
    """
    if num_samples < 1:
        raise ValueError(f"num_samples={num_samples} must be positive")
    kwargs = dict(kwargs or {})
    draws, local = _guide_draws(guide, args, kwargs, num_samples)
    attrs: dict[str, Any] = {"guide": type(guide).__name__}
    if local:
        warnings.warn(
            f"sites {local} of the guide are inside subsampled plates and left out of the export: their rows "
            "are others in every draw. Pass args and kwargs that switch subsampling off to have them",
            stacklevel=2,
        )
        attrs["left_out"] = local
    if not draws:
        raise ValueError(f"the guide {guide} has no latent sites to export")
    model = model if model is not None else getattr(guide, "model", None)
    trace = None if model is None else _model_trace(model, args, kwargs, draws)
    if symmetry is None:
        symmetry = getattr(guide, "symmetry", None)
    return _convert(_Fit(draws, {}, trace, attrs), symmetry, coords, dims)


def dataset(data: Any, group: str) -> Any:
    """One group of an export, alike with both generations of ArviZ.

    Args:
        data: what :func:`from_pyro` or :func:`from_pyro_svi` returned.
        group: the name of a group.

    Returns:
        An ``xarray.Dataset``, which ``az.summary``, ``az.rhat`` and ``az.plot_trace`` take.

    Raises:
        KeyError: if there is no such group.
    """
    node = data[group]
    return node.to_dataset() if hasattr(node, "to_dataset") else node


# Reading the sources


def _mcmc_draws(mcmc: Any) -> Group:
    if not hasattr(mcmc, "get_samples"):
        raise TypeError(f"{type(mcmc).__name__} keeps no draws to export; use pyro.infer.MCMC")
    if getattr(mcmc, "_samples", True) is None:
        raise ValueError("the MCMC has no draws yet: call its run() first")
    draws = dict(mcmc.get_samples(group_by_chain=True))
    if not draws:
        raise ValueError("the MCMC has no latent sites to export")
    return draws


def _mcmc_stats(reports: list[dict[str, Any]], draws: Group) -> Group:
    """Statistics by draw, from the kernel's own report of each chain.

    ``mcmc.diagnostics()`` would compute the effective sample size of every coordinate first, and fail on
    short chains.
    """
    shape = next(iter(draws.values())).shape[:2]
    stats: Group = {}
    if reports and all("divergences" in report for report in reports):
        stats["diverging"] = torch.zeros(shape, dtype=torch.bool)
        for chain, report in enumerate(reports):
            stats["diverging"][chain, report["divergences"]] = True
    if reports and all("sample_stats" in report for report in reports):
        for name in reports[0]["sample_stats"]:
            by_chain = [torch.as_tensor(report["sample_stats"][name]) for report in reports]
            for chain, values in enumerate(by_chain):
                if values.shape[:1] != shape[1:]:
                    raise ValueError(
                        f"the statistic {name!r} of chain {chain} has shape {tuple(values.shape)}, expected "
                        f"one value for each of {shape[1]} draws"
                    )
            stats[name] = torch.stack(by_chain)
    return stats


def _guide_draws(
    guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int
) -> tuple[Group, list[str]]:
    """Draws of shape ``(1, num_samples, *shape)``, and the names of the sites in subsampled plates."""
    with _unseen():
        first = _latents(poutine.trace(guide).get_trace(*args, **kwargs))
    local = [name for name, site in first.items() if in_subsampled_plate(site["cond_indep_stack"])]
    kept = [name for name in first if name not in local]
    with _unseen():
        if hasattr(guide, "sample_posterior"):
            values = guide.sample_posterior(*args, sample_shape=(num_samples,), **kwargs)
        else:
            # Predictive would pad the values with the dims of plates they are not in.
            rows = [_latents(poutine.trace(guide).get_trace(*args, **kwargs)) for _ in range(num_samples)]
            values = {name: torch.stack([row[name]["value"] for row in rows]) for name in kept}
    return {name: values[name].unsqueeze(0) for name in kept}, local


def _model_trace(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: Group
) -> poutine.Trace:
    """The model's trace at the first draw; sites without a draw, say summed-out ones, come from the prior."""
    with _unseen():
        conditioned = poutine.condition(model, data={name: value[0, 0] for name, value in draws.items()})
        return poutine.trace(InitMessenger(init_to_prior)(conditioned)).get_trace(*args, **kwargs)


@contextmanager
def _unseen() -> Iterator[None]:
    """No gradients, nothing seen by handlers outside, and the random state put back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), poutine.block():
        yield


def _latents(trace: poutine.Trace) -> dict[str, Any]:
    return {
        name: site
        for name, site in _stochastic(trace)
        if not site["is_observed"] and not _infer(site).get("is_auxiliary")
    }


def _stochastic(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    """Sample sites that stand for random variables: no plates, deterministic sites or factors."""
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or _infer(site).get("_deterministic"):
            continue
        fn = site["fn"]
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if not isinstance(fn, _Subsample | Unit):
            yield name, site


def _infer(site: Any) -> Mapping[str, Any]:
    return site["infer"] or {}


# The groups


def _convert(
    fit: _Fit, symmetry: Symmetry | None, coords: Mapping[str, Any] | None, dims: Dims | None
) -> Any:
    groups = {"posterior": fit.draws, "sample_stats": dict(fit.stats)}
    attrs = {**fit.attrs, "inference_library": "pyro", "inference_library_version": pyro.__version__}
    if (own_version := _version("pyro-sym")) is not None:
        attrs["pyro_sym_version"] = own_version
    if symmetry is not None:
        alignment = align(fit.draws, symmetry, group_by_chain=True)
        groups["posterior_aligned"] = alignment.samples
        groups["sample_stats"] |= _elements(alignment, symmetry)
        attrs["symmetry"] = repr(symmetry)
        attrs["alignment"] = {"num_sweeps": alignment.num_sweeps, "converged": alignment.converged}
    if fit.trace is not None:
        groups["observed_data"], left_out = _observed_data(fit.trace, fit.draws)
        if left_out:
            attrs["left_out"] = [*attrs.get("left_out", []), *left_out]
    groups = {group: _legal_names(group, values) for group, values in groups.items() if values}
    return _arviz.build(
        {group: _to_numpy(group, values) for group, values in groups.items()},
        coords={_legal(name): labels for name, labels in (coords or {}).items()},
        dims=_dims(groups, fit.trace, dims or {}),
        attrs={name: value if isinstance(value, str) else json.dumps(value) for name, value in attrs.items()},
    )


def _elements(alignment: Alignment, symmetry: Symmetry) -> Group:
    """The elements applied, by member of the symmetry; names are numbered if there are several of a kind."""
    group = flatten(symmetry)
    assert group is not None, "align would have refused it"
    stats: Group = {}
    kinds = ["permutation" if isinstance(member, Permutation) else "sign" for member in group.members]
    for i, (kind, part) in enumerate(zip(kinds, leaves(alignment.elements), strict=True)):
        stats[f"{kind}_{kinds[:i].count(kind)}" if kinds.count(kind) > 1 else kind] = part
    return stats


def _observed_data(trace: poutine.Trace, draws: Group) -> tuple[Group, list[str]]:
    """The data as the model saw them, and the names of the sites of which it saw a part only."""
    # At a draw, latent sites are conditioned and thereby "observed" too.
    observed = {name: s for name, s in _stochastic(trace) if s["is_observed"] and name not in draws}
    left_out = [name for name, site in observed.items() if in_subsampled_plate(site["cond_indep_stack"])]
    data = {n: torch.as_tensor(site["value"]) for n, site in observed.items() if n not in left_out}
    return data, left_out


# Names and values that ArviZ and netCDF can take


def _legal(name: str) -> str:
    return name.replace("/", ".")


def _legal_names(group: str, values: Group) -> Group:
    legal: Group = {}
    for name, value in values.items():
        if _legal(name) in legal:
            raise ValueError(f"two variables of {group} are called {_legal(name)!r}; rename one site")
        legal[_legal(name)] = value
    return legal


def _dims(
    groups: Mapping[str, Group], trace: poutine.Trace | None, given: Dims
) -> dict[str, dict[str, list[str]]]:
    """Names of the dims by group and variable: the user's, or those of plates and event dims, or numbers."""
    sites = {} if trace is None else {_legal(name): site for name, site in _stochastic(trace)}
    given = {_legal(name): several for name, several in given.items()}
    variables = {name for group in groups.values() for name in group}
    if unknown := given.keys() - variables:
        raise ValueError(f"dims are given for {sorted(unknown)}, which are none of {sorted(variables)}")
    dims: dict[str, dict[str, list[str]]] = {group: {} for group in groups}
    sizes: dict[str, tuple[int, str]] = {}
    for group, values in groups.items():
        # A statistic may have the name of a site, say "energy", and is something else.
        known = {} if group == "sample_stats" else sites
        for name, value in values.items():
            shape = tuple(value.shape[2:] if _arviz.has_sample_dims(group) else value.shape)
            names = _dim_names(name, shape, known.get(name), given.get(name))
            dims[group][name] = names
            for dim, size in zip(names, shape, strict=True):
                _check_dim(dim, size, name, variables, sizes)
    return dims


def _dim_names(
    name: str, shape: tuple[int, ...], site: Any | None, given: Sequence[str | None] | None
) -> list[str]:
    names: Sequence[str | None] = [None] * len(shape)
    if given is not None:
        names = given
    elif site is not None:
        names = _model_dims(site, shape)
    if len(names) != len(shape):
        raise ValueError(f"dims names {list(names)} for {name!r}, which has shape {shape}")
    full = [_legal(dim) if dim is not None else f"{name}_dim_{i}" for i, dim in enumerate(names)]
    if len(set(full)) < len(full):
        raise ValueError(f"two dims of {name!r} have one name: {full}; pass dims for it")
    return full


def _check_dim(
    dim: str, size: int, name: str, variables: set[str], sizes: dict[str, tuple[int, str]]
) -> None:
    """Refuse what ArviZ takes in silence: it pads dims of two sizes, and loses variables called as a dim."""
    first_size, first = sizes.setdefault(dim, (size, name))
    if size != first_size:
        raise ValueError(
            f"dim {dim!r} has size {first_size} in {first!r} and size {size} in {name!r}; pass dims with "
            "another name for one of them"
        )
    if dim in variables or dim in ("chain", "draw"):
        raise ValueError(
            f"dim {dim!r} of {name!r} has the name of a variable or of a sample dim; pass dims with another"
        )


def _model_dims(site: Any, shape: tuple[int, ...]) -> list[str | None]:
    """The plate on each batch dim, and the event dims that the site's ``infer`` names."""
    event_dim = min(site["fn"].event_dim, len(shape))
    plates = {frame.dim: frame for frame in site["cond_indep_stack"] if frame.vectorized}
    names: list[str | None] = []
    for axis in range(event_dim - len(shape), 0):
        plate = plates.get(axis)
        names.append(plate.name if plate is not None and plate.size == shape[axis - event_dim] else None)
    event_names = list(_infer(site).get("event_dims", [None] * event_dim))
    if len(event_names) != event_dim:
        raise ValueError(f"site {site['name']!r} has {event_dim} event dims, but event_dims={event_names}")
    return names + event_names


def _to_numpy(group: str, values: Group) -> dict[str, np.ndarray]:
    arrays = {}
    for name, value in values.items():
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:  # which numpy doesn't have
            value = value.float()
        if value.dtype == torch.bool and group.startswith("posterior"):  # az.summary subtracts
            value = value.to(torch.int8)
        arrays[name] = value.numpy()
    return arrays


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a source tree
        return None
