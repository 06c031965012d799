"""Decision records of a coordinator, with all inputs needed to reproduce them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from shared.protocol.measurements import JOULES, Cost
from shared.protocol.messages import AllocatedValues, Value

Source: TypeAlias = Literal["measured", "last_good", "profile", "default"]


class Figure(msgspec.Struct, frozen=True, array_like=True):
    """An input of a decision with its source.

    Attributes:
        value: In the SI unit that its name ends in.
        source: `measured` since the last decision; `last_good`: measured before that; `profile`: stated in the plan for
            the device; `default`: from the optimizer's options.
    """

    value: float
    source: Source


class DeviceDecision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decision for one device and its reasons.

    Attributes:
        values: Values of its assignment.
        figures: Inputs of the decision, by name.
        predicted: Predicted cost of its task, with the names of the reported cost.
        binding: Constraint that limits it: the name of an optimizer's `Bound`, such as `time`, or `cluster`.
        multiplier: Lagrange multiplier of that constraint: decrease of the objective per unit of slack.
    """

    values: dict[str, Value] = {}
    figures: dict[str, Figure] = {}
    predicted: Cost = Cost()
    binding: str = ""
    multiplier: float | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decision for one round.

    Attributes:
        limits: Limits shared by all devices: seconds, joules, model sizes.
        ladder: Candidate ratios with the bytes of an update, if ratios are discrete.
        devices: Decisions for the cohort, by name.
        objective: Minimised value; None without an objective.
        multiplier: Of the shared resource, such as bandwidth.
        feasible: Whether all limits could be met; if not, each device gets the minimum and the run continues.
        enough: Smallest sufficient values of limits that could not be met, by name.
        term: In a run of several sites, the coordinator's term from 0; it only grows.
        coordinator: In a run of several sites, the site that decided for itself and others.
    """

    optimizer: str = ""
    limits: dict[str, float] = {}
    ladder: list[tuple[float, int]] = []
    devices: dict[str, DeviceDecision] = {}
    objective: float | None = None
    multiplier: float | None = None
    feasible: bool = True
    enough: dict[str, float] = {}
    term: int = 0
    coordinator: str = ""

    @property
    def allocation(self) -> dict[str, dict[str, Value]]:
        """Assigned values by device, as an algorithm receives them."""
        return {device: dict(choice.values) for device, choice in self.devices.items()}


def keep_ratio(values: Mapping[str, Value]) -> float:
    """Return the share of the model that a device keeps under its assigned values."""
    allocation = AllocatedValues.of(values)
    return (1.0 if allocation.keep is None else allocation.keep) - (allocation.prune or 0.0)


def predicted_joules(decision: Decision | None) -> dict[str, float]:
    """Return the predicted joules of complete tasks by device; devices without a prediction are left out."""
    joules = dict[str, float]()
    for device, choice in decision.devices.items() if decision else ():
        parts = [getattr(choice.predicted, name) for name in JOULES]
        if choice.predicted.compute_joules is not None:
            joules[device] = math.fsum(part for part in parts if part is not None)
    return joules


class OfTerm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of records about coordination and joules shared between sites.

    Attributes:
        term: Number of the coordinator's term; site `term` modulo their number, in the plan's order, coordinates.
        at: On the server's monotonic clock.
    """

    round: int
    term: int
    at: float | None = None


class TermBegan(OfTerm, frozen=True, kw_only=True):
    """This site rejects earlier terms from now on; `cause` is one word."""

    cause: str = ""


class Pledged(OfTerm, frozen=True, kw_only=True):
    """This site reserved joules for a round's coordinator, recorded before it announces them."""

    joules: float


class Granted(OfTerm, frozen=True, kw_only=True):
    """Part of a pledge that came back; the devices of this site may spend it."""

    joules: float


class Coordinated(OfTerm, frozen=True, kw_only=True):
    """This site decided as coordinator, recorded before it announces the decision.

    Attributes:
        sites: Devices of each site that was decided for.
        decision: For all of them; None if the term was closed for this round without one.
        grants: Joules granted to each site that pledged; in total at most what was pledged.
    """

    sites: dict[str, tuple[str, ...]] = {}
    decision: Decision | None = None
    grants: dict[str, float] = {}
