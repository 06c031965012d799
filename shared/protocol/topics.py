"""MQTT topic names: build, parse, match.

fieldfleet/v1/<site>/<device>/<channel>; the device precedes the channel so that one broker ACL line,
`pattern readwrite fieldfleet/v1/+/%u/#`, confines a device to itself.

status  device -> server  retained birth and will      report  device -> server  retained measurements
task    server -> device  Task, Leave                  model   server -> device  frames of parameters
want    device -> server  Want                         update  device -> server  Update and its frames
ack     server -> device  Want, Ack                    log     device -> server  lines the operator asked for
probe   device, server or peer -> itself  filler for measuring the link and testing delivery

Of a release, see `rollout`:
offer   server -> device  Offer, Bundle, Withdraw         parts    server -> device  frames of parts
lacks   device -> server  Lacks, Want                     release  device -> server  retained Releases
Of the agent itself, with the same messages: upgrade  server -> device  Offer, Bundle, Withdraw
agent  device -> server  retained Releases

Of a split session, each with frames: features  device -> server  Features, Want    gradient  server -> device
Gradient, Skip, Want. Two channels, since a client that publishes on a topic it subscribes to receives its own messages.

Of collaborative inference: infer  device -> server  TopRequest and its frames    inferred  server -> device  TopAnswer,
Want. The serving process has its own status, as `_tops`.

Between the servers of a run's sites, at the recipient's broker, as `_peer-<sending site>`:
status  retained Hello     gossip  ModelOffer and its frames     gossiped  Want, EdgeWord     telemetry  Telemetry
decision  Ruling     round  retained AtRound
"""

from __future__ import annotations

import re
from functools import lru_cache

from shared.errors import ConfigError

ROOT = "fieldfleet/v1"
EVERYONE = "_all"
SERVER = "_server"
TOPS = "_tops"
DOCTOR = "_doctor"
PEER, PEERS = "_peer-", "_peers"
ANY = "+"
ALL_BELOW = "#"

CHANNELS = frozenset(
    {
        *("status", "report", "want", "update", "features", "lacks", "release", "agent", "infer", "log"),  # of a device
        *("task", "model", "ack", "gradient", "offer", "upgrade", "parts", "inferred"),  # to devices
        "probe",  # of a device or a server, to itself
        *("gossip", "telemetry", "round", "gossiped", "decision"),  # between servers
    }
)
"""All channels. A new one must be added to the gateway's access table, else brokers deny it to everybody."""

_LEVELS = 5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def topic(site: str, device: str, channel: str) -> str:
    """Build a topic name; device `ANY` makes it a filter for every device.

    Args:
        device: Id of the device, or `ANY`.

    Raises:
        ValueError: The channel is unknown.
    """
    if channel not in CHANNELS:
        raise ValueError(f"channel {channel!r}: not one of the protocol's")
    return f"{ROOT}/{site}/{device}/{channel}"


def peer_topic(site: str, peer: str, channel: str) -> str:
    """Build a topic between servers, at the broker of `site`."""
    return topic(site, f"{PEER}{peer}", channel)


def parse_device(name: str) -> str:
    """Return the device level of a topic name; empty where there is none."""
    levels = name.split("/")
    return levels[-2] if len(levels) == _LEVELS else ""


def parse_channel(name: str) -> str:
    """Return the last level of a topic name."""
    return name.rpartition("/")[2]


def is_name(name: str) -> bool:
    """Check whether `name` may be part of topics and file names."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str, what: str) -> str:
    """Return `name` if it may be a site or device id.

    Raises:
        ConfigError: It has characters that MQTT or a file system would misinterpret.
    """
    if not is_name(name):
        raise ConfigError(
            f"{what} {name!r}: use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


def matches(pattern: str, name: str) -> bool:
    """Check whether an MQTT topic filter matches a topic name (MQTT 3.1.1, section 4.7)."""
    return _compile_filter(pattern).fullmatch(name) is not None


@lru_cache(maxsize=256)
def _compile_filter(pattern: str) -> re.Pattern[str]:
    *above, last = ["[^/]*" if level == ANY else re.escape(level) for level in pattern.split("/")]
    if last != re.escape(ALL_BELOW):
        return re.compile("/".join([*above, last]), re.DOTALL)
    return re.compile("/".join(above) + "(/.*)?" if above else ".*", re.DOTALL)
