"""The standard models of the suite, with their data, symmetries and closed forms; variants by keyword.

A test that needs "some mixture" or "some regression" takes it from here; a model stays beside its test if its
peculiarity is what the test is about. Sites have the same names everywhere: ``w`` for coefficients, ``locs``,
``scales`` and ``weights`` for components, ``z`` for allocations, ``y`` for data in plate ``data``. Larger
models with known groups, and near misses of them, are in :mod:`tests.search.models`; networks with known
groups in :mod:`tests.network.networks`; posteriors with reference draws in :mod:`tests.sgmcmc.posteriors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_sym import Permutation, Product, SignFlip
from pyro_sym.nn import BayesianModule, Categorical, IIDPrior

Model = Callable[..., None]

# --- priors alone -------------------------------------------------------------------------------------------


def normals(
    shapes: Mapping[str, tuple[int, ...]], scale: Any = 1.0, dtype: torch.dtype | None = None
) -> Model:
    """Independent normal sites of these shapes, as event dims, whatever the data.

    Args:
        shapes: of the sites.
        scale: the same for all sites, or one for each by name.
        dtype: of the means; the default dtype at the time of the call if None.
    """

    def model(*_: Any) -> None:
        for name, shape in shapes.items():
            sd = scale[name] if isinstance(scale, Mapping) else scale
            pyro.sample(name, dist.Normal(torch.zeros(shape, dtype=dtype), sd).to_event(len(shape)))

    return model


def real_and_positive() -> None:
    """A site ``b`` in R^2 and a positive site ``a``."""
    pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("a", dist.LogNormal(0.0, 1.0))


def quartic(*shape: int) -> Model:
    """Fine near 0 and explosive far out, where no reasonable step is small enough."""

    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
        pyro.factor("wall", -x.pow(4).sum())

    return model


def random_joint() -> None:
    """A log joint with noise in it: random at fixed values."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.factor("noise", torch.randn(()) + w.sum())


def components(k: int, dim: int = 2, scale: float = 3.0) -> Model:
    """The sites of a mixture of ``k`` components in ``dim`` dimensions, without data."""

    def model() -> None:
        pyro.sample("weights", dist.Dirichlet(torch.ones(k)))
        with pyro.plate("components", k):
            pyro.sample("locs", dist.Normal(torch.zeros(dim), scale).to_event(1))
            pyro.sample("scales", dist.LogNormal(0.0, 1.0))

    return model


COMPONENTS = Permutation({"weights": -1, "locs": -2, "scales": -1})
"""The group of :func:`components`."""

# --- a normal mean ------------------------------------------------------------------------------------------


def normal_mean(y: Tensor, size: int | None = None, sd: float = 1.0) -> None:
    """y_i ~ N(loc, I) with loc ~ N(0, sd² I), of as many dimensions as a row: the posterior is known."""
    dims = y.dim() - 1
    loc = pyro.sample("loc", dist.Normal(torch.zeros(y.shape[1:]), sd).to_event(dims))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(loc, 1.0).to_event(dims), obs=y[rows])


def normal_mean_posterior(y: Tensor, sd: float = 1.0) -> dist.Normal:
    """The posterior of ``loc``: precision n + 1 / sd², mean Σ y_i over the precision."""
    precision = len(y) + sd**-2
    return dist.Normal(y.sum(0) / precision, precision**-0.5)


def normal_mean_and_scale(y: Tensor, size: int | None = None, sd: float = 1.0) -> None:
    """y_i ~ N(loc, scale²), both unknown, with loc ~ N(0, sd²)."""
    loc = pyro.sample("loc", dist.Normal(0.0, sd))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(loc, scale), obs=y[rows])


# --- regressions --------------------------------------------------------------------------------------------


def linear(x: Tensor, y: Tensor, size: int | None = None, sd: float = 1.0) -> None:
    """y_i ~ N(x_i · w, 1) with w ~ N(0, sd² I): the posterior is known."""
    w = pyro.sample("w", dist.Normal(torch.zeros_like(x[0]), sd).to_event(1))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


def linear_posterior(x: Tensor, y: Tensor, sd: float = 1.0) -> dist.MultivariateNormal:
    """The posterior of ``w``: precision P = XᵀX + I / sd², mean P⁻¹ Xᵀ y."""
    precision = x.T @ x + torch.eye(x.shape[1], dtype=x.dtype) / sd**2
    return dist.MultivariateNormal(torch.linalg.solve(precision, x.T @ y), precision_matrix=precision)


