"""Deterministic bounds of the permanent: their direction for every matrix, converged or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyro_sym.orbit import bounds
from pyro_sym.orbit.bounds import bethe_lower, bethe_upper, capacity_lower, capacity_upper, fractional_upper
from pyro_sym.orbit.permanent import log_permanent
from tests.orbit.test_guided_permutations import gaussian_pairs

pytestmark = pytest.mark.usefixtures("float64")

Bound = Callable[..., Tensor]
LOWER: list[Bound] = [bethe_lower, capacity_lower]
UPPER: list[Bound] = [bethe_upper, capacity_upper, fractional_upper]
ROUNDING = 1e-9  # relative


def pairs_of_like_units(n: int) -> Tensor:
    return torch.block_diag(*[torch.ones(2, 2)] * (n // 2)).log()


FAMILIES: dict[str, Callable[[int], Tensor]] = {
    "equal": lambda n: torch.zeros(1, n, n),
    "uniform": lambda n: torch.rand(20, n, n).log(),
    "lognormal 3": lambda n: 3 * torch.randn(20, n, n),
    "lognormal 30": lambda n: 30 * torch.randn(20, n, n),
    "near diagonal": lambda n: (torch.eye(n) + 0.1 * torch.rand(20, n, n)).log(),
    "blocks of two": lambda n: pairs_of_like_units(n).unsqueeze(0),
    "gaussian 0.5": lambda n: gaussian_pairs(n, 0.5, 20).detach(),
    "gaussian 1": lambda n: gaussian_pairs(n, 1.0, 20).detach(),
    "gaussian 2": lambda n: gaussian_pairs(n, 2.0, 20).detach(),
    "gaussian 10": lambda n: gaussian_pairs(n, 10.0, 20).detach(),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [2, 6, 10])
def test_bounds_hold_for_every_matrix_at_any_time(family: str, n: int) -> None:
    """Thirty settings by five bounds by four numbers of sweeps."""
    matrices = FAMILIES[family](n)
    truth = log_permanent(matrices)
    slack = ROUNDING * (1 + truth.abs())
    for sweeps in (1, 3, 10, 100):
        for bound in LOWER:
            assert (bound(matrices, sweeps=sweeps) <= truth + slack).all(), (bound.__name__, sweeps)
        for bound in UPPER:
            assert (bound(matrices, sweeps=sweeps) >= truth - slack).all(), (bound.__name__, sweeps)


def test_free_energies_without_rounding_and_dual_are_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: in a lower half's place F at the solver's own P, whose columns don't sum to one yet;
    in an upper half's, F at a feasible P."""
    matrices = 3 * torch.randn(20, 8, 8)
    truth = log_permanent(matrices)
    feasible = bounds._primal(matrices, -0.5, 3)
    assert (feasible < truth).any()
    monkeypatch.setattr(bounds, "_doubly_stochastic", lambda p: p)
    assert (bethe_lower(matrices, sweeps=2) > truth).any()


def test_cases_of_equality() -> None:
    two = torch.randn(20, 2, 2)
    assert torch.allclose(fractional_upper(two, sweeps=500), log_permanent(two), rtol=0, atol=1e-6)
    best = torch.maximum(two[:, 0, 0] + two[:, 1, 1], two[:, 0, 1] + two[:, 1, 0])
    assert torch.allclose(bethe_lower(two, sweeps=500), best, rtol=0, atol=1e-3)  # at a vertex: slowly
    blocks = pairs_of_like_units(8)
    assert torch.allclose(fractional_upper(blocks), torch.tensor(4 * math.log(2.0)))
    assert torch.allclose(bethe_upper(blocks), torch.tensor(4 * math.log(2.0)))
    equal = torch.zeros(9, 9)
    assert torch.allclose(capacity_lower(equal), torch.tensor(math.lgamma(10)))
    assert torch.allclose(capacity_upper(equal), torch.tensor(9 * math.log(9)))
    assert torch.allclose(bethe_lower(equal), torch.tensor(9 * math.log(9) + 72 * math.log(8 / 9)))
    separated = torch.full((5, 5), -1e3).fill_diagonal_(0.0)
    assert torch.allclose(capacity_upper(separated), torch.tensor(0.0), atol=1e-9)
    one = torch.full((1, 1), 0.3)
    for bound in [*LOWER, capacity_upper, fractional_upper]:
        assert torch.allclose(bound(one), torch.tensor(0.3))


@pytest.mark.parametrize("bound", LOWER + UPPER)
def test_gradients_are_finite_differences(bound: Bound) -> None:
    """Of the converged value, at an interior maximum."""
    log_matrix = torch.randn(2, 5, 5)
    leaf = log_matrix.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(bound(leaf, sweeps=500).sum(), leaf)
    direction = torch.randn(2, 5, 5)
    step = 1e-4
    ahead, behind = (bound(log_matrix + s * direction, sweeps=500).sum() for s in (step, -step))
    assert (gradient * direction).sum() == pytest.approx(float(ahead - behind) / (2 * step), abs=1e-5)
    assert torch.allclose(gradient.sum(-1), torch.ones(2, 5)), "slots hold one unit each"
    assert torch.allclose(gradient.sum(-2), torch.ones(2, 5), atol=1e-6), "and units one slot"


@pytest.mark.parametrize("bound", LOWER + UPPER)
def test_shapes_scales_and_labels(bound: Bound) -> None:
    """Batches of any shape; scaling a row adds its log; relabelling units changes nothing."""
    log_matrix = torch.randn(2, 3, 6, 6)
    value = bound(log_matrix)
    assert value.shape == (2, 3)
    assert torch.allclose(value[1, 2], bound(log_matrix[1, 2]))
    assert torch.allclose(bound(log_matrix + 5 * torch.arange(6.0)[:, None]), value + 75, atol=1e-6)
    assert torch.allclose(bound(log_matrix[..., torch.randperm(6)]), value, atol=1e-6)


def test_many_units_in_wide_ranges_stay_finite() -> None:
    pairs = gaussian_pairs(100, 10.0, 1)
    values = [bound(pairs, sweeps=20) for bound in LOWER + UPPER]
    for value in values:
        (gradient,) = torch.autograd.grad(value, pairs, retain_graph=True)
        assert value.isfinite() and gradient.isfinite().all()
    assert max(values[:2]) <= min(values[2:])


def test_no_weight_at_all_is_minus_infinity() -> None:
    log_matrix = torch.zeros(3, 3)
    log_matrix[1] = -torch.inf
    assert [float(bound(log_matrix)) for bound in LOWER] == [-math.inf, -math.inf]
