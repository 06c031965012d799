"""What a run came to, as values: the page, the table and the JSON are made of these and of nothing else.

Sums of figures of which some may be unknown: what is not known never counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from edge_server.journal.claims import MOST
from edge_server.plan.plan import Plan
from shared.protocol.measurements import Cost, Quality

WORSE: tuple[Quality, ...] = ("measured", "corrected", "modelled")

ARRIVALS: tuple[Arrival, ...] = ("arrived", "late", "failed")
MOST_READINGS = ("gpu.load_ratio", "gpu.hottest_celsius", "gpu.rail_watts", "memory.swap_used_bytes")
"""Readings of which the highest tells how a board got through a run."""

FLEET = ("global_accuracy", "fleet_accuracy")


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, or a sum of figures.

    Attributes:
        value: In SI units; None where no part of it is known, or there is nothing to sum.
        whole: Whether every part is known; where not, `value` is a lower bound.
        quality: The worst of the parts'; None where no part says one.
    """

    value: float | None = None
    whole: bool = True
    quality: Quality | None = None


UNKNOWN = Amount(whole=False)
NONE = Amount()
"""Nothing was there to measure, which is no figure, and not zero either."""


def sum_known(parts: Iterable[Amount]) -> Amount:
    """Return the sum of the parts that are known."""
    parts = list(parts)
    known_amount = [one.value for one in parts if one.value is not None]
    return Amount(
        value=math.fsum(known_amount) if known_amount else None,
        whole=all(one.whole for one in parts),
        quality=largest_known([one.quality for one in parts if one.value is not None]),
    )


def largest_known(qualities: Iterable[Quality | None]) -> Quality | None:
    """Return the quality farthest from measured, None where there is none."""
    return max((one for one in qualities if one), key=WORSE.index, default=None)


def known_amount(value: float | None, quality: Quality | None = None) -> Amount:
    """Return one figure, or that nobody knows it."""
    return UNKNOWN if value is None or not abs(value) <= MOST else Amount(value=float(value), quality=quality)


def share_or_none(value: float | None) -> float | None:
    """Return an accuracy; None for one that is none, such as a device could tell a server of before."""
    return value if value is not None and 0 <= value <= 1 else None


def figure(cost: Cost | None, name: str) -> Amount:
    """Return a figure of a task's cost, by its name in `Cost`."""
    if cost is None:
        return UNKNOWN
    said = cost.provenance.get(name)
    return known_amount(getattr(cost, name), said.quality if said else None)


def remaining_seconds(whole_s: float, parts: Sequence[Amount]) -> Amount:
    """Return what is left of some seconds after all of its parts; unknown where one of them is."""
    spent = sum_known(parts)
    if spent.value is None or not spent.whole:
        return UNKNOWN
    return Amount(value=max(0.0, whole_s - spent.value), quality=spent.quality)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, between two of them linearly."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


Arrival: TypeAlias = Literal["arrived", "late", "failed"]
Told: TypeAlias = float | str


