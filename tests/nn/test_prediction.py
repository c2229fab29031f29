"""Likelihoods, and what many draws together say of new rows.

Covers also `nn.likelihoods`.
"""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_sym as ps

IID = ps.nn.IIDPrior(dist.Normal(0.0, 1.0))
LIKELIHOODS: dict[str, ps.nn.Likelihood] = {
    "categorical": ps.nn.Categorical(),
    "bernoulli": ps.nn.Bernoulli(),
    "known": ps.nn.Gaussian(torch.tensor([0.5, 1.0, 2.0, 3.0])),
    "unknown": ps.nn.Gaussian(dist.LogNormal(0.0, 1.0)),
    "unknown by output": ps.nn.Gaussian(dist.LogNormal(torch.zeros(4), 1.0)),
    "heteroskedastic": ps.nn.HeteroskedasticGaussian(),
    "poisson": ps.nn.Poisson(),
}
S, ROWS = 7, 5


def setting(name: str) -> tuple[ps.BayesianModule, dict[str, Tensor], Tensor, Tensor]:
    """A model, draws of its prior, rows, and targets."""
    torch.set_default_dtype(torch.float64)
    model = ps.BayesianModule(nn.Linear(3, 4), IID, LIKELIHOODS[name])
    draws = {site: prior.sample((S,)) for site, prior in model._priors.items()}
    x = torch.randn(ROWS, 3)
    return model, draws, x, model(x)


def laws(name: str, model: ps.BayesianModule, draws: dict[str, Tensor], x: Tensor) -> list[Any]:
    """Draw by draw, from torch's own distributions and the formulas."""
    found: list[Any] = []
    for s in range(S):
        output = x @ draws["weight"][s].T + draws["bias"][s]
        match name:
            case "categorical":
                found.append(torch.distributions.Categorical(probs=output.softmax(-1)))
            case "bernoulli":
                found.append(torch.distributions.Bernoulli(probs=output.sigmoid()))
            case "poisson":
                found.append(torch.distributions.Poisson(output.exp()))
            case "heteroskedastic":
                scale = 1e-3 + (1 + output[:, 2:].exp()).log()
                found.append(torch.distributions.Normal(output[:, :2], scale))
            case "known":
                found.append(torch.distributions.Normal(output, torch.tensor([0.5, 1.0, 2.0, 3.0])))
            case _:
                found.append(torch.distributions.Normal(output, draws["noise_scale"][s]))
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_predict_is_a_loop_over_draws(name: str) -> None:
    model, draws, x, y = setting(name)
    found = laws(name, model, draws, x)
    by_draw = torch.stack([law.log_prob(y).reshape(ROWS, -1).sum(-1) for law in found])
    expected = by_draw.logsumexp(0) - math.log(S)
    for chunk_size in (64, 3, 1):
        prediction = model.predict(draws, x, chunk_size=chunk_size)
        torch.testing.assert_close(prediction.log_prob(y), expected)
    if name != "categorical":
        torch.testing.assert_close(prediction.mean, torch.stack([law.mean for law in found]).mean(0))
    if name in ("categorical", "bernoulli"):
        torch.testing.assert_close(prediction.probs, torch.stack([law.probs for law in found]).mean(0))
    # Of the mean of log densities, by Jensen, it is another number.
    assert (prediction.log_prob(y) > by_draw.mean(0)).all()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_entropy_is_split_into_expected_entropy_and_mutual_information(name: str) -> None:
    model, draws, x, _ = setting(name)
    found = laws(name, model, draws, x)
    probs = torch.stack([law.probs for law in found])
    if name == "bernoulli":
        probs = torch.stack([probs, 1 - probs], dim=-1)
    mixture = probs.mean(0)
    entropy = model.predict(draws, x).entropy
    torch.testing.assert_close(entropy.total, -(mixture * mixture.log()).sum(-1))
    torch.testing.assert_close(entropy.aleatoric, -(probs * probs.log()).sum(-1).mean(0))
    divergence = (probs * (probs / mixture).log()).sum(-1).mean(0)
    torch.testing.assert_close(entropy.epistemic, divergence)
    torch.testing.assert_close(entropy.total, entropy.aleatoric + entropy.epistemic)
    assert (entropy.epistemic > 0).all()
    point = {site: value[:1].expand_as(value) for site, value in draws.items()}
    assert model.predict(point, x).entropy.epistemic.abs().max() < 1e-12


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "categorical"])
def test_variance_is_split_by_the_law_of_total_variance(name: str) -> None:
    model, draws, x, _ = setting(name)
    found = laws(name, model, draws, x)
    means, variances = (torch.stack([getattr(law, a) for law in found]) for a in ("mean", "variance"))
    total = (variances + means**2).mean(0) - means.mean(0) ** 2
    variance = model.predict(draws, x).variance
    torch.testing.assert_close(variance.total, total)
    torch.testing.assert_close(variance.aleatoric, variances.mean(0))
    torch.testing.assert_close(variance.total, variance.aleatoric + variance.epistemic)


