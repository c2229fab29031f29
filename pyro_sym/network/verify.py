"""Does the output of a module change under a symmetry of its state?"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_sym._private import tree_leaves, tree_map
from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import Symmetry, Values

__all__ = ["Replay", "tolerance"]

DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout | nn.FeatureAlphaDropout

# Relative to the largest output. In float64, sums in another order differ by some 1e-15 of it.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2}


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """The allowed change, relative to the largest output, of a network that computes in these dtypes."""
    return max((TOLERANCES.get(dtype, 0.1) for dtype in dtypes), default=TOLERANCES[torch.float64])


class Replay:
    """A module with a random state, in eval and in train mode.

    The module is modified, so pass a copy. Its dropout is switched off: a mask is invariant in distribution
    only.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.inputs: Any = (args, kwargs)
        self.values = {name: tensor.detach().clone() for name, tensor in self.state.items()}
        for part in module.modules():
            if isinstance(part, DROPOUTS):
                part.p = 0.0
            elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
                part.dropout = 0.0
        self.modes = [False]
        if self._repeats_in_training():
            self.modes.append(True)
        self._randomize()
        self.before = {mode: self.outputs(self.values, mode) for mode in self.modes}

    def _repeats_in_training(self) -> bool:
        try:
            first, second = (self.outputs(self.values, True, seed) for seed in range(2))
            if all(
                torch.allclose(a, b, 0.0, 0.0, equal_nan=True) for a, b in zip(first, second, strict=True)
            ):
                return True
            found = "its output is random, though its dropout modules are switched off"
        except (RuntimeError, ValueError, TypeError) as error:
            found = f"it raises {type(error).__name__}: {error}"
        warnings.warn(
            f"the symmetries of {type(self.module).__name__} were verified in eval mode only; in train mode "
            f"{found}",
            stacklevel=4,
        )
        return False

    def _randomize(self) -> None:
        """Draw state and inputs, because a network may be symmetric at zeros and ones only."""
        own, given = self.values, self.inputs
        parameters = {name for name, _ in self.module.named_parameters()}
        generic = {name: _normal(t) if name in parameters else _shifted(t) for name, t in own.items()}
        nearby = {name: _scaled(t) for name, t in own.items()}
        for values, inputs in ((generic, tree_map(_shifted, given)), (nearby, given)):
            self.values, self.inputs = values, inputs
            outputs = [leaf for mode in self.modes for leaf in self.outputs(values, mode)]
            if all(leaf.isfinite().all() for leaf in outputs):
                return
        raise SymmetryError(
            f"the output of {type(self.module).__name__} is not finite, neither at random parameters nor at "
            "1/2 to 3/2 times its own, so no symmetry can be verified; pass example inputs for which it is"
        )

    def outputs(self, values: Values, train: bool, seed: int = 0) -> list[Tensor]:
        """All tensors that the module returns."""
        for name, tensor in self.state.items():
            tensor.copy_(values[name])
        self.module.train(train)
        torch.manual_seed(seed)
        args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.inputs)
        leaves = tree_leaves(self.module(*args, **kwargs))
        return [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]

    def change(self, symmetry: Symmetry, element: Any) -> float:
        """The largest change of an output under the element, relative to the largest entry of that output."""
        images = symmetry.act(element, self.values)
        changes = [torch.zeros((), dtype=torch.float64)]
        for mode, before in self.before.items():
            for a, b in zip(before, self.outputs(images, mode), strict=True):
                if a.numel():
                    largest = a.abs().max().double() if a.is_floating_point() else torch.tensor(1.0)
                    difference = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max()
                    changes.append(difference / largest.clamp_min(1e-300))
        return float(torch.stack(changes).max())


def _normal(tensor: Tensor) -> Tensor:
    """Normal weights that keep the scale of their inputs, and normal biases."""
    if not tensor.is_floating_point():
        return tensor
    fan_in = tensor.numel() / tensor.shape[0] if tensor.dim() > 1 else 1.0
    return torch.randn_like(tensor) / fan_in**0.5


def _shifted(leaf: Any) -> Any:
    """Other numbers; positive and infinite ones, as in masks, stay so."""
    return leaf + _around_one(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _scaled(tensor: Tensor) -> Tensor:
    return tensor * _around_one(tensor) if tensor.is_floating_point() else tensor


def _around_one(tensor: Tensor) -> Tensor:
    return 0.5 + torch.rand_like(tensor)
