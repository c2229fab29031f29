"""The groups of an export, each as a function of the draws and the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_sym import _arviz
from pyro_sym.export.aligned import aligned
from pyro_sym.export.attrs import as_json, versions
from pyro_sym.export.likelihood import Likelihood
from pyro_sym.export.names import Dims, Variable, finish, plate_dims, stacked
from pyro_sym.export.predictive import predict, prior_draws
from pyro_sym.export.read import Fit
from pyro_sym.export.shown_model import Model
from pyro_sym.export.sites import unseen
from pyro_sym.export.vmap_draws import at_draws, at_finite_draws
from pyro_sym.symmetry.base import Group as SymmetryGroup  # a Group here is one of ArviZ

__all__ = ["Function", "Given", "Request", "convert"]

Function = Callable[[dict[str, Tensor]], Tensor]
Given = Mapping[str, Any]
Group = dict[str, Variable]

FUNCTION_CHUNK = 64


@dataclass(frozen=True)
class Request:
    """What is wanted besides the draws; the arguments that ``from_pyro`` and ``from_pyro_svi`` share."""

    symmetry: SymmetryGroup | None
    deterministic: bool | Collection[str]
    log_likelihood: bool
    posterior_predictive: bool | Given | None
    predictions: Given | None
    prior: int | Given | None
    constant_data: Given | None
    predictions_constant_data: Given | None
    functions: Mapping[str, Function] | None
    coords: Mapping[str, Any] | None
    dims: Dims | None
    pred_coords: Mapping[str, Any] | None
    pred_dims: Dims | None


def convert(fit: Fit, request: Request) -> Any:
    """Make all groups that were asked for, and hand them to ArviZ."""
    finite = _first_finite(fit.draws)
    first = finite or {name: value[0, 0] for name, value in fit.draws.items()}
    model = None
    if fit.model is not None:  # if no draw is finite, it is looked at where its prior is
        model = Model(fit.model, fit.args, fit.kwargs, finite, fit.shows_all, fit.other_args)
    computed = _wanted(model, request)
    attrs = {**fit.attrs, "versions": versions()}
    if request.functions:  # else nothing would tell them from sites
        attrs["functions"] = [name.replace("/", ".") for name in request.functions]
    attrs |= {"inference_library": "pyro", "inference_library_version": pyro.__version__}
    stats = dict(fit.stats)
    groups: dict[str, Group] = {"posterior": _sites(fit.draws, model, computed, request.functions)}
    if request.symmetry is not None:
        result = aligned(fit.draws, request.symmetry)
        # Draws of deterministic sites don't move with the others.
        again = set() if model is None else model.deterministic.given - set(request.symmetry.sites)
        moved = {name: value for name, value in result.draws.items() if name not in again}
        groups["posterior_aligned"] = _sites(moved, model, {*computed, *again}, request.functions)
        stats |= result.stats
        attrs |= {"symmetry": repr(request.symmetry), **result.attrs}
    groups["sample_stats"] = {name: Variable(value) for name, value in stats.items()}
    if model is not None:
        groups["observed_data"] = stacked(model.observed, 0)
        if shown := [name.replace("/", ".") for name in computed if name not in fit.draws]:
            attrs["deterministic"] = shown
        if left_out := [*model.left_out, *_left_out(model, request)]:
            attrs["left_out"] = [*attrs.get("left_out", []), *left_out]
    if not isinstance(request.log_likelihood, bool):  # of values given it would compute its own
        raise TypeError(
            f"log_likelihood is a {type(request.log_likelihood).__name__}, and must be True or False; its "
            "values are computed from the model"
        )
    if request.log_likelihood:
        groups["log_likelihood"] = _log_likelihood(fit, _needed(model, "log_likelihood=True"), first)
    groups["posterior_predictive"] = _posterior_predictive(fit, model, request.posterior_predictive)
    groups |= _prior(fit, model, request.prior, computed)
    groups["constant_data"] = _data("constant_data", request.constant_data)
    ahead = {
        "predictions": _predictive("predictions", request.predictions, fit, model),
        "predictions_constant_data": _data("predictions_constant_data", request.predictions_constant_data),
    }
    coords, dims = {**fit.coords, **(request.coords or {})}, {**fit.dims, **(request.dims or {})}
    parts = [
        finish({name: group for name, group in several.items() if group}, *named)
        for several, named in [
            (groups, (coords, dims)),
            (ahead, (request.pred_coords, request.pred_dims)),
        ]
    ]
    arrays, names, labels = ({**now, **later} for now, later in zip(*parts, strict=True))
    return _arviz.build(arrays, coords=labels, dims=names, attrs=as_json(attrs))


def _first_finite(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first draw that is finite, or nothing if none is."""
    several = {name: value.flatten(0, 1) for name, value in draws.items()}
    for i in range(len(next(iter(several.values())))):
        draw = {name: value[i] for name, value in several.items()}
        if all(value.isfinite().all() for value in draw.values()):
            return draw
    return {}


