"""Every example in a docstring runs, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import pkgutil
from types import ModuleType
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal

import pyro_sym

NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "math": math,
    "pyro": pyro,
    "dist": dist,
    "MCMC": MCMC,
    "NUTS": NUTS,
    "SVI": SVI,
    "Trace_ELBO": Trace_ELBO,
    "AutoNormal": AutoNormal,
    **{name: getattr(pyro_sym, name) for name in pyro_sym.__all__},
}
MODULES = [m.name for m in pkgutil.walk_packages(pyro_sym.__path__, "pyro_sym.")]
# Abstract classes, results and errors: the functions that return or raise them have the example.
WITHOUT_EXAMPLE = {
    "Alignment",
    "DivergenceError",
    "FiniteGroup",
    "Group",
    "NoDensityError",
    "Run",
    "StochasticGradientKernel",
    "Symmetry",
    "SymmetryError",
    "SymmetryGain",
    "dataset",
    "Likelihood",
    "Prediction",
    "Report",
    "SteinDiscrepancy",
    "Uncertainty",
}


def examples(module: ModuleType) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(module, extraglobs=NAMESPACE)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(module):
        report: list[str] = []
        assert runner.run(test, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("namespace", [pyro_sym, pyro_sym.nn, pyro_sym.diagnostics, pyro_sym.testing])
def test_every_public_name_has_an_example(namespace: ModuleType) -> None:
    members = {name: getattr(namespace, name) for name in namespace.__all__}
    public = {n: v for n, v in members.items() if inspect.isclass(v) or inspect.isfunction(v)}
    lacking = {name for name, value in public.items() if ">>>" not in (value.__doc__ or "")}
    assert lacking <= WITHOUT_EXAMPLE
    assert all(value.__doc__ for value in public.values())
