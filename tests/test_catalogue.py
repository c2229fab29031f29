"""The catalogue keeps its promises: the groups are symmetries, and the closed forms posteriors."""

from __future__ import annotations

from typing import Any

import pyro
import pytest
import torch
from torch import Tensor

from pyro_sym import Permutation, Symmetry, SymmetryError, check_symmetry
from tests import catalogue

Y = torch.tensor([-1.0, 0.5, 2.0, 3.0])
X = torch.tensor([[1.0, 0.3], [1.0, -0.5], [1.0, 1.2], [1.0, 0.1]])


@pytest.mark.parametrize(
    ("model", "symmetry", "args"),
    [
        (catalogue.mixture, catalogue.MIXTURE, (Y,)),
        (catalogue.hidden_markov, catalogue.HIDDEN_MARKOV, (Y,)),
        (catalogue.factors, catalogue.FACTORS, (Y,)),
        (catalogue.tanh_layer, catalogue.TANH_LAYER, (X, Y)),
    ],
)
def test_groups_are_symmetries(model: Any, symmetry: Symmetry, args: Any) -> None:
    check_symmetry(catalogue.components(3), catalogue.COMPONENTS)
    check_symmetry(model, symmetry, *args)
    first = {name: symmetry.axes[name] for name in list(symmetry.axes)[:1]}
    with pytest.raises(SymmetryError):  # one site alone is not exchangeable
        check_symmetry(model, Permutation(first), *args)


@pytest.mark.parametrize(
    ("model", "posterior", "args", "site", "shape"),
    [
        (catalogue.normal_mean, catalogue.normal_mean_posterior, (Y,), "loc", ()),
        (catalogue.linear, catalogue.linear_posterior, (X, Y), "w", (2,)),
    ],
)
def test_closed_forms_are_the_posterior_up_to_the_evidence(
    model: Any, posterior: Any, args: Any, site: str, shape: tuple[int, ...], float64: None
) -> None:
    def log_evidence(law: Any, value: Tensor) -> Tensor:
        joint = pyro.poutine.trace(pyro.poutine.condition(model, {site: value})).get_trace(*args)
        return joint.log_prob_sum() - law.log_prob(value)

    args = tuple(arg.double() for arg in args)
    values = torch.randn(5, *shape)
    found = torch.stack([log_evidence(posterior(*args), value) for value in values])
    torch.testing.assert_close(found, found[:1].expand(5))
    wrong = torch.stack([log_evidence(posterior(*args, sd=1.1), value) for value in values])
    assert wrong.std() > 1e-3


def test_allocations_are_those_of_the_summed_out_mixture() -> None:
    """Their normalising constant, summed over data, is the log likelihood of :func:`catalogue.mixture`."""
    locs, weights = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([0.2, 0.5, 0.3])
    both = torch.distributions.Normal(locs, 1.0)
    p = catalogue.mixture_allocations(Y, locs, weights)
    torch.testing.assert_close(p.sum(-1), torch.ones(4))
    evidence = weights.log() + both.log_prob(Y.unsqueeze(-1)) - p.log()  # (n, k), the same for all k
    torch.testing.assert_close(evidence, evidence[:, :1].expand(4, 3))
    found = {"locs": locs, "weights": weights}
    conditioned = pyro.poutine.condition(catalogue.mixture, found)
    trace = pyro.poutine.trace(conditioned).get_trace(Y, allocations=False)
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], evidence[:, 0])
