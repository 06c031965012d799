"""One figure of a benchmark, with what it should be."""

from __future__ import annotations

import operator
from dataclasses import dataclass

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    Attributes:
        name: What was measured.
        value: How much.
        unit: Of the value.
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
