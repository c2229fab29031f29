"""What is the same has the same words in every process; what makes another run has others."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_sym.infer.fingerprint import describe
from pyro_sym.infer.preconditioners import RMSprop
from pyro_sym.infer.schedules import Cyclical
from pyro_sym.nn import BayesianModule, Categorical, IIDPrior


def counter(start: float) -> Callable[[int], float]:
    def count(step: int) -> float:
        return count(step - 1) if step > 0 else start

    return count


def network(weight: float = 1.0, bias: float = 0.0) -> nn.Module:
    net = nn.Linear(2, 3)
    with torch.no_grad():
        net.weight.fill_(weight)
        net.bias.fill_(bias)
    return net


def bayesian(scale: float = 1.0, num_data: int = 10, **options: Any) -> BayesianModule:
    return BayesianModule(
        network(), IIDPrior(dist.Normal(0.0, scale)), Categorical(num_data=num_data), **options
    )


def loader(size: int = 4, rows: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size=size, shuffle=True)


@pytest.mark.parametrize(
    ("make", "others"),
    [
        (lambda: 0.1, [lambda: 0.2, lambda: "0.1"]),
        (lambda: torch.ones(2), [lambda: torch.ones(3), lambda: torch.ones(2, dtype=torch.int)]),
        (lambda: np.ones(2), [lambda: np.ones((2, 1)), lambda: np.zeros(2)]),
        (lambda: {"a": [1, (2, 3)]}, [lambda: {"a": [1, 2, 3]}, lambda: {"b": [1, (2, 3)]}]),
        (lambda: {1, 2}, [lambda: {1, 3}]),
        (lambda: counter(0.5), [lambda: counter(0.6)]),
        (lambda: functools.partial(pow, 2), [lambda: functools.partial(pow, 3)]),
        (lambda: RMSprop(), [lambda: RMSprop(decay=0.5)]),
        (lambda: Cyclical(0.1, 10).step_size, [lambda: Cyclical(0.1, 20).step_size]),
        (lambda: dist.Normal(0.0, 1.0), [lambda: dist.Normal(0.0, 2.0), lambda: dist.Cauchy(0.0, 1.0)]),
        (lambda: dist.Normal(0.0, 1.0).expand([2]), [lambda: dist.Normal(0.0, 1.0).expand([3])]),
        (network, [lambda: network(2.0), lambda: nn.Sequential(network())]),
        (lambda: nn.Dropout(0.5), [lambda: nn.Dropout(0.4)]),
        (bayesian, [lambda: bayesian(2.0), lambda: bayesian(1.0, 11), lambda: bayesian(batch_size=2)]),
        (loader, [lambda: loader(2), lambda: loader(4, 9)]),
    ],
)
def test_same_and_different(make: Callable[[], Any], others: list[Callable[[], Any]]) -> None:
    assert describe(make()) == describe(make())
    for other in others:
        assert describe(other()) != describe(make())


def test_parameters_that_are_sampled_make_no_difference() -> None:
    left_out = [describe(nn.Sequential(network(weight)), leave_out=["weight"]) for weight in (1.0, 2.0)]
    assert left_out[0] == left_out[1]
    assert describe(network(bias=1.0), leave_out=["weight"]) != describe(network(), leave_out=["weight"])


def test_a_categorical_is_the_same_after_it_was_used() -> None:
    """Distributions keep what they have computed once."""
    fresh, used = (dist.Categorical(logits=torch.tensor([0.1, 0.9])) for _ in range(2))
    used.log_prob(torch.tensor(0)), used.probs
    assert describe(fresh) == describe(used)


def test_words_are_the_same_in_another_process() -> None:
    code = (
        "from tests.infer.test_fingerprint import *; print(describe([bayesian(), counter(0.5), {'b', 'a'}]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == describe([bayesian(), counter(0.5), {"b", "a"}])


def test_a_tensor_of_one_element_may_have_any_strides() -> None:
    # A prior expanded to the one bias of a regression's output is one; views of its bytes are refused.
    expanded = torch.zeros(()).expand(1)
    assert expanded.stride() == (0,)
    assert describe(expanded) == describe(torch.zeros(1)) != describe(torch.ones(()).expand(1))
