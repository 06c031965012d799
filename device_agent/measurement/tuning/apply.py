"""Apply clocks and a power mode to a board, and restore the settings of before, also after a kill.

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

from device_agent.hardware.files import read_text
from device_agent.hardware.tools import run_tool
from device_agent.measurement.tuning.plan import Run, Settings, Step, Target, Write, plan_restore, plan_steps
from device_agent.measurement.tuning.settings import read_power_mode, read_settings
from device_agent.profile.schema import Profile
from shared.errors import ConfigError, NoData
from shared.runtime.durable import replace_file, unused_name

log = logging.getLogger(__name__)

JOURNAL_NAME = "clocks.json"
"""Its name in an agent's state_dir."""

TOOL_TIMEOUT_S = 30.0
"""A power mode takes seconds; some versions of the tool wait for an answer for ever."""


class Tool(Protocol):
    """Run one of the board's tools, as `device_agent.hardware.tools.run_tool`."""

    def __call__(self, root: Path, *command: str, timeout_s: float) -> str:
        """Return what it prints; raises NoData."""
        ...


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The journal's content: the settings of before, and the target."""

    before: Settings
    target: Target


@contextmanager
def hold_target(
    root: Path, profile: Profile, target: Target, journal: Path, run: Tool = run_tool
) -> Iterator[Settings]:
    """Hold a board at its target while the block lasts: yield the settings then, and restore the old ones at its end.

    What an earlier process left in the journal is restored first.

    Args:
        root: The board's root folder.
        target: Clocks and power mode that are wanted.
        journal: File that keeps the settings of before.
        run: Runs the board's tools.

    Raises:
        ConfigError: The board cannot do that, or this user may not; nothing is changed then. Or an earlier change
            cannot be restored.
        Unwritable: The journal cannot be written.
    """
    if not restore(root, profile, journal, run):  # how the board was before that would be lost
        raise ConfigError(f"{journal}: what was set earlier is not put back yet; do so by hand, then remove that file")
    before = read_settings(root, profile)
    if not plan_steps(before, target):
        yield before
        return
    _write_journal(journal, Change(before=before, target=target))
    try:
        apply_steps(root, profile, plan_steps(before, target), run)
        after = read_settings(root, profile)
        apply_steps(root, profile, plan_steps(after, target), run)  # the clocks, where the first plan was a power mode
        yield read_settings(root, profile)
    finally:
        restore(root, profile, journal, run)


def apply_steps(root: Path, profile: Profile, steps: Iterable[Step], run: Tool = run_tool) -> None:
    """Apply steps one after another, and read back what each of them did.

    Args:
        root: The board's root folder.
        steps: As `plan_steps` returns them.
        run: Runs the board's tools.

    Raises:
        ConfigError: One is refused or without effect; the ones before it stay done.
    """
    for step in steps:
        match step:
            case Write():
                _write_file(root / step.path, step.value)
            case Run():
                _run_step(root, profile, step, run)
        log.info("%s", format_step(step))


def restore(root: Path, profile: Profile, journal: Path, run: Tool = run_tool) -> bool:
    """Undo the journal's change, as far as the board lets us; return whether nothing is left to undo.

    Never raises for what the board refuses: the journal stays then, for the next start.

    Args:
        root: The board's root folder.
        journal: File that keeps the settings of before.
        run: Runs the board's tools.
    """
    try:
        change = _read_journal(journal)
    except OSError as error:
        log.warning("%s: what to put back cannot be read (%s)", journal, error)
        return False
    if change is None:
        return True
    done = True
    for mode in (True, False):  # a power mode first: it sets clocks of its own
        try:
            steps = plan_restore(read_settings(root, profile), change.before, change.target, mode=mode)
        except ConfigError as error:
            log.warning("the power mode cannot be put back: %s", error)
            done = False
            continue
        for step in steps:
            try:
                apply_steps(root, profile, (step,), run)
            except ConfigError as error:
                log.warning("not put back: %s", error)
                done = False
    if done:
        journal.unlink(missing_ok=True)
    return done


def format_step(step: Step) -> str:
    """Return a step as a shell line or an assignment."""
    match step:
        case Write():
            return f"/{step.path} = {step.value}"
        case Run():
            return " ".join(step.command)


def _write_file(path: Path, value: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, value.encode())
        finally:
            os.close(descriptor)
        now = read_text(path)
    except OSError as error:
        raise ConfigError(f"{path} does not take {value}: {error.strerror}{_suggest_remedy(path, error)}") from error
    except NoData as error:
        raise ConfigError(f"{path} was set to {value} and cannot be read back: {error}") from error
    if now != value and not _is_held_lower(path, now, value):
        raise ConfigError(f"{path} was set to {value} and says {now}: something else on this board sets it too")


def _is_held_lower(path: Path, now: str, value: str) -> bool:
    """Return whether a highest clock was taken, and heat holds it lower for the time being."""
    return path.name == "scaling_max_freq" and now.isdecimal() and int(now) < int(value)


def _suggest_remedy(path: Path, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        rule = f"z /sys/devices/system/cpu/cpufreq/policy*/{path.name} 0664 root GROUP"
        return f"; run as root, or let the agent's group write it by a line in /etc/tmpfiles.d: `{rule}`"
    if error.errno == errno.EROFS:
        return "; /sys is mounted read-only here: run outside of the container, or give it /sys writable"
    return ""


def _run_step(root: Path, profile: Profile, step: Run, run: Tool) -> None:
    try:
        run(root, *step.command, timeout_s=TOOL_TIMEOUT_S)
    except NoData as error:
        raise ConfigError(f"{error}; run `sudo {' '.join(step.command)}` on a terminal") from error
    now = read_power_mode(root, profile.power_mode)
    if now != step.power_mode:  # such tools fail silently where a restart or a terminal is wanted
        raise ConfigError(
            f"{' '.join(step.command)}: the board stays in {now or 'an unknown mode'} instead of {step.power_mode}; "
            "run it on a terminal, it may want a restart"
        )


def _write_journal(journal: Path, change: Change) -> None:
    """Write the journal so that it survives a power cut: the power mode does too."""
    replace_file(journal, msgspec.json.encode(change))


def _read_journal(journal: Path) -> Change | None:
    try:
        return msgspec.json.decode(journal.read_bytes(), type=Change)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        unread = unused_name(journal)
        journal.replace(unread)
        log.warning("%s: what to put back cannot be read (%s); kept as %s", journal, error, unread.name)
    return None
