"""find_symmetry: the right groups, by name; near misses; and the same as testing every subset.

It covers ``search.candidates``, ``search.minimal_sets`` and ``search.networks_in_model`` as well.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import config_enumerate
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

import pyro_sym as ps
from pyro_sym import (
    BayesianModule,
    NetworkSymmetry,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    SymmetryError,
    check_symmetry,
    find_symmetry,
)
from pyro_sym.model.program import Program
from pyro_sym.search import find, minimal_sets
from pyro_sym.search.networks_in_model import networks
from tests.catalogue import MIXTURE, mixture, normals, random_joint
from tests.search.models import (
    CASES,
    INPUTS,
    NEAR_MISSES,
    POINTS,
    TARGETS,
    Case,
    Y,
    one_factor_of_vectors,
    ones,
    relu_network,
    zeros,
)
from tests.search.test_check import Net


@pytest.mark.parametrize("case", CASES + NEAR_MISSES, ids=repr)
def test_the_group_is_found(case: Case) -> None:
    assert repr(find_symmetry(case.model, *case.args)) == repr(case.symmetry)


def random_couplings(seed: int) -> Any:
    """Sites with axes of one size, and terms that see some of them unit by unit; one unit may stand out."""
    rng = random.Random(seed)
    shapes = {name: (3,) * rng.choice([1, 1, 2]) for name in "abcd"}
    axes = [(name, axis) for name, shape in shapes.items() for axis in range(-len(shape), 0)]
    terms = [rng.sample(axes, rng.choice([1, 2, 2, 3])) for _ in range(rng.choice([2, 3, 4]))]
    marked = rng.sample(axes, rng.choice([0, 1]))
    even = rng.random() < 0.5

    def model() -> None:
        values = {
            name: pyro.sample(name, dist.Normal(zeros(*shape), 1.0).to_event(len(shape)))
            for name, shape in shapes.items()
        }

        def by_unit(name: str, axis: int) -> Tensor:
            """A number a unit, in which the units of the other axis are exchangeable."""
            value = values[name]
            return value if value.dim() == 1 else value.movedim(axis, 0).pow(3).sum(-1)

        for number, term in enumerate(terms):
            product = torch.stack([by_unit(*axis) for axis in term]).prod(0)
            pyro.factor(f"term_{number}", (product.square() if even else product.sin()).sum())
        for axis in marked:
            pyro.factor("mark", 0.01 * by_unit(*axis)[2])

    return model


def by_every_subset(kind: Any, model: Any, args: tuple[Any, ...], axes: list[Any]) -> list[frozenset[Any]]:
    """The minimal symmetric sets: every subset is tested, by every generator at two draws."""
    program = Program(model, args)
    draws = [program.draw() for _ in range(2)]
    before = [program.log_joint(*draw) for draw in draws]

    def symmetric(subset: tuple[Any, ...]) -> bool:
        symmetry = kind({site: tuple(axis for s, axis in subset if s == site) for site, _ in subset})
        return all(
            torch.isclose(program.log_joint(symmetry.act(element, values), indices), joint, rtol=1e-9)
            for (values, indices), joint in zip(draws, before, strict=True)
            for _, element in symmetry.generators(values)
        )

    found: list[frozenset[Any]] = []
    for number in range(1, len(axes) + 1):
        for subset in itertools.combinations(axes, number):
            if not any(smaller <= set(subset) for smaller in found) and symmetric(subset):
                found.append(frozenset(subset))
    return found


def moved(kind: Any, symmetry: Symmetry) -> list[frozenset[Any]]:
    members = symmetry.members if isinstance(symmetry, Product) else [symmetry]
    return [
        frozenset((site, axis) for site, several in member.axes.items() for axis in several)
        for member in members
        if isinstance(member, kind)
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_testing_every_subset_finds(seed: int) -> None:
    """Sets that overlap can't be members of one product: then it is as many of them as don't."""
    model = random_couplings(seed)
    latents = Program(model).latents.values()
    axes = [(site.name, axis) for site in latents for axis in range(-site.value.dim(), 0)]
    found = find_symmetry(model)
    for kind in (Permutation, SignFlip):
        truth, ours = by_every_subset(kind, model, (), axes), moved(kind, found)
        assert set(ours) <= set(truth)
        for missed in set(truth) - set(ours):
            assert any(missed & other for other in ours), (kind, missed)


@pytest.mark.usefixtures("float64")
def test_two_layers_of_one_width_by_every_subset() -> None:
    axes = [("w0", -1), ("b0", -1), ("w1", -2), ("w1", -1), ("b1", -1), ("w2", -2)]
    args = (INPUTS.double(), TARGETS.double())
    truth = by_every_subset(Permutation, relu_network, args, axes)
    assert [sorted(units) for units in truth] == [
        [("b0", -1), ("w0", -1), ("w1", -2)],
        [("b1", -1), ("w1", -1), ("w2", -2)],
    ]
    assert moved(Permutation, find_symmetry(relu_network, *args)) == truth


def test_a_choice_between_axes_is_searched() -> None:
    """Any two of three make a symmetric set: that one alone is wrong says "one of the others", not which."""

    def model() -> None:
        a, b, c = (pyro.sample(name, dist.Normal(zeros(2), 1.0).to_event(1)) for name in "abc")
        pyro.factor("f", a.diff().sum() * b.diff().sum() * c.diff().sum())

    (found,) = moved(Permutation, find_symmetry(model))
    assert len(found) == 2


def test_terms_may_make_up_for_each_other() -> None:
    def model() -> None:
        a = pyro.sample("a", dist.Normal(zeros(2), 1.0).to_event(1))
        pyro.factor("first", a[0] ** 3)
        pyro.factor("second", a[1] ** 3)

    assert repr(find_symmetry(model)) == "Permutation({'a': -1})"


def test_units_that_are_dead_at_first_are_looked_at_elsewhere() -> None:
    """The first two units of a layer see nothing; the others tell which axes belong together."""

    def model() -> None:
        a, b = (pyro.sample(name, dist.Normal(zeros(4), 1.0).to_event(1)) for name in "ab")
        alive = torch.tensor([0.0, 0.0, 1.0, 1.0])
        pyro.factor("f", (alive * a * b).sum())

    assert repr(find_symmetry(model)) == "SignFlip({'a': -1, 'b': -1})"


def test_what_does_not_fit_into_a_product_is_left_out() -> None:
    """Signs of one unit of either site cancel, whichever units these are: they ride on two permutations."""

    def model() -> None:
        a, b = (pyro.sample(name, dist.Normal(zeros(3), 1.0).to_event(1)) for name in "ab")
        pyro.factor("f", a.prod() * b.prod())

    assert repr(find_symmetry(model)) == "Product(Permutation({'a': -1}), Permutation({'b': -1}))"


def test_plates_of_data_are_no_candidates() -> None:
    """Rows with equal data are exchangeable, but a plate that holds them says what they are."""

    def model(plate: bool) -> None:
        if plate:
            with pyro.plate("data", 3):
                z = pyro.sample("z", dist.Gamma(1.0, 1.0))
                pyro.sample("y", dist.Normal(z, 1.0), obs=zeros(3))
        else:
            z = pyro.sample("z", dist.Gamma(ones(3), 1.0).to_event(1))
            pyro.sample("y", dist.Normal(z, 1.0).to_event(1), obs=zeros(3))

    assert repr(find_symmetry(model, True)) == "Product()"
    assert repr(find_symmetry(model, False)) == "Permutation({'z': -1})"


def test_minibatches_blocks_and_modules() -> None:
    assert repr(find_symmetry(mixture, Y, 2)) == repr(MIXTURE)
    hidden = poutine.block(config_enumerate(mixture), hide=["z"])
    assert repr(find_symmetry(hidden, Y)) == repr(MIXTURE)
    units = {"hidden.weight": -2, "hidden.bias": -1, "out.weight": -1}
    assert repr(find_symmetry(Net(), Y)) == repr(Product(Permutation(units), SignFlip(units)))


def test_small_differences_are_not_drowned_by_many_data() -> None:
    """The likelihood has a hundred thousand times the size of the difference between the priors."""

    def model(y: Tensor, scales: Tensor) -> None:
        locs = pyro.sample("locs", dist.Normal(zeros(2), scales).to_event(1))
        spread = pyro.sample("spread", dist.HalfCauchy(1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(locs.sum(), 1e-3 * spread), obs=y)

    y = torch.randn(1000)
    assert repr(find_symmetry(model, y, ones(2))) == "Permutation({'locs': -1})"
    assert repr(find_symmetry(model, y, torch.tensor([1.0, 1.0 + 1e-4]))) == "Product()"


def test_a_sign_is_not_named_twice() -> None:
    model = normals({"w": (3, 1)}, dtype=torch.float64)
    assert repr(find_symmetry(model)) == "Product(Permutation({'w': -2}), SignFlip({'w': -2}))"


def test_a_model_in_single_precision() -> None:
    design = torch.randn(4, 3)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("unused", dist.Gamma(torch.ones(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(design @ w, 1.0).to_event(1), obs=y)

    assert repr(find_symmetry(model, Y[:4])) == "Permutation({'unused': -1})"


def test_nothing_global_changes() -> None:
    state = torch.random.get_rng_state()
    find_symmetry(mixture, Y)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_default_dtype() == torch.float32


def test_a_search_that_is_cut_short_names_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_sets, "MAX_EVALUATIONS", 45)
    case = next(case for case in CASES if case.model is relu_network)
    with pytest.warns(UserWarning, match=r"45 evaluations.*w1\[-1\], b1\[-1\], w2\[-2\]") as caught:
        found = find_symmetry(case.model, *case.args)
    assert caught[0].filename == __file__
    check_symmetry(case.model, found, *case.args)


def test_models_without_symmetries_to_find_are_refused() -> None:
    def observed() -> None:
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))

    with pytest.raises(SymmetryError, match="random at fixed values"):
        find_symmetry(random_joint)
    with pytest.raises(ValueError, match="no continuous latent sites"):
        find_symmetry(observed)
    with pytest.raises(ValueError, match="'counts' is discrete"):
        find_symmetry(lambda: pyro.sample("counts", dist.Poisson(torch.ones(3)).to_event(1)))


CONVOLUTIONS = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(36, 3)
)
IMAGES, CLASSES = torch.randn(5, 1, 5, 5), torch.tensor([0, 1, 2, 0, 1])


def bayesian(prior: Any) -> BayesianModule:
    return BayesianModule(CONVOLUTIONS, prior, ps.nn.Categorical(num_data=5))


def test_networks_are_read_off_their_graph() -> None:
    """Channels behind a flatten are a factor of an axis, which no search over axes would find."""
    model = bayesian(ps.nn.IIDPrior(dist.Normal(0.0, 1.0)))
    found = find_symmetry(model, IMAGES, CLASSES)
    assert isinstance(found, NetworkSymmetry) and found.shapes["3.weight"] == ((3,), (4, 9))
    check_symmetry(model, found, IMAGES, CLASSES)


def test_a_prior_that_tells_channels_apart_breaks_the_group_of_the_network() -> None:
    def ordered(name: str, parameter: Tensor, module: torch.nn.Module) -> dist.Normal:
        return dist.Normal(torch.arange(4.0) if name == "0.bias" else 0.0, 1.0)

    found = find_symmetry(bayesian(ordered), IMAGES, CLASSES)
    assert found.log_order(dict(CONVOLUTIONS.named_parameters())) == 0.0


def test_a_network_without_a_graph_is_searched_like_other_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise SymmetryError("control flow that depends on data")

    monkeypatch.setattr(find, "symmetry_of", fail)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
    model = BayesianModule(net, ps.nn.IIDPrior(dist.Normal(0.0, 1.0)), ps.nn.Categorical(num_data=5))
    with pytest.warns(UserWarning, match="graph of the network Sequential can't be read"):
        found = find_symmetry(model, IMAGES[:, 0, 0, :2], CLASSES)
    assert repr(found) == "Permutation({'0.weight': -2, '0.bias': -1, '2.weight': -1})"


def test_networks_in_a_model_are_found_with_their_prefix_and_inputs_by_name() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))

    def model(inputs: Tensor) -> None:
        weights = {
            name: pyro.sample(f"net.{name}", dist.Normal(zeros(*p.shape), 1.0).to_event(p.dim()))
            for name, p in net.named_parameters()
        }
        output = torch.func.functional_call(net, weights, (), {"input": inputs})
        with pyro.plate("rows", 5):
            pyro.sample("y", dist.Normal(output.squeeze(-1), 1.0), obs=zeros(5))

    (network,) = networks(Program(model, (IMAGES[:, 0, 0, :2],)))
    assert network.module is net and network.prefix == "net."
    assert network.args == () and torch.equal(network.kwargs["input"], IMAGES[:, 0, 0, :2])
    # The hooks are gone again.
    assert not torch.nn.modules.module._global_forward_pre_hooks and not net._forward_pre_hooks


def test_one_sign_of_whole_values_is_averaged_and_aligned() -> None:
    """One factor with a vector of loadings: half of the draws are turned, and alignment turns them back."""
    symmetry = find_symmetry(one_factor_of_vectors, POINTS)
    start = init_to_value(values={"loadings": torch.tensor([2.0, 1.0])})  # far from its turned copy
    base = AutoNormal(one_factor_of_vectors, init_scale=0.01, init_loc_fn=start)
    guide = ps.AutoSymmetrized(base, symmetry)
    gain = guide.symmetry_gain(POINTS, num_samples=20)
    assert math.isclose(gain.estimate, math.log(2), rel_tol=1e-6)

    generator = torch.Generator().manual_seed(0)
    draws = {"loadings": torch.tensor([2.0, 1.0]), "scores": torch.linspace(-1, 1, len(POINTS))}
    draws = {name: v + 0.01 * torch.randn(400, len(v), generator=generator) for name, v in draws.items()}
    signs = torch.randint(2, (400, 1), generator=generator) * 2 - 1
    turned = {name: signs * values for name, values in draws.items()}
    aligned = ps.align(turned, symmetry).samples
    assert turned["loadings"][:, 0].std() > 1.9  # the control: the labels of raw draws are lost
    for name, values in draws.items():
        assert torch.allclose(aligned[name] * (aligned["loadings"][0, 0].sign()), values)


def test_one_sign_is_not_looked_for_in_a_subsampled_plate() -> None:
    """What a minibatch shows of a value has no shape of its own for the group to name."""

    def model(y: Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y), subsample_size=2) as rows:
            scores = pyro.sample("scores", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(scores.unsqueeze(-1) * loadings, 1.0).to_event(1), obs=y[rows])

    assert repr(find_symmetry(model, POINTS)) == "Product()"
