"""Messages between the servers of one run's sites.

Site A publishes its presence, model and round figures at B's broker (`status`, `gossip`, `telemetry`); B answers there
with its state of their edge, and with its decisions as coordinator (`gossiped`, `decision`). A's current round is there
too (`round`), for people.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from shared.protocol.bounded import Amount, Count, Line, Name, NameOrNone, Number
from shared.protocol.messages import Message, Transfer

MOST_PLAN_BYTES = 256 << 10
"""Limit of the plan in a Hello; of a longer one only the digest is sent."""
MOST_ASKED = 1024
"""Most pledges that one message asks about or settles."""

MOST_DIGEST_BYTES = 16

Joules: TypeAlias = tuple[Number, Count, Amount]
"""Round, term, joules: a pledge, or the amount granted for it."""
Digest: TypeAlias = Annotated[bytes, Meta(max_length=MOST_DIGEST_BYTES)]
JoulesList: TypeAlias = Annotated[tuple[Joules, ...], Meta(max_length=MOST_ASKED)]


class Hello(Message, frozen=True, kw_only=True):
    """Retained presence of a site at a peer's broker; birth and will of a session carry the same number.

    Attributes:
        session: Connection number; increases within a process, which `instance` identifies.
        run: The site's own name of its run.
        digest: XXH3-128 of the plan as JSON, 16 bytes; a will has none.
        plan: The plan as JSON, empty where it is longer than `MOST_PLAN_BYTES`.
        ended: Whether the run has ended there, so that peers need not wait for it.
    """

    site: Name
    session: Count
    instance: Line
    online: bool
    ended: bool = False
    run: NameOrNone = ""
    digest: Digest = b""
    plan: Annotated[bytes, Meta(max_length=MOST_PLAN_BYTES)] = b""


class PeerMessage(Message, frozen=True, kw_only=True):
    """Common fields of the other messages between servers.

    Attributes:
        run: The sender's own name of the run.
        round: Round of the run; edge rounds are numbered consecutively.
    """

    site: Name
    run: NameOrNone
    round: Count


class AtRound(PeerMessage, frozen=True, kw_only=True):
    """Retained: the round that the sender has begun."""


class ModelOffer(PeerMessage, frozen=True, kw_only=True):
    """The sender's model for the gossip after a round; repeated until the peer's EdgeWord arrives."""

    params: Transfer


class EdgeWord(PeerMessage, frozen=True, kw_only=True):
    """The sender's state of the edge between both in one gossip.

    Attributes:
        digest: Digest of the offered model that it answers.
        has: Whether that model has arrived and is verified.
        on: Whether the edge is on, by the sender's journal; nil while undecided.
        reason: Category of why it is off, where it is.
    """

    digest: Digest
    has: bool = False
    on: bool | None = None
    reason: Line = ""


class Telemetry(PeerMessage, frozen=True, kw_only=True):
    """To the coordinator of a term: inputs of the decision for the sender's devices in a round.

    Attributes:
        term: Only increases; the coordinator of term T is site T modulo their number, in the plan's order.
        case: MessagePack of the figures of the sender's devices, see `edge_server.sites.coordinate`.
        pledge: Joules that the sender reserved for this round and term; nil where the plan has no such budget.
        asks: Earlier pledges to this coordinator whose outcome is unknown.
    """

    term: Count
    case: bytes
    pledge: Amount | None = None
    asks: JoulesList = ()


class Ruling(PeerMessage, frozen=True, kw_only=True):
    """A coordinator's answer to a Telemetry of that round and term; the same one for repeated requests.

    Attributes:
        term: Term of the answer; a higher one than in the request means that the requested term is over.
        decision: MessagePack of the decision for the recipient's devices; empty where there is none.
        grants: Joules that the recipient may spend of those it pledged and asked about; an unused pledge is returned
            whole.
        reason: Category of why there is no decision: `late`, `term`.
    """

    term: Count
    decision: bytes = b""
    grants: JoulesList = ()
    reason: Line = ""
