"""The groups of an export, each as a function of the draws and the model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_sym import _arviz
from pyro_sym.export.aligned import aligned
from pyro_sym.export.attrs import as_json, versions
from pyro_sym.export.likelihood import PointwiseLikelihood
from pyro_sym.export.names import Variable, finish, legal, plate_dims, stacked
from pyro_sym.export.options import Function, Given, Options
from pyro_sym.export.predictive import predict, prior_draws
from pyro_sym.export.read import Fit
from pyro_sym.export.shown_model import ShownModel
from pyro_sym.export.sites import unseen
from pyro_sym.export.vmap_draws import at_draws, at_finite_draws

__all__ = ["convert"]

Group = dict[str, Variable]

FUNCTION_CHUNK = 64
LATENT_SITE = "latent_site"  # the dim of statistics that have a value for each latent site


def convert(fit: Fit, asked: Options) -> Any:
    """Make all groups that were asked for, and pass them to ArviZ."""
    model = None if fit.model is None else ShownModel(fit.model, fit)
    functions = asked["functions"] or {}
    computed = _deterministic_to_compute(model, asked)
    attrs = {**fit.attrs, "versions": versions()}
    if functions:
        attrs["functions"] = [legal(name) for name in functions]
    attrs |= {"inference_library": "pyro", "inference_library_version": pyro.__version__}
    groups: dict[str, Group] = {"posterior": _sites(fit.draws, model, computed, functions)}
    num_sites = len(fit.latent_sites)
    by_site = {name for name, value in fit.stats.items() if num_sites and value.shape[2:] == (num_sites,)}
    stats = {n: Variable(value, [LATENT_SITE] if n in by_site else None) for n, value in fit.stats.items()}
    if (symmetry := asked["symmetry"]) is not None:
        result = aligned(fit.draws, symmetry)
        # Given draws of deterministic sites are not aligned: they are computed again from the aligned sites.
        again = set() if model is None else model.deterministic.given - set(symmetry.sites)
        moved = {name: value for name, value in result.draws.items() if name not in again}
        groups["posterior_aligned"] = _sites(moved, model, {*computed, *again}, functions)
        if clash := stats.keys() & result.stats.keys():
            raise ValueError(f"statistics {sorted(clash)} have the names of the alignment's; rename them")
        stats |= {name: Variable(value) for name, value in result.stats.items()}
        attrs |= {"symmetry": repr(symmetry), **result.attrs}
    groups["sample_stats"] = stats
    if model is not None:
        groups["observed_data"] = stacked(model.observed, 0)
        if shown := [legal(name) for name in computed if name not in fit.draws]:
            attrs["deterministic"] = shown
        if left_out := [*model.left_out, *_deterministic_left_out(model, asked)]:
            attrs["left_out"] = [*attrs.get("left_out", []), *left_out]
    if asked["log_likelihood"]:
        groups["log_likelihood"] = _log_likelihood(fit, _needed(model, "log_likelihood=True"))
    groups["posterior_predictive"] = _posterior_predictive(fit, model, asked["posterior_predictive"])
    groups |= _prior(model, asked["prior"], computed)
    groups["constant_data"] = _data(asked["constant_data"])
    ahead = {
        "predictions": _given_draws(asked["predictions"], fit, model),
        "predictions_constant_data": _data(asked["predictions_constant_data"]),
    }
    coords = ({LATENT_SITE: fit.latent_sites} if by_site else {}) | dict(asked["coords"] or {})
    parts = [finish(groups, coords, asked["dims"]), finish(ahead, asked["pred_coords"], asked["pred_dims"])]
    arrays, names, labels = ({**now, **later} for now, later in zip(*parts, strict=True))
    return _arviz.build(arrays, coords=labels, dims=names, attrs=as_json(attrs))


def _needed(model: ShownModel | None, what: str) -> ShownModel:
    if model is None:
        raise ValueError(f"{what} needs the model; pass model=")
    return model


def _deterministic_to_compute(model: ShownModel | None, asked: Options) -> list[str]:
    """The deterministic sites to compute; a function of the same name replaces a site."""
    which = asked["deterministic"]
    if model is None or which is False:
        return []
    known = model.deterministic.sites.keys() - (asked["functions"] or {}).keys()
    if which is True:
        rows = model.deterministic.in_subsampled_plates
        return [name for name in model.deterministic.sites if name in known and name not in rows]
    names = [which] if isinstance(which, str) else list(which)  # type: ignore[arg-type]
    for name in names:
        if name in model.deterministic.left_out:
            raise ValueError(
                f"the deterministic site {name!r} has not one value a draw: it depends on sites without "
                "draws, or on the rows that the model happens to show; leave it out of deterministic"
            )
        if name not in model.deterministic.sites:
            sites = list(model.deterministic.sites)
            raise ValueError(f"deterministic names {name!r}, and the model's deterministic sites are {sites}")
    return [name for name in model.deterministic.sites if name in names and name in known]


def _deterministic_left_out(model: ShownModel, asked: Options) -> list[str]:
    """The deterministic sites that can't be computed, or that are left out unless they are named."""
    if asked["deterministic"] is not True:
        return []
    functions = asked["functions"] or {}
    rows = [name for name in model.deterministic.in_subsampled_plates if name not in functions]
    if rows:
        warnings.warn(
            f"the deterministic sites {rows} have a value for every row of a subsampled plate at every draw, "
            "and are left out; name them in deterministic to have them, or set deterministic=False",
            stacklevel=4,
        )
    return sorted([*model.deterministic.left_out, *rows])


