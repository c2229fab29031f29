"""Minibatches: how rows are drawn, and that the gradient on them is unbiased."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch, PlateRows, draw_indices, draw_rows
from pyro_sym.model.potential import Potential
from pyro_sym.model.program import SubsampledPlate
from tests.conftest import FAILURE_RATE, Z_LIMIT


@pytest.mark.parametrize(("size", "count"), [(6, 2), (7, 3), (6, 5)])
def test_subsets_are_uniform(size: int, count: int) -> None:
    """One by one and many at once. Fails at a rate of 2e-5 over seeds."""
    num_draws, sets = 20_000, math.comb(size, count)
    plate = SubsampledPlate("rows", size, count, torch.device("cpu"))
    draws = [draw_rows(plate, () if i % 2 else (5,)) for i in range(num_draws)]
    # Those drawn at once are not independent: take one of them.
    rows = torch.stack([draw if draw.dim() == 1 else draw[3] for draw in draws]).sort(-1).values
    assert (rows[:, 1:] > rows[:, :-1]).all() and rows.min() >= 0 and rows.max() < size
    _, counts = rows.unique(dim=0, return_counts=True)
    expected = num_draws / sets
    chi2 = float(((counts - expected) ** 2 / expected).sum() + (sets - len(counts)) * expected)
    assert stats.chi2.sf(chi2, sets - 1) > FAILURE_RATE


def test_subsets_drawn_at_once_share_as_many_rows_as_independent_ones() -> None:
    """So that the noise of their gradients is uncorrelated; fails at a rate of 2e-5 over seeds."""
    plate = SubsampledPlate("rows", 40, 8, torch.device("cpu"))
    pairs = torch.stack([draw_rows(plate, (2,)) for _ in range(5_000)])
    shared = (pairs[:, 0, :, None] == pairs[:, 1, None, :]).double().sum((1, 2))
    assert abs(shared.mean() - 8 * 8 / 40) < Z_LIMIT * shared.std() / math.sqrt(5_000)


def test_ways_of_drawing_agree_in_shape_and_have_no_repeats() -> None:
    for size, count in [(60_000, 128), (768, 32), (100, 50), (5, 5), (4, 1)]:
        plate = SubsampledPlate("rows", size, count, torch.device("cpu"))
        rows = draw_indices({"rows": plate}, 3, 7)["rows"]
        assert rows.shape == (3, 7, count) and rows.dtype == torch.long
        assert all(len(set(r.tolist())) == count for r in rows.reshape(-1, count))


def test_minibatches_of_successive_steps_are_independent() -> None:
    """Though they are drawn ahead: those of two steps share as many rows as independent subsets do.

    Fails at a rate of 2e-5 over seeds. The control is windows of one permutation a step apart.
    """
    plate = SubsampledPlate("rows", 80, 8, torch.device("cpu"))
    source = PlateRows({"rows": plate}, 2)
    drawn = torch.stack([source.draw().indices["rows"] for _ in range(5_000)])  # (steps, C, B)
    assert drawn.shape == (5_000, 2, 8)
    assert all(len(set(rows.tolist())) == 8 for rows in drawn.reshape(-1, 8))
    windows = torch.stack([torch.arange(8) + k % 72 for k in range(5_000)])

    def excess(first: Tensor, second: Tensor) -> float:
        shared = (first[..., None] == second[..., None, :]).double().sum((-1, -2)).flatten()
        return float((shared.mean() - 8 * 8 / 80) / (shared.std() / math.sqrt(len(shared))))

    assert abs(excess(drawn[:-1], drawn[1:])) < Z_LIMIT and abs(excess(drawn[:, 0], drawn[:, 1])) < Z_LIMIT
    assert excess(windows[:-1], windows[1:]) > Z_LIMIT
    counts = drawn.flatten().bincount(minlength=80)
    expected = drawn.numel() / 80
    assert stats.chi2.sf(float(((counts - expected) ** 2 / expected).sum()), 79) > FAILURE_RATE


def test_few_rows_are_drawn_ahead() -> None:
    for size, count, chains, ahead in [
        (768, 32, 1, 64),
        (768, 32, 64, 1),
        (100, 50, 1, 1),
        (60_000, 2_000, 8, 4),
    ]:
        source = PlateRows({"rows": SubsampledPlate("rows", size, count, torch.device("cpu"))}, chains)
        source.draw()
        assert len(source.state_dict()["ahead"]) == ahead - 1


SHAPE = (8, 6, 5)
DATA = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) + 1.0


def crossed_and_nested_model(rows: int | None, columns: int | None, depth: int | None) -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    row_plate = pyro.plate("rows", SHAPE[0], subsample_size=rows, dim=-1)
    column_plate = pyro.plate("columns", SHAPE[1], subsample_size=columns, dim=-2)
    with row_plate as row:
        pyro.sample("x", dist.Normal(loc, 2.0), obs=DATA[row, 0, 0])
        with column_plate as column:
            pyro.sample("y", dist.Normal(loc, scale), obs=DATA[row, column[:, None], 0])
            with pyro.plate("depth", SHAPE[2], subsample_size=depth, dim=-3) as deep:
                pyro.sample("z", dist.Normal(loc, scale), obs=DATA[row, column[:, None], deep[:, None, None]])


def z_scores(estimates: Tensor, truth: Tensor) -> Tensor:
    return (estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(len(estimates)))


@pytest.mark.usefixtures("float64")
def test_minibatch_gradient_is_unbiased() -> None:
    """10^4 draws as 10^4 chains at one position; fails at a rate of 6e-5 over seeds."""
    num_draws = 10_000
    full = Potential(crossed_and_nested_model, (None, None, None))
    part = Potential(crossed_and_nested_model, (3, 2, 2))
    position = torch.tensor([0.3, -0.2])
    energy, slope = full.value_and_grad(position)
    gradient = Gradient(part, jit="trace")
    minibatch = Minibatch(draw_indices(part.program.plates, num_draws))
    energies, slopes = gradient(position.expand(num_draws, 2), minibatch)
    z = torch.cat([z_scores(slopes, slope), z_scores(energies[:, None], energy[None])])
    assert z.abs().max() < Z_LIMIT

    first_half = {name: rows // 2 for name, rows in minibatch.indices.items()}  # negative control
    _, slopes = gradient(position.expand(num_draws, 2), Minibatch(first_half))
    assert z_scores(slopes, slope).abs().max() > 2 * Z_LIMIT
