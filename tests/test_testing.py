"""The contract checks: everything that is built in passes, and each mistake fails with a message of its own.

The checks are in ``testing.symmetries``, ``testing.kernels``, ``testing.estimators`` and ``testing.laws``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from torch import Tensor, nn

from pyro_sym import (
    BAOA,
    SGHMC,
    SGLD,
    SGNHT,
    AutoSymmetrized,
    LeimkuhlerMatthews,
    Permutation,
    Product,
    SignFlip,
    Symmetry,
    SymmetryError,
    Viewed,
    symmetry_of,
    testing,
)
from pyro_sym.guides.average import OrbitAverage, Run, Uniform
from pyro_sym.orbit.enumeration import log_prob_at_images
from pyro_sym.sgmcmc.preconditioners import RMSprop
from tests.catalogue import normals

# --- symmetries ---------------------------------------------------------------------------------------------

LAYERS = {"w1": (5, 3), "b1": (3,), "w2": (3, 2)}
HIDDEN = {"w1": -1, "b1": -1, "w2": -2}
IMAGE = {"conv": (2, 3, 4), "linear": (2, 12)}
CHANNELS = Viewed(Permutation({"conv": -2, "linear": -2}), {"linear": (2, (3, 4))})
SYMMETRIES: list[tuple[Symmetry, dict[str, tuple[int, ...]]]] = [
    (Permutation({"locs": -2, "trans": (-2, -1)}), {"locs": (4, 2), "trans": (4, 4)}),
    (Permutation({"wide": -1}), {"wide": (20,)}),
    (SignFlip({"loadings": -1, "factors": -2}), {"loadings": (3, 4), "factors": (4, 2)}),
    (Product(Permutation(HIDDEN), SignFlip(HIDDEN)), LAYERS),
    (Product(Permutation(HIDDEN), Permutation({"w2": -1})), LAYERS),
    (CHANNELS, IMAGE),
    (Product(CHANNELS, SignFlip({"linear": -2})), IMAGE),
    (Product(), {"locs": (3,)}),
]


def values_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("symmetry", "shapes"), SYMMETRIES, ids=lambda case: str(case)[:40])
def test_built_in_symmetries_keep_the_contract(symmetry: Symmetry, shapes: dict[str, Any]) -> None:
    testing.check_symmetry_contract(symmetry, values_of(shapes))


def test_a_networks_symmetry_keeps_the_contract_and_is_that_of_its_function() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    values = {name: value.detach() for name, value in net.named_parameters()}
    x = torch.randn(10, 3)

    def model() -> None:
        drawn = {
            name: pyro.sample(name, dist.Normal(torch.zeros_like(value), 1.0).to_event(value.dim()))
            for name, value in values.items()
        }
        out = torch.func.functional_call(net, drawn, x.to(drawn["0.bias"].dtype))
        pyro.factor("data", -out.square().sum())

    testing.check_symmetry_contract(symmetry_of(net, x), values, model=model)


class Shift(Symmetry):
    """The cyclic group: element k moves every entry k places to the right. Products are left unreduced."""

    def __init__(self, axes: dict[str, int]) -> None:
        self.all = Permutation({**axes})
        self.axes = self.all.axes

    def __repr__(self) -> str:
        return "Shift"

    def check_values(self, values: Any) -> None:
        self.all.check_values(values)

    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        n = self.all.size(values)
        return self.all._act((torch.arange(n) - element) % n, values)

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def identity(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.zeros(*batch_shape, 1, dtype=torch.long)

    def sample(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(self.all.size(values), (*batch_shape, 1))

    def elements(self, values: Any) -> Tensor:
        return torch.arange(self.all.size(values)).unsqueeze(-1)

    def generators(self, values: Any) -> list[tuple[str, Tensor]]:
        return [("a shift by one", torch.ones(1, dtype=torch.long))]

    def log_order(self, values: Any) -> float:
        return math.log(self.all.size(values))


class TwoSites(Permutation):
    """What broken permutations below are made of."""

    def __init__(self) -> None:
        super().__init__({"w": -1, "b": -1})

    def __repr__(self) -> str:
        return type(self).__name__


class WrongInverse(TwoSites):
    def inverse(self, element: Tensor) -> Tensor:
        return element


class WrongOrder(TwoSites):
    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return super().compose(second, first)


class NoIdentity(TwoSites):
    def identity(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return super().identity(values, batch_shape).flip(-1)


class ForgetsASite(TwoSites):
    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        return {"w": super()._act(element, values)["w"]}


class ForgetsAnAxis(TwoSites):
    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        images = super()._act(element, values)
        return Permutation({"w": -2})._act(element, images) | {"b": images["b"]}


class Anonymous(TwoSites):
    def check_values(self, values: Any) -> None:
        pass


class Lenient(Anonymous):
    def act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        present = Permutation({name: -1 for name in self.axes if name in values})
        return {**values, **present._act(element, values)}


class Skewed(TwoSites):
    def sample(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        scores = torch.rand(*batch_shape, self.size(values))
        scores[..., 0] *= 0.8
        return scores.argsort(-1)


class NeverMovesTheFirst(TwoSites):
    def sample(self, values: Any, batch_shape: tuple[int, ...] = ()) -> Tensor:
        scores = torch.rand(*batch_shape, self.size(values))
        scores[..., 0] = -1
        return scores.argsort(-1)


class ListsTwice(TwoSites):
    def elements(self, values: Any) -> Tensor:
        elements = super().elements(values).clone()
        elements[3] = elements[4]
        return elements


class ListsTooFew(TwoSites):
    def elements(self, values: Any) -> Tensor:
        return super().elements(values)[:-1]


class IdentityLast(TwoSites):
    def elements(self, values: Any) -> Tensor:
        return super().elements(values).flip(0)


class OneGenerator(TwoSites):
    def generators(self, values: Any) -> list[tuple[str, Tensor]]:
        return super().generators(values)[:1]


class InPlace(TwoSites):
    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        images = super()._act(element, values)
        if element.dim() == 1:
            values["w"].copy_(images["w"])
        return images


class InDouble(TwoSites):
    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        return {name: image.double() for name, image in super()._act(element, values).items()}


class MeddlesElsewhere(TwoSites):
    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        others = {name: value + 1 for name, value in values.items() if name not in self.axes}
        return super()._act(element, values) | others


class OneElementForAll(TwoSites):
    """A batch of elements is taken for its first."""

    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        return super()._act(element.reshape(-1, element.shape[-1])[0].expand_as(element), values)


class Reciprocal(SignFlip):
    """An involution that changes volume."""

    def __repr__(self) -> str:
        return "Reciprocal"

    def _act(self, element: Tensor, values: Any) -> dict[str, Tensor]:
        flipped = super()._act(element, values)
        return {
            name: torch.where(flipped[name] == values[name], values[name], 1 / values[name])
            for name in flipped
        }


SHAPES = {"w": (4, 4), "b": (4,)}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongInverse, r"inverse\(g\) does not undo g: 'w' is off by [\d.]+ \(rounding allows"),
        (WrongOrder, r"compose\(g, h\) does not act as g after h: 'w' is off by"),
        (NoIdentity, "the identity moves something: 'w' is off by"),
        (ForgetsASite, "site 'b' is moved by none of 20 elements"),
        (ForgetsAnAxis, r"site 'w' is moved along axis -2 as well, which axes \(-1,\) does not name"),
        (Anonymous, r"act\(\) without site 'w' raises KeyError, and check_values\(\) should have raised"),
        (Lenient, r"act\(\) accepts values without site 'w'"),
        (Skewed, r"sample\(\) is not uniform: in 2000 draws an element should come 83 times, and one came"),
        (ListsTwice, r"elements\(\) has only 23 different ones in 24"),
        (ListsTooFew, r"elements\(\) lists 23, and log_order\(\) is the logarithm of 24"),
        (IdentityLast, r"elements\(\) does not have the identity first"),
        (OneGenerator, r"generators\(\) generate 2 of 24 elements"),
        (InPlace, r"act\(\) changes its input: 'w' is off by"),
        (InDouble, r"dtype and device of site 'w' from .*float32.* into .*float64"),
        (MeddlesElsewhere, "a site that it does not name is changed: '_a_site"),
        (OneElementForAll, "is off by"),
    ],
)
def test_a_broken_symmetry_is_told_what_it_breaks(kind: Callable[[], Symmetry], message: str) -> None:
    testing.check_symmetry_contract(TwoSites(), values_of(SHAPES))
    with pytest.raises(AssertionError, match=f"^{kind.__name__}: .*{message}"):  # type: ignore[attr-defined]
        testing.check_symmetry_contract(kind(), values_of(SHAPES))


def test_one_element_for_all_passes_alone() -> None:
    """So that the check above fails for batches, not for the laws of single elements."""
    g = torch.tensor([1, 0, 3, 2])
    values = values_of(SHAPES)
    assert torch.equal(OneElementForAll().act(g, values)["w"], TwoSites().act(g, values)["w"])


def test_a_change_of_volume_is_seen() -> None:
    values = {"scale": 2.0 + torch.rand(3)}
    with pytest.raises(AssertionError, match=r"Reciprocal: an element changes volume by the factor exp\(-"):
        testing.check_symmetry_contract(Reciprocal({"scale": -1}), values)


def test_skewed_samples_of_a_group_too_large_to_list_are_seen() -> None:
    wide = {"w": torch.randn(2, 20), "b": torch.randn(20)}
    with pytest.raises(
        AssertionError, match="entry 0 of its elements has another law after swapping 0 and 1"
    ):
        testing.check_symmetry_contract(NeverMovesTheFirst(), wide)


def test_values_that_show_nothing_are_refused() -> None:
    with pytest.raises(AssertionError, match="or are the values given for it all alike"):
        testing.check_symmetry_contract(Permutation({"w": -1}), {"w": torch.zeros(3)})
    with pytest.raises(AssertionError, match="no values are given for site 'w'"):
        testing.check_symmetry_contract(Permutation({"w": -1}), {"b": torch.randn(3)})


def test_elements_that_are_not_reduced_are_seen() -> None:
    """Shifts added without the modulus act rightly, and are not one element a name."""
    with pytest.raises(
        AssertionError, match=r"generate more than the 5 elements .* compose\(\) has to reduce"
    ):
        testing.check_symmetry_contract(Shift({"signal": -1}), {"signal": torch.randn(5)})


def test_the_model_has_its_say() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(4, 4), 1.0).to_event(2))
        pyro.sample("b", dist.Normal(torch.arange(4.0), 1.0).to_event(1))

    testing.check_symmetry_contract(TwoSites(), values_of(SHAPES))
    with pytest.raises(AssertionError, match=r"not invariant under swapping 0 and 1.*'b' by") as raised:
        testing.check_symmetry_contract(TwoSites(), values_of(SHAPES), model=model)
    assert isinstance(raised.value.__cause__, SymmetryError)


def test_an_error_of_the_symmetrys_own_says_what_was_tried() -> None:
    class Fails(TwoSites):
        def compose(self, first: Tensor, second: Tensor) -> Tensor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        testing.check_symmetry_contract(Fails(), values_of(SHAPES))
    assert "Fails was tried on: identity, inverse, composition" in raised.value.__notes__[0]


def test_checks_leave_the_random_state_and_can_be_repeated() -> None:
    before = torch.get_rng_state()
    messages = []
    for _ in range(2):
        with pytest.raises(AssertionError) as raised:
            testing.check_symmetry_contract(Skewed(), {name: torch.arange(4.0) for name in ("w", "b")})
        messages.append(str(raised.value))
    assert messages[0] == messages[1] and torch.equal(torch.get_rng_state(), before)


# --- kernels ------------------------------------------------------------------------------------------------

KERNELS: list[partial[Any]] = [
    partial(SGLD, step_size=0.1),
    partial(LeimkuhlerMatthews, step_size=0.3),
    partial(SGHMC, step_size=0.3, friction=2.0),
    partial(BAOA, step_size=0.5, friction=1.5),
    partial(SGNHT, step_size=0.1),
]


@pytest.mark.parametrize("make", KERNELS, ids=lambda make: make.func.__name__)
def test_built_in_kernels_keep_the_contract(make: partial[Any]) -> None:
    before = torch.get_rng_state()
    testing.check_kernel_contract(make)
    assert torch.equal(torch.get_rng_state(), before)


class TemperatureSquared(BAOA):
    def step(self, *args: Any, **options: Any) -> Any:
        options["temperature"] = options["temperature"] ** 2
        return super().step(*args, **options)


class HeatsWhenRun(SGLD):
    """Right in its steps, wrong in what it makes of its temperature."""

    def temperature_at(self, step: int) -> Any:
        temperature: Any = super().temperature_at(step)
        return 1.1 * temperature


class NoisyWhenCold(SGLD):
    def step(self, state: Any, gradient: Tensor, noise: Tensor, **options: Any) -> Any:
        (position,) = super().step(state, gradient, noise, **options)
        return (position + 0.01 * torch.randn_like(position),)


class IgnoresTheSeed(SGLD):
    """Noise from a generator of its own, the same in every run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own = torch.Generator().manual_seed(1)

    def step(self, state: Any, gradient: Tensor, noise: Tensor, **options: Any) -> Any:
        own = torch.randn(noise.shape, generator=self._own, dtype=noise.dtype)
        return super().step(state, gradient, own, **options)


