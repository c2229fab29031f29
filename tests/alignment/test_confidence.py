"""Test the confidence of alignments: margins are those of enumeration, and doubt is where it belongs.

Covers also `symmetry.assignment`.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor

from pyro_sym import Alignment, Permutation, Product, SignFlip, Symmetry, Viewed, align
from pyro_sym.symmetry.assignment import assign, second_best
from pyro_sym.symmetry.base import map_element
from tests.alignment.test_by_values import noisy, scrambled
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_second_best_assignment_is_that_of_enumeration(n: int) -> None:
    cost = torch.randn(200, n, n)
    best = assign(cost)
    every = torch.tensor(list(itertools.permutations(range(n))))
    totals = torch.stack([cost[:, torch.arange(n), labels].sum(-1) for labels in every]).sort(0).values
    own = cost.gather(-1, best.unsqueeze(1).expand_as(cost))  # the best assignment on the diagonal
    torch.testing.assert_close(own.diagonal(dim1=-2, dim2=-1).sum(-1), totals[0])
    if n == 1:
        assert second_best(own).isinf().all()
    else:
        torch.testing.assert_close(second_best(own), totals[1] - totals[0])


def all_shortest_paths(cost: Tensor) -> Tensor:
    """The shortest cycle, with no thought of what it can pass."""
    paths = cost - cost.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    paths.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    for k in range(cost.shape[-1]):
        paths = torch.minimum(paths, paths[:, :, k : k + 1] + paths[:, k : k + 1, :])
    return paths.diagonal(dim1=-2, dim2=-1).amin(-1)


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_second_best_of_many_units(spread: float) -> None:
    """Overlapping, and nearly all apart."""
    x = torch.randn(20, 1, 40) + spread * torch.arange(40)
    cost = (x - spread * torch.arange(40.0).unsqueeze(-1)).square()
    own = cost.gather(-1, assign(cost).unsqueeze(1).expand_as(cost))
    torch.testing.assert_close(second_best(own), all_shortest_paths(own), rtol=1e-8, atol=1e-8)


def test_where_the_diagonal_is_not_best_no_rival_is_worse() -> None:
    cost = torch.randn(50, 6, 6)
    best = (assign(cost) == torch.arange(6)).all(-1)
    assert (second_best(cost)[~best] == -torch.inf).all()


def test_negative_control_swaps_alone_miss_the_second_best() -> None:
    """Of longer cycles some are shorter than any swap."""
    cost = torch.randn(200, 4, 4)
    own = cost.gather(-1, assign(cost).unsqueeze(1).expand_as(cost))
    change = own - own.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    swaps = (change + change.mT + torch.diag(torch.full((4,), torch.inf))).flatten(1).amin(-1)
    assert (swaps >= second_best(own) - 1e-12).all()
    assert (swaps > second_best(own) + 1e-3).any()


def log_densities(alignment: Alignment, symmetry: Symmetry) -> Tensor:
    """Of all images of the aligned draws, under normals with their moments, less a constant: ``(|G|, M)``."""
    moments = {s: (v.mean(0), v.var(0, unbiased=False)) for s, v in alignment.samples.items()}
    one = {site: value[0] for site, value in alignment.samples.items()}
    every = map_element(lambda part: part.unsqueeze(1), symmetry.elements(one))
    images = symmetry.act(every, {s: v.unsqueeze(0) for s, v in alignment.samples.items()})
    terms = [-(images[s] - m).square() / (2 * v) for s, (m, v) in moments.items()]
    return torch.stack([term.flatten(2).sum(-1) for term in terms]).sum(0)


SIGNED = {"w": -2, "out": -1}
LINEAR: dict[str, Symmetry] = {
    "permutation": Permutation({"w": -2, "out": -1}),
    "signs": SignFlip({"w": -2, "out": -1}),
    "both": Product(Permutation(SIGNED), SignFlip(SIGNED)),
    "signs of one site": Product(Permutation(SIGNED), SignFlip({"w": -2}), SignFlip({"out": -1})),
    "view": Viewed(Permutation({"w": -3, "out": -1}), {"w": (4, (1, 2))}),
}


@pytest.mark.parametrize("name", list(LINEAR))
def test_margin_is_the_log_odds_against_the_best_of_all_other_elements(name: str) -> None:
    """Up to 4! 2^8 elements, units overlapping."""
    symmetry = LINEAR[name]
    alignment = align(noisy({"w": torch.randn(4, 2), "out": torch.randn(1, 4)}, 40, 0.7), symmetry)
    log_density = log_densities(alignment, symmetry)  # the identity comes first
    margin = log_density[0] - log_density[1:].amax(0)
    torch.testing.assert_close(alignment.margin, margin, rtol=1e-9, atol=1e-7)
    torch.testing.assert_close(alignment.confidence, 1 / (1 + (-margin).exp()))
    assert (margin < 1.0).any()


@pytest.mark.parametrize("sites", [("trans",), ("trans", "locs")])
def test_margin_of_a_quadratic_group_is_that_of_the_best_swap(sites: tuple[str, ...]) -> None:
    axes: dict[str, int | tuple[int, ...]] = {"trans": (-2, -1), "locs": -1}
    symmetry = Permutation({site: axes[site] for site in sites})
    centres = {"trans": torch.randn(3, 3), "locs": torch.randn(3)}
    alignment = align(noisy({site: centres[site] for site in sites}, 50, 0.5), symmetry)
    swaps = [
        i for i, p in enumerate(itertools.permutations(range(3))) if sum(a != b for a, b in enumerate(p)) == 2
    ]
    log_density = log_densities(alignment, symmetry)
    margin = (log_density[0] - log_density[swaps].amax(0)).clamp(min=0)
    torch.testing.assert_close(alignment.margin, margin, rtol=1e-9, atol=1e-7)


def test_margin_of_several_layers_is_the_least_over_them() -> None:
    """Layers that share no site: the rivals that differ in one layer include the best."""
    first, second = Permutation({"a": -2}), Permutation({"b": -2})
    draws = noisy({"a": torch.randn(3, 2), "b": torch.randn(3, 2)}, 60, 0.5)
    both = align(draws, Product(first, second))
    apart = [align({site: draws[site]}, group) for site, group in [("a", first), ("b", second)]]
    torch.testing.assert_close(both.margin, torch.minimum(apart[0].margin, apart[1].margin))


def overlapping(separation: float, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Two units with sd 1, each draw's labels swapped or not; the draws, and whether each was."""
    draws = torch.tensor([0.0, separation]) + torch.randn(count, 2)
    swapped = torch.rand(count) < 0.5
    return {"x": torch.where(swapped.unsqueeze(-1), draws.flip(-1), draws)}, swapped


