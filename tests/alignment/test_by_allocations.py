"""Test ``align_allocations``: both methods descend to labels that enumeration can't better."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from pyro_sym import (
    Alignment,
    Permutation,
    Product,
    SignFlip,
    SymmetryError,
    Viewed,
    align,
    align_allocations,
)
from pyro_sym.alignment.by_allocations import Method
from tests.alignment.test_by_values import scrambled, share_recovered

pytestmark = pytest.mark.usefixtures("float64")

SYMMETRY = Permutation({"locs": -1, "scales": -1})
EVERY = torch.tensor(list(itertools.permutations(range(3))))
LEAST = 1e-6


def mixture(num_draws: int, sd: float = 0.1) -> tuple[dict[str, Tensor], Tensor]:
    """Draws of three components, and 60 data from them."""
    centres = torch.tensor([-3.0, 0.0, 3.0])
    y = (centres.repeat(20) + torch.randn(60)).sort().values
    draws = {
        "locs": centres + sd * torch.randn(num_draws, 3),
        "scales": (sd * torch.randn(num_draws, 3)).exp(),
    }
    return draws, y


class Responsibilities:
    """Of the data under draws; remembers how many draws it was asked for."""

    def __init__(self, y: Tensor) -> None:
        self.y = y
        self.counts: list[int] = []

    def __call__(self, draws: dict[str, Tensor]) -> Tensor:
        self.counts.append(len(draws["locs"]))
        normal = torch.distributions.Normal(draws["locs"].unsqueeze(1), draws["scales"].unsqueeze(1))
        return normal.log_prob(self.y.unsqueeze(-1)).softmax(-1)


def labelled(p: Tensor, alignment: Alignment) -> Tensor:
    return p.gather(-1, alignment.elements.unsqueeze(1).expand(p.shape))


def by_draw(method: str, p: Tensor, mean: Tensor) -> Tensor:
    """What each draw adds to the objective, straight from the formula; ``(..., N, K)`` to ``(...)``."""
    if method == "kl":
        return (p * (p / mean).log()).sum((-1, -2))
    majority = torch.nn.functional.one_hot(mean.argmax(-1), p.shape[-1])
    return (1 - (p * majority).sum(-1)).sum(-1)


@pytest.mark.parametrize("method", ["kl", "ecr"])
@pytest.mark.parametrize("sd", [0.1, 1.5])
def test_objective_is_the_formula_and_ends_where_no_draw_can_do_better(method: Method, sd: float) -> None:
    draws, y = mixture(80, sd)
    moved, _ = scrambled(draws, SYMMETRY)
    p = Responsibilities(y)(moved).clamp(min=LEAST)
    alignment = align_allocations(moved, SYMMETRY, p, method=method)
    assert alignment.converged and (alignment.objective.diff() <= 1e-9).all()
    own = labelled(p / p.sum(-1, keepdim=True), alignment)
    mean = own.mean(0)
    values = by_draw(method, own, mean)
    torch.testing.assert_close(alignment.objective[-1], values.mean(), rtol=1e-4, atol=1e-4)
    others = torch.stack([by_draw(method, own[..., other], mean) for other in EVERY])
    assert (values <= others.amin(0) + 1e-4).all()


@pytest.mark.parametrize("method", ["kl", "ecr"])
def test_margin_is_what_the_best_other_labelling_adds_to_the_divergence(method: Method) -> None:
    draws, y = mixture(50, 1.5)
    p = Responsibilities(y[::6])(draws).clamp(min=LEAST)
    alignment = align_allocations(draws, SYMMETRY, p, method=method)
    own = labelled(p, alignment)
    mean = own.mean(0)
    others = torch.stack([by_draw("kl", own[..., other], mean) for other in EVERY[1:]])
    margin = (others.amin(0) - by_draw("kl", own, mean)).clamp(min=0)
    torch.testing.assert_close(alignment.margin, margin, rtol=1e-3, atol=1e-3)
    assert (margin < 3.0).any()


def test_the_sum_over_draws_falls_where_single_draws_rise() -> None:
    """So that the sum alone may say when to stop."""
    draws, y = mixture(80, 1.5)
    moved, _ = scrambled(draws, SYMMETRY)
    p = Responsibilities(y)(moved).clamp(min=LEAST)
    p = p / p.sum(-1, keepdim=True)
    with pytest.warns(UserWarning, match="after 1 sweeps"):
        early = align_allocations(moved, SYMMETRY, p, max_sweeps=1, num_references=0)
    late = align_allocations(moved, SYMMETRY, p, num_references=0)
    assert not early.converged and late.num_sweeps > 2
    before, after = (by_draw("kl", own, own.mean(0)) for own in (labelled(p, early), labelled(p, late)))
    assert (after > before + 1.0).any()
    assert after.sum() < before.sum() - 1.0


@pytest.mark.parametrize("method", ["kl", "ecr"])
def test_planted_labels_are_recovered_and_agree_with_those_by_parameters(method: Method) -> None:
    draws, y = mixture(500)
    moved, planted = scrambled(draws, SYMMETRY)
    alignment = align_allocations(moved, SYMMETRY, Responsibilities(y), method=method)
    assert share_recovered(SYMMETRY, planted, alignment.elements) == 1.0
    assert (alignment.confidence > 0.99).all()
    by_parameters = align(moved, SYMMETRY)
    inverse = SYMMETRY.inverse(by_parameters.elements)
    assert share_recovered(SYMMETRY, inverse, alignment.elements) == 1.0


def test_allocations_tell_what_parameters_in_one_place_do_not() -> None:
    """Two components with one location each, whose locations cross; their scales stay apart."""
    y = torch.cat([0.1 * torch.randn(40), 5.0 * torch.randn(40)])
    draws = {
        "locs": torch.randn(300, 2) * torch.tensor([0.02, 1.0]),
        "scales": torch.tensor([0.1, 5.0]) * (0.1 * torch.randn(300, 2)).exp(),
    }
    moved, planted = scrambled(draws, SYMMETRY)
    alignment = align_allocations(moved, SYMMETRY, Responsibilities(y))
    assert share_recovered(SYMMETRY, planted, alignment.elements) == 1.0


def test_negative_control_without_reference_starts_switched_draws_are_a_poor_start() -> None:
    """The mean of draws under all labels says little; starts at single draws end no higher."""
    ends = []
    for num_references in (0, 4):
        torch.manual_seed(3)
        draws, y = mixture(200, 1.0)
        moved, _ = scrambled(draws, SYMMETRY)
        run = align_allocations(moved, SYMMETRY, Responsibilities(y), num_references=num_references)
        ends.append(float(run.objective[-1]))
    assert ends[1] <= ends[0]


def test_probabilities_are_asked_for_chunk_by_chunk_in_each_sweep() -> None:
    draws, y = mixture(100)
    moved, _ = scrambled(draws, SYMMETRY)
    several, whole = Responsibilities(y), Responsibilities(y)
    chunked = align_allocations(moved, SYMMETRY, several, chunk_size=7)
    plain = align_allocations(moved, SYMMETRY, whole)
    assert torch.equal(chunked.elements, plain.elements)
    torch.testing.assert_close(chunked.objective, plain.objective)
    assert max(several.counts) == 7
    # Once for all starts: the sweeps, the one that moved nothing, and the margins.
    assert sum(whole.counts) >= (plain.num_sweeps + 2) * 100
    assert sum(c for c in whole.counts if c > 1) % 100 == 0
    given = align_allocations(moved, SYMMETRY, Responsibilities(y)(moved))
    assert torch.equal(given.elements, plain.elements)


def test_chains_views_and_references() -> None:
    draws, y = mixture(40)
    moved, _ = scrambled(draws, SYMMETRY)
    reference = {site: value[0].flip(-1) for site, value in draws.items()}
    plain = align_allocations(moved, SYMMETRY, Responsibilities(y), reference=reference)
    assert (plain.samples["locs"].mean(0) - reference["locs"]).abs().max() < 0.5
    by_chain = {site: value.reshape(4, 10, 3) for site, value in moved.items()}
    chains = align_allocations(
        by_chain, SYMMETRY, Responsibilities(y), group_by_chain=True, reference=reference
    )
    assert torch.equal(chains.samples["locs"].flatten(0, 1), plain.samples["locs"])
    assert chains.margin.shape == (4, 10)
    given = Responsibilities(y)(moved).unflatten(0, (4, 10))
    tensor = align_allocations(by_chain, SYMMETRY, given, group_by_chain=True, reference=reference)
    assert torch.equal(tensor.elements, chains.elements)
    view = Product(Viewed(SYMMETRY, {"locs": ((1, 3),)}))
    viewed = align_allocations(moved, view, Responsibilities(y), reference=reference)
    assert torch.equal(viewed.elements[0], plain.elements)


def test_bad_input_is_named() -> None:
    draws, y = mixture(5)
    p = Responsibilities(y)(draws)
    with pytest.raises(SymmetryError, match="nothing of the other members"):
        align_allocations(draws, Product(SYMMETRY, SignFlip({"locs": -1})), p)
    with pytest.raises(ValueError, match="'Stephens'; pass one of 'kl', 'ecr'"):
        align_allocations(draws, SYMMETRY, p, method="Stephens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"for \(4,\) draws, but \(5,\) draws"):
        align_allocations(draws, SYMMETRY, p[:4])
    with pytest.raises(ValueError, match=r"shape \(1, 60, 2\), expected \(1, N, 3\)"):
        align_allocations(draws, SYMMETRY, p[..., :2])
    with pytest.raises(ValueError, match="negative or not finite"):
        align_allocations(draws, SYMMETRY, lambda some: Responsibilities(y)(some) - 0.5)
