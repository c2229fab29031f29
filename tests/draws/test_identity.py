"""The identity of a run: the same run is resumed, another one is refused, and doubts are warned of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym import SGHMC, StochasticGradientKernel
from pyro_sym.draws.fingerprint import fingerprint
from pyro_sym.draws.identity import Identity, identify
from tests.draws import test_fingerprint
from tests.draws.test_fingerprint import Model
from tests.draws.test_store import X, Y, crashed, kernel, mcmc, run

pytestmark = pytest.mark.usefixtures("float64")


def another_model(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("net/slope", dist.Normal(torch.zeros(2, 3), 2.0).to_event(2))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("rows", len(x), subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(slope.sum() * x[rows], scale), obs=y[rows])


def wider_model(x: Tensor, y: Tensor) -> None:
    slope = pyro.sample("net/slope", dist.Normal(torch.zeros(2, 4), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(slope.sum() * x, 1.0).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: kernel(model=another_model), {}, "model was regression when .* and is another_model"),
        (lambda: kernel(model=wider_model), {}, r"its sites was .*\(2, 3\).* and is .*\(2, 4\)"),
        (lambda: kernel(SGHMC), {}, "kernel was 'BAOA' when it was started and is 'SGHMC' now"),
        (lambda: kernel(step_size=0.02), {}, "step_size was 0.01 when it was started and is 0.02 now"),
        (lambda: kernel(friction=2.0), {}, "friction was 1.0 when it was started and is 2.0"),
        (lambda: kernel(jit="auto"), {}, "jit was 'eager' when it was started and is 'auto'"),
        (kernel, {"num_chains": 3}, "num_chains was 2 when it was started and is 3"),
        (kernel, {"thinning": 1}, "thinning was 2 when it was started and is 1"),
        (kernel, {"warmup_steps": 4}, "warmup_steps was 5 when it was started and is 4"),
        (kernel, {"store_every": 4}, "store_every was 3 when it was started and is 4"),
    ],
)
def test_another_run_is_refused(
    make: Callable[[], StochasticGradientKernel], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    crashed(tmp_path / "run", kernel(), 10)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "lock"}
    with pytest.raises(ValueError, match=f"run holds another run: .*{message}"):
        run(make(), store=tmp_path / "run", resume=True, **options)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != "lock"}
    assert after == before


def test_other_data_are_refused(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 10)
    with pytest.raises(ValueError, match=r"args\[1\] was float64 tensor .* and is float64 tensor"):
        mcmc(kernel(), store=tmp_path / "run", resume=True).run(X, Y + 1)


@pytest.mark.parametrize(
    ("name", "more"), [("torch", ""), ("pyro", ""), ("python", "code has changed can't be checked")]
)
def test_other_versions_are_warned_of(name: str, more: str, tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 10)
    record = torch.load(tmp_path / "run" / "state.pt")
    record["identity"]["versions"][name] = "2.0"
    torch.save(record, tmp_path / "run" / "state.pt")
    with pytest.warns(UserWarning, match=rf"begun with {name} 2.0 and is resumed with.*{more}"):
        run(kernel(), store=tmp_path / "run", resume=True)
    if name == "python":  # whose byte code is another, but not the values that it works on
        record["identity"]["words"]["model: code"] = "code of another version"
        torch.save(record, tmp_path / "run" / "state.pt")
        with pytest.warns(UserWarning, match="begun with python"):
            run(kernel(), store=tmp_path / "run", resume=True)
        with pytest.raises(ValueError, match=r"step_size was 0\.01"):
            run(kernel(step_size=0.02), store=tmp_path / "run", resume=True)


def test_another_format_is_refused(tmp_path: Path) -> None:
    crashed(tmp_path / "run", kernel(), 10)
    record = torch.load(tmp_path / "run" / "state.pt")
    torch.save({**record, "format": 99}, tmp_path / "run" / "state.pt")
    with pytest.raises(ValueError, match="has format 99, this version of pyro_sym resumes format 2"):
        run(kernel(), store=tmp_path / "run", resume=True)


class Counting:
    def __init__(self) -> None:
        self.calls, self.seen = 0, {}  # type: ignore[var-annotated]

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        self.seen["x"] = x
        pyro.sample("m", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0))


def test_what_a_model_changes_itself_is_warned_of_and_not_compared(tmp_path: Path) -> None:
    model = Counting()
    for resume, calls in ((False, 0), (True, 30)):
        with pytest.warns(UserWarning, match=r"changes model.calls(, model.seen)? when it runs"):
            run(kernel(model=model), store=tmp_path / "run", resume=resume)
        assert model.calls > calls


def test_parameters_of_the_param_store_are_compared(tmp_path: Path) -> None:
    pyro.clear_param_store()

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        pyro.sample("m", dist.Normal(pyro.param("loc", torch.tensor(1.0)), 1.0))

    pyro.param("another", torch.tensor(0.0))
    crashed(tmp_path / "run", kernel(model=model), 10)
    pyro.get_param_store()["another"] = torch.tensor(1.0)
    run(kernel(model=model), store=tmp_path / "run", resume=True)
    pyro.get_param_store()["loc"] = torch.tensor(2.0)
    with pytest.raises(ValueError, match=r"pyro.param\('loc'\) was float64 tensor of shape \(\) 1.0"):
        run(kernel(model=model), store=tmp_path / "run", resume=True)
    pyro.clear_param_store()


def test_an_open_file_is_warned_of(tmp_path: Path) -> None:
    with (tmp_path / "data").open("w") as file:

        def model(x: torch.Tensor, y: torch.Tensor) -> None:
            pyro.sample("m", dist.Normal(0.0, 1.0 if file.closed else 2.0))

        for resume in (False, True):
            with pytest.warns(
                UserWarning, match=r"depends on objects that can't be read: model: variable file: a _io.Text"
            ):
                run(kernel(model=model), store=tmp_path / "run", resume=resume)


@pytest.mark.parametrize("part", ["attribute", "global"])
def test_another_model_is_refused(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same model, made anew, goes on."""

    def identity(model: Model) -> Identity:
        roots = {"model": model}
        return identify(roots, fingerprint(roots), kernel(model=model).start().potential.program, {})

    first = identity(Model()).record()
    assert identity(Model()).differences(first) == []
    if part == "attribute":
        other = identity(Model(100.0))
        expected = "model.loc was 0.0 when it was started and is 100.0 now"
    else:
        monkeypatch.setattr(test_fingerprint, "SCALE", 2.0)
        other = identity(Model())
        expected = "model.__class__.__call__: global SCALE was 1.0 when it was started and is 2.0 now"
    assert other.differences(first) == [expected]
