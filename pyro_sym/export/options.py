"""What can be asked for in an export: the options that ``from_pyro`` and ``from_pyro_svi`` share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict, cast

from torch import Tensor

from pyro_sym.export.names import Dims
from pyro_sym.symmetry.base import Group

__all__ = ["DEFAULTS", "Function", "Given", "Options", "checked"]

Function = Callable[[dict[str, Tensor]], Tensor]
Given = Mapping[str, Any]


class Options(TypedDict, total=False):
    """What to export beside the draws, and how to name it.

    Attributes:
        symmetry: what to align modulo. By default nothing is aligned, except the draws of a guide that has a
            symmetry of its own, which is then the default.
        deterministic: which deterministic sites to export: ``True`` for all except those in subsampled
            plates, ``False`` for none, or names. A function of the same name replaces a site.
        log_likelihood: whether to compute the log likelihood of every datum; for a guide ``log_p`` and
            ``log_q`` as well.
        posterior_predictive: ``True`` to simulate the observed sites at every draw, or draws by name, of
            shape ``(num_chains * num_samples, *shape)`` as from Pyro's ``Predictive`` (whose padding is
            removed), or ``(num_chains, num_samples, *shape)``. ``az.plot_ppc_dist`` needs ``var_names`` if
            there are others than observed sites.
        predictions: draws at other inputs, of the same shapes.
        prior: a number of draws to take from the model, or draws by site, of shape ``(num_draws, *shape)``;
            those of observed sites go to ``prior_predictive``.
        constant_data: arrays by name.
        predictions_constant_data: arrays by name, that go with the predictions.
        functions: by name, a function of one draw: it takes constrained values by site and returns a tensor.
        coords: labels by dim.
        dims: names of dims by site, one for each dim (``None`` for the default name); they replace those from
            the model.
        pred_coords: labels by dim, for the predictions and their constant data.
        pred_dims: names of dims by variable, for the same.
    """

    symmetry: Group | None
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


DEFAULTS: Options = {"deterministic": True, "log_likelihood": False}  # of all others it is None


def checked(options: Options, function: str) -> Options:
    """All options, checked, with defaults for those not given to the function of that name."""
    known = Options.__annotations__
    if unknown := options.keys() - known.keys():
        raise TypeError(
            f"{function}() got an unexpected keyword argument {min(unknown)!r}; its options are {list(known)}"
        )
    asked = cast(Options, {**dict.fromkeys(known), **DEFAULTS, **options})
    if not isinstance(asked["deterministic"], Collection | bool):
        raise TypeError(f"deterministic is {asked['deterministic']!r}; pass True for all, False, or names")
    if not isinstance(asked["log_likelihood"], bool):  # it would compute its own in place of given values
        raise TypeError(
            f"log_likelihood is a {type(asked['log_likelihood']).__name__}; pass True or False, as the model "
            "computes its values"
        )
    prior = asked["prior"]
    if isinstance(prior, int) and (prior < 1 or isinstance(prior, bool)):
        raise ValueError(f"prior={prior!r} is no number of draws; pass one >= 1, or draws by site")
    _check_given("posterior_predictive", asked["posterior_predictive"], bool, "True, or ")
    _check_given("prior", prior, int, "a number of draws, or ")
    for name in ("predictions", "constant_data", "predictions_constant_data"):
        _check_given(name, cast(Mapping[str, Any], asked)[name])
    return asked


def _check_given(name: str, value: Any, other: type = Mapping, otherwise: str = "") -> None:
    """Refuse values that are neither arrays by name nor of the other type, which ``otherwise`` names."""
    if value is None or value is False or isinstance(value, Mapping | other):
        return
    shown = repr(value) if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
    raise TypeError(f"{name} is {shown}; pass {otherwise}a dict of arrays by name")
