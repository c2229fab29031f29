"""The log orbit average: exact values, and the direction of each sampled bound.

Covers also `orbit.uniform`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from pyro_sym import Permutation, Product, SignFlip
from pyro_sym.orbit import enumeration as exact
from pyro_sym.orbit.enumeration import enumerated
from pyro_sym.orbit.uniform import uniform, uniform_unbiased
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

N = 4
SYMMETRY = Permutation({"w": -1})
ORDER = math.factorial(N)


class Normals:
    """Independent normal units: log q(w) with a fixed scale, and draws."""

    def __init__(self, spread: float) -> None:
        self.means = (spread * torch.randn(N)).requires_grad_()

    def draws(self, count: int) -> tuple[dict[str, Tensor], Tensor]:
        values = {"w": self.means + torch.randn(count, N)}
        return values, self.log_prob(values)

    def log_prob(self, values: dict[str, Tensor]) -> Tensor:
        return torch.distributions.Normal(self.means, 1.0).log_prob(values["w"]).sum(-1)


def brute_force(q: Normals, values: dict[str, Tensor]) -> Tensor:
    rows = [q.log_prob({"w": values["w"][..., list(p)]}) for p in itertools.permutations(range(N))]
    return torch.stack(rows).logsumexp(0) - math.log(ORDER)


def test_enumeration_is_the_average_over_all_permutations() -> None:
    q = Normals(1.0)
    values, own = q.draws(7)
    assert torch.allclose(
        enumerated(SYMMETRY, q.log_prob, values, own), brute_force(q, values), rtol=0, atol=1e-13
    )


def test_signs_and_permutations_are_averaged_together() -> None:
    q = Normals(1.0)
    values, own = q.draws(5)
    signed = Product(Permutation({"w": -1}), SignFlip({"w": -1}))
    rows = []
    for p in itertools.permutations(range(N)):
        for signs in itertools.product((1.0, -1.0), repeat=N):
            rows.append(q.log_prob({"w": torch.tensor(signs) * values["w"][..., list(p)]}))
    expected = torch.stack(rows).logsumexp(0) - math.log(len(rows))
    assert torch.allclose(enumerated(signed, q.log_prob, values, own), expected, rtol=0, atol=1e-13)


def test_the_average_is_invariant() -> None:
    q = Normals(1.0)
    values, own = q.draws(6)
    image = SYMMETRY.act(SYMMETRY.sample(values, (6,)), values)
    before = enumerated(SYMMETRY, q.log_prob, values, own)
    after = enumerated(SYMMETRY, q.log_prob, image, q.log_prob(image))
    assert torch.allclose(before, after, rtol=0, atol=1e-12)


def test_chunks_change_neither_value_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Normals(1.0)
    values, own = q.draws(3)
    results = []
    for numel in (2**22, 24):
        monkeypatch.setattr(exact, "CHUNK_NUMEL", numel)
        value = enumerated(SYMMETRY, q.log_prob, values, own).sum()
        (gradient,) = torch.autograd.grad(value, q.means, retain_graph=True)
        results.append((value, gradient))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-13)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.7, 6.0])
def test_bounds_keep_their_direction(spread: float) -> None:
    """In expectation the InfoNCE form lies above log q^G, and the logarithm of the unbiased estimate
    below."""
    q = Normals(spread)
    with torch.no_grad():
        values, own = q.draws(20_000)
        truth = brute_force(q, values)
        above = uniform(SYMMETRY, q.log_prob, values, own, 6) - truth
        below = uniform_unbiased(SYMMETRY, q.log_prob, values, own, 6) - truth
        gain = (own - truth).mean()
        assert above.mean() > -Z_LIMIT * above.std() / math.sqrt(len(above))
        assert below.mean() < Z_LIMIT * below.std() / math.sqrt(len(below)) + 1e-12
        assert own.mean() - truth.mean() - above.mean() <= math.log(6) + 1e-9, "InfoNCE stops at log K"
        assert (own - truth - below).max() <= math.log(ORDER) + 1e-9, "no gain exceeds log |G|"
    if spread == 6.0:  # separated units: the true gain is out of InfoNCE's reach
        assert gain > math.log(6) + 0.5
    if (
        spread == 0.7
    ):  # negative control: the unbiased estimate in the entropy's place would overstate the ELBO
        assert below.mean() < -Z_LIMIT * below.std() / math.sqrt(len(below))


def test_the_unbiased_estimate_is_unbiased() -> None:
    q = Normals(0.7)
    with torch.no_grad():
        values, own = q.draws(1)
        many = {"w": values["w"].expand(50_000, N)}
        estimate = uniform_unbiased(SYMMETRY, q.log_prob, many, own.expand(50_000), 3).exp()
        error = (estimate.mean() - brute_force(q, values).exp()) / (estimate.std() / math.sqrt(50_000))
    assert abs(error) < Z_LIMIT


def test_uniform_elements_approach_the_average() -> None:
    q = Normals(0.7)
    with torch.no_grad():
        values, own = q.draws(200)
        close = uniform(SYMMETRY, q.log_prob, values, own, 20_000)
    assert torch.allclose(close, brute_force(q, values), rtol=0, atol=0.1)
