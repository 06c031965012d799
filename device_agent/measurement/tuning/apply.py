"""Apply clocks and a power mode; restore them even after a kill.

A journal holds the previous settings from before the first change until everything is restored. The next process that
uses the journal undoes what a killed one left behind.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
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
"""File name in an agent's `state_dir`."""

TOOL_TIMEOUT_S = 30.0
"""Setting a power mode takes seconds; some versions of the tool wait for input forever."""


class ToolRunner(Protocol):
    """Runs one of the board's tools, see `device_agent.hardware.tools.run_tool`."""

    def __call__(self, root: Path, command: Sequence[str], *, timeout_s: float) -> str:
        """Return the tool's output; raise `NoData` if it fails."""
        ...


class ChangeJournal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the journal: previous settings and target."""

    before: Settings
    target: Target


@contextmanager
def hold_settings(
    root: Path, profile: Profile, target: Target, journal: Path, run: ToolRunner = run_tool
) -> Iterator[Settings]:
    """Hold a board at its target during the block; yield the resulting settings.

    The previous settings are restored at the end. A change left in the journal by an earlier process is undone first.

    Raises:
        ConfigError: The board or the user's permissions do not allow the target, and nothing is changed; or an
            earlier change cannot be undone.
        Unwritable: The journal cannot be written.
    """
    if not restore_settings(root, profile, journal, run):  # a new journal would lose the original settings
        raise ConfigError(f"{journal}: earlier settings are not restored yet; do so by hand, then remove that file")
    before = read_settings(root, profile)
    if not plan_steps(before, target):
        yield before
        return
    replace_file(journal, msgspec.json.encode(ChangeJournal(before=before, target=target)))  # outlives a power cut
    try:
        apply_steps(root, profile, plan_steps(before, target), run)
        after = read_settings(root, profile)
        apply_steps(root, profile, plan_steps(after, target), run)  # clocks, if the first plan was a power mode
        yield read_settings(root, profile)
    finally:
        restore_settings(root, profile, journal, run)


def apply_steps(root: Path, profile: Profile, steps: Iterable[Step], run: ToolRunner = run_tool) -> None:
    """Apply steps in order, and verify each by reading it back.

    Raises:
        ConfigError: A step failed or had no effect; earlier steps stay applied.
    """
    for step in steps:
        match step:
            case Write():
                _write_file(root / step.path, step.value)
            case Run():
                _run_step(root, profile, step, run)
        log.info("%s", format_step(step))


def restore_settings(root: Path, profile: Profile, journal: Path, run: ToolRunner = run_tool) -> bool:
    """Undo the journal's change as far as possible; return whether nothing is left to undo.

    What the board refuses does not raise: the journal stays for the next start.
    """
    try:
        change = _read_journal(journal)
    except OSError as error:
        log.warning("%s: the settings to restore cannot be read (%s)", journal, error)
        return False
    if change is None:
        return True
    done = True
    for mode in (True, False):  # the power mode first, since it sets clocks too
        try:
            steps = plan_restore(read_settings(root, profile), change.before, change.target, mode=mode)
        except ConfigError as error:
            log.warning("the power mode cannot be restored: %s", error)
            done = False
            continue
        for step in steps:
            try:
                apply_steps(root, profile, (step,), run)
            except ConfigError as error:
                log.warning("not restored: %s", error)
                done = False
    if done:
        journal.unlink(missing_ok=True)
    return done


def format_step(step: Step) -> str:
    """Return a step as an assignment or a shell command."""
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
        raise ConfigError(f"{path} rejects {value}: {error.strerror}{_suggest_remedy(path, error)}") from error
    except NoData as error:
        raise ConfigError(f"{path} was set to {value} but cannot be read back: {error}") from error
    is_throttled = path.name == "scaling_max_freq" and now.isdecimal() and int(now) < int(value)  # by heat, for now
    if now != value and not is_throttled:
        raise ConfigError(f"{path} was set to {value} but reads {now}: something else on this board sets it too")


def _suggest_remedy(path: Path, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        rule = f"z /sys/devices/system/cpu/cpufreq/policy*/{path.name} 0664 root GROUP"
        return f"; run as root, or let the agent's group write it by a line in /etc/tmpfiles.d: `{rule}`"
    if error.errno == errno.EROFS:
        return "; /sys is mounted read-only here: run outside of the container, or give it /sys writable"
    return ""


def _run_step(root: Path, profile: Profile, step: Run, run: ToolRunner) -> None:
    try:
        run(root, step.command, timeout_s=TOOL_TIMEOUT_S)
    except NoData as error:
        raise ConfigError(f"{error}; run `sudo {' '.join(step.command)}` on a terminal") from error
    now = read_power_mode(root, profile.power_mode)
    if now != step.power_mode:  # these tools fail silently if they need a reboot or a terminal
        raise ConfigError(
            f"{' '.join(step.command)}: the board stays in {now or 'an unknown mode'} instead of {step.power_mode}; "
            "run it on a terminal, since it may need a reboot"
        )


def _read_journal(journal: Path) -> ChangeJournal | None:
    try:
        return msgspec.json.decode(journal.read_bytes(), type=ChangeJournal)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        unread = unused_name(journal)
        journal.replace(unread)
        log.warning("%s: the settings to restore cannot be read (%s); renamed to %s", journal, error, unread.name)
    return None
