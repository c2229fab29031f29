"""Models whose symmetries are known: each with its group, and near misses that break it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex
from torch import Tensor

from pyro_sym import Permutation, Product, SignFlip, Symmetry, Viewed


class Case(NamedTuple):
    """A model, what it is called with, and the group that it has."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    symmetry: Symmetry

    def __repr__(self) -> str:
        return self.model.__name__


Y = torch.tensor([-1.2, 0.4, 0.9, 2.1, 3.3, 5.0, -0.7])
COUNTS = torch.tensor([0.0, 3.0, 1.0, 7.0, 2.0])
POINTS = torch.tensor([[0.3, -1.0], [1.4, 0.2], [-0.6, 2.2], [0.1, 0.7], [2.0, -1.3]])
ANSWERS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
WORDS = torch.tensor([[0, 3, 1], [2, 2, 4], [4, 0, 1], [3, 3, 2]])
INPUTS = torch.tensor([[0.5, -1.0], [1.0, 0.3], [-0.7, 0.8], [0.2, 1.6], [-1.4, -0.2], [0.9, -0.6]])
TARGETS = torch.tensor([0.3, -0.8, 1.1, 0.2, -0.4, 0.9])


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def gaussian_mixture(y: Tensor, k: int = 3) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(ones(k)))
    with pyro.plate("components", k):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], scales[z]), obs=y)


def poisson_mixture(y: Tensor) -> None:
    """Logit weights, the allocations summed out by the distribution."""
    logits = pyro.sample("logits", dist.Normal(zeros(4), 1.0).to_event(1))
    rates = pyro.sample("rates", dist.Gamma(ones(4), 0.3).to_event(1))
    with pyro.plate("data", len(y)):
        mixture = dist.MixtureSameFamily(dist.Categorical(logits=logits), dist.Poisson(rates))
        pyro.sample("y", mixture, obs=y)


def square_mixture(y: Tensor) -> None:
    """Multivariate components, as many as dimensions."""
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(zeros(2), 2.0).to_event(1))
        corr = pyro.sample("corr", dist.LKJCholesky(2, 1.0))
        sd = pyro.sample("sd", dist.LogNormal(zeros(2), 0.5).to_event(1))
    weights = pyro.sample("weights", dist.Dirichlet(ones(2)))
    component = dist.MultivariateNormal(locs, scale_tril=sd.unsqueeze(-1) * corr)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), component), obs=y)


def grouped_mixture(y: Tensor) -> None:
    """As many components as dimensions and as groups, each group with weights of its own."""
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(zeros(2), 2.0).to_event(1))
    with pyro.plate("groups", 2, dim=-2):
        weights = pyro.sample("weights", dist.Dirichlet(ones(2)))
        with pyro.plate("data", 2, dim=-1):
            z = pyro.sample("z", dist.Categorical(weights))
            pyro.sample("y", dist.Normal(locs[z], 1.0).to_event(1), obs=y[:4].reshape(2, 2, 2))


def latent_classes(y: Tensor) -> None:
    """Bernoulli answers; as many classes as questions."""
    classes, questions = 4, y.shape[-1]
    weights = pyro.sample("weights", dist.Dirichlet(ones(classes)))
    chances = pyro.sample("chances", dist.Beta(ones(classes, questions), 1.0).to_event(2))
    with pyro.plate("people", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Bernoulli(chances[z]).to_event(1), obs=y)


def categorical_mixture(y: Tensor) -> None:
    with pyro.plate("components", 3):
        logits = pyro.sample("logits", dist.Normal(0.0, 1.0))
        words = pyro.sample("words", dist.Dirichlet(ones(5)))
    with pyro.plate("documents", len(y)):
        z = pyro.sample("z", dist.Categorical(logits=logits))
        chances = words[z].unsqueeze(-2).expand(*z.shape, y.shape[1], 5)
        pyro.sample("y", dist.Categorical(chances).to_event(1), obs=y)


