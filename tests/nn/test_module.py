"""Networks as Pyro models: the density is the formula, and everything that takes a model takes them."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import pyro_sym as ps
from tests.conftest import Z_LIMIT

IID = ps.nn.IIDPrior(dist.Normal(0.0, 1.0))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(rows: int = 20) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3), torch.randint(2, (rows,))


def log_joint(model: Any, values: dict[str, Tensor], *args: Any) -> Tensor:
    conditioned = pyro.poutine.condition(model, data=values)
    return pyro.poutine.trace(conditioned).get_trace(*args).log_prob_sum()


def point(model: ps.BayesianModule) -> dict[str, Tensor]:
    """A draw of the prior."""
    return {name: prior.sample() for name, prior in model._priors.items()}


class ByPyroSample(PyroModule):
    """The network of `net` as Pyro's own documentation writes it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.first, self.second = PyroModule[nn.Linear](3, 4), PyroModule[nn.Linear](4, 2)
        for layer, name in itertools.product((self.first, self.second), ("weight", "bias")):
            shape = getattr(layer, name).shape
            setattr(layer, name, PyroSample(dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.second(torch.tanh(self.first(x)))
        with pyro.plate("data", self.rows, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


@pytest.mark.usefixtures("float64")
def test_log_joint_and_gradient_are_those_of_pyro_samples() -> None:
    x, y = data()
    ours, theirs = ps.BayesianModule(net(), IID, ps.nn.Categorical(num_data=50)), ByPyroSample(50)
    values = {name: value.requires_grad_() for name, value in point(ours).items()}
    renamed = {n.replace("0.", "first.").replace("2.", "second."): v for n, v in values.items()}
    energies = log_joint(ours, values, x, y), log_joint(theirs, renamed, x, y)
    torch.testing.assert_close(*energies, rtol=1e-12, atol=0.0)
    gradients = [torch.autograd.grad(energy, list(values.values())) for energy in energies]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)
    # A wrong number of rows is another density.
    wrong = log_joint(ps.BayesianModule(net(), IID, ps.nn.Categorical()), values, x, y)
    assert (wrong - energies[1]).detach().abs() > 1


@pytest.mark.usefixtures("float64")
def test_gradients_of_a_guide_are_those_of_pyro_samples() -> None:
    x, y = data()
    gradients = []
    for model in (ps.BayesianModule(net(), IID, ps.nn.Categorical(num_data=50)), ByPyroSample(50)):
        pyro.clear_param_store()
        guide = AutoNormal(model)
        guide(x, y)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        pyro.set_rng_seed(1)
        Trace_ELBO().differentiable_loss(model, guide, x, y).backward()
        gradients.append([parameter.grad for parameter in guide.parameters()])
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("own_plate", [False, True])
def test_minibatches_are_unbiased(own_plate: bool) -> None:
    x, y = data(6)
    if own_plate:
        model = ps.BayesianModule(net(), IID, ps.nn.Categorical(), batch_size=2)
        full = ps.BayesianModule(model.net, IID, ps.nn.Categorical())
    else:
        model = full = ps.BayesianModule(net(), IID, ps.nn.Categorical(num_data=6))
    values = point(model)

    def on(rows: Tensor) -> Tensor:
        if own_plate:
            return log_joint(model, {**values, "data": rows}, x, y)
        return log_joint(model, values, x[rows], y[rows])

    batches = [on(torch.tensor(rows)) for rows in itertools.combinations(range(6), 2)]
    torch.testing.assert_close(torch.stack(batches).mean(), log_joint(full, values, x, y))
    # Unscaled, they would not be.
    unscaled = ps.BayesianModule(model.net, IID, ps.nn.Categorical())
    wrong = [
        log_joint(unscaled, values, x[list(rows)], y[list(rows)])
        for rows in itertools.combinations(range(6), 2)
    ]
    assert abs(float(torch.stack(wrong).mean() - log_joint(full, values, x, y))) > 0.1


def conjugate() -> tuple[ps.BayesianModule, Tensor, Tensor, Tensor, Tensor]:
    """Linear regression with its exact posterior: mean and covariance of (weights, bias)."""
    x = torch.randn(30, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 + 0.5 * torch.randn(30, 1)
    model = ps.BayesianModule(nn.Linear(2, 1), ps.nn.IIDPrior(dist.Normal(0.0, 2.0)), ps.nn.Gaussian(0.5))
    design = torch.cat([x, torch.ones(30, 1)], dim=1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3) / 4)
    return model, x, y, covariance @ design.T @ y.squeeze(-1) / 0.25, covariance


@pytest.mark.usefixtures("float64")
def test_the_posterior_of_a_linear_layer_by_a_guide() -> None:
    """The evidence is the density of y, and the exact posterior as guide has no variance."""
    model, x, y, mean, covariance = conjugate()
    guide = AutoMultivariateNormal(model)
    guide(x, y)
    with torch.no_grad():
        guide.loc.copy_(mean)
        factor = torch.linalg.cholesky(covariance)
        guide.scale = factor.diag()
        guide.scale_tril = factor / factor.diag().unsqueeze(-1)
    design = torch.cat([x, torch.ones(30, 1)], dim=1)
    evidence = dist.MultivariateNormal(torch.zeros(30), 4 * design @ design.T + 0.25 * torch.eye(30))
    for _ in range(3):
        elbo = -Trace_ELBO().loss(model, guide, x, y)
        assert elbo == pytest.approx(float(evidence.log_prob(y.squeeze(-1))), abs=1e-8)


@pytest.mark.usefixtures("float64")
def test_the_posterior_of_a_linear_layer_by_a_chain() -> None:
    model, x, y, mean, covariance = conjugate()
    kernel = ps.BAOA(model, step_size=0.05, friction=2.0)
    mcmc = ps.VectorizedMCMC(
        kernel, num_samples=100, warmup_steps=50, num_chains=100, thinning=5, disable_progbar=True
    )
    mcmc.run(x, y)
    draws = mcmc.get_samples(group_by_chain=True)
    theta = torch.cat([draws["weight"].flatten(-2), draws["bias"]], dim=-1)
    by_chain = theta.mean(1)
    z = (by_chain.mean(0) - mean) / (by_chain.std(0) / math.sqrt(len(by_chain)))
    assert z.abs().max() < Z_LIMIT
    second = ((theta - mean) ** 2).mean(1)
    z = (second.mean(0) - covariance.diag()) / (second.std(0) / math.sqrt(len(second)))
    assert z.abs().max() < Z_LIMIT
    # The posterior under another noise is far from it.
    assert ((second.mean(0) - 2 * covariance.diag()) / (second.std(0) / 10)).abs().min() > Z_LIMIT


@pytest.mark.parametrize("likelihood", ["known", "unknown"])
@pytest.mark.parametrize("batches", [False, True])
def test_chains_run_on_the_graph(likelihood: str, batches: bool) -> None:
    """A model that can't be traced would warn, and a warning fails the suite."""
    noise = 0.5 if likelihood == "known" else dist.LogNormal(0.0, 1.0)
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    num_data, size = (20, None) if batches else (None, 5)
    model = ps.BayesianModule(body, IID, ps.nn.Gaussian(noise, num_data=num_data), batch_size=size)
    kernel = ps.BAOA.from_sgd(
        model,
        lr=1e-3,
        momentum=0.9,
        num_data=20,
        init_strategy=model.init_to_pretrained,
        batches=[(x[:10], y[:10]), (x[10:], y[10:])] if batches else None,
    )
    mcmc = ps.VectorizedMCMC(kernel, num_samples=3, warmup_steps=1, num_chains=4, disable_progbar=True)
    mcmc.run(*() if batches else (x, y))
    draws = mcmc.get_samples(group_by_chain=True)
    assert tuple(draws) == model.sites
    assert model.predict(draws, x).mean.shape == (20, 1)


def test_at_temperature_zero_a_chain_is_the_optimiser() -> None:
    """SGD with momentum on the mean loss and its weight decay, from the pretrained values."""
    body, (x, y) = net(), data()
    model = ps.BayesianModule(body, IID, ps.nn.Categorical(num_data=20))
    kernel = ps.BAOA.from_sgd(
        model, lr=0.1, momentum=0.9, num_data=20, temperature=0.0, init_strategy=model.init_to_pretrained
    )
    mcmc = ps.VectorizedMCMC(kernel, num_samples=5, warmup_steps=0, disable_progbar=True)
    mcmc.run(x, y)
    optimiser = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9, weight_decay=1 / 20)
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(body(x), y).backward()
        optimiser.step()
    for name, parameter in body.named_parameters():
        torch.testing.assert_close(mcmc.get_samples()[name][-1], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_guides_and_chains_start_at_the_pretrained_values() -> None:
    body: Any = net()
    x, y = data()
    model = ps.BayesianModule(body, IID, ps.nn.Categorical())
    pretrained = {name: p.detach().clone() for name, p in body.named_parameters()}
    with torch.no_grad():
        body[0].weight.zero_()  # what happens to the network later has no effect
    guide = AutoNormal(model, init_loc_fn=model.init_to_pretrained)
    guide(x, y)
    for name, value in guide.median().items():
        torch.testing.assert_close(value, pretrained[name])
    start = ps.Potential(model, (x, y), init_strategy=model.init_to_pretrained).initial()
    for name, value in start.items():
        torch.testing.assert_close(value, pretrained[name])
    half = ps.BayesianModule(body, ps.nn.IIDPrior(dist.HalfNormal(1.0)), ps.nn.Categorical())
    with pytest.raises(ValueError, match=r"own value of '.*' is outside of its prior's support"):
        AutoNormal(half, init_loc_fn=half.init_to_pretrained)(x, y)


@pytest.mark.parametrize("hidden", ["fixed", "param"])
def test_hidden_parameters_are_fixed_or_trained(hidden: Any) -> None:
    body: Any = net()
    x, y = data()
    model = ps.BayesianModule(body, IID, ps.nn.Categorical(), expose=body[-1], hidden=hidden)
    before = body[0].weight.detach().clone()
    guide = AutoNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(3):
        svi.step(x, y)
    store = pyro.get_param_store()
    assert (set(store.keys()) & {"0.weight", "0.bias"} == set()) == (hidden == "fixed")
    assert torch.equal(model.net.get_parameter("0.weight"), before) and torch.equal(body[0].weight, before)
    first = before if hidden == "fixed" else store["0.weight"]
    bias = body[0].bias if hidden == "fixed" else store["0.bias"]
    values = guide.median()
    features = torch.tanh(nn.functional.linear(x, first, bias))
    expected = nn.functional.linear(features, values["2.weight"], values["2.bias"])
    torch.testing.assert_close(model.predict(values, x).output[0], expected.detach())
    assert torch.equal(first, before) == (hidden == "fixed")
    kernel = ps.SGLD(model, step_size=1e-3)  # on the graph, with what was trained held fixed
    mcmc = ps.VectorizedMCMC(kernel, num_samples=2, warmup_steps=0, num_chains=3, disable_progbar=True)
    mcmc.run(x, y)
    elbo = Trace_ELBO(num_particles=2, vectorize_particles=True)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo).step(x, y)


def test_dropout_is_off_and_batch_norm_keeps_its_statistics() -> None:
    body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    for _ in range(20):
        body(3 + 2 * torch.randn(50, 3))
    assert body.training
    statistics = {name: buffer.clone() for name, buffer in body.named_buffers()}
    model = ps.BayesianModule(body, IID, ps.nn.Categorical())
    model.train()
    x, y = data()
    values = point(model)
    assert log_joint(model, values, x, y) == log_joint(model, values, x, y)
    draws = {name: torch.stack([value, value + 1]) for name, value in values.items()}
    vectorised = model.predict(draws, x).output
    body.eval()
    expected = torch.func.functional_call(body, values, (x,))
    torch.testing.assert_close(vectorised[0], expected)
    # Rows are independent of each other: alone each gives the same.
    torch.testing.assert_close(vectorised[0][:1], model.predict(values, x[:1]).output[0])
    for owner in (body, model.net):
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in owner.named_buffers())
    # In train mode they are not.
    assert not torch.allclose(torch.func.functional_call(body.train(), values, (x,)), expected)


