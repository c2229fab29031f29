"""Models that write into tensors, or index by masks: their gradient is traced for one chain and for many.

Covers also `graph.record` (in-place operations, side effects), as does tests/model/test_gradient.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym.graph import batching
from pyro_sym.graph.record import trace, without_writes
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch, draw_indices
from pyro_sym.model.potential import Potential

pytestmark = pytest.mark.usefixtures("float64")

ROWS = 9
_generator = torch.Generator().manual_seed(0)
DATA = torch.randn(ROWS, 4, generator=_generator).double()
COUNTS = torch.randint(0, 4, (ROWS, 4), generator=_generator).double()
MODELS: dict[str, Callable[[], Any]] = {}


def case(model: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[model.__name__] = model
    return model


def normal(*shape: int) -> Tensor:
    """A latent site of this shape."""
    value: Tensor = pyro.sample("x", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
    return value


def near_one(value: Tensor) -> None:
    pyro.factor("f", -(value - 1).square().sum())


@case
def low_rank_normal() -> None:
    diagonal = pyro.sample("d", dist.LogNormal(torch.zeros(4), 1.0).to_event(1))
    factor = normal(4, 2)
    with pyro.plate("rows", ROWS, subsample_size=5) as row:
        law = dist.LowRankMultivariateNormal(torch.zeros(4), factor, diagonal)
        pyro.sample("y", law, obs=DATA[row])


@case
def low_rank_normals() -> None:
    """One for each row."""
    factors = normal(ROWS, 4, 2)
    with pyro.plate("rows", ROWS, subsample_size=5) as row:
        law = dist.LowRankMultivariateNormal(torch.zeros(4), factors[row], torch.ones(4))
        pyro.sample("y", law, obs=DATA[row])


@case
def normal_by_precision() -> None:
    factor = normal(4, 4)
    law = dist.MultivariateNormal(torch.zeros(4), precision_matrix=factor @ factor.T + torch.eye(4))
    with pyro.plate("rows", ROWS):
        pyro.sample("y", law, obs=DATA)


@case
def student_t() -> None:
    scale = pyro.sample("scale", dist.LKJCholesky(3, 2.0))
    df = pyro.sample("df", dist.Gamma(2.0, 0.1))
    with pyro.plate("rows", ROWS):
        pyro.sample("y", dist.MultivariateStudentT(df, torch.zeros(3), scale), obs=DATA[:, :3])


@case
def gaussian_hmm() -> None:
    start = dist.MultivariateNormal(torch.zeros(2), torch.eye(2))
    noise = dist.MultivariateNormal(torch.zeros(1), torch.eye(1))
    law = dist.GaussianHMM(start, normal(2, 2), start, torch.ones(2, 1), noise, duration=2)
    pyro.sample("y", law, obs=DATA[:2, :1])


@case
def multinomial() -> None:
    """Its log probability writes through a mask that depends on the logits."""
    logits = normal(4)
    with pyro.plate("rows", ROWS, subsample_size=3) as row:
        pyro.sample("y", dist.Multinomial(logits=logits, validate_args=False), obs=COUNTS[row])


@case
def multinomial_of_a_simplex() -> None:
    probs = pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    with pyro.plate("rows", ROWS):
        pyro.sample("y", dist.Multinomial(probs=probs, validate_args=False), obs=COUNTS)


@case
def binomial() -> None:
    logits = normal(4)
    with pyro.plate("rows", ROWS, dim=-2), pyro.plate("columns", 4, dim=-1):
        pyro.sample("y", dist.Binomial(total_count=COUNTS + 2, logits=logits), obs=COUNTS)


@case
def impossible_category() -> None:
    logits = torch.cat([normal(3), torch.tensor([-torch.inf])])
    with pyro.plate("rows", ROWS):
        pyro.sample("y", dist.Categorical(logits=logits), obs=COUNTS[:, 0].clamp(max=2))


@case
def dirichlet_multinomial() -> None:
    concentration = normal(4).exp()
    with pyro.plate("rows", ROWS):
        law = dist.DirichletMultinomial(concentration, total_count=COUNTS.sum(-1))
        pyro.sample("y", law, obs=COUNTS)


@case
def zero_inflated() -> None:
    rate, gate = normal(2).sigmoid()
    with pyro.plate("rows", ROWS):
        pyro.sample("y", dist.ZeroInflatedPoisson(rate, gate=gate), obs=COUNTS[:, 0])


@case
def masked_mixture() -> None:
    low, high = normal(2)
    with pyro.plate("rows", ROWS):
        law = dist.MaskedMixture(DATA[:, 0] > 0, dist.Normal(low, 1.0), dist.Normal(high, 2.0))
        pyro.sample("y", law, obs=DATA[:, 1])


@case
def ordered_categories() -> None:
    """Its transform writes into a slice without a first element."""
    cuts = dist.TransformedDistribution(
        dist.Normal(torch.zeros(3), 1.0).to_event(1), [dist.transforms.OrderedTransform()]
    )
    law = dist.OrderedLogistic(normal(1) * DATA[:, 0], pyro.sample("cuts", cuts))
    with pyro.plate("rows", ROWS):
        pyro.sample("y", law, obs=COUNTS[:, 0])


@case
def missing_data() -> None:
    """A constant that the model copies, and writes into."""
    data = DATA[:, 0].clone()
    data[2] = torch.nan
    loc = normal(1)
    with pyro.plate("rows", ROWS), pyro.poutine.mask(mask=~data.isnan()):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=data.nan_to_num())


@case
def column_by_column() -> None:
    x, columns = normal(4), torch.zeros(ROWS, 4)
    for k in range(4):
        columns[..., k] = x[k] * DATA[:, k]
    near_one(columns)


@case
def jitter_on_a_diagonal() -> None:
    square = normal(4, 4)
    square = square @ square.T
    square.diagonal().add_(1.0)
    square.view(-1)[::5] += 0.5
    pyro.factor("f", -torch.logdet(square))


@case
def filled_diagonal() -> None:
    square = 0.1 * normal(4, 4)
    square.fill_diagonal_(5.0)
    pyro.factor("f", -torch.logdet(square))


@case
def view_by_strides() -> None:
    """The transpose makes strides and order of elements differ."""
    x = normal(16)
    y = x.view(4, 4).T * 2.0
    y.as_strided((4,), (5,)).copy_(x[:4].exp())
    near_one(y * torch.arange(16.0).view(4, 4))


@case
def recursion() -> None:
    x, z = normal(ROWS), torch.zeros(ROWS + 1)
    for t in range(ROWS):
        z[t + 1] = 0.5 * z[t] + x[t]
    near_one(z)


@case
def triangle() -> None:
    x, lower = normal(6), torch.zeros(3, 3)
    rows, columns = torch.tril_indices(3, 3)
    lower[rows, columns] = x
    lower[0, 1] = x[4]
    lower[:, 2] += x[3:]
    near_one(lower)


@case
def mask_of_data() -> None:
    x = normal(ROWS) * 1.0
    x[DATA[:, 0] > 0] = 0.0
    near_one(x)


@case
def mask_of_latents() -> None:
    x = normal(ROWS, 3)
    y = x * 1.0
    y[x < 0] = 0.25
    y[x[:, 0] < -0.2] = torch.tensor([1.5, 2.5, 3.5])
    y[..., x[0] > 0] = 0.5
    y.masked_fill_(x > 0.4, 3.0)
    near_one(y)
    pyro.factor("g", -x.square().sum())


@case
def scattered_through_a_mask() -> None:
    x, filled = normal(ROWS), torch.zeros(ROWS)
    filled.masked_scatter_(DATA[:, 0] > 0, x)
    near_one(filled)


@case
def transposed_views() -> None:
    x, z = normal(4), torch.zeros(2, 3)
    z[0, :2] = x[:2]
    z[1:, 1:] = x[2:]
    z[:, 0].mul_(2).add_(1)
    near_one(z)
    z.t()[2].sub_(3.0)
    pyro.factor("g", z.sum())


@case
def scattered() -> None:
    x, sums = normal(ROWS), torch.zeros(3)
    sums.index_add_(0, COUNTS[:, 0].long().clamp(max=2), x)
    sums.scatter_add_(0, COUNTS[:, 1].long().clamp(max=2), x.exp())
    near_one(sums)


def gradient_of(model: Callable[[], Any], chains: int) -> tuple[Gradient, Tensor, Minibatch]:
    potential = Potential(model)
    position = 0.5 * torch.randn(chains, potential.size)
    return Gradient(potential), position, Minibatch(draw_indices(potential.program.plates, chains))


@pytest.mark.parametrize("name", MODELS)
def test_writes_are_traced(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A warning, as of a fallback, is an error; torch tells of chains taken one by one on standard error."""
    for chains in (1, 3):
        gradient, position, minibatch = gradient_of(MODELS[name], chains)
        result = gradient(position, minibatch)
        expected = gradient.eager(position, minibatch)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
        assert gradient.mode == "trace" and gradient.reason is None and not gradient._alone
    assert "BatchedFallback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["low_rank_normal", "multinomial", "recursion", "mask_of_latents"])
