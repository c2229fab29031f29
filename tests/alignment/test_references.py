"""Alignment on a real posterior: reference draws of an ordered mixture, labelled at random, come back.

Draws of the ordered model under random labels are draws of the symmetric one, so nothing has to be sampled.
``benchmarks/alignment.py`` samples the symmetric model itself.
"""

from __future__ import annotations

import os

import pytest
import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from benchmarks.alignment import SYMMETRY, agreement, low_dim_gauss_mix, ordered_reference
from pyro_sym import align, align_allocations, align_by_order, allocation_probabilities, check_symmetry
from pyro_sym.alignment.by_allocations import Method
from tests.sgmcmc.posteriors import DATA, load, read_data

MISSING = not (DATA / "posteriordb").is_dir() and os.environ.get("PYRO_SYM_REQUIRE_DATA") != "1"
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(MISSING, reason="no reference draws: PYRO_SYM_DATA names no folder with posteriordb"),
]


def reference_draws() -> dict[str, Tensor]:
    """Four chains of 1,000 draws, components in order."""
    draws = {name: chains[:4] for name, chains in load("low_dim_gauss_mix").reference().items()}
    sites = {site: torch.stack([draws[f"{site}[{i}]"] for i in (1, 2)], -1) for site in ("mu", "sigma")}
    return {**sites, "theta": torch.stack([draws["theta"], 1 - draws["theta"]], -1)}


def relabelled(draws: dict[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """With labels of each chain, ``(4, 1)``, or each draw, ``(4, 1000)``, at random; the first two differ."""
    elements = SYMMETRY.sample({site: value[0, 0] for site, value in draws.items()}, shape)
    elements.view(-1, 2)[:2] = torch.tensor([[0, 1], [1, 0]])
    return SYMMETRY.act(elements, draws)


def r_hat(draws: dict[str, Tensor]) -> float:
    return float(split_gelman_rubin(draws["mu"], chain_dim=0, sample_dim=1).max())


def test_the_model_of_the_benchmark_is_symmetric() -> None:
    check_symmetry(low_dim_gauss_mix, SYMMETRY, read_data("low_dim_gauss_mix")["y"])


@pytest.mark.parametrize("shape", [(4, 1), (4, 1000)], ids=["by chain", "by draw"])
def test_all_draws_come_back(shape: tuple[int, ...]) -> None:
    draws = reference_draws()
    moved = relabelled(draws, shape)
    # Raw draws show the mixture: in R-hat if chains differ, in the standard deviations alone if draws do.
    assert (r_hat(moved) > 1.5) == (shape == (4, 1))
    assert (moved["mu"].std((0, 1)) > 5 * draws["mu"].std((0, 1))).all()
    aligned = align(moved, SYMMETRY, group_by_chain=True, reference=ordered_reference())
    assert all(torch.equal(aligned.samples[site], draws[site]) for site in draws)
    assert (aligned.confidence > 0.999).all()
    assert r_hat(aligned.samples) < 1.01
    by_order = align_by_order(moved, SYMMETRY, "mu", group_by_chain=True)
    assert torch.equal(by_order.elements, aligned.elements)


@pytest.mark.parametrize("method", ["kl", "ecr"])
def test_allocations_agree_with_parameters(method: Method) -> None:
    moved = {site: value[:, ::20] for site, value in relabelled(reference_draws(), (4, 1000)).items()}
    probabilities = allocation_probabilities(low_dim_gauss_mix, (read_data("low_dim_gauss_mix")["y"],))
    by_parameters = align(moved, SYMMETRY, group_by_chain=True)
    by_data = align_allocations(moved, SYMMETRY, probabilities, method=method, group_by_chain=True)
    assert agreement(by_parameters, by_data).all()
    assert (by_data.confidence > 0.999).all()
