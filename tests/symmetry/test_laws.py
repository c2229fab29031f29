"""Group laws of every symmetry, over random groups, shapes and batches.

Covers also `symmetry.base`, `symmetry.elementary`, `symmetry.product` and `symmetry.viewed`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyro_sym import Permutation, Product, SignFlip, Symmetry, SymmetryError, Viewed
from pyro_sym.symmetry.base import length, map_element

Case = tuple[Symmetry, dict[str, Tensor], tuple[int, ...]]


@st.composite
def tables(draw: Any, prefix: str, size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A random axis table for one group of a given size, with values of native shapes that fit it."""
    axes: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(draw(st.integers(1, 3))):
        ndim = draw(st.integers(1, 3))
        moved = draw(st.sets(st.integers(-ndim, -1), min_size=1, max_size=min(2, ndim)))
        shape = [draw(st.integers(1, 3)) for _ in range(ndim)]
        for axis in moved:
            shape[axis] = size
        axes[f"{prefix}{k}"] = tuple(sorted(moved)) if len(moved) > 1 else next(iter(moved))
        shapes[f"{prefix}{k}"] = tuple(shape)
    return axes, {name: torch.empty(shape) for name, shape in shapes.items()}


@st.composite
def cases(draw: Any) -> Case:
    """A symmetry, values with batch dims in front, and the batch shape of the elements."""
    kind = draw(st.sampled_from(["permutation", "sign", "signed permutation", "layers", "signs", "viewed"]))
    size = draw(st.integers(1, 5))
    symmetry: Symmetry
    if kind == "layers":  # neighbouring layers of an MLP: the middle weight carries both groups
        other = draw(st.integers(1, 4))
        symmetry = Product(
            Permutation({"w1": -1, "w2": -2}),
            SignFlip({"w1": -1, "w2": -2}),
            Permutation({"w2": -1, "b2": -1}),
        )
        native = {"w1": torch.empty(2, size), "w2": torch.empty(size, other), "b2": torch.empty(other)}
    elif kind == "signs":  # signs of neighbouring layers without biases: some of them cancel
        symmetry = Product(SignFlip({"w1": -1, "w2": -2}), SignFlip({"w1": -2}), SignFlip({"w2": -1}))
        native = {"w1": torch.empty(2, size), "w2": torch.empty(size, 3)}
    elif kind == "viewed":  # channels of a flattened image, and heads of a packed projection
        heads = draw(st.integers(1, 3))
        symmetry = Viewed(
            Product(
                Permutation({"conv": -1, "linear": -2}),
                Permutation({"projection": (-3,), "out": -2}),
                Permutation({"projection": -2, "out": -1}),
            ),
            {"linear": (2, (size, 3)), "projection": ((3, heads, size), 2), "out": ((heads, size),)},
        )
        native = {"conv": torch.empty(2, size), "linear": torch.empty(2, 3 * size)}
        native |= {"projection": torch.empty(3 * heads * size, 2), "out": torch.empty(heads * size)}
    else:
        axes, native = draw(tables("x", size))
        if kind == "permutation":
            symmetry = Permutation(axes)
        elif kind == "sign":
            symmetry = SignFlip(axes)
        else:
            symmetry = Product(SignFlip(axes), Permutation(axes))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    values = {name: torch.randn(*batch, *shell.shape) for name, shell in native.items()}
    values["elsewhere"] = torch.randn(*batch, 2)
    element_batch = batch if draw(st.booleans()) else ()
    return symmetry, values, element_batch


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_group_laws(case: Case) -> None:
    symmetry, values, batch = case
    g, h, k = (symmetry.sample(values, batch) for _ in range(3))
    assert same(symmetry.act(symmetry.identity(values, batch), values), values)
    assert same(symmetry.act(symmetry.compose(g, h), values), symmetry.act(g, symmetry.act(h, values))), (
        symmetry
    )
    assert same(symmetry.act(symmetry.inverse(g), symmetry.act(g, values)), values)
    assert same(symmetry.act(g, symmetry.act(symmetry.inverse(g), values)), values)
    left = symmetry.compose(symmetry.compose(g, h), k)
    right = symmetry.compose(g, symmetry.compose(h, k))
    assert same(symmetry.act(left, values), symmetry.act(right, values))
    image = symmetry.act(g, values)
    for name in values:
        assert torch.allclose(image[name].square().sum(), values[name].square().sum(), rtol=1e-5)
    assert torch.equal(image["elsewhere"], values["elsewhere"])


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_batch_of_elements_acts_as_each_element_alone(case: Case) -> None:
    symmetry, values, batch = case
    elements = symmetry.sample(values, batch)
    together = symmetry.act(elements, values)
    for index in itertools.product(*map(range, batch)):
        alone = symmetry.act(
            map_element(lambda part, i=index: part[i], elements), {n: v[index] for n, v in values.items()}
        )
        assert same(alone, {n: v[index] for n, v in together.items()})


