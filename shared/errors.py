"""Errors, named by what the reader of the message can do about them."""

from __future__ import annotations

from typing import Literal


def escape_text(text: str) -> str:
    r"""Return text that can be sent and printed: bytes of a file name that are not UTF-8 become `\\udcXX`."""
    return text.encode(errors="backslashreplace").decode()


class FieldFleetError(Exception):
    """Base of every error raised on purpose."""

    def __str__(self) -> str:
        """Return the message; a path in it may hold bytes that are not UTF-8, and no message could carry them."""
        return escape_text(super().__str__())


class ConfigError(FieldFleetError):
    """The operator must edit a file or a command line; retrying cannot help."""


class NoSuchRun(ConfigError):
    """Nothing in a folder of runs has the name that was given, or begins so."""


class WireError(FieldFleetError):
    """The peer sent bytes we cannot accept; drop them, keep the session.

    Attributes:
        reason: One word under which refusals are counted, such as `truncated` or `shape`.
    """

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class Unrecordable(WireError):
    """The journal could not read this record back, so it is not written; drop what it was made from."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="unrecordable")


class Unreachable(FieldFleetError):
    """The broker or the peer is away; retrying later may help."""


class Untrusted(Unreachable):
    """The broker and this machine do not trust each other: mend a certificate, a clock or a name; it is tried again."""


class EnrolmentFailed(FieldFleetError):
    """This board did not get a certificate; the message says why and what to do.

    Attributes:
        code: With which the command ends: 2 the token or the board's own file, 3 another CA than the token's, 4 a
            clock, 5 nobody answers.
        reason: Of the gateway's refusal, one word; empty where it did not refuse.
    """

    def __init__(self, message: str, *, code: int, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class TooLarge(Unreachable):
    """The broker takes no payload of this size: cut it smaller, or raise the broker's largest packet."""


class CorruptFile(FieldFleetError):
    """A file of ours does not hold what was written; set it aside and use an older one."""


class Unwritable(FieldFleetError, OSError):
    """A disk of ours takes nothing more; make room or make it writable, and the same write works."""


class TaskFailed(FieldFleetError):
    """A device could not finish a task; the task is lost, the device is not."""


class Diverged(TaskFailed):
    """Training gave numbers that are none; nothing of it is kept. The message names the step and the remedy."""


class TrainerDied(TaskFailed):
    """The trainer's process ended under a task; the same task may be tried again."""


class Superseded(FieldFleetError):
    """A newer task took the place of this one; its work is dropped."""


class InferenceRefused(FieldFleetError):
    """The server's half of a network was not run on a device's features; its own half, or another server, may do.

    Attributes:
        reason: One word, such as `busy`, `unknown-release` or `shape`; of all, only `busy` passes by itself.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SessionLost(FieldFleetError):
    """The server knows nothing of a split session any more; the same task, begun anew, can be done."""


class ServingRefused(FieldFleetError):
    """The inference process does not serve a model, or the model fails: another one, or the one before, may do."""


class ServingDied(ServingRefused):
    """The inference process ended under what it was asked for, or is not there; it is started again by itself."""


class NoData(FieldFleetError):
    """This board has no such sensor, or it does not answer; not a fault, the reading is simply absent.

    Attributes:
        lack: `not_present`, `denied`, `busy` or `invalid`, see `shared.protocol.measurements.Absent`.
    """

    def __init__(
        self, message: str, *, lack: Literal["not_present", "denied", "busy", "invalid"] = "not_present"
    ) -> None:
        super().__init__(message)
        self.lack: Literal["not_present", "denied", "busy", "invalid"] = lack


class Infeasible(FieldFleetError):
    """No allocation meets the budgets; relax a budget or drop a device."""


def is_cause(cause: str, error: type[FieldFleetError]) -> bool:
    """Tell whether a failure that a device reports is of a kind: its cause begins with the error's name."""
    return cause.startswith(f"{error.__name__}: ")
