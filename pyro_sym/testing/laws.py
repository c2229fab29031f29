"""What all checks share: laws that are tried one after the other, under one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym._random import fork_random_state

__all__ = ["FAILURE_RATE", "Z_LIMIT", "compare", "require", "try_laws"]

#: The chance that a random comparison fails by bad luck, and the standard errors of a normal mean for it.
FAILURE_RATE = 2e-5
Z_LIMIT = 4.27


def try_laws(subject: str, laws: Iterable[Callable[..., None]], seed: int, *args: Any) -> None:
    """Try laws in turn; an error of the user's own code gets a note on what was tried."""
    with fork_random_state():
        torch.manual_seed(seed)
        for law in laws:
            try:
                law(*args)
            except AssertionError:
                raise
            except Exception as error:
                error.add_note(f"{subject} was tried on: {(law.__doc__ or law.__name__).splitlines()[0]}")
                raise


def require(holds: bool | Tensor, message: str) -> None:
    """Raise an ``AssertionError``, with ``python -O`` as well."""
    if not holds:
        raise AssertionError(message)


def compare(law: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Two sides of a law by name, equal up to rounding."""
    for name, expected in right.items():
        value = left[name]
        require(
            value.shape == expected.shape,
            f"{law}: {name!r} has shape {tuple(value.shape)}, not {tuple(expected.shape)}",
        )
        if not expected.numel():
            continue
        error = float((value.double() - expected.double()).abs().max())
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        allowed = 1_000 * eps * (1 + float(expected.double().abs().max()))
        require(error <= allowed, f"{law}: {name!r} is off by {error:.3g} (rounding allows {allowed:.1g})")
