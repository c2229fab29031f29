"""A Bayesian network small enough to integrate: the symmetrised ELBO against the evidence itself.

Two ReLU units without biases, ``f(x) = relu(w_1 x) + relu(w_2 x)``, and noise-free data ``y = alpha |x|``:
one unit has to take the slope alpha and the other -alpha, and either may. (Gelberg et al. 2024, figure 4.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import init_to_value
from pyro.optim import ClippedAdam
from torch import Tensor

from pyro_sym import AutoSymmetrizedNormal, Permutation
from tests.conftest import Z_LIMIT

Guide = Callable[..., Any]

N = 100
SWAP = Permutation({"w": -1})
TOLERANCE = 1e-3  # nats per datum; log 2 / N, what the second mode is worth, is seven times that
ALPHAS = [0.05, 0.1, 0.15, 0.2]


def network(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x.unsqueeze(-1) * w).relu().sum(-1), 1.0), obs=y)


def data(alpha: float) -> tuple[Tensor, Tensor]:
    x = torch.empty(N).uniform_(-10, 10)
    return x, alpha * x.abs()


def log_joint(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of weights of shape (*batch, 2): the network is one line through the origin on either side of it."""
    total = -0.5 * w.square().sum(-1) - 0.5 * (N + 2) * math.log(2 * math.pi) - 0.5 * y.square().sum()
    for side in (1, -1):
        on_side = x * side > 0
        slope = (side * w).relu().sum(-1)
        xx, xy = x[on_side].square().sum(), (x.abs() * y)[on_side].sum()
        total = total + slope * xy - 0.5 * slope.square() * xx
    return total


def log_evidence(x: Tensor, y: Tensor, cells: int) -> float:
    """By the midpoint rule, the kinks at zero on edges of cells; beyond 0.6 there is nothing."""
    width = 1.2 / cells
    grid = (torch.arange(cells) + 0.5) * width - 0.6
    at = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), -1)
    return float(log_joint(at, x, y).flatten().logsumexp(0)) + 2 * math.log(width)


def fit(guide: Guide, x: Tensor, y: Tensor, steps: int = 120) -> None:
    # The gradients of the first steps are hundreds of times those at the end: Adam has to forget them.
    decay = {"lrd": 0.003 ** (1 / steps), "betas": (0.9, 0.95), "clip_norm": math.inf}
    svi = SVI(network, guide, ClippedAdam({"lr": 0.03, **decay}), elbo(num_particles=50))
    for _ in range(steps):
        svi.step(x, y)


def elbo(num_particles: int) -> Trace_ELBO:
    return Trace_ELBO(num_particles=num_particles, vectorize_particles=True, max_plate_nesting=1)


@torch.no_grad()
def shortfall(guide: Guide, x: Tensor, y: Tensor, evidence: float) -> tuple[float, float]:
    """What an ELBO misses of the log evidence, in nats per datum, and its standard error."""
    losses = torch.tensor([elbo(num_particles=2_000).loss(network, guide, x, y) for _ in range(10)])
    missing = (evidence + losses) / N
    return float(missing.mean()), float(missing.std()) / math.sqrt(len(missing))


@pytest.mark.usefixtures("float64")
def test_quadrature_is_of_this_model_and_fine_enough() -> None:
    x, y = data(0.1)
    for w in torch.randn(5, 2):
        trace = poutine.trace(poutine.condition(network, {"w": w})).get_trace(x, y)
        assert float(trace.log_prob_sum()) == pytest.approx(float(log_joint(w, x, y)), rel=1e-12)
    assert log_evidence(x, y, cells=400) == pytest.approx(log_evidence(x, y, cells=800), abs=1e-5)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("alpha", ALPHAS)
def test_symmetrised_elbo_is_the_evidence(alpha: float) -> None:
    x, y = data(alpha)
    evidence = log_evidence(x, y, cells=400)
    start = init_to_value(values={"w": torch.tensor([0.1, -0.1])})
    guide = AutoSymmetrizedNormal(network, SWAP, init_loc_fn=start, init_scale=0.02)
    fit(guide, x, y)
    assert guide.method == "exact"
    missing, error = shortfall(guide, x, y, evidence)
    assert -Z_LIMIT * error < missing < TOLERANCE
    # Negative control: the same guide without the average misses the second mode.
    plain, error = shortfall(guide.guide, x, y, evidence)
    assert plain - Z_LIMIT * error > TOLERANCE
    assert plain == pytest.approx(math.log(2) / N, abs=5e-4)
