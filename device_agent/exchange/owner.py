"""Owner of a state folder: what another device left there, as on a copied card, is set aside and never delivered.

An update carries the name of the device that trained it. A board that starts from a copy of another board's card, or
under a new name, would deliver the other one's update as its own.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from device_agent.exchange import outbox
from shared.errors import WireError
from shared.runtime.durable import explain_disk_errors, replace_file, sync

log = logging.getLogger(__name__)

FILE = "owner.json"
OWNED = ("outbox", "state", "session")
"""What belongs to a device in its folder; models that are served and measurements of the board do not."""


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
        aside = _unused(folder / f"of-{known.device}")
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
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _of_waiting(folder: Path) -> Owner | None:
    """Return whose updates wait in a folder, which is all that an earlier version left to tell by."""
    for path in sorted((folder / "outbox").glob("[!.]*")):
        try:
            return Owner(outbox.read(path).device)
        except (OSError, WireError):
            continue
    return None


def _unused(path: Path) -> Path:
    found, number = path, 1
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found
