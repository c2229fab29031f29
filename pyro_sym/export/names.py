"""Names, dims and types of variables, as ArviZ and netCDF need them; masked entries are dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_sym import _arviz
from pyro_sym.export.joined_windows import Shown
from pyro_sym.export.sites import infer_of
from pyro_sym.model.program import is_deterministic

__all__ = [
    "Dims",
    "Variable",
    "event_dim_of",
    "finish",
    "legal",
    "model_dims",
    "plate_dims",
    "shown",
    "stacked",
]

Dims = Mapping[str, Sequence[str | None]]

SAMPLE_DIMS = ("chain", "draw")


@dataclass(frozen=True)
class Variable:
    """A variable of a group."""

    value: Tensor  # of shape (chain, draw, *shape), or shape if it is data
    dims: Sequence[str | None] | None = None  # names of the dims of shape, as far as the model has them
    kept: Tensor | None = None  # which entries were observed, of the first dims of shape; None for all
    sequential: tuple[str, ...] = ()  # the sequential plates around it


Groups = Mapping[str, Mapping[str, Variable]]


class _Labels:
    """Names, sizes and ``coords`` (labels) of dims, which groups share; ``dims`` replace the model's."""

    def __init__(self, groups: Groups, coords: Mapping[str, Any] | None, dims: Dims | None) -> None:
        self.coords = {legal(name): values for name, values in (coords or {}).items()}
        self._given = {legal(name): several for name, several in (dims or {}).items()}
        self._variables = {legal(name) for group in groups.values() for name in group}
        self._sizes: dict[str, tuple[int, str]] = {}  # of a dim, and the first variable that has it
        if unknown := self._given.keys() - self._variables:
            names = sorted(self._variables)
            raise ValueError(f"dims are given for {sorted(unknown)}, which are none of {names}")

    def dims(self, group: str, name: str, variable: Variable) -> list[str]:
        """Names of the dims of a variable: the user's, or those of plates and event dims, or numbers."""
        shape = tuple(variable.value.shape[_sample_ndim(group) :])
        names = self._given.get(name, variable.dims)
        if names is None:
            names = [None] * len(shape)
        elif group == "log_likelihood":  # it has no event dims
            names = names[: len(shape)]
        if len(names) != len(shape):
            raise ValueError(f"dims names {list(names)} for {name!r}, which has shape {shape}")
        full = [legal(dim) if dim is not None else f"{name}_dim_{i}" for i, dim in enumerate(names)]
        if len(set(full)) < len(full):
            raise ValueError(f"two dims of {name!r} have one name: {full}; pass dims for it")
        for dim, size in zip(full, shape, strict=True):
            self._check(dim, size, name)
        return full

    def _check(self, dim: str, size: int, name: str) -> None:
        """Refuse dims of two sizes, which ArviZ would pad, and those named as a variable, which it loses."""
        first_size, first = self._sizes.setdefault(dim, (size, name))
        if size != first_size:
            sizes = f"size {first_size} in {first!r} and size {size} in {name!r}"
            raise ValueError(f"dim {dim!r} has {sizes}; pass dims with another name for one of them")
        if dim in self._variables or dim in SAMPLE_DIMS:
            raise ValueError(f"dim {dim!r} of {name!r} has the name of a variable or sample dim; pass dims")


def model_dims(site: Any, shape: tuple[int, ...]) -> list[str | None]:
    """The plate on each batch dim, and the event dims that the site's ``infer`` names."""
    event_dim = event_dim_of(site, shape)
    event_names = list(infer_of(site).get("event_dims", [None] * event_dim))
    if len(event_names) != event_dim:
        raise ValueError(f"site {site['name']!r} has {event_dim} event dims, but event_dims={event_names}")
    return plate_dims(site["cond_indep_stack"], shape[: len(shape) - event_dim]) + event_names