def _needed(model: Model | None, what: str) -> Model:
    if model is None:
        raise ValueError(f"{what} needs the model; pass model=")
    return model


def _wanted(model: Model | None, request: Request) -> list[str]:
    """The deterministic sites that are to be computed; a function of the same name takes the place of one."""
    which = request.deterministic
    if not isinstance(which, Collection | bool):
        raise TypeError(
            f"deterministic is {which!r}; pass True for all deterministic sites, False for none, or names"
        )
    if model is None or which is False:
        return []
    known = model.deterministic.sites.keys() - (request.functions or {}).keys()
    if which is True:
        rows = model.deterministic.in_subsampled_plates
        return [name for name in model.deterministic.sites if name in known and name not in rows]
    names = [which] if isinstance(which, str) else list(which)
    for name in names:
        if name in model.deterministic.left_out:
            raise ValueError(
                f"the deterministic site {name!r} has not one value a draw: it depends on sites without "
                "draws, or on the rows that the model happens to show; leave it out of deterministic"
            )
        if name not in model.deterministic.sites:
            raise ValueError(
                f"deterministic names {name!r}, and the model's deterministic sites are "
                f"{list(model.deterministic.sites)}"
            )
    return [name for name in model.deterministic.sites if name in names and name in known]


def _left_out(model: Model, request: Request) -> list[str]:
    """The deterministic sites that can't be computed, or only at a cost that nobody asked for."""
    if request.deterministic is not True:
        return []
    rows = [
        name for name in model.deterministic.in_subsampled_plates if name not in (request.functions or {})
    ]
    if rows:
        warnings.warn(
            f"the deterministic sites {rows} have a value for every row of a subsampled plate at every draw, "
            "and are left out; name them in deterministic to have them, or set deterministic=False",
            stacklevel=4,
        )
    return sorted([*model.deterministic.left_out, *rows])


def _sites(
    draws: Mapping[str, Tensor],
    model: Model | None,
    computed: Collection[str],
    functions: Mapping[str, Function] | None,
) -> Group:
    """Draws of sites, what the model computes from them, and functions of them."""
    group = {n: Variable(v) if model is None else model.variable(n, v) for n, v in draws.items()}
    lead = next(iter(draws.values())).shape[:2]
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    if model is not None:
        group |= _computed(flat, model, [name for name in computed if name not in draws], lead)
    if not functions:
        return group
    if clash := functions.keys() & draws.keys():
        raise ValueError(f"functions {sorted(clash)} have the names of sites; give them others")
    for name, function in functions.items():
        with unseen():
            value = at_draws(partial(_evaluated, name, function), flat, FUNCTION_CHUNK)[name]
        group[name] = Variable(value.unflatten(0, lead))
    return group


def _computed(flat: Mapping[str, Tensor], model: Model, names: Collection[str], lead: torch.Size) -> Group:
    """Deterministic sites at draws. The draws are worth more than they are: a failure doesn't lose them."""
    try:
        values = model.deterministic.at(flat, model.plates, names)
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"the deterministic sites {list(names)} are left out, as the model failed at some draw: "
            f"{str(error).splitlines()[0]}",
            stacklevel=5,
        )
        return {}
    return {name: model.variable(name, value.unflatten(0, lead)) for name, value in values.items()}


def _evaluated(name: str, function: Function, draw: dict[str, Tensor]) -> dict[str, Tensor]:
    value = function(draw)
    if not isinstance(value, Tensor):
        raise TypeError(f"the function {name!r} returned {type(value).__name__}, not a tensor")
    return {name: value}


def _log_likelihood(fit: Fit, model: Model, first: dict[str, Tensor]) -> Group:
    if not fit.shows_all:
        raise ValueError(
            "log_likelihood=True, but the model got batches of its data from the kernel's loader; pass args "
            "and kwargs with all rows"
        )
    likelihood = Likelihood(model.program, first, fit.args, fit.kwargs)
    likelihood.warn_of_factors(stacklevel=5)
    values = likelihood.at({name: value.flatten(0, 1) for name, value in fit.draws.items()})
    lead = next(iter(fit.draws.values())).shape[:2]
    group = {}
    for name, value in values.items():
        data = likelihood.data[name]
        dims = plate_dims(data.frames, tuple(value.shape[1:]))
        sequential = tuple(frame.name for frame in data.frames if not frame.vectorized)
        group[name] = Variable(value.unflatten(0, lead), dims, data.kept, sequential)
    return stacked(group, 2)


