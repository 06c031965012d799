"""Bring a board to other clocks and another power mode, and put everything back, also after a kill.

What was set before lies in a journal from before the first step until after the last one back: whoever starts next
with that journal undoes what a killed process left.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from device_agent.hardware.files import text
from device_agent.hardware.tools import output
from device_agent.profile.schema import Profile
from device_agent.tuning.plan import Run, Settings, Step, Target, Write, back, plan
from device_agent.tuning.settings import power_mode, settings
from shared.errors import ConfigError, NoData
from shared.runtime.durable import aside, replace_file

log = logging.getLogger(__name__)

JOURNAL = "clocks.json"
"""Its name in an agent's state_dir."""

TOOL_S = 30.0
"""A power mode takes seconds; some versions of the tool wait for an answer for ever."""


class Tool(Protocol):
    """Runs one of the board's tools, as `device_agent.hardware.tools.output`."""

    def __call__(self, root: Path, *command: str, timeout_s: float) -> str:
        """Return what it prints; raises NoData."""
        ...


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the journal says: how the board was, and what it was to become."""

    before: Settings
    target: Target


@contextmanager
def restored(root: Path, profile: Profile, target: Target, journal: Path, run: Tool = output) -> Iterator[Settings]:
    """Have a board at its target while the block lasts; yields the settings then; everything is put back at its end.

    What an earlier process left in the journal is put back first.

    Raises:
        ConfigError: The board cannot do that, or this user may not; nothing is changed then. Or an earlier change
            cannot be put back.
        Unwritable: The journal cannot be written.
    """
    if not put_back(root, profile, journal, run):  # how the board was before that would be lost
        raise ConfigError(f"{journal}: what was set earlier is not put back yet; do so by hand, then remove that file")
    before = settings(root, profile)
    if not plan(before, target):
        yield before
        return
    _note(journal, Change(before=before, target=target))
    try:
        apply(root, profile, plan(before, target), run)
        after = settings(root, profile)
        apply(root, profile, plan(after, target), run)  # the clocks, where the first plan was a power mode
        yield settings(root, profile)
    finally:
        put_back(root, profile, journal, run)


def apply(root: Path, profile: Profile, steps: Iterable[Step], run: Tool = output) -> None:
    """Do steps one after another, and read back what each of them did.

    Raises:
        ConfigError: One is refused or without effect; the ones before it stay done.
    """
    for step in steps:
        match step:
            case Write():
                _write(root / step.path, step.value)
            case Run():
                _run(root, profile, step, run)
        log.info("%s", said(step))


def put_back(root: Path, profile: Profile, journal: Path, run: Tool = output) -> bool:
    """Undo what the journal tells, as far as the board lets us; return whether nothing is left to undo.

    Never raises for what the board refuses: the journal stays then, for the next start.
    """
    try:
        change = _noted(journal)
    except OSError as error:
        log.warning("%s: what to put back cannot be read (%s)", journal, error)
        return False
    if change is None:
        return True
    done = True
    for mode in (True, False):  # a power mode first: it sets clocks of its own
        try:
            steps = back(settings(root, profile), change.before, change.target, mode=mode)
        except ConfigError as error:
            log.warning("the power mode cannot be put back: %s", error)
            done = False
            continue
        for step in steps:
            try:
                apply(root, profile, (step,), run)
            except ConfigError as error:
                log.warning("not put back: %s", error)
                done = False
    if done:
        journal.unlink(missing_ok=True)
    return done


def said(step: Step) -> str:
    """Return a step as people write it."""
    match step:
        case Write():
            return f"/{step.path} = {step.value}"
        case Run():
            return " ".join(step.command)


def _write(path: Path, value: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode())
        finally:
            os.close(descriptor)
        now = text(path)
    except OSError as error:
        raise ConfigError(f"{path} does not take {value}: {error.strerror}{_remedy(path, error)}") from error
    except NoData as error:
        raise ConfigError(f"{path} was set to {value} and cannot be read back: {error}") from error
    if now != value and not _held_lower(path, now, value):
        raise ConfigError(f"{path} was set to {value} and says {now}: something else on this board sets it too")


def _held_lower(path: Path, now: str, value: str) -> bool:
    """Whether a highest clock was taken, and heat holds it lower for the time being."""
    return path.name == "scaling_max_freq" and now.isdecimal() and int(now) < int(value)


def _remedy(path: Path, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        rule = f"z /sys/devices/system/cpu/cpufreq/policy*/{path.name} 0664 root GROUP"
        return f"; run as root, or let the agent's group write it by a line in /etc/tmpfiles.d: `{rule}`"
    if error.errno == errno.EROFS:
        return "; /sys is mounted read-only here: run outside of the container, or give it /sys writable"
    return ""


def _run(root: Path, profile: Profile, step: Run, run: Tool) -> None:
    try:
        run(root, *step.command, timeout_s=TOOL_S)
    except NoData as error:
        raise ConfigError(f"{error}; run `sudo {' '.join(step.command)}` on a terminal") from error
    now = power_mode(root, profile.power_mode)
    if now != step.power_mode:  # such tools fail silently where a restart or a terminal is wanted
        raise ConfigError(
            f"{' '.join(step.command)}: the board stays in {now or 'an unknown mode'} instead of {step.power_mode}; "
            "run it on a terminal, it may want a restart"
        )


def _note(journal: Path, change: Change) -> None:
    """Write the journal so that it survives a power cut: the power mode does too."""
    replace_file(journal, msgspec.json.encode(change))


def _noted(journal: Path) -> Change | None:
    try:
        return msgspec.json.decode(journal.read_bytes(), type=Change)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        unread = aside(journal)
        journal.replace(unread)
        log.warning("%s: what to put back cannot be read (%s); kept as %s", journal, error, unread.name)
    return None
