"""What agent and updater tell each other by files: what is wanted, what an upgrade is at, the proof of a new version.

    HOME/upgrade.json                 root's: the record, which everybody may read
    HOME/current -> VERSION           what runs
    HOME/updater -> VERSION           what upgrades, and goes back: the last version that proved itself
    STATE/upgrade/VERSION.deb|.json   the agent's: a package that it fetched, and the manifest that its site signed
    STATE/upgrade/wanted.json         the agent's: which of them it was told to take, written last
    STATE/upgrade/proof.json          the agent's: the version that runs is connected, and its report was taken
    STATE/upgrade/busy                the agent's: locked while a task runs

Root believes nothing of STATE: what it holds is bounded, and is read as the user whose folder it is.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.protocol.update import FailedRelease, Phase
from shared.runtime.durable import replace_file
from shared.runtime.state_formats import MOST_BYTES, decode_small

HOME_VARIABLE = "FIELDFLEET_HOME"
"""Environment of an agent that runs from elsewhere than its version's folder; for tests."""
HOME = Path("/opt/fieldfleet")
CURRENT, UPDATER, RECORD = "current", "updater", "upgrade.json"
FOLDER, WANTED, PROOF, BUSY = "upgrade", "wanted.json", "proof.json", "busy"
FORMAT = 1
"""Of the record. Counted up where an older reader would take one wrong."""
PROBATION_S, MOST_PROBATION_S = 120.0, 86_400.0
VERSION = re.compile(r"[0-9][0-9A-Za-z.+~-]{0,63}")
"""A version's name, which is that of its folder."""
MOST_DEPLOYMENT, MOST_ATTEMPT = 128, 1 << 31
READABLE = 0o644


class UpgradeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Which version the agent was told to take.

    Attributes:
        version: Whose package and manifest lie beside this file; or the version before, to go back to that.
        deployment: Under which name it was offered.
        attempt: Which try of that deployment, from 1: what failed here is tried again by a larger one alone.
        probation_s: Seconds in which it must prove itself.
    """

    version: str
    deployment: str = ""
    attempt: int = 1
    probation_s: float = PROBATION_S

    def __post_init__(self) -> None:
        """Refuse what is none: root's record takes it over, which must stay one that can be read."""
        if not 0 < self.probation_s <= MOST_PROBATION_S or not 1 <= self.attempt < MOST_ATTEMPT:
            raise ValueError(f"probation_s must be above 0 up to {MOST_PROBATION_S:g}, attempt 1 or more")
        if not VERSION.fullmatch(self.version):
            raise ValueError(f"version {self.version[:80]!r} is none")
        if len(self.deployment) > MOST_DEPLOYMENT or not self.deployment.isprintable():
            raise ValueError(f"deployment {self.deployment[:80]!r}: {MOST_DEPLOYMENT} characters of one line at most")


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A running agent is connected to its broker, which took its first report.

    Attributes:
        nonce: Of the trial, from the record.
    """

    version: str
    nonce: str


class UpgradeRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """What a board is at with its agent.

    Attributes:
        state: Of `to`, a phase of `shared.protocol.update`; durable before anything is done by it.
        from_: The version that ran when `to` was offered, to which a failed trial goes back.
        to: The version that was offered last.
        previous: The version that ran before the one that runs, if it is still there.
        readable: The newest forms of state files that lay there when `previous` ran; empty where nobody noted them.
        deployment: Under which name `to` was offered; empty for by hand.
        attempt: Which try of it.
        nonce: Of the trial; a proof must name it.
        boots: How often the board was started during the trial.
        boot: The kernel's id of the last of these.
        starts: How often the agent, or who watches it, began anew during the trial.
        probation_s: Seconds in which it must prove itself.
        lost: Kinds of state files that `to` cannot read, and that were set aside for it.
        reason: Why it was refused or goes back; while `state` is still `trial`, that it is going back.
        serials: Numbers that the gateway counts versions by, as far as they are known here.
        failed: Versions that failed here, under `release`, the newest last.
        passed_over: What the agent had been told to take when somebody at the board took something else.
        format: See `FORMAT`.
    """

    state: Phase = "none"
    from_: str = ""
    to: str = ""
    previous: str = ""
    readable: dict[str, int] = {}
    deployment: str = ""
    attempt: int = 0
    nonce: str = ""
    boots: int = 0
    boot: str = ""
    starts: int = 0
    probation_s: float = PROBATION_S
    lost: tuple[str, ...] = ()
    reason: str = ""
    serials: dict[str, int] = {}
    failed: tuple[FailedRelease, ...] = ()
    passed_over: UpgradeTarget | None = None
    format: int = FORMAT

    def is_of(self, target: UpgradeTarget) -> bool:
        """Tell whether this is the record of just that wish."""
        return (self.to, self.deployment, self.attempt) == (target.version, target.deployment, target.attempt)


class _RecordFormat(msgspec.Struct):
    format: int


def read_upgrade(home: Path) -> UpgradeRecord:
    """Return what a board is at with its agent; an empty record where nothing was ever upgraded.

    Args:
        home: Folder of the versions.

    Raises:
        ConfigError: A newer fieldfleet wrote it, or it cannot be read.
        CorruptFile: It is not as it was written.
    """
    path = home / RECORD
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return UpgradeRecord()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    form = decode_small(data, _RecordFormat, str(path)).format
    if form > FORMAT:
        raise ConfigError(f"{path}: of format {form}, and this version reads up to {FORMAT}: install a newer one")
    return decode_small(data, UpgradeRecord, str(path))


def write_upgrade(home: Path, record: UpgradeRecord) -> None:
    """Make a record the one of the board; when this returns, it is on the disk.

    Raises:
        Unwritable: The disk takes nothing more; the record before is untouched.
    """
    data = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    replace_file(home / RECORD, data, mode=READABLE)


def find_home() -> Path | None:
    """Return the folder of versions, of which this process runs one; None in a checkout or a container of one's own."""
    override = os.environ.get(HOME_VARIABLE, "")
    home = Path(override) if override else Path(sys.prefix).resolve().parent
    link = home / CURRENT
    return home if link.is_symlink() and (override or link.resolve().parent == home.resolve()) else None


def running_version(home: Path) -> str:
    """Return the version of this process; ask early, since what `current` leads to may change."""
    prefix = Path(sys.prefix).resolve()
    if prefix.parent == home.resolve():
        return prefix.name
    link = home / CURRENT
    return link.readlink().name if link.is_symlink() else ""