class DrawsUnderItsOwnSeed(SGLD):
    _own = torch.Generator()

    def step(self, state: Any, gradient: Tensor, noise: Tensor, **options: Any) -> Any:
        own = torch.randn(noise.shape, generator=self._own, dtype=noise.dtype)
        return super().step(state, gradient, own, **options)


class SharesNoise(SGLD):
    def step(self, state: Any, gradient: Tensor, noise: Tensor, **options: Any) -> Any:
        return super().step(state, gradient, noise[:1].expand_as(noise), **options)


class UnitMomenta(SGHMC):
    def init(self, position: Tensor, noise: Tensor, **settings: Any) -> Any:
        return position, noise


class NoFriction(SGHMC):
    def step(self, state: Any, *args: Any, **options: Any) -> Any:
        position, momentum = super().step(state, *args, **options)
        lost = self.friction * options["step_size"] * state[1]
        return position + options["step_size"] * lost, momentum + lost


class CountsSteps(SGLD):
    """Anneals by a count of its own, which no record has."""

    count = 0

    def step(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        options["step_size"] = options["step_size"] / self.count
        return super().step(*args, **options)


class InSingle(SGLD):
    def step(self, *args: Any, **options: Any) -> Any:
        return (super().step(*args, **options)[0].float(),)


class StopsInPlace(SGLD):
    def step(self, state: Any, *args: Any, **options: Any) -> Any:
        state[0].copy_(super().step(state, *args, **options)[0])
        return state


class NumbersOnly(SGLD):
    """A branch on the type of the step size: compiled steps would take another road than eager ones."""

    def step(self, *args: Any, **options: Any) -> Any:
        if isinstance(options["step_size"], Tensor):
            options["step_size"] = options["step_size"] / 2
        return super().step(*args, **options)


class Climbs(SGLD):
    def step(self, state: Any, gradient: Tensor, *args: Any, **options: Any) -> Any:
        return super().step(state, -gradient, *args, **options)


class ForgetsRows(SGLD):
    """A minibatch is taken for all data."""

    def start(self, *args: Any, **options: Any) -> Any:
        scale = pyro.poutine.scale
        model = self.model
        self.model = lambda: scale(model, 0.5)()
        return super().start(*args, **options)


class Thermostat(SGNHT):
    def step(self, *args: Any, **options: Any) -> Any:
        options["temperature"] = 1.2 * options["temperature"]
        return super().step(*args, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(TemperatureSquared, step_size=0.3),
            r"variance on a Gaussian goes to 0\.25 T / λ, not T / λ, at t",
        ),
        (
            partial(NoisyWhenCold, step_size=0.1),
            "at temperature 0 the path depends on the seed: 'x' is off by 0",
        ),
        (partial(IgnoresTheSeed, step_size=0.1), "runs under two seeds in MCMC are the same"),
        (
            partial(DrawsUnderItsOwnSeed, step_size=0.1),
            "two runs under one seed in MCMC differ: 'x' is off by",
        ),
        (partial(SharesNoise, step_size=0.1), "chains that run side by side share their noise"),
        (
            partial(UnitMomenta, step_size=0.1),
            r"momenta start at a kinetic temperature of 0\.49\d*, not 0\.25",
        ),
        (partial(NoFriction, step_size=0.1), "do not forget where they started"),
        (partial(CountsSteps, step_size=0.1), r"step\(\) called again gives another result"),
        (
            partial(InSingle, step_size=0.1),
            r"part 0 of the state from \(5, 6\), torch.float64 into .*float32",
        ),
        (partial(StopsInPlace, step_size=0.1), r"step\(\) changes its inputs"),
        (partial(NumbersOnly, step_size=0.1), "tensors instead of numbers for step_size"),
        (partial(Climbs, step_size=0.1), "the potential energy goes from .* it should fall"),
        (partial(BAOA, step_size=2.5), "lower step_size|do not forget|should fall|finite"),
        (partial(Thermostat, step_size=0.1), r"the variance is 0\.3\d*, and that of the target is 0\.25"),
    ],
    ids=lambda case: case.func.__name__ if isinstance(case, partial) else "",
)
def test_a_broken_kernel_is_told_what_it_breaks(make: partial[Any], message: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=message):
        testing.check_kernel_contract(make)


