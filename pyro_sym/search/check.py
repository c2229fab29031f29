"""Is a group a symmetry of the model? Compare the log joint at values and at their images."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor, nn

from pyro_sym._private import tree_map, unwrapped
from pyro_sym._random import fork_random_state
from pyro_sym.errors import SymmetryError
from pyro_sym.model.double_precision import CastsToDouble, default_dtype
from pyro_sym.model.program import Program
from pyro_sym.search.evidence import Evidence, named
from pyro_sym.symmetry.base import Group

__all__ = ["check_symmetry", "unblocked"]

T = TypeVar("T")


def check_symmetry(model: Callable[..., Any], symmetry: Group, *args: Any, **kwargs: Any) -> None:
    r"""Check that a model's log joint does not change under a symmetry.

    At three prior draws :math:`\theta`, with the same minibatch on both sides, the check asks for

    .. math::

        \log p(g \cdot \theta, D) = \log p(\theta, D)

    for all generators :math:`g` of the group and three random elements (of a continuous group, for elements
    whose products are dense in it); if there are more than 32
    generators, for 24 of them, evenly spaced, and nine random elements. If the bounds of a support differ
    from entry to entry, as those of a uniform prior may, values near the bounds are tried too. Enumerable
    discrete sites are summed out first. Torch's global random state is restored.

    **Rounding.** The log joint is compared element by element: by rows of the data, and by entries of sites.
    Elements that change by no more than rounding are ignored, and so are terms whose elements are only
    permuted. The changes of all others must cancel, within the rounding of those elements alone. So a large
    or strongly scaled likelihood does not hide a break in a prior. The check runs in float64 if the model
    can (a plain module can, as a copy), and in the model's own precision otherwise. In float64, casts inside
    the model to a lower precision become casts to float64. Where an element seems to change, its rounding is
    measured by second differences at the same point. Breaks below 1e-12 of an element, in single precision
    below 4e-6, are not detected.

    **Rows.** If plates are subsampled, every row is used once, in random windows, at a prior draw. The
    windows have more rows than ``subsample_size`` if the model and memory allow. Each window is tried on all
    generators or, if those are too many, on up to 20 random elements, each of which misses a break with
    probability 1/2 at most. All windows together take at most 6000 evaluations and 5e11 floating point
    operations; if that is too few for all windows, a warning says how many rows were checked. Rows that the
    arguments don't hold, as those of a data loader, can't be checked.

    Args:
        model: a Pyro model; a ``poutine.block`` around it is ignored.
        symmetry: the claimed symmetry, finite or not.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Raises:
        SymmetryError: if the log joint changes: the message names the generator, the difference, and the
            sites whose terms moved; or if the symmetry can't act on the model's sites.
        ValueError: if a latent site is discrete and can't be summed out, or no prior draw has a finite log
            joint.

    Warns:
        UserWarning: if not all rows of subsampled plates were checked.

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
    """Compute in float64 if the model runs in it, else in its own precision; restore the random state."""
    model = unblocked(model)
    with torch.no_grad(), fork_random_state():
        # A model that holds tensors in single precision fails in float64. An error of another kind is raised
        # again below.
        with suppress(RuntimeError), default_dtype(torch.float64), own_params():
            double = partial(tree_map, _to_double)
            return compute(_without_casts(_in_double(model), double(args), double(kwargs)), torch.float64)
        return compute(Program(model, args, kwargs), torch.float32)


def check(program: Program, dtype: torch.dtype, symmetry: Group) -> None:
    """Raise if prior draws or rows of the data refute a symmetry."""
    evidence = Evidence(program, dtype)
    refutation = evidence.refute(symmetry)
    if refutation:
        raise SymmetryError(str(named(refutation)))
    if evidence.unseen:
        warnings.warn(f"{symmetry!r} is not checked on all rows: {evidence.unseen}", stacklevel=4)


def unblocked(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model without the ``poutine.block`` and init strategies around it; other handlers stay.

    A guide for a mixture is made from the model with its allocations blocked, but the symmetry is one of the
    whole model.
    """
    kept = []
    fn = model
    while (outer := unwrapped(fn)) is not None:
        messenger, fn = outer
        if not isinstance(messenger, BlockMessenger | InitMessenger):
            kept.append(messenger)
    for messenger in reversed(kept):
        fn = messenger(fn)
    return fn


def _in_double(model: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module in double precision; not of a ``PyroModule``, whose parameters are in the store."""
    if isinstance(model, nn.Module) and not isinstance(model, PyroModule):
        return copy.deepcopy(model).double()
    return model


def _without_casts(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The program of a model, its casts to a lower precision replaced by casts to float64.

    Sums in lower precision depend on the order of their terms by more than the rounding of float64.
    """
    with CastsToDouble() as casts:
        program = Program(model, args, kwargs)
    if not casts.found:
        return program

    def in_double(*args: Any, **kwargs: Any) -> Any:
        with CastsToDouble():
            return model(*args, **kwargs)

    return Program(in_double, args, kwargs)


@contextmanager
def own_params() -> Iterator[None]:
    """Delete the parameters created inside from Pyro's store afterwards.

    Pyro's own ``scope`` would drop from the user's parameters what SVI needs.
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
