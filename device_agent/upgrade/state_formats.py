"""In what form this version writes each kind of state file, and whether it can read what another version left.

`STATE/formats.json` holds the newest form of each kind that was ever written there. A version that knows an older one
alone does not start: it would take what it finds for damage, and throw it away. What a new version writes in a newer
form it writes once its trial is over: until then the version before may have to read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.upgrade.record import MOST_BYTES, decode_small
from shared.errors import ConfigError, CorruptFile
from shared.runtime.durable import replace_file

FILE = "formats.json"


@dataclass(frozen=True)
class StateKind:
    """A kind of state file.

    Attributes:
        files: Their names in the agent's folder.
        holds: What is lost with them.
    """

    files: tuple[str, ...]
    holds: str


FORMATS: Mapping[str, int] = {"calibration": 1, "clocks": 1, "identity": 1, "outbox": 1, "releases": 1, "state": 1}
"""The form that this version writes of each kind; it reads that and all older ones. Whoever changes what such a file
looks like so that an older version cannot read it, counts it up here. A gateway reads this line of a package."""

KINDS: Mapping[str, StateKind] = {
    "outbox": StateKind(("outbox",), "updates that the server has not taken yet"),
    "state": StateKind(("state",), "what the device keeps of its runs, its own model too"),
    "releases": StateKind(("releases",), "the models that it serves"),
    "identity": StateKind(("identity",), "its key and certificate: it must join anew"),
    "calibration": StateKind(("calibration.json",), "the fit of its power model"),
    "clocks": StateKind(("clocks.json",), "how clocks and power mode were before the agent changed them"),
}


class WrittenFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The newest forms in a folder.

    Attributes:
        formats: By kind.
        version: Which version of the agent raised one last.
    """

    formats: dict[str, int]
    version: str = ""


def decode_formats(data: bytes, place: str) -> WrittenFormats:
    """Return what a file of forms says.

    Args:
        data: Its content.
        place: Where it lies, for the error.

    Raises:
        ConfigError: It is damaged, so that nobody knows whether this version may write there.
    """
    try:
        return decode_small(data, WrittenFormats, place)
    except CorruptFile as error:
        raise ConfigError(f"{error}; delete it if no newer version ever ran here") from error


def read_formats(state_dir: Path) -> WrittenFormats:
    """Return what a folder holds; no forms where no version wrote any down.

    Raises:
        ConfigError: As `decode_formats`.
    """
    path = state_dir / FILE
    try:
        with path.open("rb") as file:
            return decode_formats(file.read(MOST_BYTES + 1), str(path))
    except FileNotFoundError:
        return WrittenFormats(formats={})


def find_losses(written: Mapping[str, int], known: Mapping[str, int]) -> dict[str, str]:
    """Return the kinds that a version cannot read, and what is lost with each.

    A kind that the version does not know at all is none of these: it leaves such files alone.

    Args:
        written: The newest forms in a folder, by kind.
        known: Those that the version writes.
    """
    unreadable = [name for name, number in written.items() if name in known and number > known[name]]
    return {name: KINDS[name].holds if name in KINDS else f"files of the kind {name}" for name in sorted(unreadable)}


def check_formats(state_dir: Path, known: Mapping[str, int] = FORMATS) -> None:
    """Refuse to work in a folder that a newer version wrote in so that this one cannot read it.

    Args:
        state_dir: The agent's folder.
        known: What this version writes.

    Raises:
        ConfigError: It did: what would be lost, and which version to take.
    """
    written = read_formats(state_dir)
    losses = find_losses(written.formats, known)
    if losses:
        kept = "; ".join(f"{name}: {what}" for name, what in losses.items())
        newer = f"version {written.version}" if written.version else "a newer version"
        raise ConfigError(
            f"{state_dir} was written by {newer}, and this one cannot read ({kept}); install {newer} or a later one, "
            "or give up what it wrote by `device-agent upgrade install FILE.deb --lose`"
        )


def raise_formats(state_dir: Path, version: str, known: Mapping[str, int] = FORMATS) -> bool:
    """Write down that this version writes here; returns whether a form was raised.

    Args:
        state_dir: The agent's folder.
        version: This one.
        known: What it writes.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    written = read_formats(state_dir).formats
    highest = written | {name: max(number, written.get(name, 0)) for name, number in known.items()}
    if highest == written:
        return False
    replace_file(state_dir / FILE, encode_formats(highest, version))
    return True


def encode_formats(formats: Mapping[str, int], version: str) -> bytes:
    """Return the file's content: forms by kind, and which version raised one last."""
    return msgspec.json.encode(WrittenFormats(formats=dict(formats), version=version), order="deterministic") + b"\n"