def _sites(
    draws: Mapping[str, Tensor],
    model: ShownModel | None,
    computed: Collection[str],
    functions: Mapping[str, Function],
) -> Group:
    """Draws of sites, what the model computes from them, and functions of them."""
    group = {n: Variable(v) if model is None else model.variable(n, v) for n, v in draws.items()}
    sample_shape = next(iter(draws.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}  # (C * S, *shape)
    if model is not None:
        new = _at(flat, model, [name for name in computed if name not in draws])
        group |= {n: model.variable(n, v.unflatten(0, sample_shape)) for n, v in new.items()}
    if clash := functions.keys() & draws.keys():
        raise ValueError(f"functions {sorted(clash)} have the names of sites; give them others")
    for name, function in functions.items():
        with unseen():
            value = at_draws(partial(_evaluated, name, function), flat, FUNCTION_CHUNK)[name]
        group[name] = Variable(value.unflatten(0, sample_shape))
    return group


def _at(flat: Mapping[str, Tensor], model: ShownModel, names: Collection[str]) -> dict[str, Tensor]:
    """Deterministic sites at draws; if the model fails at one of them, the draws are exported without."""
    try:
        return model.deterministic.at(flat, model.plates, names)
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"the deterministic sites {list(names)} are left out, as the model failed at some draw: "
            f"{str(error).splitlines()[0]}",
            stacklevel=5,
        )
        return {}


def _evaluated(name: str, function: Function, draw: dict[str, Tensor]) -> dict[str, Tensor]:
    value = function(draw)
    if not isinstance(value, Tensor):
        raise TypeError(f"the function {name!r} returned {type(value).__name__}, not a tensor")
    return {name: value}


def _log_likelihood(fit: Fit, model: ShownModel) -> Group:
    if not fit.shows_all:
        raise ValueError(
            "log_likelihood=True, but the model got batches of its data from the kernel's loader; pass args "
            "and kwargs with all rows"
        )
    first = fit.first_finite or {name: value[0, 0] for name, value in fit.draws.items()}
    likelihood = PointwiseLikelihood(model.program, first, fit.args, fit.kwargs)
    likelihood.warn_of_factors(stacklevel=5)
    group = {}
    for name, value in likelihood.at(fit.flat).items():  # (C * S, *batch_shape)
        data = likelihood.data[name]
        dims = plate_dims(data.frames, tuple(value.shape[1:]))
        sequential = tuple(frame.name for frame in data.frames if not frame.vectorized)
        group[name] = Variable(value.unflatten(0, fit.sample_shape), dims, data.kept, sequential)
    return stacked(group, 2)


