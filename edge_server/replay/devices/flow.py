"""Interface of a link's rate over virtual time; fixed shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Flow(Protocol):
    """Rate over virtual time in bit/s: a `Curve`, or random draws."""

    @property
    def most(self) -> float:
        """Return an upper bound on the rate."""
        ...

    def at(self, t: float) -> float:
        """Return the rate at second `t`."""
        ...

    def integral(self, t0: float, t1: float) -> float:
        """Return the bits between two seconds."""
        ...

    def finish_time(self, t0: float, amount: float) -> float:
        """Return the earliest second by which `amount` bits since `t0` have passed; infinite if never."""
        ...


@dataclass(frozen=True)
class FlowShare:
    """Fixed share of a flow."""

    flow: Flow
    share: float

    @property
    def most(self) -> float:
        return self.share * self.flow.most

    def at(self, t: float) -> float:
        return self.share * self.flow.at(t)

    def integral(self, t0: float, t1: float) -> float:
        return self.share * self.flow.integral(t0, t1)

    def finish_time(self, t0: float, amount: float) -> float:
        return self.flow.finish_time(t0, amount / self.share)
