"""Is it a symmetry of the model? Compare the model's log joint at values and at their images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import _bound_partial, _context_wrap
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyro_sym._random import fork_random_state
from pyro_sym.errors import SymmetryError
from pyro_sym.program import Program
from pyro_sym.symmetry.base import Element, Symmetry

__all__ = ["check_symmetry", "unblocked"]

T = TypeVar("T")

NUM_DRAWS = 3
NUM_RANDOM_ELEMENTS = 3
MAX_GENERATORS = 32
# Differences are relative to 1 + sum |terms|: summing permuted terms in another order moves the last digits.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def check_symmetry(model: Callable[..., Any], symmetry: Symmetry, *args: Any, **kwargs: Any) -> None:
    r"""Check that a model's log joint does not change under a symmetry.

    At prior draws :math:`\theta` (three of them), with the same minibatch on both sides, the check asks for

    .. math::

        \log p(g \cdot \theta, D) = \log p(\theta, D)

    for the generators of the group (at most 32 of them, evenly spread) and for random elements :math:`g`. It
    runs in float64 where the model allows (a plain module does, as a copy), and in the model's own precision
    otherwise, in which a break has to exceed some 1e-4 of the log joint to be seen. Enumerable discrete
    sites are summed out first. Torch's global random state is left as it was.

    Args:
        model: a Pyro model; a ``poutine.block`` around it is looked through.
        symmetry: the claimed symmetry.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Raises:
        SymmetryError: if the log joint changes: the message names the generator, the difference, and the
            sites whose terms moved; or if the symmetry can't act on the model's sites.
        ValueError: if a latent site is discrete and can't be summed out, or no prior draw has a finite log
            joint.

    Example:
        >>> def model():
        ...     pyro.sample("locs", dist.Normal(torch.tensor([0.0, 1.0]), 1.0).to_event(1))
        >>> check_symmetry(model, Permutation({"locs": -1}))
        Traceback (most recent call last):
        ...
        pyro_sym.errors.SymmetryError: the model is not invariant under swapping 0 and 1 in Permutation(...
    """
    at_best_precision(partial(check, symmetry=symmetry), model, args, kwargs)


def at_best_precision(
    compute: Callable[[Program, torch.dtype], T],
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    """Look at a model in float64 if it runs there, else as it is; torch's random state is put back."""
    model = unblocked(model)
    with torch.no_grad(), fork_random_state():
        # A model with tensors of its own in single precision fails among doubles; a failure of another kind
        # comes again without them.
        with suppress(RuntimeError), default_dtype(torch.float64), own_params():
            double = partial(tree_map, _to_double)
            return compute(Program(_in_double(model), double(args), double(kwargs)), torch.float64)
        return compute(Program(model, args, kwargs), torch.float32)


def check(program: Program, dtype: torch.dtype, symmetry: Symmetry) -> None:
    """Compare the log joint at prior draws and at their images."""
    for _ in range(NUM_DRAWS):
        values, indices = finite_draw(program, dtype)
        refuse_hidden_randomness(program, values, indices)
        symmetry.check_values(values)
        before = program.log_joint_terms(values, indices)
        compare = partial(_compare, program, symmetry, values, indices, before, dtype)
        generators = symmetry.generators(values)
        step = -(-len(generators) // MAX_GENERATORS) or 1
        spread = generators[::step]
        rest = [pair for k, pair in enumerate(generators) if k % step]
        for name, element in spread:
            compare(name, element)
        for _ in range(NUM_RANDOM_ELEMENTS):
            try:
                compare(f"a random element of {symmetry!r}", symmetry.sample(values))
            except SymmetryError:
                for name, element in rest:  # a generator says more than a random element
                    compare(name, element)
                raise


def finite_draw(program: Program, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and indices at which the log joint is finite, drawn by the program's init strategy."""
    for _ in range(20):
        values, indices = program.draw()
        if dtype == torch.float64:
            values = {name: _to_double(value) for name, value in values.items()}
        if program.log_joint(values, indices).isfinite():
            return values, indices
    raise ValueError(
        "the model's log joint is not finite at any of 20 prior draws, so no symmetry can be checked"
    )


def _compare(
    program: Program,
    symmetry: Symmetry,
    values: dict[str, Tensor],
    indices: dict[str, Tensor],
    before: dict[str, Tensor],
    dtype: torch.dtype,
    name: str,
    element: Element,
) -> None:
    after = program.log_joint_terms(symmetry.act(element, values), indices)
    allowed = TOLERANCE[dtype] * (1.0 + sum(abs(float(term)) for term in before.values()))
    change = sum(float(after[site] - before[site]) for site in before)
    if abs(change) <= allowed:
        return
    moved = {site: float(after[site] - before[site]) for site in before}
    listed = ", ".join(
        f"{site!r} by {delta:+.4g}" for site, delta in moved.items() if not abs(delta) <= allowed
    )
    raise SymmetryError(
        f"the model is not invariant under {name}: its log joint changes by {change:+.4g} (allowed "
        f"{allowed:.1g}); terms that moved: {listed}. Is a site missing from the symmetry, on the wrong "
        "axis, or under a prior that tells the labels apart?"
    )


def refuse_hidden_randomness(program: Program, values: dict[str, Tensor], indices: dict[str, Tensor]) -> None:
    """Raise if the log joint differs between two runs at the same values."""
    first, second = (program.log_joint(values, indices) for _ in range(2))
    if first != second:
        raise SymmetryError(
            f"the model's log joint is random at fixed values of its latent sites {list(program.latents)}: "
            f"{float(first):.6g}, then {float(second):.6g}. Does it sample outside pyro.sample, or hide a "
            "site? Pass the whole model"
        )


def unblocked(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model without the ``poutine.block`` and init strategies around it; other handlers stay.

    A guide for a mixture is made from the model with its allocations blocked; the symmetry is the whole
    model's.
    """
    kept = []
    fn = model
    while True:
        inner = fn.func if isinstance(fn, _bound_partial) else fn
        if not (isinstance(inner, partial) and inner.func is _context_wrap):
            break
        messenger, fn = inner.args
        if not isinstance(messenger, BlockMessenger | InitMessenger):
            kept.append(messenger)
    for messenger in reversed(kept):
        fn = messenger(fn)
    return fn


def _in_double(model: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module in double precision. A ``PyroModule`` has its parameters in the store, and stays."""
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        return copy.deepcopy(model).double()
    return model


@contextmanager
def own_params() -> Iterator[None]:
    """Keep parameters that are made here out of the user's store.

    Pyro's own ``scope`` would take from parameters what SVI needs of them.
    """
    store = pyro.get_param_store()
    before = set(store.keys())
    try:
        yield
    finally:
        for name in set(store.keys()) - before:
            del store[name]


def _to_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype, for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
