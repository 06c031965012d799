"""Session numbers, birth messages and MQTT wills of a process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from shared.protocol import wire
from shared.protocol.inputs import Inputs
from shared.protocol.messages import PAYLOAD, TASK_FIELDS, Status
from shared.protocol.topics import SERVER, topic
from shared.runtime.distributions import installed_version
from shared.runtime.durable import replace_file
from shared.transport.base import Presence

log = logging.getLogger(__name__)

MAX_SESSIONS = 1 << 62
READY, SERVES = "ready", "serves"
"""State in a device's birth: it accepts tasks, or it only serves models."""


@dataclass
class Session:
    """Session counter of a device in a file, so that a late will is not taken for that of a new session.

    If the file cannot be read or written, the numbers continue in memory; the server distinguishes processes by
    `instance`. Of a server, `ended` are its finished runs. `state` is `READY` or `SERVES`.
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
        """Begin a new session: return its birth and its will, with the same number."""
        self._last = number = max(self._last, self._read_counter()) + 1
        self._write_counter(number)
        return build_presence(
            self.device,
            self.site,
            self.instance,
            number,
            ended=self.ended,
            classes=self.classes,
            inputs=self.inputs,
            trains=self.trains,
            state=self.state,
        )

    def _read_counter(self) -> int:
        try:
            number = int(self.counter.read_text())
        except (FileNotFoundError, ValueError):
            return 0  # the first session ever, or a damaged file
        except OSError as error:
            self._warn(error)
            return 0
        return number if 0 < number < MAX_SESSIONS - 1 else 0  # other numbers could not even be sent

    def _write_counter(self, number: int) -> None:
        try:
            replace_file(self.counter, b"%d\n" % number, durable=False)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """Warn once that the counter will not outlive this process."""
        if not self._warned:
            log.warning("sessions are counted in memory only (%s): make %s writable", error, self.counter.parent)
        self._warned = True


def build_presence(  # noqa: PLR0913 - the fields of a birth
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
    knows: Sequence[str] = TASK_FIELDS,
) -> Presence:
    """Build the birth and the will of a session.

    Args:
        instance: An id that no other process has.
        number: Session number, which only increases.
        ended: Of a server: its finished runs.
        classes: Class names, empty for plain numbers; None if unknown.
        inputs: Input preparation of the device; None if unknown.
        trains: Whether the device accepts training tasks.
        state: `READY` or `SERVES`, see above.
        knows: Fields of a task that a device heeds.
    """
    lasting = "" if state == READY else state  # a device that only serves is recognisable offline too
    will = Status(device=device, session=number, instance=instance, online=False, state=lasting)
    fields = {"classes": None if classes is None else list(classes), "inputs": inputs, "trains": trains}
    heeded = (PAYLOAD,) if device == SERVER else tuple(knows)
    birth = replace(will, online=True, state=state, version=_version(), ended=ended, knows=heeded, **fields)
    return Presence(topic(site, device, "status"), wire.encode(birth), wire.encode(will))


@cache
def _version() -> str:
    return installed_version("fieldfleet")
