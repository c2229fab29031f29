"""Schedules: their formulas, how the parts of a cycle agree, and what bad input gets."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pyro_sym.infer.schedules import Constant, Cyclical, Polynomial


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
        assert cycle.temperature(step) == (0.5 if cycle.keeps(step) else 0.0)
        assert cycle.keeps(step) == cycle.keeps(step + period)
    kept = [cycle.keeps(step) for step in range(period)]
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
        (lambda: Cyclical(0.1, 10, floor=0.2), r"floor is 0.2; .* <= peak \(0.1\)"),
    ],
)
def test_arguments_out_of_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
