"""Test ``pyro_sym.alignment.by_values``: planted labels are found, and the descent keeps its promises.

Covers also `alignment.descent`, `alignment.result`, `symmetry.blocks`, `symmetry.nearest` and
`symmetry.flat`.
"""

from __future__ import annotations

import sys
import time

import pytest
import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from pyro_sym import Alignment, Group, Orthogonal, Permutation, Product, SignFlip, Symmetry, Viewed, align
from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import Element, leaves, map_element
from pyro_sym.symmetry.blocks import Units

UNITS = {"locs": -2, "weights": -1, "out": -1}
SIGNED = {"locs": -2, "out": -1}


def spread(n: int) -> Tensor:
    """``n`` values four apart and none at 0, so that units and signs are 4 sd from each other at sd 1."""
    return (4.0 * torch.arange(n) + 2.0)[torch.randperm(n)]


def noisy(centres: dict[str, Tensor], num_draws: int, sd: float = 1.0) -> dict[str, Tensor]:
    return {site: value + sd * torch.randn(num_draws, *value.shape) for site, value in centres.items()}


def scrambled(draws: dict[str, Tensor], symmetry: Symmetry) -> tuple[dict[str, Tensor], Element]:
    """Draws moved by independent random elements, with the elements."""
    one = {site: value[0] for site, value in draws.items()}
    elements = symmetry.sample(one, (len(next(iter(draws.values()))),))
    return symmetry.act(elements, draws), elements


def share_recovered(symmetry: Symmetry, planted: Element, found: Element) -> float:
    """The share of draws whose elements, planted and found, multiply to the most common product."""
    total = symmetry.compose(found, planted)
    rows = torch.cat([part.reshape(len(part), -1).long() for part in leaves(total)], -1)
    _, counts = rows.unique(dim=0, return_counts=True)
    return float(counts.max()) / len(rows)


def layer(num_draws: int) -> tuple[dict[str, Tensor], Symmetry]:
    """Ten units with signs, separated by 4 sd in each of the signed coordinates."""
    centres = {
        "locs": torch.stack([spread(10) for _ in range(2)], -1),
        "weights": torch.full((10,), 0.1),
        "out": spread(10).expand(2, 10),
    }
    return noisy(centres, num_draws), Product(Permutation(UNITS), SignFlip(SIGNED))


def network(num_draws: int) -> tuple[dict[str, Tensor], Symmetry]:
    """Two hidden tanh layers, whose groups meet on the weights between them."""
    centres = {
        "w1": torch.randn(4, 8),
        "b1": torch.randn(8),
        "w2": torch.randn(8, 6),
        "b2": torch.randn(6),
        "w3": torch.randn(6, 1),
    }
    first = {"w1": -1, "b1": -1, "w2": -2}
    second = {"w2": -1, "b2": -1, "w3": -2}
    symmetry = Product(Permutation(first), SignFlip(first), Permutation(second), SignFlip(second))
    return noisy(centres, num_draws, 0.15), symmetry


def markov(num_draws: int, *, with_locs: bool = True) -> tuple[dict[str, Tensor], Symmetry]:
    """A hidden Markov model: one permutation on both axes of the transition matrix."""
    centres = {"trans": torch.distributions.Dirichlet(torch.full((5,), 0.5)).sample((5,)), "locs": spread(5)}
    axes: dict[str, int | tuple[int, ...]] = {"trans": (-2, -1), "locs": -1}
    if not with_locs:
        del centres["locs"], axes["locs"]
    return noisy(centres, num_draws, 0.05), Permutation(axes)


def rotating_signs(num_draws: int) -> tuple[dict[str, Tensor], Symmetry]:
    """Factors with signs only, on two axes of one site too."""
    centres = {"loadings": spread(4).expand(3, 4), "precision": torch.randn(4, 4)}
    return noisy(centres, num_draws, 0.3), SignFlip({"loadings": -1, "precision": (-2, -1)})


CASES = {f.__name__: f for f in (layer, network, markov, rotating_signs)}


def test_planted_labels_and_signs_are_found_in_every_draw() -> None:
    draws, symmetry = layer(2000)
    moved, planted = scrambled(draws, symmetry)
    begin = time.perf_counter()
    alignment = align(moved, symmetry)
    print(f"aligned 2,000 draws of 10 signed units in {time.perf_counter() - begin:.2f} s")
    assert alignment.converged
    assert share_recovered(symmetry, planted, alignment.elements) == 1.0