def test_batch_norm_without_statistics_and_lazy_modules_are_refused() -> None:
    body = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="module '1', a BatchNorm1d, keeps no running statistics"):
        ps.BayesianModule(body, IID, ps.nn.Categorical())
    with pytest.raises(ValueError, match=r"'weight' has no shape yet; call the network once"):
        ps.BayesianModule(nn.LazyLinear(2), IID, ps.nn.Categorical())


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("scale", [dist.LogNormal(0.0, 1.0), dist.LogNormal(torch.zeros(2), 1.0)])
def test_vectorised_particles_are_the_loop(size: int | None, scale: Any) -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    model = ps.BayesianModule(net(), IID, ps.nn.Gaussian(scale), batch_size=size)
    draws = {name: prior.sample((6,)) for name, prior in model._priors.items()}
    rows = torch.arange(20) if size is None else torch.randperm(20)[:size]
    stacked = {name: value.unsqueeze(1) for name, value in draws.items()}

    def in_plate(x: Tensor, y: Tensor) -> None:
        with pyro.plate("particles", 6, dim=-2):
            model(x, y)

    trace = pyro.poutine.trace(pyro.poutine.condition(in_plate, {**stacked, "data": rows})).get_trace(x, y)
    trace.compute_log_prob()
    together = trace.nodes["y"]["log_prob"].sum(-1)
    for s in range(6):
        alone = {name: value[s] for name, value in draws.items()}
        single = pyro.poutine.trace(pyro.poutine.condition(model, {**alone, "data": rows})).get_trace(x, y)
        single.compute_log_prob()
        torch.testing.assert_close(together[s], single.nodes["y"]["log_prob"].sum())

    with pytest.raises(ValueError, match=r"dims \(6,\) in front of their own, and dim -1"):
        pyro.poutine.condition(model, {**draws, "data": rows})(x, y)


