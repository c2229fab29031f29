"""Private interfaces of torch and Pyro: the package without each; patches reach one thread only."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import MaskedDistribution
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGaussian, AutoNormal, AutoStructured
from pyro.infer.autoguide.guides import AutoCallable
from pyro.nn import PyroModule
from pyro.poutine import messenger, runtime
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import nn
from torch.distributions import Distribution
from torch.distributions.transforms import AffineTransform

from pyro_sym import RecordedELBO, _private
from pyro_sym._private import replaced_in_this_thread, unvalidated
from pyro_sym.errors import NoDensityError
from pyro_sym.export.pointwise import mask_of
from pyro_sym.graph import aot, record
from pyro_sym.graph.codegen import straight_line
from pyro_sym.graph.record import trace
from pyro_sym.graph.simplify import simplify as simplified
from pyro_sym.guides.density import GuideCall, log_density
from pyro_sym.model.all_rows import showing, widened
from pyro_sym.model.conditioned_sites import fixed_parameters
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.model.potential import Potential
from pyro_sym.model.program import Program
from pyro_sym.nn.priors import moved
from pyro_sym.search.check import unblocked
from tests.catalogue import normal_mean

DATA = torch.tensor([-1.0, 0.5, 2.0])

model = functools.partial(normal_mean, sd=3.0)

# Without an interface


@pytest.fixture
def reloaded() -> Callable[..., Any]:
    """Import the file anew while a module of torch's can't be imported."""

    def reload(missing: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setitem(sys.modules, missing, None)
        spec = importlib.util.spec_from_file_location("_private_without", _private.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "_private_without", module)
        spec.loader.exec_module(module)
        return module

    return reload


def test_without_pytree(reloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without = reloaded("torch.utils._pytree", monkeypatch)
    tree = ({"a": 1, "b": [2, (3,)]}, 4)
    leaves, spec = without.tree_flatten(tree)
    assert leaves == without.tree_leaves(tree) == [1, 2, 3, 4]
    assert without.tree_unflatten([5, 6, 7, 8], spec) == ({"a": 5, "b": [6, (7,)]}, 8)
    assert without.tree_map(lambda x: -x, tree) == ({"a": -1, "b": [-2, (-3,)]}, -4)
    other = without.tree_flatten(({"a": 1, "b": [2, 3]}, 4))[1]
    assert spec != other and {spec: 1}[without.tree_flatten(tree)[1]] == 1


def test_without_a_dispatch_mode(reloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without = reloaded("torch.utils._python_dispatch", monkeypatch)

    class Recorder(without.TorchDispatchMode):  # type: ignore[misc,name-defined]
        def __init__(self, inputs: Any) -> None: ...

    monkeypatch.setattr(record, "_Recorder", Recorder)
    gradient = Gradient(Potential(model, (DATA,)))
    with pytest.warns(UserWarning, match=r"each gradient runs it.*has no TorchDispatchMode"):
        _, slope = gradient(torch.zeros(1, 1), Minibatch())
    assert gradient.mode == "eager" and slope.item() == pytest.approx(-1.5)


class Without:
    """An operation of torch without some of its attributes."""

    def __init__(self, op: Any, *missing: str) -> None:
        self.op, self.missing = op, missing

    def __getattr__(self, name: str) -> Any:
        if name in self.missing:
            raise AttributeError(name)
        return getattr(self.op, name)


def test_without_schemas() -> None:
    aten = torch.ops.aten
    bare = {name: Without(op, "_schema", "_op") for name, op in vars_of(aten).items()}
    assert [_private.is_mutable(op) for op in bare.values()] == [False, True, True]
    assert all(map(_private.returns_view, bare.values())) and not _private.operands_of(bare["add"])
    direct: Any = _private.direct_call(bare["add"])
    assert direct is bare["add"]
    assert _private.is_mutable(aten.add_.Tensor) and not _private.returns_view(aten.add.Tensor)


def vars_of(aten: Any) -> dict[str, Any]:
    return {"add": aten.add.Tensor, "add_": aten.add_.Tensor, "out": aten.add.out}


def test_operations_that_this_torch_lacks_are_left_out() -> None:
    assert _private.existing("view.default", "view.nonsense", "_nonsense.default") == {
        torch.ops.aten.view.default
    }


def test_without_functions_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    graph = simplified(trace(lambda x: ((2 * x).exp(),), [x]), [x])
    monkeypatch.delattr(torch, "exp")
    monkeypatch.setattr(torch, "mul", lambda *args: pytest.fail("not torch's own"))
    torch.testing.assert_close(straight_line(graph, [x])(x), ((2 * x).exp(),))


def test_without_the_stack_of_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """ELBOs are not recorded, and fixed sites count as data."""
    fixed = poutine.condition(lambda: pyro.sample("a", dist.Normal(0.0, 1.0)), {"a": torch.tensor(1.0)})
    assert fixed_parameters(fixed) == {"a"}
    guide, loss = AutoNormal(model), RecordedELBO()
    guide(DATA)
    with monkeypatch.context() as patch:
        patch.setattr(_private, "runtime", object())
        assert fixed_parameters(fixed) == frozenset()
        with pytest.warns(UserWarning, match="effect handlers around the step"):
            loss.loss(model, guide, DATA)
    assert hasattr(runtime, "_PYRO_STACK")


@pytest.mark.parametrize("name", ["_bound_partial", "_context_wrap"])
def test_without_wrapped_handlers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = poutine.block(model, hide=["y"])
    assert unblocked(blocked) is model
    monkeypatch.delattr(messenger, name)
    assert unblocked(blocked) in (model, blocked)


def test_without_the_name_of_a_mask() -> None:
    masked = dist.Normal(torch.zeros(3), 1.0).mask(DATA > 0)
    site = {"fn": masked, "mask": None}
    expected = mask_of(site, (3,))
    vars(masked)["_hidden"] = vars(masked).pop("_mask")
    assert isinstance(masked, MaskedDistribution) and torch.equal(mask_of(site, (3,)), expected)  # type: ignore[arg-type]


def test_without_parts_of_guides() -> None:
    part = AutoCallable(model, lambda *args: {"a": torch.zeros(())})
    assert _private.called_guide(part)(DATA) == {"a": torch.zeros(())}
    del part.__dict__["_guide"]
    assert _private.called_guide(part) == part.forward

    module = PyroModule[nn.Linear](1, 1)
    del module.__dict__["_pyro_context"]
    assert not _private.has_run(module)


@pytest.mark.parametrize(
    ("make", "name"), [(AutoStructured, "_sorted_sites"), (AutoGaussian, "_dense_get_mvn")]
)
def test_without_what_a_density_is_made_of(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"backend": "dense"} if make is AutoGaussian else {}
    guide = make(model, **kwargs)
    guide(DATA)
    call = GuideCall({"loc": 0}, (DATA,), {}, {})
    assert log_density(guide, call)({"loc": torch.zeros(2)}).shape == (2,)
    if name in vars(guide):
        monkeypatch.delattr(guide, name)
    else:
        monkeypatch.delattr(type(guide), name)
    with pytest.raises(NoDensityError, match=f"has no {name}"):
        log_density(guide, call)


def test_without_the_loader_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    monkeypatch.delattr(torch._C._aoti, "AOTIModelPackageLoader")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: SimpleNamespace(loader=path))
    assert aot._load(Path("x.pt2")) == "x.pt2"


def test_without_constraints_of_the_store() -> None:
    positive = dist.constraints.positive
    pyro.param("scale", torch.tensor(2.0), constraint=positive)
    assert _private.constraint_of(pyro.get_param_store(), "scale", None) is positive
    assert _private.constraint_of(object(), "scale", positive) is positive


def test_without_caches_of_inverses() -> None:
    affine = AffineTransform(torch.zeros(()), torch.tensor(2.0))
    _ = affine.inv
    law = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [affine, affine.inv])
    double = torch.zeros((), dtype=torch.float64)
    assert moved(law, double).transforms[1].inv.scale.dtype == torch.float64
    other = SimpleNamespace()
    _private.forget_inverse(other)
    assert not vars(other)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Distribution, "_validate_sample"), (SubsampleMessenger, "_subsample")],
)
def test_without_what_is_replaced(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        with replaced_in_this_thread(owner, name, lambda _: pytest.fail):
            assert not hasattr(owner, name)
    assert hasattr(owner, name)


def test_without_conversions_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ELBO takes a number from its loss under another name, so it can't be recorded and runs as it is."""

    class Renamed(Trace_ELBO):
        def differentiable_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().differentiable_loss(*args, **kwargs)
            return loss if float(loss.detach()) > 0 else -loss

    guide, loss = AutoNormal(model), RecordedELBO(Renamed())
    guide(DATA)
    with pytest.warns(UserWarning, match="isn't recorded.*branches on the value"):
        loss.loss(model, guide, DATA)