def _posterior_predictive(fit: Fit, model: Model | None, wanted: bool | Given | None) -> Group:
    if wanted is not True:
        return _predictive("posterior_predictive", wanted or None, fit, model)
    shown = _needed(model, "posterior_predictive=True")
    flat = {name: value.flatten(0, 1) for name, value in fit.draws.items()}

    def simulate(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return predict(shown.program, draws, fit.args, fit.kwargs, shown.plates, shown.fixed)

    values = at_finite_draws(simulate, flat)
    lead = next(iter(fit.draws.values())).shape[:2]
    return _simulated({name: value.unflatten(0, lead) for name, value in values.items()}, shown)


def _simulated(values: Mapping[str, Tensor], model: Model) -> Group:
    """Simulated data, without the rows that were not observed."""
    group = {}
    for name, value in values.items():
        if name in model.left_out:
            continue
        known = model.observed.get(name)
        group[name] = model.variable(name, value, 2, None if known is None else known.kept)
    return stacked(group, 2)


def _given(what: str, values: Any, otherwise: str = "") -> Given:
    """Values by name that the user gave; ``otherwise`` says what else the argument may be."""
    if values is None or values is False:
        return {}
    if not isinstance(values, Mapping):
        shown = repr(values) if isinstance(values, bool | int | float | str) else f"a {type(values).__name__}"
        raise TypeError(f"{what} is {shown}; pass {otherwise}a dict of arrays by name")
    return values


def _predictive(what: str, values: Given | None, fit: Fit, model: Model | None) -> Group:
    """Draws that were made outside, of shape ``(C * S, ...)`` or ``(C, S, ...)``."""
    values = _given(what, values, "True, or " if what == "posterior_predictive" else "")
    lead = next(iter(fit.draws.values())).shape[:2]
    group = {}
    for name, several in values.items():
        value = torch.as_tensor(several)
        if value.shape[:2] != lead:
            if value.shape[:1] != (lead.numel(),):
                raise ValueError(
                    f"predictive draws of {name!r} have shape {tuple(value.shape)}; there are {lead[0]} "
                    f"chains of {lead[1]} draws, so pass ({lead.numel()}, *shape) or ({lead[0]}, {lead[1]}, "
                    "*shape)"
                )
            value = value.unflatten(0, lead)
        group[name] = _unpadded(name, value, model)
    return stacked(group, 2)


def _unpadded(name: str, value: Tensor, model: Model | None) -> Variable:
    """Draws without the dims of size 1 that Pyro's ``Predictive`` puts in front of a site's own."""
    if model is None:
        return Variable(value)
    ndim = model.ndim(name)
    while ndim is not None and value.dim() - 2 > ndim and value.shape[2] == 1:
        value = value.squeeze(2)
    known = model.observed.get(name)
    kept = None if known is None else known.kept
    if kept is not None and value.shape[2 : 2 + kept.dim()] != kept.shape:
        kept = None
    return model.variable(name, value, 2, kept)


def _prior(
    fit: Fit, model: Model | None, wanted: int | Given | None, computed: Collection[str]
) -> dict[str, Group]:
    if wanted is None:
        return {}
    if isinstance(wanted, int):
        if wanted < 1 or isinstance(wanted, bool):
            raise ValueError(f"prior={wanted!r} is no number of draws; pass one >= 1, or draws by site")
        model = _needed(model, f"prior={wanted}")
        latent = prior_draws(model.program, wanted, fit.args, fit.kwargs, model.plates, model.fixed)
        new = predict(model.program, latent, fit.args, fit.kwargs, model.plates, model.fixed, computed)
        new = {name: value.unsqueeze(0) for name, value in new.items()}
        prior = {name: value.unsqueeze(0) for name, value in latent.items()}
        prior |= {name: new.pop(name) for name in computed if name in new}
        return {
            "prior": {name: model.variable(name, value) for name, value in prior.items()},
            "prior_predictive": _simulated(new, model),
        }
    given = _given("prior", wanted, "a number of draws, or ")
    group = {n: _unpadded(n, torch.as_tensor(v).unsqueeze(0), model) for n, v in given.items()}
    data = set() if model is None else {*model.observed, *model.left_out}
    return {
        "prior": {name: value for name, value in group.items() if name not in data},
        "prior_predictive": stacked({name: value for name, value in group.items() if name in data}, 2),
    }


def _data(what: str, values: Given | None) -> Group:
    return {name: Variable(_tensor(name, value)) for name, value in _given(what, values).items()}


def _tensor(name: str, value: Any) -> Tensor:
    """Constant data as a tensor; words are labels and no data."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"constant data {name!r} hold {array.dtype} values, where numbers are expected: pass words and "
            f"dates as the labels of a dim, coords={{dim: values}}"
        )
    return torch.as_tensor(array)
