"""Priors of a network's parameters, and which parameters are meant.

Covers also `nn.selection`.
"""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import constraints

import pyro_sym as ps
from pyro_sym.nn.priors import fan_in, fitted, moved


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))


def model_of(prior: Any, net: nn.Module | None = None, **options: Any) -> ps.BayesianModule:
    return ps.BayesianModule(net or small(), prior, ps.nn.Categorical(), **options)


IID = ps.nn.IIDPrior(dist.Normal(0.0, 1.0))


def log_prior(model: ps.BayesianModule, x: torch.Tensor) -> dict[str, Any]:
    trace = pyro.poutine.trace(model).get_trace(x)
    trace.compute_log_prob()
    return {name: (trace.nodes[name]["value"], trace.nodes[name]["log_prob_sum"]) for name in model.sites}


@pytest.mark.usefixtures("float64")
def test_the_log_prior_is_the_formula() -> None:
    net = small()
    model = model_of(ps.nn.FanInPrior("kaiming", bias_scale=0.5), net)
    fans = {"0.weight": 3, "3.0.weight": 4}
    for name, (value, log_prob) in log_prior(model, torch.randn(5, 3)).items():
        assert value.shape == net.get_parameter(name).shape
        scale = math.sqrt(2 / fans[name]) if name in fans else 0.5
        constant = value.numel() * math.log(scale * math.sqrt(2 * math.pi))
        torch.testing.assert_close(log_prob, -value.square().sum() / (2 * scale**2) - constant)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(7, 3), 7),
        (nn.Conv2d(4, 6, 3), 4 * 9),
        (nn.Conv2d(4, 6, 3, groups=2), 2 * 9),
        (nn.ConvTranspose1d(4, 6, 5), 4 * 5),
        (nn.ConvTranspose1d(4, 6, 5, groups=2), 2 * 5),
        (nn.Embedding(10, 5), 1),
    ],
)
def test_fan_in_counts_the_terms_of_one_output(layer: nn.Module, inputs: int) -> None:
    assert fan_in(layer.get_parameter("weight"), layer) == inputs


def test_the_first_prior_that_fits_is_the_layers() -> None:
    net = small()
    scales: dict[Any, float] = {
        "3.0": 1.0,  # a module's name
        "*.bias": 2.0,
        nn.BatchNorm1d: 3.0,
        net[0].weight: 4.0,
    }
    priors = {key: ps.nn.IIDPrior(dist.Normal(0.0, scale)) for key, scale in scales.items()}
    model = model_of(ps.nn.LayerwisePrior({**priors, "nothing": None}), net)
    found = {name: float(prior.base_dist.scale.flatten()[0]) for name, prior in model._priors.items()}
    assert found == {
        "0.weight": 4.0,
        "0.bias": 2.0,
        "1.weight": 3.0,
        "1.bias": 2.0,
        "3.0.weight": 1.0,
        "3.0.bias": 1.0,
    }
    assert model_of(ps.nn.LayerwisePrior({net[3]: IID, nn.Module: None}), net).sites == (
        "3.0.weight",
        "3.0.bias",
    )
    with pytest.raises(ValueError, match=r"no prior fits parameter '0.bias' in a Linear"):
        model_of(ps.nn.LayerwisePrior({"*.weight": IID}))
    assert len(model_of(ps.nn.LayerwisePrior({"0.weight": IID}, default=IID)).sites) == 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def test_tied_parameters_are_one_site_and_act_everywhere() -> None:
    model = model_of(IID, Tied())
    assert model.sites == ("encoder.weight", "decoder.bias")
    weight, bias, x = torch.randn(5, 3), torch.randn(5), torch.arange(5)
    output = model.predict({"encoder.weight": weight, "decoder.bias": bias}, x).output[0]
    torch.testing.assert_close(output, weight @ weight.T + bias)
    assert model_of(IID, Tied(), hide="decoder.weight").sites == ("decoder.bias",), "a name that is tied"


