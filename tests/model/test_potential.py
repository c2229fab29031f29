"""The potential against Pyro's own, and against enumeration over all minibatches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor
from torch.distributions import constraints

from pyro_sym.model.potential import Potential
from tests.catalogue import mixture, normal_mean_and_scale

pytestmark = pytest.mark.usefixtures("float64")


def normal_model() -> None:
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.Normal(loc.sum(), 1.0), obs=torch.arange(4.0))


def constrained_model() -> None:
    with pyro.plate("groups", 2):
        scale = pyro.sample("scale", dist.LogNormal(torch.zeros(2), 0.5))
        weights = pyro.sample("weights", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    interval = pyro.sample("interval", dist.Uniform(-1.0, torch.tensor([2.0, 3.0])).to_event(1))
    corr = pyro.sample("corr", dist.LKJCholesky(3, 2.0))
    mean = interval.sum() + (weights * torch.arange(3.0)).sum() + corr.sum()
    pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=torch.tensor([0.3, 1.2]))


mixture_model = functools.partial(mixture, torch.tensor([-2.0, -1.0, 0.0, 1.0, 5.0]), k=2)


def scaled_and_masked_model() -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.poutine.scale(scale=2.5):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", 3), pyro.poutine.mask(mask=torch.BoolTensor([True, False, True])):
        pyro.sample("y", dist.Normal(loc, rate), obs=torch.arange(3.0))


MODELS = [normal_model, constrained_model, mixture_model, scaled_and_masked_model]


@pytest.mark.parametrize("model", MODELS)
def test_value_and_gradient_are_those_of_pyro(model: Callable[[], None]) -> None:
    params, pyros, _, _ = initialize_model(model)
    params = {name: value.detach().requires_grad_() for name, value in params.items()}
    expected = pyros(params)
    gradients = dict(zip(params, torch.autograd.grad(expected, list(params.values())), strict=True))
    potential = Potential(model)

    assert set(potential.shapes) == set(params)
    torch.testing.assert_close(potential(params), expected, rtol=0, atol=1e-10)
    energy, gradient = potential.value_and_grad(potential.flatten(params))
    torch.testing.assert_close(energy, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(potential.unflatten(gradient), gradients, rtol=0, atol=1e-10)
    assert not energy.requires_grad and not gradient.requires_grad


def test_gradient_is_that_of_central_differences() -> None:
    potential = Potential(constrained_model)
    position = potential.flatten(potential.initial())
    _, gradient = potential.value_and_grad(position)
    steps = 1e-5 * torch.eye(potential.size)
    ahead = torch.stack([potential(potential.unflatten(position + step)) for step in steps])
    behind = torch.stack([potential(potential.unflatten(position - step)) for step in steps])
    torch.testing.assert_close(gradient, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-6)


def test_constrain_and_unconstrain_are_inverse_and_feasible() -> None:
    potential = Potential(constrained_model)
    params = potential.initial()
    values = potential.constrain(params)
    torch.testing.assert_close(potential.unconstrain(values), params)
    torch.testing.assert_close(potential.unflatten(potential.flatten(params)), params, rtol=0, atol=0)
    for name, site in potential.program.latents.items():
        assert site.support.check(values[name]).all(), name
        torch.testing.assert_close(potential.transforms[name](values[name]), params[name])
    assert potential.size == 2 + 2 * 2 + 2 + 3


def test_gradient_is_taken_under_no_grad_too() -> None:
    potential = Potential(normal_model)
    position = torch.ones(3)
    _, expected = potential.value_and_grad(position)
    with torch.no_grad():
        _, gradient = potential.value_and_grad(position)
    assert gradient.abs().min() > 0
    torch.testing.assert_close(gradient, expected)


def index_grid(rows: Any, columns: Any) -> tuple[Tensor, Tensor]:
    return rows[:, None], columns


def nested_model(data: Tensor, size: int | None) -> None:
    """Two nested subsampled plates (crossed index sets), one of them also around a site of its own."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("columns", data.shape[1], subsample_size=size, dim=-1) as column:
        pyro.sample("x", dist.Normal(loc, 2.0), obs=data[0, column])
        with pyro.plate("rows", data.shape[0], subsample_size=size, dim=-2) as row:
            pyro.sample("y", dist.Normal(loc, scale), obs=data[index_grid(row, column)])