def test_confidence_is_calibrated() -> None:
    """Of draws with a confidence of about c, the share 1 - c is labelled wrongly."""
    draws, swapped = overlapping(2.5, 100_000)
    alignment = align(draws, Permutation({"x": -1}))
    wrong = (alignment.elements[:, 0] == 1) != swapped
    if wrong.double().mean() > 0.5:
        wrong = ~wrong
    assert wrong.sum() > 2_000
    for low, high in itertools.pairwise([0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]):
        inside = (low <= alignment.confidence) & (alignment.confidence < high)
        expected = 1 - alignment.confidence[inside]
        error = wrong[inside].double() - expected
        standard_error = (expected * (1 - expected)).sum().sqrt() / len(error)
        # Moments that take all labels for certain are too sharp, by a percent here.
        assert abs(error.mean()) < Z_LIMIT * standard_error + 0.02, (low, high)


def test_negative_control_a_margin_twice_as_large_is_not_calibrated() -> None:
    draws, swapped = overlapping(2.5, 30_000)
    alignment = align(draws, Permutation({"x": -1}))
    wrong = (alignment.elements[:, 0] == 1) != swapped
    inside = (2 * alignment.margin).sigmoid() < 0.8
    share = min(float(wrong[inside].double().mean()), 1 - float(wrong[inside].double().mean()))
    assert share > 1 - float((2 * alignment.margin[inside]).sigmoid().mean()) + 0.05