def hidden_markov(y: Tensor) -> None:
    """Sticky: neither axis of the transition matrix is exchangeable alone, not in its prior either."""
    trans = pyro.sample("trans", dist.Dirichlet(1 + 5 * torch.eye(3)).to_event(1))
    initial = pyro.sample("initial", dist.Dirichlet(ones(3)))
    locs = pyro.sample("locs", dist.Normal(zeros(3), 3.0).to_event(1))
    pyro.sample(
        "y",
        dist.DiscreteHMM(initial.log(), trans.log(), dist.Normal(locs, 1.0), duration=len(y)),
        obs=y,
    )


def markov_loop(y: Tensor) -> None:
    """The same, its states enumerated in a Markov loop."""
    initial = pyro.sample("initial", dist.Dirichlet(ones(3)))
    with pyro.plate("states", 3):
        trans = pyro.sample("trans", dist.Dirichlet(ones(3)))
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
    x: Any = None
    for t in pyro.markov(range(len(y))):
        x = pyro.sample(f"x_{t}", dist.Categorical(initial if x is None else trans[x]))
        pyro.sample(f"y_{t}", dist.Normal(locs[x], 1.0), obs=y[t])


def topics(words: Tensor) -> None:
    """Latent Dirichlet allocation: as many topics as documents, concentrations learnt."""
    k, documents = 4, len(words)
    alpha = pyro.sample("alpha", dist.Gamma(ones(k), 1.0).to_event(1))
    with pyro.plate("topics", k):
        beta = pyro.sample("beta", dist.Dirichlet(ones(5)))
    with pyro.plate("documents", documents, dim=-2):
        theta = pyro.sample("theta", dist.Dirichlet(alpha))
        with pyro.plate("words", words.shape[1], dim=-1):
            z = pyro.sample("z", dist.Categorical(theta))
            pyro.sample("w", dist.Categorical(beta[z]), obs=words)


def mixed_membership(y: Tensor) -> None:
    """Every person's answers are drawn from classes of their own weights."""
    with pyro.plate("classes", 3, dim=-2), pyro.plate("questions", y.shape[1], dim=-1):
        chances = pyro.sample("chances", dist.Beta(1.0, 1.0))
    with pyro.plate("people", len(y), dim=-2):
        theta = pyro.sample("theta", dist.Dirichlet(ones(3)))
        with pyro.plate("answers", y.shape[1], dim=-1):
            z = pyro.sample("z", dist.Categorical(theta))
            question = torch.arange(y.shape[1])
            pyro.sample("y", dist.Bernoulli(Vindex(chances)[z, question]), obs=y)


def block_model(edges: Tensor) -> None:
    """Mixed memberships of both ends of an edge: the rates between blocks move on two axes."""
    n = len(edges)
    with pyro.plate("from", 2, dim=-2), pyro.plate("to", 2, dim=-1):
        rates = pyro.sample("rates", dist.Beta(1.0, 1.0))
    theta = pyro.sample("theta", dist.Dirichlet(ones(n, 2)).to_event(1))
    chance = torch.einsum("ik,kl,jl->ij", theta, rates, theta)
    with pyro.plate("senders", n, dim=-2), pyro.plate("receivers", n, dim=-1):
        pyro.sample("edges", dist.Bernoulli(chance.clamp(1e-6, 1 - 1e-6)), obs=edges)


def factor_analysis(y: Tensor) -> None:
    """As many factors as dimensions, and their scales learnt."""
    ard = pyro.sample("ard", dist.Gamma(2 * ones(2), 2.0).to_event(1))
    with pyro.plate("dimensions", 2):
        loadings = pyro.sample("loadings", dist.Normal(zeros(2), ard).to_event(1))
        noise = pyro.sample("noise", dist.HalfCauchy(1.0))
    with pyro.plate("data", len(y)):
        scores = pyro.sample("scores", dist.Normal(zeros(2), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(scores @ loadings.T, noise).to_event(1), obs=y)


def collapsed_factors(y: Tensor, scale: Any = 1.0) -> None:
    """Scores integrated out; the same prior for all factors, or one of its own for each."""
    loadings = pyro.sample("loadings", dist.Normal(zeros(2, 3), scale).to_event(2))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.LowRankMultivariateNormal(zeros(2), loadings, ones(2)), obs=y)