def _posterior_predictive(fit: Fit, model: ShownModel | None, asked: bool | Given | None) -> Group:
    if asked is not True:
        return _given_draws(asked or None, fit, model)
    shown = _needed(model, "posterior_predictive=True")
    values = at_finite_draws(partial(predict, shown), fit.flat)
    return _simulated({name: value.unflatten(0, fit.sample_shape) for name, value in values.items()}, shown)


def _simulated(values: Mapping[str, Tensor], model: ShownModel) -> Group:
    """Simulated data, without the rows that were not observed."""
    known = {name: value for name, value in values.items() if name not in model.left_out}
    return stacked({n: model.variable(n, value, 2, model.kept(n)) for n, value in known.items()}, 2)


def _given_draws(values: Given | bool | None, fit: Fit, model: ShownModel | None) -> Group:
    """Draws that the user gave, of shape ``(C * S, ...)`` or ``(C, S, ...)``."""
    shape = fit.sample_shape
    group = {}
    for name, several in (values or {}).items():  # type: ignore[union-attr]
        value = torch.as_tensor(several)
        if value.shape[:2] != shape:
            if value.shape[:1] != (shape.numel(),):
                raise ValueError(
                    f"predictive draws of {name!r} have shape {tuple(value.shape)}; pass ({shape.numel()}, "
                    f"*shape) or (num_chains, num_samples, *shape) = ({shape[0]}, {shape[1]}, *shape)"
                )
            value = value.unflatten(0, shape)  # (C, S, ...)
        group[name] = _unpadded(name, value, model)
    return stacked(group, 2)


def _unpadded(name: str, value: Tensor, model: ShownModel | None) -> Variable:
    """Draws without the dims of size 1 that Pyro's ``Predictive`` puts in front of a site's own."""
    if model is None:
        return Variable(value)
    ndim = model.ndim(name)
    while ndim is not None and value.dim() - 2 > ndim and value.shape[2] == 1:
        value = value.squeeze(2)
    kept = model.kept(name)
    if kept is not None and value.shape[2 : 2 + kept.dim()] != kept.shape:
        kept = None
    return model.variable(name, value, 2, kept)


def _prior(
    model: ShownModel | None, asked: int | Given | None, computed: Collection[str]
) -> dict[str, Group]:
    if isinstance(asked, int):
        model = _needed(model, f"prior={asked}")
        latent = prior_draws(model, asked)  # (M, *shape)
        new = predict(model, latent, also=computed)
        prior = {**latent, **{name: new.pop(name) for name in computed if name in new}}
        return {
            "prior": {name: model.variable(name, value.unsqueeze(0)) for name, value in prior.items()},
            "prior_predictive": _simulated({n: value.unsqueeze(0) for n, value in new.items()}, model),
        }
    group = {n: _unpadded(n, torch.as_tensor(v).unsqueeze(0), model) for n, v in (asked or {}).items()}
    data = set() if model is None else {*model.observed, *model.left_out}
    return {
        "prior": {name: value for name, value in group.items() if name not in data},
        "prior_predictive": stacked({name: value for name, value in group.items() if name in data}, 2),
    }


def _data(values: Given | None) -> Group:
    return {name: Variable(_as_numbers(name, value)) for name, value in (values or {}).items()}


def _as_numbers(name: str, value: Any) -> Tensor:
    """Constant data as a tensor, which holds no strings."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"constant data {name!r} hold {array.dtype} values, not numbers: pass strings and dates as "
            "labels of a dim, coords={dim: values}"
        )
    return torch.as_tensor(array)