def test_draws_in_doubt_are_those_that_are_ambiguous() -> None:
    """One draw half way between two units, among separated ones."""
    x = torch.tensor([0.0, 10.0, 30.0]) + torch.randn(500, 3)
    x[7] = torch.tensor([5.0, 5.0, 30.0])
    alignment = align({"x": x}, Permutation({"x": -1}))
    assert alignment.confidence[7] < 0.51
    assert (alignment.confidence < 0.9).sum() == 1
    assert alignment.summary()["share_in_doubt"] == 1 / 500
    alignment.warn_if_in_doubt()  # one in five hundred is tolerated


def test_units_that_nothing_tells_apart_are_always_in_doubt() -> None:
    alignment = align({"x": torch.randn(300, 2)}, Permutation({"x": -1}))
    assert (alignment.confidence < 0.9).double().mean() > 0.4
    with pytest.warns(UserWarning, match=r"labels of \d\d\.\d% of the draws are in doubt"):
        alignment.warn_if_in_doubt()


def test_the_warning_names_the_line_of_the_caller() -> None:
    alignment = align({"x": torch.randn(300, 2)}, Permutation({"x": -1}))
    with pytest.warns(UserWarning, match="in doubt") as caught:
        alignment.warn_if_in_doubt()
    assert caught[0].filename == __file__


def test_separated_units_are_certain_in_every_draw() -> None:
    draws = noisy({"x": torch.tensor([0.0, 20.0, 40.0])}, 300)
    symmetry = Permutation({"x": -1})
    alignment = align(scrambled(draws, symmetry)[0], symmetry)
    assert alignment.summary() == {
        "num_sweeps": alignment.num_sweeps,
        "converged": True,
        "least_confidence": 1.0,
        "share_in_doubt": 0.0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alignment.warn_if_in_doubt()


def test_margins_have_the_shape_of_the_draws_and_the_trivial_group_is_certain() -> None:
    draws = {"x": torch.randn(2, 30, 3)}
    assert align(draws, Permutation({"x": -1}), group_by_chain=True).margin.shape == (2, 30)
    trivial = align(draws, Product(), group_by_chain=True)
    assert trivial.margin.shape == (2, 30) and (trivial.confidence == 1).all()
    one_unit = align({"x": torch.randn(30, 1)}, Permutation({"x": -1}))
    assert (one_unit.confidence == 1).all()


def test_labels_of_a_reference_do_not_change_the_margin() -> None:
    draws = noisy({"x": torch.randn(4)}, 50, 0.3)
    plain = align(draws, Permutation({"x": -1}))
    referred = align(draws, Permutation({"x": -1}), reference={"x": draws["x"][3].flip(0)})
    assert torch.equal(plain.margin, referred.margin)
    assert not torch.equal(plain.elements, referred.elements)


def test_a_pivot_is_matched_without_iteration() -> None:
    """Each draw's element is the best of all for the given point, and other draws have no say in it."""
    axes = {"w": -2, "out": -1}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    draws = noisy({"w": torch.randn(3, 2), "out": torch.randn(1, 3)}, 30, 0.6)
    pivot = {site: value[4] for site, value in draws.items()}
    alignment = align(draws, symmetry, pivot=pivot)
    assert alignment.num_sweeps == 0 and alignment.converged
    # Both sites are scaled by one number each, alike for all units.
    scale = {
        "w": draws["w"].square().mean((0, 1)),
        "out": draws["out"].square().mean((0, 2), keepdim=True)[0],
    }

    def distance(values: dict[str, Tensor]) -> Tensor:
        terms = [(values[s] - pivot[s]).square() / scale[s] for s in pivot]
        return torch.stack([term.flatten(-2).sum(-1) for term in terms]).sum(0)

    one = {site: value[0] for site, value in draws.items()}
    every = map_element(lambda part: part.unsqueeze(1), symmetry.elements(one))
    images = symmetry.act(every, {s: v.unsqueeze(0) for s, v in draws.items()})
    torch.testing.assert_close(distance(alignment.samples), distance(images).amin(0))
    assert torch.equal(alignment.samples["w"][4], pivot["w"])
    with pytest.raises(ValueError, match="the pivot has no site 'w'"):
        align(draws, symmetry, pivot={"out": pivot["out"]})
