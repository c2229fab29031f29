"""What is more than rounding: near misses at all scales, in both precisions; symmetries that lose digits.

Covers also `model.double_precision`.
"""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_sym import BayesianModule, Permutation, Product, SignFlip, SymmetryError, find_symmetry, symmetry_of
from pyro_sym.model.double_precision import CastsToDouble
from pyro_sym.model.program import Program, Term
from pyro_sym.nn import Gaussian, IIDPrior
from pyro_sym.search.check import check
from pyro_sym.search.comparison import Joint, compared, rounding_levels
from pyro_sym.search.find import find
from tests.search.models import CASES, NEAR_MISSES, Case

DOUBLE, SINGLE = torch.float64, torch.float32
DATA_PLATES = {"data", "people", "documents", "words", "answers", "senders", "receivers", "labelled"}


class DataScaled(Messenger):
    """Scales the likelihood: what is observed, and what is in a plate of data."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def _pyro_sample(self, msg: Any) -> None:
        plates = {frame.name for frame in msg["cond_indep_stack"]}
        if msg["is_observed"] or plates & DATA_PLATES or msg["name"].startswith("x_"):
            msg["scale"] = msg["scale"] * self.scale


def found(model: Any, args: tuple[Any, ...], dtype: torch.dtype) -> str:
    if dtype == DOUBLE:
        return repr(find_symmetry(model, *args))
    with torch.no_grad():
        return repr(find(Program(model, args), SINGLE))


def checked(model: Any, args: tuple[Any, ...], symmetry: Any, dtype: torch.dtype) -> None:
    """The check in the precision of the arguments, whatever other precision the model may run in."""
    with torch.no_grad():
        to = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        torch.set_default_dtype(dtype)
        check(Program(model, tuple(to)), dtype, symmetry)


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("scale", [1e3, 1e6])
@pytest.mark.parametrize("case", NEAR_MISSES, ids=repr)
def test_a_large_likelihood_hides_no_break(case: Case, scale: float, dtype: torch.dtype) -> None:
    assert found(DataScaled(scale)(case.model), case.args, dtype) == repr(case.symmetry)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=repr)
def test_near_misses_are_seen_in_single_precision(case: Case) -> None:
    assert found(case.model, case.args, SINGLE) == repr(case.symmetry)


@pytest.mark.parametrize("case", CASES[:1] + CASES[6:7] + CASES[11:15] + CASES[-1:], ids=repr)
def test_right_groups_are_found_in_single_precision_with_a_large_likelihood(case: Case) -> None:
    assert found(DataScaled(1e6)(case.model), case.args, SINGLE) == repr(case.symmetry)


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("kind", [Permutation, SignFlip])
def test_one_of_many_elements_of_a_prior(kind: Any, scale: float, dtype: torch.dtype) -> None:
    """A mean of .1 at one of 300 elements, beside a likelihood of 10^10 nats, at any scale of the prior.

    Signs are missed if none of 27 random elements flips it, with probability 2^-27.
    """

    def model(loc: Tensor) -> None:
        with poutine.scale(scale=scale):
            pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))
        pyro.sample("y", dist.Normal(torch.zeros(100), 1e-4).to_event(1), obs=torch.ones(100))

    loc = torch.zeros(300)
    checked(model, (loc,), kind({"w": -1}), dtype)
    loc[123] = 0.1
    with pytest.raises(SymmetryError, match=r"moved: 'w' by [^,]*\. Is a site"):
        checked(model, (loc,), kind({"w": -1}), dtype)


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_a_symmetry_that_loses_digits_passes_and_lends_none(
    offset: float, noise: float, dtype: torch.dtype
) -> None:
    """In single precision the mean is rounded by up to .06: some .06 / noise, relative to the likelihood."""
    units = {"w": -1, "b": -1, "out": -1}

    def model(x: Tensor, y: Tensor, loc: float) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 6), 1.0).to_event(2))
        b = pyro.sample("b", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        out = pyro.sample("out", dist.Normal(loc, 1.0).expand([6]).to_event(1))
        shift = torch.full((1,), offset)
        mean = F.linear(torch.tanh(x @ w + b), out.unsqueeze(0), shift).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, noise), obs=y)

    x = torch.randn(500, 3)
    symmetry, args = Product(Permutation(units), SignFlip(units)), (x, x.sum(-1) + offset)
    checked(model, (*args, 0.0), symmetry, dtype)
    with pytest.raises(SymmetryError, match="'out' by"):
        checked(model, (*args, 0.001), symmetry, dtype)


def test_few_rows_among_rows_of_a_million_nats() -> None:
    def model(y: Tensor, mark: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.factor("f", -1e6 * (1 + (y - locs.sum()) ** 2) + mark * locs[0])

    y, mark = torch.randn(5000), torch.zeros(5000)
    checked(model, (y, mark), Permutation({"locs": -1}), DOUBLE)
    mark[100:105] = 1.0
    with pytest.raises(SymmetryError, match="'f' by"):
        checked(model, (y, mark), Permutation({"locs": -1}), DOUBLE)


@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-5])
def test_a_prior_inside_of_a_term_of_summed_out_sites(noise: float) -> None:
    """At a noise of 1e-5 a row has some 1e11 nats, and the prior of its label a hundredth."""

    def model(y: Tensor, extra: Tensor) -> None:
        with pyro.plate("components", 3):
            locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(logits=extra))
            pyro.sample("y", dist.Normal(locs[z], noise), obs=y)

    y = torch.randn(100)
    checked(model, (y, torch.zeros(3)), Permutation({"locs": -1}), DOUBLE)
    with pytest.raises(SymmetryError, match=r"'z\+y' by"):
        checked(model, (y, torch.tensor([0.0, 0.0, 0.01])), Permutation({"locs": -1}), DOUBLE)


def test_masked_elements_are_not_compared() -> None:
    def model(y: Tensor, mask: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(y)), poutine.mask(mask=mask):
            shift = torch.where(torch.arange(4) < 2, locs[0], 0.0).unsqueeze(-1)
            pyro.sample("y", dist.Normal((locs.sum() + shift).expand(4, 2), 1.0).to_event(1), obs=y)

    y = torch.randn(4, 2)
    checked(model, (y, torch.arange(4) >= 2), Permutation({"locs": -1}), DOUBLE)
    with pytest.raises(SymmetryError, match="'y' by"):
        checked(model, (y, torch.arange(4) >= 1), Permutation({"locs": -1}), DOUBLE)


def test_a_prior_is_not_drowned_by_a_sharp_likelihood_of_a_network() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(2000, 3)
    y = torch.sin(x.sum(-1, keepdim=True))
    for mean, groups in ((0.1, "S_4>"), (0.0, "S_4, {±1}^4>")):
        model = BayesianModule(net, IIDPrior(dist.Normal(mean, 1.0)), Gaussian(0.003, num_data=len(x)))
        assert repr(find_symmetry(model, x, y)).endswith(groups)
    assert len(symmetry_of(net, x[:2]).members) == 2


def joint(scale: float = 1.0, **terms: Tensor) -> Joint:
    return Joint({name: Term(elements, scale) for name, elements in terms.items()})


def test_the_rule() -> None:
    """A term in balance and a term at rest lend nothing; unbalanced terms may make up for each other."""
    resting = torch.full((1000,), 1e6, dtype=DOUBLE)
    prior = torch.tensor([1.0, 2.0], dtype=DOUBLE)
    noisy = resting + 1e-7 * torch.randn(1000, dtype=DOUBLE)
    assert compared(joint(y=resting, w=prior), joint(y=noisy, w=prior)) is None
    assert compared(joint(y=resting, w=prior), joint(y=resting.flip(0), w=prior.flip(0))) is None
    change = compared(joint(y=resting, w=prior), joint(y=noisy, w=prior + torch.tensor([0.0, 1e-9])))
    assert change and set(change.terms) == {"w"} and change.allowed < 1e-11
    assert math.isclose(change.total, 1e-9, rel_tol=1e-6)
    assert compared(joint(a=prior, b=prior), joint(a=prior + 1, b=prior - 1)) is None
    assert compared(joint(a=prior, b=prior), joint(a=prior + 1, b=prior - 1.0001))


def test_a_change_that_is_no_number_is_a_change() -> None:
    change = compared(joint(a=torch.zeros(2)), joint(a=torch.tensor([0.0, torch.nan])))
    assert change and change.relative == math.inf


def test_permuted_elements_lend_nothing() -> None:
    """In single precision 10,000 elements that change places would allow for .1 nats together."""
    before = torch.randn(10_000)
    after = before[torch.randperm(10_000)]
    assert compared(joint(w=before), joint(w=after)) is None
    after[77] += 0.01
    change = compared(joint(w=before), joint(w=after))
    assert change and math.isclose(change.total, 0.01, rel_tol=0.05)


def test_rounding_is_measured() -> None:
    """Of a number with an offset, the rounding is that of the offset; of a smooth function, next to none."""
    x = torch.rand(200, dtype=DOUBLE) + 1

    def evaluate(values: dict[str, Tensor]) -> Joint:
        return joint(offset=values["x"] + 1e8 - 1e8, smooth=values["x"].square())

    levels = rounding_levels(evaluate, {"x": x}, evaluate({"x": x}))
    ulp = 2.0**-26  # of 1e8
    assert ulp / 4 < levels["offset"] < 64 * ulp
    assert levels["smooth"] < 1e-13


def test_other_sites_at_other_values_are_refused() -> None:
    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("first" if w[0] > w[1] else "second", torch.zeros(()))

    with pytest.raises(SymmetryError, match=r"other sites at other values.*'first', 'second'"):
        find_symmetry(model)


def single_mean(locs: Tensor) -> Tensor:
    """A sum in single precision, which depends on the order of its terms."""
    return F.linear(locs.float(), torch.full((1, 6), 0.1, dtype=torch.float32))


def single_softmax(locs: Tensor) -> Tensor:
    return (locs.softmax(-1, dtype=torch.float32).to(locs.dtype) * locs).sum()


@pytest.mark.parametrize("mean", [single_mean, single_softmax])
def test_casts_inside_of_a_model_lose_no_group(mean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(y: Tensor, third: float = 0.0) -> None:
        prior = torch.tensor([0.0, 0.0, third, 0.0, 0.0, 0.0])
        locs = pyro.sample("locs", dist.Normal(prior, 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean(locs), 0.01), obs=y)

    y = torch.linspace(-1, 2, 20)
    assert repr(find_symmetry(model, y)) == repr(Permutation({"locs": -1}))
    assert repr(find_symmetry(model, y, 0.001)) == "Product()"  # a near miss
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(CastsToDouble, "found", never, raising=False)
    assert repr(find_symmetry(model, y)) == "Product()"  # the control: with the casts, rounding breaks it


def test_scalars_stay_scalars_where_casts_are_looked_for() -> None:
    with CastsToDouble() as casts:
        assert torch.ones(()).new(torch.Size([])).shape == ()
        assert not casts.found
        assert torch.ones((), dtype=torch.float32).dtype == torch.float64
    assert casts.found
