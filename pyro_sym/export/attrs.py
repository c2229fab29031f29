"""The attributes of an export: plain values as JSON, which netCDF can hold; written and read here."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyro
import torch

from pyro_sym.draws.kernel_settings import kernel_settings

__all__ = ["as_json", "read_attr", "run_settings", "versions"]


def versions() -> dict[str, str]:
    """Versions of the packages that computed the result."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "pyro": pyro.__version__}
    try:
        return {**found, "pyro_sym": version("pyro-sym")}
    except PackageNotFoundError:  # run from a source tree
        return found


def run_settings(mcmc: Any) -> dict[str, Any]:
    """The kernel, its arguments, and the arguments of the run."""
    attrs: dict[str, Any] = {"kernel": type(mcmc.kernel).__name__}
    attrs["kernel_settings"] = kernel_settings(mcmc.kernel)
    run = ("num_chains", "num_samples", "warmup_steps", "thinning")
    attrs["run"] = {name: getattr(mcmc, name) for name in run if hasattr(mcmc, name)}
    sampling_time = getattr(mcmc, "sampling_time", None)
    if sampling_time is not None:
        attrs["sampling_time"] = float(sampling_time)
    return attrs


def as_json(attrs: Mapping[str, Any]) -> dict[str, str]:
    """Strings as they are, everything else as JSON: netCDF holds neither ``None`` nor a dict."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in attrs.items()}


def read_attr(data: Any, name: str, default: Any) -> Any:
    """Read an attribute that :func:`as_json` wrote from anything but a string."""
    return json.loads(data.attrs[name]) if name in data.attrs else default
