"""What a run's journal teaches of its devices: their order, their last good figures, how far predictions were off.

All of it follows from the records, so that a server that was killed decides as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from edge_server.decision import Decision, Figure, Given
from edge_server.plausible import plausible
from edge_server.store.base import AnyRecord, CostSettled, Measured, RoundOpened, UpdateAccepted
from shared.measures import Cost, StepCost

WEIGHT, MOST_OFF = 0.5, 4.0
"""Of the newest error among the earlier ones; and the factor beyond which a prediction is not put right."""

LEAST_BYTES = 4096
"""An upload of less tells the delay of the link, not its rate."""


@dataclass(frozen=True)
class Task:
    """A task that was told, and what it cost.

    Attributes:
        round: Which.
        given: What had been decided; None where nothing was.
        cost: What the device says; of an update that is not settled yet, without its upload.
    """

    round: int
    given: Given | None
    cost: Cost

    @property
    def up_bits_per_s(self) -> float | None:
        """Return what the device's whole link carried in the upload, of which it may have had but a share."""
        seconds, size = self.cost.upload_s, self.cost.bytes_up
        if not seconds or not size or size < LEAST_BYTES:
            return None
        values = self.given.values if self.given else {}
        share = values.get("share") if "up_bits_per_s" in values else None  # else it had the link as it was
        return 8 * size / seconds / (share if isinstance(share, float) and 0 < share < 1 else 1.0)

    @property
    def down_bits_per_s(self) -> float | None:
        """Return what the link carried in the download."""
        seconds, size = self.cost.download_s, self.cost.bytes_down
        return 8 * size / seconds if seconds and size and size >= LEAST_BYTES else None


@dataclass
class Experience:
    """Adds a journal up.

    Attributes:
        seen: Records taken so far.
        order: Devices in order of first appearance.
        steps: What was measured before round 1.
        last: The figures that were decided from last, by device.
        tasks: The newest task of each device that has told a cost.
        carried: The newest of them that has told what its upload took.
        errors: Measured over predicted, smoothed, by device and part of a cost.
    """

    seen: int = 0
    order: list[str] = field(default_factory=list)
    steps: dict[str, StepCost] = field(default_factory=dict)
    last: dict[str, dict[str, Figure]] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    carried: dict[str, Task] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    _decisions: dict[int, Decision | None] = field(default_factory=dict)

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Take the journal's next records."""
        for record in records:
            self.seen += 1
            match record:
                case Measured():
                    self.steps |= record.by_device
                case RoundOpened():
                    self._open(record)
                case UpdateAccepted():
                    cost = plausible(record.update.cost)
                    self._learn(record.round, record.device, msgspec.structs.replace(cost, upload_s=None))
                case CostSettled():
                    self._learn(record.round, record.device, plausible(record.cost))
                case _:
                    pass

    def _open(self, record: RoundOpened) -> None:
        self.order += [device for device in record.assignments if device not in self.order]
        self._decisions[record.round] = record.decision
        for device, given in record.decision.devices.items() if record.decision else ():
            self.last[device] = self.last.get(device, {}) | given.figures

    def _learn(self, number: int, device: str, cost: Cost) -> None:
        if number and number not in self._decisions:
            return  # an evaluation: its number is beyond all rounds'
        if number not in self._decisions:  # a measurement or an evaluation: what that cost tells of no training
            return
        decision = self._decisions[number]
        given = decision.devices.get(device) if decision else None
        known = self.tasks.get(device)
        had = known.cost if known and known.round == number else Cost()
        if known is None or known.round <= number:
            self.tasks[device] = Task(number, given, cost)
        if cost.upload_s is not None:
            self.carried[device] = Task(number, given, cost)
        for part in ("compute_s", "upload_s") if given else ():
            measured, before = getattr(cost, part), getattr(had, part)
            predicted = getattr(given.predicted, part) if given else None
            if measured and predicted and before is None:  # each part once: an update tells one, its settling both
                self._err(device, part, given, measured / predicted)

    def _err(self, device: str, part: str, given: Given | None, ratio: float) -> None:
        name = part.replace("_s", "_error")
        used = given.figures.get(name) if given else None
        now = (used.value if used else 1.0) * min(max(ratio, 1 / MOST_OFF), MOST_OFF)
        errors = self.errors.setdefault(device, {})
        mixed = WEIGHT * now + (1 - WEIGHT) * errors.get(name, now)
        errors[name] = min(max(mixed, 1 / MOST_OFF), MOST_OFF)
