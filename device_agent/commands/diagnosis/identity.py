"""Checks of a board's enrolment, certificate, secrets, clock and service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from device_agent.commands.diagnosis.checks import Check
from device_agent.config import AgentConfig
from device_agent.hardware.files import is_folder
from device_agent.hardware.tools import LIVE_ROOT, run_tool
from device_agent.identity.clock_floor import BoardClock, utc_text
from device_agent.identity.credentials import CURRENT, FOLDER, Membership, read_membership
from shared.errors import EnrolmentFailed, NoData, Untrusted
from shared.transport.base import Broker
from shared.transport.tls import build_context, describe_unsafe_mode

DAY_S = 86_400.0
RENEWAL_MARGIN = 1 / 6
"""Share of a certificate's life, half of what remains when renewal begins."""
PRIVATE = 0o600
UNIT, SYSTEMD = "fieldfleet-agent", Path("run/systemd/system")
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "NRestarts", "Result")


def examine_identity(config: AgentConfig) -> Iterator[Check]:
    """Examine the board's configured identity and its enrolment."""
    folder = Path(config.state_dir)
    clock = BoardClock.of(folder)
    membership = read_membership(folder / FOLDER / CURRENT)
    yield check_enrolment(membership, config.broker)
    if config.broker.tls and config.broker.tls.cert:
        yield _examine_pair(config.broker)
        yield _examine_dates(Path(config.broker.tls.cert), clock)
    yield from _examine_secrets(config.broker)
    yield check_clock_use(clock.utc_s(), clock.floor_utc_s(), may_judge=clock.may_judge())
    if is_folder(LIVE_ROOT / SYSTEMD):
        yield _examine_service()


def secret_files(broker: Broker) -> list[Path]:
    """Return the files that only their owner may read: the board's key and password."""
    paths = (broker.tls.key if broker.tls else "", broker.password_file)
    return [Path(path) for path in paths if path]


def fix_modes(broker: Broker) -> Iterator[Check]:
    """Make secrets private to their owner; yield what was fixed and what could not be."""
    for path in secret_files(broker):
        try:
            if describe_unsafe_mode(path):
                path.chmod(PRIVATE)
                yield Check(name="--fix", state="ok", finding=f"{path} is now private to its owner")
        except FileNotFoundError:
            continue  # reported by the checks
        except OSError as error:
            remedy = "run this as its owner or as root"
            yield Check(name="--fix", state="warn", finding=f"{path}: {error.strerror}", remedy=remedy)


def check_enrolment(membership: Membership | None, broker: Broker) -> Check:
    """Check whether the board has joined a site, or has a manually configured broker account.

    Args:
        membership: Result of the enrolment; None without one.
    """
    if membership:
        place = f"{membership.host}:{membership.port}"
        finding = (
            f"device {membership.device} of site {membership.site} since token {membership.token}, renews at {place}"
        )
        return Check(name="enrolment", state="ok", finding=finding)
    account = "the file configures its broker account" if broker.has_account else "it has no broker account"
    remedy = "" if broker.has_account else "if the site uses certificates: `device-agent join -` with a token"
    return Check(name="enrolment", state="ok", finding=f"not joined with a token; {account}", remedy=remedy)


def check_dates(begin_utc_s: float, end_utc_s: float, now_utc_s: float, *, may_judge: bool) -> Check:
    """Check when a certificate expires.

    Args:
        begin_utc_s, end_utc_s: Validity, UTC seconds.
        now_utc_s: Reading of the board's clock.
    """
    name, dates = "certificate", f"valid from {utc_text(begin_utc_s)} to {utc_text(end_utc_s)}"
    if not may_judge:
        return Check(name=name, state="ok", finding=f"{dates}; not checked by this board's clock")
    remaining_s = end_utc_s - now_utc_s
    if now_utc_s < begin_utc_s:
        remedy = "set this clock; if it is right, set the gateway's and join again"
        return Check(name=name, state="bad", finding=f"{dates}: not valid yet by this clock", remedy=remedy)
    if remaining_s <= 0:
        remedy = "run the agent: it renews automatically for 180 days, then after `edge-server devices approve`"
        return Check(name=name, state="bad", finding=f"{dates}: expired", remedy=remedy)
    if remaining_s < (end_utc_s - begin_utc_s) * RENEWAL_MARGIN:
        remedy = "renewal is overdue: check that the agent runs and reaches the enrolment service"
        return Check(
            name=name, state="warn", finding=f"{dates}: {remaining_s / DAY_S:.0f} days are left", remedy=remedy
        )
    return Check(name=name, state="ok", finding=dates)


