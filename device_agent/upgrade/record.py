"""Files shared by agent and updater: upgrade target, record and health proof.

    HOME/upgrade.json                 root: the record, world-readable
    HOME/current -> VERSION           the version that runs
    HOME/updater -> VERSION           the version that upgrades and rolls back: the last one that passed its trial
    STATE/upgrade/VERSION.deb|.json   agent: a fetched package, and the manifest signed by its site
    STATE/upgrade/wanted.json         agent: the requested version, written last
    STATE/upgrade/proof.json          agent: the running version is connected, and its report was accepted
    STATE/upgrade/busy                agent: locked while a task runs

Root does not trust STATE: files are read with the owner's user id, up to a bounded size.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.protocol.update import FailedRelease, Phase
from shared.protocol.versioned import decode_versioned
from shared.runtime.durable import replace_file
from shared.runtime.state_formats import MOST_BYTES

HOME_VARIABLE = "FIELDFLEET_HOME"
"""Environment variable that overrides the versions' folder; for tests."""
HOME = Path("/opt/fieldfleet")
CURRENT, UPDATER, RECORD = "current", "updater", "upgrade.json"
FOLDER, WANTED, PROOF, BUSY = "upgrade", "wanted.json", "proof.json", "busy"
FORMAT = 1
"""Format of the record; increment if older readers would misread it."""
PROBATION_S, MOST_PROBATION_S = 120.0, 86_400.0
VERSION = re.compile(r"[0-9][0-9A-Za-z.+~-]{0,63}")
"""Version name, which is also its folder's name."""
MOST_DEPLOYMENT, MOST_ATTEMPT = 128, 1 << 31
READABLE = 0o644


class UpgradeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Requested version of the agent.

    Attributes:
        version: Version whose package and manifest lie beside this file, or the previous one, to roll back.
        deployment: Name of the deployment that offered it.
        attempt: Attempt of that deployment, from 1; a failed version is tried again only with a higher one.
        probation_s: Seconds in which it must prove itself.
    """

    version: str
    deployment: str = ""
    attempt: int = 1
    probation_s: float = PROBATION_S

    def __post_init__(self) -> None:
        """Validate all fields, since root copies them into its record, which must stay readable."""
        if not 0 < self.probation_s <= MOST_PROBATION_S or not 1 <= self.attempt < MOST_ATTEMPT:
            raise ValueError(f"probation_s must be above 0 up to {MOST_PROBATION_S:g}, attempt 1 or more")
        if not VERSION.fullmatch(self.version):
            raise ValueError(f"version {self.version[:80]!r} is not valid; expected {VERSION.pattern}")
        if len(self.deployment) > MOST_DEPLOYMENT or not self.deployment.isprintable():
            raise ValueError(f"deployment {self.deployment[:80]!r}: {MOST_DEPLOYMENT} characters of one line at most")


class HealthProof(msgspec.Struct, frozen=True, kw_only=True):
    """Proof that the running agent is connected, and the broker has acknowledged its first report.

    Attributes:
        nonce: The trial's nonce from the record.
    """

    version: str
    nonce: str


class UpgradeRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """State of the agent's upgrades on a board.

    Attributes:
        state: Phase of `to` (see `shared.protocol.update`); made durable before it is acted upon.
        from_: The version that ran when `to` was offered, and that a failed trial rolls back to.
        to: The version that was offered last.
        previous: The version that ran before the current one, if still installed.
        readable: Newest state formats present when `previous` ran; empty if unknown.
        deployment: Deployment that offered `to`; empty if installed by hand.
        attempt: Attempt of that deployment.
        nonce: Nonce of the trial, which a proof must repeat.
        boots: Boots of the board during the trial.
        boot: The kernel's id of the last boot.
        starts: Restarts of the agent or the updater during the trial.
        probation_s: Seconds in which `to` must prove itself.
        lost: Kinds of state files that `to` cannot read and that were set aside.
        reason: Why `to` was refused or rolled back; if `state` is still `trial`, a rollback is in progress.
        serials: The gateway's serial numbers of known versions.
        failed: Versions that failed on this board (as `release`), newest last.
        passed_over: The agent's pending request at the time of an installation by hand, which is ignored since.
        format: Format of the record, see `FORMAT`.
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

    def matches_target(self, target: UpgradeTarget) -> bool:
        """Check that this record results from a request, by version, deployment and attempt."""
        return (self.to, self.deployment, self.attempt) == (target.version, target.deployment, target.attempt)


def read_upgrade(home: Path) -> UpgradeRecord:
    """Read the upgrade record; an empty one if nothing was ever upgraded.

    Args:
        home: Folder of the versions.

    Raises:
        ConfigError: The file has a newer format, or cannot be read.
        CorruptFile: The file is damaged.
    """
    path = home / RECORD
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return UpgradeRecord()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return decode_versioned(data, UpgradeRecord, FORMAT, MOST_BYTES, str(path), "install a newer version")


def write_upgrade(home: Path, record: UpgradeRecord) -> None:
    """Write the upgrade record durably.

    Raises:
        Unwritable: The disk is full or read-only; the earlier record is unchanged.
    """
    data = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    replace_file(home / RECORD, data, mode=READABLE)


def find_versions_folder() -> Path | None:
    """Return the folder of versions that this process runs from; None in a checkout or a custom container."""
    override = os.environ.get(HOME_VARIABLE, "")
    home = Path(override) if override else Path(sys.prefix).resolve().parent
    link = home / CURRENT
    return home if link.is_symlink() and (override or link.resolve().parent == home.resolve()) else None


def running_version(home: Path) -> str:
    """Return the version of this process; call it early, since the link `current` may change."""
    prefix = Path(sys.prefix).resolve()
    if prefix.parent == home.resolve():
        return prefix.name
    link = home / CURRENT
    return link.readlink().name if link.is_symlink() else ""
