"""Importing the package changes nothing for anybody else, and is quick."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, logging, sys, time, warnings
import numpy, torch, pyro, random
import pyro.infer.autoguide

def state():
    return {
        "torch validation": torch.distributions.Distribution._Distribution__validate_args
            if hasattr(torch.distributions.Distribution, "_Distribution__validate_args")
            else torch.distributions.Distribution._validate_args,
        "pyro validation": (pyro.poutine.util.is_validation_enabled(),
        pyro.infer.util.is_validation_enabled()), "pyro distributions validation":
        pyro.distributions.is_validation_enabled(), "dtype": str(torch.get_default_dtype()),
        "torch rng": torch.random.get_rng_state().tolist(),
        "numpy rng": [str(part) for part in numpy.random.get_state()],
        "python rng": str(random.getstate()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "filters": [str(f) for f in warnings.filters],
        "levels": {n: logging.getLogger(n).level for n in ("", "pyro", "torch", "arviz")},
        "handlers": len(logging.getLogger().handlers),
        "params": sorted(pyro.get_param_store().keys()),
        "stack": len(pyro.poutine.runtime._PYRO_STACK),
        "printoptions": str(numpy.get_printoptions()),
    }

before = state()
start = time.perf_counter()
import pyro_sym
seconds = time.perf_counter() - start
after = state()
changed = [k for k in before if before[k] != after[k]]
heavy = [m for m in ("arviz", "arviz_base", "xarray", "matplotlib", "pandas", "sklearn") if m in sys.modules]
print(json.dumps({"changed": changed, "heavy": heavy, "seconds": seconds}))
"""


def test_importing_changes_nothing_global() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["changed"] == []
    assert report["heavy"] == [], "ArviZ and what it brings are imported on the first export only"
