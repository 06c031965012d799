"""State transitions of an upgrade: pure functions of the record and observations.

Every step is recorded before it is done. A record with a reason whose version still runs is being rolled back, and any
later process continues with that. So an upgrade, wherever it is interrupted, ends with a proven version or the
previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from device_agent.upgrade.record import UpgradeRecord, UpgradeTarget
from shared.protocol.update import PENDING, REASON_CHARS, Event, next_phase, remember_failure
from shared.runtime.text_table import printable_text

MOST_BOOTS, MOST_STARTS = 3, 2
"""Boots of the board and restarts of the agent that a trial survives."""


@dataclass(frozen=True)
class TrialObservation:
    """Observation of a version on trial.

    Attributes:
        current: The version that `current` links to.
        seconds: Time since this process began to watch the trial.
        is_proven: True if the proof of this trial is there.
        restarts: Automatic restarts of the service during this trial.
        has_failed: True if systemd gave up restarting the service.
    """

    current: str
    seconds: float = 0.0
    is_proven: bool = False
    restarts: int = 0
    has_failed: bool = False


def judge_trial(record: UpgradeRecord, observation: TrialObservation) -> tuple[Event, str] | None:
    """Decide a trial; return the event and its reason, or None while it continues."""
    if observation.current != record.to:
        return "back", f"version {observation.current} was installed meanwhile"
    if fault := _find_fault(record, observation):
        return "worse", fault
    if observation.is_proven:
        return "passed", ""
    if observation.seconds >= record.probation_s:
        return "worse", f"version {record.to} did not connect and report within {record.probation_s:g} s"
    return None


def _find_fault(record: UpgradeRecord, observation: TrialObservation) -> str:
    """Return why a version fails its trial, even if proven; else empty."""
    starts = record.starts + observation.restarts
    if record.boots > MOST_BOOTS:
        return f"the board booted {record.boots} times before version {record.to} had proven itself"
    if starts > MOST_STARTS:
        return f"it restarted {starts} times before version {record.to} had proven itself"
    return f"version {record.to} does not run: its service gave up" if observation.has_failed else ""


def is_rolling_back(record: UpgradeRecord) -> bool:
    """Check that the running version is being rolled back."""
    return bool(record.reason) and record.state in ("trial", "committed")


def target_version(record: UpgradeRecord) -> str:
    """Return the version that must run according to a record; empty if it does not matter."""
    if is_rolling_back(record):
        return record.from_ if record.state == "trial" else record.previous
    return {"trial": record.to, "committed": record.to}.get(record.state, "")


def is_handled(record: UpgradeRecord, target: UpgradeTarget, current: str) -> bool:
    """Check that a request was completed, refused or passed over before, or is in progress."""
    if target == record.passed_over:
        return True
    wish = target.deployment, target.attempt
    if record.state == "rolled-back" and (record.from_, record.deployment, record.attempt) == (current, *wish):
        return target.version in (record.to, current)
    return record.matches_target(target) and record.state not in ("none", "superseded")


def begin_upgrade(record: UpgradeRecord, target: UpgradeTarget, current: str) -> UpgradeRecord:
    """Return the record of a new request, which supersedes a pending one.

    Args:
        record: Earlier record, not in a trial.
    """
    state = next_phase(record.state, "superseded") if record.state in PENDING else record.state
    return msgspec.structs.replace(
        record,
        state=next_phase(state, "offered"),
        from_=current,
        to=target.version,
        previous=_select_previous(record, current),
        deployment=target.deployment,
        attempt=target.attempt,
        probation_s=target.probation_s,
        nonce="",
        boots=0,
        starts=0,
        boot="",
        lost=(),
        reason="",
    )


def _select_previous(record: UpgradeRecord, current: str) -> str:
    return record.previous if record.previous != current else ""


def apply_event(record: UpgradeRecord, event: Event, reason: str = "", **change: object) -> UpgradeRecord:
    """Return the record after an event.

    Args:
        reason: Why the version was refused or rolled back.
        change: Other fields to replace.
    """
    reason = printable_text(reason[:REASON_CHARS])
    if event == "passed":
        change |= {"previous": record.from_}
    if event == "back" and record.state == "committed":
        change |= {"from_": record.previous, "previous": ""}
    if event == "worse":
        change |= {"failed": remember_failure(record.failed, record.to, record.attempt, reason)}
    state = next_phase(record.state, event)
    return msgspec.structs.replace(record, state=state, reason=reason, **change)


def mark_rollback(record: UpgradeRecord, reason: str) -> UpgradeRecord:
    """Return a record that orders a rollback; its state changes when that is done."""
    return msgspec.structs.replace(record, reason=printable_text(reason[:REASON_CHARS]) or "no reason given")


def count_restart(record: UpgradeRecord, boot: str) -> UpgradeRecord:
    """Return the record of a trial that is watched again: one more boot, or one more start.

    Args:
        boot: The kernel's id of this boot.
    """
    if boot != record.boot:
        return msgspec.structs.replace(record, boots=record.boots + 1, boot=boot)
    return msgspec.structs.replace(record, starts=record.starts + 1)


def next_attempt_number(record: UpgradeRecord, version: str) -> int:
    """Return the next attempt number for an installation by hand, above those that failed."""
    return max((failure.attempt for failure in record.failed if failure.release == version), default=0) + 1


def select_retained_versions(record: UpgradeRecord, current: str) -> frozenset[str]:
    """Return the versions that must stay installed."""
    trial = {record.from_, record.to} if record.state in PENDING | {"trial"} else set[str]()
    return frozenset({current, record.previous, target_version(record), *trial} - {""})


def filter_serials(serials: Mapping[str, int], retained: frozenset[str]) -> dict[str, int]:
    """Return the serial numbers of the retained versions."""
    return {version: number for version, number in serials.items() if version in retained}
