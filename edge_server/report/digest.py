"""Digest of a run: values for the report's page, tables and JSON.

Unknown amounts are never counted as zero: sums over them become lower bounds or unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.plan.plan import Plan
from edge_server.record.amounts import NONE, Amount

ARRIVALS: tuple[Arrival, ...] = ("arrived", "late", "failed")
MOST_READINGS = ("gpu.load_ratio", "gpu.hottest_celsius", "gpu.rail_watts", "memory.swap_used_bytes")
"""Readings whose maximum per device is reported."""

Scope: TypeAlias = Literal["", "global", "fleet", "device"]
"""Examples and models of a figure: the run's own, the aggregated model, all devices, or the devices of the round."""
FLEET_SCOPES: tuple[Scope, ...] = ("global", "fleet")
TRAFFIC_LABELS: Mapping[str, str] = {
    "bytes_down": "model bytes down",
    "bytes_up": "model bytes up",
    "gradient_bytes": "gradient bytes down",
    "features_bytes": "features bytes up",
    "statistics_bytes": "bytes of measuring running statistics",
}
"""Labels of `Traffic` fields in a run with a split session, down before up."""
SPLIT_TRAFFIC = ("gradient_bytes", "features_bytes")
"""Traffic that only a split session has."""
Metrics: TypeAlias = "dict[str, float] | msgspec.UnsetType"
ValueOrUnset: TypeAlias = "float | msgspec.UnsetType | None"

Arrival: TypeAlias = Literal["arrived", "late", "failed"]
TaskValue: TypeAlias = float | str


class DigestPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a digest.

    Fields named `value` are of the metric by which the run is compared, unset if that is the accuracy.
    """

    def metric_value(self, scope: Scope = "") -> float | None:
        """Return the metric by which the run is compared; None if it was not measured."""
        value, accuracy = (getattr(self, f"{scope}_{name}".removeprefix("_")) for name in ("value", "accuracy"))
        compared_value: float | None = accuracy if value is msgspec.UNSET else value
        return compared_value


class Activities(DigestPart, frozen=True, kw_only=True):
    """Amounts of a device by activity.

    Attributes:
        exchange: In a split session, from features sent to gradients received; `NONE` without one.
        statistics: The whole session that re-measured running statistics; `NONE` without one.
    """

    download: Amount
    compute: Amount
    upload: Amount
    exchange: Amount = NONE
    statistics: Amount = NONE


class Seconds(Activities, frozen=True, kw_only=True):
    """Seconds of a device; `waiting` is the rest of the rounds, unknown if a part of them is."""

    waiting: Amount


class Joules(Activities, frozen=True, kw_only=True):
    """Joules of the whole device, idle power included; `above_idle` is their sum less idle power over their seconds."""

    above_idle: Amount


class Traffic(DigestPart, frozen=True, kw_only=True):
    """Bytes of frames: of models, and separately of a split session's features and gradients.

    Attributes:
        bytes_up: Updates, counted by the server.
        bytes_down: Parameters that devices started from, as devices report them.
        features_bytes: Up, as devices report them; `NONE` without a split session.
        statistics_bytes: Both ways, of the session that re-measured running statistics after a round: parameters,
            features, answers and updates; part of none of the others. `NONE` without one.
    """

    bytes_up: Amount
    bytes_down: Amount
    features_bytes: Amount = NONE
    gradient_bytes: Amount = NONE
    statistics_bytes: Amount = NONE


class TaskDigest(Traffic, frozen=True, kw_only=True):
    """A device's task in a round.

    Attributes:
        arrival: `arrived`: its update counts; `failed`: it reported failure; `late`: neither by the end of the round.
        told: Hyperparameters and values of its assignment by name; a list by its length, a boolean as 1 or 0.
    """

    round: int
    device: str
    arrival: Arrival
    cause: str = ""
    told: dict[str, TaskValue] = {}
    examples: int | None = None
    loss: float | None = None
    seconds: Seconds
    joules: Joules


class SpentByRound(Traffic, frozen=True, kw_only=True):
    """Cumulative spending at the end of a round: seconds of rounds, joules of all devices, bytes of frames."""

    seconds: Amount
    joules: Amount
    bytes: Amount


class RoundDigest(Traffic, frozen=True, kw_only=True):
    """One round; `until` is the cumulative spending at its end.

    Attributes:
        online: Devices that were connected when it began; None if not recorded.
        selected: Devices with an assignment; each counts as arrived, late or failed.
        accuracy: Of the aggregated model on the server's test data; with personal models, or if the server tests
            nothing, `fleet_accuracy`.
        class_accuracy: Of the aggregated model on the server's test data by label; None for a class without examples.
        global_accuracy: With personal models, of the aggregated model on the server's test data.
        device_accuracy: As measured by the round's devices.
        fleet_accuracy: As measured by all online devices on held-out data after the round: weighted by examples for one
            model, the mean over personal models.
        metrics: Other metrics of the aggregated model on the server's test data.
        terms: Metrics of the algorithm: mean loss terms, supervised steps.
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
    value: ValueOrUnset = msgspec.UNSET
    device_value: ValueOrUnset = msgspec.UNSET
    global_value: ValueOrUnset = msgspec.UNSET
    fleet_value: ValueOrUnset = msgspec.UNSET
    metrics: Metrics = msgspec.UNSET
    terms: dict[str, float] = {}
    seconds: float
    joules: Amount
    until: SpentByRound


