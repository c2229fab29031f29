"""Schedules: their formulas, how the parts of a cycle agree, and what bad input gets."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch

from pyro_sym.sgmcmc.nose_hoover import SGNHT
from pyro_sym.sgmcmc.overdamped import SGLD, LeimkuhlerMatthews
from pyro_sym.sgmcmc.schedules import Constant, Cyclical, Polynomial
from pyro_sym.sgmcmc.step_blocks import FusedSteps
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC, baoa
from pyro_sym.sgmcmc.vectorized import VectorizedMCMC
from tests.catalogue import normals
from tests.conftest import Z_LIMIT
from tests.sgmcmc.test_dynamics import affine


def test_constant() -> None:
    assert {Constant(0.3)(step) for step in range(5)} == {0.3}
    assert Constant(0.0)(7) == 0.0, "a temperature may be 0"


def test_polynomial_is_the_formula() -> None:
    schedule = Polynomial(a=0.2, b=5.0, gamma=0.7)
    assert [schedule(t) for t in (0, 1, 95)] == pytest.approx([0.2 * (5 + t) ** -0.7 for t in (0, 1, 95)])


@pytest.mark.parametrize(
    ("period", "fraction", "sampled"),
    [(1, 1.0, 1), (7, 0.15, 1), (7, 0.5, 3), (100, 0.29, 29), (100, 1.0, 100)],
)
def test_the_parts_of_a_cycle_agree(period: int, fraction: float, sampled: int) -> None:
    cycle = Cyclical(0.4, period, sampling_fraction=fraction, sampling_temperature=0.5, floor=0.1)
    for step in range(3 * period):
        r = step % period / period
        assert cycle.step_size(step) == pytest.approx(0.1 + 0.3 * (1 + math.cos(math.pi * r)) / 2)
        assert cycle.temperature(step) == (0.5 if cycle.samples(step) else 0.0)
        assert cycle.samples(step) == cycle.samples(step + period)
    kept = [cycle.samples(step) for step in range(period)]
    assert sum(kept) == sampled and kept == sorted(kept), "sampling comes last"


def test_a_fraction_that_floats_cannot_hold_counts_whole_steps() -> None:
    """10 * 0.3 is 2.9999999999999996 in some orders of multiplication, 100 * 0.29 always."""
    for period in range(1, 200):
        for steps in range(1, period + 1):
            cycle = Cyclical(1.0, period, sampling_fraction=steps / period)
            assert period - cycle.exploration_steps == steps


def test_step_sizes_stay_positive_to_the_end_of_a_long_cycle() -> None:
    cycle = Cyclical(peak=1e-3, period=10**9)
    assert cycle.step_size(10**9 - 1) > 0


@pytest.mark.parametrize("schedule", [Constant(0.1), Polynomial(0.1), Cyclical(0.1, 10)])
def test_schedules_are_values(schedule: Any) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert eval(repr(schedule)) == schedule
    with pytest.raises(AttributeError):
        schedule.value = 1.0


def test_the_methods_that_a_kernel_gets_are_picklable() -> None:
    cycle = Cyclical(0.1, 10)
    step_size, temperature = pickle.loads(pickle.dumps((cycle.step_size, cycle.temperature)))
    assert step_size(3) == cycle.step_size(3) and temperature(9) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1.0), "value is -1.0; pass a finite number >= 0"),
        (lambda: Constant(math.nan), "value is nan"),
        (lambda: Polynomial(0.0), "a is 0.0; pass a finite number > 0"),
        (lambda: Polynomial(0.1, b=math.inf), "b is inf"),
        (lambda: Polynomial(0.1, gamma=1.5), "gamma is 1.5; pass a power > 0 and <= 1"),
        (lambda: Polynomial(0.1, gamma=0.0), "gamma is 0.0"),
        (lambda: Cyclical(0.0, 10), "peak is 0.0"),
        (lambda: Cyclical(0.1, 0), "period is 0; it counts steps, so pass an integer >= 1"),
        (lambda: Cyclical(0.1, 2.5), "period is 2.5"),  # type: ignore[arg-type]
        (lambda: Cyclical(0.1, True), "period is True"),
        (lambda: Cyclical(0.1, 10, sampling_fraction=0.0), "sampling_fraction is 0.0"),
        (lambda: Cyclical(0.1, 10, sampling_fraction=1.5), "sampling_fraction is 1.5"),
        (lambda: Cyclical(0.1, 10, sampling_fraction=0.05), "less than a step .* of 10; pass at least 0.1"),
        (lambda: Cyclical(0.1, 10, sampling_temperature=0.0), "sampling_temperature is 0.0"),
        (lambda: Cyclical(0.1, 10, relaxation=2), "relaxation is 2; it counts steps of the 2 that sample"),
        (lambda: Cyclical(0.1, 10, relaxation=-1), "relaxation is -1"),
        (lambda: Cyclical(0.1, 10, relaxation=1.0), "relaxation is 1.0"),  # type: ignore[arg-type]
        (lambda: Cyclical(0.1, 10).keeps(9), "depends on the kernel's friction; pass it"),
        (lambda: Cyclical(0.1, 10, floor=0.2), r"floor is 0.2; .* <= peak \(0.1\)"),
    ],
)
def test_arguments_out_of_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- what a cycle keeps -------------------------------------------------------------------------------------


def kept_variances(cycle: Cyclical, lam: float, friction: float, redraw: bool = True) -> list[float]:
    """Variance over T / lam at every step that samples, exactly; the optimiser has found the mode."""
    covariance = torch.diag(torch.tensor([0.0, 1.0 if redraw else 0.0], dtype=torch.float64))
    found = []
    for step in range(cycle.exploration_steps, cycle.period):
        A, b = affine(baoa, lam, cycle.step_size(step), friction, 1.0)
        covariance = A @ covariance @ A.mT + b @ b.mT
        found.append(lam * float(covariance[0, 0]))
    return found


@pytest.mark.parametrize("share", [1.0, 2.0, 8.0])
def test_what_is_kept_has_the_variance_of_the_target(share: float) -> None:
    """Of the widest coordinate that the friction suits, and of narrower ones."""
    cycle = Cyclical(peak=0.2, period=1200, sampling_fraction=0.5, floor=0.1)
    friction = 2.0
    variances = kept_variances(cycle, (share * friction / 2) ** 2, friction)
    keeps = [cycle.keeps(step, friction) for step in range(cycle.exploration_steps, cycle.period)]
    assert min(v for v, kept in zip(variances, keeps, strict=True) if kept) > 0.99
    assert max(v for v, kept in zip(variances, keeps, strict=True) if kept) < 1.001
    assert sum(keeps) > 500
    assert max(abs(v - 1) for v in variances) > 0.2, "all that samples was kept before"


def test_without_new_momenta_it_takes_longer() -> None:
    cycle = Cyclical(peak=0.2, period=1200, sampling_fraction=0.5, floor=0.1)
    drawn, left = (kept_variances(cycle, 16.0, 2.0, redraw)[2] for redraw in (True, False))
    assert drawn > left + 0.2


def normal(dims: int) -> Callable[[], None]:
    return normals({"x": (dims,)}, dtype=torch.float64)


def cyclical_run(
    kind: Any, cycle: Cyclical, dims: int = 3, draws: int = 60, **options: Any
) -> VectorizedMCMC:
    pyro.set_rng_seed(1)
    thinning = options.pop("thinning", 5)
    kernel = kind(
        normals({"x": (dims,)}, dtype=torch.float64),
        step_size=cycle.step_size,
        temperature=cycle.temperature,
        **options,
    )
    mcmc = VectorizedMCMC(kernel, draws, 0, num_chains=2, thinning=thinning, disable_progbar=True)
    mcmc.run()
    return mcmc


@pytest.mark.parametrize("kind", [BAOA, SGHMC, SGNHT])
def test_draws_with_a_temperature_have_the_variance_of_the_target(kind: Any) -> None:
    cycle = Cyclical(peak=0.3, period=350 if kind is SGNHT else 150, sampling_fraction=0.6, floor=0.2)
    mcmc = cyclical_run(kind, cycle, dims=2_000, draws=2 * cycle.period // 5, friction=2.0)
    stats = mcmc.diagnostics()["sample_stats"]["chain 0"]
    kept = stats["temperature"] > 0
    steps = range(4, 2 * cycle.period, 5)
    if kind is not SGNHT:
        assert kept.tolist() == [cycle.keeps(step, friction=2.0) for step in steps]
    else:  # which its thermostat, too, has to settle for
        assert [cycle.keeps(step, 2.0) for step in steps] >= kept.tolist() and kept.any()
    sampled = torch.tensor([cycle.samples(step) for step in steps])
    assert torch.equal(stats["temperature"].isnan(), sampled & ~kept)
    x = mcmc.get_samples(group_by_chain=True)["x"]  # (2, draws, dims)
    last = x[:, kept][:, -1]
    first = x[:, kept][:, 0]
    error = Z_LIMIT * math.sqrt(2 / first.numel())  # 9.6 %
    bias = 0.03  # of symplectic Euler, h^2 / 4, and of what is not relaxed
    for draws in (first, last):
        assert abs(float(draws.square().mean()) - 1) < error + bias
    assert float(x[:, sampled][:, 0].square().mean()) < 1 - error - bias, "the first of the phase is narrow"
    # a few steps into the phase momenta have their temperature, where they were an optimiser's
    assert abs(float(stats["kinetic_temperature"][sampled][0]) - 1) < 0.5


def test_steps_of_relaxation_may_be_given() -> None:
    cycle = Cyclical(0.05, 50, sampling_fraction=0.5, relaxation=10, floor=0.02)
    assert [step for step in range(100) if cycle.keeps(step)] == [*range(35, 50), *range(85, 100)]
    for kind in (SGLD, LeimkuhlerMatthews, BAOA):
        temperature = cyclical_run(kind, cycle, thinning=1).diagnostics()["sample_stats"]["chain 0"][
            "temperature"
        ]
        assert (temperature > 0).tolist() == [cycle.keeps(step) for step in range(60)]


def test_a_phase_too_short_to_relax_in_is_warned_of() -> None:
    short = Cyclical(peak=0.1, period=100)
    with pytest.warns(UserWarning, match=r"no draw can be kept: .* has 20 steps, which are 0.0"):
        mcmc = cyclical_run(BAOA, short)
    assert not (mcmc.diagnostics()["sample_stats"]["chain 0"]["temperature"] > 0).any()
    with pytest.warns(UserWarning, match="SGLD has no friction, so it is not known how long"):
        cyclical_run(SGLD, short)
    cyclical_run(BAOA, Cyclical(0.1, 10, sampling_fraction=1.0))  # never cold, so no warning


@pytest.mark.parametrize("kind", [BAOA, SGNHT, LeimkuhlerMatthews])
def test_a_cycle_is_resumed_to_the_bit(kind: Any) -> None:
    cycle = Cyclical(peak=0.2, period=40, sampling_fraction=0.5, relaxation=7)

    def chains() -> Any:
        pyro.set_rng_seed(3)
        kernel = kind(normal(3), step_size=cycle.step_size, temperature=cycle.temperature)
        return kernel.start(num_chains=2)

    for stop in (19, 20, 23, 30):  # before, at and after the onset
        whole = chains()
        whole.advance(stop, warming_up=False)
        record, random = copy.deepcopy(whole.state_dict()), torch.get_rng_state()
        resumed = chains()
        resumed.load_state_dict(record)
        ends = []
        for each in (whole, resumed):
            torch.set_rng_state(random)
            each.advance(50, warming_up=False)
            ends.append((each.position, torch.tensor(each.relaxed)))
        assert all(map(torch.equal, *ends))


def test_blocks_of_steps_stop_at_an_onset(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the steps of a block taken one by one, as no compiler is needed for that."""

    def block(self: Any, *inputs: Any) -> Any:
        after, energy, slope = self.one_by_one(*inputs, gradient_at=self.gradient.eager)
        return after, energy, slope, float(after[0].sum())

    monkeypatch.setattr(FusedSteps, "__call__", block)
    cycle = Cyclical(peak=0.2, period=45, sampling_fraction=0.5, relaxation=7)  # onsets at 23 and 68
    warmed = []
    init = BAOA.init

    def watched(self: BAOA, *args: Any, **settings: Any) -> Any:
        warmed.append(settings["temperature"])
        return init(self, *args, **settings)

    monkeypatch.setattr(BAOA, "init", watched)
    mcmc = cyclical_run(BAOA, cycle, draws=9, thinning=10, jit="compile")
    assert warmed == [0.0, 1.0, 1.0], "at the start, and at each onset"
    temperature = mcmc.diagnostics()["sample_stats"]["chain 0"]["temperature"]
    assert (temperature > 0).tolist() == [cycle.keeps(step) for step in range(9, 90, 10)]


@pytest.mark.parametrize("kind", [SGHMC, SGNHT])
def test_a_ladder_of_temperatures_may_rise_from_zero(kind: Any) -> None:
    ladder = (0.5, 2.0)
    pyro.set_rng_seed(1)
    kernel = kind(
        normal(2_000),
        step_size=0.2,
        friction=2.0,
        temperature=lambda step: ladder if step >= 50 else (0.0, 0.0),
    )
    mcmc = VectorizedMCMC(kernel, 80, 0, num_chains=2, thinning=5, disable_progbar=True)
    mcmc.run()
    for chain, expected in enumerate(ladder):
        stats = mcmc.diagnostics()["sample_stats"][f"chain {chain}"]
        at = stats["temperature"]
        assert (at[:10] == 0).all() and (at[10:] == expected).all()
        kept = mcmc.get_samples(group_by_chain=True)["x"][chain, 50:]
        error = Z_LIMIT * math.sqrt(2 / 2_000) + 0.03
        for draw in (kept[0], kept[-1]):
            assert abs(float(draw.square().mean()) / expected - 1) < error
        # momenta that were drawn at the onset have their temperature at once
        assert abs(float(stats["kinetic_temperature"][10:].mean()) / expected - 1) < 0.05