def test_vectorised_elbos_and_predictive_take_it() -> None:
    x, y = data()
    model = ps.BayesianModule(net(), ps.nn.FanInPrior(), ps.nn.Categorical(num_data=100))
    guide = AutoNormal(model)
    elbo = Trace_ELBO(num_particles=3, vectorize_particles=True)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo).step(x, y)
    draws = Predictive(model, guide=guide, num_samples=4)(x)
    assert draws["y"].shape == (4, 20)
    assert model.predict(draws, x).output.shape == (4, 20, 2)
    for parallel in (False, True):
        assert Predictive(model, num_samples=4, parallel=parallel)(x)["y"].shape == (4, 20)


def test_a_symmetrised_guide_takes_it() -> None:
    x, y = data()
    model = ps.BayesianModule(net(), IID, ps.nn.Categorical())
    symmetry = ps.Permutation({"0.weight": -2, "0.bias": -1, "2.weight": -1})
    guide = ps.AutoSymmetrized(
        AutoNormal(model, init_loc_fn=model.init_to_pretrained, init_scale=0.05), symmetry
    )
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(x, y)
    assert guide.symmetry_gain(x, y, num_samples=50).estimate == pytest.approx(math.log(24), abs=0.1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left) * right


@pytest.mark.parametrize("size", [None, 5])
def test_networks_of_several_inputs(size: int | None) -> None:
    model = ps.BayesianModule(TwoInputs(), IID, ps.nn.Gaussian(1.0), batch_size=size)
    left, right, y = torch.randn(20, 3), torch.randn(20, 1), torch.randn(20, 1)
    values: dict[str, Any] = {**point(model), "data": torch.arange(size or 20)}
    by_place, by_name = (left, right), {"left": left, "right": right}
    torch.testing.assert_close(log_joint(model, values, by_place, y), log_joint(model, values, by_name, y))
    torch.testing.assert_close(model.predict(values, by_place).output, model.predict(values, by_name).output)


