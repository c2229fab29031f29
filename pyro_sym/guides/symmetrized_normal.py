"""A mean-field normal guide averaged over a symmetry, in one class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_feasible
from torch import Tensor

from pyro_sym.guides.choose import Estimator
from pyro_sym.guides.symmetrized import AutoSymmetrized
from pyro_sym.symmetry.base import Symmetry

__all__ = ["AutoSymmetrizedNormal"]


class AutoSymmetrizedNormal(AutoSymmetrized):
    """A mean-field normal guide averaged over a symmetry.

    This is :class:`~pyro_sym.AutoSymmetrized` around Pyro's ``AutoNormal``.

    Args:
        model: a Pyro model.
        symmetry: a symmetry of the model.
        init_loc_fn: a per-site initialisation, as for ``AutoNormal``.
        init_scale: initial standard deviation of each unconstrained coordinate.
        create_plates: a function of the model's arguments that makes its subsampled plates.
        estimator: as for :class:`~pyro_sym.AutoSymmetrized`.
        num_elements: as for :class:`~pyro_sym.AutoSymmetrized`.
        tolerance: as for :class:`~pyro_sym.AutoSymmetrized`.

    Raises:
        ValueError: as :class:`~pyro_sym.AutoSymmetrized` does, here and on the first call.

    Example:
        >>> def model():
        ...     pyro.sample("locs", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        >>> guide = AutoSymmetrizedNormal(model, Permutation({"locs": -1}))
        >>> guide()["locs"].shape
        torch.Size([3])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        symmetry: Symmetry,
        *,
        init_loc_fn: Callable[..., Tensor] = init_to_feasible,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
        estimator: Estimator = "auto",
        num_elements: int = 16,
        tolerance: float | None = 1e-6,
    ) -> None:
        guide = AutoNormal(model, init_loc_fn=init_loc_fn, init_scale=init_scale, create_plates=create_plates)
        super().__init__(guide, symmetry, estimator=estimator, num_elements=num_elements, tolerance=tolerance)
