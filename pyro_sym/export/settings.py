"""What is said of a run in attributes: plain values that JSON, and so netCDF, can hold."""

from __future__ import annotations

import inspect
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyro
import torch

from pyro_sym.infer.skeleton import Options

__all__ = ["as_json", "run_settings", "versions"]

# Arguments of kernels that are no settings, or too large to repeat.
NO_SETTINGS = {"self", "model", "potential_fn", "initial_params", "transforms", "options", "center"}


def versions() -> dict[str, str]:
    """Of what computed the result."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "pyro": pyro.__version__}
    try:
        return {**found, "pyro_sym": version("pyro-sym")}
    except PackageNotFoundError:  # run from a source tree
        return found


def run_settings(mcmc: Any) -> dict[str, Any]:
    """The kernel, its arguments, and how it was run.

    A kernel keeps what it was given under the names of its arguments, Pyro's and this package's alike; what a
    kernel of Pyro adapts, as ``step_size``, is shown as adapted.
    """
    kernel = mcmc.kernel
    names = {*inspect.signature(type(kernel).__init__).parameters, *Options.__annotations__} - NO_SETTINGS
    settings = {name: _plain(getattr(kernel, name)) for name in sorted(names) if hasattr(kernel, name)}
    attrs: dict[str, Any] = {"kernel": type(kernel).__name__, "kernel_settings": settings}
    run = ("num_chains", "num_samples", "warmup_steps", "thinning")
    attrs["run"] = {name: getattr(mcmc, name) for name in run if hasattr(mcmc, name)}
    sampling_time = getattr(mcmc, "sampling_time", None)
    if sampling_time is not None:
        attrs["sampling_time"] = float(sampling_time)
    return attrs


def _plain(value: Any) -> Any:
    """A setting as JSON has it: numbers and words as they are, anything else by its name."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):  # as temperatures by chain
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_dataclass(value):  # schedules and preconditioners, whose repr is how they are made
        return repr(value)
    if inspect.ismethod(value) and is_dataclass(value.__self__):
        return f"{value.__self__!r}.{value.__name__}"
    return getattr(value, "__qualname__", type(value).__qualname__)


def as_json(attrs: Mapping[str, Any]) -> dict[str, str]:
    """Strings as they are, everything else as JSON: netCDF holds neither ``None`` nor a dict."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in attrs.items()}
