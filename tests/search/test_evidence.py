"""Groups are tried on all rows, and products and their members on the same evidence.

Covers also `model.all_rows`.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor, nn

from pyro_sym import (
    AutoSymmetrized,
    BayesianModule,
    Permutation,
    Product,
    SignFlip,
    SymmetryError,
    check_symmetry,
    find_symmetry,
)
from pyro_sym.model.program import Program
from pyro_sym.nn import Gaussian, IIDPrior
from pyro_sym.search import evidence
from pyro_sym.search.evidence import Evidence, unbroken
from tests.catalogue import MIXTURE, mixture
from tests.search.models import ones, zeros
from tests.search.test_check import SUMMED_OUT

LOCS = Permutation({"locs": -1})


def partly_labelled(y: Tensor, labels: Tensor, size: int, scale: float = 1.0, exact: bool = False) -> None:
    """A mixture of three in which the labels of some rows are known; -1 stands for unknown."""
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    with poutine.scale(scale=scale), pyro.plate("data", len(y), subsample_size=size) as rows:
        assert not exact or len(rows) == size
        each = dist.Normal(locs, 1.0).log_prob(y[rows].unsqueeze(-1))
        known = each.gather(1, labels[rows].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        pyro.factor("y", torch.where(labels[rows] >= 0, known, each.logsumexp(-1)))


def data(size: int, *labelled: int) -> tuple[Tensor, Tensor]:
    labels = torch.full((size,), -1)
    for number, row in enumerate(labelled):
        labels[row] = number % 3
    return 3 * torch.randn(size), labels


def refused(model: Any, symmetry: Any, *args: Any) -> bool:
    try:
        check_symmetry(model, symmetry, *args)
    except SymmetryError:
        return True
    return False


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("size", [1, 50, 999])
@pytest.mark.parametrize("labelled", [(0, 1, 2, 3, 4), (2500,), (4999,)])
def test_few_rows_break_a_symmetry(labelled: tuple[int, ...], size: int, scale: float) -> None:
    """A random minibatch of 50 of 5000 rows holds one of five rows with probability .05."""
    args = (*data(5000, *labelled), size, scale)
    assert refused(partly_labelled, LOCS, *args)
    assert repr(find_symmetry(partly_labelled, *args)) == "Product()"
    assert not refused(partly_labelled, LOCS, *data(5000), size, scale)


def test_a_model_that_takes_one_number_of_rows_only_is_shown_that_number() -> None:
    args = (*data(500, 499), 50, 1.0, True)
    assert refused(partly_labelled, LOCS, *args)
    assert repr(find_symmetry(partly_labelled, *args)) == "Product()"
    assert not refused(partly_labelled, LOCS, *data(500), 50, 1.0, True)


def test_a_guide_is_not_averaged_over_a_group_that_few_rows_break() -> None:
    for labelled in ((7,), ()):
        args = (*data(2000, *labelled), 20)
        guide = AutoSymmetrized(AutoNormal(partly_labelled), LOCS)
        with pytest.raises(SymmetryError, match="'y' by") if labelled else nullcontext():
            guide(*args)


def test_two_plates_are_seen_in_all_their_cells() -> None:
    def model(y: Tensor, mark: Tensor, exact: bool) -> None:
        locs = pyro.sample("locs", dist.Normal(zeros(3), 1.0).to_event(1))
        outer = pyro.plate("rows", 40, subsample_size=7, dim=-2)
        inner = pyro.plate("columns", 30, subsample_size=4, dim=-1)
        with outer as rows, inner as columns:
            assert not exact or (len(rows), len(columns)) == (7, 4)
            here = mark[rows][:, columns]
            pyro.factor("f", -((y[rows][:, columns] - locs.sum()) ** 2) + here * locs[0])

    y, mark = torch.randn(40, 30), torch.zeros(40, 30)
    for exact in (False, True):
        assert not refused(model, LOCS, y, mark, exact)
        marked = mark.clone()
        marked[39, 17] = 1.0
        assert refused(model, LOCS, y, marked, exact)


def test_local_latents_and_sequential_plates_are_seen_on_all_rows() -> None:
    def topics(counts: Tensor, mark: Tensor) -> None:
        with pyro.plate("topics", 3):
            beta = pyro.sample("beta", dist.Dirichlet(ones(4)))
        with pyro.plate("documents", len(counts), subsample_size=5) as rows:
            theta = pyro.sample("theta", dist.Dirichlet(ones(3)))
            pyro.factor("words", (counts[rows] * (theta @ beta).log()).sum(-1) + mark[rows] * theta[:, 0])

    def loop(y: Tensor, mark: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(zeros(3), 1.0).to_event(1))
        for i in pyro.plate("data", len(y), subsample_size=5):
            pyro.sample(f"y_{i}", dist.Normal(locs.sum() + mark[i] * locs[0], 1.0), obs=y[i])

    labels = Permutation({"beta": -2, "theta": -1})
    for model, symmetry, y in ((topics, labels, torch.rand(33, 4)), (loop, LOCS, torch.randn(33))):
        mark = torch.zeros(33)
        assert not refused(model, symmetry, y, mark)
        mark[32] = 1.0
        assert refused(model, symmetry, y, mark)
    assert repr(find_symmetry(topics, torch.rand(33, 4), torch.zeros(33))) == repr(labels)


@pytest.mark.parametrize("model", [mixture, SUMMED_OUT])
def test_true_symmetries_pass_on_all_rows(model: Any) -> None:
    y = torch.randn(300)
    check_symmetry(model, MIXTURE, y, 7)
    assert repr(find_symmetry(model, y, 7)) == repr(MIXTURE)


def test_what_few_rows_tie_is_found_tied() -> None:
    """Labels of a and b are tied by one row of 2000. The search misses it, is told, and goes on."""

    def model(y: Tensor) -> None:
        with pyro.plate("components", 3):
            a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in "ab")
        with pyro.plate("data", len(y), subsample_size=20) as rows:
            mean = a.logsumexp(0) + (rows == 77) * (a * b).sum()
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])

    assert repr(find_symmetry(model, torch.randn(2000))) == "Permutation({'a': -1, 'b': -1})"


def test_rows_that_are_too_dear_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MAX_ROW_EVALUATIONS", 20)
    args = (*data(1000), 10, 1.0, True)
    match = r"10 of 100 windows of rows were checked \(100 of 1,000 rows of plate 'data'\)"
    with pytest.warns(UserWarning, match=rf"Permutation\({{'locs': -1}}\) is not checked.*{match}") as caught:
        check_symmetry(partly_labelled, LOCS, *args)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=rf"was not checked on all rows.*{match}") as caught:
        find_symmetry(partly_labelled, *args)
    assert caught[0].filename == __file__
    monkeypatch.setattr(evidence, "MAX_ROW_EVALUATIONS", 200)  # two evaluations a window
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_symmetry(partly_labelled, LOCS, *args)


def test_windows_without_a_finite_log_joint_are_named() -> None:
    def model(y: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y), subsample_size=5) as rows:
            assert len(rows) == 5
            pyro.factor("y", torch.where(y[rows] > 0, locs.sum(), -torch.inf))

    y = torch.ones(100)
    y[3] = -1.0
    with pytest.warns(UserWarning, match=r"finite at none of 3 prior draws on 1 of 20 windows.*'data'"):
        check_symmetry(model, LOCS, y)


def test_members_of_a_product_are_judged_on_what_speaks_against_it() -> None:
    """Signs of b are broken by one unit of 40; only random elements flip it, in half of the cases."""

    def model(loc: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(zeros(40), 1.0).to_event(1))
        pyro.sample("b", dist.Normal(loc, 1.0).to_event(1))
        pyro.factor("f", a.sum().square())

    loc = zeros(40)
    loc[33] = 1e-3
    members = [
        Permutation({"a": -1}),
        Permutation({"b": -1}),
        SignFlip({"b": -1}),
    ]
    program = Program(model, (loc,))
    kept, broken = unbroken(Evidence(program, torch.float32), members, Product)
    assert kept == members[:1]
    assert {member for member, _ in broken} == set(members[1:])
    assert all(refutation.change and refutation.change.terms.keys() == {"b"} for _, refutation in broken)
    with pytest.warns(UserWarning, match=r"is left out: the model is not invariant under.*'b' by"):
        assert repr(find_symmetry(model, loc)) == "Permutation({'a': -1})"


def test_members_are_told_apart_where_they_move_together() -> None:
    """An element of the product that moves all members: only the member that is broken goes."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def prior(name: str, parameter: nn.Parameter, module: nn.Module) -> Any:
        loc = 1e-3 if name == "2.bias" else 0.0
        return IIDPrior(dist.Normal(loc, 1.0))(name, parameter, module)

    model = BayesianModule(net, prior, Gaussian(0.1), batch_size=10)
    found = find_symmetry(model, torch.randn(60, 2), torch.randn(60, 1))
    assert repr(found) == "<NetworkSymmetry of 5 sites: S_3, {±1}^3, S_3>"


