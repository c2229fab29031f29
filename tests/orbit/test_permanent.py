"""The exact permanent: against enumeration, rational arithmetic and matrices whose permanent is known."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from pyro_sym.orbit import permanent
from pyro_sym.orbit.permanent import log_permanent

pytestmark = pytest.mark.usefixtures("float64")


def brute_force(log_matrix: Tensor) -> Tensor:
    n = log_matrix.shape[-1]
    rows = [log_matrix[..., range(n), list(p)].sum(-1) for p in itertools.permutations(range(n))]
    return torch.stack(rows).logsumexp(0)


def log_permanent_of_integers(matrix: list[list[int]]) -> float:
    """The same recursion without any rounding but the logarithm's."""
    layer = {0: 1}
    for row in matrix:
        following: dict[int, int] = {}
        for subset, value in layer.items():
            for j, entry in enumerate(row):
                if not subset >> j & 1:
                    following[subset | 1 << j] = following.get(subset | 1 << j, 0) + entry * value
        layer = following
    return math.log(layer[2 ** len(matrix) - 1])


@pytest.mark.parametrize("n", range(1, 9))
def test_the_dynamic_programme_equals_enumeration(n: int) -> None:
    matrices = 4 * torch.randn(3, n, n)
    assert torch.allclose(log_permanent(matrices), brute_force(matrices), rtol=1e-12, atol=1e-12)


def test_wide_ranges_against_exact_arithmetic() -> None:
    """Fourteen units, entries of lognormal spread 30; floats are integers after a scaling by 2**300."""
    matrix = (30 * torch.randn(14, 14)).exp()
    integers = [[int(Fraction(x) * 2**300) for x in row] for row in matrix.tolist()]
    assert all(
        Fraction(x) * 2**300 == i
        for x, i in zip(matrix.ravel().tolist(), itertools.chain(*integers), strict=True)
    )
    expected = log_permanent_of_integers(integers) - 14 * 300 * math.log(2.0)
    assert abs(float(log_permanent(matrix.log())) - expected) < 1e-10


def test_the_whole_range_of_floats_against_exact_arithmetic() -> None:
    """Fourteen units, entries from 1e-300 to 1e300: most products of two are out of range."""
    exponents = torch.randint(-300, 301, (14, 14))
    expected = log_permanent_of_integers([[10 ** (300 + e) for e in row] for row in exponents.tolist()])
    log_matrix = (exponents * math.log(10.0)).requires_grad_()
    value = log_permanent(log_matrix)
    (marginals,) = torch.autograd.grad(value, log_matrix)
    assert abs(value.item() - (expected - 14 * 300 * math.log(10.0))) < 1e-10
    assert torch.allclose(marginals.sum(0), torch.ones(14))


def test_extreme_and_empty_entries_stay_finite() -> None:
    log_matrix = torch.tensor([[690.0, -690.0, -torch.inf], [-690.0, 690.0, 0.0], [-torch.inf, 0.0, 690.0]])
    log_matrix.requires_grad_()
    value = log_permanent(log_matrix)
    (marginals,) = torch.autograd.grad(value, log_matrix)
    assert torch.allclose(value, torch.tensor(2070.0))
    assert torch.allclose(marginals, torch.eye(3))
    assert log_permanent(torch.full((2, 2), -torch.inf)) == -torch.inf


def test_sixteen_units_on_request() -> None:
    """Two blocks of eight, whose permanents multiply, shuffled; and the matrix of ones."""
    first, second = torch.randn(2, 8, 8)
    blocks = torch.full((16, 16), -torch.inf)
    blocks[:8, :8], blocks[8:, 8:] = first, second
    matrices = torch.stack([blocks[torch.randperm(16)][:, torch.randperm(16)], torch.zeros(16, 16)])
    expected = torch.stack([log_permanent(first) + log_permanent(second), torch.tensor(math.lgamma(17))])
    assert torch.allclose(log_permanent(matrices, max_size=16), expected, rtol=1e-13)


def test_a_batch_in_parts_is_the_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log_matrix = torch.randn(2, 3, 6, 6, requires_grad=True)
    whole = log_permanent(log_matrix)
    (marginals,) = torch.autograd.grad(whole.sum(), log_matrix)
    monkeypatch.setattr(permanent, "CHUNK_STEPS", 2 * 6 * 2**6)
    parts = log_permanent(log_matrix)
    (again,) = torch.autograd.grad(parts.sum(), log_matrix)
    assert torch.equal(parts, whole) and torch.equal(again, marginals)


def test_the_gradient_is_the_marginals() -> None:
    log_matrix = torch.randn(5, 5, requires_grad=True)
    assert torch.autograd.gradcheck(log_permanent, log_matrix)
    (marginals,) = torch.autograd.grad(log_permanent(log_matrix), log_matrix)
    assert torch.allclose(marginals.sum(0), torch.ones(5))
    assert torch.allclose(marginals.sum(1), torch.ones(5))


def test_what_is_no_permanent_is_refused() -> None:
    with pytest.raises(ValueError, match="square"):
        log_permanent(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"max_size=15, or use the importance"):
        log_permanent(torch.zeros(15, 15))
    with pytest.raises(ValueError, match=r"method='bethe' is none of"):
        log_permanent(torch.zeros(2, 2), method="bethe")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", permanent.BOUNDS)
def test_a_method_is_its_bound(method: permanent.Method) -> None:
    log_matrix = torch.randn(15, 15)
    assert log_permanent(log_matrix, method=method) == permanent.BOUNDS[method](log_matrix)
