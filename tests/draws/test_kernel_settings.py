"""Which settings of a kernel are stored and exported; how they are exported is in ``test_conversion``."""

from __future__ import annotations

import json
from typing import Any

from pyro.infer import NUTS

from pyro_sym import BAOA, Cyclical
from pyro_sym.draws.kernel_settings import kernel_settings
from tests.catalogue import normals

model = normals({"m": ()})


class Wrapped(BAOA):
    """A kernel of a user's own, which passes its options on."""

    def __init__(self, model: Any, *, depth: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.depth = depth


def test_options_that_are_passed_on_are_settings_too() -> None:
    settings = kernel_settings(Wrapped(model, depth=3, step_size=Cyclical(0.1, 10).step_size, friction=2.0))
    assert settings["depth"] == 3 and settings["friction"] == 2.0 and settings["jit"] == "auto"
    assert settings["step_size"].startswith("Cyclical(") and settings["init_strategy"] == "init_to_uniform"
    assert not {"self", "model", "options", "center"} & set(settings)
    assert json.loads(json.dumps(settings)) == settings


def test_arguments_of_a_base_that_gets_none_are_no_settings() -> None:
    """Negative control: ``NUTS`` has a ``trajectory_length`` from ``HMC``, which it doesn't use."""
    kernel = NUTS(model)
    assert hasattr(kernel, "trajectory_length") and "trajectory_length" not in kernel_settings(kernel)
    assert kernel_settings(kernel)["step_size"] == 1
