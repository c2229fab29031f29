"""Test ``allocation_probabilities``: responsibilities in closed form, and smoothing by enumeration."""

from __future__ import annotations

import itertools
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym import Permutation, align_allocations, allocation_probabilities
from tests.catalogue import mixture as enumerated
from tests.catalogue import mixture_allocations, normals

pytestmark = pytest.mark.usefixtures("float64")

Y = torch.tensor([-1.0, 0.5, 2.0, 4.0])


summed = partial(enumerated, allocations=False)


def draws(count: int) -> dict[str, Tensor]:
    return {"weights": torch.rand(count, 3).softmax(-1), "locs": 2 * torch.randn(count, 3)}


def closed_form(values: dict[str, Tensor]) -> Tensor:
    return mixture_allocations(Y, **values)


@pytest.mark.parametrize("model", [enumerated, summed])
def test_mixtures_are_those_in_closed_form(model) -> None:
    values = draws(6)
    state = torch.get_rng_state()
    p = allocation_probabilities(model, (Y,))({**values, "unused": torch.zeros(6)})
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(p, closed_form(values))


def test_a_scale_on_the_likelihood_cancels() -> None:
    values = draws(3)
    scaled = allocation_probabilities(pyro.poutine.scale(enumerated, 7.0), (Y,))
    torch.testing.assert_close(scaled(values), closed_form(values))


def test_events_of_several_dims() -> None:
    y = torch.randn(5, 2)

    def model() -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3, 2), 3.0).to_event(2))
        components = dist.Normal(locs, 1.0).to_event(1)
        with pyro.plate("data", 5):
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), components), obs=y)

    locs = torch.randn(4, 3, 2)
    expected = -(locs.unsqueeze(1) - y[:, None]).square().sum(-1) / 2
    p = allocation_probabilities(model)({"locs": locs})
    torch.testing.assert_close(p, expected.softmax(-1))


def chain(y: Tensor) -> None:
    """A hidden Markov model with two states."""
    trans = pyro.sample("trans", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    z = torch.tensor(0)
    for t in pyro.markov(range(len(y))):
        z = pyro.sample(f"z_{t}", dist.Categorical(trans[z]))
        pyro.sample(f"y_{t}", dist.Normal(locs[z], 1.0), obs=y[t])


def test_a_hidden_markov_model_is_smoothed() -> None:
    """Marginals of the posterior of all state sequences, by enumeration of these."""
    values = {"trans": torch.rand(3, 2, 2).softmax(-1), "locs": 2 * torch.randn(3, 2)}
    expected = torch.zeros(3, 4, 2)
    for m in range(3):
        for path in itertools.product(range(2), repeat=4):
            steps = values["trans"][m][torch.tensor([0, *path[:-1]]), torch.tensor(path)]
            emissions = dist.Normal(values["locs"][m][torch.tensor(path)], 1.0).log_prob(Y).exp()
            expected[m, torch.arange(4), torch.tensor(path)] += steps.prod() * emissions.prod()
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(allocation_probabilities(chain, (Y,))(values), expected)
    third = allocation_probabilities(chain, (Y,), site="z_2")(values)
    torch.testing.assert_close(third, expected[:, 2:3])


def test_negative_control_filtering_is_not_smoothing() -> None:
    """Without the data that follow, the first state has other probabilities."""
    values = {"trans": torch.rand(3, 2, 2).softmax(-1), "locs": 2 * torch.randn(3, 2)}
    whole = allocation_probabilities(chain, (Y,), site="z_0")(values)
    first = allocation_probabilities(chain, (Y[:1],))(values)
    assert (whole - first).abs().max() > 0.01


def test_labels_by_a_models_allocations() -> None:
    y = torch.cat([torch.randn(20) - 5, torch.randn(20) + 5])
    model = partial(enumerated, y, k=2, scale=5.0, equal_weights=True)
    locs = torch.tensor([-5.0, 5.0]) + 0.2 * torch.randn(60, 2)
    locs[::2] = locs[::2].flip(-1)
    alignment = align_allocations({"locs": locs}, Permutation({"locs": -1}), allocation_probabilities(model))
    assert alignment.samples["locs"].std(0).max() < 0.5 < locs.std(0).min()


def test_models_without_allocations_are_refused() -> None:
    def subsampled() -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
        with pyro.plate("data", 10, subsample_size=3):
            pyro.sample("z", dist.Categorical(weights))

    def several() -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
        pyro.sample("a", dist.Categorical(weights))
        pyro.sample("b", dist.Categorical(torch.ones(3)))

    with pytest.raises(ValueError, match="no discrete site to enumerate"):
        allocation_probabilities(normals({"x": ()}))
    with pytest.raises(ValueError, match=r"no discrete site 'locs': enumerable latent sites are \['z'\]"):
        allocation_probabilities(enumerated, (Y,), site="locs")
    with pytest.raises(ValueError, match="plate 'data' shows 3 of its 10 rows"):
        allocation_probabilities(subsampled)
    with pytest.raises(ValueError, match=r"different numbers of components, \[2, 3\]; name one as site"):
        allocation_probabilities(several)({"weights": torch.ones(1, 2) / 2})


def test_latent_sites_and_parameters_with_a_mixture_for_a_prior_are_no_data() -> None:
    def model(y: Tensor) -> None:
        both = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), 1.0))
        pyro.sample("slab", both)
        pyro.sample("spike", both)
        summed(y)

    values = draws(6)
    fixed = pyro.poutine.condition(model, {"spike": torch.tensor(1.0)})
    p = allocation_probabilities(fixed, (Y,))({**values, "slab": torch.randn(6)})
    torch.testing.assert_close(p, closed_form(values))


def test_deterministic_sites_and_data_by_condition() -> None:
    def model() -> None:
        summed_ = pyro.poutine.condition(summed, {"y": Y})
        summed_(torch.zeros(4))
        pyro.deterministic("y_mean", Y.mean())

    values = draws(6)
    torch.testing.assert_close(allocation_probabilities(model)(values), closed_form(values))


def test_wrong_calls_say_how_it_is_called() -> None:
    values = draws(6)
    for args in ((values, Y), (values,), (Y,), ((Y,), Y)):
        with pytest.raises(
            TypeError, match=r"a tuple and a dict .* allocation_probabilities\(model, \(x,\)\)"
        ):
            allocation_probabilities(summed, *args)
    found = allocation_probabilities(summed, (Y,))
    with pytest.raises(ValueError, match=r"no draws of the latent site 'locs', but of \['weights'\]"):
        found({"weights": values["weights"]})
    with pytest.raises(ValueError, match=r"'weights' have shape \(1, 6, 3\), where \(m, \*shape\)"):
        found({name: value.unsqueeze(0) for name, value in values.items()})
    with pytest.raises(ValueError, match="there are no draws"):
        found(draws(0))
    torch.testing.assert_close(allocation_probabilities(summed, [Y])(values), closed_form(values))
