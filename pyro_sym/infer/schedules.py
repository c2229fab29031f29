"""Step sizes and temperatures as functions of the step, counted from 0 with the warm-up included."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Constant", "Cyclical", "Polynomial"]


@dataclass(frozen=True)
class Constant:
    r"""The same value at every step.

    .. math::

        h_t = a.

    Args:
        value: :math:`a \ge 0`, a step size or a temperature.

    Raises:
        ValueError: if the value is negative or not finite.

    Example:
        >>> Constant(0.1)(1000)
        0.1
    """

    value: float

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ValueError(f"value is {self.value}; pass a finite number >= 0")

    def __call__(self, step: int) -> float:
        """Return the value, whatever the step."""
        return self.value


@dataclass(frozen=True)
class Polynomial:
    r"""Decay by a power of the step.

    .. math::

        h_t = a \, (b + t)^{-\gamma}.

    With :math:`1/2 < \gamma \le 1` the steps sum to infinity and their squares don't: averages weighted by
    the step size converge to those of the target if gradients are unbiased. For the mean square error of
    SGLD's averages :math:`\gamma = 1/3` is the best rate. A power above 1 is refused: the steps then sum to a
    finite time, and the chain stops short of its target.

    Args:
        a: positive; the first value is :math:`a \, b^{-\gamma}`.
        b: positive; number of steps over which the first value roughly holds.
        gamma: the power, in :math:`(0, 1]`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> schedule = Polynomial(a=0.1, b=1.0, gamma=0.5)
        >>> schedule(0), round(schedule(99), 6)
        (0.1, 0.01)

    References:
        Welling and Teh 2011, "Bayesian learning via stochastic gradient Langevin dynamics"; Teh, Thiery and
        Vollmer 2016, "Consistency and fluctuations for stochastic gradient Langevin dynamics" (arXiv
        1409.0578).
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; pass a finite number > 0")
        if not 0 < self.gamma <= 1:
            raise ValueError(
                f"gamma is {self.gamma}; pass a power > 0 and <= 1, above which the steps sum to a finite "
                "time (or Constant for no decay)"
            )

    def __call__(self, step: int) -> float:
        """Return the value at a step."""
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class Cyclical:
    r"""Cycles of exploration and sampling: step size and temperature in one object, so that they agree.

    At step :math:`t`, :math:`r = (t \bmod p) / p` of a cycle of :math:`p` steps has passed, and

    .. math::

        h_t = h_{\min} + (h_{\max} - h_{\min}) \, \tfrac{1}{2} \left( 1 + \cos \pi r \right), \qquad
        T_t = \begin{cases} 0 & r < 1 - f \quad \text{(exploration)} \\
        T & \text{otherwise (sampling)} \end{cases}

    with the sampling fraction :math:`f`. Exploration is an optimiser with warm restarts, that looks for
    another mode; states are kept in sampling only (:meth:`keeps`). Cycles weight modes by how often the
    optimiser finds them, not by their posterior mass.

    Give a kernel the two methods, ``step_size=cycle.step_size, temperature=cycle.temperature``. Among draws
    that were recorded anyway, those to keep have a positive ``temperature`` in the statistics of the run.

    Args:
        peak: :math:`h_{\max}`, the step size at the start of each cycle.
        period: :math:`p`, steps a cycle.
        sampling_fraction: :math:`f` in :math:`(0, 1]`, the part of each cycle, at its end, that samples; 1
            for a temperature that is always on.
        sampling_temperature: :math:`T`, positive.
        floor: :math:`h_{\min}`, at most ``peak``. At 0 the steps are smallest in sampling, and so is the
            bias, but successive draws are most alike.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> cycle = Cyclical(peak=0.1, period=10, sampling_fraction=0.3)
        >>> [round(cycle.step_size(step), 3) for step in (0, 5, 9, 10)]
        [0.1, 0.05, 0.002, 0.1]
        >>> [cycle.temperature(step) for step in (0, 6, 7, 9, 10)]
        [0.0, 0.0, 1.0, 1.0, 0.0]
        >>> [step for step in range(20) if cycle.keeps(step)]
        [7, 8, 9, 17, 18, 19]

    References:
        Zhang et al. 2020, "Cyclical stochastic gradient MCMC for Bayesian deep learning" (arXiv 1902.03932).
    """

    peak: float
    period: int
    sampling_fraction: float = 0.2
    sampling_temperature: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "sampling_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; pass a finite number > 0")
        if type(self.period) is not int or self.period < 1:  # a bool is an int, too
            raise ValueError(f"period is {self.period!r}; it counts steps, so pass an integer >= 1")
        if not 0 < self.sampling_fraction <= 1:
            raise ValueError(
                f"sampling_fraction is {self.sampling_fraction}; pass the part of a cycle that samples, > 0 "
                "and <= 1"
            )
        if self.exploration_steps == self.period:
            raise ValueError(
                f"sampling_fraction is {self.sampling_fraction}, less than a step of a period of "
                f"{self.period}; pass at least {1 / self.period:.2g}"
            )
        if not 0 <= self.floor <= self.peak:
            raise ValueError(f"floor is {self.floor}; pass a step size >= 0 and <= peak ({self.peak})")

    @property
    def exploration_steps(self) -> int:
        """Steps at the start of each cycle that explore; the rest sample."""
        return self.period - math.floor(self.period * self.sampling_fraction + 1e-9)  # 10 * 0.3 is below 3

    def step_size(self, step: int) -> float:
        """Return the step size at a step; a kernel's ``step_size``."""
        # (1 + cos(pi r)) / 2 = cos(pi r / 2)^2, which does not round to 0 near the end of a cycle
        passed = step % self.period / self.period
        return self.floor + (self.peak - self.floor) * math.cos(math.pi / 2 * passed) ** 2

    def temperature(self, step: int) -> float:
        """Return the temperature at a step, 0 in exploration; a kernel's ``temperature``."""
        return self.sampling_temperature if self.keeps(step) else 0.0

    def keeps(self, step: int) -> bool:
        """Tell whether the state that a step leaves is a draw, that is, whether the step samples."""
        return step % self.period >= self.exploration_steps
