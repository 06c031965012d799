"""A name and password for brokers that ask for these; read anew for every connection, so that a new one is taken.

Between a site's own broker and devices certificates do this, see `tls`. A password in a file and not in the
configuration: that one may be shown, copied and asked about.
"""

from __future__ import annotations

import logging
from pathlib import Path

from shared.errors import Unreachable
from shared.transport.base import Broker, Login
from shared.transport.tls import find_openness

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 16
"""Of a password, as MQTT writes it."""


def login_of(broker: Broker) -> Login | None:
    """Return by what a broker knows us besides certificates; None where it asks for nothing.

    Raises:
        Unreachable: The password cannot be read; it may be there the next time.
    """
    if not broker.user:
        return None
    if not broker.password_file:
        return Login(broker.user, "")
    path = Path(broker.password_file)
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).decode("utf-8-sig").splitlines()
        if too_open := find_openness(path):
            log.warning("password_file: %s", too_open)
    except (OSError, UnicodeDecodeError) as error:
        raise Unreachable(f"password_file: {path}: {error}; put the password there") from error
    return Login(broker.user, lines[0] if lines else "")
