"""Examine upgrades of the agent: a trial that nobody watches, what became of the last one, whose packages are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from device_agent.commands.diagnosis.checks import Check
from device_agent.identity.credentials import CURRENT, FOLDER, read_membership
from device_agent.upgrade.place import ROOTS
from device_agent.upgrade.record import UpgradeRecord, read_upgrade
from device_agent.upgrade.trusted_roots import trusted_pins
from device_agent.upgrade.verdict import is_going_back
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile
from shared.runtime.folder_lock import is_held

START = (
    "`sudo systemctl start fieldfleet-upgrade` goes on with it; `journalctl -u fieldfleet-upgrade` says why it ended"
)
SHOWN = 16


def examine_upgrade(home: Path | None, state_dir: Path, roots: Path = ROOTS) -> Iterator[Check]:
    """Examine what an upgrade left.

    Args:
        home: Folder of the versions; None where the agent runs from elsewhere and is upgraded by other means.
        roots: Of the sites whose packages are taken.
    """
    if home is None:
        return
    try:
        record = read_upgrade(home)
        yield check_upgrade(record, Versions(home).current(), is_watched=is_held(home, unknown=True))
    except (ConfigError, CorruptFile) as error:
        yield Check(name="upgrade", state="bad", finding=str(error), remedy="`sudo systemctl start fieldfleet-upgrade`")
    try:
        membership = read_membership(state_dir / FOLDER / CURRENT)
        yield check_trust(trusted_pins(roots), membership.root if membership else "")
    except ConfigError as error:
        yield Check(name="packages", state="warn", finding=str(error), remedy="`sudo device-agent upgrade trust`")


def check_upgrade(record: UpgradeRecord, current: str, *, is_watched: bool) -> Check:
    """Check whether an upgrade came to its end.

    Args:
        current: The version that runs.
        is_watched: Whether somebody is at it.
    """
    name, runs = "upgrade", f"version {current or 'none'} runs"
    if (record.state == "trial" or is_going_back(record)) and not is_watched:
        finding = f"{runs}; version {record.to} is {record.state}, and nobody watches it"
        return Check(name=name, state="bad", finding=finding, remedy=START)
    if record.state in ("rolled-back", "refused"):
        finding = f"{runs}; version {record.to} was {record.state}: {record.reason}"
        return Check(name=name, state="warn", finding=finding, remedy="a later version, or a larger attempt, is tried")
    if record.state == "none":
        return Check(name=name, state="ok", finding=f"{runs}, and no other was offered")
    return Check(name=name, state="ok", finding=f"{runs}; version {record.to}: {record.state}")


def check_trust(pins: Sequence[str], joined: str) -> Check:
    """Check whether packages of the board's site would be taken, and of no other.

    Args:
        pins: SHA-256 of the roots that are trusted, hexadecimal.
        joined: That of the site which the board joined; empty for none.
    """
    name, remedy = "packages", "`sudo device-agent upgrade trust`"
    if not pins:
        return Check(
            name=name, state="ok", finding="of no site are taken: no rollout upgrades the agent", remedy=remedy
        )
    shown_pins = ", ".join(f"{pin[:SHOWN]}…" for pin in pins)
    if joined and joined not in pins:
        finding = f"are taken of root {shown_pins}, and the joined site's is {joined[:SHOWN]}…"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=f"are taken of root {shown_pins}")
