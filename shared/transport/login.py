"""User name and password for a broker, read again for every connection.

Between a site's own broker and devices, certificates replace them, see `tls`. The password has its own file because
the configuration may be shown and copied.
"""

from __future__ import annotations

import logging
from pathlib import Path

from shared.errors import Unreachable
from shared.transport.base import Broker, Login
from shared.transport.tls import describe_unsafe_mode

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 16
"""Longest password in MQTT."""


def read_login(broker: Broker) -> Login | None:
    """Read the login of a broker; None where it needs none.

    Raises:
        Unreachable: The password cannot be read; it may be readable later.
    """
    if not broker.user:
        return None
    if not broker.password_file:
        return Login(broker.user, "")
    path = Path(broker.password_file)
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).decode("utf-8-sig").splitlines()
        if too_open := describe_unsafe_mode(path):
            log.warning("password_file: %s", too_open)
    except (OSError, UnicodeDecodeError) as error:
        raise Unreachable(f"password_file: {path}: {error}; put the password there") from error
    return Login(broker.user, lines[0] if lines else "")