def test_copies_pickles_and_casts() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 2)
    model = ps.BayesianModule(net(), ps.nn.FanInPrior(), ps.nn.Gaussian(dist.LogNormal(0.0, 1.0)))
    values = point(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(log_joint(other, values, x, y), log_joint(model, values, x, y))
        other.double()
        values64 = {name: value.double() for name, value in values.items()}
        assert {name: value.dtype for name, value in point(other).items()} == dict.fromkeys(
            model.sites, torch.float64
        )
        there = log_joint(other, values64, x.double(), y.double())
        torch.testing.assert_close(there.float(), log_joint(model, values, x, y))


def test_what_does_not_fit_is_refused() -> None:
    x, y = data()
    with pytest.raises(TypeError, match="likelihood is 'Categorical'"):
        ps.BayesianModule(net(), IID, "Categorical")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden is 'free'"):
        ps.BayesianModule(net(), IID, ps.nn.Categorical(), hidden="free")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is 0"):
        ps.BayesianModule(net(), IID, ps.nn.Categorical(), batch_size=0)
    with pytest.raises(ValueError, match="x has 20 rows, but num_data is 10"):
        ps.BayesianModule(net(), IID, ps.nn.Categorical(num_data=10))(x, y)
    with pytest.raises(ValueError, match="num_data is 30, but with batch_size the model takes all the data"):
        ps.BayesianModule(net(), IID, ps.nn.Categorical(num_data=30), batch_size=5)(x, y)
    summed = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0))
    with pytest.raises(ValueError, match=r"output has shape \(40,\) for 20 rows"):
        ps.BayesianModule(summed, IID, ps.nn.Bernoulli())(x, torch.zeros(20))
    clash = nn.ParameterDict({"y": torch.zeros(2)})
    with pytest.raises(ValueError, match="a parameter named 'y', which is the name of another site"):
        ps.BayesianModule(clash, IID, ps.nn.Categorical())


