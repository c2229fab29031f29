"""Equal values have equal words in every process; what makes a different run has different words.

Covers also `draws.value_reader` and `draws.referenced_code`.
"""

from __future__ import annotations

import enum
import functools
import io
import os
import pickle
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from pyro_sym.draws import value_reader
from pyro_sym.draws.fingerprint import MAX_WORDS, Fingerprint, fingerprint
from pyro_sym.nn import BayesianModule, Categorical, IIDPrior
from pyro_sym.sgmcmc.preconditioners import RMSprop
from pyro_sym.sgmcmc.schedules import Cyclical
from tests.sgmcmc import maps


def words(value: Any, **options: Any) -> dict[str, str]:
    return fingerprint({"value": value}).words(**options)


def counter(start: float) -> Callable[[int], float]:
    def count(step: int) -> float:
        return count(step - 1) if step > 0 else start

    return count


def network(weight: float = 1.0, bias: float = 0.0) -> nn.Module:
    net = nn.Linear(2, 3)
    with torch.no_grad():
        net.weight.fill_(weight)
        net.bias.fill_(bias)
    return net


def bayesian(scale: float = 1.0, num_data: int = 10, **options: Any) -> BayesianModule:
    return BayesianModule(
        network(), IIDPrior(dist.Normal(0.0, scale)), Categorical(num_data=num_data), **options
    )


def loader(size: int = 4, rows: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(rows)), batch_size=size, shuffle=not options, **options)


class Squares(Dataset[int]):
    def __init__(self, rows: int, power: int = 2) -> None:
        self.rows, self.power = rows, power

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row**self.power


SCALE, TABLE = 1.0, {"a": torch.ones(2)}


class Model:
    """A model with numbers in attributes, class attributes and global variables."""

    shift = 0.0

    def __init__(self, loc: float = 0.0, **more: Any) -> None:
        self.loc = loc
        self.__dict__.update(more)

    def __call__(self) -> None:
        pyro.sample("m", dist.Normal(self.mean(), SCALE * TABLE["a"].sum()))

    def mean(self) -> float:
        return self.loc + self.shift


class Slotted:
    __slots__ = ("loc",)

    def __init__(self, loc: float) -> None:
        self.loc = loc

    def __call__(self) -> None:
        pyro.sample("m", dist.Normal(self.loc, 1.0))


class Kind(enum.Enum):
    one, two = 1, 2


Point = namedtuple("Point", "x y")


@dataclass
class Numbers:
    loc: float
    items: list[float]


class Linked:
    def __init__(self, value: float) -> None:
        self.value, self.me = value, self


class Priors(PyroModule):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, scale))


def with_lambda(scale: float) -> PyroModule:
    made = PyroModule()
    made.w = PyroSample(lambda self: dist.Normal(0.0, scale))
    return made


def default(scale: float) -> Callable[[], None]:
    def model(a: float = scale, *, b: float = 2 * scale) -> None:
        pyro.sample("m", dist.Normal(a, b))

    return model


def decorated(scale: float) -> Callable[[], None]:
    @functools.wraps(default)
    def model() -> None:
        default(scale)()

    return model


def hooked(scale: float) -> nn.Module:
    net = network()
    net.register_forward_hook(lambda module, given, result: scale * result)
    return net


def buffered(value: float) -> nn.Module:
    net = network()
    net.register_buffer("shift", torch.tensor(value), persistent=False)
    return net


def frame(value: float, name: str = "x") -> pd.DataFrame:
    return pd.DataFrame({name: [1.0, value], "y": ["a", "b"]})


def masked(value: bool) -> Any:
    return np.ma.masked_array([1.0, 2.0], [value, False])


def objects(value: int) -> Any:
    return np.array([value, "a", None], dtype=object)


def nested(scale: float) -> dist.Distribution:
    return dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(0.0, scale).inv]
    )


def mixture(scale: float) -> dist.Distribution:
    weights = dist.Categorical(torch.ones(2))
    return dist.MixtureSameFamily(weights, dist.Normal(torch.zeros(2), scale * torch.ones(2)))


def conditioned(value: float) -> Any:
    return poutine.condition(counter(0.0), {"m": torch.tensor(value)})


def weighted(weight: float) -> DataLoader[Any]:
    return loader(sampler=WeightedRandomSampler([1.0, weight], 2))