def test_a_kernel_that_is_hot_in_its_runs_only_is_found_by_simulation() -> None:
    message = re.compile(
        r"after \d+ steps at temperature 0\.25 .* the variance is 0\.2[789].* its steps is 0\.26"
    )
    with pytest.raises(AssertionError, match=message):
        testing.check_kernel_contract(partial(HeatsWhenRun, step_size=0.1))


def test_what_is_no_kernel_and_what_can_not_be_checked_is_refused() -> None:
    with pytest.raises(AssertionError, match="which is no StochasticGradientKernel"):
        testing.check_kernel_contract(lambda model, **options: pyro.infer.NUTS(model))
    with pytest.raises(ValueError, match="check the kernel without it"):
        testing.check_kernel_contract(partial(SGLD, step_size=0.1, preconditioner=RMSprop()))


# --- orbit averages -----------------------------------------------------------------------------------------


overlapping = normals({"locs": (4,)})


def apart(site: dict[str, Any]) -> Tensor:
    return 3 * torch.arange(4.0)


SORTED = Permutation({"locs": -1})


def guides() -> list[AutoNormal]:
    return [AutoNormal(overlapping), AutoNormal(overlapping, init_loc_fn=apart, init_scale=0.5)]


@pytest.mark.parametrize("estimator", ["exact", "importance", "uniform", "auto"])
def test_built_in_averages_keep_the_contract(estimator: Any) -> None:
    for guide in guides():
        testing.check_estimator_contract(estimator, guide, SORTED)
    testing.check_estimator_contract(estimator, AutoDiagonalNormal(overlapping), SORTED)
    assert not pyro.get_param_store(), "parameters of a check are its own"


