"""Owner check of a state folder; quarantines another device's state.

An update carries the name of the device that trained it. A board started from a copy of another board's card, or under
a new name, would deliver the other device's update as its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from device_agent.exchange import outbox
from shared.errors import WireError
from shared.protocol.topics import is_name
from shared.runtime.durable import explain_disk_errors, replace_file, sync, unused_name

log = logging.getLogger(__name__)

FILE = "owner.json"
DEVICE_FOLDERS = ("state", "session", "outbox")
"""Folders that belong to one device; served models and board measurements do not. The outbox is moved last: without
a record it alone identifies the owner, also after a power cut between two moves."""


class Owner(msgspec.Struct, frozen=True):
    """Device that a state folder belongs to."""

    device: str


def claim(folder: Path, device: str) -> None:
    """Record the device as the folder's owner before anything in it is used.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    owner, recorded = Owner(device), _read_owner(folder)
    previous = recorded or _owner_of_updates(folder)
    if previous and previous != owner:
        aside = unused_name(folder / f"of-{previous.device}", "kept")
        log.warning(
            "%s holds the state of device %s, but this is %s: moved to %s, its updates are not delivered; "
            "delete it if the card is a copy, else start an agent for %s with it",
            *(folder, previous.device, device, aside.name, previous.device),
        )
        with explain_disk_errors(folder):
            aside.mkdir(mode=0o700)
            for name in DEVICE_FOLDERS:
                if (folder / name).exists():
                    (folder / name).rename(aside / name)
            sync(folder)
    if recorded != owner:
        with explain_disk_errors(folder):
            replace_file(folder / FILE, msgspec.json.encode(owner), mode=0o600)


def _read_owner(folder: Path) -> Owner | None:
    try:
        owner = msgspec.json.decode((folder / FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None
    return owner if is_name(owner.device) else None


def _owner_of_updates(folder: Path) -> Owner | None:
    """Return the device of the pending updates, the only trace that an earlier version left."""
    for path in sorted((folder / "outbox").glob("[!.]*")):
        with suppress(OSError, WireError):
            if is_name(device := outbox.read(path).device):
                return Owner(device)
    return None
