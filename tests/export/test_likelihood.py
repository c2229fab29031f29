"""The log likelihood of every datum, against closed forms and a loop over draws.

It covers export.likelihood, export.pointwise, export.log_sum and export.vmap_draws.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from pyro_sym import log_likelihood
from tests.catalogue import normal_mean

pytestmark = pytest.mark.usefixtures("float64")

Model = Callable[..., Any]


def by_loop(model: Model, draws: dict[str, Tensor], site: str, *args: Any) -> Tensor:
    """The reference: condition, trace, and ask the site's distribution, draw by draw."""
    rows = []
    for i in range(len(next(iter(draws.values())))):
        draw = {name: value[i] for name, value in draws.items()}
        node = poutine.trace(poutine.condition(model, data=draw)).get_trace(*args).nodes[site]
        rows.append(node["fn"].log_prob(node["value"]))
    return torch.stack(rows)


def logistic(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    pyro.deterministic("odds", (x @ w + b).exp())
    pyro.factor("prior", -w.abs().sum())
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def network(x: Tensor, y: Tensor) -> None:
    w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([2, 5]).to_event(2))
    w2 = pyro.sample("w2", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(torch.tanh(x @ w1) @ w2, 0.1), obs=y)


class Linear(PyroModule):
    """A regression written with torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = PyroModule[torch.nn.Linear](2, 1)
        self.layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(self.layer(x).squeeze(-1), 1.0), obs=y)


CASES: dict[str, tuple[Callable[[], Model], dict[str, tuple[int, ...]]]] = {
    "logistic": (lambda: logistic, {"w": (2,), "b": ()}),
    "network": (lambda: network, {"w1": (2, 5), "w2": (5,)}),
    "module": (Linear, {"layer.weight": (1, 2), "layer.bias": (1,)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_draws", [7, 30])  # 30 is the number of data as well
def test_all_draws_at_once_are_the_loop(case: str, num_draws: int) -> None:
    make, shapes = CASES[case]
    model = make()
    x, y = torch.randn(30, 2), (torch.rand(30) > 0.5).double()
    draws = {name: torch.randn(num_draws, *shape) for name, shape in shapes.items()}
    found = log_likelihood(model, draws, x, y)
    assert set(found) == {"y"}
    torch.testing.assert_close(found["y"], by_loop(model, draws, "y", x, y), rtol=1e-13, atol=1e-13)
    for chunk_size in (1, 4):
        again = log_likelihood(model, draws, x, y, chunk_size=chunk_size)["y"]
        torch.testing.assert_close(again, found["y"], rtol=1e-13, atol=1e-13)


def test_pairing_of_draws_and_data_in_a_vectorized_trace_is_no_reference() -> None:
    """The control: one plate of draws around the model pairs draw s with datum s, if their numbers agree."""
    x, y = torch.randn(30, 2), torch.randn(30)
    draws = {"w1": torch.randn(30, 2, 5), "w2": torch.randn(30, 5)}

    def unpadded(x: Tensor, y: Tensor) -> None:
        w1 = pyro.sample("w1", dist.Normal(0.0, 1.0).expand([2, 5]).to_event(2))
        w2 = pyro.sample("w2", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        mean = (torch.tanh((x.unsqueeze(-1) * w1).sum(-2)) * w2).sum(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    trace = Predictive(unpadded, posterior_samples=draws, parallel=True).get_vectorized_trace(x, y)
    wrong = trace.nodes["y"]["fn"].log_prob(y).squeeze()
    right = log_likelihood(unpadded, draws, x, y)["y"]
    torch.testing.assert_close(right, by_loop(unpadded, draws, "y", x, y))
    assert wrong.shape != right.shape or not torch.allclose(wrong, right)


def test_chains_stay_apart() -> None:
    x, y = torch.randn(6, 2), torch.ones(6)
    draws = {"w": torch.randn(3, 4, 2), "b": torch.randn(3, 4)}
    flat = {name: value.flatten(0, 1) for name, value in draws.items()}
    found = log_likelihood(logistic, draws, x, y, group_by_chain=True)["y"]
    torch.testing.assert_close(found.flatten(0, 1), log_likelihood(logistic, flat, x, y)["y"])


def test_control_flow_that_depends_on_values_falls_back_to_the_loop() -> None:
    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        scale = 1.0 if loc > 0 else 2.0
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, scale), obs=y)

    draws, y = {"loc": torch.randn(9)}, torch.randn(4)
    with pytest.warns(UserWarning, match="can't be vectorised over draws"):
        found = log_likelihood(model, draws, y)["y"]
    torch.testing.assert_close(found, by_loop(model, draws, "y", y))


def test_scales_are_left_out_and_masked_entries_are_nan() -> None:
    y, seen = torch.randn(5), torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 5), poutine.scale(scale=3.0), poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
            pyro.sample("z", dist.Normal(loc, 1.0).mask(y > 0), obs=y)

    loc = torch.randn(8, 1)
    found = log_likelihood(model, {"loc": loc.squeeze(-1)})
    expected = dist.Normal(loc, 1.0).log_prob(y)
    torch.testing.assert_close(found["y"], expected.where(seen, torch.nan), equal_nan=True)
    torch.testing.assert_close(found["z"], expected.where(seen & (y > 0), torch.nan), equal_nan=True)


def test_partly_masked_events_count_what_is_seen() -> None:
    y = torch.randn(3, 2)
    seen = torch.tensor([[True, True], [True, False], [False, False]])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(loc, 1.0).expand([3, 2]).mask(seen).to_event(1), obs=y)

    loc = torch.randn(6, 1, 1)
    found = log_likelihood(model, {"loc": loc.flatten()})["y"]
    expected = (dist.Normal(loc, 1.0).log_prob(y) * seen).sum(-1)
    torch.testing.assert_close(found[:, :2], expected[:, :2])
    assert found[:, 2].isnan().all()


@pytest.mark.parametrize("batch", [1, 3, 4, 10])
def test_subsampled_plates_cover_all_rows(batch: int) -> None:
    y, g = torch.randn(10, 3), torch.randn(3)

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        pyro.sample("all", dist.Normal(loc, 1.0), obs=torch.tensor(0.5))
        with pyro.plate("group", 3, subsample_size=2, dim=-1) as columns:
            pyro.sample("g", dist.Normal(loc, 1.0), obs=g[columns])
            with pyro.plate("data", 10, subsample_size=batch, dim=-2) as rows:
                pyro.sample("y", dist.Normal(loc, 2.0), obs=y[rows][:, columns])

    loc = torch.randn(6)
    found = log_likelihood(model, {"loc": loc})
    torch.testing.assert_close(found["y"], dist.Normal(loc[:, None, None], 2.0).log_prob(y))
    torch.testing.assert_close(found["g"], dist.Normal(loc[:, None], 1.0).log_prob(g))
    torch.testing.assert_close(found["all"], dist.Normal(loc, 1.0).log_prob(torch.tensor(0.5)))


@pytest.mark.parametrize("chosen_by", ["subsample", "loader"])
def test_rows_chosen_by_the_arguments_are_refused(chosen_by: str) -> None:
    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        how: dict[str, Any] = {"subsample": y} if chosen_by == "subsample" else {"subsample_size": len(y)}
        with pyro.plate("data", 20, **how):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    with pytest.raises(ValueError, match="site 'y' shows some rows"):
        log_likelihood(model, {"loc": torch.randn(5)}, torch.randn(4))


# Enumerated sites


@pytest.mark.parametrize("batch", [6, 4])
def test_a_discrete_site_of_each_datum_is_summed_out(batch: int) -> None:
    y = torch.randn(6, 2)

    def model() -> None:
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("component", 3):
            locs = pyro.sample("locs", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", 6, subsample_size=batch) as rows, poutine.scale(scale=0.5):
            z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(locs[z], 1.0).to_event(1), obs=y[rows])

    weights, locs = dist.Dirichlet(torch.ones(3)).sample((7,)), torch.randn(7, 3, 2)
    both = dist.Categorical(weights[:, None]), dist.Normal(locs[:, None], 1.0).to_event(1)
    found = log_likelihood(model, {"weights": weights, "locs": locs})
    assert set(found) == {"y"}
    torch.testing.assert_close(found["y"], dist.MixtureSameFamily(*both).log_prob(y))


def test_sites_that_share_a_discrete_one_are_one_term_and_draws_that_depend_on_it_are_taken_out() -> None:
    x, y = torch.randn(5), torch.randn(5)
    prior = torch.tensor([0.2, 0.8])
    means = torch.tensor([-1.0, 1.0])

    def model() -> None:
        with pyro.plate("data", 5):
            z = pyro.sample("z", dist.Categorical(prior), infer={"enumerate": "parallel"})
            theta = pyro.sample("theta", dist.Normal(means[z], 0.5))
            pyro.sample("x", dist.Normal(theta + means[z], 1.0), obs=x)
            pyro.sample("y", dist.Normal(2 * means[z], 1.0), obs=y)

    theta = torch.randn(4, 5)
    found = log_likelihood(model, {"theta": theta})
    assert set(found) == {"x+y"}
    z_theta = prior.log() + dist.Normal(means, 0.5).log_prob(theta[..., None])
    data = dist.Normal(theta[..., None] + means, 1.0).log_prob(x[:, None])
    data = data + dist.Normal(2 * means, 1.0).log_prob(y[:, None])
    expected = (z_theta + data).logsumexp(-1) - z_theta.logsumexp(-1)
    torch.testing.assert_close(found["x+y"], expected)


@pytest.mark.parametrize("vectorised", [True, False])
def test_a_chain_of_discrete_sites_is_one_term_a_sequence(vectorised: bool) -> None:
    """Hidden Markov sequences of unequal lengths, against enumeration of all paths."""
    y = torch.randn(3, 4)
    lengths = torch.tensor([4, 2, 3])
    start = torch.tensor([0.3, 0.7])

    def model() -> None:
        move = pyro.sample("move", dist.Dirichlet(torch.ones(2)).expand([2]).to_event(1))
        locs = pyro.sample("locs", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

        def steps(mask: Any, rows: Any, times: range) -> None:
            z: Any = None
            for t in pyro.markov(times):
                with poutine.mask(mask=mask(t)):
                    probs = start if z is None else move[z]
                    z = pyro.sample(f"z{name}_{t}", dist.Categorical(probs), infer={"enumerate": "parallel"})
                    pyro.sample(f"y{name}_{t}", dist.Normal(locs[z], 1.0), obs=y[rows, t])

        name: Any = ""
        if vectorised:
            with pyro.plate("sequence", 3):
                steps(lambda t: t < lengths, slice(None), range(4))
        else:
            for name in pyro.plate("sequence", 3):
                steps(lambda t: torch.tensor(True), name, range(int(lengths[name])))

    draws = {"move": dist.Dirichlet(torch.ones(2, 2)).sample((5,)), "locs": torch.randn(5, 2)}
    found = log_likelihood(model, draws)
    assert set(found) == ({"y"} if vectorised else {"y0", "y1", "y2"})
    for row, length in enumerate(lengths.tolist()):
        paths = []
        for path in itertools.product(range(2), repeat=length):
            log_prob = start[path[0]].log().expand(5)
            for t, z in enumerate(path):
                if t > 0:
                    log_prob = log_prob + draws["move"][:, path[t - 1], z].log()
                log_prob = log_prob + dist.Normal(draws["locs"][:, z], 1.0).log_prob(y[row, t])
            paths.append(log_prob)
        term = found["y"][:, row] if vectorised else found[f"y{row}"]
        torch.testing.assert_close(term, torch.stack(paths).logsumexp(0))


def test_joint_terms_all_masked_are_nan_and_partly_masked_are_not() -> None:
    y = torch.randn(2, 3)
    seen = torch.tensor([[True, False, True], [False, False, False]])

    def model() -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("group", 2, dim=-2):
            z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
            with pyro.plate("data", 3, dim=-1), poutine.mask(mask=seen):
                pyro.sample("y", dist.Normal(loc * z, 1.0), obs=y)

    loc = torch.randn(4)
    found = log_likelihood(model, {"loc": loc})["y"]
    assert found.shape == (4, 2, 1)
    both = [(dist.Normal(m[:, None], 1.0).log_prob(y[0]) * seen[0]).sum(-1) for m in (0 * loc, loc)]
    torch.testing.assert_close(found[:, 0, 0], torch.stack(both).logsumexp(0) - math.log(2))
    assert found[:, 1].isnan().all()


def test_draws_of_a_discrete_site_condition_on_it() -> None:
    y = torch.randn(3)

    def model() -> None:
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Poisson(2.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    z = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]])
    torch.testing.assert_close(log_likelihood(model, {"z": z})["y"], dist.Normal(z, 1.0).log_prob(y))


# What is refused, and what is left alone


def test_missing_draws_are_named() -> None:
    with pytest.raises(ValueError, match=r"no draws of the latent sites \['b'\]"):
        log_likelihood(logistic, {"w": torch.randn(3, 2)}, torch.randn(5, 2), torch.ones(5))
    with pytest.raises(ValueError, match="draws is empty"):
        log_likelihood(logistic, {}, torch.randn(5, 2), torch.ones(5))


def test_nothing_outside_is_touched() -> None:
    state = torch.get_rng_state()
    draws = {"w": torch.randn(3, 2, generator=torch.Generator()), "b": torch.zeros(3).requires_grad_()}
    with poutine.trace() as outer, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = log_likelihood(logistic, draws, torch.ones(5, 2), torch.ones(5))["y"]
    assert torch.equal(state, torch.get_rng_state())
    assert not found.requires_grad
    assert not [name for name, site in outer.trace.nodes.items() if site["type"] == "sample"]


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 5)])
def test_chains_that_nobody_told_of_are_refused(shape: tuple[int, int]) -> None:
    """Draws of 4 chains would be 4 draws that broadcast against 3 data: a likelihood of other draws."""
    y, draws = torch.randn(3), {"loc": torch.randn(shape)}
    with pytest.raises(ValueError, match=r"draws of site 'loc' have shape .*pass group_by_chain=True"):
        log_likelihood(normal_mean, draws, y)
    assert log_likelihood(normal_mean, draws, y, group_by_chain=True)["y"].shape == (*shape, 3)
    flat = {"loc": draws["loc"].flatten()}
    with pytest.raises(ValueError, match=r"draws of site 'loc' have shape .*pass group_by_chain=False"):
        log_likelihood(normal_mean, flat, y, group_by_chain=True)


def test_dims_of_size_one_in_front_are_those_of_predictive() -> None:
    y, loc = torch.randn(3), torch.randn(6)
    padded = log_likelihood(normal_mean, {"loc": loc.reshape(6, 1)}, y)["y"]
    torch.testing.assert_close(padded, log_likelihood(normal_mean, {"loc": loc}, y)["y"])


def test_draws_of_too_few_dims_are_refused() -> None:
    x, y = torch.randn(7, 2), torch.ones(7)
    draws = {"w": torch.randn(5), "b": torch.randn(5)}
    with pytest.raises(ValueError, match=r"draws of site 'w' have shape \(5,\), where \(num_samples"):
        log_likelihood(logistic, draws, x, y)
