"""What a site's mosquitto is told, as text: its configuration and access list. Measured with mosquitto 2.0.11.

The broker trusts the root alone; clients send the site CA's certificate with theirs. A list of revoked certificates has
to be there for whichever CA signed a client's: a site CA comes and goes by its list, at a reload, while a changed
`cafile` waits for a restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.protocol.topics import ROOT

MADE = "# Made by `edge-server site init`, and made anew by every command that changes the site: do not edit."

MOST_CONNECTIONS = 4096
MOST_PACKET_BYTES = 8 << 20
"""Twice the largest frame: what is above is no part of the protocol."""
MOST_QUEUED, MOST_QUEUED_BYTES = 4096, 64 << 20
"""Of one client that is slow or away; a server asks for 48 frames of 256 KiB at once."""
MOST_INFLIGHT = 256


@dataclass(frozen=True)
class BrokerPlaces:
    """Files that mosquitto reads, and whom it runs as.

    Attributes:
        root: Certificate of the root.
        certificate: Of the gateway, with the site CA's.
        key: Of that certificate.
        revoked: List of revoked certificates.
        access: Access list.
        user: To whom it gives up root's rights, where it is started as root; empty for its own choice.
    """

    root: Path
    certificate: Path
    key: Path
    revoked: Path
    access: Path
    user: str = ""


def broker_conf(places: BrokerPlaces, *, port: int, bind: str = "") -> str:
    """Return mosquitto's configuration: TLS 1.2 and newer, by certificates of the site alone.

    Args:
        places: Its files.
        port: Where it listens.
        bind: The only address at which it does; empty for all.
    """
    lines = [
        MADE,
        f"listener {port} {bind}".rstrip(),
        "protocol mqtt",
        f"max_connections {MOST_CONNECTIONS}",
        f"cafile {places.root}",
        f"certfile {places.certificate}",
        f"keyfile {places.key}",
        f"crlfile {places.revoked}",
        "require_certificate true",
        "use_identity_as_username true",
        "use_username_as_clientid true",
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


def access_list(site: str, denied: Iterable[str], generation: int = 0) -> str:
    """Return mosquitto's access list: each account its own topics, and nothing at all for those that were revoked.

    A line `deny` of an account comes before every pattern.

    Args:
        site: Whose topics.
        denied: Accounts that may do nothing.
        generation: Grows with every reload; the probe may speak at a topic of this number alone, which shows that the
            broker has taken this list.
    """
    here = f"{ROOT}/{site}"
    lines = [MADE, f"pattern readwrite {here}/%u/#", f"pattern read {here}/_all/#"]
    lines += [f"pattern read {here}/{one}/status" for one in ("_server", "_tops")]
    lines += ["", "user edge-server", f"topic readwrite {here}/#"]
    lines += ["", "user probe", f"topic readwrite {probe_topic(site, generation)}"]
    for name in sorted(set(denied)):
        lines += ["", f"user {name}", "topic deny #"]
    return "\n".join(lines) + "\n"


def probe_topic(site: str, generation: int) -> str:
    """Return the one topic at which the probe may speak and hear."""
    return f"{ROOT}/{site}/_probe/{generation}"


def forbidden_topic(site: str) -> str:
    """Return a topic at which the probe may do nothing, and to which nobody listens."""
    return f"{ROOT}/{site}/_probe/forbidden"
