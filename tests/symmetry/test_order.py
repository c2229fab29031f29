"""Groups of which some elements do nothing: what is found, and what their averages are worth."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym import Permutation, Product, SignFlip, find_symmetry
from pyro_sym.orbit import uniform as importance
from pyro_sym.orbit.enumeration import enumerated
from pyro_sym.orbit.uniform import uniform, uniform_unbiased
from tests.conftest import Z_LIMIT

Y = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()


def correlated_factors() -> None:
    """Two factors with a correlation: swapping both axes of a 2 x 2 correlation matrix is the identity."""
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(4, 2), 1.0).to_event(2))
    correlation = pyro.sample("correlation", dist.LKJ(2, torch.tensor(2.0)))
    covariance = loadings @ correlation @ loadings.mT + torch.eye(4)
    with pyro.plate("data", len(Y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(4), covariance), obs=Y.to(loadings.dtype))


def test_a_swap_that_does_nothing_is_no_symmetry_of_its_own() -> None:
    axes: dict[str, int | tuple[int, ...]] = {"loadings": -1, "correlation": (-2, -1)}
    found = find_symmetry(correlated_factors)
    assert str(found) == str(Product(Permutation(axes), SignFlip(axes)))
    values = {"loadings": torch.rand(4, 2), "correlation": torch.tensor([[1.0, 0.3], [0.3, 1.0]])}
    images = found.act(found.elements(values), {name: value.unsqueeze(0) for name, value in values.items()})
    rows = torch.cat([images[name].flatten(1) for name in values], 1)
    assert len(rows.unique(dim=0)) == 8
    assert found.log_order(values) == pytest.approx(math.log(8))


SIGNS = list(itertools.product((1.0, -1.0), repeat=3))
SHUFFLES = list(itertools.permutations(range(3)))
IDLE = {  # symmetry, and its maps: relabellings of both axes, signs of rows and of columns
    "signs": (SignFlip({"w": (-2, -1)}), [(SHUFFLES[0], s, s) for s in SIGNS]),
    "signed": (
        Product(Permutation({"w": (-2, -1)}), SignFlip({"w": (-2, -1)})),
        [(p, s, s) for p in SHUFFLES for s in SIGNS],
    ),
    "rows and columns": (
        Product(SignFlip({"w": -2}), SignFlip({"w": -1})),
        [(SHUFFLES[0], s, t) for s in SIGNS for t in SIGNS],
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", IDLE)
def test_averages_are_over_what_acts(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumeration against a sum over different images; sampled bounds on their sides; an unbiased one."""
    symmetry, elements = IDLE[case]
    means = torch.tensor([[0.5, 1.0, -0.3], [0.2, -0.7, 0.4], [0.9, 0.1, 0.6]])

    def log_q(values: dict[str, Tensor]) -> Tensor:
        return dist.Normal(means, 0.7).log_prob(values["w"]).sum((-2, -1))

    draws = {"w": means + 0.7 * torch.randn(2_000, 3, 3)}
    own = log_q(draws)
    maps = {
        (p, *(a * b for a in s for b in t)): (list(p), torch.tensor(s)[:, None] * torch.tensor(t))
        for p, s, t in elements
    }
    assert len(maps) == len(elements) / 2, "every map comes twice"
    terms = [log_q({"w": signs * draws["w"][:, p][:, :, p]}) for p, signs in maps.values()]
    exact = torch.stack(terms).logsumexp(0) - math.log(len(maps))
    assert symmetry.log_order(draws) == pytest.approx(math.log(len(maps)))
    assert torch.allclose(enumerated(symmetry, log_q, draws, own), exact, rtol=0, atol=1e-10)
    above = uniform(symmetry, log_q, draws, own, 8) - exact
    below = uniform_unbiased(symmetry, log_q, draws, own, 8) - exact
    assert above.mean() > -Z_LIMIT * above.std() / math.sqrt(2_000)
    assert below.mean() < Z_LIMIT * below.std() / math.sqrt(2_000)
    one = {"w": draws["w"][:1].expand(20_000, 3, 3)}

    def excess() -> float:
        estimate = (uniform_unbiased(symmetry, log_q, one, own[:1].expand(20_000), 8) - exact[0]).exp()
        return float((estimate.mean() - 1) / estimate.std() * math.sqrt(20_000))

    assert abs(excess()) < Z_LIMIT
    # Negative control: idle elements that count as the others do.
    monkeypatch.setattr(importance, "unmoved", lambda *_: torch.zeros(8, 20_000, dtype=torch.bool))
    assert excess() > Z_LIMIT
