"""Distributions, supports and transforms without their wrappers."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ExpTransform, identity_transform

from pyro_sym.unwrap import (
    base_of,
    is_plate,
    is_real,
    layers,
    support_of_entries,
    transform_of_entries,
    without_event_dims,
)


def test_layers_of_a_distribution() -> None:
    normal = dist.Normal(torch.zeros(3), 1.0)
    masked = normal.mask(torch.tensor([True, False, True]))
    wrapped = dist.TransformedDistribution(masked.to_event(1), [ExpTransform()]).to_event(0)
    assert [type(layer).__name__ for layer in layers(wrapped)] == [
        "TransformedDistribution",
        "Independent",
        "MaskedDistribution",
        "Normal",
    ]
    assert base_of(wrapped) is normal and base_of(normal) is normal
    assert without_event_dims(normal.to_event(1)) is normal
    assert without_event_dims(wrapped) is wrapped


def test_supports_and_transforms_of_entries() -> None:
    positive = constraints.independent(constraints.independent(constraints.positive, 1), 1)
    assert support_of_entries(positive) is constraints.positive and not is_real(positive)
    assert is_real(constraints.real_vector) and is_real(constraints.real)
    assert transform_of_entries(biject_to(constraints.real_vector)) is identity_transform
    exponential = biject_to(constraints.positive)
    assert transform_of_entries(biject_to(positive)) == exponential != biject_to(positive)


def test_plates_are_told_from_other_sites() -> None:
    def model() -> None:
        with pyro.plate("rows", 5, subsample_size=2), pyro.plate("all", 3, dim=-2):
            pyro.sample("x", dist.Normal(0.0, 1.0))

    nodes = poutine.trace(model).get_trace().nodes
    assert [n for n, site in nodes.items() if site["type"] == "sample" and is_plate(site["fn"])] == [
        "rows",
        "all",
    ]