def event_dim_of(site: Any, shape: tuple[int, ...]) -> int:
    """Number of event dims of a site whose values have a shape.

    By default ``pyro.deterministic`` counts all dims as event dims, also those of plates around it. Dims of
    plates are found by their sizes, if there is only one way to match them.
    """
    stated: int = min(site["fn"].event_dim, len(shape))
    sizes = {f.dim: (f.size, f.full_size) for f in site["cond_indep_stack"] if f.vectorized}
    if stated < len(shape) or not sizes or not is_deterministic(site):
        return stated

    def fit(event_dim: int, missing: bool) -> bool:
        batch = shape[: len(shape) - event_dim]
        return all(
            batch[dim] in several or (missing and batch[dim] == 1) if -dim <= len(batch) else missing
            for dim, several in sizes.items()
        )

    exact = [event_dim for event_dim in range(len(shape)) if fit(event_dim, missing=False)]
    if len(exact) == 1:
        return exact[0]
    return 0 if not exact and fit(0, missing=True) else stated


def shown(site: Any) -> Shown:
    """The value of a site, with its plates and its number of event dims."""
    value = torch.as_tensor(site["value"])
    return Shown(value, tuple(site["cond_indep_stack"]), event_dim_of(site, tuple(value.shape)))


def plate_dims(frames: Iterable[Any], batch_shape: tuple[int, ...]) -> list[str | None]:
    """The plate on each batch dim, if the dim has the size of the plate or of its subsample."""
    ndim = len(batch_shape)
    inside = [f for f in frames if f.vectorized and -f.dim <= ndim]
    names = {f.dim: f.name for f in inside if batch_shape[f.dim] in (f.size, f.full_size)}
    return [names.get(axis) for axis in range(-ndim, 0)]


def stacked(variables: Mapping[str, Variable], sample_ndim: int) -> dict[str, Variable]:
    """The steps ``y_0``, ``y_1``, … of a sequential plate as one variable ``y``, along a dim of the plate."""
    steps: dict[tuple[str, tuple[str, ...]], dict[int, str]] = {}
    for name, variable in variables.items():
        if variable.sequential and (parts := re.fullmatch(r"(.*?)_?(\d+)(\D*)", name)):
            steps.setdefault((parts[1] + parts[3], variable.sequential), {})[int(parts[2])] = name
    result = dict(variables)
    for (stem, plates), by_number in steps.items():
        several = [variables[by_number[number]] for number in sorted(by_number)]
        if not stem or stem in result or len({v.value.shape for v in several}) > 1:
            continue
        for name in by_number.values():
            del result[name]
        dims, kept = several[0].dims, None
        if masks := [v.kept for v in several if v.kept is not None]:
            kept = torch.stack([torch.ones_like(masks[0]) if v.kept is None else v.kept for v in several])
        value = torch.stack([v.value for v in several], sample_ndim)
        result[stem] = Variable(value, None if dims is None else ["_".join(plates), *dims], kept)
    return result


Finished = tuple[dict[str, dict[str, np.ndarray]], dict[str, dict[str, list[str]]], dict[str, dict[str, Any]]]


def finish(groups: Groups, coords: Mapping[str, Any] | None, dims: Dims | None) -> Finished:
    """Arrays, names of dims and labels by group that is not empty, without masked entries.

    Refuses names and shapes that ArviZ would accept, and lose or pad.
    """
    shared = _Labels(groups, coords, dims)
    arrays, names, labels = {}, {}, {}
    for group, variables in groups.items():
        if not variables:
            continue
        kept = _without_masked(_legal_names(group, variables))
        names[group] = {name: shared.dims(group, name, variable) for name, variable in kept.items()}
        rows = _ObservedRows(kept, names[group], shared.coords)
        values = {name: rows.keep(name, variable, _sample_ndim(group)) for name, variable in kept.items()}
        arrays[group] = {name: _to_numpy(group, name, value) for name, value in values.items()}
        labels[group] = rows.coords
    return arrays, names, labels


