"""What a site's mosquitto is told, as text: its configuration; see `access` for its access list. Of mosquitto 2.0.11.

The broker trusts the root, and knows the site CA, whichever copy of that a client sends with its certificate. A list of
revoked certificates has to be there for whichever CA signed a client's: a site CA comes and goes by its list, at a
reload. 2.0.11 takes a changed `cafile` at a reload too; nothing here depends on it.

On the listener for boards an account has one client id and so one connection: nobody takes another's session by its
client id. The server's own processes have one account between them and a listener of their own on loopback, where each
has its own client id. mosquitto lets every account present any client id there, and ends the connection of who had it:
so that listener knows no CA, but only the certificates of the server and of the probe, which sign themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.protocol.topics import ROOT
from shared.transport.packet_limit import MOST_PACKET_BYTES

MADE = "# Made by `edge-server site init`, and made anew by every command that changes the site: do not edit."

MOST_CONNECTIONS = 4096
MOST_QUEUED, MOST_QUEUED_BYTES = 4096, 64 << 20
"""Of one client that is slow or away; a server asks for 48 frames of 256 KiB at once."""
MOST_INFLIGHT = 256

PROBES = "_probe"


@dataclass(frozen=True)
class BrokerPlaces:
    """Files that mosquitto reads, and whom it runs as.

    Attributes:
        trusted: Certificates of the root and the site CA.
        own: Certificates that the listener for the server's own processes lets in.
        certificate: Of the gateway, with the site CA's.
        revoked: List of revoked certificates.
        user: To whom it gives up root's rights, where it is started as root; empty for its own choice.
    """

    trusted: Path
    own: Path
    certificate: Path
    key: Path
    revoked: Path
    access: Path
    user: str = ""


def broker_conf(places: BrokerPlaces, *, port: int, own_port: int, bind: str = "") -> str:
    """Return mosquitto's configuration: TLS 1.2 and newer, by certificates of the site alone.

    Args:
        port: Where it listens for boards and peers.
        own_port: Where it listens for the server's own processes, on loopback.
        bind: The only address at which it does so for boards; empty for all.
    """
    lines = [
        MADE,
        *_listener(places, f"{port} {bind}".rstrip(), places.trusted),
        f"crlfile {places.revoked}",
        "use_username_as_clientid true",
        *_listener(places, f"{own_port} 127.0.0.1", places.own),
        "allow_anonymous false",
        f"acl_file {places.access}",
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
        *([f"user {places.user}"] if places.user else []),
    ]
    return "\n".join(lines) + "\n"


def _listener(places: BrokerPlaces, where: str, trusted: Path) -> Iterator[str]:
    yield f"listener {where}"
    yield "protocol mqtt"
    yield f"max_connections {MOST_CONNECTIONS}"
    yield f"cafile {trusted}"
    yield f"certfile {places.certificate}"
    yield f"keyfile {places.key}"
    yield "require_certificate true"
    yield "use_identity_as_username true"


def probe_topic(site: str, generation: int) -> str:
    """Return the one topic at which the probe may speak and hear."""
    return f"{ROOT}/{site}/{PROBES}/{generation}"


def forbidden_topic(site: str) -> str:
    """Return a topic at which the probe may do nothing, and to which nobody listens."""
    return f"{ROOT}/{site}/{PROBES}/forbidden"
