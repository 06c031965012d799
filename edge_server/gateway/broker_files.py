"""Mosquitto configuration of a site, for mosquitto 2.0.11 and later.

The broker trusts the root and knows the site CA, whichever copy of it a client sends with its certificate. It needs a
revocation list of each CA that signed a client's certificate; a site CA comes and goes with its list, at a reload.
2.0.11 also reads a changed `cafile` at a reload; nothing here depends on that.

On the listener for boards, the client id is the account's name, so nobody can take over another account's session. The
server's processes share one account and have a listener of their own on loopback, where each has its own client id.
There, mosquitto would let any account present any client id and disconnect its owner, so that listener trusts no CA,
only the self-signed certificates of the server and the probe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.protocol.topics import ROOT
from shared.transport.packet_limit import MOST_PACKET_BYTES

HEADER = "# Made by `edge-server site init`, and made anew by every command that changes the site: do not edit."

MOST_CONNECTIONS = 4096
MOST_QUEUED, MOST_QUEUED_BYTES = 4096, 64 << 20
"""Limits for one client that is slow or offline; a server requests 48 frames of 256 KiB at once."""
MOST_INFLIGHT = 256

PROBES = "_probe"


@dataclass(frozen=True)
class BrokerPaths:
    """Files that mosquitto reads, and the user that it runs as.

    Attributes:
        trusted: Certificates of the root and the site CA.
        local: Certificates that the loopback listener accepts.
        certificate: Gateway's certificate, followed by the site CA's.
        user: User to switch to when started as root; empty for mosquitto's default.
    """

    trusted: Path
    local: Path
    certificate: Path
    key: Path
    revoked: Path
    access: Path
    user: str = ""


def broker_conf(paths: BrokerPaths, *, port: int, own_port: int, bind: str = "") -> str:
    """Return mosquitto's configuration: TLS 1.2 and later, client certificates of the site required.

    Args:
        port: Port of the listener for boards and peers.
        own_port: Port of the loopback listener for the server's processes.
        bind: Only address of the listener for boards; empty for all.
    """
    lines = [
        HEADER,
        *_listener(paths, f"{port} {bind}".rstrip(), paths.trusted),
        f"crlfile {paths.revoked}",
        "use_username_as_clientid true",
        *_listener(paths, f"{own_port} 127.0.0.1", paths.local),
        "allow_anonymous false",
        f"acl_file {paths.access}",
        "set_tcp_nodelay true",
        f"max_packet_size {MOST_PACKET_BYTES}",
        f"max_inflight_messages {MOST_INFLIGHT}",
        f"max_queued_messages {MOST_QUEUED}",
        f"max_queued_bytes {MOST_QUEUED_BYTES}",
        "persistent_client_expiration 2d",
        "persistence false",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        *([f"user {paths.user}"] if paths.user else []),
    ]
    return "\n".join(lines) + "\n"


def _listener(paths: BrokerPaths, where: str, trusted: Path) -> Iterator[str]:
    yield f"listener {where}"
    yield "protocol mqtt"
    yield f"max_connections {MOST_CONNECTIONS}"
    yield f"cafile {trusted}"
    yield f"certfile {paths.certificate}"
    yield f"keyfile {paths.key}"
    yield "require_certificate true"
    yield "use_identity_as_username true"


def probe_topic(site: str, generation: int) -> str:
    """Return the only topic on which the probe may publish and receive."""
    return f"{ROOT}/{site}/{PROBES}/{generation}"


def forbidden_topic(site: str) -> str:
    """Return a topic on which the probe has no right and which nobody subscribes to."""
    return f"{ROOT}/{site}/{PROBES}/forbidden"