class Distinct(OrbitAverage):
    """Different elements, the identity among them: exact if they are all."""

    def bound(self, run: Run, num_elements: int) -> Tensor:
        images, own = self.images(run, num_elements), torch.zeros(1, len(run.draws.own))
        return torch.cat([own, images]).logsumexp(0) - math.log(1 + len(images))

    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        images = self.images(run, num_elements)
        order = math.exp(self.symmetry.log_order(run.draws.values))
        others = images.logsumexp(0) - math.log(len(images)) + math.log(order - 1)
        return torch.logaddexp(others, torch.zeros(())) - math.log(order)

    def images(self, run: Run, num_elements: int) -> Tensor:
        elements = self.symmetry.elements(run.draws.values)[1:]
        scores = torch.rand(len(elements), len(run.draws.own))
        some = elements[scores.argsort(0)[: num_elements - 1]]
        return log_prob_at_images(self.symmetry, run.relative(), run.draws.values, some)


class WithoutIdentity(Uniform):
    def bound(self, run: Run, num_elements: int) -> Tensor:
        elements = self.symmetry.sample(run.draws.values, (num_elements, len(run.draws.own)))
        images = log_prob_at_images(self.symmetry, run.relative(), run.draws.values, elements)
        return images.logsumexp(0) - math.log(num_elements)


