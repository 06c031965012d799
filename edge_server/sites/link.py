"""The wires between a site and its peers: who is there, with which plan, and whose words go to whom.

What a site says to a peer goes over that peer's broker, and what it answers over its own; see PROTOCOL.md. Nobody is
believed before a Hello with the same plan has been heard.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

import msgspec

from edge_server.plan.plan import Plan
from shared.errors import Unreachable, WireError
from shared.protocol import payload, wire
from shared.protocol.clip import NAME, printable
from shared.protocol.messages import Message, Want
from shared.protocol.peers import MOST_PLAN_BYTES, AtRound, Hello, OfSite
from shared.protocol.topics import parse_channel, peer_topic
from shared.runtime.executor import background
from shared.transfer.frames import is_frame
from shared.transport.base import Inbox, Presence, Transport

log = logging.getLogger(__name__)

Channel: TypeAlias = Literal["status", "gossip", "gossiped", "telemetry", "decision", "round"]
Taker: TypeAlias = Callable[[str, Message | bytes], Awaitable[None]]
"""(peer, what it said: a message, or the bytes of a frame). Raises WireError for what is of no use."""

SAID: tuple[str, ...] = ("status", "gossip", "telemetry", "round")
"""What a peer says to us at our broker."""
ANSWERED: tuple[str, ...] = ("gossiped", "decision")
"""What it answers us at its own."""
MOST_NAMED = 5
"""Keys in which two plans differ that are named."""
OTHER_PLAN, OTHER_RUN, ENDED = "other-plan", "other-run", "ended"


def plan_bytes(plan: Plan) -> bytes:
    """Return a plan as JSON, the same wherever its data lie: of paths there is the last part alone.

    The order of its sites stands beside them, since JSON sorts keys: edges have their owners by it.
    """
    described = _without_folders(msgspec.to_builtins(plan))
    if plan.sites:
        described["sites"]["order"] = plan.sites.names
    return msgspec.json.encode(described, order="deterministic")


def _without_folders(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folders(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: PurePosixPath(one).name if key == "path" and isinstance(one, str) else _without_folders(one)
        for key, one in value.items()
    }


def differing_keys(ours: bytes, theirs: bytes) -> list[str]:
    """Return where two plans differ, as `hyper.momentum: 0.0 here, 0.9 there`, a key a line.

    Args:
        ours: A plan as `plan_bytes` gives it.

    Raises:
        WireError: It is none.
    """
    try:
        here, there = (dict(_leaves("", msgspec.json.decode(one))) for one in (ours, theirs))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"plan of {len(theirs)} bytes: {error}") from error
    keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    return [f"{key}: {here.get(key, 'none')} here, {there.get(key, 'none')} there" for key in keys]


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(f"{place}.{key}".lstrip("."), one)
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _leaves(f"{place}[{index}]", one)
    else:
        yield place, value


def digest_of(plan: bytes) -> bytes:
    """Return the digest by which plans are told apart."""
    return payload.digest([memoryview(plan)])


@dataclass
class Births:
    """Births and wills of a site's sessions at one peer's broker.

    Attributes:
        run: Our name of it.
        instance: A word that no other process has.
        plan: As `plan_bytes` gives it.
    """

    site: str
    peer: str
    run: str
    instance: str
    plan: bytes
    _session: int = 0

    def presence(self) -> Presence:
        """Begin a session: return its birth and its will."""
        self._session += 1
        will = self._will()
        plan = self.plan if len(self.plan) <= MOST_PLAN_BYTES else b""
        birth = msgspec.structs.replace(will, online=True, digest=digest_of(self.plan), plan=plan)
        return Presence(peer_topic(self.peer, self.site, "status"), wire.encode(birth), wire.encode(will))

    def end(self) -> Hello:
        """Return what is said once the run has ended."""
        return msgspec.structs.replace(self._will(), ended=True)

    def _will(self) -> Hello:
        return Hello(site=self.site, session=self._session, instance=self.instance, run=self.run, online=False)


def newer(known: Hello | None, heard: Hello) -> bool:
    """Tell whether a word of a site's presence is news: a late will of another process or session is none."""
    if known is None:
        return True
    if heard.instance != known.instance:
        return heard.online
    return heard.session > known.session or (heard.session == known.session and not heard.online)


