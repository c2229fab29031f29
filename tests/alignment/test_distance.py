"""Distances modulo a symmetry against enumeration of the group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pyro_sym import Permutation, Product, SignFlip, Symmetry, SymmetryError
from pyro_sym.diagnostics import distance_to_copy, distance_to_mode

UNITS = Permutation({"into": -1, "out": -1})
SIGNS = SignFlip({"into": -1, "out": -1})
LAYERS = Product(Permutation({"first": -1, "middle": -2}), Permutation({"middle": -1, "last": -1}))
STATES = Permutation({"locs": -1, "transitions": (-2, -1)})
SHAPES = {
    "into": (2, 4), "out": (4,), "first": (2, 3), "middle": (3, 3), "last": (3,), "locs": (4,),
    "transitions": (4, 4),
}  # fmt: skip
EXACT = {"units": UNITS, "signs": SIGNS, "signed units": Product(UNITS, SIGNS)}
BOUNDED = {"layers": LAYERS, "states": STATES}


def values(symmetry: Symmetry, *batch: int) -> dict[str, Tensor]:
    return {site: torch.randn(*batch, *SHAPES[site], dtype=torch.float64) for site in symmetry.sites}


def to_images(symmetry: Symmetry, point: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Distances from a target to all images of a point."""
    elements = symmetry.elements(point)
    images = symmetry.act(elements, {site: value.unsqueeze(0) for site, value in point.items()})
    squares = [(images[s] - target[s]).flatten(1).square().sum(-1) for s in symmetry.sites]
    return torch.stack(squares).sum(0).sqrt()


@pytest.mark.parametrize("symmetry", EXACT.values(), ids=EXACT.keys())
def test_distance_to_mode_is_the_least_over_the_group(symmetry: Symmetry) -> None:
    draws, mode = values(symmetry, 20), values(symmetry)
    found = distance_to_mode(draws, mode, symmetry)
    each = [to_images(symmetry, {s: v[m] for s, v in draws.items()}, mode).min() for m in range(20)]
    assert torch.allclose(found, torch.stack(each), rtol=1e-12)
    unmoved = sum((draws[s] - mode[s]).flatten(1).square().sum(-1) for s in mode)
    assert isinstance(unmoved, Tensor)
    assert (found < unmoved.sqrt() - 1e-6).any()  # the minimum is not just the identity's


@pytest.mark.parametrize("symmetry", EXACT.values(), ids=EXACT.keys())
def test_distance_to_copy_is_the_least_over_the_others(symmetry: Symmetry) -> None:
    for _ in range(10):
        point = values(symmetry)
        least = to_images(symmetry, point, point)[1:].min()  # the identity is the first
        assert distance_to_copy(point, symmetry) == pytest.approx(float(least), rel=1e-10)


@pytest.mark.parametrize("symmetry", BOUNDED.values(), ids=BOUNDED.keys())
def test_coupled_groups_have_an_upper_bound(symmetry: Symmetry) -> None:
    draws, mode = values(symmetry, 20), values(symmetry)
    found = distance_to_mode(draws, mode, symmetry)
    each = torch.stack(
        [to_images(symmetry, {s: v[m] for s, v in draws.items()}, mode).min() for m in range(20)]
    )
    assert (found >= each - 1e-9).all()
    assert (found <= each + 1e-9).double().mean() > 0.5
    copy = distance_to_copy(mode, symmetry)
    others = to_images(symmetry, mode, mode)[1:]
    assert copy >= float(others.min()) - 1e-9
    assert (others - copy).abs().min() < 1e-9  # the distance of some element


@pytest.mark.parametrize("symmetry", [*EXACT.values(), *BOUNDED.values()])
def test_copies_of_the_mode_are_at_no_distance_and_distances_invariant(symmetry: Symmetry) -> None:
    mode = values(symmetry)
    element = symmetry.sample(mode, (3, 5))
    copies = symmetry.act(element, {site: value.expand(3, 5, *value.shape) for site, value in mode.items()})
    near = distance_to_mode(copies, mode, symmetry, group_by_chain=True)
    assert near.shape == (3, 5)
    assert near.max() < 1e-6


def test_sites_that_stay_count_too() -> None:
    mode = {**values(UNITS), "bias": torch.tensor(1.0)}
    draws = {site: value.unsqueeze(0) for site, value in mode.items()}
    draws["bias"] = draws["bias"] + 3.0
    assert distance_to_mode(draws, mode, UNITS).tolist() == pytest.approx([3.0])
    del mode["bias"]
    assert distance_to_mode(draws, mode, UNITS).tolist() == pytest.approx([0.0])


def test_nothing_to_move() -> None:
    point = {"x": torch.tensor([1.0])}
    assert distance_to_copy(point, Product()) == math.inf
    assert distance_to_copy(point, Permutation({"x": -1})) == math.inf
    assert distance_to_copy(point, SignFlip({"x": -1})) == 2.0
    assert distance_to_mode({"x": torch.tensor([[4.0]])}, point, Product()).tolist() == [3.0]


def test_refusals() -> None:
    draws, mode = values(UNITS, 3), values(UNITS)
    with pytest.raises(ValueError, match="has site 'bias'"):
        distance_to_mode(draws, {**mode, "bias": torch.zeros(())}, UNITS)
    with pytest.raises(ValueError, match="no site 'out'"):
        distance_to_mode(draws, {"into": mode["into"]}, UNITS)
    with pytest.raises(ValueError, match="not finite"):
        distance_to_copy({**mode, "out": mode["out"] / 0}, UNITS)
    with pytest.raises(SymmetryError):
        distance_to_copy({"into": mode["into"]}, UNITS)
