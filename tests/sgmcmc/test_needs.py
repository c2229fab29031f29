"""Kernels that need more of a driver than a momentum and a noise: microcanonical Langevin and MALA.

Statistical tests fail at a rate of 2e-5 over seeds.

Covers also `sgmcmc.kernel`.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from pyro_sym import SGLD, SGNHT, StochasticGradientKernel, VectorizedMCMC, from_pyro, testing
from pyro_sym.model import gradient as gradients
from pyro_sym.sgmcmc.kernel import Needs
from tests.catalogue import normals

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCK = next(
    b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "class MCLMC" in b
)
MICROCANONICAL = BLOCK.partition("\ntesting.check")[0]

FAILURE_RATE = 2e-5
SCALES = torch.tensor([0.5, 1.0, 1.0, 1.5, 2.0], dtype=torch.float64)


def mclmc(*slips: tuple[str, str]) -> Any:
    """The class that the page shows, or one with slips."""
    code = MICROCANONICAL
    for right, wrong in slips:
        assert right in code
        code = code.replace(right, wrong)
    names: dict[str, Any] = {"math": math}
    exec(code, names)
    return names["MCLMC"]


gaussian = normals({"x": (5,)}, SCALES, torch.float64)


def regression() -> None:
    x = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64)
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 1.0).to_event(1))
    with pyro.plate("rows", 40, subsample_size=5) as rows:
        pyro.sample("y", dist.Normal(w[0] + w[1] * x[rows], 0.5), obs=x[rows] ** 2)


def run(kernel: StochasticGradientKernel, draws: int, chains: int, **options: Any) -> VectorizedMCMC:
    pyro.set_rng_seed(0)
    mcmc = VectorizedMCMC(kernel, draws, 0, chains, disable_progbar=True, **options)
    mcmc.run()
    return mcmc


def variance_ratios(make: Any, steps: int = 200, chains: int = 8_000) -> Tensor:
    """Of the variances of chains that start from the exact law to the exact ones."""
    torch.manual_seed(0)
    start = {"x": SCALES * torch.randn(chains, 5, dtype=torch.float64)}
    mcmc = run(make(gaussian), 1, chains, thinning=steps, initial_params=start)
    return mcmc.get_samples()["x"].square().mean(0) / SCALES**2


def is_right(ratios: Tensor, chains: int = 8_000) -> bool:
    allowed = norm.isf(FAILURE_RATE / 2 / len(ratios)) * math.sqrt(2 / chains)
    return bool(((ratios - 1).abs() < allowed).all())


# --- microcanonical Langevin --------------------------------------------------------------------------------


def test_it_is_one_file_of_at_most_sixty_lines() -> None:
    lines = [line for line in MICROCANONICAL.splitlines() if line.strip()]
    assert 30 < len(lines) <= 60


def test_microcanonical_langevin_has_the_variances_of_a_gaussian() -> None:
    assert is_right(variance_ratios(partial(mclmc(), step_size=0.3)))


@pytest.mark.parametrize(
    "slip",
    [
        ("norm / (size - 1)", "norm / size"),
        ("force = -gradient", "force = gradient"),
        ("unit(direction + spread * noise)", "direction"),
        ("kick(direction, gradient_there)", "kick(direction, gradient)"),
    ],
    ids=["dimension", "sign", "noise", "stale gradient"],
)
def test_control_slips_are_seen_in_the_variances(slip: tuple[str, str]) -> None:
    assert not is_right(variance_ratios(partial(mclmc(slip), step_size=0.3)))


def energy_error(make: Any, step_size: float) -> float:
    """The root mean square of one step from the exact law."""
    torch.manual_seed(0)
    start = {"x": SCALES * torch.randn(500, 5, dtype=torch.float64)}
    mcmc = run(make(gaussian, step_size=step_size), 1, 500, initial_params=start)
    errors = [report["energy_error"] for report in mcmc.diagnostics()["sample_stats"].values()]
    return float(torch.stack(errors).square().mean().sqrt())


def test_the_energy_error_of_a_step_is_of_third_order() -> None:
    """As a symmetric splitting has it; without the kinetic energy of the second kick it is of first."""
    right, wrong = mclmc(), mclmc(("change + first + second", "change + first"))
    ratios = [energy_error(make, 0.02) / energy_error(make, 0.01) for make in (right, wrong)]
    assert abs(ratios[0] - 8) < 0.3 and ratios[1] < 2.5, ratios


@pytest.mark.parametrize("right", [True, False])
def test_a_step_without_noise_can_be_reversed(right: bool) -> None:
    """A kick is the exact flow of its force; the control has another projection."""
    slips = () if right else (("(1 + decay + along * (1 - decay))", "(1 + decay)"),)
    kernel = mclmc(*slips)(gaussian, step_size=0.5)
    torch.manual_seed(0)
    position, noise = torch.randn(2, 4, 5, dtype=torch.float64).unbind()
    settings: dict[str, Any] = {"step_size": 0.5, "temperature": 0.7, "inverse_mass": SCALES}

    def step(position: Tensor, direction: Tensor) -> Any:
        energy, gradient = position.square().sum(-1) / 2, position
        more = {"energy": energy, "gradient_at": lambda x: (x.square().sum(-1) / 2, x)}
        state = (position, direction, torch.zeros(4, 1, dtype=torch.float64))
        return kernel.step(state, gradient, torch.zeros_like(noise), **settings, **more)

    _, direction, _ = kernel.init(position, noise)
    there, turned, _ = step(position, direction)
    back, reversed_, _ = step(there, -turned)
    assert torch.allclose(back, position) == right and torch.allclose(reversed_, -direction) == right


def test_its_statistic_is_in_both_drivers_the_store_and_the_export(tmp_path: Path) -> None:
    make = partial(mclmc(), step_size=0.1)
    alone = pyro.infer.MCMC(make(regression), 6, 2, disable_progbar=True)
    alone.run()
    stored = run(make(regression), 6, 2, store=tmp_path / "run")
    for mcmc, chains in ((alone, 1), (run(make(regression), 6, 2), 2), (stored, 2), (tmp_path / "run", 2)):
        error = from_pyro(mcmc, model=regression)["sample_stats"]["energy_error"]
        assert error.dims == ("chain", "draw") and error.shape == (chains, 6)
        assert bool(error.notnull().all()) and float(abs(error).max()) > 0


def test_a_run_with_second_gradients_is_extended_to_the_bit(tmp_path: Path) -> None:
    """The minibatch of the gradient is part of the state."""
    make = partial(mclmc(), step_size=0.1)
    whole = run(make(regression), 9, 2).get_samples()
    run(make(regression), 4, 2, store=tmp_path / "run")
    extended = run(make(regression), 9, 2, store=tmp_path / "run", resume=True)
    assert torch.equal(extended.get_samples()["w"], whole["w"])


def test_large_chains_with_second_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_sym.sgmcmc.chains import Chains

    torch.manual_seed(1)
    noise = torch.randn(13, 3, 2, dtype=torch.float64)  # they draw it in another order
    monkeypatch.setattr(Chains, "_noise", lambda self, shard: noise[getattr(self, "step", 0)][shard.rows])
    together = run(mclmc()(regression, step_size=0.1), 6, 3, thinning=2).get_samples()
    monkeypatch.setattr(gradients, "LARGE", 1)
    apart = run(mclmc()(regression, step_size=0.1), 6, 3, thinning=2).get_samples()
    torch.testing.assert_close(apart, together)


def test_compiled_steps_evaluate_again_on_the_minibatch_of_their_gradient() -> None:
    chains = mclmc()(regression, step_size=0.1, jit="compile").start(num_chains=2)
    fused = chains._fused
    assert fused is not None
    noise = torch.randn(2, 2, 2, dtype=torch.float64)
    rows = {"rows": torch.stack([torch.randperm(40)[:5] for _ in range(6)]).reshape(3, 2, 5)}
    numbers = torch.full((2,), 0.1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    inputs = (chains.state, chains.gradient, noise, rows, *numbers, chains.energy)
    state, energy, gradient, _ = fused(*inputs)
    assert fused.gradient.mode == "compile"
    expected = fused.one_by_one(*inputs)
    torch.testing.assert_close((state, energy, gradient), expected)
    # the control: the minibatch after it
    late = {"rows": rows["rows"].roll(-1, 0)}
    other = fused.one_by_one(*inputs[:3], late, *inputs[4:])
    assert not torch.allclose(other[0][2], expected[0][2])
    chains.advance(2, warming_up=False)
    assert chains._compiles(False) and chains.state[2].abs().max() < 1


def test_without_plates_the_second_gradient_is_that_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyro_sym.sgmcmc.chains import Chains

    counts = dict.fromkeys((gaussian, regression), 0)
    evaluate = Chains._evaluate
    for model in counts:

        def counting(self: Chains, *args: Any, model: Any = model) -> Any:
            counts[model] += 1
            return evaluate(self, *args)

        monkeypatch.setattr(Chains, "_evaluate", counting)
        run(mclmc()(model, step_size=0.1), 10, 2)
    assert list(counts.values()) == [1 + 10, 1 + 2 * 10]


def test_a_kernel_without_a_cold_limit_refuses_temperature_zero() -> None:
    make = mclmc()
    for temperature in (0.0, [1.0, 0.0]):
        with pytest.raises(ValueError, match="MCLMC has no limit at temperature 0"):
            make(gaussian, step_size=0.1, temperature=temperature)
    with pytest.raises(ValueError, match="at step 3, and MCLMC has no limit at temperature 0"):
        run(make(gaussian, step_size=0.1, temperature=lambda step: float(step < 3)), 5, 1)
    with pytest.raises(ValueError, match="needs two or more"):
        run(make(lambda: pyro.sample("x", dist.Normal(0.0, 1.0)), step_size=0.1), 1, 1)


# --- accept or reject, with two noises ----------------------------------------------------------------------


class MALA(StochasticGradientKernel):
    """SGLD whose proposals are accepted or rejected; the second noise decides, by its normal probability."""

    needs = Needs(momentum=False, noises=2, second_gradient=True, cold_limit=False)

    def init(self, position: Tensor, noise: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        assert noise.shape == (2, *position.shape)
        return position, torch.ones_like(position[:, :1])

    def step(self, state: Any, gradient: Tensor, noise: Tensor, **settings: Any) -> tuple[Tensor, ...]:
        position, h, T, G = state[0], *(settings[k] for k in ("step_size", "temperature", "inverse_mass"))
        proposal = position - h * G * gradient + (2 * h * T * G) ** 0.5 * noise[0]
        energy, there = settings["gradient_at"](proposal)
        back = position - proposal + h * G * there
        log_ratio = (settings["energy"] - energy) / T + noise[0].square().sum(-1) / 2
        log_ratio = log_ratio - (back.square() / (4 * h * T * G)).sum(-1)
        accepted = (torch.special.log_ndtr(noise[1][:, 0]) < log_ratio).unsqueeze(-1)  # (C, 1)
        return torch.where(accepted, proposal, position), accepted.to(position.dtype)

    def statistics(self, state: Any) -> dict[str, Tensor]:
        return {"accepted": state[1].squeeze(-1)}


def test_accepting_or_rejecting_is_exact_at_large_steps() -> None:
    """At a step that makes SGLD's variance of the narrowest coordinate twice the exact one."""
    assert is_right(variance_ratios(partial(MALA, step_size=0.25), steps=100))
    assert not is_right(variance_ratios(partial(SGLD, step_size=0.25), steps=100))
    mcmc = run(MALA(gaussian, step_size=0.25), 200, 4)
    accepted = mcmc.diagnostics()["sample_stats"]["chain 0"]["accepted"]
    assert set(accepted.tolist()) == {0.0, 1.0}


