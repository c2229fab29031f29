"""Several steps of a sampler and their gradients as one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyro_sym.graph.batching import UnbatchableError
from pyro_sym.graph.checked import Probe, check, nudge, relative_error, tolerance
from pyro_sym.graph.record import Function, UntraceableError, trace
from pyro_sym.graph.simplify import simplify
from pyro_sym.model.gradient import Gradient
from pyro_sym.model.minibatch import Minibatch
from pyro_sym.sgmcmc.kernel import State

__all__ = ["FusedSteps", "Step", "block_length"]

Step = Callable[..., State]
"""From state, gradient ``(C, d)``, noise, step size (0-d) and temperature (0-d or ``(C, 1)``) to a state.

One that evaluates again also takes ``energy`` ``(C,)`` and ``gradient_at``, as a kernel's step does.
"""


def block_length(size: int) -> int:
    """How many steps to fuse if the positions of all chains hold ``size`` values.

    The steps of a block share the overhead of a call; the compiler's time grows with them.
    """
    if size <= 10_000:
        return 10
    return 4 if size <= 1_000_000 else 1


class FusedSteps:
    r"""Steps of a sampler with their gradients, compiled into one function.

    For a state :math:`s` whose first part is the position, with the gradient :math:`g_0` there, a block of
    :math:`k` steps is

    .. math::

        s_{i+1} = \mathrm{step}(s_i, g_i, \xi_i, h_i, T_i), \qquad
        g_{i+1} = \nabla U(s_{i+1}^{(0)}; b_i), \qquad i = 0, \dots, k - 1,

    so that the last position has its energy and gradient, with which the next block begins. A step that
    evaluates again (``second_gradient``) does so on the minibatch of its own gradient, :math:`b_{i-1}`.

    The block is compiled by ``torch._inductor`` on the first call for inputs of given shapes, which takes
    seconds, and kept in its cache folder for later runs, also with other data of the same shapes. Without a
    C++ compiler the steps are taken one by one, and a warning says so. ``step`` has to be a pure function of
    tensors: it must neither change its arguments, nor read their values, nor draw random numbers.
    """

    def __init__(self, gradient: Gradient, step: Step, second_gradient: bool = False) -> None:
        if gradient.jit != "compile":
            raise ValueError(f"the gradient was made with jit={gradient.jit!r}; make it with jit='compile'")
        self.gradient = gradient
        self.step = step
        self.second_gradient = second_gradient
        self._prepared: dict[Any, Function] = {}

    def __call__(
        self,
        state: State,
        gradient: Tensor,
        noise: Tensor,
        indices: Mapping[str, Tensor],
        step_sizes: Tensor,
        temperatures: Tensor,
        energy: Tensor | None = None,
    ) -> tuple[State, Tensor, Tensor, float]:
        """Take as many steps as there is noise, of shape ``(k, C, d)`` or ``(k, noises, C, d)``.

        ``gradient`` ``(C, d)`` is the one at the position ``state[0]``. ``indices``, the rows by subsampled
        plate, have shape ``(k, C, B)``, or ``(k, B)`` if chains share them; steps that evaluate again need
        ``k + 1``, those of ``gradient`` first, and the ``energy`` ``(C,)`` there. ``step_sizes`` has shape
        ``(k,)``, ``temperatures`` ``(k,)`` or ``(k, C, 1)``.

        Returns the state after the steps, energies ``(C,)`` and gradients ``(C, d)`` there, and the sum of
        positions, energies and gradients, which is finite if they are.
        """
        arguments = (state, gradient, noise, indices, step_sizes, temperatures, energy)
        if self.gradient.mode != "compile":
            after, energy, slope = self.one_by_one(*arguments)
            return after, energy, slope, float(_total(after[0], energy, slope))
        inputs = [*state, gradient, noise, step_sizes, temperatures, *indices.values()]
        inputs += [] if energy is None else [energy]
        key = (*indices, *[tensor.shape for tensor in inputs])
        run = self._prepared.get(key)
        if run is None:
            self._prepare(key, inputs, len(state), indices)
            return self(*arguments)
        *parts, energy, slope, total = run(*inputs)
        return tuple(parts), energy, slope, float(total)

    def one_by_one(
        self, *inputs: Any, gradient_at: Callable[[Tensor, Minibatch], tuple[Tensor, Tensor]] | None = None
    ) -> tuple[State, Tensor, Tensor]:
        """The same steps without fusing them; arguments and results as of a call, without the sum."""
        return self._loop(gradient_at or self.gradient, *inputs)

    def _loop(
        self,
        gradient_at: Callable[[Tensor, Minibatch], tuple[Tensor, Tensor]],
        state: State,
        gradient: Tensor,
        noise: Tensor,
        indices: Mapping[str, Tensor],
        step_sizes: Tensor,
        temperatures: Tensor,
        energy: Tensor | None = None,
    ) -> tuple[State, Tensor, Tensor]:
        again = self.second_gradient
        for i in range(len(noise)):
            more: dict[str, Any] = {}
            if again:
                own = Minibatch({name: rows[i] for name, rows in indices.items()})
                more = {"energy": energy, "gradient_at": lambda at, own=own: gradient_at(at, own)}
            state = self.step(state, gradient, noise[i], step_sizes[i], temperatures[i], **more)
            minibatch = Minibatch({name: rows[i + again] for name, rows in indices.items()})
            energy, gradient = gradient_at(state[0], minibatch)
        assert energy is not None
        return state, energy, gradient

    def _prepare(self, key: Any, inputs: list[Tensor], parts: int, indices: Mapping[str, Tensor]) -> None:
        """Compile the steps for inputs of these shapes, or fall back."""
        from pyro_sym.graph.aot import CompilationError, compiled

        names = tuple(indices)
        try:
            checked = self.gradient.checked(inputs[0], Minibatch({n: rows[0] for n, rows in indices.items()}))
        except UnbatchableError as error:
            self.gradient.do_not_compile(error)
            return
        if checked is None:
            return
        graph = checked.graph

        def evaluate(position: Tensor, minibatch: Minibatch) -> tuple[Tensor, Tensor]:
            return graph(position, *minibatch.indices.values())

        def block(*inputs: Tensor) -> tuple[Tensor, ...]:
            gradient, noise, step_sizes, temperatures, *rest = inputs[parts:]
            rows = dict(zip(names, rest, strict=False))
            energy = rest[-1] if self.second_gradient else None
            after, energy, slope = self._loop(
                evaluate, inputs[:parts], gradient, noise, rows, step_sizes, temperatures, energy
            )
            return (*after, energy, slope, _total(after[0], energy, slope))

        try:
            with torch.no_grad():
                run = compiled(simplify(trace(block, inputs), inputs), inputs)
                self._prepared[key] = check(run, [_BlockProbe(block, inputs, parts)])
        except (CompilationError, UntraceableError) as error:
            self.gradient.do_not_compile(error)


# Factors of the step size that are tried in turn until rounding errors don't grow within a block.
_FACTORS = (100.0, 10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4)


class _BlockProbe(Probe):
    """Compares compiled steps with the same steps uncompiled.

    If the dynamics is unstable or chaotic, two right computations are far apart after a few steps; if steps
    are short, a wrong order of noise or rows changes little. So the probe multiplies the step sizes by the
    largest of a few factors at which a rounding error at the start doesn't grow, and raises
    ``UntraceableError`` if it grows at all of them, or nothing is finite. ``inputs`` are the ``parts`` of the
    state, the gradient, the noise, the step sizes, and the rest.
    """

    def __init__(self, block: Function, inputs: Sequence[Tensor], parts: int) -> None:
        super().__init__(moves=False)
        self.block, self.inputs, self.parts = block, inputs, parts
        position = inputs[0]
        generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
        noise = torch.randn(position.shape, generator=generator, dtype=position.dtype).to(position.device)
        rounded = position * (1 + 4 * torch.finfo(position.dtype).eps * noise)
        growth: dict[float, float] = {}  # the rounding error at the end, by factor
        finite = self._num_finite(self._run(block, position, _FACTORS[-1]))  # fewer if steps go to infinity
        for factor in _FACTORS:
            growth[factor] = math.inf
            with suppress(RuntimeError):  # too far out for the model: for example, no Cholesky factor
                expected = self._run(block, position, factor)
                if self._num_finite(expected) == finite:
                    results = self._run(block, rounded, factor)
                    growth[factor] = max(map(relative_error, results, expected))
            if growth[factor] <= 0.1 * tolerance(position):
                break
        self.factor = min(growth, key=growth.__getitem__)
        self.allowed = max(tolerance(position), 10 * growth[self.factor])
        if finite == 0:
            raise UntraceableError("it can't be checked where nothing is finite")
        if not growth[self.factor] <= 0.01:
            raise UntraceableError("it can't be checked: a rounding error grows to 1 % at all step sizes")

    def _run(self, function: Function, position: Tensor, factor: float) -> Sequence[Tensor]:
        """State, energies and gradients, without their sum."""
        sizes = self.parts + 2  # the place of the step sizes
        rest = [factor * part if n == sizes else part for n, part in enumerate(self.inputs[1:], 1)]
        return function(position, *rest)[:-1]

    @staticmethod
    def _num_finite(results: Sequence[Tensor]) -> int:
        return sum(int(result.isfinite().sum()) for result in results)

    def reference(self, fraction: float, number: int) -> Sequence[Tensor]:
        return self.results(self.block, fraction, number)

    def results(self, function: Function, fraction: float, number: int) -> Sequence[Tensor]:
        return self._run(function, self.inputs[0] + nudge(self.inputs[0], number), self.factor)

    def tolerance(self, wanted: Tensor) -> float:
        return self.allowed

    def problem(self, number: int, deviation: float) -> str:
        return (
            f"its {len(self.inputs[self.parts + 2])} steps of {self.factor:g} times the step size come out "
            f"off by {deviation:.1g}, relative to the same steps uncompiled"
        )


def _total(position: Tensor, energy: Tensor, gradient: Tensor) -> Tensor:
    return position.sum() + energy.sum() + gradient.sum()
