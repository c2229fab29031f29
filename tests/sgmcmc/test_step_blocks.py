"""Fused steps against the same steps one by one. Three packages are compiled here, 10 to 20 s of CPU each.

Covers also `sgmcmc.prefetch` and `graph.aot`.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym.graph import aot as package
from pyro_sym.graph.checked import check
from pyro_sym.graph.record import UntraceableError, trace
from pyro_sym.model import gradient as gradient_module
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch, draw_indices
from pyro_sym.model.potential import Potential
from pyro_sym.sgmcmc.step_blocks import FusedSteps, _BlockProbe, block_length
from pyro_sym.sgmcmc.underdamped import BAOA
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler on the path"
)

ROWS = 12


pytestmark = pytest.mark.usefixtures("own_packages")


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    data = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def model() -> None:
        weights = pyro.sample("weights", dist.Normal(torch.zeros(3, dtype=dtype), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=dtype), 1.0))
        with pyro.plate("rows", ROWS, subsample_size=4) as row:
            pyro.sample("y", dist.Normal(data[row, :2] @ weights[:2] + weights[2], scale), obs=data[row, 2])

    return model


def langevin(
    state: tuple[Tensor, ...], gradient: Tensor, noise: Tensor, step_size: Tensor, temperature: Tensor
) -> tuple[Tensor, ...]:
    position, momentum = state
    momentum = 0.9 * momentum - step_size * gradient + (0.19 * temperature).sqrt() * noise
    return position + step_size * momentum, momentum


def block_inputs(potential: Potential, steps: int, chains: int, dtype: torch.dtype) -> tuple[Any, ...]:
    *state, gradient = torch.randn(3, chains, potential.size, dtype=dtype).unbind()
    noise = torch.randn(steps, chains, potential.size, dtype=dtype)
    indices = draw_indices(potential.program.plates, steps, chains)
    step_sizes = torch.linspace(0.02, 0.01, steps, dtype=dtype)
    temperatures = torch.linspace(1.0, 0.0, steps, dtype=dtype)
    return tuple(state), gradient, noise, indices, step_sizes, temperatures


def eager_steps(potential: Potential, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The definition, by the potential itself."""
    state, gradient, noise, indices, step_sizes, temperatures = inputs
    reference = Gradient(potential, jit="eager")
    for i in range(len(noise)):
        state = langevin(state, gradient, noise[i], step_sizes[i], temperatures[i])
        energy, gradient = reference(state[0], Minibatch({name: rows[i] for name, rows in indices.items()}))
    return state, energy, gradient


