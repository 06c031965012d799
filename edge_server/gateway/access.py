"""Broker access table: which role may publish or receive on which channel.

Mosquitto's access list and the table in PROTOCOL.md are both made from `RULES`. Whatever a rule does not grant is
denied, so a device cannot send itself tasks, speak for another device, or read another device's messages. Accounts are
the common names of certificates (see `authority`): a device's name, `edge-server`, `_peer-<site>` for the server of
another site, and `probe` for the client that verifies the broker.

Mosquitto 2.0 has no roles. Device rights are patterns, which apply to every account; what they would grant to the other
roles is denied to those by name. A `deny` takes precedence over every pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edge_server.gateway.broker_files import HEADER, PROBES, probe_topic
from shared.protocol.topics import ANY, DOCTOR, EVERYONE, PEER, ROOT, SERVER, TOPS

Role: TypeAlias = Literal["device", "server", "peer", "probe"]
Verb: TypeAlias = Literal["publish", "receive"]

PUBLISH: frozenset[Verb] = frozenset({"publish"})
RECEIVE: frozenset[Verb] = frozenset({"receive"})
BOTH = PUBLISH | RECEIVE
NOTHING: frozenset[Verb] = frozenset()

OWN, NEIGHBOUR = "<device>", f"{PEER}<site>"
GENERATION = "<generation>"
ROLES: tuple[Role, ...] = ("device", "server", "peer", "probe")
HEADS = ("a device", "the edge server", "the server of another site", "the probe")
ACCOUNTS = {"server": "edge-server", "probe": "probe"}
"""Roles that have exactly one account."""

_ACCESS = {PUBLISH: "write", RECEIVE: "read", BOTH: "readwrite"}


@dataclass(frozen=True)
class Rule:
    """Rights of each role on some channels of a subtree.

    Attributes:
        place: Level of the topic below the site. `OWN` and `NEIGHBOUR` stand for the account's name where a device or a
            peer is concerned, and for any name where the server is.
        server: Rights of the edge server's processes.
        peer: Rights of the servers of other sites.
        probe: Rights of the verifying client.
    """

    place: str
    channels: tuple[str, ...]
    device: frozenset[Verb] = NOTHING
    server: frozenset[Verb] = NOTHING
    peer: frozenset[Verb] = NOTHING
    probe: frozenset[Verb] = NOTHING

    def verbs(self, role: Role) -> frozenset[Verb]:
        """Return the rights of a role."""
        verbs: frozenset[Verb] = getattr(self, role)
        return verbs


RULES = (
    Rule(OWN, ("status",), device=BOTH, server=BOTH),
    Rule(OWN, ("report", "release", "agent"), device=PUBLISH, server=BOTH),
    Rule(OWN, ("want", "update", "features", "lacks", "infer", "log"), device=PUBLISH, server=RECEIVE),
    Rule(
        OWN,
        ("task", "model", "ack", "gradient", "offer", "upgrade", "parts", "inferred"),
        device=RECEIVE,
        server=PUBLISH,
    ),
    Rule(OWN, ("probe",), device=BOTH),
    Rule(EVERYONE, ("model", "parts"), device=RECEIVE, server=BOTH),
    Rule(SERVER, ("status",), device=RECEIVE, server=BOTH),
    Rule(SERVER, ("probe",), server=BOTH),
    Rule(DOCTOR, ("probe",), server=BOTH),
    Rule(TOPS, ("status",), device=RECEIVE, server=BOTH),
    Rule(NEIGHBOUR, ("status",), server=RECEIVE, peer=BOTH),
    Rule(NEIGHBOUR, ("probe",), peer=BOTH),
    Rule(NEIGHBOUR, ("gossip", "telemetry", "round"), server=RECEIVE, peer=PUBLISH),
    Rule(NEIGHBOUR, ("gossiped", "decision"), server=PUBLISH, peer=RECEIVE),
    Rule(PROBES, (GENERATION,), probe=BOTH),
)
"""The server may publish what a broker retains for a device, so that `edge-server devices forget` can remove it.
A client receives its own status too, and publishes it again where another message, such as a late will, was retained.
Mosquitto lets the server receive whatever all devices may receive, and cannot deny that alone."""


def acl(site: str, peers: Iterable[str] = (), denied: Iterable[str] = (), generation: int = 0) -> str:
    """Return mosquitto's access list of a site.

    Args:
        peers: Other sites whose servers have an account at this broker.
        denied: Accounts without any right; this also affects open sessions.
        generation: Increases with every reload, so that a client can see whether the broker uses this list.
    """
    prefix, refused = f"{ROOT}/{site}", set(denied)
    lines = [HEADER]
    for rule in RULES:
        place = "%u" if rule.place == OWN else rule.place
        if rule.device:
            lines += [f"pattern {_ACCESS[rule.device]} {prefix}/{place}/{channel}" for channel in rule.channels]
    accounts = {ACCOUNTS["server"]: _server_lines(prefix), ACCOUNTS["probe"]: _probe_lines(prefix, site, generation)}
    accounts |= {f"{PEER}{peer}": _peer_lines(prefix, peer) for peer in peers}
    for account in sorted(accounts.keys() | refused):
        lines += ["", f"user {account}", *(["topic deny #"] if account in refused else accounts[account])]
    return "\n".join(lines) + "\n"


def _server_lines(prefix: str) -> Iterator[str]:
    yield f"topic deny {prefix}/{ACCOUNTS['server']}/#"
    for rule in RULES:
        place = ANY if rule.place in (OWN, NEIGHBOUR) else rule.place
        if rule.server:
            yield from (f"topic {_ACCESS[rule.server]} {prefix}/{place}/{channel}" for channel in rule.channels)


def _peer_lines(prefix: str, peer: str) -> Iterator[str]:
    subtree = f"{prefix}/{PEER}{peer}"
    for rule in RULES:
        if rule.place == NEIGHBOUR:
            yield from (f"topic {_ACCESS[rule.peer]} {subtree}/{channel}" for channel in rule.channels)
    yield from _denials(prefix, f"{PEER}{peer}", {channel for rule in RULES if rule.peer for channel in rule.channels})


def _probe_lines(prefix: str, site: str, generation: int) -> Iterator[str]:
    yield f"topic readwrite {probe_topic(site, generation)}"
    yield from _denials(prefix, ACCOUNTS["probe"], set())


def _denials(prefix: str, account: str, exempt: set[str]) -> Iterator[str]:
    """Yield the denials that an account of another role needs against the device patterns."""
    for rule in RULES:
        place = account if rule.place == OWN else rule.place
        if rule.device:
            yield from (
                f"topic deny {prefix}/{place}/{channel}"
                for channel in rule.channels
                if not (rule.place == OWN and channel in exempt)
            )


def is_allowed(role: Role, account: str, verb: Verb, place: str, channel: str) -> bool:
    """Check whether the table lets an account publish or receive on a channel of its site.

    Args:
        place: Level of the topic below the site: a device's name, `_all` and the like.
        channel: Last level of the topic; `GENERATION` for the probe's.
    """
    return any(
        verb in rule.verbs(role) and channel in rule.channels and _covers_place(rule.place, role, account, place)
        for rule in RULES
    )


def _covers_place(rule_place: str, role: Role, account: str, place: str) -> bool:
    if rule_place in (OWN, NEIGHBOUR):
        return place != account if role == "server" else place == account
    return place == rule_place


def rights_table() -> str:
    """Return the table of rights in Markdown, as PROTOCOL.md contains it."""
    rows = [f"| `…/<site>/` | {' | '.join(HEADS)} |", "|---" * (1 + len(ROLES)) + "|"]
    for rule in RULES:
        cells = " | ".join(_describe_verbs(rule, role) for role in ROLES)
        rows.append(f"| {', '.join(f'`{rule.place}/{channel}`' for channel in rule.channels)} | {cells} |")
    return "\n".join(rows) + "\n"


def _describe_verbs(rule: Rule, role: Role) -> str:
    verbs = rule.verbs(role)
    if not verbs:
        return ""
    suffix = " its own" if role in ("device", "peer") and rule.place in (OWN, NEIGHBOUR) else ""
    return {PUBLISH: "publishes", RECEIVE: "receives", BOTH: "publishes, receives"}[verbs] + suffix