@dataclass
class Links:
    """A site among its peers.

    Attributes:
        home: To our own broker.
        away: To the broker of each peer.
        plan: As `plan_bytes` gives it.
        takers: Who is told what comes on a channel.
        changed: Is called when a peer comes or goes, or is refused.
        born: What we say of our presence at the broker of each peer, where we say when our run has ended.
        bound: Runs of peers of which something was used: no other run of theirs is heard.
        refused: What was of no use, by reason.
        note_rounds: Keeps the round that each peer has begun where people find it; None, as in replay, where nobody
            looks: then no rounds are told either.
    """

    site: str
    home: Transport
    away: Mapping[str, Transport]
    plan: bytes
    born: Mapping[str, Births] = field(default_factory=dict)
    takers: dict[str, Taker] = field(default_factory=dict)
    changed: list[Callable[[], None]] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    note_rounds: Callable[[Mapping[str, int]], Awaitable[None]] | None = None
    _rounds: dict[str, int] = field(default_factory=dict)
    _begun: dict[str, AtRound] = field(default_factory=dict)
    _hellos: dict[str, Hello] = field(default_factory=dict)
    _objections: dict[str, str] = field(default_factory=dict)
    _said: set[tuple[str, str]] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Hear the peers while the block lasts."""
        here = [self._hear(self.home, peer, self.site, peer, SAID) for peer in self.away]
        there = [self._hear(other, peer, peer, self.site, ANSWERED) for peer, other in self.away.items()]
        async with background(*here, *there):
            yield

    def is_gone(self, peer: str) -> bool:
        """Tell whether a peer is known to be away, or is refused; of one that was not heard yet nobody knows."""
        hello = self._hellos.get(peer)
        return hello is not None and (not hello.online or bool(self.objection(peer)))

    def objection(self, peer: str) -> str:
        """Return why a peer is not believed, one word; empty where it is, or has not been heard."""
        hello, bound = self._hellos.get(peer), self.bound.get(peer)
        if hello and hello.ended:
            return ENDED
        if hello and hello.online and bound is not None and hello.run != bound:
            return OTHER_RUN
        return self._objections.get(peer, "")

    def run_of(self, peer: str) -> str:
        """Return a peer's name of its run; empty where it has not been heard."""
        hello = self._hellos.get(peer)
        return self.bound.get(peer) or (hello.run if hello else "")

    async def end(self) -> None:
        """Tell every peer that our run has ended, so that nobody waits for us."""
        for peer, births in self.born.items():
            await self.say(peer, "status", births.end())

    async def say(self, peer: str, channel: Channel, data: Message | bytes, *, assured: bool = True) -> bool:
        """Tell a peer something at its broker, a message or a frame; return whether the broker was there.

        Args:
            assured: At least once, where the broker is there; see `Transport.publish`.
        """
        return await _publish(self.away[peer], peer_topic(peer, self.site, channel), data, assured=assured)

    async def answer(self, peer: str, channel: Channel, message: Message) -> bool:
        """Answer a peer at our own broker; return whether that was there."""
        name = peer_topic(self.site, peer, channel)
        return await _publish(self.home, name, message, assured=not isinstance(message, Want))

    async def tell_round(self, peers: Iterable[str], run: str, number: int) -> None:
        """Tell peers which round has begun here; where a broker is away, the next round tells.

        Args:
            run: Our name of it.
        """
        if self.note_rounds is None:
            return
        said = wire.encode(AtRound(site=self.site, run=run, round=number))
        for peer in peers:
            with suppress(Unreachable):
                await self.away[peer].publish(peer_topic(peer, self.site, "round"), said, retain=True)

    def room(self, peer: str) -> int:
        """Return the bytes that one message to a peer's broker may have now."""
        return self.away[peer].max_payload_bytes

    def refuse(self, peer: str, error: WireError) -> None:
        """Count what a peer said that is of no use; say so once a reason."""
        self.refused[error.reason] += 1
        if (peer, error.reason) not in self._said:
            self._said.add((peer, error.reason))
            log.warning("site %s: refused %s: %s", peer, error.reason, printable(str(error)))

    async def _hear(
        self, transport: Transport, peer: str, broker: str, speaker: str, channels: tuple[str, ...]
    ) -> None:
        names = [peer_topic(broker, speaker, channel) for channel in channels]
        async with transport.subscribe(*names) as inbox:
            await self._take_all(inbox, peer)

    async def _take_all(self, inbox: Inbox, peer: str) -> None:
        async for name, data in inbox:
            try:
                await self._take(peer, parse_channel(name), data)
            except WireError as error:
                self.refuse(peer, error)
            except OSError as error:  # the disk takes nothing more: it is said, or asked for, again
                self.refuse(peer, WireError(f"not stored: {error}", reason="disk"))

    async def _take(self, peer: str, channel: str, data: bytes) -> None:
        if not data:
            return  # what was retained is taken away
        if channel == "status":
            self._meet(peer, wire.decode_as(Hello, data))
            await self._note_round(peer)
        elif channel == "round":
            self._begun[peer] = wire.decode_as(AtRound, data)
            await self._note_round(peer)
        else:
            await self._hand_on(peer, channel, data)

    async def _hand_on(self, peer: str, channel: str, data: bytes) -> None:
        """Hand on what a peer says of models or decisions, once it is known and believed."""
        taker = self.takers.get(channel)
        if taker is None or peer not in self._hellos:
            return  # it will be said again
        if why := self.objection(peer):
            raise WireError(f"from a site that is refused: {why}", reason=why)
        if is_frame(data):
            await taker(peer, data)
            return
        message = wire.decode(data)
        if isinstance(message, OfSite):
            self._require_known(peer, message)
        elif not isinstance(message, Want):
            raise WireError(f"{type(message).__name__} is not for a peer", reason="unexpected")
        await taker(peer, message)

    async def _note_round(self, peer: str) -> None:
        """Note which round a peer is in; what an earlier run of it left at the broker says nothing."""
        said = self._begun.get(peer)
        if self.note_rounds is None or said is None or said.site != peer or said.run != self.run_of(peer):
            return
        if self._rounds.get(peer) != said.round:
            self._rounds[peer] = said.round
            await self.note_rounds(self._rounds)

    def _require_known(self, peer: str, message: OfSite) -> None:
        if message.site != peer:
            raise WireError(f"in the name of site {message.site[:NAME]!r}", reason="identity")
        if message.run != (known := self.run_of(peer)):
            raise WireError(f"of run {message.run[:NAME]!r}, and that of the site is {known!r}", reason=OTHER_RUN)

    def _meet(self, peer: str, hello: Hello) -> None:
        if hello.site != peer:
            raise WireError(f"Hello in the name of site {hello.site[:NAME]!r}", reason="identity")
        before = self._hellos.get(peer)
        if not newer(before, hello):
            return
        if hello.online:
            self._hellos[peer] = hello
            self._compare(peer, hello)
        elif before:
            ended = before.ended or hello.ended  # a will behind that word takes nothing back
            self._hellos[peer] = msgspec.structs.replace(before, online=False, session=hello.session, ended=ended)
        else:
            return  # it says nothing but that it was there once
        if not before or before.online != hello.online or before.instance != hello.instance:
            how = "here" if hello.online else "done" if hello.ended else "gone"
            log.info("site %s is %s, run %s", peer, how, printable(hello.run, NAME))
        for call in self.changed:
            call()

    def _compare(self, peer: str, hello: Hello) -> None:
        """Say why a peer is refused, and how that is mended; it is believed again as soon as its Hello is ours."""
        self._objections.pop(peer, None)
        if hello.digest != digest_of(self.plan):
            self._objections[peer] = OTHER_PLAN
            found = differing_keys(self.plan, hello.plan) if hello.plan else []
            keys = "; ".join(printable(one) for one in found[:MOST_NAMED]) or "it is too long to be told"
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            log.error("site %s has another plan (%s%s): give both the same; till then it is left out", peer, keys, more)
            self.refused[OTHER_PLAN] += 1
        elif self.objection(peer) == OTHER_RUN:
            known = self.bound[peer]
            log.error(
                "site %s is at run %s, and ours was begun with its run %s: begin ours anew, or go on with that there",
                *(peer, printable(hello.run, NAME), known),
            )
            self.refused[OTHER_RUN] += 1


async def _publish(transport: Transport, name: str, data: Message | bytes, *, assured: bool) -> bool:
    try:
        await transport.publish(name, data if isinstance(data, bytes) else wire.encode(data), assured=assured)
    except Unreachable as error:
        log.debug("not said: %s", error)
        return False
    return True