def test_hide_and_expose_by_name_type_and_instance() -> None:
    net: Any = small()
    last = ("3.0.weight", "3.0.bias")
    for expose in ("3", "3.*", net[3], net[3][0], [net[3][0].weight, "3.0.bias"]):
        assert model_of(IID, net, expose=expose).sites == last
    for hide in (["0", nn.BatchNorm1d], [net[0], net[1]], ["0.*", net[1].weight, "1.bias"]):
        assert model_of(IID, net, hide=hide).sites == last
    assert model_of(IID, net, expose=nn.Linear, hide="*.bias").sites == ("0.weight", "3.0.weight")
    assert model_of(lambda name, p, m: IID(name, p, m) if "bias" in name else None).sites == (
        "0.bias",
        "1.bias",
        "3.0.bias",
    )


@pytest.mark.parametrize("wrong", ["2", nn.Conv2d, nn.Linear(1, 1), "0.wight"])
def test_a_selector_that_means_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="selects no parameter of the network; its parameters are"):
        model_of(IID, hide=[wrong])


def test_selectors_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="3 selects no parameters"):
        model_of(IID, hide=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (lambda *_: 1.0, TypeError, r"prior of parameter '0.weight' is 1.0"),
        (
            lambda *_: torch.distributions.Normal(0.0, 1.0),
            TypeError,
            r"pass Pyro's, pyro.distributions.Normal",
        ),
        (lambda *_: dist.Normal(torch.zeros(7), 1.0), ValueError, r"shape \(7,\), which doesn't broadcast"),
        (lambda *_: dist.MultivariateNormal(torch.zeros(3), torch.eye(3)), ValueError, "'0.bias' has shape"),
        (lambda *_: dist.Bernoulli(0.5), ValueError, "is discrete"),
        (lambda *_: None, ValueError, "no parameter of the network is Bayesian"),
    ],
)
def test_priors_that_do_not_fit_are_refused(prior: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of(prior)


def test_priors_of_other_families_and_full_shapes_fit() -> None:
    weight = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
    spike = dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.5, 0.5])), dist.Normal(torch.zeros(2), torch.tensor([1.0, 0.1]))
    )
    for prior in (
        dist.Laplace(0.0, 1.0),
        dist.StudentT(4.0),
        dist.LogNormal(0.0, 1.0),
        dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.ExpTransform().inv.inv]),
        dist.Normal(torch.zeros(2, 3), 1.0).to_event(2),
        dist.MultivariateNormal(torch.zeros(3), torch.eye(3)),
        spike,
    ):
        fit = fitted(prior, "weight", weight)
        value = fit.sample()
        assert value.shape == weight.shape and value.dtype == torch.float64
        expected = prior.log_prob(value.to(torch.float32)).sum()
        torch.testing.assert_close(fit.log_prob(value).float(), expected, rtol=1e-4, atol=1e-4)


def test_moving_leaves_the_original_and_its_checks_where_they_mean_something() -> None:
    original = dist.LogNormal(0.0, 1.0)
    there = moved(original, torch.zeros((), dtype=torch.float64))
    assert original.base_dist.loc.dtype == torch.float32 and there.base_dist.loc.dtype == torch.float64
    assert there.support is constraints.positive
    with pytest.raises(ValueError, match="support"):
        there.log_prob(torch.tensor(-1.0, dtype=torch.float64))


@pytest.mark.parametrize("wrong", [0.0, -1.0, "xavier"])
def test_gains_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="gain is"):
        ps.nn.FanInPrior(wrong)


def test_a_distribution_stands_for_the_prior_of_every_entry_by_layer() -> None:
    layer: Any = nn.Linear(3, 2)
    prior = ps.nn.LayerwisePrior({"bias": dist.Normal(0.0, 2.0)}, default=dist.Normal(0.0, 3.0))
    assert prior("bias", layer.bias, layer).scale == 2 and prior("weight", layer.weight, layer).scale == 3
