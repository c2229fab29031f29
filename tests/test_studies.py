"""The studies' own arithmetic: quadratures, averages and thresholds against what is known."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.studies import mode_interpolation, overlap, tractable_bnn
from pyro_sym import AutoSymmetrizedNormal, Permutation, Product, SignFlip, Symmetry
from tests.catalogue import normals

# Mode interpolation


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.5, 0.49, 0.02, 0.0], 2.5),
        ([0.5, 0.51, 0.98, 1.0], 2.5),
        ([0.5, 0.5, 0.5, 0.5], None),  # never leaves
        ([0.0, 0.0, 0.0, 0.0], None),  # was never there
    ],
)
def test_threshold_is_where_the_mean_leaves_the_midpoint(ratios: list[float], expected: float | None) -> None:
    assert mode_interpolation.threshold([1.0, 2.0, 3.0, 4.0], ratios) == expected


def test_crossing_is_where_lines_between_neighbours_meet() -> None:
    assert mode_interpolation.crossing([0.0, 1.0, 2.0], [0.0, 0.0, 3.0], [1.0, 1.0, 1.0]) == pytest.approx(
        4 / 3
    )
    assert mode_interpolation.crossing([0.0, 1.0], [0.0, 0.0], [1.0, 1.0]) is None


@pytest.mark.usefixtures("float64")
def test_kl_of_two_gaussians_by_quadrature_and_by_draws() -> None:
    one = mode_interpolation.Target(torch.tensor([0.0]), torch.tensor([0.5]))  # both components are one
    mean, scale = torch.tensor([0.3]), torch.tensor([0.8])
    exact = float(torch.distributions.kl_divergence(dist.Normal(mean, scale), dist.Normal(0.0, 0.5)))
    for draw, tolerance in (
        (mode_interpolation.quadrature(121), 1e-6),
        (mode_interpolation.monte_carlo(200_000, seed=0), 0.02),
    ):
        value = float(mode_interpolation.kl(one, mean, scale.log(), draw, symmetrised=False))
        assert value == pytest.approx(exact, abs=tolerance)


@pytest.mark.usefixtures("float64")
def test_symmetrised_component_is_the_target_and_the_component_is_not() -> None:
    alpha, sigma = torch.tensor([1.0, 4.0, 8.0]), torch.tensor([1.0, 0.5, 1.0])
    target = mode_interpolation.Target(alpha, sigma)
    mixture = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(torch.tensor([-2.0, 2.0]), 0.5)
    )
    z = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(target.log_prob(z.unsqueeze(-1))[:, 1], mixture.log_prob(z))
    nodes = mode_interpolation.quadrature(121)
    at = (target, -alpha / 2, sigma.log(), nodes)
    assert mode_interpolation.kl(*at, symmetrised=True).abs().max() < 1e-7
    plain = mode_interpolation.kl(*at, symmetrised=False)
    assert float(plain[-1]) == pytest.approx(math.log(2), abs=1e-3)
    assert bool((plain > 0.01).all())  # negative control


@pytest.mark.usefixtures("float64")
def test_training_falls_between_close_modes_and_into_one_of_distant_ones() -> None:
    target = mode_interpolation.Target(torch.tensor([2.0, 7.0]), torch.ones(2))
    mean, _ = mode_interpolation.train(
        target, -target.alpha / 2, torch.ones(2), mode_interpolation.quadrature(41), steps=250
    )
    assert float(mean[0]) == pytest.approx(0.0, abs=0.05)
    assert float(mean[1]) == pytest.approx(-3.5, abs=0.05)


# The tractable network


@pytest.mark.usefixtures("float64")
def test_log_joint_is_the_models_and_a_batch_stands_for_all_rows() -> None:
    x, y = tractable_bnn.data([0, 1], [0.1])
    x, y = x[:, : tractable_bnn.N], y[:, : tractable_bnn.N]
    w = torch.randn(2, 2)
    for rows in (slice(None), slice(10)):
        batched = tractable_bnn.log_joint(w, x[:, rows], y[:, rows])
        for i in range(2):
            model = poutine.condition(tractable_bnn.network, {"w": w[i]})
            trace = poutine.trace(model).get_trace(x[i, rows], y[i, rows])
            assert float(trace.log_prob_sum()) == pytest.approx(float(batched[i]), rel=1e-12)


@pytest.mark.usefixtures("float64")
def test_grid_integrates_the_log_joint() -> None:
    x, y = tractable_bnn.data([0], [0.1])
    x, y = x[:, :100], y[:, :100]
    cells, width = 120, 1.2 / 120
    line = (torch.arange(cells) + 0.5) * width - 0.6
    grid = torch.cartesian_prod(line, line).unsqueeze(1)
    by_model = float(tractable_bnn.log_joint(grid, x, y).logsumexp(0)) + 2 * math.log(width)
    assert float(tractable_bnn.log_evidence(x, y, 120)) == pytest.approx(by_model, abs=1e-9)
    assert float(tractable_bnn.log_evidence(x, y, 400)) == pytest.approx(by_model, abs=1e-3)
    # Negative control: half of the plane has half of the mass.
    half = grid[grid[:, 0, 0] > grid[:, 0, 1]]
    by_half = float(tractable_bnn.log_joint(half, x, y).logsumexp(0)) + 2 * math.log(width)
    assert by_half == pytest.approx(by_model - math.log(2), abs=0.01)


# The averages, against the guide's


@torch.no_grad()
def reported(guide: AutoSymmetrizedNormal, *args: Tensor) -> tuple[dict[str, Tensor], float]:
    """Values that a guide draws, and the log density that it adds for them."""
    nodes = poutine.trace(guide).get_trace(*args).nodes
    factor = next(site for name, site in nodes.items() if name.endswith("log_density"))
    values = {name: site["value"] for name, site in nodes.items() if name in ("a", "b", "v", "w")}
    return values, float(factor["fn"].log_prob(factor["value"]))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("names", "signs"), [(["a"], False), (["a", "b", "v"], True)], ids=["relabelled", "flipped too"]
)
def test_average_of_overlap_is_that_of_the_guide(names: list[str], signs: bool) -> None:
    model = normals(dict.fromkeys(names, (3,)))

    axes = dict.fromkeys(names, -1)
    symmetry: Symmetry = Permutation(axes)
    if signs:
        symmetry = Product(symmetry, SignFlip(axes))
    guide = AutoSymmetrizedNormal(model, symmetry, estimator="exact", init_scale=0.7)
    guide()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    values, log_density = reported(guide)
    base = guide.guide
    assert isinstance(base, AutoNormal)
    loc = torch.stack([getattr(base.locs, name) for name in names], -1).detach()
    scale = torch.stack([getattr(base.scales, name) for name in names], -1).detach()
    units = torch.stack([values[name] for name in names], -1)
    arguments = (units.unsqueeze(0).unsqueeze(0), loc.unsqueeze(0), scale.unsqueeze(0))
    ours = float(overlap.log_q(*arguments, average=True, signs=signs))
    assert ours == pytest.approx(log_density, abs=1e-9)
    # Negative control: without the average it is another number.
    plain = float(overlap.log_q(*arguments, average=False, signs=signs))
    assert abs(plain - log_density) > 1e-3


@pytest.mark.usefixtures("float64")
def test_average_of_the_tractable_network_is_that_of_the_guide() -> None:
    x, y = (part[0, :100] for part in tractable_bnn.data([0], [0.1]))
    guide = AutoSymmetrizedNormal(
        tractable_bnn.network, tractable_bnn.SWAP, estimator="exact", init_scale=0.1
    )
    values, log_density = reported(guide, x, y)
    base = guide.guide
    assert isinstance(base, AutoNormal)
    loc, scale = base.locs.w.detach(), base.scales.w.detach()
    ours = tractable_bnn.log_q(
        values["w"].reshape(1, 1, 2), loc.unsqueeze(0), scale.unsqueeze(0), symmetrised=True
    )
    assert float(ours) == pytest.approx(log_density, abs=1e-9)


# Mixtures by a grid


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("components", [2, 3])
def test_grid_of_ordered_means_stands_for_all(components: int) -> None:
    y, _ = overlap.mixture_data(0, components, separation=1.0, rows=12)
    cells, reach = 12, 4.0
    evidence, predicted = overlap.mixture_by_grid(y, y, components, reach, cells)
    width = 2 * reach / cells
    line = (torch.arange(cells) + 0.5) * width - reach
    means = torch.cartesian_prod(*[line] * components).reshape(-1, 1, components, 1)
    joint = overlap.mixture_log_joint(means, y.unsqueeze(0)).squeeze(-1)
    assert evidence == pytest.approx(float(joint.logsumexp(0)) + components * math.log(width), abs=1e-10)
    density = dist.Normal(means.squeeze(1), 1.0).log_prob(y).exp().mean(-2)
    expected = float((joint.softmax(0).unsqueeze(-1) * density).sum(0).log().mean())
    assert predicted == pytest.approx(expected, abs=1e-10)
    # Negative control: with one datum less it is another evidence.
    assert abs(overlap.mixture_by_grid(y[1:], y, components, reach, cells)[0] - evidence) > 0.1


@pytest.mark.usefixtures("float64")
def test_networks_are_left_alone_by_the_group() -> None:
    units, x = torch.randn(4, 1, 3, 3), torch.randn(1, 6)
    y, noise = torch.randn(1, 6), torch.full((1, 1), 0.3)
    a, b, v = units[0, 0].unbind(-1)
    by_hand = (v * (a * x[0].unsqueeze(-1) + b).tanh()).sum(-1)
    torch.testing.assert_close(overlap.network_output(units, x)[0, 0], by_hand)
    joint = overlap.network_log_joint(units, x, y, noise)
    flips = torch.tensor([1.0, -1.0, -1.0]).unsqueeze(-1)
    torch.testing.assert_close(overlap.network_log_joint(units.roll(1, -2) * flips, x, y, noise), joint)
    halved = overlap.network_log_joint(units * torch.tensor([-1.0, 1.0, 1.0]), x, y, noise)
    assert bool(((halved - joint).abs() > 1e-6).all())  # negative control: a flip of one weight only