@given(cases())
@settings(max_examples=60, deadline=None)
def test_elements_are_the_whole_group_once(case: Case) -> None:
    symmetry, values, _ = case
    native = {name: torch.randn(3, *value.shape)[0] for name, value in values.items()}
    if symmetry.log_order(native) > math.log(1_000):
        return
    elements = symmetry.elements(native)
    rows = symmetry.act(elements, {name: value.unsqueeze(0) for name, value in native.items()})
    count = length(elements)
    flat = torch.cat([rows[name].expand(count, *v.shape).flatten(1) for name, v in native.items()], 1)
    maps, times = torch.unique(flat, dim=0, return_counts=True)
    assert math.log(len(maps)) == pytest.approx(symmetry.log_order(native), abs=1e-9), "log |G| of what acts"
    assert len(set(times.tolist())) == 1, "one map is listed more often than another"
    assert torch.equal(flat[0], torch.cat([native[name].flatten() for name in native])), "identity first"


@pytest.mark.parametrize(
    ("symmetry", "shapes", "order"),
    [
        (SignFlip({"w": (-2, -1)}), {"w": (5, 5)}, 16),  # the case of the issue: log 16, not 5 log 2
        (SignFlip({"w": (-3, -2, -1)}), {"w": (2, 2, 2)}, 4),
        (SignFlip({"w": (-2, -1), "b": -1}), {"w": (3, 3), "b": (3,)}, 8),
        (SignFlip({"w": (-2, -1), "b": -1}), {"w": (3, 3), "b": (3, 0, 3)}, 4),  # b has no entries
        (SignFlip({"w": (-2, -1)}), {"w": (1, 1)}, 1),
        (SignFlip({"w": -1}), {"w": (0, 3)}, 1),
        (Permutation({"w": -1}), {"w": (0, 3)}, 1),
        (Product(SignFlip({"w": -2}), SignFlip({"w": -1})), {"w": (3, 2)}, 16),
        (Product(SignFlip({"w": -2, "v": -1}), SignFlip({"w": -1})), {"w": (3, 2), "v": (3,)}, 32),
        (Product(*[SignFlip({"v": -k, "w": -k}) for k in (1, 2, 3)]), {"v": (2, 2, 2), "w": (2, 2, 2)}, 16),
        (Product(Permutation({"w": (-2, -1)}), SignFlip({"w": (-2, -1)})), {"w": (3, 3)}, 24),
        (Viewed(SignFlip({"w": (-2, -1)}), {"w": ((3, 3),)}), {"w": (9,)}, 4),
        (
            Product(Viewed(SignFlip({"w": -1}), {"w": (2, (2, 3))}), SignFlip({"w": -2})),
            {"w": (2, 6)},
            16,
        ),
    ],
)
def test_orders_are_of_the_group_that_acts(
    symmetry: Symmetry, shapes: dict[str, tuple[int, ...]], order: int
) -> None:
    """Against the number of different images of random values, all elements listed."""
    values = {name: torch.rand(shape) for name, shape in shapes.items()}
    elements = symmetry.elements(values)
    images = symmetry.act(elements, {name: value.unsqueeze(0) for name, value in values.items()})
    flat = torch.cat([images[name].reshape(length(elements), -1) for name in shapes], 1)
    assert len(set(map(tuple, flat.tolist()))) == order
    assert symmetry.log_order(values) == pytest.approx(math.log(order), abs=1e-12)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_generators_generate(case: Case) -> None:
    symmetry, values, _ = case
    if symmetry.log_order(values) > math.log(200):
        return
    order = length(symmetry.elements(values))

    def key(element: Any) -> tuple[Any, ...]:
        return tuple(map(key, element)) if isinstance(element, tuple) else tuple(element.tolist())

    generators = [element for _, element in symmetry.generators(values)]
    seen = {key(symmetry.identity(values)): symmetry.identity(values)}
    frontier = list(seen.values())
    while frontier:
        products = [symmetry.compose(g, element) for element in frontier for g in generators]
        frontier = [p for p in products if key(p) not in seen]
        seen.update((key(p), p) for p in frontier)
        frontier = list({key(p): p for p in frontier}.values())
    assert len(seen) == order


def test_a_direct_product_of_signs_and_permutations_would_be_no_group() -> None:
    """Negative control: composing member by member breaks the action law for a tanh layer."""
    axes = {"w": -1}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    values = {"w": torch.arange(1.0, 4.0)}
    g = (torch.tensor([1, 2, 0]), torch.tensor([1, 1, -1]))
    h = (torch.tensor([0, 2, 1]), torch.tensor([-1, 1, 1]))
    direct = tuple(m.compose(a, b) for m, a, b in zip(symmetry.members, g, h, strict=True))
    nested = symmetry.act(g, symmetry.act(h, values))
    assert same(symmetry.act(symmetry.compose(g, h), values), nested)
    assert not same(symmetry.act(direct, values), nested)


