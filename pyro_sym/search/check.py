"""Is it a symmetry of the model? Compare the model's log joint at values and at their images."""

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
from pyro.poutine.messenger import _bound_partial, _context_wrap
from torch import Tensor, nn
from torch.utils._pytree import tree_map

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

    for all generators :math:`g` of the group and three random elements; of more than 32 generators it takes
    24, evenly spread, and nine random elements. If the bounds of a support differ from entry to entry, as
    those of a uniform prior may, values near the bounds are tried too. Enumerable discrete sites are summed
    out first. Torch's global random state is left as it was.

    **Rounding.** The log joint is compared element by element: by rows of the data, and by entries of sites.
    Elements that change by no more than rounding are left out, and so are terms whose elements only change
    places. What is left has to make up for itself, within what rounding allows to it alone. So a large or
    strongly scaled likelihood does not hide a break in a prior. The check runs in float64 where the model
    allows (a plain module does, as a copy), and in the model's own precision otherwise. In float64, casts of
    the model to a lower precision are casts to float64. Where an element seems to change, its rounding is
    measured by second differences at the same point. Breaks below 1e-12 of an element, in single precision
    below 4e-6, are not seen.

    **Rows.** If plates are subsampled, all their rows are shown once, in random windows, at a prior draw. The
    windows have more rows than ``subsample_size`` where the model takes them and memory allows. Each window
    is tried on all generators or, if those are too many, on up to 20 random elements, each of which misses a
    break with probability 1/2 at most. All windows together take at most 6000 evaluations and
    5e11 floating point operations; if some windows have to be left out, a warning says how many rows were
    seen. Rows that the arguments don't hold, as those of a data loader, are not seen.

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

    Warns:
        UserWarning: if not all rows of subsampled plates were looked at.

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
            return compute(_without_casts(_in_double(model), double(args), double(kwargs)), torch.float64)
        return compute(Program(model, args, kwargs), torch.float32)


def check(program: Program, dtype: torch.dtype, symmetry: Group) -> None:
    """Try a symmetry on the evidence of prior draws and all rows."""
    evidence = Evidence(program, dtype)
    refutation = evidence.refute(symmetry)
    if refutation:
        raise SymmetryError(str(named(refutation)))
    if evidence.unseen:
        warnings.warn(f"{symmetry!r} is not checked on all rows: {evidence.unseen}", stacklevel=4)


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


def _without_casts(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The program of a model whose casts to a lower precision, if it has any, are casts to float64.

    Sums in lower precision depend on the order of their terms, by more than the rest of a model in float64.
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
