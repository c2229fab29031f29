"""Elements of products, proposed block by block: what they are, how likely, the direction of the bound.

Covers also `orbit.coupling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from pyro_sym import Permutation, Product, SignFlip, Symmetry
from pyro_sym.orbit import guided_blocks as guided
from pyro_sym.orbit.coupling import Block, Coupling, Factor
from pyro_sym.orbit.enumeration import enumerated, log_prob_at_images
from pyro_sym.orbit.guided_blocks import Surrogate, draw_elements
from pyro_sym.orbit.guided_permutations import propose
from pyro_sym.symmetry.base import map_element
from tests.conftest import Z_LIMIT

pytestmark = pytest.mark.usefixtures("float64")

FIRST = {"w1": -2, "b1": -1, "w2": -1}
SECOND = {"w2": -2, "b2": -1, "w3": -1}
LAYERS = Product(Permutation(FIRST), SignFlip(FIRST), Permutation(SECOND), SignFlip(SECOND))
MLP = {"w1": (4, 3), "b1": (4,), "w2": (3, 4), "b2": (3,), "w3": (2, 3)}  # 18,432 elements
SMALL = {"w1": (2, 2), "b1": (2,), "w2": (2, 2), "b2": (2,), "w3": (2,)}  # 64
STATES = Permutation({"trans": (-2, -1), "locs": -1})
HMM = {"trans": (4, 4), "locs": (4,)}
RING = Product(Permutation({"t": (-2, -1), "u": -1}), SignFlip({"t": (-2, -1), "u": -1}))
CUBE = Product(Permutation({"t": (-3, -2, -1)}), SignFlip({"t": (-3, -1)}), SignFlip({"s": -1, "v": -1}))
LOOSE = Product(SignFlip({"t": (-2, -1), "u": -1}), Permutation({"u": -2}))


@dataclass
class Normals:
    """Independent normals at random means, some draws, and the group."""

    symmetry: Symmetry
    shapes: dict[str, tuple[int, ...]]
    separation: float
    count: int

    def __post_init__(self) -> None:
        self.moments = {
            site: (self.separation * torch.randn(shape), 0.5 + torch.rand(shape))
            for site, shape in self.shapes.items()
        }
        self.values = {
            s: loc + scale * torch.randn(self.count, *loc.shape) for s, (loc, scale) in self.moments.items()
        }
        coupling = Coupling.of(self.symmetry)
        assert coupling is not None
        self.coupling = coupling
        # Of all elements: those that act alike are proposed apart.
        self.log_order = sum(block.log_order(self.values) for block in coupling.blocks)

    def log_prob(self, values: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for site, (loc, scale) in self.moments.items():
            total = total + Normal(loc, scale).log_prob(values[site]).flatten(
                values[site].dim() - loc.dim()
            ).sum(-1)
        return total

    def exact(self) -> Tensor:
        return enumerated(self.symmetry, self.log_prob, self.values, self.log_prob(self.values))

    def surrogate(self, values: dict[str, Tensor] | None = None) -> Surrogate:
        values = values or self.values
        sizes = [block.size(values) for block in self.coupling.blocks]
        return Surrogate(self.coupling, sizes, values, self.moments)

    def log_average(self, count: int, *, with_identity: bool = True, max_size: int = 0) -> Tensor:
        surrogate = self.surrogate()
        summed = self.coupling.uncoupled(self.values, max_size) if max_size else frozenset()
        proposal = draw_elements(surrogate, count, with_identity=with_identity, summed=summed)
        log_weights = surrogate.log_sum(proposal.elements, summed) - proposal.log_probs
        constant = self.log_prob(self.values) - surrogate.log_sum(surrogate.identity(), frozenset()).squeeze(
            -1
        )
        return constant + log_weights.logsumexp(-1) - math.log(count) - self.log_order


def z_score(errors: Tensor) -> float:
    return float(errors.mean() / (errors.std() / math.sqrt(len(errors))))


def test_the_table_of_a_network() -> None:
    coupling = Coupling.of(LAYERS)
    assert coupling is not None
    assert coupling.blocks == (Block(0, (1,), ("w1", -2)), Block(2, (3,), ("w2", -2)))
    assert coupling.factors[2] == Factor("w2", (-2, -1), (1, 0), (0, 0))
    values = {site: torch.zeros(shape) for site, shape in MLP.items()}
    assert coupling.uncoupled(values, 8) == {0}, "the wider layer; the other one is coupled to it"
    assert coupling.uncoupled(values, 3) == {1}
    assert sum(b.log_order(values) for b in coupling.blocks) == pytest.approx(LAYERS.log_order(values))


def test_blocks_coupled_to_themselves_are_not_summed_over() -> None:
    coupling = Coupling.of(CUBE)
    assert coupling is not None
    assert [block.permutation for block in coupling.blocks] == [0, None]
    values = {"t": torch.zeros(3, 3, 3), "s": torch.zeros(2), "v": torch.zeros(2)}
    assert coupling.is_self_coupled(0)
    assert coupling.uncoupled(values, 8) == {1}


CASES = [(LAYERS, MLP), (STATES, HMM), (RING, {"t": (4, 4), "u": (2, 4)})]
CASES += [(CUBE, {"t": (3, 3, 3), "s": (2,), "v": (4, 2)}), (LOOSE, {"t": (3, 3), "u": (4, 3)})]


@pytest.mark.parametrize(("symmetry", "shapes"), CASES)
def test_the_surrogate_is_the_density_at_images(
    symmetry: Symmetry, shapes: dict[str, tuple[int, ...]]
) -> None:
    """And the first element is the identity, beside others."""
    q = Normals(symmetry, shapes, 0.3, 3)
    surrogate = q.surrogate()
    proposal = draw_elements(surrogate, 20, with_identity=True)
    elements = proposal.group_elements(q.coupling, symmetry)
    images = log_prob_at_images(symmetry, q.log_prob, q.values, elements).mT
    scores = surrogate.log_sum(proposal.elements, frozenset())
    assert torch.allclose(images - images[:, :1], scores - scores[:, :1], rtol=0, atol=1e-9)
    assert torch.allclose(images[:, 0], q.log_prob(q.values))
    assert (images != images[:, :1]).any()


@pytest.mark.parametrize(("symmetry", "shapes"), [(LAYERS, MLP), (LOOSE, {"t": (3, 3), "u": (4, 3)})])
def test_summed_blocks_are_summed_exactly(symmetry: Symmetry, shapes: dict[str, tuple[int, ...]]) -> None:
    q = Normals(symmetry, shapes, 0.5, 2)
    surrogate, summed = q.surrogate(), q.coupling.uncoupled(q.values, 8)
    assert len(summed) == 1
    (b,) = summed
    drawn = draw_elements(surrogate, 3, with_identity=False)
    block, whole = q.coupling.blocks[b], drawn.group_elements(q.coupling, symmetry)
    members = [i for i in (block.permutation, *block.flips) if i is not None]
    assert isinstance(symmetry, Product)
    subgroup = Product(*[symmetry.members[i] for i in members]).elements(q.values)
    rows = []
    for h in range(round(math.exp(block.log_order(q.values)))):
        parts = list(whole)
        for i, part in zip(members, subgroup, strict=True):
            parts[i] = part[h].expand(3, 2, -1)
        rows.append(log_prob_at_images(symmetry, q.log_prob, q.values, tuple(parts)))
    expected = torch.stack(rows).logsumexp(0).mT
    own = q.log_prob(q.values) - surrogate.log_sum(surrogate.identity(), frozenset()).squeeze(-1)
    assert torch.allclose(
        surrogate.log_sum(drawn.elements, summed) + own[:, None], expected, rtol=0, atol=1e-9
    )


PROPOSED = [(LAYERS, SMALL), (STATES, {"trans": (3, 3), "locs": (3,)}), (RING, {"t": (2, 2), "u": (2,)})]


@pytest.mark.parametrize(("symmetry", "shapes"), PROPOSED)
def test_how_likely_an_element_is_and_that_labels_do_not_matter(
    symmetry: Symmetry, shapes: dict[str, tuple[int, ...]]
) -> None:
    """tau(h | w) = tau(e | h w): the frequency of h at w, against what is stated of the identity at h w."""
    q = Normals(symmetry, shapes, 0.4, 1)
    every = symmetry.elements(q.values)
    order = round(math.exp(q.log_order))
    images = symmetry.act(
        every, {site: value.expand(order, *value.shape[1:]) for site, value in q.values.items()}
    )
    stated = draw_elements(q.surrogate(images), 1, with_identity=True).log_probs.exp().squeeze(-1)
    assert float(stated.sum()) == pytest.approx(1.0, abs=1e-9)
    draws = 10_000
    many = {site: value.expand(10, *value.shape[1:]) for site, value in q.values.items()}
    drawn = draw_elements(q.surrogate(many), draws // 10, with_identity=False)
    flat = map_element(lambda t: t.flatten(0, 1), drawn.group_elements(q.coupling, symmetry))
    parts, listed = (flat, every) if isinstance(flat, tuple) else ((flat,), (every,))
    same = torch.stack([(a[:, None] == b[None]).all(-1) for a, b in zip(parts, listed, strict=True)]).all(0)
    observed = same.double().mean(0)
    error = (observed - stated) / (stated * (1 - stated) / draws).sqrt()
    assert error.abs().max() < Z_LIMIT + 1


@pytest.mark.parametrize("max_size", [0, 8])
@pytest.mark.parametrize("separation", [0.0, 0.3, 0.7, 2.0])
def test_two_hidden_layers(separation: float, max_size: int) -> None:
    """Against all 18,432 elements."""
    q = Normals(LAYERS, MLP, separation, 20)
    exact = q.exact()
    above = q.log_average(64, max_size=max_size) - exact
    below = q.log_average(64, max_size=max_size, with_identity=False) - exact
    assert z_score(above) > -Z_LIMIT
    assert z_score(below) < Z_LIMIT
    assert above.mean() < 0.3
    assert below.mean() > -0.3


@pytest.mark.parametrize("separation", [0.0, 0.3, 1.0])
def test_states_on_two_axes(separation: float) -> None:
    q = Normals(STATES, HMM, separation, 200)
    exact = q.exact()
    above = q.log_average(64) - exact
    below = q.log_average(64, with_identity=False) - exact
    assert z_score(above) > -Z_LIMIT
    assert z_score(below) < Z_LIMIT
    assert above.mean() < 0.1


@pytest.mark.parametrize(
    ("symmetry", "shapes", "allowed"),
    [
        (RING, {"t": (4, 4), "u": (4,)}, 0.3),
        (CUBE, {"t": (3, 3, 3), "s": (2,), "v": (2,)}, 0.5),
        (LOOSE, CASES[-1][1], 0.1),
    ],
)
def test_rarer_couplings(symmetry: Symmetry, shapes: dict[str, tuple[int, ...]], allowed: float) -> None:
    q = Normals(symmetry, shapes, 0.4, 200)
    above = q.log_average(32, max_size=8) - q.exact()
    assert z_score(above) > -Z_LIMIT
    assert above.mean() < allowed


@pytest.mark.parametrize("max_size", [0, 8])
def test_what_breaks_the_bound_is_seen(max_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the unbiased estimate in the bound's place, and a look at units' indices."""
    q = Normals(LAYERS, SMALL, 0.5, 4000)
    exact = q.exact()
    assert z_score(q.log_average(2, max_size=max_size) - exact) > -Z_LIMIT
    unbiased = q.log_average(2, max_size=max_size, with_identity=False)
    assert z_score(unbiased - exact) < -Z_LIMIT

    def looking(log_matrix: Tensor, count: int, identity: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return propose(log_matrix + 4 * torch.eye(log_matrix.shape[-1]), count, identity)

    monkeypatch.setattr(guided, "propose", looking)
    assert z_score(q.log_average(2, max_size=max_size) - exact) < -Z_LIMIT


def test_one_precision_for_all_slots_is_a_proposal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wide layers get, where a precision for every pair of slot and unit would not fit in memory."""
    monkeypatch.setattr(guided, "MAX_ENTRIES", 0)
    q = Normals(LAYERS, MLP, 0.5, 20)
    above = q.log_average(64) - q.exact()
    assert z_score(above) > -Z_LIMIT
    assert above.mean() < 0.3


def test_gradients_are_close_to_the_exact_ones() -> None:
    q = Normals(LAYERS, SMALL, 0.5, 200)
    for loc, scale in q.moments.values():
        loc.requires_grad_()
        scale.requires_grad_()
    parameters = [t for pair in q.moments.values() for t in pair]
    ours, reference = (
        torch.cat([g.flatten() for g in torch.autograd.grad(average.mean(), parameters)])
        for average in (q.log_average(256, max_size=8), q.exact())
    )
    assert (ours - reference).norm() < 0.1 * reference.norm()
