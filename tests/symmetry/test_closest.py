"""What members say is closest, against enumeration and against rotations that were planted.

Covers `symmetry.base`, `symmetry.blocks`, `symmetry.nearest`, `symmetry.orthogonal` and `symmetry.flat`.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyro_sym import (
    BAOA,
    AutoSymmetrized,
    FiniteGroup,
    Group,
    Orthogonal,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    SymmetryError,
    VectorizedMCMC,
    Viewed,
    align,
    check_symmetry,
    from_pyro,
    from_pyro_svi,
    testing,
)
from pyro_sym.diagnostics import distance_to_copy, distance_to_mode
from pyro_sym.symmetry import base
from pyro_sym.symmetry.base import distance, map_element
from pyro_sym.symmetry.flat import flatten, nest, normal_form, split
from tests.symmetry.groups import Cyclic

pytestmark = pytest.mark.usefixtures("float64")

AXES = {"w": -1, "b": -1}
SHAPES = {"w": (3, 4), "b": (4,)}
FINITE: dict[str, FiniteGroup] = {
    "permutation": Permutation(AXES),
    "signs": SignFlip(AXES),
    "both": Product(Permutation(AXES), SignFlip(AXES)),
    "own": Cyclic(AXES, 4),
    "own and signs": Product(Cyclic({"w": -1, "b": -1}, 4), SignFlip({"w": -2})),
    "view of own": Viewed(Cyclic({"w": -2, "b": -2}, 2), {"w": (3, (2, 2)), "b": ((2, 2),)}),
    "view of a view": Viewed(Viewed(Permutation({"b": -1}), {"b": (2, 2)}), {"b": ((2, 2),)}),
    "sign of the whole": SignFlip({"w": (), "b": ()}),
}


def values(*batch: int) -> dict[str, Tensor]:
    return {site: torch.randn(*batch, *shape) for site, shape in SHAPES.items()}


@pytest.mark.parametrize("name", [*FINITE])
def test_closest_and_margin_are_those_of_enumeration(name: str) -> None:
    """The groups whose choice is exact, and a product in turn, whose members here share a site."""
    group, draws, mean = FINITE[name], values(30), values()
    variance = {site: 0.5 + torch.rand_like(value) for site, value in mean.items()}
    sites = group.sites
    images = group.act(group.closest(draws, mean, variance), draws)
    rows = {site: value.unsqueeze(0) for site, value in images.items()}
    every = map_element(lambda part: part.unsqueeze(1), group.elements(mean))
    others = group.act(every, rows)
    found = distance({s: images[s] for s in sites}, mean, variance)
    each = distance({s: others[s] for s in sites}, mean, variance, 2)  # (|G|, M), the identity first
    if name == "own and signs":  # a local optimum of some draws
        assert (found <= each.amin(0) + 1e-9).double().mean() > 0.5
        assert (group.margin(images, mean, variance) >= 0).all()
        return
    torch.testing.assert_close(found, each.amin(0))
    idle = torch.stack([(others[s] == rows[s]).flatten(2).all(-1) for s in sites]).all(0)
    rival = each.masked_fill(idle, math.inf).amin(0)
    torch.testing.assert_close(group.margin(images, mean, variance), (rival - found) / 2)


def test_comparing_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group, draws, mean = Cyclic(AXES, 4), values(30), values()
    ones = {site: torch.ones_like(value) for site, value in mean.items()}
    whole = group.closest(draws, mean, ones)
    monkeypatch.setattr(base, "COMPARED_NUMEL", 20)
    assert torch.equal(group.closest(draws, mean, ones), whole)


def test_large_groups_of_ones_own_are_refused_with_the_cure() -> None:
    class Many(Cyclic):
        def log_order(self, values: object) -> float:
            return math.log(6_000)

    with pytest.raises(SymmetryError, match=r"exp\(8.7\) elements, more than the 5,040 .* Many.closest\(\)"):
        align(values(5), Many(AXES, 4))


@pytest.mark.parametrize(
    "group",
    [
        Cyclic({"w": -1}, 4),
        Product(Permutation({"w": -2}), Cyclic({"w": -1, "b": -1}, 4)),
        Product(Viewed(Permutation({"w": -3}), {"w": ((3, 1), 4)}), Cyclic({"w": -1, "b": -1}, 4)),
        Product(Orthogonal({"w": -2}), Cyclic({"w": -1, "b": -1}, 4)),
        SignFlip({"w": (), "b": ()}),
        FINITE["view of own"],
        FINITE["view of a view"],
    ],
    ids=str,
)
def test_groups_of_other_kinds_keep_the_contract_and_align(group: Group) -> None:
    """Draws of sd 0.1 around a point, each moved at random, come back to one representative."""
    point = values()
    testing.check_symmetry_contract(group, point)
    draws = {site: value + 0.1 * torch.randn(200, *value.shape) for site, value in point.items()}
    moved = group.act(group.sample(point, (200,)), draws)
    alignment = align(moved, group, reference=point)
    assert alignment.converged and (alignment.objective.diff() <= 1e-9).all()
    images = group.act(alignment.elements, moved)
    for site in group.sites:
        assert torch.equal(images[site], alignment.samples[site])
        assert moved[site].std(0).max() > 0.3  # as they were
        assert (alignment.samples[site].mean(0) - point[site]).abs().max() < 0.1
        assert alignment.samples[site].std(0).max() < 0.15
    assert (alignment.confidence > 0.99).all()
    assert distance_to_mode(moved, {s: point[s] for s in group.sites}, group).max() < 1.0


def test_normal_forms_nest_and_split() -> None:
    symmetry = Product(Viewed(Permutation({"w": -3}), {"w": ((3, 1), 4)}), Cyclic(AXES, 4))
    assert flatten(symmetry) is None and flatten(SignFlip({"b": ()})) is None
    flat = normal_form(symmetry)
    element = symmetry.sample(values())
    parts = split(symmetry, element)
    assert len(parts) == len(flat.members) == 2
    assert all(torch.equal(a, b) for a, b in zip(nest(symmetry, parts), element, strict=True))


def test_distances_modulo_a_group_of_ones_own() -> None:
    group, mode = Cyclic(AXES, 4), values()
    copies = group.act(group.elements(mode), {site: value.unsqueeze(0) for site, value in mode.items()})
    assert distance_to_mode(copies, mode, group).max() < 1e-6
    gaps = torch.stack([(copies[s] - mode[s]).flatten(1).square().sum(-1) for s in mode]).sum(0).sqrt()
    assert distance_to_copy(mode, group) == pytest.approx(float(gaps[1:].min()))


def rotor(records: Tensor) -> None:
    """A signal that is recorded from unknown starts."""
    signal = pyro.sample("signal", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    shifted = torch.stack([signal.roll(k, -1) for k in range(4)])
    with pyro.plate("records", len(records)):
        which = dist.Categorical(torch.ones(4) / 4)
        pyro.sample("y", dist.MixtureSameFamily(which, dist.Normal(shifted, 0.3).to_event(1)), obs=records)


def test_chains_that_found_different_shifts_are_exported_aligned() -> None:
    """Each of four chains starts at a shift of its own, and stays there."""
    truth = torch.tensor([2.0, 0.0, -1.0, 1.0])
    starts = torch.stack([truth.roll(k) for k in range(4)])
    records = starts.repeat(5, 1) + 0.3 * torch.randn(20, 4)
    kernel = BAOA(rotor, step_size=0.05, friction=10.0)
    mcmc = VectorizedMCMC(
        kernel, 100, 20, num_chains=4, thinning=5, initial_params={"signal": starts}, disable_progbar=True
    )
    mcmc.run(records)
    data = from_pyro(mcmc, symmetry=Cyclic({"signal": -1}, 4))
    raw, aligned = (data[name]["signal"].values for name in ("posterior", "posterior_aligned"))
    assert raw.mean(1).std(0).min() > 0.8 and aligned.mean(1).std(0).max() < 0.2
    assert data.sample_stats["element"].shape == (4, 100, 1)
    applied = [set(chain.ravel().tolist()) for chain in data.sample_stats["element"].values]
    assert all(len(shifts) == 1 for shifts in applied) and len(set.union(*applied)) == 4


# --- signs of sites without axes ---------------------------------------------------------------------------


def square() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(a * b, 0.1).to_event(1), obs=torch.tensor([1.0, -2.0, 0.5]))


def test_a_scalar_is_flipped_checked_averaged_aligned_and_exported() -> None:
    group = SignFlip({"a": (), "b": ()})
    check_symmetry(square, group)
    with pytest.raises(SymmetryError, match="flipping the sign of 0"):  # negative control: b stays
        check_symmetry(square, SignFlip({"a": ()}))
    pyro.set_rng_seed(0)
    guide = AutoSymmetrized(AutoNormal(square, init_scale=0.05), group)
    svi = pyro.infer.SVI(square, guide, pyro.optim.Adam({"lr": 0.05}), pyro.infer.Trace_ELBO())
    for _ in range(200):
        svi.step()
    assert guide.method == "exact"
    assert guide.symmetry_gain(num_samples=50).estimate == pytest.approx(math.log(2), abs=1e-3)
    data = from_pyro_svi(guide, num_samples=300)
    assert data.posterior["a"].std() > 0.5
    assert data.posterior_aligned["a"].std() < 0.3
    assert set(data.sample_stats["sign"].values.ravel()) == {-1, 1}


def test_a_site_as_a_whole_counts_as_one_unit() -> None:
    with pytest.raises(SymmetryError, match=r"axis -1 of site 'b' has size 3, but site 'a' as a whole"):
        SignFlip({"a": (), "b": -1}).sample({"a": torch.zeros(()), "b": torch.zeros(3)})
    with pytest.raises(SymmetryError, match="one or more"):
        Permutation({"a": ()})
    both = Product(SignFlip({"b": ()}), SignFlip({"b": -1}))
    assert both.log_order({"b": torch.zeros(3)}) == pytest.approx(math.log(8))  # -1 is in both


# --- rotations ---------------------------------------------------------------------------------------------


def factors(scale: Tensor | float = 1.0) -> None:
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(5, 2), scale).to_event(2))
    scores = pyro.sample("scores", dist.Normal(torch.zeros(8, 2), 1.0).to_event(2))
    mean = scores @ loadings.mT
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(2), obs=torch.ones_like(mean))


ROTATIONS = Orthogonal({"loadings": -1, "scores": -1})


def test_rotations_of_a_factor_model_are_checked() -> None:
    check_symmetry(factors, ROTATIONS)
    with pytest.raises(SymmetryError, match=r"turning 0 towards 1 in Orthogonal.*'loadings' by"):
        check_symmetry(lambda: factors(torch.tensor([1.0, 2.0])), ROTATIONS)
    with pytest.raises(SymmetryError, match="not invariant under"):
        check_symmetry(factors, Orthogonal({"loadings": -1}))


def test_procrustes_is_the_least_of_many_rotations() -> None:
    """Weighted by rows; against 20,000 angles in both orientations, each within 2e-4 of any rotation."""
    draws = {"loadings": torch.randn(10, 5, 2), "scores": torch.randn(10, 8, 2)}
    mean = {site: value[0] * 0.5 + torch.randn(value.shape[1:]) for site, value in draws.items()}
    variance = ROTATIONS.pool_variance({site: 0.2 + torch.rand_like(value) for site, value in mean.items()})
    images = ROTATIONS.act(ROTATIONS.closest(draws, mean, variance), draws)
    found = distance(images, mean, variance)
    angle = torch.arange(20_000) * (2 * math.pi / 20_000)
    turns = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).reshape(-1, 1, 2, 2)
    rows = {site: value.unsqueeze(0) for site, value in draws.items()}
    each = [
        distance(ROTATIONS.act(turns @ torch.diag(torch.tensor([1.0, s])), rows), mean, variance, 2).amin(0)
        for s in (1.0, -1.0)
    ]
    torch.testing.assert_close(found, torch.minimum(*each), rtol=1e-5, atol=0.0)
    # The margin is to the best of the other orientation.
    margin = ROTATIONS.margin(images, mean, variance)
    torch.testing.assert_close(margin, (each[0] - each[1]).abs() / 2, rtol=1e-4, atol=1e-4)


def test_rotations_are_no_group_to_average_over_or_to_list() -> None:
    assert not isinstance(ROTATIONS, Symmetry) and isinstance(Permutation({"x": -1}), Symmetry)
    product = Product(ROTATIONS, Permutation({"scores": -2}))
    shapes = {"loadings": torch.zeros(5, 2), "scores": torch.zeros(8, 2)}
    assert not product.is_finite and product.log_order(shapes) == math.inf
    with pytest.raises(SymmetryError, match="not finite, so its elements can't be listed"):
        product.elements(shapes)
    with pytest.raises(SymmetryError, match="guides are averaged over finite groups only"):
        AutoSymmetrized(AutoNormal(factors), ROTATIONS)  # type: ignore[arg-type]
    two_axes = Orthogonal({"p": (-2, -1)})
    with pytest.raises(SymmetryError, match="one axis a site"):
        align({"p": torch.randn(4, 3, 3)}, two_axes)


def test_chains_that_ended_in_different_rotations_are_aligned() -> None:
    pyro.set_rng_seed(0)
    point = {"loadings": 2 * torch.randn(5, 2), "scores": 2 * torch.randn(8, 2)}
    turned = ROTATIONS.act(
        ROTATIONS.sample(point, (4, 1)),
        {site: value + 0.1 * torch.randn(4, 50, *value.shape) for site, value in point.items()},
    )
    alignment = align(turned, ROTATIONS, group_by_chain=True)
    assert alignment.elements.shape == (4, 50, 2, 2)
    spread = alignment.samples["loadings"].mean(1).std(0)
    assert turned["loadings"].mean(1).std(0).max() > 0.5 and spread.max() < 0.1
    product = torch.einsum("csnk,csdk->csnd", alignment.samples["scores"], alignment.samples["loadings"])
    before = torch.einsum("csnk,csdk->csnd", turned["scores"], turned["loadings"])
    torch.testing.assert_close(product, before)


class IdentityAlways(Orthogonal):
    def closest(self, draws, mean, variance):
        return self.identity(mean, (len(next(iter(draws.values()))),))


class Transposed(Orthogonal):
    def closest(self, draws, mean, variance):
        return super().closest(draws, mean, variance).mT


class ForgetsWeights(Orthogonal):
    def closest(self, draws, mean, variance):
        return super().closest(
            draws, mean, {site: torch.ones_like(value) for site, value in variance.items()}
        )


class Degenerate(Orthogonal):
    def sample(self, values, batch_shape=()):
        return torch.linalg.matrix_exp(0.3 * (x := super().sample(values, batch_shape)) - 0.3 * x.mT)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (IdentityAlways, r"closest\(\) does not undo g on g · v"),
        (Transposed, r"closest\(\) does not undo g on g · v"),
        (ForgetsWeights, "a sampled element brings them closer|depends on site 'loadings'"),
        (Degenerate, r"sample\(\) is not uniform"),
    ],
)
def test_broken_rotations_are_told_what_they_break(kind: type[Orthogonal], message: str) -> None:
    point = {"loadings": torch.randn(4, 3), "scores": torch.randn(5, 3)}
    testing.check_symmetry_contract(Orthogonal({"loadings": -1, "scores": -1}), point)
    with pytest.raises(AssertionError, match=message):
        testing.check_symmetry_contract(kind({"loadings": -1, "scores": -1}), point)