CASES: dict[str, tuple[Callable[[], Any], list[Callable[[], Any]]]] = {
    "number": (lambda: 0.1, [lambda: 0.2, lambda: "0.1"]),
    "zero": (lambda: 0.0, [lambda: -0.0, lambda: 0, lambda: False]),
    "tensor": (lambda: torch.ones(2), [lambda: torch.ones(3), lambda: torch.ones(2, dtype=torch.int)]),
    "conjugate": (lambda: torch.tensor([1j]).conj(), [lambda: torch.tensor([1j])]),
    "sparse": (lambda: torch.eye(2).to_sparse(), [lambda: torch.ones(2, 2).to_sparse()]),
    "half": (lambda: torch.ones(2, dtype=torch.bfloat16), [lambda: torch.ones(2, dtype=torch.half)]),
    "empty": (lambda: torch.ones(0, 2), [lambda: torch.ones(2, 0)]),
    "array": (lambda: np.ones(2), [lambda: np.ones((2, 1)), lambda: np.zeros(2)]),
    "masked array": (lambda: masked(True), [lambda: masked(False)]),
    "object array": (lambda: objects(1), [lambda: objects(2)]),
    "frame": (lambda: frame(2.0), [lambda: frame(3.0), lambda: frame(2.0, "z"), lambda: frame(2.0)["x"]]),
    "dict": (lambda: {"a": [1, (2, 3)]}, [lambda: {"a": [1, 2, 3]}, lambda: {"b": [1, (2, 3)]}]),
    "order": (lambda: {"a": 1, "b": 2}, [lambda: {"b": 2, "a": 1}]),
    "keys": (lambda: {(1, 2): 3}, [lambda: {(1, 3): 3}]),
    "set": (lambda: {1, 2}, [lambda: {1, 3}, lambda: frozenset({1, 2})]),
    "set of tuples": (lambda: {("a", 1), ("b", 2)}, [lambda: {("a", 2), ("b", 1)}]),
    "long list": (lambda: list(range(10_000)), [lambda: [*range(9_999), 0]]),
    "long set": (lambda: {f"{i}" for i in range(99)}, [lambda: {f"{i}" for i in range(1, 100)}]),
    "subclass": (lambda: OrderedDict(a=1), [lambda: OrderedDict(a=2), lambda: {"a": 1}]),
    "others": (
        lambda: [deque([1]), Counter("ab"), Fraction(1, 2), Path("a"), Kind.one, Point(1, 2), range(3)],
        [
            lambda: [deque([2]), Counter("ab"), Fraction(1, 2), Path("a"), Kind.one, Point(1, 2), range(3)],
            lambda: [deque([1]), Counter("aa"), Fraction(1, 2), Path("a"), Kind.one, Point(1, 2), range(3)],
            lambda: [deque([1]), Counter("ab"), Fraction(1, 3), Path("a"), Kind.one, Point(1, 2), range(3)],
            lambda: [deque([1]), Counter("ab"), Fraction(1, 2), Path("b"), Kind.one, Point(1, 2), range(3)],
            lambda: [deque([1]), Counter("ab"), Fraction(1, 2), Path("a"), Kind.two, Point(1, 2), range(3)],
            lambda: [deque([1]), Counter("ab"), Fraction(1, 2), Path("a"), Kind.one, Point(1, 3), range(3)],
        ],
    ),
    "closure": (lambda: counter(0.5), [lambda: counter(0.6)]),
    "default": (lambda: default(0.5), [lambda: default(0.6)]),
    "decorated": (lambda: decorated(0.5), [lambda: decorated(0.6)]),
    "cached": (lambda: functools.lru_cache(counter(0.5)), [lambda: functools.lru_cache(counter(0.6))]),
    "code": (
        lambda: lambda x: x + 1,
        [lambda: lambda x: x + 2, lambda: lambda x: x - 1, lambda: lambda *x: x],
    ),
    "partial": (lambda: functools.partial(pow, 2), [lambda: functools.partial(pow, 3)]),
    "partial of a method": (
        lambda: functools.partial(Model(1.0).mean),
        [lambda: functools.partial(Model(2.0).mean)],
    ),
    "object": (Model, [lambda: Model(1.0), lambda: Model(more=1)]),
    "within": (lambda: Model(Numbers(1.0, [2.0])), [lambda: Model(Numbers(1.0, [3.0]))]),  # type: ignore[arg-type]
    "method": (lambda: Model().mean, [lambda: Model(1.0).mean, lambda: Model().__call__]),
    "slots": (lambda: Slotted(1.0), [lambda: Slotted(2.0)]),
    "circle": (lambda: Linked(1.0), [lambda: Linked(2.0)]),
    "preconditioner": (lambda: RMSprop(), [lambda: RMSprop(decay=0.5)]),
    "schedule": (lambda: Cyclical(0.1, 10).step_size, [lambda: Cyclical(0.1, 20).step_size]),
    "distribution": (
        lambda: dist.Normal(0.0, 1.0),
        [lambda: dist.Normal(0.0, 2.0), lambda: dist.Cauchy(0.0, 1.0)],
    ),
    "expanded": (lambda: dist.Normal(0.0, 1.0).expand([2]), [lambda: dist.Normal(0.0, 1.0).expand([3])]),
    "geometric": (
        lambda: dist.Geometric(logits=torch.ones(1)),
        [lambda: dist.Geometric(logits=torch.zeros(1))],
    ),
    "transformed": (lambda: nested(1.0), [lambda: nested(2.0)]),
    "mixture": (lambda: mixture(1.0), [lambda: mixture(2.0)]),
    "no mask": (lambda: dist.Normal(0.0, 1.0).mask(True), [lambda: dist.Normal(0.0, 1.0).mask(False)]),
    "handler": (lambda: conditioned(1.0), [lambda: conditioned(2.0)]),
    "network": (network, [lambda: network(2.0), lambda: nn.Sequential(network()), lambda: network().eval()]),
    "dropout": (lambda: nn.Dropout(0.5), [lambda: nn.Dropout(0.4)]),
    "hook": (lambda: hooked(1.0), [lambda: hooked(2.0), network]),
    "buffer": (lambda: buffered(1.0), [lambda: buffered(2.0)]),
    "bayesian": (
        bayesian,
        [lambda: bayesian(2.0), lambda: bayesian(1.0, 11), lambda: bayesian(batch_size=2)],
    ),
    "pyro module": (lambda: Priors(1.0), [lambda: Priors(2.0)]),
    "lambda prior": (lambda: with_lambda(1.0), [lambda: with_lambda(2.0)]),
    "loader": (loader, [lambda: loader(2), lambda: loader(4, 9)]),
    "sampler": (lambda: weighted(1.0), [lambda: weighted(2.0)]),
    "dataset": (
        lambda: DataLoader(Squares(4)),
        [
            lambda: DataLoader(Squares(5)),
            lambda: DataLoader(Squares(4, 3)),
            lambda: DataLoader(Subset(Squares(4), [1])),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_same_and_different(case: str) -> None:
    make, others = CASES[case]
    same = fingerprint({"value": make()})
    assert words(make()) == same.words() and same.doubts == []
    for other in others:
        assert words(other()) != words(make())


def everything() -> list[Any]:
    return [make() for make, _ in CASES.values()]


def test_words_are_the_same_in_another_process() -> None:
    """With another seed of Python's hashes, which determine the order of sets."""
    code = "from tests.draws.test_fingerprint import *; print(words(everything()))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert eval(done.stdout) == words(everything())


def test_a_pickled_copy_is_the_same() -> None:
    for name in (
        "tensor",
        "frame",
        "dict",
        "set of tuples",
        "others",
        "object",
        "within",
        "slots",
        "mixture",
        "network",
    ):
        value = CASES[name][0]()
        assert words(pickle.loads(pickle.dumps(value))) == words(value), name


# --- what differs is named ----------------------------------------------------------------------------------


def change(value: Any, do: Callable[[], None]) -> dict[str, tuple[str | None, str | None]]:
    """What differs once something was done, by place."""
    before = words(value)
    do()
    after = words(value)
    return {
        place: (before.get(place), after.get(place))
        for place in {**before, **after}
        if before.get(place) != after.get(place)
    }


def test_an_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    assert change(model, lambda: setattr(model, "loc", 2.0)) == {"value.loc": ("0.0", "2.0")}
    changed = change(model, lambda: monkeypatch.setattr(Model, "shift", 3.0))
    assert changed == {"value.__class__.shift": ("0.0", "3.0")}
    changed = change(model, lambda: monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0))
    assert changed == {"value.__class__.__call__: global SCALE": ("1.0", "3.0")}
    changed = change(model, lambda: TABLE.update(a=2 * TABLE["a"]))
    assert list(changed) == ["value.__class__.__call__: global TABLE['a']"]
    TABLE["a"] /= 2
    changed = change(model, lambda: monkeypatch.setattr(Model, "mean", lambda self: self.loc))
    assert "value.__class__.mean: code" in changed


def calls_another(x: float) -> float:
    return helper(x) + maps.POWER  # type: ignore[attr-defined]


def helper(x: float) -> float:
    return HELP * x


HELP = 1.0


def test_functions_that_are_called_and_modules_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(maps, "POWER", 2, raising=False)
    changed = change(calls_another, lambda: monkeypatch.setattr(here, "HELP", 2.0))
    assert changed == {"value: global helper: global HELP": ("1.0", "2.0")}
    changed = change(calls_another, lambda: monkeypatch.setattr(maps, "POWER", 3))
    assert changed == {"value: global maps.POWER": ("2", "3")}
    monkeypatch.setattr(maps, "UNUSED", 1, raising=False)
    assert change(calls_another, lambda: monkeypatch.setattr(maps, "UNUSED", 2)) == {}
    assert change(calls_another, lambda: monkeypatch.setattr(here, "SCALE", 2)) == {}


def test_installed_packages_are_known_by_name() -> None:
    assert words(dist.Normal) == {"value": "pyro.distributions.torch.Normal"}
    assert words(torch.special.expit).keys() == {"value"}
    assert words(statistics.mean) == {"value": "statistics.mean"}


def test_few_places_are_named_and_all_count() -> None:
    values = [[float(i + j) for i in range(5)] for j in range(1000)]
    for j in (0, 999):
        assert len(words(values)) <= MAX_WORDS
        assert list(change(values, lambda j=j: values[j].__setitem__(3, -1.0))) == ["value"]  # type: ignore[misc]


# --- what makes no difference -------------------------------------------------------------------------------


def test_parameters_that_are_sampled_make_no_difference() -> None:
    left_out = [words(nn.Sequential(network(weight)), leave_out=["weight"]) for weight in (1.0, 2.0)]
    assert left_out[0] == left_out[1]
    assert words(network(bias=1.0), leave_out=["weight"]) != words(network(), leave_out=["weight"])


def test_a_distribution_is_the_same_after_it_was_used() -> None:
    """Distributions cache properties."""
    fresh, used = (
        [
            dist.Categorical(logits=torch.tensor([0.1, 0.9])),
            dist.MultivariateNormal(torch.zeros(2), torch.eye(2)),
        ]
        for _ in range(2)
    )
    used[0].log_prob(torch.tensor(0)), used[0].probs
    used[1].precision_matrix, used[1].log_prob(torch.zeros(2))
    assert words(fresh) == words(used)


class Caching:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    @functools.cached_property
    def gram(self) -> torch.Tensor:
        return torch.eye(2)

    @functools.lru_cache  # noqa: B019
    def prior(self) -> int:
        return 1


def test_caches_and_locks_make_no_difference() -> None:
    model = Caching()
    assert change(model, lambda: (model.gram, model.prior(), model.lock.acquire())) == {}  # type: ignore[arg-type,return-value]
    generator = torch.Generator().manual_seed(1)
    batches = DataLoader(TensorDataset(torch.arange(8)), shuffle=True, generator=generator)
    assert change(batches, lambda: list(batches)) == {}  # type: ignore[arg-type,return-value]


def test_a_tensor_of_one_element_may_have_any_strides() -> None:
    # A prior expanded to the one bias of a regression's output is one; views of its bytes are refused.
    expanded = torch.zeros(()).expand(1)
    assert expanded.stride() == (0,)
    assert words(expanded) == words(torch.zeros(1)) != words(torch.ones(()).expand(1))


# --- what can't be told -------------------------------------------------------------------------------------


def numbers() -> Iterator[int]:
    yield 1


def test_what_can_not_be_read_is_a_doubt(tmp_path: Path) -> None:
    with (tmp_path / "data").open("w") as file:
        doubts = fingerprint({"model": Model(file=file, rows=[numbers()], text=io.StringIO("a"))}).doubts
    assert doubts == ["model.file: a _io.TextIOWrapper", "model.rows[0]: a builtins.generator"]


def test_what_is_too_large_or_too_deep_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_reader, "MAX_OBJECTS", 100)
    (doubt,) = fingerprint({"model": [[i] for i in range(1000)]}).doubts
    assert doubt == "model[100] and what comes after it: too much to read"
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    assert len(fingerprint({"model": deep}).doubts) == 1
    monkeypatch.setattr(value_reader, "MAX_BYTES", 100)
    many = {"a": torch.zeros(5), "b": np.zeros(11), "c": torch.zeros(99)}
    assert fingerprint({"model": many}).doubts == ["model['b'] and what comes after it: too much to read"]


def test_large_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_reader, "LARGE", 1)
    large = torch.zeros(4)
    first = fingerprint({"data": large})
    monkeypatch.setattr(value_reader, "_bytes", None)
    assert fingerprint({"data": large}, first).words() == first.words()
    large.add_(1)
    with pytest.raises(TypeError):  # it is read again
        fingerprint({"data": large}, first)


def test_it_is_quick() -> None:
    """Milliseconds for a model, and about a second for the most objects that are read."""
    began = time.perf_counter()
    assert isinstance(fingerprint({"model": [bayesian(), Model()]}), Fingerprint)
    assert time.perf_counter() - began < 1.0
