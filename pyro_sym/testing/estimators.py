"""The contract of an orbit average: which side of the exact one it is on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_sym.guides.average import Enumeration, OrbitAverage, Run
from pyro_sym.guides.choose import Estimator
from pyro_sym.guides.symmetrized import AutoSymmetrized
from pyro_sym.search.check import own_params
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.testing.laws import Z_LIMIT, require, try_laws

__all__ = ["check_estimator_contract"]


def check_estimator_contract(
    estimator: Estimator | type[OrbitAverage],
    guide: Callable[..., Any],
    symmetry: Symmetry,
    *args: Any,
    num_elements: int = 4,
    num_samples: int = 300,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    r"""Check that an orbit average keeps the contract of :class:`~pyro_sym.guides.average.OrbitAverage`.

    At draws :math:`\omega` of the guide, with the exact average :math:`\log q^G(\omega)` by enumeration,

    .. math::

        \mathbb E[\texttt{bound}] \ge \mathbb E \left[ \log q^G(\omega) - \log q(\omega) \right] \ge
        \mathbb E[\texttt{unbiased}],

    within 4.27 standard errors of the differences: the first is what makes the ELBO a lower bound on the log
    evidence, the second what makes the two a bracket. There is a finite number for each draw, and a finite
    gradient of the ELBO for the parameters. Try a guide whose units are
    apart and one whose units overlap: an average that forgets elements is right in one of the two.

    Args:
        estimator: a subclass of :class:`~pyro_sym.guides.average.OrbitAverage`, or the name of one of the
            package's own, as :class:`~pyro_sym.AutoSymmetrized` takes it.
        guide: a guide that has not been run, such as ``AutoNormal(model)``.
        symmetry: a symmetry of the model, small enough to be listed.
        *args: the model's positional arguments.
        num_elements: :math:`K`.
        num_samples: number of draws.
        seed: of draws and elements.
        **kwargs: the model's keyword arguments.

    Raises:
        AssertionError: if the contract is broken; the message says how, and by how much.
        SymmetryError: if the group is too large to be listed.

    Example:
        >>> from pyro_sym import testing
        >>> def model():
        ...     pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        >>> symmetry = Permutation({"locs": -1})
        >>> testing.check_estimator_contract("uniform", AutoNormal(model), symmetry)
    """

    def hold() -> None:
        """Draws of the guide."""
        average = AutoSymmetrized(
            guide, symmetry, estimator=estimator, num_elements=num_elements, tolerance=None
        )
        with own_params():
            _compare_with_enumeration(average, num_samples, args, kwargs)
            _have_gradients(average, args, kwargs)

    try_laws(_name(estimator), [hold], seed)


def _name(estimator: Estimator | type[OrbitAverage]) -> str:
    return estimator if isinstance(estimator, str) else estimator.__name__


def _compare_with_enumeration(
    symmetrised: AutoSymmetrized, num_samples: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Which side of the exact average both halves are on."""
    own, count = _name(symmetrised.estimator), symmetrised.num_elements
    with torch.no_grad():
        run = symmetrised.draw(num_samples, *args, **kwargs)
        exact = Enumeration(symmetrised.guide, symmetrised.symmetry, "exact").bound(run, count)
        average = symmetrised.average
        upper, lower = (_checked(own, half, run, count) for half in (average.bound, average.unbiased))
    for half, excess, wrong in (
        ("bound", upper - exact, "below the exact average: an ELBO with it may exceed the log evidence"),
        ("unbiased", exact - lower, "above the exact average: gains with it may lack the upper half"),
    ):
        mean = float(excess.mean())
        # Rounding, of single precision, is beside the standard error.
        allowed = Z_LIMIT * float(excess.std()) / math.sqrt(num_samples) + 1e-4
        require(mean >= -allowed, f"{own}: {half}() is {-mean:.4g} nats (± {allowed:.1g}) {wrong}")


def _have_gradients(symmetrised: AutoSymmetrized, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The gradients of an ELBO, if the guide carries its model."""
    if symmetrised.model is None:
        return
    with poutine.trace(param_only=True) as traced:
        loss = Trace_ELBO().differentiable_loss(symmetrised.model, symmetrised, *args, **kwargs)
    params = {name: node["value"].unconstrained() for name, node in traced.trace.nodes.items()}
    gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    for name, gradient in zip(params, gradients, strict=True):
        require(
            gradient.isfinite().all(),
            f"{_name(symmetrised.estimator)}: the ELBO's gradient for parameter {name!r} is not finite",
        )


def _checked(own: str, half: Callable[[Run, int], Tensor], run: Run, count: int) -> Tensor:
    values = half(run, count)
    shape = run.draws.own.shape
    require(
        values.shape == shape and values.isfinite().all(),
        f"{own}: {half.__name__}() has to give a finite number a draw, of shape {tuple(shape)}; it gives "
        f"shape {tuple(values.shape)}, {int((~values.isfinite()).sum())} of them not finite",
    )
    return values
