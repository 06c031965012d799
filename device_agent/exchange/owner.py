"""Owner of a state folder: what another device left there, as on a copied card, is set aside and never delivered.

An update carries the name of the device that trained it. A board that starts from a copy of another board's card, or
under a new name, would deliver the other one's update as its own.
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
OWNED = ("state", "session", "outbox")
"""What belongs to a device in its folder; models that are served and measurements of the board do not. The outbox goes
last: without a record it alone tells whose folder it is, also after a power cut between two of them."""


class Owner(msgspec.Struct, frozen=True):
    """Whose state it is."""

    device: str


def claim(folder: Path, device: str) -> None:
    """Make a folder the device's own before anything in it is used.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    owner, recorded = Owner(device), _recorded(folder)
    known = recorded or _of_waiting(folder)
    if known and known != owner:
        aside = unused_name(folder / f"of-{known.device}", "kept")
        log.warning(
            "%s holds the state of device %s, and this is %s: it is set aside as %s, and nothing of it is delivered; "
            "delete it if the card is a copy, else start an agent for %s with it",
            *(folder, known.device, device, aside.name, known.device),
        )
        with explain_disk_errors(folder):
            aside.mkdir(mode=0o700)
            for name in OWNED:
                if (folder / name).exists():
                    (folder / name).rename(aside / name)
            sync(folder)
    if recorded != owner:
        with explain_disk_errors(folder):
            replace_file(folder / FILE, msgspec.json.encode(owner), mode=0o600)


def _recorded(folder: Path) -> Owner | None:
    try:
        owner = msgspec.json.decode((folder / FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None
    return owner if is_name(owner.device) else None


def _of_waiting(folder: Path) -> Owner | None:
    """Return whose updates wait in a folder, which is all that an earlier version left to tell by."""
    for path in sorted((folder / "outbox").glob("[!.]*")):
        with suppress(OSError, WireError):
            if is_name(device := outbox.read(path).device):
                return Owner(device)
    return None
