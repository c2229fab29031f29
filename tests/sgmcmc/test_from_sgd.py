"""Kernels from the settings of an SGD optimiser; settings without a kernel are refused."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from torch import Tensor

from pyro_sym import BAOA, SGHMC, SGLD, LeimkuhlerMatthews
from tests.sgmcmc.test_runs import model, sampler

pytestmark = pytest.mark.usefixtures("float64")


def weights() -> list[Tensor]:
    return [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize("kind", [BAOA, SGHMC])
def test_an_optimizer_is_its_settings(kind: Any) -> None:
    expected = kind.from_sgd(model, lr=0.1, momentum=0.9, num_data=50, temperature=0.0)
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    for optimizer in (
        torch.optim.SGD(weights(), **settings),
        torch.optim.SGD([{"params": weights()}, {"params": weights()}], **settings),
        torch.optim.SGD(weights(), lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9),
        pyro.optim.SGD(settings),
        (torch.optim.SGD, settings),
    ):
        kernel = kind.from_sgd(model, optimizer=optimizer, num_data=50, temperature=0.0)
        assert (kernel.step_size, kernel.friction) == (expected.step_size, expected.friction)
    draws = []
    for each in (expected, kernel):
        mcmc = sampler(each, num_chains=2)
        mcmc.run()
        draws.append(mcmc.get_samples()["b"])
    assert torch.equal(*draws)


def test_an_optimizer_has_its_learning_rate_of_now() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    kernel = SGLD.from_sgd(model, optimizer=optimizer, num_data=50)
    assert kernel.step_size == SGLD.from_sgd(model, lr=0.05, num_data=50).step_size


TWO_GROUPS: list[dict[str, Any]] = [{"params": weights()}, {"params": weights(), "lr": 0.2}]
GOOD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"optimizer": torch.optim.Adam(weights())},
            TypeError,
            "optimizer is Adam; from_sgd is for",
        ),
        ({"optimizer": pyro.optim.ClippedAdam({"lr": 0.1})}, TypeError, "optimizer is ClippedAdam"),
        ({"optimizer": pyro.optim.SGD(GOOD, {"clip_norm": 1.0})}, ValueError, "clips gradients"),
        ({"optimizer": pyro.optim.SGD(lambda name: GOOD)}, ValueError, "one learning rate for all sites"),
        ({"optimizer": "sgd"}, TypeError, "optimizer is str"),
        ({"optimizer": torch.optim.SGD}, TypeError, "the class .*; pass an instance"),
        (
            {"optimizer": torch.optim.SGD(weights(), weight_decay=0.04, **GOOD)},
            ValueError,
            r"weight_decay=0.04.*prior of scale .* = 0.7071",  # 1 / sqrt(50 * 0.04)
        ),
        ({"optimizer": torch.optim.SGD(weights(), dampening=0.5, **GOOD)}, ValueError, "dampening=0.5"),
        ({"optimizer": torch.optim.SGD(weights(), nesterov=True, **GOOD)}, ValueError, "nesterov=True"),
        ({"optimizer": torch.optim.SGD(weights(), maximize=True, **GOOD)}, ValueError, "maximize=True"),
        (
            {"optimizer": torch.optim.SGD(TWO_GROUPS, **GOOD)},
            ValueError,
            r"different lr, \[0.1, 0.2\]",
        ),
        ({"optimizer": torch.optim.SGD(weights(), **GOOD), "lr": 0.1}, ValueError, "optimizer and lr are"),
        ({"optimizer": torch.optim.SGD(weights(), **GOOD), "momentum": 0.1}, ValueError, "and momentum are"),
        ({}, TypeError, "needs the momentum"),
        ({"momentum": 0.9}, TypeError, "needs the learning rate"),
    ],
)
def test_optimizers_without_a_kernel_are_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        BAOA.from_sgd(model, num_data=50, **arguments)


def test_momentum_is_refused_by_kernels_without() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    for kind in (SGLD, LeimkuhlerMatthews):
        with pytest.raises(ValueError, match=rf"momentum=0.9, and {kind.__name__} has none; take BAOA"):
            kind.from_sgd(model, optimizer=optimizer, num_data=50)