def crossed_model(data: Tensor, size: int | None) -> None:
    """Two subsampled plates beside each other, crossed by a third site."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    columns = pyro.plate("columns", data.shape[1], subsample_size=size, dim=-1)
    rows = pyro.plate("rows", data.shape[0], subsample_size=size, dim=-2)
    with columns as column:
        pyro.sample("x", dist.Normal(loc, 2.0), obs=data[0, column])
    with rows as row:
        pyro.sample("w", dist.Normal(0.0, scale), obs=data[row, :1])
    with columns as column, rows as row:
        pyro.sample("y", dist.Normal(loc, scale), obs=data[index_grid(row, column)])


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        (normal_mean_and_scale, (5,), 2),
        (functools.partial(mixture, k=2), (5,), 2),
        (nested_model, (4, 3), 2),
        (crossed_model, (4, 3), 2),
    ],
)
def test_minibatches_are_unbiased(
    model: Callable[[Tensor, int | None], None], shape: tuple[int, ...], count: int
) -> None:
    data = torch.randn(shape)
    full, part = Potential(model, (data, None)), Potential(model, (data, count))
    position = full.flatten(full.initial())
    plates = part.program.plates
    assert len(plates) == len(shape) and not full.program.plates
    choices = [list(itertools.combinations(range(p.size), p.subsample_size)) for p in plates.values()]
    assert math.prod(map(len, choices)) == math.prod(math.comb(n, count) for n in shape)
    results = []
    for sets in itertools.product(*choices):
        indices = {name: torch.tensor(rows) for name, rows in zip(plates, sets, strict=True)}
        results.append(part.value_and_grad(position, indices))
    energies, gradients = (torch.stack(values) for values in zip(*results, strict=True))

    energy, gradient = full.value_and_grad(position)
    assert energies.std() > 0.1 and gradients.std(0).min() > 0.01, (
        "minibatches must differ for this to say anything"
    )
    torch.testing.assert_close(energies.mean(), energy, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients.mean(0), gradient, rtol=0, atol=1e-10)


def test_params_are_held_fixed() -> None:
    def model() -> None:
        scale = pyro.param("scale", torch.tensor(2.0), constraint=constraints.positive)
        pyro.sample("x", dist.Normal(0.0, scale))

    potential = Potential(model)
    energy, gradient = potential.value_and_grad(torch.tensor([3.0]))
    torch.testing.assert_close(gradient, torch.tensor([3.0 / 4.0]))
    torch.testing.assert_close(energy, -dist.Normal(0.0, 2.0).log_prob(torch.tensor(3.0)))
    assert pyro.get_param_store()["scale"].unconstrained().grad is None  # type: ignore[attr-defined]


def test_local_latents_in_a_subsampled_plate_are_refused() -> None:
    def model(count: int) -> None:
        with pyro.plate("people", 6, subsample_size=count):
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(effect, 1.0), obs=torch.zeros(count))

    with pytest.raises(ValueError, match=r"'effect' is inside .* plate 'people'.*subsample_size"):
        Potential(model, (2,))
    assert Potential(model, (6,)).size == 6


def test_models_without_continuous_latents_are_refused() -> None:
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(z, 1.0), obs=torch.tensor(0.0))

    with pytest.raises(ValueError, match="no continuous latent site"):
        Potential(model)


def test_discrete_latents_that_cannot_be_enumerated_are_refused() -> None:
    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(1.0, 1.0))
        pyro.sample("count", dist.Poisson(rate))

    with pytest.raises(ValueError, match="'count' is discrete and can't be enumerated"):
        Potential(model)


def test_supports_that_move_are_refused() -> None:
    def model() -> None:
        top = pyro.sample("top", dist.LogNormal(0.0, 1.0))
        pyro.sample("x", dist.Uniform(0.0, top))

    with pytest.raises(ValueError, match="support of latent site 'x' depends on other latent sites"):
        Potential(model)


def test_missing_indices_and_values_are_named() -> None:
    potential = Potential(normal_mean_and_scale, (torch.randn(5), 2))
    with pytest.raises(ValueError, match="plate 'data' shows 2 of 5 rows and has no indices"):
        potential(potential.initial())


def test_initial_tries_until_the_point_is_finite() -> None:
    tries: list[float] = []

    def strategy(site: Any) -> Tensor:
        tries.append(0.5 if len(tries) >= 4 else -0.5)
        return torch.tensor(tries[-1])

    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.where(x > 0, torch.zeros(()), torch.tensor(-math.inf)))

    params = Potential(model, init_strategy=strategy).initial()
    assert params["x"] == 0.5 and len(tries) == 5


def test_initial_names_the_sites_at_fault() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("fine", dist.Normal(x, 1.0), obs=torch.tensor(0.0))
        pyro.sample("broken", dist.Normal(x, 1.0), obs=torch.tensor(math.inf))

    with pyro.validation_enabled(False), pytest.raises(ValueError, match="in 3 draws") as error:
        Potential(model).initial(num_tries=3)
    assert "log probability of site 'broken'" in str(error.value)
    assert "'fine'" not in str(error.value)


def test_initial_looks_at_the_gradient() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("kink", -x.abs().sqrt())

    strategy = init_to_value(values={"x": torch.tensor(0.0)})
    with pytest.raises(ValueError, match="gradient at site 'x'"):
        Potential(model, init_strategy=strategy).initial(num_tries=2)


def test_construction_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    Potential(normal_mean_and_scale, (torch.ones(5), 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("support", "shape"),
    [(constraints.positive, (3,)), (constraints.real_vector, (3,)), (constraints.simplex, (2,))],
)
def test_improper_priors_are_flat_and_have_starting_points(
    support: constraints.Constraint, shape: tuple[int, ...]
) -> None:
    """Pyro's strategies draw from a site to see its shape, which such a site refuses."""
    batch, event = ((3,), ()) if support.event_dim == 0 else ((), (3,))

    def model() -> None:
        x = pyro.sample("x", dist.ImproperUniform(support, batch, event).to_event(1 - support.event_dim))
        pyro.factor("linear", x.sum())

    potential = Potential(model)
    start = potential.initial()
    assert start["x"].shape == shape and (start["x"].abs() < 2).all()
    transform = potential.transforms["x"]
    values = potential.constrain(start)["x"]
    log_det = transform.log_abs_det_jacobian(values, start["x"]).sum()
    torch.testing.assert_close(potential(start), log_det - values.sum())
