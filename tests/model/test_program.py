"""Program and enumeration: the log joint of a model, with minibatches, masks, scales and discrete sites.

Covers also `model.enumeration`.
"""

from __future__ import annotations

import functools
import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_sym.model.program import Program
from tests import catalogue

pytestmark = pytest.mark.usefixtures("float64")

Y = torch.tensor([-1.0, 0.2, 0.9, 2.0, 3.1])

mixture = functools.partial(catalogue.mixture, k=2, scale=2.0)

VALUES = {
    "locs": torch.tensor([-0.5, 1.5], dtype=torch.float64),
    "weights": torch.tensor([0.3, 0.7], dtype=torch.float64),
}


@pytest.mark.parametrize("size", [None, 2])
def test_summing_sites_out_equals_the_marginal_model(size: int | None) -> None:
    indices = {} if size is None else {"data": torch.tensor([3, 1])}
    summed = Program(mixture, (Y.double(), size))
    marginal = Program(mixture, (Y.double(), size), {"allocations": False})
    assert summed.enumerated == ("z",) and marginal.enumerated == ()
    assert set(summed.log_joint_terms(VALUES, indices)) == {"locs", "weights", "z+y"}
    assert torch.allclose(
        summed.log_joint(VALUES, indices), marginal.log_joint(VALUES, indices), rtol=0, atol=1e-12
    )


def test_masks_go_inside_the_sum_and_scales_outside() -> None:
    keep = torch.tensor([True, False, True, True, False])

    def model(y: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        with poutine.scale(scale=0.5), pyro.plate("data", len(y)), poutine.mask(mask=keep):
            z = pyro.sample("z", dist.Categorical(torch.ones(2)))
            pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)

    terms = Program(model, (Y.double(),)).log_joint_terms({"locs": VALUES["locs"]})
    each = (
        dist.Normal(VALUES["locs"], 1.0).log_prob(Y.double()[:, None]).logsumexp(-1) - torch.tensor(2.0).log()
    )
    assert torch.allclose(terms["z+y"], 0.5 * each[keep].sum(), rtol=0, atol=1e-12)


def test_the_average_over_all_minibatches_is_the_full_log_joint() -> None:
    full = Program(mixture, (Y.double(),)).log_joint(VALUES)
    program = Program(mixture, (Y.double(), 2))
    assert program.plates["data"].size == 5 and program.plates["data"].subsample_size == 2
    batches = [torch.tensor(pair) for pair in itertools.combinations(range(5), 2)]
    mean = torch.stack([program.log_joint(VALUES, {"data": rows}) for rows in batches]).mean()
    assert torch.allclose(mean, full, rtol=0, atol=1e-12)


def test_missing_values_and_indices_are_named() -> None:
    with pytest.raises(ValueError, match="no value for latent site 'weights'"):
        Program(mixture, (Y,)).log_joint({"locs": VALUES["locs"]})
    with pytest.raises(ValueError, match="plate 'data' shows 2 of 5 rows and has no indices"):
        Program(mixture, (Y, 2)).log_joint(VALUES)


def test_different_scales_of_one_sum_are_refused() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.5))
        with poutine.scale(scale=2.0):
            pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.3))

    with pytest.raises(ValueError, match="different scales"):
        Program(model).log_joint({})


def test_looking_at_a_model_leaves_no_trace_outside() -> None:
    state = torch.random.get_rng_state()
    with poutine.trace() as seen:
        program = Program(mixture, (Y, 2))
    assert not seen.trace.nodes
    assert torch.equal(state, torch.random.get_rng_state())
    first, second = program.draw(), program.draw()
    assert not torch.equal(first[0]["locs"], second[0]["locs"]), "draws are fresh"
    assert len(first[1]["data"].unique()) == 2


def test_improper_priors_are_drawn_uniformly() -> None:
    def model() -> None:
        pyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), (3,)))

    values, _ = Program(model).draw()
    assert values["scale"].shape == (3,) and (values["scale"] > 0).all()


def test_a_site_that_some_runs_lack_is_named() -> None:
    runs = itertools.count()

    def model() -> None:
        pyro.sample("a", dist.Normal(0.0, 1.0))
        if next(runs) % 2 == 0:
            pyro.sample("b", dist.Normal(0.0, 1.0))

    program = Program(model)
    with pytest.raises(ValueError, match="has site 'b' in some of its runs and not in others"):
        program.draw()
    assert set(program.draw()[0]) == {"a", "b"}
