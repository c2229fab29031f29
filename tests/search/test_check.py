"""check_symmetry: right symmetries pass, near misses are named (also of ``pyro_sym.errors``).

Covers also `symmetry.orthogonal`.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_sym import (
    BayesianModule,
    Orthogonal,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    SymmetryError,
    check_symmetry,
    symmetry_of,
)
from pyro_sym.nn import Categorical, IIDPrior, LayerwisePrior
from tests.catalogue import FACTORS, HIDDEN_MARKOV, MIXTURE, factors, hidden_markov, mixture, random_joint

Y = torch.tensor([-1.0, 0.5, 2.0, 3.0])
SUMMED_OUT = partial(mixture, allocations=False)


class Net(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = PyroModule[nn.Linear](1, 4)
        self.hidden.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 1]).to_event(2))
        self.hidden.bias = PyroSample(dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        self.out = PyroModule[nn.Linear](4, 1)
        self.out.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))

    def forward(self, y: Tensor) -> Tensor:
        x = torch.linspace(-1, 1, len(y), dtype=y.dtype).unsqueeze(-1)
        mean = self.out(torch.tanh(self.hidden(x))).squeeze(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        return mean


UNITS = {"hidden.weight": -2, "hidden.bias": -1, "out.weight": -1}


@pytest.mark.parametrize(
    ("model", "symmetry", "args"),
    [
        (SUMMED_OUT, MIXTURE, (Y,)),
        (SUMMED_OUT, MIXTURE, (Y, 2)),
        (mixture, MIXTURE, (Y,)),
        (mixture, MIXTURE, (Y, 2)),
        (poutine.block(config_enumerate(mixture), hide=["z"]), MIXTURE, (Y,)),
        (hidden_markov, HIDDEN_MARKOV, (Y,)),
        (factors, FACTORS, (Y,)),
        (Net(), Product(Permutation(UNITS), SignFlip(UNITS)), (Y,)),
    ],
)
def test_true_symmetries_pass(model: Any, symmetry: Symmetry, args: tuple[Any, ...]) -> None:
    before = torch.random.get_rng_state()
    check_symmetry(model, symmetry, *args)
    assert torch.equal(before, torch.random.get_rng_state()), "the check must not advance the user's RNG"
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("model", "symmetry", "args", "message"),
    [
        (SUMMED_OUT, Permutation({"locs": -1}), (Y,), r"swapping 0 and 1.*'y' by"),
        (partial(mixture, loc=torch.tensor([0.0, 0.0, 0.1])), MIXTURE, (Y,), r"swapping 1 and 2.*'locs' by"),
        (SUMMED_OUT, SignFlip({"locs": -1}), (Y,), r"flipping the sign of 0.*'y' by"),
        (mixture, Permutation({"locs": -1}), (Y,), r"swapping 0 and 1.*'z\+y' by"),
        (
            hidden_markov,
            Permutation({"trans": -2, "initial": -1, "locs": -1}),
            (Y,),
            "swapping 0 and 1.*'y' by",
        ),
        (Net(), SignFlip({"hidden.weight": -2, "out.weight": -1}), (Y,), "flipping the sign of 0.*'y' by"),
        (
            mixture,
            Permutation({"locs": -1, "weight": -1}),
            (Y,),
            r"'weight', which is not among.*\['locs', 'weights'\]",
        ),
    ],
)
def test_wrong_symmetries_are_named(
    model: Any, symmetry: Symmetry, args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(SymmetryError, match=message):
        check_symmetry(model, symmetry, *args)


def test_a_break_among_many_labels_is_pinned_to_a_generator() -> None:
    """With more generators than are tried one by one, a random element finds the break and a generator names
    it."""

    def model() -> None:
        prior = torch.zeros(80)
        prior[40] = 1.0
        pyro.sample("w", dist.Normal(prior, 1.0).to_event(1))

    with pytest.raises(SymmetryError, match=r"swapping (39 and 40|40 and 41)"):
        check_symmetry(model, Permutation({"w": -1}))


def test_a_model_in_single_precision_is_checked_in_its_own_precision() -> None:
    design = torch.randn(4, 3)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(design @ w, 1.0).to_event(1), obs=y)

    with pytest.raises(SymmetryError, match="'y' by"):
        check_symmetry(model, Permutation({"w": -1}), Y)
    check_symmetry(
        lambda: pyro.sample("w", dist.Normal(design.sum(), 1.0).expand([3]).to_event(1)),
        Permutation({"w": -1}),
    )


def test_a_module_is_checked_in_double_precision_and_left_as_it_is() -> None:
    """In single precision, a break of a tenth of a nat would be lost among the thousands of the log joint."""
    x, y = torch.randn(20_000, 3), torch.randint(2, (20_000,))
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    uneven = torch.tensor([1.0, 1.0, 1.0, 1.05])
    normal = IIDPrior(dist.Normal(0.0, 1.0))
    symmetry = symmetry_of(net, x[:2])
    for scale, wrong in ((torch.ones(4), False), (uneven, True)):
        prior = LayerwisePrior({"0.bias": IIDPrior(dist.Normal(0.0, scale))}, default=normal)
        model = BayesianModule(net, prior, Categorical(), hide="2.bias", hidden="param")
        with pytest.raises(SymmetryError, match=r"'0\.bias' by") if wrong else nullcontext():
            check_symmetry(model, symmetry, x, y)
        assert model.net.get_parameter("0.weight").dtype == torch.float32
        assert not pyro.get_param_store().keys()


def test_an_error_names_a_network_symmetry_in_one_line() -> None:
    net = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    prior = LayerwisePrior(
        {"0.bias": IIDPrior(dist.Normal(0.0, torch.linspace(0.1, 1.0, 40)))},
        default=IIDPrior(dist.Normal(0.0, 1.0)),
    )
    model = BayesianModule(net, prior, Categorical())
    x, y = torch.randn(5, 3), torch.randint(2, (5,))
    with pytest.raises(SymmetryError) as raised:
        check_symmetry(model, symmetry_of(net, x), x, y)
    assert "\n" not in str(raised.value)


def test_a_random_log_joint_is_refused() -> None:
    with pytest.raises(SymmetryError, match="random at fixed values"):
        check_symmetry(random_joint, Permutation({"w": -1}))


def test_a_model_that_is_nowhere_finite_is_refused() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.factor("impossible", w.sum() * 0 - torch.inf)

    with pytest.raises(ValueError, match="not finite at any of 20"):
        check_symmetry(model, Permutation({"w": -1}))


def test_discrete_sites_that_can_not_be_summed_out_are_refused() -> None:
    def model() -> None:
        pyro.sample("counts", dist.Poisson(torch.ones(3)).to_event(1))

    with pytest.raises(ValueError, match="'counts' is discrete"):
        check_symmetry(model, Permutation({"counts": -1}))


def test_continuous_groups_are_checked() -> None:
    """Two sites that rotate together, as the loadings and scores of a factor model do."""

    def model(y: Tensor, sd: Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), sd).to_event(2))
        with pyro.plate("data", len(y)):
            scores = pyro.sample("scores", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(scores @ loadings.T, 1.0).to_event(1), obs=y)

    y, equal = torch.randn(6, 4), torch.ones(2)
    check_symmetry(model, Orthogonal({"loadings": -1, "scores": -1}), y, equal)
    with pytest.raises(SymmetryError, match=r"reflecting 0 in Orthogonal.*'y' by"):
        check_symmetry(model, Orthogonal({"loadings": -1}), y, equal)
    with pytest.raises(SymmetryError, match=r"turning 0 towards 1 in Orthogonal.*'loadings' by"):
        check_symmetry(model, Orthogonal({"loadings": -1, "scores": -1}), y, torch.tensor([1.0, 1.01]))
