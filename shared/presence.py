"""Who a process is on the network: an id, a session number that only grows, a word that no other process has."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared import wire
from shared.messages import Status
from shared.topics import topic
from shared.transport.base import Presence

MAX_SESSIONS = 1 << 62


@dataclass
class Session:
    """Counts the sessions of a device in a file, so that a late death cannot be taken for that of a new one."""

    counter: Path
    device: str
    site: str
    instance: str

    def presence(self) -> Presence:
        """Begin a new session: return its birth and its will, which carry the same number."""
        number = self._next()
        birth = Status(
            device=self.device, session=number, instance=self.instance, online=True, state="ready", version=_version()
        )
        will = Status(device=self.device, session=number, instance=self.instance, online=False)
        return Presence(topic(self.site, self.device, "status"), wire.encode(birth), wire.encode(will))

    def _next(self) -> int:
        try:
            number = int(self.counter.read_text()) + 1
        except (FileNotFoundError, ValueError):
            number = 1
        if not 0 < number < MAX_SESSIONS:
            number = 1  # the file rotted; such a number could not even be sent
        partial = self.counter.with_suffix(".part")
        partial.write_text(f"{number}\n")
        partial.replace(self.counter)
        return number


def _version() -> str:
    try:
        return version("fieldfleet")
    except PackageNotFoundError:
        return ""
