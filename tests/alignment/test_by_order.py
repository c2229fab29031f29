"""Test ``align_by_order``: units in order, and doubt where the coordinate does not tell them apart."""

from __future__ import annotations

import pytest
import torch

from pyro_sym import Permutation, Product, SignFlip, SymmetryError, Viewed, align, align_by_order

AXES = {"locs": -2, "weights": -1}


def draws(num_draws: int, separation: float = 10.0) -> dict[str, torch.Tensor]:
    centres = separation * torch.stack([torch.arange(4.0), torch.tensor([2.0, 0.0, 3.0, 1.0])], -1)
    return {
        "locs": centres + torch.randn(num_draws, 4, 2),
        "weights": torch.rand(num_draws, 4),
        "other": torch.randn(num_draws),
    }


@pytest.mark.parametrize("index", [(0,), (1,), (-1,)])
def test_the_coordinate_ascends_and_other_sites_follow(index: tuple[int, ...]) -> None:
    samples, symmetry = draws(50), Permutation(AXES)
    alignment = align_by_order(samples, symmetry, "locs", index)
    coordinate = alignment.samples["locs"][..., index[0]]
    assert (coordinate.diff(dim=-1) >= 0).all()
    images = symmetry.act(alignment.elements, samples)
    assert all(torch.equal(images[site], alignment.samples[site]) for site in samples)
    assert alignment.converged and alignment.num_sweeps == 0


def test_separated_units_are_certain_and_labelled_as_by_align() -> None:
    samples, symmetry = draws(200), Permutation(AXES)
    ordered = align_by_order(samples, symmetry, "locs", (0,))
    assert (ordered.confidence > 0.999).all()
    reference = {site: value[0] for site, value in ordered.samples.items()}
    assert torch.equal(align(samples, symmetry, reference=reference).elements, ordered.elements)


def test_units_that_overlap_in_the_coordinate_are_said_to_be_in_doubt() -> None:
    """By their other coordinate, units are 10 sd apart; by this one, they are the same."""
    samples, symmetry = draws(300), Permutation(AXES)
    samples["locs"][..., 0] = torch.randn(300, 4)
    by_overlap = align_by_order(samples, symmetry, "locs", (0,))
    assert (by_overlap.confidence < 0.9).double().mean() > 0.3
    assert (align_by_order(samples, symmetry, "locs", (1,)).confidence > 0.999).all()


def test_chains_products_and_views() -> None:
    samples = {site: value.unflatten(0, (2, 25)) for site, value in draws(50).items()}
    symmetry = Product(Permutation(AXES), SignFlip({"locs": -2}))
    alignment = align_by_order(samples, symmetry, "locs", (0,), group_by_chain=True)
    assert alignment.margin.shape == (2, 25)
    assert (alignment.elements[1] == 1).all()
    plain = align_by_order(samples, Permutation(AXES), "locs", (0,), group_by_chain=True)
    assert torch.equal(plain.elements, alignment.elements[0])
    flat = {**samples, "locs": samples["locs"].flatten(2)}
    view = Viewed(Permutation({"locs": -2, "weights": -1}), {"locs": ((4, 2),)})
    assert torch.equal(align_by_order(flat, view, "locs", (0,), group_by_chain=True).elements, plain.elements)


def test_bad_input_is_named() -> None:
    samples = draws(5)
    with pytest.raises(SymmetryError, match="'other' by 0 permutations"):
        align_by_order(samples, Permutation(AXES), "other")
    with pytest.raises(SymmetryError, match=r"along axes \[\(-2, -1\)\]"):
        align_by_order({"m": torch.randn(5, 2, 2)}, Permutation({"m": (-2, -1)}), "m", (0,))
    for index in ((), (2,), (0, 0)):
        with pytest.raises(ValueError, match=r"have sizes \(2,\)"):
            align_by_order(samples, Permutation(AXES), "locs", index)
