"""What an export says of its run in attributes, which hold JSON."""

from __future__ import annotations

import json
from typing import Any

from pyro_sym.diagnostics.temperatures import ALL_SITES

__all__ = ["function_names", "kernel_temperature", "unconstrained_sizes"]


def function_names(data: Any) -> list[str]:
    """The variables that are functions of draws."""
    names: list[str] = json.loads(data.attrs.get("functions", "[]"))
    return names


def unconstrained_sizes(data: Any) -> dict[str, int]:
    """How many unconstrained values each latent site has, and all of them together."""
    sizes: dict[str, int] = json.loads(data.attrs.get("unconstrained_sizes", "{}"))
    return {**sizes, ALL_SITES: sum(sizes.values())} if sizes else {}


def kernel_temperature(data: Any) -> float | None:
    """The temperature that the kernel was given, unless it is a schedule."""
    value = json.loads(data.attrs.get("kernel_settings", "{}")).get("temperature")
    return float(value) if isinstance(value, int | float) else None