def test_elements_without_batch_act_on_any_batch_and_pairs_broadcast() -> None:
    symmetry = Permutation({"locs": -1})
    values = {"locs": torch.randn(1, 5, 3)}
    elements = symmetry.elements({"locs": torch.empty(3)}).unsqueeze(1)  # shape: (6, 1, 3)
    assert symmetry.act(elements, values)["locs"].shape == (6, 5, 3)


def test_sampling_is_uniform() -> None:
    """Chi-squared over the 48 signed permutations of three units, failing by chance at 2e-5."""
    from scipy.stats import chi2

    axes = {"w": -1}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    values = {"w": torch.tensor([1.0, 2.0, 3.0])}
    images = symmetry.act(symmetry.sample(values, (48_000,)), {"w": values["w"].expand(48_000, 3)})["w"]
    _, counts = images.unique(dim=0, return_counts=True)
    assert len(counts) == 48
    statistic = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert statistic < chi2.isf(2e-5, 47)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Permutation({}), "at least one site"),
        (lambda: Permutation({"w": 0}), "counted from the right"),
        (lambda: Permutation({"w": 1.5}), "not an int"),  # type: ignore[dict-item]
        (lambda: SignFlip({"w": (-1, -1)}), "each named once"),
        (lambda: Viewed(Permutation({"w": -4}), {"w": (2, (3, 4))}), "out of range for the shape"),
        (lambda: Viewed(Permutation({"w": -1}), {"w": (2, (0, 4))}), "can't have the shape"),
        (lambda: Product(Permutation({"w": -1}), Permutation({"w": (-2, -1)})), "same axis"),
        (lambda: Product(SignFlip({"w": -1}), SignFlip({"w": -1})), "same axis"),
        (lambda: Product(SignFlip({"w": -1, "b": -1}), Permutation({"w": -1})), "'b', which stays"),
    ],
)
def test_bad_tables_are_refused(build: Any, message: str) -> None:
    with pytest.raises(SymmetryError, match=message):
        build()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"locs": torch.zeros(3)}, "'weights', which is not among the sites"),
        ({"locs": torch.zeros(3), "weights": torch.zeros(4)}, "'weights' has size 4.*'locs' has size 3"),
        ({"locs": torch.zeros(()), "weights": torch.zeros(4)}, "axis -1 of site 'locs' is out of range"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Tensor], message: str) -> None:
    symmetry = Permutation({"locs": -1, "weights": -1})
    with pytest.raises(SymmetryError, match=message):
        symmetry.act(torch.tensor([0, 1, 2]), values)


def test_elements_whose_batch_reaches_into_the_native_dims_are_refused() -> None:
    with pytest.raises(SymmetryError, match="do not fit in front of axis"):
        SignFlip({"w": -2}).act(torch.ones(4, 5, 3), {"w": torch.zeros(3, 2)})


def test_large_groups_are_not_listed() -> None:
    with pytest.raises(SymmetryError, match="too many to list"):
        Permutation({"w": -1}).elements({"w": torch.zeros(20)})
    with pytest.raises(SymmetryError, match="too many to list"):
        Product(Permutation({"w": -1}), SignFlip({"w": -1})).elements({"w": torch.zeros(9)})


def test_the_trivial_group_leaves_everything() -> None:
    values = {"w": torch.arange(3.0)}
    trivial = Product()
    assert trivial.log_order(values) == 0.0 and trivial.generators(values) == []
    assert same(trivial.act(trivial.sample(values, (2,)), values), values)


def test_a_view_that_does_not_fit_names_site_and_shape() -> None:
    channels = Viewed(Permutation({"w": -2}), {"w": (4, (3, 2))})
    with pytest.raises(SymmetryError, match=r"'w' of shape \(4, 5\) does not end in the shape \(4, 6\)"):
        channels.sample({"w": torch.zeros(4, 5)})


def test_a_permutation_of_factors_is_one_of_blocks() -> None:
    """Against the indices written out: moving factor 1 of (2, 3, 2) by g moves entry (a, g_b, c)."""
    g = torch.tensor([2, 0, 1])
    moved = Viewed(Permutation({"w": -2}), {"w": ((2, 3, 2),)}).act(g, {"w": torch.arange(12.0)})["w"]
    expected = [float(6 * a + 2 * g[b] + c) for a in range(2) for b in range(3) for c in range(2)]
    assert moved.tolist() == expected
