"""Address on which a site's enrolment service answers, kept in the site's folder for the commands that need it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.protocol.enrolment import USUAL_PORT
from shared.runtime.durable import replace_file

FILE = "enrolment.json"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the service listened when it was last started; `host` is empty for all addresses of the machine."""

    host: str = ""
    port: int = USUAL_PORT


def write_address(folder: Path, address: Address) -> None:
    """Keep the address.

    Raises:
        OSError: The folder cannot be written.
    """
    replace_file(folder / FILE, msgspec.json.encode(address), mode=0o644)


def read_address(folder: Path) -> Address:
    """Return the kept address; the usual one where none was kept or the file cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return Address()
