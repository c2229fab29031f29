"""Step sizes and temperatures as functions of the step, counted from 0 with the warm-up included."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Constant", "Cyclical", "Polynomial", "cycle_of", "relaxation_share"]


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
    another mode. Cycles weight modes by how often the optimiser finds them, not by their posterior mass.

    **What to keep.** A sampling phase starts where the optimiser stopped, with no spread, and its states are
    draws only once the spread has built up. Kernels draw new momenta when it starts. From there on, with
    friction :math:`\gamma`, the variance of a coordinate of standard deviation :math:`\sigma` is too small,
    relatively, by

    .. math::

        \left( 1 + \tfrac12 \gamma t \right)^2 e^{-\gamma t} \text{ at } \sigma = 2 / \gamma, \qquad
        \text{at most about } e^{-\gamma t} \text{ for smaller } \sigma,

    which is 0.8 % after the relaxation time :math:`\gamma t = 8`. Coordinates wider than :math:`2 / \gamma`
    take longer, :math:`4 \gamma \sigma^2` in place of :math:`8 / \gamma`: choose the friction for the widest,
    or pass ``relaxation``.

    Give a kernel the two methods, ``step_size=cycle.step_size, temperature=cycle.temperature``. Among draws
    that were recorded anyway, those to keep have a positive ``temperature`` in the statistics of the run: it
    is 0 in exploration and NaN in the relaxation, which the kernel computes from its friction and the step
    sizes. :meth:`keeps` tells the same beforehand. A kernel warns if a sampling phase is too short for it.

    Args:
        peak: :math:`h_{\max}`, the step size at the start of each cycle.
        period: :math:`p`, steps a cycle.
        sampling_fraction: :math:`f` in :math:`(0, 1]`, the part of each cycle, at its end, that samples; 1
            for a temperature that is always on.
        sampling_temperature: :math:`T`, positive.
        floor: :math:`h_{\min}`, at most ``peak``. At 0 the steps are smallest in sampling, and so is the
            bias, but successive draws are most alike, and a phase may be too short to relax in.
        relaxation: number of steps at the start of sampling whose states are not kept; by default what a
            kernel's friction asks for. Kernels without friction can't tell: give it for them.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> cycle = Cyclical(peak=0.2, period=1000, sampling_fraction=0.5, floor=0.1)
        >>> [round(cycle.step_size(step), 3) for step in (0, 500, 999, 1000)]
        [0.2, 0.15, 0.1, 0.2]
        >>> [cycle.temperature(step) for step in (0, 499, 500, 999, 1000)]
        [0.0, 0.0, 1.0, 1.0, 0.0]
        >>> [cycle.keeps(step, friction=2.0) for step in (0, 500, 526, 527, 999)]
        [False, False, False, True, True]

    References:
        Zhang et al. 2020, "Cyclical stochastic gradient MCMC for Bayesian deep learning" (arXiv 1902.03932).
    """

    peak: float
    period: int
    sampling_fraction: float = 0.2
    sampling_temperature: float = 1.0
    floor: float = 0.0
    relaxation: int | None = None

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
        sampling = self.period - self.exploration_steps
        if self.relaxation is not None and (
            type(self.relaxation) is not int or not 0 <= self.relaxation < sampling
        ):
            raise ValueError(
                f"relaxation is {self.relaxation!r}; it counts steps of the {sampling} that sample, so pass "
                "an integer >= 0 and less than that, or raise period or sampling_fraction"
            )

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
        return self.sampling_temperature if self.samples(step) else 0.0

    def samples(self, step: int) -> bool:
        """Tell whether a step is one of sampling."""
        return step % self.period >= self.exploration_steps

    def keeps(self, step: int, friction: float | None = None) -> bool:
        """Tell whether the state that a step leaves is a draw: whether sampling has had time to relax.

        Args:
            step: counted from 0.
            friction: of the kernel; not needed if the schedule has a ``relaxation``, or never explores.

        Returns:
            Whether to keep it.

        Raises:
            ValueError: if neither is known.
        """
        if not self.samples(step):
            return False
        if self.exploration_steps == 0:
            return True
        since = range(self.exploration_steps, step % self.period + 1)
        if self.relaxation is not None:
            return len(since) > self.relaxation
        if friction is None:
            raise ValueError(
                "how long sampling takes to relax depends on the kernel's friction; pass it, or give the "
                "schedule relaxation=, a number of steps"
            )
        return sum(relaxation_share(friction, self.step_size(t)) for t in since) >= 1


def relaxation_share(friction: float, step_size: float) -> float:
    r"""What share of a relaxation time a step is: :math:`\min(\gamma h, 0.4) / 8`.

    A relaxation time is :math:`8 / \gamma` (:class:`Cyclical`), and at least 20 steps, for friction so large
    that a step forgets the momentum.
    """
    return min(friction * step_size, 0.4) / 8


def cycle_of(schedule: object) -> Cyclical | None:
    """The cycle that a schedule is a method of, if it is."""
    owner = getattr(schedule, "__self__", None)
    return owner if isinstance(owner, Cyclical) else None