def one_factor(y: Tensor, loc: float = 0.0) -> None:
    loadings = pyro.sample("loadings", dist.Normal(loc + zeros(2, 1), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        scores = pyro.sample("scores", dist.Normal(zeros(1), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(scores @ loadings.T, 1.0).to_event(1), obs=y)


def one_factor_of_vectors(y: Tensor, loc: float = 0.0) -> None:
    """The same as most people write it: no axis for the factor, one sign for all loadings and scores."""
    loadings = pyro.sample("loadings", dist.Normal(loc + zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        scores = pyro.sample("scores", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(scores.unsqueeze(-1) * loadings, 1.0).to_event(1), obs=y)


def correlated_factors(y: Tensor) -> None:
    """Both axes of a correlation matrix move together."""
    corr = pyro.sample("corr", dist.LKJ(3, torch.tensor(1.0)))
    loadings = pyro.sample("loadings", dist.Normal(zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(y)):
        scores = pyro.sample("scores", dist.MultivariateNormal(zeros(3), corr))
        pyro.sample("y", dist.Normal(scores @ loadings.T, 1.0).to_event(1), obs=y)


def linear_dynamics(y: Tensor) -> None:
    """A linear state space model: the axes of the dynamics, and signs."""
    dynamics = pyro.sample("dynamics", dist.Normal(0.5 * torch.eye(2), 0.2).to_event(2))
    emission = pyro.sample("emission", dist.Normal(zeros(2, 1), 1.0).to_event(2))
    state, noise = (dist.MultivariateNormal(zeros(n), torch.eye(n)) for n in (2, 1))
    hmm = dist.GaussianHMM(state, dynamics, state, emission, noise, duration=len(y))
    pyro.sample("y", hmm, obs=y.unsqueeze(-1))


def network(x: Tensor, y: Tensor, widths: tuple[int, ...], activation: Callable[[Tensor], Tensor]) -> None:
    """An MLP by hand, its sites named by layer."""
    sizes = [x.shape[-1], *widths, 1]
    h = x
    for layer, (a, b) in enumerate(itertools.pairwise(sizes)):
        w = pyro.sample(f"w{layer}", dist.Normal(zeros(a, b), a**-0.5).to_event(2))
        bias = pyro.sample(f"b{layer}", dist.Normal(zeros(b), 1.0).to_event(1))
        h = h @ w + bias
        if layer < len(widths):
            h = activation(h)
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(h.squeeze(-1), sigma), obs=y)


def layer(i: int) -> dict[str, int | tuple[int, ...]]:
    return {f"w{i}": -1, f"b{i}": -1, f"w{i + 1}": -2}


def tanh_network(x: Tensor, y: Tensor) -> None:
    network(x, y, (5,), torch.tanh)


def relu_network(x: Tensor, y: Tensor) -> None:
    network(x, y, (4, 4), torch.relu)


def deep_network(x: Tensor, y: Tensor) -> None:
    network(x, y, (3,) * 5, torch.tanh)


def two_mixtures(y: Tensor) -> None:
    """Every datum is a sum of two draws, each from a mixture of three."""
    parts = []
    for name in ("a", "b"):
        weights = pyro.sample(f"weights_{name}", dist.Dirichlet(ones(3)))
        with pyro.plate(f"components_{name}", 3):
            parts.append((weights, pyro.sample(f"locs_{name}", dist.Normal(0.0, 5.0))))
    (p, a), (q, b) = parts
    with pyro.plate("data", len(y)):
        i, j = pyro.sample("i", dist.Categorical(p)), pyro.sample("j", dist.Categorical(q))
        pyro.sample("y", dist.Normal(a[i] + b[j], 1.0), obs=y)


def nested_mixture(y: Tensor) -> None:
    """A mixture of mixtures, three of three: the relabelling of the inner ones that is common to all."""
    outer = pyro.sample("outer", dist.Dirichlet(ones(3)))
    with pyro.plate("outside", 3):
        centres = pyro.sample("centres", dist.Normal(0.0, 5.0))
        inner = pyro.sample("inner", dist.Dirichlet(ones(3)))
        locs = pyro.sample("locs", dist.Normal(centres.unsqueeze(-1).expand(3, 3), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(outer))
        u = pyro.sample("u", dist.Categorical(inner[z]))
        pyro.sample("y", dist.Normal(Vindex(locs)[z, u], 1.0), obs=y)


def recurrent_network(y: Tensor) -> None:
    """A recurrent layer: its units are on both axes of one weight."""
    w = pyro.sample("w", dist.Normal(zeros(3, 3), 0.5).to_event(2))
    into = pyro.sample("into", dist.Normal(zeros(3), 1.0).to_event(1))
    out = pyro.sample("out", dist.Normal(zeros(3), 1.0).to_event(1))
    h, means = zeros(3), []
    for value in y:
        means.append(h @ out)
        h = torch.tanh(h @ w + value * into)
    pyro.sample("y", dist.Normal(torch.stack(means), 1.0).to_event(1), obs=y)


def ordered_means(y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(ones(3)))
    base = dist.Normal(zeros(3), 2.0).to_event(1)
    locs = pyro.sample("locs", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


def means_in_order(y: Tensor) -> None:
    """The order as a factor, of which the site's support knows nothing."""
    weights = pyro.sample("weights", dist.Dirichlet(ones(3)))
    locs = pyro.sample("locs", dist.Normal(zeros(3), 2.0).to_event(1))
    pyro.factor("order", torch.where((locs.diff() > 0).all(), 0.0, -torch.inf))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


def mixture_with_priors(y: Tensor, concentration: Tensor, scales: Tensor) -> None:
    """Priors that may tell the components apart."""
    weights = pyro.sample("weights", dist.Dirichlet(concentration))
    locs = pyro.sample("locs", dist.Normal(zeros(3), scales).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


def one_fixed_component(y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(ones(3)))
    free = pyro.sample("locs", dist.Normal(zeros(3), 5.0).to_event(1))
    locs = torch.cat([zeros(1), free[1:]])
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)


def some_labels(y: Tensor) -> None:
    """Half supervised: some allocations are seen."""
    weights = pyro.sample("weights", dist.Dirichlet(ones(3)))
    locs = pyro.sample("locs", dist.Normal(zeros(3), 5.0).to_event(1))
    with pyro.plate("labelled", 3):
        z = pyro.sample("z", dist.Categorical(weights), obs=torch.tensor([0, 1, 1]))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=y[:3])
    with pyro.plate("data", len(y) - 3):
        u = pyro.sample("u", dist.Categorical(weights))
        pyro.sample("y", dist.Normal(locs[u], 1.0), obs=y[3:])


def left_to_right(y: Tensor) -> None:
    """A chain of states that never goes back."""
    stay = pyro.sample("stay", dist.Beta(ones(3), 1.0).to_event(1))
    locs = pyro.sample("locs", dist.Normal(zeros(3), 3.0).to_event(1))
    trans = torch.diag(stay) + torch.diag((1 - stay)[:2], 1)
    trans = trans + torch.diag(torch.cat([zeros(2), (1 - stay)[2:]]))
    initial = torch.tensor([1.0, 0.0, 0.0])
    emission = dist.Normal(locs, 1.0)
    hmm = dist.DiscreteHMM((initial + 1e-9).log(), (trans + 1e-9).log(), emission, duration=len(y))
    pyro.sample("y", hmm, obs=y)


def nonnegative_factors(y: Tensor) -> None:
    """Unequal scales, and no signs."""
    loadings = pyro.sample("loadings", dist.HalfNormal(torch.tensor([[1.0, 1.1]]).expand(2, 2)).to_event(2))
    with pyro.plate("data", len(y)):
        scores = pyro.sample("scores", dist.HalfNormal(ones(2)).to_event(1))
        pyro.sample("y", dist.Normal(scores @ loadings.T, 1.0).to_event(1), obs=y)


def tanh_network_with_signs(x: Tensor, y: Tensor) -> None:
    """Outgoing weights that are positive on average."""
    w = pyro.sample("w", dist.Normal(zeros(2, 5), 1.0).to_event(2))
    out = pyro.sample("out", dist.Normal(0.1 + zeros(5), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(torch.tanh(x @ w) @ out, 1.0), obs=y)


def both(axes: dict[str, Any]) -> Product:
    return Product(Permutation(axes), SignFlip(axes))


CASES = [
    Case(gaussian_mixture, (Y,), Permutation({"weights": -1, "locs": -1, "scales": -1})),
    Case(poisson_mixture, (COUNTS,), Permutation({"logits": -1, "rates": -1})),
    Case(square_mixture, (POINTS,), Permutation({"locs": -2, "corr": -3, "sd": -2, "weights": -1})),
    Case(grouped_mixture, (POINTS,), Permutation({"locs": -2, "weights": -1})),
    Case(latent_classes, (ANSWERS,), Permutation({"weights": -1, "chances": -2})),
    Case(categorical_mixture, (WORDS,), Permutation({"logits": -1, "words": -2})),
    Case(hidden_markov, (Y,), Permutation({"trans": (-2, -1), "initial": -1, "locs": -1})),
    Case(markov_loop, (Y,), Permutation({"initial": -1, "trans": (-2, -1), "locs": -1})),
    Case(topics, (WORDS,), Permutation({"alpha": -1, "beta": -2, "theta": -1})),
    Case(mixed_membership, (ANSWERS,), Permutation({"chances": -2, "theta": -1})),
    Case(
        block_model,
        (torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]),),
        Permutation({"rates": (-2, -1), "theta": -1}),
    ),
    Case(
        factor_analysis,
        (POINTS,),
        Product(
            Permutation({"ard": -1, "loadings": -1, "scores": -1}), SignFlip({"loadings": -1, "scores": -1})
        ),
    ),
    Case(collapsed_factors, (POINTS,), both({"loadings": -1})),
    Case(one_factor, (POINTS,), SignFlip({"loadings": -1, "scores": -1})),
    Case(
        one_factor_of_vectors,
        (POINTS,),
        Viewed(
            SignFlip({"loadings": -2, "scores": -2}),
            {"loadings": ((1, 2),), "scores": ((1, len(POINTS)),)},
        ),
    ),
    Case(correlated_factors, (POINTS,), both({"corr": (-2, -1), "loadings": -1, "scores": -1})),
    Case(linear_dynamics, (Y,), both({"dynamics": (-2, -1), "emission": -2})),
    Case(tanh_network, (INPUTS, TARGETS), both(layer(0))),
    Case(relu_network, (INPUTS, TARGETS), Product(Permutation(layer(0)), Permutation(layer(1)))),
    Case(deep_network, (INPUTS, TARGETS), Product(*(both(layer(i)) for i in range(5)))),
    Case(
        two_mixtures,
        (Y,),
        Product(Permutation({"weights_a": -1, "locs_a": -1}), Permutation({"weights_b": -1, "locs_b": -1})),
    ),
    Case(
        nested_mixture,
        (Y,),
        Product(
            Permutation({"outer": -1, "centres": -1, "inner": -2, "locs": -2}),
            Permutation({"inner": -1, "locs": -1}),
        ),
    ),
    Case(recurrent_network, (Y,), both({"w": (-2, -1), "into": -1, "out": -1})),
]

TRIVIAL = Product()
NEAR_MISSES = [
    Case(ordered_means, (Y,), TRIVIAL),
    Case(means_in_order, (Y,), TRIVIAL),
    Case(mixture_with_priors, (Y, torch.tensor([1.0, 1.0, 1.01]), ones(3)), TRIVIAL),
    Case(mixture_with_priors, (Y, ones(3), torch.tensor([5.0, 5.0, 5.001])), TRIVIAL),
    Case(one_fixed_component, (Y,), TRIVIAL),
    Case(some_labels, (Y,), TRIVIAL),
    Case(left_to_right, (Y,), TRIVIAL),
    Case(nonnegative_factors, (POINTS,), TRIVIAL),
    Case(one_factor, (POINTS, 0.01), TRIVIAL),
    Case(one_factor_of_vectors, (POINTS, 0.01), TRIVIAL),
    # What remains: scales that tell factors apart leave their signs, means that fix signs leave the labels.
    Case(collapsed_factors, (POINTS, torch.tensor([1.0, 1.1, 1.2])), SignFlip({"loadings": -1})),
    Case(tanh_network_with_signs, (INPUTS, TARGETS), Permutation({"w": -1, "out": -1})),
]
