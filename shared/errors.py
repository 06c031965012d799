"""Exception hierarchy, classified by what the receiver can do about an error."""

from __future__ import annotations

from typing import Literal

REMEDY_SEPARATOR = "; "
"""Separates problem and remedy in a message."""


def escape_text(text: str) -> str:
    r"""Escape bytes of a file name that are not UTF-8 as `\\udcXX`, so that text can be sent and printed."""
    return text.encode(errors="backslashreplace").decode()


def split_remedy(message: str) -> tuple[str, str]:
    """Split a message `problem; remedy` at its last semicolon; the remedy is empty if there is none."""
    problem, _, remedy = message.rpartition(REMEDY_SEPARATOR)
    return (problem, remedy) if problem else (remedy, "")


def describe_cause(error: Exception) -> str:
    """Return the message of a system's or library's error in one line, without the path that ours begins with."""
    strerror = error.strerror if isinstance(error, OSError) else None
    return " ".join((strerror or str(error) or type(error).__name__).split())


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, whose further lines may be a stack; its type if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class FieldFleetError(Exception):
    """Base of every error raised on purpose."""

    def __str__(self) -> str:
        """Return the message, escaped: a path in it may hold bytes that are not UTF-8."""
        return escape_text(super().__str__())


class ConfigError(FieldFleetError):
    """The operator must edit a file or a command line; retrying cannot help."""


class SiteBusy(FieldFleetError):
    """Another server is running for the site; stop it, or queue the plan."""


class NoSuchRun(ConfigError):
    """No run has this name, or a name that begins with it."""


class WireError(FieldFleetError):
    """The peer sent unacceptable bytes; drop them, keep the session.

    Attributes:
        reason: Category for counters, such as `truncated` or `shape`.
    """

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class Unrecordable(WireError):
    """The journal could not read this record back, so it is not written; drop its source."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="unrecordable")


class Unreachable(FieldFleetError):
    """The broker or the peer is unreachable; retrying later may help."""


class Untrusted(Unreachable):
    """Mutual TLS authentication failed: correct a certificate, a clock or a name; the client retries."""


class EnrolmentFailed(FieldFleetError):
    """This board did not get a certificate; the message has the cause and the remedy.

    Attributes:
        code: Exit code of the command: 2 the token or the board's own file, 3 another CA than the token's, 4 a clock, 5
            no answer.
        reason: Reason of the gateway's refusal; empty where it did not refuse.
    """

    def __init__(self, message: str, *, code: int, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class TooLarge(Unreachable):
    """The broker does not accept a packet of this size: send smaller ones, or raise the broker's limit."""


class CorruptFile(FieldFleetError):
    """One of our files is damaged; set it aside and use an older one."""


class Unwritable(FieldFleetError, OSError):
    """A disk is full, read-only or failing; after that is corrected, the same write works."""


class TaskFailed(FieldFleetError):
    """A device could not finish a task; the task is lost, the device is not."""


class Diverged(TaskFailed):
    """Training produced NaN or infinity; its result is dropped. The message names the step and the remedy."""


class TrainerDied(TaskFailed):
    """The trainer process died during a task; the task may be retried."""


class Superseded(FieldFleetError):
    """A newer task replaced this one; its work is dropped."""


class InferenceRefused(FieldFleetError):
    """The server refused to run its half of a network on a device's features; run it locally, or ask another server.

    Attributes:
        reason: Such as `busy`, `unknown-release` or `shape`; only `busy` is temporary.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class SessionLost(FieldFleetError):
    """The server no longer has a split session; the task can be repeated from its start."""


class ServingRefused(FieldFleetError):
    """The inference process cannot serve a model, or the model fails; another version may work."""


class ServingDied(ServingRefused):
    """The inference process died during a request, or does not run; it is restarted automatically."""


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
    """Check whether a failure reported by a device is of a kind: its text begins with the error's name."""
    return cause.startswith(f"{error.__name__}: ")