class UnbiasedIsTheBound(Distinct):
    def unbiased(self, run: Run, num_elements: int) -> Tensor:
        return self.bound(run, num_elements)


class SumsOverDraws(Distinct):
    def bound(self, run: Run, num_elements: int) -> Tensor:
        return super().bound(run, num_elements).sum()


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (WithoutIdentity, r"WithoutIdentity: bound\(\) is [\d.]+ nats \(± .*\) below the exact average"),
        (UnbiasedIsTheBound, r"UnbiasedIsTheBound: unbiased\(\) is [\d.]+ nats .* above the exact average"),
        (
            SumsOverDraws,
            r"bound\(\) has to give a finite number a draw, of shape \(300,\); it gives shape \(\)",
        ),
    ],
)
def test_a_broken_average_is_told_what_it_breaks(estimator: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        testing.check_estimator_contract(estimator, guides()[1], SORTED)


def test_an_average_of_ones_own_is_what_svi_optimises() -> None:
    for guide in guides():
        testing.check_estimator_contract(Distinct, guide, SORTED)
    for num_elements, gain in ((4, math.log(4)), (24, math.log(24))):
        own = AutoSymmetrized(
            guides()[1], SORTED, estimator=Distinct, num_elements=num_elements, tolerance=None
        )
        found = own.symmetry_gain(num_samples=20)
        assert own.method == found.method == "Distinct"
        assert found.lower == pytest.approx(gain, abs=1e-3), (
            "of distinct elements the bound saturates at log K"
        )
        assert found.upper == pytest.approx(math.log(24), abs=1e-3)


def test_what_is_no_average_is_refused() -> None:
    with pytest.raises(ValueError, match="no subclass of OrbitAverage"):
        AutoSymmetrized(AutoNormal(overlapping), SORTED, estimator=Permutation)  # type: ignore[arg-type]