def test_logits_far_out_keep_their_entropy() -> None:
    """In probabilities they would round to 0 and 1."""
    likelihood = ps.nn.Bernoulli()
    law = likelihood.law(torch.tensor([[[40.0]], [[-200.0]]]))
    mixture = likelihood.mixture(law)
    torch.testing.assert_close(mixture.logits, torch.zeros(1, 1))
    tail = likelihood.mixture(likelihood.law(torch.full((3, 1, 1), 60.0)))
    torch.testing.assert_close(tail.logits, torch.full((1, 1), 60.0), rtol=1e-4, atol=0.0)


def test_draws_grouped_by_chain_and_single_points() -> None:
    model, draws, x, _ = setting("unknown")
    grouped = {name: torch.stack([value, value + 1]) for name, value in draws.items()}
    prediction = model.predict({**grouped, "other": torch.zeros(3)}, x)
    assert prediction.output.shape == (2 * S, ROWS, 4)
    torch.testing.assert_close(prediction.output[:S], model.predict(draws, x).output)
    point = model.predict({name: value[0] for name, value in draws.items()}, x)
    torch.testing.assert_close(point.output, prediction.output[:1])
    assert not point.output.requires_grad


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def test_networks_that_vmap_can_not_take_run_draw_by_draw() -> None:
    model = ps.BayesianModule(Recurrent(), ps.nn.FanInPrior(), ps.nn.Categorical())
    draws = {name: prior.sample((3,)) for name, prior in model._priors.items()}
    x = torch.randn(5, 6, 3)
    with pytest.raises(RuntimeError, match="Pass chunk_size=1 to predict"):
        model.predict(draws, x)
    prediction = model.predict(draws, x, chunk_size=1)
    first = {name: value[0] for name, value in draws.items()}
    torch.testing.assert_close(prediction.output[0], torch.func.functional_call(model.net, first, (x,)))


def test_draws_that_do_not_fit_are_refused() -> None:
    model, draws, x, _ = setting("unknown")
    with pytest.raises(ValueError, match="draws have no site 'noise_scale'; the model's sites are"):
        model.predict({name: draws[name] for name in ("weight", "bias")}, x)
    with pytest.raises(ValueError, match=r"'weight' have shape \(7, 3, 4\), which does not end in"):
        model.predict({**draws, "weight": draws["weight"].mT}, x)
    with pytest.raises(ValueError, match=r"different numbers of draws: {'weight': 7, 'bias': 2"):
        model.predict({**draws, "bias": draws["bias"][:2]}, x)