@needs_compiler
def test_a_block_is_its_steps_and_a_package_serves_other_data(
    own_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    potential = Potential(make_model())
    gradient = Gradient(potential, jit="compile")
    fused = FusedSteps(gradient, langevin)
    for _ in range(2):
        inputs = block_inputs(potential, 2, 2, torch.float64)
        torch.testing.assert_close(fused(*inputs)[:3], eager_steps(potential, inputs), rtol=1e-10, atol=1e-10)
    assert gradient.mode == "compile" and gradient.reason is None

    packages = list(own_packages.iterdir())
    assert [p.suffix for p in packages] == [".pt2"], "one package, and no part of one"
    monkeypatch.setattr(package, "_build", lambda *args: pytest.fail("compiled again"))
    other = Potential(make_model(seed=1))
    again = FusedSteps(Gradient(other, jit="compile"), langevin)
    inputs = block_inputs(other, 2, 2, torch.float64)
    torch.testing.assert_close(again(*inputs)[:3], eager_steps(other, inputs), rtol=1e-10, atol=1e-10)


@needs_compiler
def test_a_compiled_gradient_in_float32() -> None:
    potential = Potential(make_model(dtype=torch.float32))
    gradient = Gradient(potential, jit="compile")
    position = torch.randn(2, potential.size)
    minibatch = Minibatch(draw_indices(potential.program.plates, 2))
    energy, slope = gradient(position, minibatch)
    assert gradient.mode == "compile"
    assert energy.dtype == slope.dtype == torch.float32
    torch.testing.assert_close((energy, slope), gradient.eager(position, minibatch), rtol=1e-4, atol=1e-3)


@needs_compiler
def test_large_chains_take_compiled_blocks_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At T = 0 on rows that are all alike, so that the order of random numbers plays no part."""
    monkeypatch.setattr(gradient_module, "LARGE", 1)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("rows", ROWS, subsample_size=4):
            pyro.sample("y", dist.Normal(w.sum() ** 2, 1.0), obs=torch.ones(4, dtype=torch.float64))

    def run(jit: Any, start: Tensor) -> VectorizedMCMC:
        kernel = BAOA(model, step_size=0.05, temperature=0.0, jit=jit)
        mcmc = VectorizedMCMC(
            kernel,
            num_samples=8,
            warmup_steps=0,
            num_chains=3,
            thinning=2,
            initial_params={"w": start},
            on_divergence="mask",
            disable_progbar=True,
        )
        mcmc.run()
        return mcmc

    start = torch.randn(3, 3, dtype=torch.float64)
    far = start * torch.tensor([[1.0], [100.0], [1.0]])  # from where one chain leaves for infinity
    for given, left in ((start, []), (far, [1])):
        compiled, traced = run("compile", given), run("trace", given)
        assert compiled._chains is not None and compiled._chains._compiles(warming_up=False) == (not left)
        assert compiled.diverged == traced.diverged and list(traced.diverged) == left
        samples = [mcmc.get_samples(group_by_chain=True) for mcmc in (compiled, traced)]
        torch.testing.assert_close(*samples, equal_nan=True)


def test_without_a_compiler_steps_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise package.CompilationError("torch._inductor raised InvalidCxxCompiler: No working C++ compiler")

    monkeypatch.setattr(package, "_build", fail)
    potential = Potential(make_model(dtype=torch.float32))
    gradient = Gradient(potential, jit="compile")
    fused = FusedSteps(gradient, langevin)
    inputs = block_inputs(potential, 3, 1, torch.float32)
    with pytest.warns(UserWarning, match="traced, but not compiled: .*No working C") as caught:
        result = fused(*inputs)
    assert len(caught) == 1 and caught[0].filename == __file__ and gradient.mode == "trace"
    torch.testing.assert_close(result[:3], eager_steps(potential, inputs), rtol=1e-4, atol=1e-4)
    fused(*inputs)  # no second warning

    alone = Gradient(potential, jit="compile")
    with pytest.warns(UserWarning, match="traced, but not compiled"):
        alone(inputs[0][0], Minibatch({"rows": inputs[3]["rows"][0]}))
    assert alone.mode == "trace"


@needs_compiler
def test_a_failing_compiler_is_reported() -> None:
    from torch._inductor import config

    potential = Potential(make_model(dtype=torch.float32))
    gradient = Gradient(potential, jit="compile")
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(UserWarning, match=r"not compiled: torch\._inductor raised "),
    ):
        gradient(torch.zeros(1, potential.size), Minibatch({"rows": torch.arange(4)}))
    assert gradient.mode == "trace"


def test_a_step_that_reads_values_is_not_fused() -> None:
    def step(state: Any, gradient: Tensor, noise: Tensor, step_size: Tensor, temperature: Tensor) -> Any:
        return (state[0] - (0.0 if temperature == 0 else step_size) * gradient,)

    potential = Potential(make_model())
    gradient = Gradient(potential, jit="compile")
    _, *inputs = block_inputs(potential, 2, 1, torch.float64)
    with pytest.warns(UserWarning, match="branches on the value"):
        FusedSteps(gradient, step)((torch.zeros(1, potential.size, dtype=torch.float64),), *inputs)
    assert gradient.mode == "trace"


def test_an_untraceable_model_runs_eagerly() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.factor("f", x.sum() if x.sum().item() > 0 else -x.sum())

    gradient = Gradient(Potential(model), jit="compile")
    fused = FusedSteps(gradient, langevin)
    state = (torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.warns(UserWarning, match="each gradient runs it"):
        fused(state, torch.zeros(1, 4), torch.zeros(2, 1, 4), {}, torch.full((2,), 0.1), torch.ones(2))
    assert gradient.mode == "eager"


def test_only_a_gradient_that_is_to_be_compiled_can_be_fused() -> None:
    with pytest.raises(ValueError, match="made with jit='auto'; make it with jit='compile'"):
        FusedSteps(Gradient(Potential(make_model())), langevin)


def test_blocks_are_shorter_for_larger_positions() -> None:
    assert [block_length(size) for size in (8, 512, 101_770, 10_000_000)] == [10, 10, 4, 1]


def double_well_steps(dtype: torch.dtype, step_size: float, steps: int = 10) -> tuple[Any, list[Tensor]]:
    """Steps with rows, as a block and its inputs; in a double well they are chaotic where they are large."""

    def block(*inputs: Tensor) -> tuple[Tensor, ...]:
        position, momentum, gradient, noise, step_sizes, temperatures, rows = inputs
        for i in range(len(noise)):
            position, momentum = langevin(
                (position, momentum), gradient, noise[i], step_sizes[i], temperatures[i]
            )
            shift = rows[i].to(position.dtype).mean(-1, keepdim=True)
            energy = (position.square() - shift).square().sum(-1)
            gradient = 4 * position * (position.square() - shift)
        return position, momentum, energy, gradient, position.sum() + energy.sum() + gradient.sum()

    position, momentum = torch.randn(2, 16, 3, dtype=dtype)
    noise = torch.randn(steps, 16, 3, dtype=dtype)
    rows = torch.randint(5, (steps, 16, 4))
    numbers = [torch.full((steps,), step_size, dtype=dtype), torch.ones(steps, dtype=dtype)]
    return block, [position, momentum, position.clone(), noise, *numbers, rows]


def rounded_otherwise(block: Any, inputs: list[Tensor]) -> Any:
    """The same steps by other code, that is, with another rounding."""

    def run(*given: Tensor) -> Any:
        eps = torch.finfo(given[0].dtype).eps
        return block(given[0] * (1 + eps), *given[1:])

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step_size", [1e-3, 0.1, 0.5])
def test_rounding_that_grows_is_no_reason_not_to_compile(dtype: torch.dtype, step_size: float) -> None:
    torch.manual_seed(0)
    block, inputs = double_well_steps(dtype, step_size)
    run = rounded_otherwise(block, inputs)
    if step_size == 0.5:  # control: compared at the user's own step size, the two are far apart
        result, expected = run(*inputs)[0], block(*inputs)[0]
        assert not torch.allclose(result, expected, rtol=1e-3)
    check(run, [_BlockProbe(block, inputs, 2)])


def out_of_order(block: Any, part: int) -> Any:
    """A block that takes the first two of its noise, step sizes, or rows in reverse."""

    def run(*given: Tensor) -> Any:
        order = [1, 0, *range(2, len(given[part]))]
        return block(*[tensor[order] if n == part else tensor for n, tensor in enumerate(given)])

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step_size", [1e-3, 0.1, 0.5])
@pytest.mark.parametrize("fault", ["noise", "rows", "gradient", "last step"])
def test_control_wrong_steps_are_not_run(dtype: torch.dtype, step_size: float, fault: str) -> None:
    torch.manual_seed(0)
    block, inputs = double_well_steps(dtype, step_size)

    def off(*given: Tensor) -> Any:
        *rest, gradient, total = block(*given)
        return *rest, 1.01 * gradient, total

    def one_short(*given: Tensor) -> Any:
        return block(*given[:3], *[tensor[:-1] for tensor in given[3:]])

    wrong = {"noise": out_of_order(block, 3), "rows": out_of_order(block, 6), "gradient": off}
    with pytest.raises(UntraceableError, match=r"its (10|9) steps.* come out off by"):
        check(wrong.get(fault, one_short), [_BlockProbe(block, inputs, 2)])


def test_chains_at_infinity_do_not_hinder_the_check_of_others() -> None:
    block, inputs = double_well_steps(torch.float64, 0.01)
    inputs[0][3] = torch.inf
    check(rounded_otherwise(block, inputs), [_BlockProbe(block, inputs, 2)])
    with pytest.raises(UntraceableError, match="come out off by"):
        check(out_of_order(block, 3), [_BlockProbe(block, inputs, 2)])
    inputs[0][:] = torch.nan
    with pytest.raises(UntraceableError, match="can't be checked where nothing is finite"):
        _BlockProbe(block, inputs, 2)


class Disk:
    """What is built and where, with a file system that refuses some folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: Any, error: int) -> None:
        self.built: list[Path] = []
        self.refused, self.error = refused, error
        monkeypatch.setattr(package, "_build", self.build)
        monkeypatch.setattr(package, "_load", lambda path: self)
        folder = tmp_path / "temporary"
        folder.mkdir()
        monkeypatch.setattr(package, "_temporary_folder", lambda: folder)

    def build(self, graph: Any, inputs: Any, path: Path) -> None:
        if self.refused(path):
            raise OSError(self.error, os.strerror(self.error), str(path))
        if self.built:
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(path.parent), "torch writes there, too"
        self.built.append(path)
        path.touch()

    def run(self, given: list[Tensor]) -> tuple[Tensor]:
        return (given[0] + 1.0,)