def test_negative_control_no_alignment_recovers_next_to_nothing() -> None:
    draws, symmetry = layer(2000)
    _, planted = scrambled(draws, symmetry)
    one = {site: value[0] for site, value in draws.items()}
    assert share_recovered(symmetry, planted, symmetry.identity(one, (2000,))) < 0.01


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_kind_of_symmetry_is_recovered(case) -> None:
    draws, symmetry = case(300)
    moved, planted = scrambled(draws, symmetry)
    alignment = align(moved, symmetry)
    assert share_recovered(symmetry, planted, alignment.elements) == 1.0
    # The images are exactly those of the input, under the elements returned.
    images = symmetry.act(alignment.elements, moved)
    assert all(torch.equal(alignment.samples[site], images[site]) for site in images)
    for site, value in moved.items():
        assert alignment.samples[site].dtype == value.dtype
        assert torch.equal(
            alignment.samples[site].abs().flatten(1).sort(-1)[0], value.abs().flatten(1).sort(-1)[0]
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_objective_never_rises_even_where_units_overlap(case) -> None:
    draws, symmetry = case(200)
    blurred = {site: value + 3 * value.std() * torch.randn_like(value) for site, value in draws.items()}
    moved, _ = scrambled(blurred, symmetry)
    alignment = align(moved, symmetry)
    assert alignment.num_sweeps > 1
    assert (alignment.objective.diff() <= 1e-9).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_aligned_draws_stay_as_they_are(case) -> None:
    draws, symmetry = case(200)
    once = align(scrambled(draws, symmetry)[0], symmetry)
    twice = align(once.samples, symmetry)
    assert twice.num_sweeps == 0
    assert all(torch.equal(twice.samples[site], once.samples[site]) for site in draws)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_labels_of_the_input_do_not_matter(case) -> None:
    """Moving each draw at will before aligning gives the same draws, up to one element for all."""
    draws, symmetry = case(200)
    first = align(draws, symmetry)
    moved, before = scrambled(draws, symmetry)
    second = align(moved, symmetry)
    # second = h . first for one h, which the first draw tells.
    change = symmetry.compose(symmetry.compose(second.elements, before), symmetry.inverse(first.elements))
    one = map_element(lambda part: part[0], change)
    images = symmetry.act(one, first.samples)
    assert all(torch.equal(images[site], second.samples[site]) for site in draws)


def test_transition_matrix_alone_is_mostly_recovered() -> None:
    """Without linear sites the problem is a quadratic assignment, left to local search."""
    draws, symmetry = markov(200, with_locs=False)
    moved, planted = scrambled(draws, symmetry)
    assert share_recovered(symmetry, planted, align(moved, symmetry).elements) > 0.98


def test_rows_and_columns_with_signs_of_their_own() -> None:
    """Three signs ride on one permutation; for ``m`` that is quadratic, and only the descent is sure."""
    symmetry = Product(
        Permutation({"m": (-2, -1), "locs": -1}),
        SignFlip({"m": -1}),
        SignFlip({"m": -2}),
        SignFlip({"locs": -1}),
    )
    draws = noisy({"m": torch.randn(3, 3) * 5, "locs": spread(3)}, 100, 0.1)
    alignment = align(scrambled(draws, symmetry)[0], symmetry)
    assert alignment.num_sweeps > 1
    assert (alignment.objective.diff() <= 1e-9).all()


def deep_mlp() -> tuple[Symmetry, dict[str, tuple[int, ...]]]:
    """Three hidden layers of tanh units."""
    layers = [{"w1": -2, "b1": -1, "w2": -1}, {"w2": -2, "b2": -1, "w3": -1}, {"w3": -2, "b3": -1, "w4": -1}]
    shapes = {"w1": (8, 4), "w2": (8, 8), "w3": (8, 8), "w4": (1, 8), "b1": (8,), "b2": (8,), "b3": (8,)}
    return Product(*(Product(Permutation(axes), SignFlip(axes)) for axes in layers)), shapes


def convolutions() -> tuple[Symmetry, dict[str, tuple[int, ...]]]:
    """Two of them, a flatten of 8 channels of 2 x 2, and two linear layers."""
    channels = [
        {"c1": -4, "b1": -1, "c2": -3},
        {"c2": -4, "b2": -1, "l1": -3},
        {"l1": -4, "b3": -1, "l2": -1},
    ]
    shapes = {"c1": (6, 1, 3, 3), "c2": (8, 6, 3, 3), "l1": (10, 32), "l2": (3, 10)}
    biases = {"b1": (6,), "b2": (8,), "b3": (10,)}
    return Viewed(Product(*map(Permutation, channels)), {"l1": (10, (8, 2, 2))}), {**shapes, **biases}


def residual() -> tuple[Symmetry, dict[str, tuple[int, ...]]]:
    """A stream of 8, mapped to itself by one weight, and through a hidden layer of 6."""
    stream = Permutation({"embed": -2, "square": (-2, -1), "bias": -1, "up": -1, "down": -2, "out": -1})
    hidden = Permutation({"up": -2, "inner": -1, "down": -1})
    shapes = {"embed": (8, 3), "square": (8, 8), "bias": (8,), "up": (6, 8), "inner": (6,), "down": (8, 6)}
    return Product(stream, hidden), {**shapes, "out": (1, 8)}


def gates() -> tuple[Symmetry, dict[str, tuple[int, ...]]]:
    """The cells of an LSTM: rows are (gate, cell)."""
    cells = Permutation({"input": -2, "hidden": (-2, -1), "bias": -1, "out": -1})
    views = {"input": ((4, 8), 3), "hidden": ((4, 8), 8), "bias": ((4, 8),)}
    return Viewed(cells, views), {"input": (32, 3), "hidden": (32, 8), "bias": (32,), "out": (1, 8)}


def planted(symmetry: Symmetry, shapes: dict[str, tuple[int, ...]], count: int, sd: float):
    """Draws around random weights of spread 1, each moved at random."""
    draws = noisy({site: torch.randn(shape) for site, shape in shapes.items()}, count, sd)
    return scrambled(draws, symmetry)


@pytest.mark.parametrize("network", [deep_mlp, convolutions, residual, gates])
def test_deep_groups_are_recovered_in_every_draw(network) -> None:
    """Weights 3 posterior sd from each other, labels and signs drawn anew in each of 500 draws."""
    symmetry, shapes = network()
    moved, elements = planted(symmetry, shapes, 500, 1 / 3)
    begin = time.process_time()
    alignment = align(moved, symmetry)
    share = share_recovered(symmetry, elements, alignment.elements)
    print(f"{network.__name__}: {share:.1%} recovered in {time.process_time() - begin:.1f} s")
    assert share == 1.0 and alignment.converged


def test_negative_control_without_restarts_draws_are_caught_in_local_optima() -> None:
    """With more noise. The restarts end in a lower objective, and in labels that are right."""
    symmetry, shapes = deep_mlp()
    moved, elements = planted(symmetry, shapes, 300, 0.45)
    caught, free = align(moved, symmetry, num_restarts=0), align(moved, symmetry)
    assert share_recovered(symmetry, elements, caught.elements) < 1.0
    assert share_recovered(symmetry, elements, free.elements) == 1.0
    assert free.objective[-1] < caught.objective[-1]
    assert (free.objective.diff() <= 1e-9).all()


def test_one_layer_gets_the_best_of_all_elements() -> None:
    """At the moments that come out, units overlapping so that labels are in doubt; 4! 2^4 elements."""
    axes = {"w": -2, "out": -1}
    symmetry = Product(Permutation(axes), SignFlip(axes))
    draws = noisy({"w": torch.randn(4, 2), "out": torch.randn(1, 4)}, 60, 0.8)
    alignment = align({site: value.double() for site, value in draws.items()}, symmetry)
    assert alignment.converged
    moments = {s: (v.mean(0), v.var(0, unbiased=False)) for s, v in alignment.samples.items()}

    def distance(values: dict[str, Tensor]) -> Tensor:
        terms = [((values[s] - mean).square() / variance) for s, (mean, variance) in moments.items()]
        return torch.stack([term.flatten(-2).sum(-1) for term in terms]).sum(0)

    one = {site: value[0] for site, value in draws.items()}
    every = map_element(lambda part: part.unsqueeze(1), symmetry.elements(one))
    images = symmetry.act(every, {s: v.unsqueeze(0) for s, v in alignment.samples.items()})
    torch.testing.assert_close(distance(images).amin(0), distance(alignment.samples), rtol=1e-9, atol=1e-9)
    assert (distance(images).mean(0) > distance(alignment.samples) + 1).all()


def test_a_view_is_aligned_as_what_it_shows() -> None:
    draws, symmetry = layer(100)
    moved, _ = scrambled(draws, symmetry)
    flat = {**moved, "locs": moved["locs"].flatten(1)}
    inner, outer = align(moved, symmetry), align(flat, Viewed(symmetry, {"locs": ((10, 2),)}))
    assert all(torch.equal(a, b) for a, b in zip(inner.elements, outer.elements, strict=True))
    assert torch.equal(inner.samples["locs"].flatten(1), outer.samples["locs"])


def test_the_trivial_group_leaves_draws_alone() -> None:
    draws, _ = layer(10)
    for trivial in (Product(), Viewed(Product(), {})):
        alignment = align(draws, trivial)
        assert alignment.converged and alignment.num_sweeps == 0 and alignment.elements == ()
        assert all(alignment.samples[site] is draws[site] for site in draws)


@pytest.mark.parametrize("network", [lambda: (layer(1)[1], None), deep_mlp, gates])
def test_runs_aligned_to_one_reference_have_the_same_labels(network) -> None:
    symmetry, shapes = network()
    shapes = shapes or {site: tuple(value.shape[1:]) for site, value in layer(1)[0].items()}
    centres = {site: torch.randn(shape) for site, shape in shapes.items()}
    first, second = (scrambled(noisy(centres, 100, 0.2), symmetry)[0] for _ in range(2))
    means = {site: value.mean(0) for site, value in align(first, symmetry).samples.items()}
    state = torch.get_rng_state()
    alignment = align(second, symmetry, reference=means)
    assert torch.equal(state, torch.get_rng_state())
    images = symmetry.act(alignment.elements, second)
    for site, mean in means.items():
        assert torch.equal(images[site], alignment.samples[site])
        assert (alignment.samples[site].mean(0) - mean).abs().max() < 0.2
    draw = {site: value[7] for site, value in second.items()}
    pivot = align(second, symmetry, reference=draw)
    assert all((pivot.samples[site][7] == draw[site]).all() for site in draw)


def test_negative_control_without_a_reference_runs_differ() -> None:
    draws, symmetry = layer(100)
    first, second = (align(scrambled(draws, symmetry)[0], symmetry).samples["locs"].mean(0) for _ in range(2))
    assert (first - second).abs().max() > 3.0


def test_bad_references_are_named() -> None:
    symmetry, x = Permutation({"x": -1}), torch.randn(5, 3)
    with pytest.raises(ValueError, match="no site 'x'"):
        align({"x": x}, symmetry, reference={"y": x[0]})
    with pytest.raises(ValueError, match=r"'x' of the reference has shape \(5, 3\)"):
        align({"x": x}, symmetry, reference={"x": x})
    with pytest.raises(ValueError, match="'x' of the reference is not finite"):
        align({"x": x}, symmetry, reference={"x": x[0] / 0})


def chains_in_different_copies() -> tuple[dict[str, Tensor], Symmetry]:
    draws, symmetry = layer(4 * 200)
    one = {site: value[0] for site, value in draws.items()}
    by_chain = {site: value.reshape(4, 200, *value.shape[1:]) for site, value in draws.items()}
    fixed = map_element(lambda part: part[:, None], symmetry.sample(one, (4,)))
    return symmetry.act(fixed, by_chain), symmetry


def test_chains_end_with_the_same_labels() -> None:
    moved, symmetry = chains_in_different_copies()
    aligned = align(moved, symmetry, group_by_chain=True)
    raw = split_gelman_rubin(moved["locs"], chain_dim=0, sample_dim=1)
    after = split_gelman_rubin(aligned.samples["locs"], chain_dim=0, sample_dim=1)
    assert raw.max() > 1.5
    assert after.max() < 1.05
    assert aligned.elements[0].shape == (4, 200, 10)
    assert aligned.elements[1].shape == (4, 200, 10)


def test_label_switching_that_r_hat_does_not_see() -> None:
    """Labels drawn anew in every draw leave R-hat at 1 and inflate the standard deviations."""
    draws, symmetry = layer(800)
    moved, _ = scrambled(draws, symmetry)
    aligned = align(moved, symmetry).samples["locs"]
    assert moved["locs"].std(0).min() > 10.0
    torch.testing.assert_close(aligned.std(0), torch.ones(10, 2), rtol=0.0, atol=0.15)


def test_precision_weights_find_what_plain_distance_misses() -> None:
    """Units with one mean, told apart by their spread alone."""
    draws = {"x": torch.tensor([0.5, 20.0])[:, None] * torch.randn(500, 2, 5)}
    symmetry = Permutation({"x": -2})
    moved, planted = scrambled(draws, symmetry)
    assert share_recovered(symmetry, planted, align(moved, symmetry).elements) > 0.99


def test_random_state_inputs_and_other_sites_are_left_alone() -> None:
    draws, symmetry = layer(50)
    draws["shared"] = torch.randn(50, 3)
    before = {site: value.clone() for site, value in draws.items()}
    state = torch.get_rng_state()
    alignment = align(draws, symmetry)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(draws[site], before[site]) for site in draws)
    assert alignment.samples["shared"] is draws["shared"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    locs = torch.tensor([[1.0, 9.0], [9.0, 1.0], [1.0, 8.0], [8.0, 2.0]]).to(dtype)
    aligned = align({"locs": locs}, Permutation({"locs": -1})).samples["locs"]
    assert aligned.dtype == dtype
    assert (aligned[:, 0] < aligned[:, 1]).all() or (aligned[:, 0] > aligned[:, 1]).all()


def test_constant_and_equal_units_are_no_trouble() -> None:
    draws = {"constant": torch.full((20, 3), 0.1), "labels": torch.arange(3.0).expand(20, 3)}
    alignment = align(draws, Permutation({"constant": -1, "labels": -1}))
    assert alignment.objective.isfinite().all()
    assert torch.equal(alignment.elements, torch.arange(3).expand(20, 3))
    assert align({"x": torch.zeros(5, 4)}, Permutation({"x": -1})).converged
    assert align({"x": torch.randn(1, 4)}, Permutation({"x": -1})).converged


def test_draws_with_gradients() -> None:
    locs = torch.randn(10, 3, requires_grad=True)
    assert not align({"locs": locs}, Permutation({"locs": -1})).samples["locs"].requires_grad


def test_costs_in_chunks_are_the_same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, symmetry = layer(50)
    moved, _ = scrambled(draws, symmetry)
    whole = align(moved, symmetry)
    monkeypatch.setattr(sys.modules[Units.__module__], "MAX_COST_ENTRIES", 700)
    chunked = align(moved, symmetry)
    assert all(torch.equal(a, b) for a, b in zip(whole.elements, chunked.elements, strict=True))


def test_too_few_sweeps_are_said() -> None:
    moved, _ = scrambled({"x": torch.randn(200, 5)}, Permutation({"x": -1}))
    with pytest.warns(UserWarning, match="after 1 sweeps"):
        alignment = align(moved, Permutation({"x": -1}), max_sweeps=1)
    assert isinstance(alignment, Alignment)
    assert not alignment.converged


class _Other(SignFlip):
    """A symmetry that ``align`` knows, under a name of its own."""


class _Unable(Orthogonal):
    """A continuous group that doesn't say which element is closest."""

    closest = Group.closest


def test_subclasses_are_known_and_groups_without_closest_refused() -> None:
    assert align({"x": torch.randn(5, 2)}, _Other({"x": -1})).converged
    with pytest.raises(SymmetryError, match=r"_Unable\({'x': -1}\) can't be aligned, .* define closest\(\)"):
        align({"x": torch.randn(5, 2)}, _Unable({"x": -1}))


GOOD = torch.randn(6, 3)


@pytest.mark.parametrize(
    ("samples", "axes", "error", "match"),
    [
        ({"x": GOOD}, {"y": -1}, SymmetryError, "'y'"),
        ({"x": GOOD}, {"x": -2}, SymmetryError, "out of range"),  # -2 is the draws
        ({"x": GOOD, "y": torch.randn(6, 2)}, {"x": -1, "y": -1}, SymmetryError, "size"),
        ({"x": GOOD, "y": torch.randn(5, 3)}, {"x": -1}, ValueError, "'y' has draws"),
        ({"x": GOOD[:0]}, {"x": -1}, ValueError, "no draws"),
        ({}, {"x": -1}, ValueError, "no draws"),
        ({"x": torch.tensor(1.0)}, {"x": -1}, ValueError, "expected"),
    ],
)
def test_bad_input_is_named(samples, axes, error, match) -> None:
    with pytest.raises(error, match=match):
        align(samples, Permutation(axes))


def test_first_draw_that_is_not_finite_is_named() -> None:
    x = torch.randn(2, 6, 3)
    x[1, 4, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'x' is not finite, first at draw \(1, 4\)"):
        align({"x": x}, Permutation({"x": -1}), group_by_chain=True)
