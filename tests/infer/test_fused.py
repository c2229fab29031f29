"""Fused steps against the same steps one by one. Three packages are compiled here, 10 to 20 s of CPU each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_sym.infer import gradient as gradient_module
from pyro_sym.infer import package
from pyro_sym.infer.fused import FusedSteps, block_length
from pyro_sym.infer.gradient import Gradient
from pyro_sym.infer.kernels import BAOA
from pyro_sym.infer.minibatch import Minibatch, draw_indices
from pyro_sym.infer.potential import Potential
from pyro_sym.infer.vectorized import VectorizedMCMC

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
    with pytest.warns(UserWarning, match="course depends on the value"):
        FusedSteps(gradient, step)((torch.zeros(1, potential.size, dtype=torch.float64),), *inputs)
    assert gradient.mode == "trace"


def test_an_untraceable_model_runs_eagerly() -> None:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.factor("f", x.sum() if x.sum().item() > 0 else -x.sum())

    gradient = Gradient(Potential(model), jit="compile")
    fused = FusedSteps(gradient, langevin)
    state = (torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.warns(UserWarning, match="runs it anew"):
        fused(state, torch.zeros(1, 4), torch.zeros(2, 1, 4), {}, torch.full((2,), 0.1), torch.ones(2))
    assert gradient.mode == "eager"


def test_only_a_gradient_that_is_to_be_compiled_can_be_fused() -> None:
    with pytest.raises(ValueError, match="made with jit='auto'; make it with jit='compile'"):
        FusedSteps(Gradient(Potential(make_model())), langevin)


def test_blocks_are_shorter_for_larger_positions() -> None:
    assert [block_length(size) for size in (8, 512, 101_770, 10_000_000)] == [10, 10, 4, 1]