def plus_one() -> tuple[Any, list[Tensor]]:
    inputs = [torch.zeros(2)]
    return trace(lambda x: (x + 1.0,), inputs), inputs


@pytest.mark.parametrize("fault", ["not a folder", "full"])
def test_a_cache_that_cannot_be_written_to(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    if fault == "not a folder":
        cache.touch()
        cache = cache / "pyro_sym"
    monkeypatch.setattr(package, "cache_dir", lambda: cache)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    disk = Disk(monkeypatch, tmp_path, lambda path: path.parent == cache, errno.ENOSPC)
    strerror = {"not a folder": "Not a directory", "full": "No space left on device"}[fault]
    with pytest.warns(UserWarning, match=rf"cache.*{strerror}.*kept in .*set TORCHINDUCTOR_CACHE_DIR"):
        function = package.compiled(*plus_one())
    torch.testing.assert_close(function(torch.ones(2)), (torch.full((2,), 2.0),))
    assert [path.exists() for path in disk.built] == [True]
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    package.compiled(*plus_one())  # the second time it is there, and nothing is built or said
    assert len(disk.built) == 1


def test_without_any_folder_to_write_to_steps_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "cache_dir", lambda: tmp_path / "cache")
    Disk(monkeypatch, tmp_path, lambda path: True, errno.EROFS)
    potential = Potential(make_model())
    gradient = Gradient(potential, jit="compile")
    with pytest.warns(UserWarning, match="can't be written to") as caught:
        gradient(torch.zeros(1, potential.size, dtype=torch.float64), Minibatch({"rows": torch.arange(4)}))
    assert gradient.mode == "trace"
    assert "nor can a temporary folder" in str(caught[-1].message)
    assert "TORCHINDUCTOR_CACHE_DIR" in str(caught[-1].message)


def test_a_package_is_read_from_a_cache_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No warning: nothing has to be written."""
    monkeypatch.setattr(package, "cache_dir", lambda: tmp_path)
    disk = Disk(monkeypatch, tmp_path, lambda path: path.exists(), errno.EROFS)
    for _ in range(2):
        package.compiled(*plus_one())
    assert len(disk.built) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_errors_of_folders_are_told_from_errors_of_compilers(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing compiler is an OSError as well, but no other folder helps."""
    import torch._inductor

    def fail(*args: Any, **kwargs: Any) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("wrapped, as torch does") from error

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    expected = package.CompilationError if number == errno.ENOENT else OSError
    with pytest.raises(expected):
        package._build(*plus_one(), tmp_path / "package.pt2")