def test_a_graph_does_not_grow_with_the_chains(name: str) -> None:
    lengths = set()
    for chains in (3, 12):
        gradient, position, minibatch = gradient_of(MODELS[name], chains)
        lengths.add(len(gradient.graph(position, minibatch).graph.nodes))
    assert len(lengths) == 1


@pytest.mark.parametrize("operation", ["index_put", "slice_scatter"])
def test_control_a_wrong_rule_is_found(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a write dropped, the comparison with the model would tell."""
    monkeypatch.setitem(
        batching._RULES, getattr(torch.ops.aten, operation).default, lambda node, into, *args: into * 1.0
    )
    name = {"index_put": "mask_of_latents", "slice_scatter": "jitter_on_a_diagonal"}[operation]
    gradient, position, minibatch = gradient_of(MODELS[name], 3)
    with pytest.warns(UserWarning, match="right only where it was traced"):
        gradient(position, minibatch)


def test_what_a_mask_selects_is_taken_chain_by_chain() -> None:
    """How much that is differs between chains, so that no graph of all of them can be."""

    def model() -> None:
        x = normal(ROWS)
        pyro.factor("f", -x[x > 0].square().sum())

    gradient, position, minibatch = gradient_of(model, 3)
    with pytest.warns(UserWarning, match=r"one chain at a time.*test_batching\.py:.*write torch\.where"):
        result = gradient(position, minibatch)
    for start in (position, -position):
        result = gradient(start, minibatch)  # no second warning
        torch.testing.assert_close(result, gradient.eager(start, minibatch), rtol=1e-10, atol=1e-10)
    assert gradient.mode == "trace" and gradient._alone
    again = Gradient(gradient.potential)
    again.load_state_dict(gradient.state_dict())
    again(position, minibatch)  # so that a resumed run does as it did
    assert again._alone


@pytest.mark.parametrize("offset", [None, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_views_by_strides_show_the_same_elements(offset: int | None, transposed: bool) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        base = (x.T if transposed else x) * 2.0
        return (base.as_strided((2, 2), (4, 1), offset), base.as_strided_scatter(y, (2, 2), (4, 1), offset))

    x, y = torch.randn(5, 3, 4), torch.randn(5, 2, 2)
    graph = without_writes(trace(function, [x[0], y[0]]), [x[0], y[0]])
    results = batching.over_chains(graph, [x[0], y[0]], (0, 0))(x, y)
    for chain in range(5):
        expected = function(x[chain], y[chain])
        torch.testing.assert_close([r[chain] for r in results], list(expected), rtol=0, atol=0)