class DeviceDigest(Traffic, frozen=True, kw_only=True):
    """One device over all rounds that selected it, which lasted `rounds_s`.

    Attributes:
        board: Id of its firmware profile.
        went_away: Number of disconnections during the run.
        accuracy: Of the final or its personal model on its held-out examples.
        most: Highest recorded value of each of `MOST_READINGS`.
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
    value: ValueOrUnset = msgspec.UNSET
    most: dict[str, float] = {}


class Digest(DigestPart, frozen=True, kw_only=True):
    """One run.

    Attributes:
        live: Whether its seconds are of a wall clock; a replay's are virtual.
        started: Calendar time of a live run.
        outcome: `finished`, `stopped`, `diverged` or `unfinished`.
        versions: Of the libraries that its server computed with.
        servers: Number of consecutive server processes; 0 if not recorded.
        went_back: How often a lost checkpoint sent it back to an earlier round.
        notes: Warnings to readers of its values.
        refused: Messages that the server rejected, counted by reason.
        device_accuracy: Of the final or the personal models on the devices' held-out examples.
        compared: Metric by which its models are compared; unset for the accuracy.
        classes: Class names in the order of the labels, if known.
        personal: Whether devices use personal models; `accuracy` then refers to these.
        measuring: Joules spent before the first round on timing training steps.
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
    device_value: ValueOrUnset = msgspec.UNSET
    compared: ComparedMetric | msgspec.UnsetType = msgspec.UNSET
    classes: list[str] = []
    personal: bool = False
    measuring: Amount
    plan: Plan
    rounds: list[RoundDigest]
    devices: list[DeviceDigest]
    tasks: Sequence[TaskDigest]

    @property
    def metric(self) -> ComparedMetric:
        """The metric by which its models are compared."""
        return self.compared or ACCURACY

    @property
    def clock(self) -> str:
        """The kind of clock of its seconds: `wall` or `virtual`."""
        return "wall" if self.live else "virtual"

    @property
    def split(self) -> bool:
        """True if devices exchanged features and gradients with the server."""
        return any(round_.features_bytes != NONE for round_ in self.rounds)

    @property
    def traffic(self) -> list[str]:
        """Fields of `Traffic` that the run has, down before up."""
        measured = any(round_.statistics_bytes != NONE for round_ in self.rounds)
        absent = {*(() if self.split else SPLIT_TRAFFIC), *(() if measured else ("statistics_bytes",))}
        return [name for name in TRAFFIC_LABELS if name not in absent]


def known_fleet_scopes(runs: Iterable[Digest]) -> list[Scope]:
    """Return the elements of `FLEET_SCOPES` whose compared metric any of the runs knows."""
    rounds = [round_ for run in runs for round_ in run.rounds]
    return [scope for scope in FLEET_SCOPES if any(round_.metric_value(scope) is not None for round_ in rounds)]


def common_metric(runs: Iterable[Digest]) -> ComparedMetric | None:
    """Return the metric by which all of the runs are compared; None if they differ."""
    metrics = {run.metric for run in runs}
    return metrics.pop() if len(metrics) == 1 else None


def metric_name(runs: Iterable[Digest]) -> str:
    """Return the name of the common metric of runs."""
    metric = common_metric(runs)
    return metric.name if metric else "compared metric"