class DigestPart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of a digest."""


class Seconds(DigestPart, frozen=True, kw_only=True):
    """Where a device's time went, in seconds.

    Attributes:
        exchange: From features handed over to gradients received, in a split session; `NONE` without one.
        statistics: The session in which running statistics were measured anew, all of it; `NONE` without one.
        waiting: What of the rounds is left after the others; unknown where one of them is.
    """

    download: Amount
    compute: Amount
    upload: Amount
    exchange: Amount = NONE
    statistics: Amount = NONE
    waiting: Amount


class Joules(DigestPart, frozen=True, kw_only=True):
    """Where a device's energy went, in joules of the whole device, idle included.

    Attributes:
        exchange, statistics: As in `Seconds`.
        above_idle: All of these together, less what the device would have drawn idle in those seconds.
    """

    download: Amount
    compute: Amount
    upload: Amount
    exchange: Amount = NONE
    statistics: Amount = NONE
    above_idle: Amount


class Moved(DigestPart, frozen=True, kw_only=True):
    """Bytes of frames: a model's, and apart from them those of a split session's features and gradients.

    Attributes:
        bytes_up: Of updates; as the server counts them.
        bytes_down: Of parameters that devices started from; as they say it.
        features_bytes: Up, as devices say it; `NONE` without a split session.
        statistics_bytes: Both ways, of the session after a round in which running statistics were measured anew:
            parameters, features, answers and updates; part of none of the others. `NONE` without one.
    """

    bytes_up: Amount
    bytes_down: Amount
    features_bytes: Amount = NONE
    gradient_bytes: Amount = NONE
    statistics_bytes: Amount = NONE


class TaskDigest(Moved, frozen=True, kw_only=True):
    """What one device did in one round.

    Attributes:
        arrival: `arrived`: its update counts; `failed`: it said so; `late`: neither, when the round ended.
        told: What was decided for this device, by name: hyperparameters and the assignment's values. Of a list, its
            length; of what is true or false, 1 or 0.
    """

    round: int
    device: str
    arrival: Arrival
    cause: str = ""
    told: dict[str, Told] = {}
    examples: int | None = None
    loss: float | None = None
    seconds: Seconds
    joules: Joules


class SpentByRound(Moved, frozen=True, kw_only=True):
    """What a run had taken by the end of a round: seconds of its rounds, joules of all devices, all bytes of frames."""

    seconds: Amount
    joules: Amount
    bytes: Amount


class RoundDigest(Moved, frozen=True, kw_only=True):
    """One round.

    Attributes:
        online: Devices that were connected when it began; None where that was not recorded.
        selected: Devices that were told to take part; each of them is counted in one of the next three.
        accuracy: Of the aggregated model on the server's test data; where devices use models of their own, or the
            server tests nothing, `fleet_accuracy`.
        class_accuracy: Of the aggregated model on the server's test data by class, in the order of the labels; None
            of a class without examples. Empty where that was not recorded.
        global_accuracy: In that case, of the aggregated model on the server's test data.
        device_accuracy: As the round's own devices measured it.
        fleet_accuracy: As all devices that were there measured it after the round on what they hold back: of one model
            weighted by examples, of their own models the mean over devices.
        terms: The method's own figures of its training, by name: the means of its loss terms, supervised steps.
        joules: All its devices spent.
        until: What the run had taken by its end.
    """

    round: int
    outcome: str
    online: int | None
    selected: int
    arrived: int
    late: int
    failed: int
    accuracy: float | None
    class_accuracy: list[float | None] = []
    test_loss: float | None
    loss: float | None
    device_accuracy: float | None
    global_accuracy: float | None = None
    fleet_accuracy: float | None = None
    terms: dict[str, float] = {}
    seconds: float
    joules: Amount
    until: SpentByRound


class DeviceDigest(Moved, frozen=True, kw_only=True):
    """One device over all rounds that it was selected in.

    Attributes:
        board: Id of its firmware profile; empty where nobody recorded it.
        version: Of its agent, likewise.
        went_away: How often it was lost to the server while the run lasted.
        rounds_s: Seconds of the rounds that it was selected in.
        accuracy: Of the final model, or its own, on its held-out examples.
        most: The highest of each of the readings `MOST_READINGS` that was recorded of it, by name.
    """

    device: str
    board: str = ""
    version: str = ""
    went_away: int = 0
    selected: int
    arrived: int
    late: int
    failed: int
    rounds_s: float
    seconds: Seconds
    joules: Joules
    accuracy: float | None = None
    most: dict[str, float] = {}


class Digest(DigestPart, frozen=True, kw_only=True):
    """One run.

    Attributes:
        live: Whether its seconds are of a wall clock; a replay's are virtual.
        started: Calendar time, of a live run.
        outcome: `finished`, `stopped`, `diverged` or `unfinished`.
        versions: Of what its server computed with.
        servers: How many processes of the server had it, one after another; 0 where that was not recorded.
        went_back: How often a lost checkpoint sent it back to an earlier round.
        notes: What whoever reads its figures must know.
        refused: What the server did not take, counted by reason.
        device_accuracy: Of the final model, or the devices' own, on their held-out examples.
        classes: Names of the classes in the order of the labels, where they were told.
        personal: Whether devices use models of their own: then those are what `accuracy` is of.
        measuring: Joules spent before the first round, on timing training steps.
    """

    run: str
    live: bool
    started: str
    outcome: str
    cause: str = ""
    versions: dict[str, str] = {}
    servers: int = 0
    went_back: int = 0
    notes: list[str] = []
    refused: dict[str, int] = {}
    device_accuracy: float | None = None
    classes: list[str] = []
    personal: bool = False
    measuring: Amount
    plan: Plan
    rounds: list[RoundDigest]
    devices: list[DeviceDigest]
    tasks: list[TaskDigest]

    @property
    def split(self) -> bool:
        """Whether its devices exchanged features and gradients with the server."""
        return any(one.features_bytes != NONE for one in self.rounds)

    @property
    def traffic(self) -> list[str]:
        """What of `Moved` it has, down before up."""
        exchanged = ["gradient_bytes", "features_bytes"] if self.split else []
        measured = any(one.statistics_bytes != NONE for one in self.rounds)
        return ["bytes_down", "bytes_up", *exchanged, *(["statistics_bytes"] if measured else [])]


def fleet_figures(runs: Iterable[Digest]) -> list[str]:
    """Return which figures that few runs know are known to any of these."""
    rounds = [one for run in runs for one in run.rounds]
    return [name for name in FLEET if any(getattr(one, name) is not None for one in rounds)]
