"""Examine by what this board is known to its site, and mend modes: enrolment, certificate, secrets, clock, service."""

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
from shared.transport.tls import build_context, check_file_mode

DAY_S = 86_400.0
LEFT = 1 / 6
"""Of a certificate's life: half of what is left when a board begins to renew."""
PRIVATE = 0o600
UNIT, SYSTEMD = "fieldfleet-agent", Path("run/systemd/system")
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "NRestarts", "Result")


def examine_identity(config: AgentConfig) -> Iterator[Check]:
    """Examine what an agent's file says of the board's identity, and what a site gave it."""
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
    """Return the files that nobody else may read: our key, our password."""
    paths = (broker.tls.key if broker.tls else "", broker.password_file)
    return [Path(path) for path in paths if path]


def mend_modes(broker: Broker) -> Iterator[Check]:
    """Make secrets their owner's alone; yield what was mended, and what could not be."""
    for path in secret_files(broker):
        try:
            if check_file_mode(path):
                path.chmod(PRIVATE)
                yield Check(name="--fix", state="ok", finding=f"{path} is its owner's alone now")
        except FileNotFoundError:
            continue  # told by the checks
        except OSError as error:
            remedy = "run this as its owner, or as root"
            yield Check(name="--fix", state="warn", finding=f"{path}: {error.strerror}", remedy=remedy)


def check_enrolment(membership: Membership | None, broker: Broker) -> Check:
    """Check whether the board is a device of a site, or else may be one of a broker by hand.

    Args:
        membership: What a site gave it; None for nothing.
    """
    if membership:
        place = f"{membership.host}:{membership.port}"
        finding = (
            f"device {membership.device} of site {membership.site} since token {membership.token}, renews at {place}"
        )
        return Check(name="enrolment", state="ok", finding=finding)
    account = "the file says by what the broker knows it" if broker.has_account else "the broker knows it by nothing"
    remedy = "" if broker.has_account else "where the site has certificates: `device-agent join -` with a token"
    return Check(name="enrolment", state="ok", finding=f"joined no site by a token; {account}", remedy=remedy)


def check_dates(begin_utc_s: float, end_utc_s: float, now_utc_s: float, *, may_judge: bool) -> Check:
    """Check when a certificate ends.

    Args:
        begin_utc_s: From when it is valid.
        now_utc_s: What the clock reads.
        may_judge: Whether that is to be believed.
    """
    name, dates = "certificate", f"valid from {utc_text(begin_utc_s)} to {utc_text(end_utc_s)}"
    if not may_judge:
        return Check(name=name, state="ok", finding=f"{dates}; this board's clock is not asked")
    remaining_s = end_utc_s - now_utc_s
    if now_utc_s < begin_utc_s:
        remedy = "set this clock; if it is right, that of the gateway, and join anew"
        return Check(name=name, state="bad", finding=f"{dates}: not yet, by this clock", remedy=remedy)
    if remaining_s <= 0:
        remedy = "let the agent run: it renews by itself for 180 days, then with `edge-server devices approve`"
        return Check(name=name, state="bad", finding=f"{dates}: ended", remedy=remedy)
    if remaining_s < (end_utc_s - begin_utc_s) * LEFT:
        remedy = "by now it should have been renewed: does the agent run, and reach the enrolment service?"
        return Check(name=name, state="warn", finding=f"{dates}: {remaining_s / DAY_S:.0f} days are left", remedy=remedy)
    return Check(name=name, state="ok", finding=dates)


def check_clock_use(now_utc_s: float, floor_utc_s: float, *, may_judge: bool) -> Check:
    """Check whether dates of certificates are judged by this board's clock.

    Args:
        floor_utc_s: What is past for certain.
        may_judge: Whether it is to be believed.
    """
    name, reads = "calendar", f"reads {utc_text(now_utc_s)}"
    if may_judge:
        return Check(name=name, state="ok", finding=f"{reads}, kept right: certificates are judged by it")
    if now_utc_s < floor_utc_s:
        remedy = "set it, or let a time server of the site; training does without"
        finding = f"{reads}, and it is {utc_text(floor_utc_s)} or later: the site's time counts instead"
        return Check(name=name, state="warn", finding=finding, remedy=remedy)
    return Check(name=name, state="ok", finding=f"{reads}, and nobody keeps it right: the site's time counts instead")


def check_service(properties: Mapping[str, str]) -> Check:
    """Check the agent's service.

    Args:
        properties: Its properties, as `systemctl show` prints them.
    """
    name = "service"
    if properties.get("LoadState") != "loaded":
        return Check(name=name, state="ok", finding=f"{UNIT} is not installed here")
    active, enabled = properties.get("ActiveState", ""), properties.get("UnitFileState", "")
    finding = f"{UNIT} is {active}, {enabled}, restarted {properties.get('NRestarts', '?')} times"
    if active == "failed":
        finding, remedy = f"{finding}; {properties.get('Result', '')}", f"`journalctl -u {UNIT} -n 50` says why"
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
    return Check(name="pair", state="ok", finding="certificate and key belong together, and can be used")


def _examine_dates(path: Path, clock: BoardClock) -> Check:
    from device_agent.identity.certificates import dates_in  # noqa: PLC0415 - 10 MB that few commands need

    try:
        dates = dates_in(path.read_bytes())
    except (OSError, EnrolmentFailed) as error:
        return Check(name="certificate", state="bad", finding=f"{path}: {error}", remedy="join anew by a new token")
    return check_dates(dates.not_before_utc_s, dates.not_after_utc_s, clock.utc_s(), may_judge=clock.may_judge())


def _examine_secrets(broker: Broker) -> Iterator[Check]:
    for path in secret_files(broker):
        try:
            too_open = check_file_mode(path)
        except OSError as error:
            remedy = "bring it back, or let the agent's user read it"
            yield Check(name="secrets", state="bad", finding=f"{path}: {error.strerror}", remedy=remedy)
            continue
        if too_open:
            finding, remedy = f"{path} can be read or replaced by others", f"`chmod 600 {path}`, or --fix"
            yield Check(name="secrets", state="bad", finding=finding, remedy=remedy)
        else:
            yield Check(name="secrets", state="ok", finding=f"{path} is nobody else's")


def _examine_service() -> Check:
    try:
        output = run_tool(LIVE_ROOT, "systemctl", "show", UNIT, f"--property={','.join(PROPERTIES)}")
    except NoData as error:
        return Check(name="service", state="warn", finding=str(error), remedy=f"`systemctl status {UNIT}`")
    return check_service(dict(line.split("=", 1) for line in output.splitlines() if "=" in line))
