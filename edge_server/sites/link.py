"""Links between a site and its peers: presence, plan comparison, message routing.

A site sends to a peer over that peer's broker, and replies over its own; see PROTOCOL.md. No message is accepted before
a Hello with the same plan.
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
from shared.protocol.peers import MOST_PLAN_BYTES, AtRound, Hello, PeerMessage
from shared.protocol.topics import parse_channel, peer_topic
from shared.runtime.executor import background
from shared.transfer.frames import is_frame
from shared.transport.base import Inbox, Presence, Transport

log = logging.getLogger(__name__)

Channel: TypeAlias = Literal["status", "gossip", "gossiped", "telemetry", "decision", "round"]
Handler: TypeAlias = Callable[[str, Message | bytes], Awaitable[None]]
"""(peer, message or bytes of a frame) -> None. Raises WireError for invalid ones."""

REQUEST_CHANNELS: tuple[str, ...] = ("status", "gossip", "telemetry", "round")
"""Channels on which a peer sends at our broker."""
REPLY_CHANNELS: tuple[str, ...] = ("gossiped", "decision")
"""Channels on which it replies at its own."""
MOST_NAMED = 5
"""Most differing plan keys named in a message."""
OTHER_PLAN, OTHER_RUN, ENDED = "other-plan", "other-run", "ended"


def encode_plan(plan: Plan) -> bytes:
    """Return a plan as JSON, independent of where its data lie: paths are cut to their last part.

    The order of its sites is stored explicitly, since JSON sorts keys and the order decides who owns an edge.
    """
    described = _without_folders(msgspec.to_builtins(plan))
    if plan.sites:
        described["sites"]["order"] = plan.sites.names
    return msgspec.json.encode(described, order="deterministic")


def _without_folders(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: PurePosixPath(item).name if key == "path" and isinstance(item, str) else _without_folders(item)
        for key, item in value.items()
    }


def describe_differences(local_plan: bytes, peer_plan: bytes) -> list[str]:
    """Return the differences of two plans, one key per line, as `hyper.momentum: 0.0 here, 0.9 there`.

    Args:
        local_plan: As encoded by `encode_plan`.

    Raises:
        WireError: The peer's plan cannot be decoded.
    """
    try:
        local, remote = (dict(_flatten("", msgspec.json.decode(plan))) for plan in (local_plan, peer_plan))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"plan of {len(peer_plan)} bytes: {error}") from error
    keys = sorted(key for key in local.keys() | remote.keys() if local.get(key) != remote.get(key))
    return [f"{key}: {local.get(key, 'none')} here, {remote.get(key, 'none')} there" for key in keys]


def _flatten(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{place}.{key}".lstrip("."), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flatten(f"{place}[{index}]", item)
    else:
        yield place, value


def digest_plan(plan: bytes) -> bytes:
    """Return the digest of an encoded plan."""
    return payload.digest([memoryview(plan)])


@dataclass
class SitePresence:
    """Presence of a site at one peer's broker: births and last wills of its sessions.

    Attributes:
        instance: Unique id of this process.
        plan: As encoded by `encode_plan`.
    """

    site: str
    peer: str
    run: str
    instance: str
    plan: bytes
    _session: int = 0

    def presence(self) -> Presence:
        """Begin a session: return its birth and its last will."""
        self._session += 1
        will = self._will()
        plan = self.plan if len(self.plan) <= MOST_PLAN_BYTES else b""
        birth = msgspec.structs.replace(will, online=True, digest=digest_plan(self.plan), plan=plan)
        return Presence(peer_topic(self.peer, self.site, "status"), wire.encode(birth), wire.encode(will))

    def end(self) -> Hello:
        """Return the message that the run has ended."""
        return msgspec.structs.replace(self._will(), ended=True)

    def _will(self) -> Hello:
        return Hello(site=self.site, session=self._session, instance=self.instance, run=self.run, online=False)


def is_newer(last: Hello | None, hello: Hello) -> bool:
    """Return true if a Hello is news; late last wills of another process or session are not."""
    if last is None:
        return True
    if hello.instance != last.instance:
        return hello.online
    return hello.session > last.session or (hello.session == last.session and not hello.online)


@dataclass
class Links:
    """Connections of a site to its peers.

    Attributes:
        home: Transport to the site's own broker.
        peers: Transport to the broker of each peer.
        plan: As encoded by `encode_plan`.
        handlers: Message handler of each channel.
        changed: Called when a peer connects, disconnects or is refused.
        presences: This site's presence at the broker of each peer.
        bound_runs: Runs of peers whose messages were used: no other run of theirs is accepted.
        refused: Counts of invalid messages, by reason.
        note_rounds: Stores the rounds that peers have begun, for people to read; None in replay, which also disables
            announcing rounds.
    """

    site: str
    home: Transport
    peers: Mapping[str, Transport]
    plan: bytes
    presences: Mapping[str, SitePresence] = field(default_factory=dict)
    handlers: dict[str, Handler] = field(default_factory=dict)
    on_change: list[Callable[[], None]] = field(default_factory=list)
    bound_runs: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    note_rounds: Callable[[Mapping[str, int]], Awaitable[None]] | None = None
    _rounds: dict[str, int] = field(default_factory=dict)
    _announced: dict[str, AtRound] = field(default_factory=dict)
    _hellos: dict[str, Hello] = field(default_factory=dict)
    _objections: dict[str, str] = field(default_factory=dict)
    _logged: set[tuple[str, str]] = field(default_factory=set)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receive peers' messages during the block."""
        requests = [self._receive(self.home, peer, self.site, peer, REQUEST_CHANNELS) for peer in self.peers]
        replies = [self._receive(other, peer, peer, self.site, REPLY_CHANNELS) for peer, other in self.peers.items()]
        async with background(*requests, *replies):
            yield

    def is_gone(self, peer: str) -> bool:
        """Return true if a peer is known to be offline or is refused; unknown peers count as reachable."""
        hello = self._hellos.get(peer)
        return hello is not None and (not hello.online or bool(self.objection(peer)))

    def objection(self, peer: str) -> str:
        """Return why a peer is refused, as a single word; empty if it is not, or is unknown."""
        hello, bound = self._hellos.get(peer), self.bound_runs.get(peer)
        if hello and hello.ended:
            return ENDED
        if hello and hello.online and bound is not None and hello.run != bound:
            return OTHER_RUN
        return self._objections.get(peer, "")

    def run_of(self, peer: str) -> str:
        """Return a peer's name of its run; empty if unknown."""
        hello = self._hellos.get(peer)
        return self.bound_runs.get(peer) or (hello.run if hello else "")

    async def end(self) -> None:
        """Tell every peer that our run has ended, so that none waits for us."""
        for peer, births in self.presences.items():
            await self.send(peer, "status", births.end())

    async def send(self, peer: str, channel: Channel, data: Message | bytes, *, assured: bool = True) -> bool:
        """Send a message or frame to a peer at its broker; return false if the broker is unreachable.

        Args:
            assured: At least once, where the broker is connected; see `Transport.publish`.
        """
        return await _publish(self.peers[peer], peer_topic(peer, self.site, channel), data, assured=assured)

    async def reply(self, peer: str, channel: Channel, message: Message) -> bool:
        """Reply to a peer at our own broker; return false if the broker is unreachable."""
        name = peer_topic(self.site, peer, channel)
        return await _publish(self.home, name, message, assured=not isinstance(message, Want))

    async def announce_round(self, peers: Iterable[str], run: str, number: int) -> None:
        """Announce to peers the round that begins at this site; an unreachable broker gets the next one."""
        if self.note_rounds is None:
            return
        message = wire.encode(AtRound(site=self.site, run=run, round=number))
        for peer in peers:
            with suppress(Unreachable):
                await self.peers[peer].publish(peer_topic(peer, self.site, "round"), message, retain=True)

    def payload_limit(self, peer: str) -> int:
        """Return the most bytes of one message to a peer's broker."""
        return self.peers[peer].max_payload_bytes

    def refuse(self, peer: str, error: WireError) -> None:
        """Count an invalid message; log it once per peer and reason."""
        self.refused[error.reason] += 1
        if (peer, error.reason) not in self._logged:
            self._logged.add((peer, error.reason))
            log.warning("site %s: refused %s: %s", peer, error.reason, printable(str(error)))

    async def _receive(
        self, transport: Transport, peer: str, broker: str, speaker: str, channels: tuple[str, ...]
    ) -> None:
        names = [peer_topic(broker, speaker, channel) for channel in channels]
        async with transport.subscribe(*names) as inbox:
            await self._handle_all(inbox, peer)

    async def _handle_all(self, inbox: Inbox, peer: str) -> None:
        async for name, data in inbox:
            try:
                await self._handle(peer, parse_channel(name), data)
            except WireError as error:
                self.refuse(peer, error)
            except OSError as error:  # disk full: the peer repeats its message
                self.refuse(peer, WireError(f"not stored: {error}", reason="disk"))

    async def _handle(self, peer: str, channel: str, data: bytes) -> None:
        if not data:
            return  # deletion of a retained message
        if channel == "status":
            self._handle_hello(peer, wire.decode_as(Hello, data))
            await self._note_round(peer)
        elif channel == "round":
            self._announced[peer] = wire.decode_as(AtRound, data)
            await self._note_round(peer)
        else:
            await self._route(peer, channel, data)

    async def _route(self, peer: str, channel: str, data: bytes) -> None:
        """Pass on a known and accepted peer's message."""
        handler = self.handlers.get(channel)
        if handler is None or peer not in self._hellos:
            return  # the peer repeats it
        if why := self.objection(peer):
            raise WireError(f"the site is refused: {why}", reason=why)
        if is_frame(data):
            await handler(peer, data)
            return
        message = wire.decode(data)
        if isinstance(message, PeerMessage):
            self._check_sender(peer, message)
        elif not isinstance(message, Want):
            raise WireError(f"{type(message).__name__} is not for a peer", reason="unexpected")
        await handler(peer, message)

    async def _note_round(self, peer: str) -> None:
        """Store a peer's round; messages retained from an earlier run are ignored."""
        announced = self._announced.get(peer)
        if self.note_rounds is None or announced is None:
            return
        if (announced.site, announced.run) != (peer, self.run_of(peer)):
            return
        if self._rounds.get(peer) != announced.round:
            self._rounds[peer] = announced.round
            await self.note_rounds(self._rounds)

    def _check_sender(self, peer: str, message: PeerMessage) -> None:
        if message.site != peer:
            raise WireError(f"in the name of site {message.site[:NAME]!r}", reason="identity")
        if message.run != (known_run := self.run_of(peer)):
            raise WireError(f"message of run {message.run[:NAME]!r}, expected {known_run!r}", reason=OTHER_RUN)

    def _handle_hello(self, peer: str, hello: Hello) -> None:
        if hello.site != peer:
            raise WireError(f"Hello in the name of site {hello.site[:NAME]!r}", reason="identity")
        before = self._hellos.get(peer)
        if not is_newer(before, hello):
            return
        if hello.online:
            self._hellos[peer] = hello
            self._compare(peer, hello)
        elif before:
            ended = before.ended or hello.ended  # a later will does not revoke it
            self._hellos[peer] = msgspec.structs.replace(before, online=False, session=hello.session, ended=ended)
        else:
            return  # a will of an unknown session
        if not before or before.online != hello.online or before.instance != hello.instance:
            how = "here" if hello.online else "done" if hello.ended else "gone"
            log.info("site %s is %s, run %s", peer, how, printable(hello.run, NAME))
        for call in self.on_change:
            call()

    def _compare(self, peer: str, hello: Hello) -> None:
        """Log why a peer is refused, with the remedy; it is accepted again after a matching Hello."""
        self._objections.pop(peer, None)
        if hello.digest != digest_plan(self.plan):
            self._objections[peer] = OTHER_PLAN
            differences = describe_differences(self.plan, hello.plan) if hello.plan else []
            keys = "; ".join(map(printable, differences[:MOST_NAMED])) or "it is too long to send"
            more = f" and {len(differences) - MOST_NAMED} more" if len(differences) > MOST_NAMED else ""
            log.error(
                "site %s has another plan (%s%s); give both the same, until then it is excluded", peer, keys, more
            )
            self.refused[OTHER_PLAN] += 1
        elif self.objection(peer) == OTHER_RUN:
            bound_run = self.bound_runs[peer]
            log.error(
                "site %s is at run %s, but ours began with its run %s; start a new run here, or resume that one there",
                *(peer, printable(hello.run, NAME), bound_run),
            )
            self.refused[OTHER_RUN] += 1


async def _publish(transport: Transport, name: str, data: Message | bytes, *, assured: bool) -> bool:
    try:
        await transport.publish(name, data if isinstance(data, bytes) else wire.encode(data), assured=assured)
    except Unreachable as error:
        log.debug("not said: %s", error)
        return False
    return True
