"""What becomes of an upgrade, decided from a record and from what is seen: pure, nothing is done here.

Every step is durable before it is done. A record with a reason while its version still runs is on its way back:
whoever finds it goes on with that, so that a verdict is never given twice. Whatever is cut off where, it ends with the
new version proven or with the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from device_agent.upgrade.record import UpgradeRecord, UpgradeTarget
from shared.protocol.update import MOST_REMEMBERED, PENDING, REASON_CHARS, Event, FailedRelease, next_phase
from shared.runtime.text_table import printable_text

MOST_BOOTS, MOST_STARTS = 3, 2
"""How often board and agent may begin anew during a trial."""


@dataclass(frozen=True)
class TrialObservation:
    """What is seen of a version on trial.

    Attributes:
        current: What `current` leads to.
        seconds: Since somebody began to watch it.
        is_proven: Whether it gave the proof of this trial.
        restarts: How often its service began anew since it was started for this trial.
        has_failed: Whether its service gave up.
    """

    current: str
    seconds: float = 0.0
    is_proven: bool = False
    restarts: int = 0
    has_failed: bool = False


def judge_trial(record: UpgradeRecord, observation: TrialObservation) -> tuple[Event, str] | None:
    """Return what a trial comes to, and why; None while it goes on.

    Args:
        observation: What is seen of it.
    """
    if observation.current != record.to:
        return "back", f"version {observation.current} was put in its place meanwhile"
    if fault := _find_fault(record, observation):
        return "worse", fault
    if observation.is_proven:
        return "passed", ""
    if observation.seconds >= record.probation_s:
        return "worse", f"version {record.to} was not connected and heard within {record.probation_s:g} s"
    return None


def _find_fault(record: UpgradeRecord, observation: TrialObservation) -> str:
    """Return what speaks against a version, proven or not."""
    starts = record.starts + observation.restarts
    if record.boots > MOST_BOOTS:
        return f"the board was started {record.boots} times before version {record.to} had proven itself"
    if starts > MOST_STARTS:
        return f"it began anew {starts} times before version {record.to} had proven itself"
    return f"version {record.to} does not run: its service gave up" if observation.has_failed else ""


def is_going_back(record: UpgradeRecord) -> bool:
    """Tell whether a verdict was given against the version that runs."""
    return bool(record.reason) and record.state in ("trial", "committed")


def find_goal(record: UpgradeRecord) -> str:
    """Return the version that is to run by a record; empty where it says nothing of it."""
    if is_going_back(record):
        return record.from_ if record.state == "trial" else record.previous
    return {"trial": record.to, "committed": record.to}.get(record.state, "")


def is_handled(record: UpgradeRecord, target: UpgradeTarget, current: str) -> bool:
    """Tell whether just this wish was fulfilled, refused or passed over before, or is being seen to.

    Args:
        current: The version that runs.
    """
    if target == record.passed_over:
        return True
    wish = target.deployment, target.attempt
    if record.state == "rolled-back" and (record.from_, record.deployment, record.attempt) == (current, *wish):
        return target.version in (record.to, current)
    return record.is_of(target) and record.state not in ("none", "superseded")


def begin_upgrade(record: UpgradeRecord, target: UpgradeTarget, current: str) -> UpgradeRecord:
    """Return a record once a version is wanted; what is pending is superseded.

    Args:
        record: Before; not of a trial.
        current: The version that runs.
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


def advance(record: UpgradeRecord, event: Event, reason: str = "", **change: object) -> UpgradeRecord:
    """Return a record after an event that changes its state.

    Args:
        reason: Of a refusal, or of going back.
        change: What else is new of it.
    """
    reason = printable_text(reason[:REASON_CHARS])
    if event == "passed":
        change |= {"previous": record.from_}
    if event == "back" and record.state == "committed":
        change |= {"from_": record.previous, "previous": ""}
    if event == "worse":
        failure = FailedRelease(release=record.to, attempt=record.attempt, reason=reason)
        others = [earlier for earlier in record.failed if earlier.release != record.to]
        change |= {"failed": (*others, failure)[-MOST_REMEMBERED:]}
    state = next_phase(record.state, event)
    return msgspec.structs.replace(record, state=state, reason=reason, **change)


def mark_going_back(record: UpgradeRecord, reason: str) -> UpgradeRecord:
    """Return a record by which the version that runs goes back, whoever reads it; its state changes once it has."""
    return msgspec.structs.replace(record, reason=printable_text(reason[:REASON_CHARS]) or "no reason was given")


def count_restart(record: UpgradeRecord, boot: str) -> UpgradeRecord:
    """Return the record of a trial of which somebody begins to watch anew.

    Args:
        boot: The kernel's id of this boot.
    """
    if boot != record.boot:
        return msgspec.structs.replace(record, boots=record.boots + 1, boot=boot)
    return msgspec.structs.replace(record, starts=record.starts + 1)


def find_failure(record: UpgradeRecord, target: UpgradeTarget) -> str:
    """Return why a version failed here before, at this attempt or a later one; empty where it did not."""
    same = (
        failure for failure in record.failed if failure.release == target.version and failure.attempt >= target.attempt
    )
    return next((failure.reason for failure in same), "")


def next_attempt(record: UpgradeRecord, version: str) -> int:
    """Return the attempt by which somebody at the board tries a version, whatever became of it before."""
    return max((failure.attempt for failure in record.failed if failure.release == version), default=0) + 1


def select_retained(record: UpgradeRecord, current: str) -> frozenset[str]:
    """Return the versions that stay on the disk.

    Args:
        current: The version that runs.
    """
    trial = {record.from_, record.to} if record.state in PENDING | {"trial"} else set[str]()
    return frozenset({current, record.previous, find_goal(record), *trial} - {""})


def filter_serials(serials: Mapping[str, int], retained: frozenset[str]) -> dict[str, int]:
    """Return the numbers of the versions that stay on the disk."""
    return {version: number for version, number in serials.items() if version in retained}
