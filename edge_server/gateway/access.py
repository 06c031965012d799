"""Who may say and hear what at a site's broker: one table, from which the broker's access list and the page are made.

Whoever is not named at a channel may neither publish nor hear there; so a device cannot give itself tasks, speak for
another device, or hear one. Accounts are common names of certificates, see `authority`: a device's own, `edge-server`,
`_peer-<site>` for the server of another site, `probe` for who looks whether all this is heeded.

mosquitto 2.0 has patterns with an account's name for all accounts at once and no roles, so that what a device may is a
pattern, and what of it the other roles may not is denied them by name; a `deny` comes before every pattern.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from edge_server.gateway.broker_files import MADE, PROBES, probe_topic
from shared.protocol.topics import ANY, DOCTOR, EVERYONE, PEER, ROOT, SERVER, TOPS

Role: TypeAlias = Literal["device", "server", "peer", "probe"]
Verb: TypeAlias = Literal["publish", "hear"]

SAYS: frozenset[Verb] = frozenset({"publish"})
HEARS: frozenset[Verb] = frozenset({"hear"})
BOTH = SAYS | HEARS
NOTHING: frozenset[Verb] = frozenset()

OWN, NEIGHBOUR = "<device>", f"{PEER}<site>"
GENERATION = "<generation>"
ROLES: tuple[Role, ...] = ("device", "server", "peer", "probe")
HEADS = ("a device", "the edge server", "the server of another site", "the probe")
ACCOUNTS = {"server": "edge-server", "probe": "probe"}
"""Roles that have one account."""

_WORDS = {SAYS: "write", HEARS: "read", BOTH: "readwrite"}


@dataclass(frozen=True)
class Rule:
    """Who may do what on some channels of a place.

    Attributes:
        place: Whose subtree: `OWN` and `NEIGHBOUR` are the account's own for devices and peers, and anybody's for the
            server.
        server: What the edge server's processes may.
        peer: What the servers of other sites may.
        probe: What the probe may.
    """

    place: str
    channels: tuple[str, ...]
    device: frozenset[Verb] = NOTHING
    server: frozenset[Verb] = NOTHING
    peer: frozenset[Verb] = NOTHING
    probe: frozenset[Verb] = NOTHING

    def verbs(self, role: Role) -> frozenset[Verb]:
        """Return what a role may."""
        found: frozenset[Verb] = getattr(self, role)
        return found


RULES = (
    Rule(OWN, ("status",), device=BOTH, server=BOTH),
    Rule(OWN, ("report", "release", "agent"), device=SAYS, server=BOTH),
    Rule(OWN, ("want", "update", "features", "lacks", "infer", "log"), device=SAYS, server=HEARS),
    Rule(OWN, ("task", "model", "ack", "gradient", "offer", "upgrade", "parts", "inferred"), device=HEARS, server=SAYS),
    Rule(OWN, ("probe",), device=BOTH),
    Rule(EVERYONE, ("model", "parts"), device=HEARS, server=BOTH),
    Rule(SERVER, ("status",), device=HEARS, server=BOTH),
    Rule(SERVER, ("probe",), server=BOTH),
    Rule(DOCTOR, ("probe",), server=BOTH),
    Rule(TOPS, ("status",), device=HEARS, server=BOTH),
    Rule(NEIGHBOUR, ("status",), server=HEARS, peer=BOTH),
    Rule(NEIGHBOUR, ("probe",), peer=BOTH),
    Rule(NEIGHBOUR, ("gossip", "telemetry", "round"), server=HEARS, peer=SAYS),
    Rule(NEIGHBOUR, ("gossiped", "decision"), server=SAYS, peer=HEARS),
    Rule(PROBES, (GENERATION,), probe=BOTH),
)
"""The server may publish what a broker retains of a device, so that `edge-server devices forget` can remove it.
A status is heard by its own speaker too, who says it anew where somebody else's word, such as a late will, is kept.
What all devices hear, mosquitto lets the server hear too, and has no way to deny that alone."""


def acl(site: str, peers: Iterable[str] = (), denied: Iterable[str] = (), generation: int = 0) -> str:
    """Return mosquitto's access list of a site.

    Args:
        peers: Other sites whose servers have an account here.
        denied: Accounts that may do nothing, live sessions included.
        generation: Grows with every reload, which shows that the broker has taken this list.
    """
    here, refused = f"{ROOT}/{site}", set(denied)
    lines = [MADE]
    for rule in RULES:
        place = "%u" if rule.place == OWN else rule.place
        if rule.device:
            lines += [f"pattern {_WORDS[rule.device]} {here}/{place}/{channel}" for channel in rule.channels]
    accounts = {ACCOUNTS["server"]: _server_lines(here), ACCOUNTS["probe"]: _probe_lines(here, site, generation)}
    accounts |= {f"{PEER}{peer}": _peer_lines(here, peer) for peer in peers}
    for account in sorted(accounts.keys() | refused):
        lines += ["", f"user {account}", *(["topic deny #"] if account in refused else accounts[account])]
    return "\n".join(lines) + "\n"


def _server_lines(here: str) -> Iterator[str]:
    yield f"topic deny {here}/{ACCOUNTS['server']}/#"
    for rule in RULES:
        place = ANY if rule.place in (OWN, NEIGHBOUR) else rule.place
        if rule.server:
            yield from (f"topic {_WORDS[rule.server]} {here}/{place}/{channel}" for channel in rule.channels)


def _peer_lines(here: str, peer: str) -> Iterator[str]:
    own = f"{here}/{PEER}{peer}"
    for rule in RULES:
        if rule.place == NEIGHBOUR:
            yield from (f"topic {_WORDS[rule.peer]} {own}/{channel}" for channel in rule.channels)
    yield from _denials(here, f"{PEER}{peer}", {channel for rule in RULES if rule.peer for channel in rule.channels})


def _probe_lines(here: str, site: str, generation: int) -> Iterator[str]:
    yield f"topic readwrite {probe_topic(site, generation)}"
    yield from _denials(here, ACCOUNTS["probe"], set())


def _denials(here: str, account: str, own: set[str]) -> Iterator[str]:
    """Yield what an account that is no device must not have of the patterns."""
    for rule in RULES:
        place = account if rule.place == OWN else rule.place
        if rule.device:
            yield from (
                f"topic deny {here}/{place}/{channel}"
                for channel in rule.channels
                if not (rule.place == OWN and channel in own)
            )


def may(role: Role, account: str, verb: Verb, place: str, channel: str) -> bool:
    """Tell whether the table lets an account publish or hear on a channel of a place of its site.

    Args:
        place: The level of a topic that stands for a device, or for `_all` and the like.
        channel: The last level; of the probe's place the generation, in whose stead stands `GENERATION`.
    """
    return any(
        verb in rule.verbs(role) and channel in rule.channels and _is_at(rule.place, role, account, place)
        for rule in RULES
    )


def _is_at(rule_place: str, role: Role, account: str, place: str) -> bool:
    if rule_place in (OWN, NEIGHBOUR):
        return place != account if role == "server" else place == account
    return place == rule_place


def table() -> str:
    """Return the table as PROTOCOL.md has it."""
    rows = [f"| `…/<site>/` | {' | '.join(HEADS)} |", "|---" * (1 + len(ROLES)) + "|"]
    for rule in RULES:
        told = " | ".join(_told(rule, role) for role in ROLES)
        rows.append(f"| {', '.join(f'`{rule.place}/{channel}`' for channel in rule.channels)} | {told} |")
    return "\n".join(rows) + "\n"


def _told(rule: Rule, role: Role) -> str:
    verbs = rule.verbs(role)
    if not verbs:
        return ""
    own = " its own" if role in ("device", "peer") and rule.place in (OWN, NEIGHBOUR) else ""
    return {SAYS: "publishes", HEARS: "hears", BOTH: "publishes, hears"}[verbs] + own