@pytest.mark.parametrize(
    ("likelihood", "width", "y", "message"),
    [
        (ps.nn.Categorical(), 2, torch.zeros(5), "dtype torch.float32, but classes are integers"),
        (ps.nn.Categorical(), 2, torch.zeros(5, 1, dtype=torch.long), r"pass y.squeeze\(-1\)"),
        (
            ps.nn.Categorical(),
            2,
            torch.zeros(4, dtype=torch.long),
            r"\(4,\), but an output of shape \(5, 2\)",
        ),
        (ps.nn.Gaussian(1.0), 1, torch.zeros(5), r"take one of shape \(5, 1\); pass y.unsqueeze\(-1\)"),
        (ps.nn.Gaussian(1.0), 2, torch.zeros(5), r"has shape \(5,\), but an output of shape \(5, 2\)"),
        (ps.nn.Bernoulli(), 1, torch.zeros(5), r"pass y.unsqueeze\(-1\), or squeeze the output"),
        (ps.nn.Poisson(), 1, torch.zeros(5, 2), r"take one of shape \(5, 1\)"),
        (ps.nn.HeteroskedasticGaussian(), 2, torch.zeros(5, 2), r"take one of shape \(5, 1\)"),
        (ps.nn.HeteroskedasticGaussian(), 3, torch.zeros(5, 3), "its last axis has to be even"),
    ],
)
def test_targets_of_other_shapes_are_refused(
    likelihood: ps.nn.Likelihood, width: int, y: Tensor, message: str
) -> None:
    """Broadcasting would make a log likelihood of 25 terms of 5 rows and 5 targets."""
    model = ps.BayesianModule(nn.Linear(3, width), IID, likelihood)
    x = torch.randn(5, 3)
    with pytest.raises(ValueError, match=message):
        model(x, y)
    if width != 3:
        with pytest.raises(ValueError, match=message):
            model.predict({name: prior.sample() for name, prior in model._priors.items()}, x).log_prob(y)


def test_a_flat_target_fits_a_flat_output() -> None:
    body = nn.Sequential(nn.Linear(3, 1), nn.Flatten(-2))
    model = ps.BayesianModule(body, IID, ps.nn.Gaussian(dist.HalfNormal(1.0)))
    x, y = torch.randn(5, 3), torch.randn(5)
    model(x, y)
    draws = {name: prior.sample((4,)) for name, prior in model._priors.items()}
    assert model.predict(draws, x).variance.total.shape == (5,)


def test_classes_at_several_places_of_a_row() -> None:
    model = ps.BayesianModule(nn.Linear(3, 4), IID, ps.nn.Categorical())
    x, y = torch.randn(5, 6, 3), torch.randint(4, (5, 6))
    model(x, y)
    draws = {name: prior.sample((2,)) for name, prior in model._priors.items()}
    prediction = model.predict(draws, x)
    assert prediction.log_prob(y).shape == (5,) and prediction.entropy.total.shape == (5, 6)


def test_what_a_likelihood_has_not_is_refused_with_what_it_has() -> None:
    model, draws, x, _ = setting("categorical")
    for what in ("mean", "variance"):
        with pytest.raises(ValueError, match="use probs or entropy"):
            getattr(model.predict(draws, x), what)
    for name in ("known", "poisson"):
        model, draws, x, _ = setting(name)
        for what in ("entropy", "probs"):
            with pytest.raises(ValueError, match="mean and variance have one"):
                getattr(model.predict(draws, x), what)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
def test_numbers_of_rows_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="num_data is"):
        ps.nn.Categorical(num_data=wrong)


def test_a_noise_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale is -1.0; pass what is > 0"):
        ps.nn.Gaussian(-1.0)


class Laplace(ps.nn.Likelihood):
    def law(self, output: Tensor, **parameters: Tensor) -> Any:
        return dist.Laplace(output, 1.0)


def test_a_likelihood_of_ones_own() -> None:
    model = ps.BayesianModule(nn.Linear(3, 1), IID, Laplace(num_data=10))
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    model(x, y)
    draws = {name: prior.sample((4,)) for name, prior in model._priors.items()}
    torch.testing.assert_close(model.predict(draws, x).variance.aleatoric, torch.full((5, 1), 2.0))