class _ObservedRows:
    """The rows of the dims of a group, without those that are masked."""

    def __init__(
        self, variables: Mapping[str, Variable], dims: dict[str, list[str]], coords: Mapping[str, Any]
    ) -> None:
        self.dims, self.all_coords, self.coords = dims, coords, dict(coords)
        self.chosen = {name: _whole_rows(v.kept) for name, v in variables.items() if v.kept is not None}
        # Rows kept by dim, ``None`` for all. If variables differ, all but one get a dim of their own name.
        self.rows: dict[str, list[int] | None] = {}
        for name, variable in variables.items():
            chosen = self.chosen.get(name, [])
            flat = 0 if variable.kept is None or chosen else variable.kept.dim()
            for axis, dim in enumerate(dims[name][flat:]):
                if axis >= len(chosen) or chosen[axis] is None:
                    self.rows[dim] = None

    def keep(self, name: str, variable: Variable, sample_ndim: int) -> Tensor:
        """Drop masked rows or, if the masked entries are not whole rows, flatten and drop the entries."""
        value, kept = variable.value, variable.kept
        if kept is None:
            return value
        if not self.chosen[name]:
            flat = kept.flatten().nonzero().flatten()
            self.coords[f"{name}_observed"] = flat.tolist()
            self.dims[name] = [f"{name}_observed", *self.dims[name][kept.dim() :]]
            entries = value.flatten(sample_ndim, sample_ndim + kept.dim() - 1)
            return entries.index_select(sample_ndim, flat.to(value.device))
        for axis, rows in enumerate(self.chosen[name]):
            if rows is not None:
                self._relabel(name, axis, rows.tolist(), kept.shape[axis])
                value = value.index_select(sample_ndim + axis, rows.to(value.device))
        return value

    def _relabel(self, name: str, axis: int, rows: list[int], size: int) -> None:
        dim = self.dims[name][axis]
        labels = list(self.all_coords.get(dim, range(size)))
        if self.rows.setdefault(dim, rows) != rows:
            self.dims[name][axis] = dim = f"{name}_{dim}"
        self.coords[dim] = [labels[row] for row in rows]


def _whole_rows(kept: Tensor) -> list[Tensor | None]:
    """The rows kept along each dim, ``None`` for all; an empty list if no set of whole rows is kept."""
    some = [kept.movedim(axis, 0).reshape(kept.shape[axis], -1).any(-1) for axis in range(kept.dim())]
    rows = [along.nonzero().flatten() for along in some]
    if not kept[torch.meshgrid(*rows, indexing="ij")].all():
        return []
    return [None if along.all() else row for along, row in zip(some, rows, strict=True)]


def _sample_ndim(group: str) -> int:
    return 2 if _arviz.has_sample_dims(group) else 0


def _without_masked(variables: Mapping[str, Variable]) -> dict[str, Variable]:
    """Leave out variables whose entries are all masked, and masks that mask nothing."""
    return {
        name: replace(variable, kept=None) if variable.kept is not None and variable.kept.all() else variable
        for name, variable in variables.items()
        if variable.kept is None or variable.kept.any()
    }


def _legal_names(group: str, variables: Mapping[str, Variable]) -> dict[str, Variable]:
    renamed: dict[str, Variable] = {}
    for name, variable in variables.items():
        if name in SAMPLE_DIMS and _arviz.has_sample_dims(group):  # it would become a coordinate
            raise ValueError(f"a variable of {group} has the name of the sample dim {name!r}; rename it")
        if legal(name) in renamed:
            raise ValueError(f"two variables of {group} are called {legal(name)!r}; rename one site")
        renamed[legal(name)] = variable
    return renamed


def legal(name: str) -> str:
    """The name with dots for slashes, which netCDF reads as groups."""
    return name.replace("/", ".")


def _to_numpy(group: str, name: str, value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    if value.is_complex() and _arviz.has_sample_dims(group):  # az.summary would fail
        raise TypeError(
            f"{name!r} of {group} is complex, which ArviZ can't summarise; export torch.view_as_real of it"
        )
    if value.dtype == torch.bfloat16:  # which numpy doesn't have
        value = value.float()
    if value.dtype == torch.bool and group.startswith(("posterior", "prior")):  # az.summary subtracts
        value = value.to(torch.int8)
    return value.numpy()