def test_a_kernel_that_accepts_or_rejects_keeps_the_contract() -> None:
    testing.check_kernel_contract(partial(MALA, step_size=0.01))


def test_control_a_cold_limit_that_is_none_is_told() -> None:
    def make(model: Any, temperature: Any = 1.0) -> MALA:
        return MALA(model, step_size=0.01, temperature=temperature or 0.1)

    with pytest.raises(AssertionError, match="needs a temperature above 0, and takes 0"):
        testing.check_kernel_contract(make)


# --- the statistics of kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize(("thermostats", "name"), [("global", "thermostat"), ("site", "site_thermostat")])
def test_a_thermostat_is_recorded_and_exported(thermostats: Any, name: str, tmp_path: Path) -> None:
    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("b", dist.Normal(0.0, 1.0))

    make = partial(SGNHT, model, step_size=0.1, thermostats=thermostats)
    alone = pyro.infer.MCMC(make(), 6, 0, disable_progbar=True)
    alone.run()
    stored = run(make(), 6, 2, store=tmp_path / "run")
    for mcmc, count in ((alone, 1), (run(make(), 6, 2), 2), (stored, 2), (tmp_path / "run", 2)):
        value = from_pyro(mcmc, model=model)["sample_stats"][name]
        assert value.dims == ("chain", "draw", "latent_site")[: 2 + (thermostats == "site")]
        assert value.shape == (count, 6, 2)[: value.ndim]
    # what is recorded is the state: the last draw's
    pyro.set_rng_seed(0)
    chains = make().start(num_chains=2)
    chains.advance(6, warming_up=False)
    last = torch.as_tensor(value.values[:, -1]).reshape(2, -1)
    torch.testing.assert_close(last, chains.state[2].double())


# --- statistics that can't be recorded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda state: {"energy": state[0][..., 0]}, "returns 'energy', which all kernels have"),
        (lambda state: {"norm": state[0]}, r"'norm' of shape \(1, 2, 5\) .* a number a draw"),
    ],
)
def test_statistics_that_can_not_be_recorded_are_refused(own: Any, message: str) -> None:
    class Own(SGLD):
        def statistics(self, state: Any) -> dict[str, Tensor]:
            return own(state)

    with pytest.raises(ValueError, match=message):
        run(Own(gaussian, step_size=0.1), 1, 2).diagnostics()
