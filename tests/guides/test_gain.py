"""What symmetrising is worth: gains that stay between 0 and log |G|, and say how well they are known."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from torch.distributions.transforms import StickBreakingTransform

from pyro_sym import AutoSymmetrized, Permutation
from pyro_sym.guides import site_normals
from pyro_sym.guides import symmetrized as autoguide
from tests.catalogue import normals
from tests.conftest import Z_LIMIT

SHARES = Permutation({"w": -1, "shares": -1})


def mixture() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(6), 10.0).to_event(1))
    pyro.sample("shares", dist.Dirichlet(torch.ones(6)))


def at_zero(site: Any) -> torch.Tensor:
    return torch.zeros(6) if site["name"] == "w" else torch.ones(6) / 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["importance", "uniform", "exact"])
@pytest.mark.parametrize("base", [AutoNormal, AutoMultivariateNormal, AutoIAFNormal])
@pytest.mark.parametrize("scale", [0.5, 10.0])
def test_gains_stay_between_zero_and_log_order(
    base: Any, estimator: Any, dtype: torch.dtype, scale: float
) -> None:
    """Shares as small as exp(-50), which single precision cuts off at the edge of the simplex."""
    torch.set_default_dtype(dtype)
    if base is AutoIAFNormal:
        if scale > 1:
            return  # its scales are learnt
        plain = base(mixture)
    else:
        plain = base(mixture, init_loc_fn=at_zero, init_scale=scale)
    guide = AutoSymmetrized(plain, SHARES, estimator=estimator)
    cut_off = dtype is torch.float32 and scale > 1
    message = r"the guide's log density at \d+ of 40 draws differs when computed from their values"
    with pytest.warns(UserWarning, match=message) if cut_off else nullcontext():
        gain = guide.symmetry_gain(num_samples=40)
    assert -Z_LIMIT * gain.standard_error - 1e-6 <= gain.lower <= gain.estimate <= gain.upper
    assert gain.upper <= gain.log_order


@pytest.mark.usefixtures("float64")
def test_without_what_keeps_them_there_gains_are_absurd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the inverse of torch, and with all draws taken for good."""
    monkeypatch.setattr(site_normals, "inverse", lambda transform, value: transform.inv(value))
    monkeypatch.setattr(autoguide, "reliable", lambda again, own: torch.ones_like(own, dtype=torch.bool))
    guide = AutoSymmetrized(
        AutoNormal(mixture, init_loc_fn=at_zero, init_scale=10.0), SHARES, estimator="importance"
    )
    assert guide.symmetry_gain(num_samples=40).lower < -20


@pytest.mark.usefixtures("float64")
def test_short_sticks_are_told_apart() -> None:
    sticks = StickBreakingTransform()
    free = torch.tensor([30.0, -20.0, 25.0, -31.0, 3.0])
    shares = sticks(free)
    assert torch.allclose(
        site_normals.inverse(sticks, shares), free, atol=0.01
    )  # but for what 1 - z rounds off
    assert not torch.allclose(sticks.inv(shares), free, atol=1.0), "torch has mended it"


def test_wide_bounds_say_so() -> None:
    """Uniform elements bound the gain of separated units from below by log K only."""
    model = normals({"w": (8,)}, scale=10.0)
    base = AutoNormal(model, init_loc_fn=lambda site: 10 * torch.arange(8.0), init_scale=1.0)
    wide = AutoSymmetrized(base, Permutation({"w": -1}), estimator="uniform").symmetry_gain(num_samples=20)
    assert wide.width == wide.upper - wide.lower
    assert wide.width == pytest.approx(math.lgamma(9) - math.log(16), abs=0.05)
    assert repr(wide).endswith("<bounds 7.8 nats apart>")
    narrow = AutoSymmetrized(base, Permutation({"w": -1})).symmetry_gain(num_samples=1)
    assert narrow.width == 0 and repr(narrow).endswith("num_samples=1)")
    assert math.isnan(narrow.standard_error)
    assert narrow[:3] == (narrow.lower, narrow.estimate, narrow.upper)
    with pytest.raises(ValueError, match="num_samples=0 must be at least 1"):
        AutoSymmetrized(base, Permutation({"w": -1})).symmetry_gain(num_samples=0)