def test_a_distribution_is_the_prior_of_every_entry() -> None:
    net = nn.Linear(3, 2)
    short, long = (
        ps.BayesianModule(net, prior, ps.nn.Gaussian(1.0))
        for prior in (dist.Normal(0.5, 2.0), ps.nn.IIDPrior(dist.Normal(0.5, 2.0)))
    )
    assert repr(short._priors) == repr(long._priors)
    for prior in (dist.Normal, 1.0, None):
        with pytest.raises(TypeError, match=r"pass a distribution for every entry, as dist.Normal"):
            ps.BayesianModule(net, prior, ps.nn.Gaussian(1.0))  # type: ignore[arg-type]


def test_inputs_of_another_precision_are_named() -> None:
    model = ps.BayesianModule(nn.Linear(3, 1), dist.Normal(0.0, 1.0), ps.nn.Gaussian(1.0))
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"inputs of dtype torch.float64.*pass x.to\(torch.float32\)"):
        model(x)
    assert model(x.float()).shape == (5, 1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the network's own error
        model(torch.randn(5, 4))


def test_scales_that_underflow_have_a_floor() -> None:
    """At outputs of -200 softplus is 0 in single precision; with weights from (-2, 2) a wide net has such."""
    law = ps.nn.HeteroskedasticGaussian(min_scale=0.01).law(torch.tensor([[0.0, -200.0]]))
    assert law.stddev.item() == pytest.approx(0.01)
    assert nn.functional.softplus(torch.tensor(-200.0)) == 0  # the control
    with pytest.raises(ValueError, match="min_scale is 0"):
        ps.nn.HeteroskedasticGaussian(min_scale=0)
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    model = ps.BayesianModule(net, dist.Normal(0.0, 1.0), ps.nn.HeteroskedasticGaussian())
    x = torch.full((20, 3), 10.0)
    starts = {name: torch.zeros(2, *p.shape) for name, p in net.named_parameters()}  # for two chains
    mcmc = ps.VectorizedMCMC(
        ps.BAOA(model, step_size=1e-3),
        2,
        warmup_steps=0,
        num_chains=2,
        initial_values=starts,
        disable_progbar=True,
    )
    mcmc.run(x, x[:, :1])
    assert all(value.isfinite().all() for value in mcmc.get_samples().values())


def test_a_model_need_not_run_where_values_are_drawn() -> None:
    """Given starting values are looked at first: a Cholesky factor exists there, and not at drawn values."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        if not w.abs().max() < 0.2:
            raise ValueError("no Cholesky factor")
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.0))

    kernel = ps.BAOA(model, step_size=1e-4, jit="eager")
    for values, fails in ({"w": torch.zeros(2, 3)}, False), (None, True), ({"w": torch.zeros(2, 4)}, True):
        mcmc = ps.VectorizedMCMC(
            kernel, 2, warmup_steps=0, num_chains=2, initial_values=values, disable_progbar=True
        )
        if fails:
            with pytest.raises(ValueError, match="no Cholesky factor"):
                mcmc.run()
        else:
            mcmc.run()


def test_a_network_that_returns_a_dict_is_to_be_wrapped() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x, "logits": super().forward(x)}

    model = ps.BayesianModule(Named(3, 2), IID, ps.nn.Categorical())
    with pytest.raises(TypeError, match=r"keys \['hidden', 'logits'\].*wrap the module") as caught:
        model(*data())
    assert "return self.net(*args, **kwargs)['logits']" in str(caught.value)
