"""State machine and durable record of updates: models, configurations, the agent itself.

One transition table for all. A board's state is in a record, which is durable before it is reported, so that after a
power cut at any moment the board knows what it serves and continues. A newer offer supersedes everything in progress
except a trial, which is short and has a deadline.

As in the A/B updates of RAUC (https://rauc.readthedocs.io) and Mender (https://docs.mender.io), the new version is
installed beside the old one, tried under supervision, and rolled back if it does worse.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from shared.errors import CorruptFile
from shared.protocol.versioned import decode_versioned

Kind: TypeAlias = Literal["model", "configuration", "agent"]
Phase: TypeAlias = Literal[
    "none",
    "offered",
    "fetched",
    "verified",
    "staged",
    "trial",
    "committed",
    "rolled-back",
    "refused",
    "superseded",
]
"""none        nothing was ever offered                    trial        it serves, under supervision
offered     known, parts may be missing                 committed    it serves
fetched     all parts are stored                        rolled-back  the previous version serves again
verified    passed every gate, in a child process       refused      failed a gate and never served
staged      loaded beside the serving version           superseded   replaced by a newer offer, or withdrawn
"""
Event: TypeAlias = Literal[
    "offered", "fetched", "verified", "staged", "switched", "passed", "worse", "back", "refused", "superseded", "known"
]

FORMAT = 1
"""Format of the record; increased when an older reader would misread one."""
MOST_BYTES = 64 << 10
"""Size limit of a record."""
MOST_REMEMBERED = 16
"""Failed releases of one name that are remembered."""
REASON_CHARS = 500

_WITHDRAWN: Mapping[Event, Phase] = {"refused": "refused", "superseded": "superseded"}
_ENDED: Mapping[Event, Phase] = {"offered": "offered", "back": "rolled-back"}
TRANSITIONS: Mapping[Phase, Mapping[Event, Phase]] = {
    "none": {"offered": "offered"},
    "offered": {"fetched": "fetched", "known": "committed", **_WITHDRAWN},
    "fetched": {"verified": "verified", **_WITHDRAWN},
    "verified": {"staged": "staged", **_WITHDRAWN},
    "staged": {"switched": "trial", **_WITHDRAWN},
    "trial": {"passed": "committed", "worse": "rolled-back", "back": "rolled-back"},
    "committed": _ENDED,
    "rolled-back": _ENDED,
    "refused": _ENDED,
    "superseded": _ENDED,
}
PENDING: frozenset[Phase] = frozenset({"offered", "fetched", "verified", "staged"})
"""Phases that a newer offer supersedes."""
ENDED: frozenset[Phase] = frozenset({"committed", "rolled-back", "refused", "superseded"})
"""Phases in which a board stays until a new offer."""


def next_phase(phase: Phase, event: Event) -> Phase:
    """Return the phase after an event.

    Raises:
        ValueError: The table has no such event in this phase: a bug of ours.
    """
    following = TRANSITIONS[phase].get(event)
    if following is None:
        raise ValueError(f"event {event!r} while {phase}")
    return following


class UpdateTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that a new version must meet.

    Attributes:
        soak_s: Duration of its trial in seconds.
        max_drop: Allowed loss of accuracy on the device's own held-out examples, against the old version.
        max_latency_ms: Limit of the 95th percentile of its response times, in ms; 0 for one and a half times the old
            version's.
    """

    soak_s: float = 600.0
    max_drop: float = 0.02
    max_latency_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse conditions that nothing could meet."""
        if not all(0 <= term < math.inf for term in (self.soak_s, self.max_drop, self.max_latency_ms)):
            raise ValueError("soak_s, max_drop and max_latency_ms must be 0 or more and finite")

    @property
    def deadline_s(self) -> float:
        """Seconds after which a trial without a result has failed."""
        return 3 * self.soak_s + 60.0


class FailedRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A release that failed on this board, and is not retried without a new attempt number.

    Attributes:
        release: SHA-256 of its manifest.
        attempt: Number of its last attempt.
    """

    release: str
    attempt: int
    reason: str


def remember_failure(
    failed: tuple[FailedRelease, ...], release: str, attempt: int, reason: str
) -> tuple[FailedRelease, ...]:
    """Return the failures with another one, which replaces an earlier one of the same release."""
    others = [entry for entry in failed if entry.release != release]
    return (*others, FailedRelease(release=release, attempt=attempt, reason=reason))[-MOST_REMEMBERED:]


