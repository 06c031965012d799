"""Stored address of the enrolment service, for the commands that need it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.protocol.enrolment import USUAL_PORT
from shared.runtime.durable import replace_file

FILE = "enrolment.json"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Listening address of the service at its last start; `host` is empty for all addresses of the machine."""

    host: str = ""
    port: int = USUAL_PORT


def write_address(folder: Path, address: Address) -> None:
    """Store the address.

    Raises:
        OSError: The folder cannot be written.
    """
    replace_file(folder / FILE, msgspec.json.encode(address), mode=0o644)


def read_address(folder: Path) -> Address:
    """Return the stored address, or the default if there is none or it cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return Address()
