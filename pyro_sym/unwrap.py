"""What is inside of distributions, supports and transforms that wrap others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributions import Independent, constraints
from torch.distributions.transforms import IndependentTransform

__all__ = [
    "base_of",
    "is_plate",
    "is_real",
    "layers",
    "support_of_entries",
    "transform_of_entries",
    "without_event_dims",
]


def layers(fn: Any) -> Iterator[Any]:
    """A distribution, then what its masks, expansions, event dims and transforms wrap, down to the base."""
    yield fn
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
        yield fn


def base_of(fn: Any) -> Any:
    """The innermost of the :func:`layers` of a distribution."""
    *_, base = layers(fn)
    return base


def without_event_dims(fn: Any) -> Any:
    """A distribution before ``to_event``: batches of shape ``(*batch, *to_event)``."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def support_of_entries(support: Any) -> Any:
    """A support without the dims that it only repeats over."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_real(support: Any) -> bool:
    """Whether a support is all reals, in any number of dims."""
    return support_of_entries(support) is constraints.real


def transform_of_entries(transform: Any) -> Any:
    """A transform without the dims that it only repeats over."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform


def is_plate(fn: Any) -> bool:
    """Whether it is what a plate samples the numbers of its rows from."""
    return hasattr(fn, "subsample_size") and hasattr(fn, "size")