def linear_with_scale(x: Tensor, y: Tensor, size: int | None = None) -> None:
    """y_i ~ N(x_i · w, scale²), the noise unknown."""
    w = pyro.sample("w", dist.Normal(torch.zeros_like(x[0]), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, scale), obs=y[rows])


def slope(x: Tensor, y: Tensor, size: int | None = None) -> None:
    """y_i ~ N(slope · x_i, 1) of one covariate."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(slope * x[rows], 1.0), obs=y[rows])


def logistic(x: Tensor, y: Tensor, size: int | None = None) -> None:
    """y_i ~ Bernoulli with logit x_i · w."""
    w = pyro.sample("w", dist.Normal(torch.zeros_like(x[0]), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])


# --- mixtures and hidden Markov models ----------------------------------------------------------------------


def mixture(
    y: Tensor,
    size: int | None = None,
    *,
    k: int = 3,
    loc: Any = 0.0,
    scale: Any = 3.0,
    allocations: bool = True,
    equal_weights: bool = False,
) -> None:
    """A mixture of ``k`` unit normals.

    Args:
        y: the data.
        size: of minibatches.
        k: the number of components.
        loc: of the prior of the means, the same for all or one for each.
        scale: of the prior of the means.
        allocations: with a site ``z`` to enumerate, or summed out by the distribution.
        equal_weights: 1/k each, in place of a Dirichlet.
    """
    weights = torch.ones(k) / k if equal_weights else pyro.sample("weights", dist.Dirichlet(torch.ones(k)))
    with pyro.plate("components", k):
        locs = pyro.sample("locs", dist.Normal(loc, scale))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        if allocations:
            z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y[rows])
        else:
            both = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, 1.0))
            pyro.sample("y", both, obs=y[rows])


MIXTURE = Permutation({"weights": -1, "locs": -1})
"""The group of :func:`mixture` with a common prior; ``{"locs": -1}`` for equal weights."""


def mixture_allocations(y: Tensor, locs: Tensor, weights: Tensor) -> Tensor:
    """p(z_i = k | y_i, θ), of shape ``(*batch, n, k)``, for parameters of shape ``(*batch, k)``."""
    # (*batch, n, k)
    joint = dist.Normal(locs.unsqueeze(-2), 1.0).log_prob(y.unsqueeze(-1)) + weights.log().unsqueeze(-2)
    return joint.softmax(-1)


def hidden_markov(y: Tensor, k: int = 3) -> None:
    """A hidden Markov model of ``k`` states with unit normal emissions, its states summed out."""
    trans = pyro.sample("trans", dist.Dirichlet(torch.ones(k, k)).to_event(1))
    initial = pyro.sample("initial", dist.Dirichlet(torch.ones(k)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(k), 3.0).to_event(1))
    emission = dist.Normal(locs, 1.0)
    pyro.sample("y", dist.DiscreteHMM(initial.log(), trans.log(), emission, duration=len(y)), obs=y)


HIDDEN_MARKOV = Permutation({"trans": (-2, -1), "initial": -1, "locs": -1})


def factors(y: Tensor, k: int = 2) -> None:
    """One observation of ``k`` factors: y ~ N(loadings · scores, I)."""
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(len(y), k), 1.0).to_event(2))
    scores = pyro.sample("scores", dist.Normal(torch.zeros(k), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(loadings @ scores, 1.0).to_event(1), obs=y)


FACTORS = Product(Permutation({"loadings": -1, "scores": -1}), SignFlip({"loadings": -1, "scores": -1}))

# --- networks -----------------------------------------------------------------------------------------------


def tanh_layer(x: Tensor, y: Tensor, size: int | None = None, *, width: int = 6) -> None:
    """y_i ~ N(tanh(x_i W) · v, 0.1²)."""
    w = pyro.sample("w", dist.Normal(torch.zeros(x.shape[-1], width), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(width), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=size) as rows:
        pyro.sample("y", dist.Normal(torch.tanh(x[rows] @ w) @ v, 0.1), obs=y[rows])


TANH_LAYER = Product(Permutation({"w": -1, "v": -1}), SignFlip({"w": -1, "v": -1}))


def mlp(inputs: int = 3, width: int = 4, outputs: int = 2) -> nn.Sequential:
    """A tanh network of one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def bayesian_mlp(net: nn.Module | None = None, **likelihood: Any) -> BayesianModule:
    """A classifier: :func:`mlp` with standard normal weights."""
    return BayesianModule(net or mlp(), IIDPrior(dist.Normal(0.0, 1.0)), Categorical(**likelihood))
