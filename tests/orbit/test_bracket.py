"""The log orbit average between the best of all bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_sym import AutoSymmetrized, Permutation
from pyro_sym.guides import average
from pyro_sym.orbit import bracket as module
from pyro_sym.orbit.bracket import bracket
from pyro_sym.orbit.permanent import log_permanent
from tests.catalogue import normals
from tests.conftest import Z_LIMIT
from tests.orbit.test_guided_permutations import gaussian_pairs

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("close", [math.inf, -math.inf])
@pytest.mark.parametrize("separation", [0.5, 1.0, 2.0])
def test_a_bracket_holds_with_and_without_deterministic_halves(
    separation: float, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE", close)
    pairs = gaussian_pairs(10, separation, 200).detach()
    truth = log_permanent(pairs) - math.lgamma(11)
    result = bracket(pairs.split(70), 2)
    below, above = result.lower - truth, result.upper - truth
    assert below.mean() < Z_LIMIT * below.std() / math.sqrt(200)
    assert above.mean() > -Z_LIMIT * above.std() / math.sqrt(200)


def test_deterministic_halves_win_where_sampled_ones_are_poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that is 100 nats off on either side."""

    def poor(pairs: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        truth = log_permanent(pairs) - math.lgamma(11)
        return truth - 100, truth + 100

    monkeypatch.setattr(module, "importance_bracket", poor)
    pairs = gaussian_pairs(10, 2.0, 20).detach()
    truth = log_permanent(pairs) - math.lgamma(11)
    result = bracket(pairs.split(7), 2)
    assert (result.lower_by, result.upper_by) == ("deterministic", "deterministic")
    assert result.note == " (deterministic lower and upper half)"
    assert (result.lower <= truth + 1e-9).all() and (truth <= result.upper + 1e-9).all()
    assert (result.upper - result.lower < 3).all()


def test_a_gain_in_chunks_is_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = normals({"w": (12, 2)}, 3.0)

    locs = 2 * torch.randn(12, 2)

    def guide(estimator: Any) -> AutoSymmetrized:
        base = AutoNormal(model, init_loc_fn=lambda site: locs, init_scale=1.0)
        return AutoSymmetrized(base, Permutation({"w": -2}), estimator=estimator)

    exact = guide("exact").symmetry_gain(num_samples=100)
    monkeypatch.setattr(average, "CHUNK_NUMEL", 12 * (12 + 64) * 7)
    result = guide("importance").symmetry_gain(num_samples=100)
    assert result.method == "importance"
    error = Z_LIMIT * math.hypot(exact.standard_error, result.standard_error)
    assert result.estimate == pytest.approx(exact.estimate, abs=error)
    assert abs(result.upper - result.lower) < 0.1
