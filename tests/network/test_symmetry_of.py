"""The groups found for networks: those expected, verified again here, and none where order matters.

It covers ``network.read``, ``network.aten_rules``, ``network.verify`` and ``network.outputs`` as well.
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_sym import NetworkSymmetry, Permutation, SignFlip, SymmetryError, check_symmetry, symmetry_of
from pyro_sym.network import aten_rules as operations
from tests.network.networks import CASES, Case, Net, buffer, conv_batch_norm, mlp, recurrent

TOLERANCE = 1e-10
Values = Mapping[str, Tensor]

NOTHING_FOUND = "no permutation and no sign flip was found"


def state(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def in_doubles(net: nn.Module) -> nn.Module:
    """A copy in double precision, without dropout."""
    net = copy.deepcopy(net).double()
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
    return net


def random_state(net: nn.Module) -> dict[str, Tensor]:
    """Normal weights that keep the scale of what they act on; positive buffers."""
    values: dict[str, Tensor] = {}
    for name, parameter in net.named_parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        values[name] = torch.randn(parameter.shape, dtype=torch.float64) / math.sqrt(fan_in)
    for name, tensor in net.named_buffers():
        values[name] = (
            tensor.clone() if tensor.dtype == torch.long else 0.5 + torch.rand(tensor.shape).double()
        )
    return values


@torch.no_grad()
def output(net: nn.Module, values: Values, inputs: tuple[Tensor, ...], train: bool = False) -> Tensor:
    for name, tensor in state(net).items():
        tensor.copy_(values[name])
    return net.train(train)(*inputs)


def doubles(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def sizes(sym: NetworkSymmetry, kind: type) -> tuple[int, ...]:
    return tuple(n for member, n in zip(sym.members, sym.sizes, strict=True) if isinstance(member, kind))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_architecture(case: Case) -> None:
    if case.name == "encoder_layer_with_boolean_masks" and torch.__version__.startswith("2.6."):
        pytest.skip("torch.export of torch 2.6 makes no graph of it, and symmetry_of says so")
    net = case.make()
    moves = case.permutations or case.flips
    with nullcontext() if moves else pytest.warns(UserWarning, match=NOTHING_FOUND):
        sym = symmetry_of(net, *case.inputs())
    assert sizes(sym, Permutation) == case.permutations
    assert sizes(sym, SignFlip) == case.flips

    net, inputs = in_doubles(net), doubles(case.inputs())
    values = random_state(net)
    before = {train: output(net, values, inputs, train) for train in (False, True)}
    for _ in range(3):
        images = sym.act(sym.sample(values), values)
        for train in (False, True):
            assert (output(net, images, inputs, train) - before[train]).abs().max() <= TOLERANCE

    # Negative control of the measure: with its first site left out, each group changes the function.
    neutral = sym.identity(values)
    for k, (member, size) in enumerate(zip(sym.members, sym.sizes, strict=True)):
        shift = torch.arange(size).roll(1)
        element = shift if isinstance(member, Permutation) else torch.full((size,), -1, dtype=torch.int8)
        images = sym.act((*neutral[:k], element, *neutral[k + 1 :]), values)
        partly = {**images, member.sites[0]: values[member.sites[0]]}
        assert (output(net, partly, inputs) - before[False]).abs().max() > 1e-6


# What is verified -------------------------------------------------------------------------------------------


def hidden_units(function: Any, bias: bool = True) -> nn.Module:
    """Three inputs, six hidden units, of which a function is taken, and two outputs."""
    return Net(
        lambda s, x: s.out(function(s, s.hidden(x))), hidden=nn.Linear(3, 6, bias), out=nn.Linear(6, 2)
    )


def as_it_comes(op: operations.Operation) -> operations.Axes:
    """A rule by which an operation on single entries is odd, and has no order."""
    return op["self"].axes


@pytest.mark.parametrize(
    ("name", "make", "found", "left"),
    [
        ("cumsum", lambda: hidden_units(lambda s, h: h.relu().cumsum(-1)), "S_6", ()),
        ("relu", lambda: hidden_units(lambda s, h: h.relu()), r"{±1}\^6", (6,)),
        ("relu", lambda: recurrent(nn.RNN(3, 5, nonlinearity="relu")), r"{±1}\^5", (5,)),
        (
            "mul",
            lambda: buffer(hidden_units(lambda s, h: h.relu() * s.mask), "mask", torch.ones(6)),
            "S_6",
            (),
        ),
        (
            "add",
            lambda: buffer(hidden_units(lambda s, h: h.relu() + s.mask), "mask", torch.zeros(6)),
            "S_6",
            (),
        ),
    ],
)
def test_a_wrong_rule_is_found_out(
    monkeypatch: pytest.MonkeyPatch, name: str, make: Any, found: str, left: tuple[int, ...]
) -> None:
    x = torch.randn(4, 3, 3) if left == (5,) else torch.randn(4, 3)
    with nullcontext() if left else pytest.warns(UserWarning, match=NOTHING_FOUND):
        assert symmetry_of(make(), x).sizes == left
    monkeypatch.setitem(operations.RULES, name, as_it_comes)
    with pytest.warns(UserWarning, match=rf"^{found} .* is left out. Please report this network"):
        assert symmetry_of(make(), x).sizes == left


@pytest.mark.parametrize("error", [AssertionError("no"), IndexError(3), ValueError("axes")])
def test_a_rule_that_fails_pins_what_it_touches(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(op: operations.Operation) -> operations.Axes:
        raise error

    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    assert symmetry_of(net, torch.randn(4, 3)).sizes == (6, 6, 5)
    monkeypatch.setitem(operations.RULES, "relu", fail)
    with pytest.warns(UserWarning, match=rf"^the rule for relu in 3 .*{type(error).__name__}.*Please report"):
        sym = symmetry_of(net, torch.randn(4, 3))
    assert sym.sizes == (6, 6)
    assert "left out: the axes of relu in 3, as its rule failed" in str(sym)
    assert "pinned by relu in 3: 2.weight[0], 2.bias[0], 4.weight[1] (5 units)" in str(sym)


def test_a_rule_that_gives_other_sizes_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operations.RULES, "tanh", lambda op: op["self"].axes[:1])
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match=r"^the rule for tanh in 1 .* to a result of shape \(4, 6\)"):
        assert symmetry_of(net, torch.randn(4, 3)).sizes == (5,)


def test_a_network_tied_to_single_precision_is_verified_in_it() -> None:
    def single(s: Any, h: Tensor) -> Tensor:
        assert h.dtype == torch.float32
        return h.tanh()

    net = hidden_units(single)
    assert symmetry_of(net, torch.randn(4, 3)).sizes == (6, 6)
    with pytest.raises(AssertionError):
        symmetry_of(net.double(), torch.randn(4, 3).double())  # an error of the network's own


def test_dropout_is_no_obstacle() -> None:
    net: nn.Module = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2))
    assert symmetry_of(net, torch.randn(4, 3)).sizes == (6,)
    net = hidden_units(lambda s, h: F.dropout(h.relu(), 0.5, s.training))
    with pytest.warns(UserWarning, match="in eval mode only; in train mode its output is random"):
        assert symmetry_of(net, torch.randn(4, 3)).sizes == (6,)


def test_zeros_as_inputs_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operations.RULES, "cumsum", as_it_comes)
    net = hidden_units(lambda s, h: h.relu().cumsum(-1), bias=False)
    with pytest.warns(UserWarning, match="S_6 .* is left out"):
        assert symmetry_of(net, torch.zeros(4, 3)).sizes == ()


def test_parameters_that_are_not_used_stay() -> None:
    net = Net(lambda s, x: s.used(x), used=nn.Linear(3, 2), unused=nn.Linear(7, 7))
    assert symmetry_of(net, torch.randn(4, 3)).sizes == ()


def test_one_row_is_no_batch_to_verify_training_on() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.warns(UserWarning, match="verified in eval mode only; in train mode it raises ValueError"):
        assert symmetry_of(net, torch.randn(1, 3)).sizes == (6, 6)


# What is left alone -----------------------------------------------------------------------------------------


def test_the_network_and_the_world_stay_as_they_are() -> None:
    net: Any = conv_batch_norm()
    net[0].weight.requires_grad_(False)
    net[1].train()
    net[2].eval()
    net[5].weight.grad = torch.ones_like(net[5].weight)
    before = {name: tensor.clone() for name, tensor in state(net).items()}
    flags = [part.training for part in net.modules()]
    x, rng = torch.randn(2, 3, 6, 6), torch.get_rng_state()
    kept = x.clone()

    symmetry_of(net, x)

    assert all(torch.equal(tensor, before[name]) for name, tensor in state(net).items())
    assert all(tensor.dtype == before[name].dtype for name, tensor in state(net).items())
    assert [part.training for part in net.modules()] == flags
    assert not net[0].weight.requires_grad and net[5].weight.grad.eq(1.0).all() and net[0].weight.grad is None
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), rng)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


# Errors -----------------------------------------------------------------------------------------------------


def test_control_flow_that_depends_on_data() -> None:
    net = hidden_units(lambda s, h: h.relu() if h.sum() > 0 else h)
    match = r"can't make a graph of Net .*Write the group by hand, .*check_symmetry"
    with pytest.raises(SymmetryError, match=match):
        symmetry_of(net, torch.randn(4, 3))


def test_shapes_that_depend_on_data() -> None:
    net = hidden_units(lambda s, h: h[h[:, 0] > 0])
    with pytest.raises(SymmetryError, match=r"shape that depends on data.*Write the group by hand"):
        symmetry_of(net, torch.randn(4, 3))


def test_the_networks_own_errors_come_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        symmetry_of(mlp(), torch.randn(4, 3))


def test_an_output_that_is_never_finite() -> None:
    with pytest.raises(SymmetryError, match="output of Net is not finite"):
        symmetry_of(hidden_units(lambda s, h: h.abs().neg().sqrt()), torch.randn(4, 3))


def test_parameters_that_have_to_be_positive() -> None:
    net = hidden_units(lambda s, h: (h * s.scale.log().sqrt()).relu())
    net.scale = nn.Parameter(torch.full((6,), 5.0))
    assert symmetry_of(net, torch.randn(4, 3)).sizes == (6,)


@dataclass
class Output:
    """What a language model returns."""

    loss: Tensor | None
    logits: Tensor


def test_outputs_and_inputs_that_are_no_tensors() -> None:
    net = Net(lambda s, x: Output(None, s.out(x)), out=nn.Linear(3, 2))
    with pytest.raises(SymmetryError, match=r"fields \['loss', 'logits'\].*wrap the module") as caught:
        symmetry_of(net, torch.randn(4, 3))
    assert "return self.net(*args, **kwargs).logits" in str(caught.value)
    with pytest.raises(SymmetryError, match=r"an input of Net is a UserDict .*symmetry_of\(net, \*\*batch\)"):
        symmetry_of(net, UserDict(x=torch.randn(4, 3)))


# The result -------------------------------------------------------------------------------------------------


def test_table() -> None:
    net = nn.Sequential(
        *(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU()),
        nn.Linear(5, 1),
    )
    sym = symmetry_of(net, torch.randn(2, 1, 6), prefix="net.")
    assert str(sym).splitlines() == [
        "group   size  log|G|  moves",
        "S_3        3    1.79  net.0.weight[0], net.0.bias[0], net.1.weight[0], net.1.bias[0], "
        "net.4.weight[1: (3)·4], net.1.running_mean[0] (buffer), net.1.running_var[0] (buffer)",
        "{±1}^3     3    2.08  net.1.weight[0], net.1.bias[0], net.4.weight[1: (3)·4]",
        "S_5        5    4.79  net.4.weight[0], net.4.bias[0], net.6.weight[1]",
        "3 groups, log|G| = 8.66",
    ]
    assert repr(sym) == "<NetworkSymmetry of 9 sites: S_3, {±1}^3, S_5>"
    assert sym.buffers == ("net.1.running_mean", "net.1.running_var")
    values = {f"net.{name}": tensor for name, tensor in state(net).items()}
    assert math.isclose(sym.log_order(values), math.log(6 * 8 * 120))
    assert repr(symmetry_of(nn.ReLU(), torch.randn(2))) == "<NetworkSymmetry of 0 sites: trivial>"


def test_restrict_to_some_layers() -> None:
    sym = symmetry_of(mlp(), torch.randn(5, 8))
    first = sym.restrict(["0.weight", "0.bias", "2.weight", "something.else"])
    assert first.sizes == (6, 6) and set(first.sites) == {"0.weight", "0.bias", "2.weight"}
    assert str(first).splitlines()[-2:] == [
        "left out: S_5 also moves 2.bias, 4.weight",
        "left out: S_4 also moves 4.weight, 4.bias, 6.weight",
    ]
    assert sym.restrict(sym.sites).sizes == sym.sizes


def test_running_statistics_matter_in_eval_mode_only() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    sym = symmetry_of(net, torch.randn(4, 3))
    parameters = [name for name, _ in net.named_parameters()]
    assert sym.restrict(parameters).sizes == ()
    assert "left out: S_6 also moves 1.running_mean, 1.running_var" in str(sym.restrict(parameters))
    assert sym.restrict([*parameters, *sym.buffers]).sizes == sym.sizes

    sym = sym.restrict(parameters, ignore_buffers=True)
    assert sym.sizes == (6, 6) and sym.buffers == () and set(sym.sites) <= set(parameters)
    twin, inputs = in_doubles(net), (torch.randn(4, 3, dtype=torch.float64),)
    values = random_state(twin)
    images = sym.act(sym.sample(values), values)
    train, evaluate = (
        (output(twin, images, inputs, mode) - output(twin, values, inputs, mode)).abs().max()
        for mode in (True, False)
    )
    assert train <= TOLERANCE and evaluate > 1e-3


def test_example_inputs_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
            return {"out": self.out(self.hidden(x * scale).relu())}

    assert symmetry_of(Named(), torch.randn(4, 3), scale=torch.ones(3)).sizes == (6,)


class Bayesian(PyroModule):
    """A network whose parameters are normal, and a likelihood."""

    def __init__(self, net: nn.Module, means: Mapping[str, list[float]]) -> None:
        super().__init__()
        self.net = net
        pyro.nn.module.to_pyro_module_(net)
        for name, parameter in list(net.named_parameters()):
            owner, _, own = name.rpartition(".")
            mean, shape = means.get(name, 0.0), parameter.shape
            setattr(net.get_submodule(owner), own, PyroSample(partial(self.prior, mean, shape)))

    @staticmethod
    def prior(mean: Any, shape: torch.Size, _: nn.Module) -> Any:
        return dist.Normal(torch.tensor(mean).expand(shape), 1.0).to_event(len(shape))

    def forward(self, x: Tensor, y: Tensor) -> None:
        prediction = self.net(x)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(prediction, 1.0).to_event(1), obs=y)


def test_with_pyro() -> None:
    x, y = torch.randn(4, 1, 5), torch.randn(4, 2)
    nets = [nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)) for _ in range(2)]
    sym = symmetry_of(nets[0], x, prefix="net.")
    check_symmetry(Bayesian(nets[0], {}), sym, x, y)
    ordered = Bayesian(nets[1], {"0.bias": [0.0, 1.0, 2.0]})
    with pytest.raises(SymmetryError, match=r"terms that moved: 'net\.0\.bias'"):
        check_symmetry(ordered, sym, x, y)
