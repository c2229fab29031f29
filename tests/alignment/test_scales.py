"""Test ``pyro_sym.alignment.scales``: functions of ReLU networks stay, and so do their scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_sym import SymmetryError, normalise_scales

pytestmark = pytest.mark.usefixtures("float64")

FIRST = ({"w1": -2, "b1": -1}, {"w2": -1})
SECOND = ({"w2": -2, "b2": -1}, {"w3": -1})
X = torch.linspace(-2.0, 2.0, 15, dtype=torch.double).reshape(5, 3)


def draws(*batch: int) -> dict[str, Tensor]:
    shapes = {"w1": (6, 3), "b1": (6,), "w2": (4, 6), "b2": (4,), "w3": (2, 4), "noise": ()}
    return {site: 3 * torch.rand(()) * torch.randn(*batch, *shape) for site, shape in shapes.items()}


def network(w: dict[str, Tensor], phi=torch.relu) -> Tensor:
    hidden = phi(X @ w["w1"].mT + w["b1"].unsqueeze(-2))
    return phi(hidden @ w["w2"].mT + w["b2"].unsqueeze(-2)) @ w["w3"].mT


def norms(w: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Squared norms of what comes in and goes out, by layer."""
    return [
        (w["w1"].square().sum(-1) + w["b1"].square(), w["w2"].square().sum(-2)),
        (w["w2"].square().sum(-1) + w["b2"].square(), w["w3"].square().sum(-2)),
    ]


@pytest.mark.parametrize("batch", [(20,), (2, 10)])
def test_the_function_stays_and_norms_are_balanced(batch: tuple[int, ...]) -> None:
    before = draws(*batch)
    after = normalise_scales(before, FIRST, SECOND, group_by_chain=len(batch) == 2)
    torch.testing.assert_close(network(after), network(before), rtol=1e-12, atol=1e-12)
    for into, out in norms(after):
        torch.testing.assert_close(into, out, rtol=1e-10, atol=0.0)
    assert after["noise"] is before["noise"]
    again = normalise_scales(after, FIRST, SECOND, group_by_chain=len(batch) == 2)
    for site in after:
        torch.testing.assert_close(again[site], after[site], rtol=1e-11, atol=0.0)


def test_negative_control_tanh_units_have_no_scale_to_spare() -> None:
    before = draws(20)
    after = normalise_scales(before, FIRST, SECOND)
    assert (network(after, torch.tanh) - network(before, torch.tanh)).abs().max() > 0.1


def test_draws_of_one_orbit_become_one() -> None:
    one = draws(1)
    c = torch.rand(50, 6).exp()
    orbit = {site: value.expand(50, *value.shape[1:]) for site, value in one.items()}
    orbit = {
        **orbit,
        "w1": c.unsqueeze(-1) * orbit["w1"],
        "b1": c * orbit["b1"],
        "w2": orbit["w2"] / c.unsqueeze(-2),
    }
    for value in normalise_scales(orbit, FIRST).values():
        torch.testing.assert_close(value, value[:1].expand(value.shape), rtol=1e-12, atol=0.0)


def test_units_without_input_or_output_are_left_alone() -> None:
    before = draws(5)
    before["w1"][:, 2] = before["b1"][:, 2] = 0.0
    before["w2"][:, :, 4] = 0.0
    after = normalise_scales(before, FIRST)
    assert all(value.isfinite().all() for value in after.values())
    assert torch.equal(after["w2"][:, :, 2], before["w2"][:, :, 2])
    assert torch.equal(after["w1"][:, 4], before["w1"][:, 4])
    assert not torch.equal(after["w1"][:, 0], before["w1"][:, 0])


def test_dtypes_and_inputs_are_kept() -> None:
    before = {site: value.float() for site, value in draws(5).items()}
    copies = {site: value.clone() for site, value in before.items()}
    after = normalise_scales(before, FIRST)
    assert all(after[site].dtype == torch.float32 for site in before)
    assert all(torch.equal(before[site], copies[site]) for site in before)


def test_bad_tables_are_named() -> None:
    with pytest.raises(ValueError, match="'w2' comes in and goes out"):
        normalise_scales(draws(3), ({"w2": -2}, {"w2": -1}))
    with pytest.raises(SymmetryError, match="'w9'"):
        normalise_scales(draws(3), ({"w9": -2}, {"w2": -1}))
    with pytest.raises(SymmetryError, match="size"):
        normalise_scales(draws(3), ({"w1": -1}, {"w2": -1}))
