"""What a study is: numbers first, tables and figures made of the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from matplotlib.figure import Figure

Size = Literal["smoke", "full"]
Results = dict[str, Any]  # what JSON can hold


@dataclass(frozen=True)
class Table:
    """A table of results.

    Attributes:
        caption: one sentence: what is shown, of how many seeds, and what the errors are.
        header: names of the columns, the first of which names the rows.
        rows: cells as they are to be printed.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table for the docs, its numbers flush right."""
        rule = [":--"] + ["--:"] * (len(self.header) - 1)
        lines = [" | ".join(cells) for cells in (self.header, rule, *self.rows)]
        return f"{self.caption}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"

    def text(self) -> str:
        """The table for a terminal."""
        cells = [self.header, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        lines = [
            "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(row))
            for row in (list(zip(row, widths, strict=True)) for row in cells)
        ]
        return "\n".join([self.caption, *lines])


class Study(Protocol):
    """A module of this package that is a study.

    Its docstring says what is asked, after which paper, and what was changed; the docs print it.
    """

    TITLE: str

    def run(self, size: Size) -> Results:
        """Compute all numbers, printing progress; ``"smoke"`` shows in a minute or two that it works."""
        ...

    def findings(self, results: Results) -> list[str]:
        """What the numbers say, a sentence each, with the numbers; of a claim that does not hold, that."""
        ...

    def tables(self, results: Results) -> list[Table]:
        """The tables, of the results alone."""
        ...

    def figure(self, results: Results) -> Figure:
        """The figure, of the results alone, legible at 700 pixels."""
        ...


def mean_and_error(values: Sequence[float], decimals: int = 3) -> str:
    """Mean, and its standard error over seeds where there are several."""
    mean = f"{np.mean(values):.{decimals}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / math.sqrt(len(values)):.{decimals}f}"
