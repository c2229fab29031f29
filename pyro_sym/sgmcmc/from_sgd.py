"""Learning rate and momentum of an SGD optimiser, for kernels whose cold limit it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from pyro.optim.optim import PyroOptim

__all__ = ["Optimizer", "check_sgd", "sgd_arguments"]

Optimizer: TypeAlias = (
    torch.optim.Optimizer | PyroOptim | tuple[type[torch.optim.Optimizer], Mapping[str, Any]]
)


def sgd_arguments(
    lr: float | None, momentum: float | None, optimizer: Optimizer | None, num_data: int
) -> tuple[float, float]:
    """Learning rate and momentum (by default 0), from numbers or from an SGD optimiser as it is set now.

    Raises a ``TypeError`` if neither is given, or it is another optimiser, and a ``ValueError`` if both are,
    or it has settings that no kernel is the noisy version of, or groups that differ. ``num_data`` is for
    messages.
    """
    if optimizer is None:
        if lr is None:
            raise TypeError("from_sgd needs the learning rate; pass lr=, or optimizer=torch.optim.SGD(…)")
        return lr, 0.0 if momentum is None else momentum
    if lr is not None or momentum is not None:
        given = "lr" if lr is not None else "momentum"
        raise ValueError(f"both optimizer and {given} are given; pass the optimizer alone, which has its own")
    groups = _param_groups(optimizer)
    for name in ("lr", "momentum"):
        values = [float(group[name]) for group in groups]
        if len(set(values)) > 1:
            raise ValueError(
                f"optimizer has parameter groups with different {name}, {values}, and a kernel has one for "
                "all sites; pass an optimizer with one group, or scale sites by a preconditioner"
            )
    lr, momentum = float(groups[0]["lr"]), float(groups[0]["momentum"])
    for group in groups:
        _refuse_others(group, momentum, num_data)
    return lr, momentum


def check_sgd(lr: float, momentum: float, num_data: int) -> None:
    """Refuse settings of SGD that are out of range."""
    if not 0 < lr < math.inf:
        raise ValueError(f"lr is {lr}; pass the learning rate of SGD, a finite number > 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; pass that of SGD, a number >= 0 and < 1")
    if not 1 <= num_data < math.inf:
        raise ValueError(f"num_data is {num_data}; pass the number of rows of the whole data set, >= 1")


def _param_groups(optimizer: Any) -> list[Mapping[str, Any]]:
    """The settings of an optimiser's groups, with defaults filled in."""
    if isinstance(optimizer, PyroOptim):
        if optimizer.pt_clip_args:
            raise ValueError(
                f"optimizer clips gradients ({optimizer.pt_clip_args}), which no kernel does; drop clip_args"
            )
        constructor, settings = optimizer.pt_optim_constructor, optimizer.pt_optim_args
    elif isinstance(optimizer, tuple) and len(optimizer) == 2:
        constructor, settings = optimizer
    else:
        if optimizer is torch.optim.SGD:
            raise TypeError(
                "optimizer is the class torch.optim.SGD; pass an instance, or (torch.optim.SGD, {'lr': …})"
            )
        if type(optimizer) is not torch.optim.SGD:
            raise _not_sgd(type(optimizer).__name__)
        return list(optimizer.param_groups)
    if constructor is not torch.optim.SGD:
        raise _not_sgd(getattr(constructor, "__name__", repr(constructor)))
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"the settings of optimizer are {settings!r}, by parameter; pass a dict, as "
            "a kernel has one learning rate for all sites"
        )
    return list(torch.optim.SGD([torch.zeros(1, requires_grad=True)], **settings).param_groups)


def _not_sgd(name: str) -> TypeError:
    return TypeError(
        f"optimizer is {name}; from_sgd is for torch.optim.SGD, the only optimiser that "
        "kernels are the noisy version of. For adaptive steps take a preconditioner, as RMSprop"
    )


def _refuse_others(group: Mapping[str, Any], momentum: float, num_data: int) -> None:
    if decay := float(group["weight_decay"]):
        raise ValueError(
            f"optimizer has weight_decay={decay:g}, which the model's prior stands for: put a Normal prior "
            f"of scale (num_data * weight_decay)**-0.5 = {(num_data * decay) ** -0.5:.4g} into the model and "
            "pass weight_decay=0"
        )
    if momentum and (dampening := float(group["dampening"])):
        raise ValueError(
            f"optimizer has dampening={dampening:g}; kernels have none. SGD with lr * (1 - dampening) and "
            "dampening=0 is the same after its first steps, so pass that"
        )
    for name, cure in (("nesterov", "plain momentum"), ("maximize", "a loss to minimise")):
        if group[name]:
            raise ValueError(f"optimizer has {name}=True, which no kernel has; pass {name}=False ({cure})")
