"""All rows of subsampled plates: windows that cover them, and models that show many rows at a time.

A subsampled plate shows one window of rows after another. Models that accept any number of rows need fewer
and larger windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.subsample_messenger import SubsampleMessenger
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pyro_sym._private import TorchDispatchMode, replaced_in_this_thread, returns_view, tree_leaves
from pyro_sym.model.program import Program, SubsampledPlate

__all__ = ["Window", "Work", "blocks", "showing", "widened", "windows"]

Window = Mapping[str, Tensor]
"""Row numbers, by subsampled plate."""

# The largest tensor that a widened model may make; a computation holds a few of that size at a time.
MAX_ELEMENTS = 2**22


def blocks(plate: SubsampledPlate, order: Tensor | None = None) -> list[Tensor]:
    """Row numbers in blocks of ``subsample_size`` that cover a plate; the last one may overlap another."""
    rows = torch.arange(plate.size, device=plate.device) if order is None else order
    last = plate.size - plate.subsample_size
    return [rows[s : s + plate.subsample_size] for s in [*range(0, last, plate.subsample_size), last]]


def windows(plates: Mapping[str, SubsampledPlate]) -> Iterator[Window]:
    """Windows of successive rows that cover all rows of all plates."""
    for several in itertools.product(*map(blocks, plates.values())):
        yield dict(zip(plates, several, strict=True))


@contextmanager
def showing(rows: Mapping[str, int]) -> Iterator[None]:
    """Have subsampled plates that this thread makes show another number of rows.

    ``rows`` is by plate. A handler can't do this: Pyro compares the number of indices with the model's
    ``subsample_size``.
    """

    def resizing(original: Callable[..., Any]) -> Callable[..., Any]:
        def resized(
            name: str, size: Any = None, subsample_size: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            subsample_size = None if subsample_size is None else rows.get(name, subsample_size)
            return original(name, size, subsample_size, *args)

        return resized

    with replaced_in_this_thread(SubsampleMessenger, "_subsample", resizing):
        yield


class Work(TorchDispatchMode):
    """Counts the work of a computation, the same on all machines.

    ``operations`` are the floating point operations of products, plus one for every number that is written;
    ``largest`` is the number of elements of the largest tensor that is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.largest = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not returns_view(func):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self.operations += made.numel()
                    self.largest = max(self.largest, made.numel())
        if func.overloadpacket in flop_registry:
            self.operations += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def widened(program: Program, prepare: Callable[[Program], Callable[[], Any]]) -> tuple[Program, int]:
    """A model whose subsampled plates show more rows at a time, as many as memory allows.

    ``prepare`` returns a function that evaluates a program once. Returns the program, the given one if that
    function fails on more rows, and the operations of an evaluation.
    """
    run = prepare(program)
    with Work() as work:
        run()
    factor = MAX_ELEMENTS / work.largest
    rows: dict[str, int] = {}
    for name, plate in program.plates.items():
        if factor < 2:
            break
        rows[name] = min(plate.size, math.floor(plate.subsample_size * factor))
        factor *= plate.subsample_size / rows[name]
    if not rows:
        return program, work.operations

    def model(*args: Any, **kwargs: Any) -> Any:
        with showing(rows):
            return program.model(*args, **kwargs)

    try:
        wide = Program(model, program.args, program.kwargs, init_strategy=program.init_strategy)
        run = prepare(wide)
        with Work() as wider:
            run()
    except Exception:  # a model may rely on its number of rows in any way
        return program, work.operations
    return wide, wider.operations