def find_failure(failed: tuple[FailedRelease, ...], release: str, attempt: int) -> str:
    """Return why a release failed before, at this attempt or a later one; empty if it did not."""
    return next((entry.reason for entry in failed if entry.release == release and entry.attempt >= attempt), "")


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of a board for one name.

    Attributes:
        name: Name that applications use.
        kind: Kind of thing that is updated.
        committed: The serving version, except in a trial; 0 for none.
        previous: The version that served before; 0 for none.
        candidate: The version that was offered last; 0 for none.
        release: SHA-256 of the candidate's manifest.
        deployment: Name of the rollout that offered it.
        attempt: Attempt number within that deployment, from 1.
        reason: Cause of a refusal or rollback; else empty.
        since: Calendar seconds at which the phase began.
        starts: Number of processes that began the trial: more than a few mean that it crashes them.
        terms: Conditions that it must meet.
        failed: Earlier failures on this board, the newest last.
        format: Format version, see `FORMAT`.
    """

    name: str
    kind: Kind = "model"
    committed: int = 0
    previous: int = 0
    candidate: int = 0
    release: str = ""
    phase: Phase = "none"
    deployment: str = ""
    attempt: int = 0
    reason: str = ""
    since: float = 0.0
    starts: int = 0
    terms: UpdateTerms = UpdateTerms()
    failed: tuple[FailedRelease, ...] = ()
    format: int = FORMAT

    @property
    def serving(self) -> int:
        """The serving version; 0 for none."""
        return self.candidate if self.phase == "trial" else self.committed

    @property
    def retained_versions(self) -> frozenset[int]:
        """Versions whose files must stay: the last two that served, and the one in progress."""
        gone_back = self.phase == "rolled-back" and not self.previous
        last = self.candidate if self.phase in PENDING or self.phase == "trial" or gone_back else 0
        return frozenset({self.committed, self.previous, last} - {0})

    def failure(self, release: str, attempt: int) -> str:
        """Return why a release failed before, at this attempt or a later one; empty where it did not.

        Args:
            release: SHA-256 of its manifest.
            attempt: The attempt to be made.
        """
        return find_failure(self.failed, release, attempt)


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """An offered version.

    Attributes:
        version: Version number within its name, from 1.
        release: SHA-256 of its manifest.
        attempt: Attempt number within that deployment, from 1.
        terms: Conditions that it must meet.
    """

    version: int
    release: str
    deployment: str
    attempt: int = 1
    terms: UpdateTerms = UpdateTerms()


def take_offer(record: UpdateRecord, offer: NewVersion, at: float) -> UpdateRecord:
    """Return a record after an offer; a pending version must have been superseded before.

    Args:
        at: Time of the offer in calendar seconds.
    """
    return msgspec.structs.replace(
        record,
        phase=next_phase(record.phase, "offered"),
        candidate=offer.version,
        release=offer.release,
        deployment=offer.deployment,
        attempt=offer.attempt,
        terms=offer.terms,
        reason="",
        since=at,
        starts=0,
    )


def advance(record: UpdateRecord, event: Event, at: float, reason: str = "", *, lasting: bool = True) -> UpdateRecord:
    """Return a record after any event but an offer.

    Args:
        at: Time of the event in calendar seconds.
        reason: Cause of a refusal or rollback.
        lasting: Whether the failure would recur, so that the release is not retried; false for a full disk, for
            example.
    """
    change: dict[str, object] = {}
    if event == "worse" or (event == "refused" and lasting):
        change["failed"] = remember_failure(record.failed, record.release, record.attempt, reason[:REASON_CHARS])
    if event == "passed" and record.candidate != record.committed:
        change |= {"committed": record.candidate, "previous": record.committed}
    if event == "switched":
        change["starts"] = 0
    if event == "back" and record.phase != "trial":
        change |= {"candidate": record.committed, "committed": record.previous, "previous": 0}
    phase = next_phase(record.phase, event)
    return msgspec.structs.replace(record, phase=phase, reason=reason[:REASON_CHARS], since=at, **change)


def count_start(record: UpdateRecord) -> UpdateRecord:
    """Return a record after one more process began the candidate's trial."""
    return msgspec.structs.replace(record, starts=record.starts + 1)


def write_record(record: UpdateRecord) -> bytes:
    """Encode a record for the disk: a line with the SHA-256 of the rest, then readable JSON."""
    body = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_record(data: bytes, place: str) -> UpdateRecord:
    """Decode a record.

    Raises:
        ConfigError: A newer fieldfleet wrote it.
        CorruptFile: It is damaged.
    """
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptFile(f"{place}: its checksum is wrong")
    return decode_versioned(body, UpdateRecord, FORMAT, MOST_BYTES, place)
