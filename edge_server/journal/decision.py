"""Decision of a coordinator for one round, with the figures it follows from: whoever reads it can decide it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from shared.protocol.measurements import JOULES, Cost
from shared.protocol.messages import Allocated, Value

Source: TypeAlias = Literal["measured", "last_good", "profile", "default"]


class Figure(msgspec.Struct, frozen=True, array_like=True):
    """One figure that was decided from, and where it comes from.

    Attributes:
        value: In SI units; its name ends in them.
        source: `measured` since the last decision; `last_good`: before that; `profile`: what the plan says of the
            device; `default`: what the optimizer's options say of any device.
    """

    value: float
    source: Source


class Given(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one device was given, and why.

    Attributes:
        values: What its assignment says.
        figures: What that was decided from, by name.
        predicted: What its task should cost, under the names of what it will say that it cost.
        binding: What kept it from more: the name of a `Bound` of the optimizers, such as `time`, or
            `cluster`.
        multiplier: Of the limit that binds: how much the objective falls by one unit more of it.
    """

    values: dict[str, Value] = {}
    figures: dict[str, Figure] = {}
    predicted: Cost = Cost()
    binding: str = ""
    multiplier: float | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One round's decision.

    Attributes:
        limits: What held for all devices: seconds, joules, sizes of the model.
        ladder: Where there is a choice of ratios: each with the bytes that an update of it takes.
        devices: By name; those of the cohort.
        objective: What was minimised; None where nothing was.
        multiplier: Of what all devices share, such as bandwidth.
        feasible: Whether all limits could be met. If not, each device has the least there is, and the run goes on.
        enough: Of limits that could not be met: the smallest that would do, by name.
        term: In a run of several sites: of the coordinator, from 0; it only grows.
        coordinator: Likewise: the site that decided, for its own devices and others.
    """

    optimizer: str = ""
    limits: dict[str, float] = {}
    ladder: list[tuple[float, int]] = []
    devices: dict[str, Given] = {}
    objective: float | None = None
    multiplier: float | None = None
    feasible: bool = True
    enough: dict[str, float] = {}
    term: int = 0
    coordinator: str = ""

    @property
    def allocation(self) -> dict[str, dict[str, Value]]:
        """What an algorithm is handed."""
        return {device: dict(given.values) for device, given in self.devices.items()}


def kept_share(values: Mapping[str, Value]) -> float:
    """Return the share of the model that a device keeps by what it was given."""
    given = Allocated.of(values)
    return (1.0 if given.keep is None else given.keep) - (given.prune or 0.0)


def predicted_joules(decision: Decision | None) -> dict[str, float]:
    """Return the joules that a decision predicts of whole tasks, by device; who tells none has none."""
    found = dict[str, float]()
    for device, given in decision.devices.items() if decision else ():
        parts = [getattr(given.predicted, name) for name in JOULES]
        if given.predicted.compute_joules is not None:
            found[device] = math.fsum(one for one in parts if one is not None)
    return found


class OfTerm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One line of the journal of a run of several sites, about who decides and with whose joules.

    Attributes:
        term: Number of the coordinator's turn: that of site T modulo their number, in the plan's order.
        at: When, on the server's monotonic clock.
    """

    round: int
    term: int
    at: float | None = None


class TermBegan(OfTerm, frozen=True, kw_only=True):
    """This site takes no earlier term for valid from here on; `cause` says why, in a word."""

    cause: str = ""


class Pledged(OfTerm, frozen=True, kw_only=True):
    """This site put joules aside for a round's coordinator, before it told that."""

    joules: float


class Granted(OfTerm, frozen=True, kw_only=True):
    """What of a pledge came back: the devices of this site may spend it."""

    joules: float


class Coordinated(OfTerm, frozen=True, kw_only=True):
    """This site decided as coordinator, before it told anybody.

    Attributes:
        sites: The devices of each site that was decided for.
        decision: For all of them; None where the term was closed for this round without one.
        grants: To each site of whose pledge this decides; together at most what they pledged.
    """

    sites: dict[str, tuple[str, ...]] = {}
    decision: Decision | None = None
    grants: dict[str, float] = {}
