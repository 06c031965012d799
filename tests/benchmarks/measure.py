"""Rows of a benchmark: a figure with what it should be, or the reason why it was not measured."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    Attributes:
        target: Such as `<= 20`; empty for a figure that is only told.
    """

    name: str
    value: float
    unit: str
    target: str = ""

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        if not self.target:
            return True
        sign, bound = self.target.split()
        return bool(COMPARE[sign](self.value, float(bound)))


@dataclass(frozen=True)
class NotRun:
    """What could not be measured here.

    Attributes:
        name: What would have been measured.
        reason: What is missing for it.
    """

    name: str
    reason: str


Row: TypeAlias = Figure | NotRun


def told(rows: Iterable[Row]) -> int:
    """Print the rows of a benchmark that was started alone; return its exit code, 1 if a target was missed."""
    figures = list(rows)
    for one in figures:
        if isinstance(one, NotRun):
            sys.stdout.write(f"{one.name}: not run: {one.reason}\n")
        else:
            verdict = "" if not one.target else "ok" if one.ok else "MISSED"
            sys.stdout.write(f"{one.name}: {one.value:.4g} {one.unit} {one.target} {verdict}\n")
    return 0 if all(isinstance(one, Figure) and one.ok for one in figures) else 1
