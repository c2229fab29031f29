"""The contract of a group, law by law."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.search.check import check_symmetry
from pyro_sym.symmetry.base import Element, FiniteGroup, Group, distance, leaves, length, map_element
from pyro_sym.testing.laws import FAILURE_RATE, compare, require, try_laws

__all__ = ["check_symmetry_contract"]

#: Groups up to this size are listed; products of generators are taken up to a smaller one.
MAX_LISTED, MAX_GENERATED = 5_040, 400
MAX_JACOBIAN = 500
MARKED_AT_ONCE = 256
ELSEWHERE = "_a_site_that_the_symmetry_does_not_name"


def check_symmetry_contract(
    symmetry: Group,
    values: Mapping[str, Tensor],
    *,
    num_elements: int = 20,
    model: Callable[..., Any] | None = None,
    model_args: tuple[Any, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> None:
    r"""Check that a group keeps the contract of :class:`~pyro_sym.Group` or :class:`~pyro_sym.FiniteGroup`.

    With elements :math:`g, h, k` from :meth:`~pyro_sym.Group.sample` and values :math:`v`, that

    .. math::

        e \cdot v = v, \qquad g^{-1} \cdot (g \cdot v) = v = g \cdot (g^{-1} \cdot v), \qquad
        (g h) \cdot v = g \cdot (h \cdot v), \qquad ((g h) k) \cdot v = (g (h k)) \cdot v;

    that a batch of elements acts on a batch of values as each does alone; that dtypes, devices, inputs and
    the sites it does not name stay as they are; that every site it names is moved, along the axes it names
    and no others, without a change of volume (where at most 500 values are moved); that an absent site is a
    :class:`~pyro_sym.SymmetryError`. Of up to 5,040 elements, that ``elements`` lists each once, the identity
    first, and every one of ``exp(log_order)`` maps equally often, that ``sample`` is uniform on them, and (up
    to 400) that the generators generate them. Larger groups and continuous ones are checked for uniform
    samples in part: each entry of an element has to have the same law before and after a generator is
    applied. Where the group has a ``closest``, that it undoes :math:`g` on :math:`g \cdot v`, and that no
    sampled element brings noisy draws closer, under random variances.

    Args:
        symmetry: the group.
        values: a tensor a site, of the site's own shape, without batch dims. Their entries should differ, as
            random ones do.
        num_elements: how many elements are tried at once.
        model: a model that should have the symmetry; :func:`~pyro_sym.check_symmetry` is run on it.
        model_args: its positional arguments.
        model_kwargs: its keyword arguments.
        seed: of the random elements.

    Raises:
        AssertionError: if a law is broken; the message says which, at which site, and by how much.

    Example:
        >>> from pyro_sym import testing
        >>> values = {"locs": torch.randn(3, 2), "weights": torch.rand(3)}
        >>> testing.check_symmetry_contract(Permutation({"locs": -2, "weights": -1}), values)

        >>> class Mistaken(Permutation):
        ...     def inverse(self, element):
        ...         return element
        >>> testing.check_symmetry_contract(Mistaken({"locs": -2, "weights": -1}), values)
        Traceback (most recent call last):
        ...
        AssertionError: Mistaken({'locs': -2, 'weights': -1}): inverse(g) does not undo g: 'locs' is off ...
    """
    laws = [
        _names_what_it_moves,
        _keeps_kinds,
        _moves_the_axes_it_names,
        _acts_as_a_group,
        _acts_alike_in_batches,
        _preserves_volume,
        _lists_its_elements,
        _samples_uniformly,
        _is_generated,
        _finds_the_closest,
    ]
    case = _Case(symmetry, dict(values), num_elements)
    try_laws(repr(symmetry), laws, seed, case)
    if model is not None:
        try:
            check_symmetry(model, symmetry, *model_args, **(model_kwargs or {}))
        except SymmetryError as error:
            raise AssertionError(str(error)) from error


@dataclass
class _Case:
    """A symmetry, native values, and how many elements to try."""

    symmetry: Group
    values: dict[str, Tensor]
    count: int

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """The values with one batch dim in front."""
        return {name: value.unsqueeze(0) for name, value in self.values.items()}

    @cached_property
    def order(self) -> int | None:
        """The number of different maps, if the group is small enough to be listed."""
        log_order = self.symmetry.log_order(self.values)
        return round(math.exp(log_order)) if log_order < math.log(MAX_LISTED) + 1e-9 else None

    @cached_property
    def listed(self) -> Tensor | None:
        """The elements of such a group as rows of numbers; some of them may act alike."""
        return None if self.order is None else _matrix(self.finite.elements(self.values))

    @property
    def finite(self) -> FiniteGroup:
        """The group, where it has elements to list."""
        assert isinstance(self.symmetry, FiniteGroup)
        return self.symmetry

    def sample(self) -> Element:
        return self.symmetry.sample(self.values, (self.count,))

    def own(self, values: Mapping[str, Tensor], index: Any = ...) -> dict[str, Tensor]:
        """The values of the symmetry's own sites: images of one value don't broadcast the others."""
        return {name: values[name][index] for name in self.symmetry.axes}

    def law(self, what: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
        compare(f"{self.symmetry!r}: {what}", left, right)

    def require(self, holds: bool | Tensor, what: str) -> None:
        require(holds, f"{self.symmetry!r}: {what}")


def _names_what_it_moves(case: _Case) -> None:
    """Sites and axes, and what an absent site gets."""
    symmetry, values = case.symmetry, case.values
    for site, several in symmetry.axes.items():
        case.require(site in values, f"no values are given for site {site!r}, which it moves")
        ndim = values[site].dim()
        fits = type(several) is tuple and all(type(axis) is int and -ndim <= axis < 0 for axis in several)
        case.require(
            fits,
            f"axes of site {site!r} are {several!r}; they have to be a tuple of negative ints in the range "
            f"of the value's shape {tuple(values[site].shape)}",
        )
        without = {name: value for name, value in values.items() if name != site}
        try:
            symmetry.act(symmetry.identity(values), without)
        except SymmetryError:
            continue
        except Exception as error:
            raise AssertionError(
                f"{symmetry!r}: act() without site {site!r} raises {type(error).__name__}, and "
                "check_values() should have raised a SymmetryError"
            ) from error
        case.require(False, f"act() accepts values without site {site!r}; check_values() should refuse them")


def _keeps_kinds(case: _Case) -> None:
    """shapes, dtypes and devices; inputs and other sites stay as they are."""
    for dtype in (torch.float32, torch.float64):
        values = {n: v.to(dtype) if v.is_floating_point() else v for n, v in case.values.items()}
        values[ELSEWHERE] = torch.ones(2, dtype=dtype)
        before = {name: value.clone() for name, value in values.items()}
        images = case.symmetry.act(case.symmetry.sample(values), values)
        case.law("act() changes its input", values, before)
        case.law("a site that it does not name is changed", images, {ELSEWHERE: before[ELSEWHERE]})
        case.require(images.keys() == values.keys(), f"act() gives sites {list(images)}, not {list(values)}")
        for site, value in values.items():
            kind = [(v.shape, v.dtype, v.device) for v in (images[site], value)]
            case.require(
                kind[0] == kind[1],
                "act() of an element without batch dims turns shape, dtype and device of site "
                f"{site!r} from {kind[1]} into {kind[0]}",
            )


def _acts_as_a_group(case: _Case) -> None:
    """identity, inverse, composition, associativity."""
    symmetry, rows = case.symmetry, case.rows
    act, compose, inverse = symmetry.act, symmetry.compose, symmetry.inverse
    g, h, k = case.sample(), case.sample(), case.sample()
    neutral = symmetry.identity(case.values, (case.count,))
    everywhere = {n: row.expand(case.count, *row.shape[1:]) for n, row in rows.items() if n in symmetry.axes}
    case.law("the identity moves something", act(symmetry.identity(case.values), case.values), case.values)
    case.law("the identity moves something in a batch", act(neutral, rows), everywhere)
    case.law("inverse(g) does not undo g", act(inverse(g), act(g, rows)), everywhere)
    case.law("g does not undo inverse(g)", act(g, act(inverse(g), rows)), everywhere)
    case.law("compose(g, h) does not act as g after h", act(compose(g, h), rows), act(g, act(h, rows)))
    left, right = compose(compose(g, h), k), compose(g, compose(h, k))
    case.law("compose() is not associative", act(left, rows), act(right, rows))


def _acts_alike_in_batches(case: _Case) -> None:
    """Batches of elements and of values."""
    symmetry, rows = case.symmetry, case.rows
    g = case.sample()
    points = symmetry.act(case.sample(), rows)  # other values, a batch of them
    points = {name: value.expand(case.count, *value.shape[1:]) for name, value in points.items()}
    spread, together = symmetry.act(g, rows), symmetry.act(g, points)
    first = _at(0, g)
    alike = symmetry.act(first, points)
    for i in range(min(3, case.count)):
        own, point = _at(i, g), {name: value[i] for name, value in points.items()}
        batched = {name: value[i] for name, value in together.items()}
        case.law("a batch of elements acts otherwise than each", batched, symmetry.act(own, point))
        single = case.own(symmetry.act(own, case.values))
        case.law("elements do not broadcast with values", case.own(spread, i), single)
        shared = {name: value[i] for name, value in alike.items()}
        what = "an element without batch dims acts otherwise on batched values"
        case.law(what, shared, symmetry.act(first, point))
    pairs = symmetry.sample(points, (2, 3))
    twice = symmetry.act(pairs, {name: row.unsqueeze(0) for name, row in rows.items()})
    single = case.own(symmetry.act(_at((1, 2), pairs), case.values))
    case.law("two batch dims act otherwise than one", case.own(twice, (1, 2)), single)


def _moves_the_axes_it_names(case: _Case) -> None:
    """Every site it names, along the axes it names only."""
    symmetry, values = case.symmetry, case.values
    images = symmetry.act(case.sample(), case.rows)
    for site, several in symmetry.axes.items():
        if case.order != 1:
            case.require(
                not torch.equal(images[site], case.rows[site].expand_as(images[site])),
                f"site {site!r} is moved by none of {case.count} elements: does _act() forget it, or are the "
                "values given for it all alike?",
            )
        g = symmetry.sample(values)
        for axis in set(range(-values[site].dim(), 0)) - set(several):
            other = values[site].clone()
            other.select(axis, 0).add_(1)
            change = symmetry.act(g, {**values, site: other})[site] - symmetry.act(g, values)[site]
            size = change.shape[axis]
            spilt = float(change.narrow(axis, 1, size - 1).abs().sum()) if size > 1 else 0.0
            case.require(
                spilt == 0,
                f"site {site!r} is moved along axis {axis} as well, which axes {several} does not name",
            )


def _preserves_volume(case: _Case) -> None:
    """The determinant of the action."""
    symmetry = case.symmetry
    moved = {n: case.values[n].double() for n in symmetry.axes if case.values[n].is_floating_point()}
    if not 0 < sum(value.numel() for value in moved.values()) <= MAX_JACOBIAN:
        return
    rest = {name: value for name, value in case.values.items() if name not in moved}
    sizes = [value.numel() for value in moved.values()]
    g = symmetry.sample(case.values)

    def image(flat: Tensor) -> Tensor:
        parts = {n: p.reshape(moved[n].shape) for n, p in zip(moved, flat.split(sizes), strict=True)}
        acted = symmetry.act(g, {**rest, **parts})
        return torch.cat([acted[name].flatten() for name in moved])

    point = torch.cat([value.flatten() for value in moved.values()])
    jacobian = torch.autograd.functional.jacobian(image, point)  # type: ignore[no-untyped-call]
    log_volume = float(torch.linalg.slogdet(jacobian).logabsdet)
    case.require(
        abs(log_volume) < 1e-6,
        f"an element changes volume by the factor exp({log_volume:.4g}) at the values given; densities of "
        "images would need a Jacobian, which averages do not have",
    )


def _lists_its_elements(case: _Case) -> None:
    """elements() and log_order()."""
    listed = case.listed
    if listed is None or case.order is None:
        return
    case.require(
        len(listed) > 0 and len(listed) % case.order == 0,
        f"elements() lists {len(listed)}, and log_order() is the logarithm of {case.order}",
    )
    different = len(listed.unique(dim=0))
    case.require(different == len(listed), f"elements() has only {different} different ones in {len(listed)}")
    maps = _marks(case).unique(return_counts=True)[1]
    case.require(
        len(maps) == case.order,
        f"elements() acts in {len(maps)} different ways, and log_order() is the logarithm of {case.order}",
    )
    case.require(
        maps.min() == maps.max(),
        f"elements() lists one map {int(maps.min())} times and another {int(maps.max())} times",
    )
    neutral = _matrix(case.symmetry.identity(case.values, (1,)))
    case.require(torch.equal(listed[:1], neutral), "elements() does not have the identity first")


def _samples_uniformly(case: _Case) -> None:
    """The law of sample()."""
    from scipy.special import chdtrc  # the chi-squared law's upper tail

    symmetry, values = case.symmetry, case.values
    listed = case.listed
    if listed is not None:
        total = len(listed)
        drawn = _matrix(symmetry.sample(values, (max(2_000, 20 * total),)))
        known, places, counts = torch.cat([listed, drawn]).unique(
            dim=0, return_inverse=True, return_counts=True
        )
        strangers = len(known) - total
        case.require(strangers == 0, f"sample() draws {strangers} elements that elements() does not list")
        if total == 1:
            return
        counts, expected = counts - 1, len(drawn) / total
        chance = chdtrc(total - 1, float(((counts - expected) ** 2 / expected).sum()))
        rarest, most = (int(count) for count in counts.aminmax())
        case.require(
            chance > FAILURE_RATE,
            f"sample() is not uniform: in {len(drawn)} draws an element should come {expected:.0f} times, "
            f"and one came {rarest} times and another {most} times (p = {chance:.1g})",
        )
        return
    generators = symmetry.generators(values)
    for name, element in generators[:: -(-len(generators) // 4) or 1]:
        before, after = (symmetry.sample(values, (2_000,)) for _ in range(2))
        repeated = map_element(lambda part: part.expand(2_000, *part.shape), element)
        columns = zip(
            _matrix(before).unbind(1), _matrix(symmetry.compose(repeated, after)).unbind(1), strict=True
        )
        for entry, pair in enumerate(columns):
            if symmetry.is_finite:
                kinds, places = torch.cat(pair).unique(return_inverse=True)
            else:  # ten equally likely intervals of a continuous entry
                kinds = torch.cat(pair).quantile(torch.linspace(0.1, 0.9, 9, dtype=torch.float64)).unique()
                places = torch.bucketize(torch.cat(pair), kinds)
                kinds = torch.arange(len(kinds) + 1)
            both = torch.stack([part.bincount(minlength=len(kinds)) for part in places.split(2_000)])
            first, second = both.double()
            terms = ((first - second) ** 2 / (first + second)).nan_to_num()
            chance = chdtrc(max(1, len(kinds) - 1), float(terms.sum()))
            case.require(
                chance > FAILURE_RATE / (4 * _matrix(before).shape[1]),
                f"sample() is not uniform: entry {entry} of its elements has another law after {name} "
                f"(p = {chance:.1g})",
            )


def _finds_the_closest(case: _Case) -> None:
    """closest() and margin()."""
    group = case.symmetry
    if not group.axes or not all(case.values[site].is_floating_point() for site in group.axes):
        return
    mean = {site: case.values[site].double() for site in group.axes}
    moved = group.act(case.sample(), {site: value.unsqueeze(0) for site, value in mean.items()})  # (M, ...)
    noisy = {site: value + 0.3 * torch.randn_like(value) for site, value in moved.items()}
    variance = group.pool_variance({site: 0.5 + torch.rand_like(value) for site, value in mean.items()})
    try:
        undone = group.act(group.closest(moved, mean, variance), moved)
    except SymmetryError:
        return  # it can't be aligned
    everywhere = {site: value.expand_as(moved[site]) for site, value in mean.items()}
    case.law("closest() does not undo g on g · v", undone, everywhere)
    others = {site: value.unsqueeze(0) for site, value in noisy.items()}
    others = group.act(group.sample(case.values, (100, case.count)), others)  # (100, M, ...)
    images = group.act(group.closest(noisy, mean, variance), noisy)
    found, best = distance(images, mean, variance), distance(others, mean, variance, 2).amin(0)
    excess = float((found - best).max())
    case.require(
        excess <= 1e-8 * (1 + float(best.max())),
        f"closest() leaves draws where a sampled element brings them closer, by up to {excess:.4g}",
    )
    margin = group.margin(images, mean, variance)
    case.require(
        margin.shape == found.shape and (margin >= -1e-8).all(),
        f"margin() has to give a number >= 0 for each draw, of shape {tuple(found.shape)}; it gives shape "
        f"{tuple(margin.shape)} and a least value of {float(margin.min()):.4g}",
    )
    first, *rest = mean
    if rest:
        ignoring = {**variance, first: torch.full_like(mean[first], math.inf)}
        elsewhere = {**noisy, first: torch.randn_like(noisy[first])}
        one, two = (group.act(group.closest(d, mean, ignoring), d) for d in (noisy, elsewhere))
        what = f"closest() depends on site {first!r} where its variance is infinite"
        case.law(what, {site: two[site] for site in rest}, {site: one[site] for site in rest})


def _is_generated(case: _Case) -> None:
    """The generators."""
    symmetry, values = case.symmetry, case.values
    total = 0 if case.listed is None else len(case.listed)
    if not 0 < total <= MAX_GENERATED:
        return

    def key(element: Element) -> tuple[float, ...]:
        return tuple(_matrix(map_element(lambda part: part.unsqueeze(0), element))[0].tolist())

    neutral = symmetry.identity(values)
    seen, frontier = {key(neutral)}, [neutral]
    while frontier:
        products = [
            symmetry.compose(g, element) for element in frontier for _, g in symmetry.generators(values)
        ]
        new = {key(product): product for product in products}
        frontier = [product for name, product in new.items() if name not in seen]
        seen.update(new)
        case.require(
            len(seen) <= total,
            f"generators() generate more than the {total} elements of elements(): one element has "
            "to have one value, so that compose() has to reduce what it returns",
        )
    case.require(len(seen) == total, f"generators() generate {len(seen)} of {total} elements")


def _marks(case: _Case) -> Tensor:
    """A number for every listed element, the same for those that act alike on the values."""
    symmetry, elements = case.finite, case.finite.elements(case.values)
    total = length(elements)
    weights = {site: torch.rand(case.values[site].shape, dtype=torch.float64) for site in symmetry.axes}
    marks = torch.zeros(total, dtype=torch.float64)
    for start in range(0, total, MARKED_AT_ONCE):
        rows = slice(start, start + MARKED_AT_ONCE)
        images = symmetry.act(_at(rows, elements), case.rows)
        for site, weight in weights.items():
            weighted = images[site].double() * weight
            marks[rows] += weighted.reshape(len(weighted), -1).sum(1)
    return (marks / (1e-8 * (1 + marks.abs().max()))).round()


def _at(index: Any, element: Element) -> Element:
    return map_element(lambda part: part[index], element)


def _matrix(elements: Element) -> Tensor:
    """Elements of one batch dim as rows of numbers."""
    parts = [part.flatten(1).double() for part in leaves(elements)]
    return torch.cat(parts, 1) if parts else torch.zeros(1, 1, dtype=torch.float64)