def test_models_stay_as_they_are_without_resized_plates(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(program: Program) -> Callable[[], Any]:
        values, indices = program.draw()
        return lambda: program.log_joint(values, indices)

    program = Program(model, (torch.zeros(8), 2))
    assert not widened(program, prepare)[0].plates, "it shows all rows"
    monkeypatch.setattr("pyro_sym.model.all_rows.replaced_in_this_thread", nothing)
    assert widened(program, prepare)[0].plates["data"].subsample_size == 2


@contextmanager
def nothing(*args: Any) -> Iterator[None]:
    yield


# Threads


def in_another_thread(run: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def keep() -> None:
        try:
            results.append(run())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    return results[0]


def test_other_threads_see_no_patch() -> None:
    """Validation, the number of rows, and any other function that is replaced."""
    law = dist.Normal(0.0, 1.0, validate_args=True)

    def density() -> Any:
        return law.log_prob(torch.tensor(torch.nan))

    def size() -> int:
        with pyro.plate("rows", 8, subsample_size=2) as row:
            return len(row)

    before = Distribution.__dict__["_validate_sample"], SubsampleMessenger.__dict__["_subsample"]
    with unvalidated(), showing({"rows": 5}):
        assert density().isnan() and size() == 5
        assert isinstance(in_another_thread(density), ValueError) and in_another_thread(size) == 2
        with unvalidated():
            pass
        assert density().isnan(), "still off"
    assert (Distribution.__dict__["_validate_sample"], SubsampleMessenger.__dict__["_subsample"]) == before
    assert size() == 2
    with pytest.raises(ValueError, match="support"):
        density()


def test_threads_that_overlap_put_everything_back() -> None:
    """One thread replaces while another does, and leaves last: the first doesn't take the patch away."""
    entered, leave = threading.Event(), threading.Event()
    inside: list[bool] = []
    before = Distribution.__dict__["_validate_sample"]
    law = dist.Normal(0.0, 1.0, validate_args=True)

    def other() -> None:
        with unvalidated():
            entered.set()
            leave.wait(30)
            inside.append(bool(law.log_prob(torch.tensor(torch.nan)).isnan()))

    with pyro.validation_enabled(True):
        thread = threading.Thread(target=other)
        with unvalidated():
            thread.start()
            assert entered.wait(30)
        assert not dist.is_validation_enabled(), "still off for the other thread"
        with pytest.raises(ValueError, match="support"):
            law.log_prob(torch.tensor(torch.nan))
        leave.set()
        thread.join()
        assert inside == [True]
        assert dist.is_validation_enabled() and Distribution.__dict__["_validate_sample"] is before


def test_control_a_patch_of_the_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: plain monkeypatching reaches other threads."""
    law = dist.Normal(0.0, 1.0, validate_args=True)
    monkeypatch.setattr(Distribution, "_validate_sample", lambda self, value: None)
    assert in_another_thread(lambda: law.log_prob(torch.tensor(torch.nan))).isnan()
