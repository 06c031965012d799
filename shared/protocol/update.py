"""How a board takes something new, be it a model, a configuration or the agent: the states, and what is kept of them.

One transition table for all. What a board is at stands in a record, which is durable before anybody is told of it, so
that a power cut at any moment leaves a board that knows what it serves and goes on. What came last wins over all that
is under way but a trial, which is short and has a deadline.

The shape is that of A/B updates as RAUC (https://rauc.readthedocs.io) and Mender (https://docs.mender.io) make them:
the new one beside the old, a trial under watch, and the old one again where it does worse.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec

from shared.errors import ConfigError, CorruptFile

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
"""none        nothing was ever offered                    trial        it answers, under watch
offered     it is known, parts of it may be missing     committed    it answers
fetched     all of it lies here                         rolled-back  the one before answers again
verified    it passed every gate, in a child            refused      it failed a gate and never answered
staged      it is loaded beside the one that answers    superseded   a newer one, or nobody, wants its place
"""
Event: TypeAlias = Literal[
    "offered", "fetched", "verified", "staged", "switched", "passed", "worse", "back", "refused", "superseded", "known"
]

FORMAT = 1
"""Of the record. Counted up where an older reader would take one wrong."""
MOST_REMEMBERED = 16
"""Releases that failed here, of one name."""
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
"""What a newer offer supersedes."""
ENDED: frozenset[Phase] = frozenset({"committed", "rolled-back", "refused", "superseded"})
"""Where a board stays until it is told something new."""


def follow(phase: Phase, event: Event) -> Phase:
    """Return the phase after an event.

    Raises:
        ValueError: The table has no such event in this phase: a fault of ours.
    """
    following = TRANSITIONS[phase].get(event)
    if following is None:
        raise ValueError(f"event {event!r} while {phase}")
    return following


class UpdateTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a new version must keep to.

    Attributes:
        soak_s: Seconds that its trial lasts.
        max_drop: By how much its accuracy on the device's own held-out examples may be below the old one's.
        max_latency_ms: Most milliseconds of 95 % of its answers; 0 for one and a half times the old one's.
    """

    soak_s: float = 600.0
    max_drop: float = 0.02
    max_latency_ms: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what nothing could keep to."""
        if not all(0 <= term < math.inf for term in (self.soak_s, self.max_drop, self.max_latency_ms)):
            raise ValueError("soak_s, max_drop and max_latency_ms must be 0 or more and finite")

    @property
    def deadline_s(self) -> float:
        """Seconds after which a trial that neither passed nor failed has failed."""
        return 3 * self.soak_s + 60.0


class FailedRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A release that failed here, and is not tried again unless somebody asks anew.

    Attributes:
        release: SHA-256 of its manifest.
        attempt: The last one that was made.
    """

    release: str
    attempt: int
    reason: str


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a board is at with one name.

    Attributes:
        name: What applications call it.
        kind: Of what it is a version.
        committed: The version that answers, but in a trial; 0 for none.
        previous: The one that answered before; 0 for none.
        candidate: The one that was offered last; 0 for none.
        release: SHA-256 of the candidate's manifest.
        deployment: Under which name it was offered.
        attempt: Which try of that deployment it is, from 1.
        reason: Why it was refused or went back; else empty.
        since: Calendar seconds at which the phase began.
        starts: How often a process began to try it out: more than a few, and it is what ends them.
        terms: What it must keep to.
        failed: What failed here before, the newest last.
        format: See `FORMAT`.
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
        """The version that answers; 0 for none."""
        return self.candidate if self.phase == "trial" else self.committed

    @property
    def kept(self) -> frozenset[int]:
        """The versions whose files must stay: the last two that answered, and what is under way."""
        gone_back = self.phase == "rolled-back" and not self.previous
        last = self.candidate if self.phase in PENDING or self.phase == "trial" or gone_back else 0
        return frozenset({self.committed, self.previous, last} - {0})

    def failure(self, release: str, attempt: int) -> str:
        """Return why a release failed here before, at this attempt or a later one; empty where it did not.

        Args:
            release: SHA-256 of its manifest.
            attempt: Which is to be made.
        """
        return next((one.reason for one in self.failed if one.release == release and one.attempt >= attempt), "")


class NewVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What is offered to a board.

    Attributes:
        version: Of a name, from 1.
        release: SHA-256 of its manifest.
        attempt: Which try of that deployment, from 1.
        terms: What it must keep to.
    """

    version: int
    release: str
    deployment: str
    attempt: int = 1
    terms: UpdateTerms = UpdateTerms()


def take_offer(record: UpdateRecord, offer: NewVersion, at: float) -> UpdateRecord:
    """Return a record once a version is offered; what is pending must have been superseded before.

    Args:
        at: Calendar seconds.
    """
    return msgspec.structs.replace(
        record,
        phase=follow(record.phase, "offered"),
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
        at: Calendar seconds.
        reason: Of a refusal, or of going back.
        lasting: Whether what failed would fail again, so that it is not to be tried again; a full disk is not such.
    """
    change: dict[str, object] = {}
    failed = event == "worse" or (event == "refused" and lasting)
    if failed:
        failure = FailedRelease(release=record.release, attempt=record.attempt, reason=reason[:REASON_CHARS])
        others = [one for one in record.failed if one.release != record.release]
        change["failed"] = (*others, failure)[-MOST_REMEMBERED:]
    if event == "passed" and record.candidate != record.committed:
        change |= {"committed": record.candidate, "previous": record.committed}
    if event == "switched":
        change["starts"] = 0
    if event == "back" and record.phase != "trial":
        change |= {"candidate": record.committed, "committed": record.previous, "previous": 0}
    phase = follow(record.phase, event)
    return msgspec.structs.replace(record, phase=phase, reason=reason[:REASON_CHARS], since=at, **change)


def count_start(record: UpdateRecord) -> UpdateRecord:
    """Return a record of which one more process begins to try the candidate out."""
    return msgspec.structs.replace(record, starts=record.starts + 1)


class _RecordFormat(msgspec.Struct):
    format: int


def write_record(record: UpdateRecord) -> bytes:
    """Return a record as it lies on the disk: the SHA-256 of what follows on a line, then JSON that people can read."""
    body = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_record(data: bytes, place: str) -> UpdateRecord:
    """Read a record.

    Args:
        data: As `write_record` makes it.
        place: Where it lies, for the error.

    Raises:
        ConfigError: A newer fieldfleet wrote it.
        CorruptFile: It is not as it was written.
    """
    digest, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptFile(f"{place}: it is not as it was written")
    try:
        found = msgspec.json.decode(body, type=_RecordFormat).format
        if found > FORMAT:
            raise ConfigError(f"{place}: of format {found}, and this fieldfleet reads up to {FORMAT}: update it")
        return msgspec.json.decode(body, type=UpdateRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{place}: it is no record of an update ({error})") from error
