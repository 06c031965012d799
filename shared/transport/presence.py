"""Session numbers, birth messages and MQTT wills of a process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from shared.protocol import wire
from shared.protocol.inputs import Inputs
from shared.protocol.messages import Status
from shared.protocol.topics import topic
from shared.runtime.distributions import installed_version
from shared.runtime.durable import replace_file
from shared.transport.base import Presence

log = logging.getLogger(__name__)

MAX_SESSIONS = 1 << 62
READY, SERVES = "ready", "serves"
"""What a device says in its birth: that it takes tasks, or that it only serves models."""


@dataclass
class Session:
    """Counts the sessions of a device in a file, so that a late death cannot be taken for that of a new one.

    Where the file cannot be read or written, the numbers go on from those of this process; the server tells processes
    apart by `instance`. Of a server, `ended` are its runs that are over. `state` is `READY` or `SERVES`.
    """

    counter: Path
    device: str
    site: str
    instance: str
    ended: tuple[str, ...] = ()
    classes: Sequence[str] | None = None
    inputs: Inputs | None = None
    trains: bool = True
    state: str = READY
    _last: int = 0
    _warned: bool = False

    def presence(self) -> Presence:
        """Begin a new session: return its birth and its will, which carry the same number."""
        self._last = number = max(self._last, self._stored()) + 1
        self._store(number)
        us = self.device, self.site, self.instance, number
        told: dict[str, Any] = {"classes": self.classes, "inputs": self.inputs, "trains": self.trains}
        return build_presence(*us, ended=self.ended, state=self.state, **told)

    def _stored(self) -> int:
        try:
            number = int(self.counter.read_text())
        except (FileNotFoundError, ValueError):
            return 0  # the first session ever, or the file rotted
        except OSError as error:
            self._warn(error)
            return 0
        return number if 0 < number < MAX_SESSIONS - 1 else 0  # one out of these bounds could not even be sent

    def _store(self, number: int) -> None:
        try:
            replace_file(self.counter, b"%d\n" % number, durable=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Say once that the count will not outlive this process."""
        if not self._warned:
            log.warning("sessions are counted in memory only (%s): make %s writable", error, self.counter.parent)
        self._warned = True


def build_presence(  # noqa: PLR0913 - what a birth says
    device: str,
    site: str,
    instance: str,
    number: int,
    *,
    ended: tuple[str, ...] = (),
    classes: Sequence[str] | None = None,
    inputs: Inputs | None = None,
    trains: bool = True,
    state: str = READY,
) -> Presence:
    """Build the birth and the will of a process's session.

    Args:
        device: Id of the device.
        site: Id of the site.
        instance: A word that no other process has.
        number: Of the session; it only grows.
        ended: Of a server: its runs that are over.
        classes: Names of the device's classes, none for plain numbers; None where nobody knows.
        inputs: How the device prepares its examples; None where nobody knows.
        trains: Whether the device is given tasks that train.
        state: `READY` or `SERVES`.
    """
    lasting = "" if state == READY else state  # one that only serves is told from others when it is gone, too
    will = Status(device=device, session=number, instance=instance, online=False, state=lasting)
    told = {"classes": None if classes is None else list(classes), "inputs": inputs, "trains": trains}
    birth = replace(will, online=True, state=state, version=_version(), ended=ended, **told)
    return Presence(topic(site, device, "status"), wire.encode(birth), wire.encode(will))


@cache
def _version() -> str:
    return installed_version("fieldfleet")
