"""Examine agent upgrades: unattended trials, the last outcome, trusted package signers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from device_agent.commands.diagnosis.checks import Check
from device_agent.identity.credentials import CURRENT, FOLDER, read_membership
from device_agent.upgrade.inputs import ROOTS
from device_agent.upgrade.record import UpgradeRecord, read_upgrade
from device_agent.upgrade.transitions import is_rolling_back
from device_agent.upgrade.trusted_roots import read_trusted_pins
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile
from shared.runtime.folder_lock import is_held

START = "resume with `sudo systemctl start fieldfleet-upgrade`; see `journalctl -u fieldfleet-upgrade` for the cause"
SHOWN = 16


def examine_upgrade(home: Path | None, state_dir: Path, roots: Path = ROOTS) -> Iterator[Check]:
    """Examine the state of agent upgrades.

    Args:
        home: Folder of the versions; None if the agent is upgraded by other means.
        roots: File of the roots whose packages are accepted.
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
        yield check_trust(read_trusted_pins(roots), membership.root if membership else "")
    except ConfigError as error:
        yield Check(name="packages", state="warn", finding=str(error), remedy="`sudo device-agent upgrade trust`")


def check_upgrade(record: UpgradeRecord, current: str, *, is_watched: bool) -> Check:
    """Check that the last upgrade is complete."""
    name, runs = "upgrade", f"version {current or 'none'} runs"
    if (record.state == "trial" or is_rolling_back(record)) and not is_watched:
        finding = f"{runs}; version {record.to} is {record.state}, but the updater is not running"
        return Check(name=name, state="bad", finding=finding, remedy=START)
    if record.state in ("rolled-back", "refused"):
        finding = f"{runs}; version {record.to} was {record.state}: {record.reason}"
        return Check(
            name=name,
            state="warn",
            finding=finding,
            remedy="offer a later version, or the same again with a higher attempt",
        )
    if record.state == "none":
        return Check(name=name, state="ok", finding=f"{runs}; no upgrade was offered")
    return Check(name=name, state="ok", finding=f"{runs}; version {record.to}: {record.state}")


def check_trust(pins: Sequence[str], joined: str) -> Check:
    """Check that packages of the board's site are accepted, and of no other.

    Args:
        pins: SHA-256 of the trusted roots, hexadecimal.
        joined: SHA-256 of the joined site's root; empty for none.
    """
    name, remedy = "packages", "`sudo device-agent upgrade trust`"
    if not pins:
        return Check(
            name=name, state="ok", finding="no site is trusted, so rollouts cannot upgrade the agent", remedy=remedy
        )
    shown_pins = ", ".join(f"{pin[:SHOWN]}…" for pin in pins)
    if joined and joined not in pins:
        finding = f"accepted from root {shown_pins}, but the joined site's root is {joined[:SHOWN]}…"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=f"accepted from root {shown_pins}")