def test_one_finite_draw_of_many_is_enough() -> None:
    """A fifth of the draws is finite: 20 draws have none with probability .01, 60 with probability 1e-6."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(zeros(3), 1.0).to_event(1))
        pyro.factor("f", torch.where(w.sum() > 1.46, 0.0, -torch.inf))

    for seed in range(12):
        pyro.set_rng_seed(seed)
        check_symmetry(model, Permutation({"w": -1}))


def test_images_outside_of_the_support_are_refused() -> None:
    def model() -> None:
        base = dist.Normal(zeros(3), 1.0).to_event(1)
        pyro.sample("w", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
        pyro.sample("v", dist.HalfNormal(1.0).expand([3]).to_event(1))

    with pytest.raises(SymmetryError, match=r"flipping the sign of 0.*out of their support.*'v'"):
        check_symmetry(model, SignFlip({"v": -1}))


def test_a_check_on_all_rows_leaves_the_generator_and_the_plates_alone() -> None:
    state = torch.random.get_rng_state()
    plates = SubsampleMessenger._subsample
    check_symmetry(partly_labelled, LOCS, torch.linspace(-1, 1, 200), torch.full((200,), -1), 20)
    assert torch.equal(state, torch.random.get_rng_state())
    assert SubsampleMessenger._subsample is plates


def bounded(*, low: Any = -5.0, high: Any = 5.0, pareto: bool = False) -> Any:
    """Three exchangeable components, but for the bounds of their prior."""
    low, high = torch.broadcast_tensors(torch.as_tensor(low), torch.as_tensor(high), ones(3))[:2]

    def model(y: Tensor) -> None:
        prior = dist.Pareto(high, 3.0) if pareto else dist.Uniform(low, high)
        locs = pyro.sample("locs", prior.to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(ones(3)), dist.Normal(locs, 1.0)), obs=y)

    return model


@pytest.mark.parametrize(
    "model",
    [
        bounded(high=torch.tensor([5.0, 5.0, 5.001])),
        bounded(low=torch.tensor([-5.001, -5.0, -5.0])),
        bounded(high=torch.tensor([5.0, 5.0005, 5.0]), pareto=True),
    ],
)
def test_bounds_that_differ_by_little_are_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prior draw in 10,000 tells them apart."""
    y = torch.linspace(-3, 3, 20)
    assert refused(model, LOCS, y)
    assert repr(find_symmetry(model, y)) == "Product()"
    monkeypatch.setattr(evidence, "_draws_at_bounds", lambda *_: [])
    assert not refused(model, LOCS, y)  # the control: prior draws alone say nothing


def test_bounds_that_move_with_the_components_are_no_break() -> None:
    def model(y: Tensor) -> None:
        with pyro.plate("components", 3):
            widths = pyro.sample("widths", dist.Gamma(2.0, 1.0))
            locs = pyro.sample("locs", dist.Uniform(-widths, widths))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(ones(3)), dist.Normal(locs, 1.0)), obs=y)

    y = torch.linspace(-3, 3, 20)
    assert repr(find_symmetry(model, y)) == repr(Permutation({"widths": -1, "locs": -1}))
    assert refused(model, LOCS, y)
    assert repr(find_symmetry(bounded(high=5 * ones(3)), y)) == repr(LOCS)
