"""What the servers of one run's sites say to each other; each hears the others at its own broker.

Site A says at B's broker who it is, what model it has, and what its round looks like (`status`, `gossip`, `telemetry`);
B answers there what it knows of their edge, and what it decided as coordinator (`gossiped`, `decision`). Which round A
is in stands there too (`round`), for people.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from shared.protocol.bounded import Amount, Count, Line, Name, NameOrNone, Number
from shared.protocol.messages import Message, Transfer

MOST_PLAN_BYTES = 256 << 10
"""Of the plan in a Hello; of a longer one the digest alone is told."""
MOST_ASKED = 1024
"""Pledges of which one message asks, or tells, what became."""

MOST_DIGEST_BYTES = 16

Joules: TypeAlias = tuple[Number, Count, Amount]
"""Round, term, joules: a pledge, or what was granted for it."""
Digest: TypeAlias = Annotated[bytes, Meta(max_length=MOST_DIGEST_BYTES)]
JoulesList: TypeAlias = Annotated[tuple[Joules, ...], Meta(max_length=MOST_ASKED)]


class Hello(Message, frozen=True, kw_only=True):
    """Retained presence of a site at a peer's broker; birth and will of a session carry the same number.

    Attributes:
        session: Of the connection; it only grows within a process, which `instance` names.
        run: The site's own name of its run.
        digest: XXH3-128 of the plan as JSON, 16 bytes; a will has none.
        plan: That JSON, empty where it is longer than `MOST_PLAN_BYTES`.
        ended: Whether the run has ended there: nothing of it is to be waited for.
    """

    site: Name
    session: Count
    instance: Line
    online: bool
    ended: bool = False
    run: NameOrNone = ""
    digest: Digest = b""
    plan: Annotated[bytes, Meta(max_length=MOST_PLAN_BYTES)] = b""


class OfSite(Message, frozen=True, kw_only=True):
    """What every other message between servers says first.

    Attributes:
        run: By the speaker's own name of it.
        round: Of the run: edge rounds are counted through.
    """

    site: Name
    run: NameOrNone
    round: Count


class AtRound(OfSite, frozen=True, kw_only=True):
    """Retained: the round that the speaker has begun."""


class ModelOffer(OfSite, frozen=True, kw_only=True):
    """The speaker's model of the gossip after a round; said again until the other's word of the edge is heard."""

    params: Transfer


class EdgeWord(OfSite, frozen=True, kw_only=True):
    """What the speaker knows of the edge between both in one gossip.

    Attributes:
        digest: Of the offered model that it answers.
        has: Whether that model is here, whole and checked.
        on: Whether the edge is on, by the speaker's journal; nil while it has not settled that.
        reason: Why it is off, one word, where it is.
    """

    digest: Digest
    has: bool = False
    on: bool | None = None
    reason: Line = ""


class Telemetry(OfSite, frozen=True, kw_only=True):
    """To the coordinator of a term: what is to be decided for the speaker's devices in a round.

    Attributes:
        term: It only grows; the coordinator of term T is site T modulo their number, in the plan's order.
        case: MessagePack of the figures of the speaker's devices, see `edge_server.sites.coordinate`.
        pledge: Joules that the speaker has put aside for this round and term; nil where the plan has no such budget.
        asks: Earlier pledges to this coordinator of which nobody told what became.
    """

    term: Count
    case: bytes
    pledge: Amount | None = None
    asks: JoulesList = ()


class Ruling(OfSite, frozen=True, kw_only=True):
    """A coordinator's answer to a Telemetry of that round and term; asked again, the same comes.

    Attributes:
        term: Of the answer; a higher one than was asked with says that the asker's term is over.
        decision: MessagePack of the decision for the asker's devices; empty where it is none of theirs.
        grants: What the asker may spend of what it pledged and asked for: a pledge that was not used comes back whole.
        reason: Why there is no decision, one word: `late`, `term`.
    """

    term: Count
    decision: bytes = b""
    grants: JoulesList = ()
    reason: Line = ""