def check_clock_use(now_utc_s: float, floor_utc_s: float, *, may_judge: bool) -> Check:
    """Check whether certificate dates are checked by this board's clock.

    Args:
        floor_utc_s: A time that is certainly past.
    """
    name, reads = "calendar", f"reads {utc_text(now_utc_s)}"
    if may_judge:
        return Check(name=name, state="ok", finding=f"{reads}, synchronised: certificate dates are checked by it")
    if now_utc_s < floor_utc_s:
        remedy = "set it or use a time server of the site; training does not need it"
        finding = f"{reads}, but it must be {utc_text(floor_utc_s)} or later; using the site's time"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=f"{reads}, not synchronised; using the site's time")


def check_service(properties: Mapping[str, str]) -> Check:
    """Check the agent's service."""
    name = "service"
    if properties.get("LoadState") != "loaded":
        return Check(name=name, state="ok", finding=f"{UNIT} is not installed")
    active, enabled = properties.get("ActiveState", ""), properties.get("UnitFileState", "")
    finding = f"{UNIT} is {active}, {enabled}, restarted {properties.get('NRestarts', '?')} times"
    if active == "failed":
        finding, remedy = f"{finding}; {properties.get('Result', '')}", f"see `journalctl -u {UNIT} -n 50`"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    if active != "active" or enabled != "enabled":
        remedy = f"`sudo systemctl enable --now {UNIT}`"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=finding)


def _examine_pair(broker: Broker) -> Check:
    assert broker.tls
    try:
        build_context(broker.tls, dates=False)
    except Untrusted as error:
        finding, _, remedy = str(error).rpartition(": ")
        return Check(name="pair", state="bad", finding=finding, remedy=remedy)
    return Check(name="pair", state="ok", finding="certificate and key match and are usable")


def _examine_dates(path: Path, clock: BoardClock) -> Check:
    from device_agent.identity.certificates import read_validity  # noqa: PLC0415 - 10 MB that few commands need

    try:
        dates = read_validity(path.read_bytes())
    except (OSError, EnrolmentFailed) as error:
        return Check(name="certificate", state="bad", finding=f"{path}: {error}", remedy="join again with a new token")
    return check_dates(dates.not_before_utc_s, dates.not_after_utc_s, clock.utc_s(), may_judge=clock.may_judge())


def _examine_secrets(broker: Broker) -> Iterator[Check]:
    for path in secret_files(broker):
        try:
            too_open = describe_unsafe_mode(path)
        except OSError as error:
            remedy = "restore it or let the agent's user read it"
            yield Check(name="secrets", state="bad", finding=f"{path}: {error.strerror}", remedy=remedy)
            continue
        if too_open:
            finding, remedy = f"{path} can be read or replaced by others", f"`chmod 600 {path}`, or --fix"
            yield Check(name="secrets", state="bad", finding=finding, remedy=remedy)
        else:
            yield Check(name="secrets", state="ok", finding=f"{path} is private to its owner")


def _examine_service() -> Check:
    try:
        output = run_tool(LIVE_ROOT, ["systemctl", "show", UNIT, f"--property={','.join(PROPERTIES)}"])
    except NoData as error:
        return Check(name="service", state="warn", finding=str(error), remedy=f"`systemctl status {UNIT}`")
    return check_service(dict(line.split("=", 1) for line in output.splitlines() if "=" in line))
