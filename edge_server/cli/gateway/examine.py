"""Checks of `edge-server doctor` beyond the site's files: broker, limits, certificates, clock, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from cryptography import x509

from edge_server.fleet.admission import longest_packet
from edge_server.fleet.broker import describe_exposure
from edge_server.gateway.check import Finding
from edge_server.gateway.reload import PROGRAM
from edge_server.gateway.site_folder import PAIRS, SiteFolder
from edge_server.gateway.state import SiteState
from edge_server.plan.data_folder import check_data_folder
from edge_server.plan.server_config import ServerConfig
from shared.errors import ConfigError, Unreachable, split_remedy
from shared.protocol.topics import DOCTOR, topic
from shared.runtime.clock import is_synchronised
from shared.transport.base import Broker
from shared.transport.capabilities import find_lacks
from shared.transport.packet_limit import MOST_PACKET_BYTES
from shared.transport.reach import NO_QOS_1, find_refusal
from shared.transport.tls import describe_unsafe_mode

DAY_S, MIB = 86_400.0, 1 << 20
RENEWAL_LEAD_DAYS = 60.0
"""Warn this long before a board's certificate ends; with the default validity it renews 120 days before its end."""
LEAST_SHARE_LEFT = 1 / 3
"""Warn when less than this share of a certificate's validity is left."""
CA_ENDS = "all end with the site CA: replace it by `edge-server site rotate-ca`"
ROOT_ENDS = "it limits the CA: replace both by `edge-server site rotate-root`, then rotate-ca"
LEAST_FREE, LITTLE_FREE = 64 * MIB, 1024 * MIB
OTHER_FILES = 32
"""Files of a broker besides boards' connections: listeners, logs, the server's and the probe's connections."""
WARNING_SHARE, FIRST_LIMIT = 0.8, 3
"""Share of the limit that boards may use without a warning; field of the soft limit in /proc/PID/limits."""
LEAST_QUEUED = 1000
"""Default of mosquitto: messages queued for a slow client."""


def good(about: str, text: str) -> Finding:
    """Return a finding about something in order."""
    return Finding(about=about, state="good", told=text)


def bad(about: str, text: str, remedy: str) -> Finding:
    """Return a finding about a fault."""
    return Finding(about=about, state="bad", told=text, mend=remedy)


def advice(about: str, text: str, remedy: str) -> Finding:
    """Return a finding about something that works but may soon fail."""
    return Finding(about=about, state="advice", told=text, mend=remedy)


def examine_certificates(state: SiteState, now: datetime) -> Iterator[Finding]:
    """Check for certificates of boards and peers that have ended, or end soon.

    Args:
        now: Current time in UTC.
    """
    count = 0
    for name, account in sorted(state.accounts.items()):
        valid = [cert for cert in account.certificates if not cert.revoked and cert.role in ("device", "peer")]
        if account.denied or not valid:
            continue
        count += 1
        remaining_s = max(cert.not_after_utc_s for cert in valid) - now.timestamp()
        about = f"certificate of {name}"
        if remaining_s <= 0:
            remedy = f"switch it on: it renews for 180 days, later after `edge-server devices approve {name}`"
            yield advice(about, f"ended {-remaining_s / DAY_S:.0f} days ago", remedy)
        elif remaining_s < RENEWAL_LEAD_DAYS * DAY_S:
            remedy = "it should have renewed by now: check that the board is on and reaches the enrolment service"
            yield advice(about, f"ends in {remaining_s / DAY_S:.0f} days", remedy)
    if count:
        yield good("certificates", f"{count} boards and peers have one; those that end soon are listed")


def examine_own_certificates(site: SiteFolder, now: datetime) -> Iterator[Finding]:
    """Check the validity of root, site CA and the gateway's certificates.

    Args:
        now: Current time in UTC.
    """
    files = [site.ca("root.crt"), site.ca("site.crt"), *(site.gateway(f"{name}.crt") for name in PAIRS)]
    for path in files:
        about = str(path.relative_to(site.path))
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            continue  # reported by `check_site`
        if about != "gateway/revoked.crt":
            yield check_validity(
                f"validity of {about}", certificate.not_valid_before_utc, certificate.not_valid_after_utc, now
            )


def check_validity(about: str, begin: datetime, end: datetime, now: datetime) -> Finding:
    """Check how much of a certificate's validity is left.

    Args:
        begin: Start of validity, UTC.
        end: End of validity, UTC.
        now: Current time in UTC.
    """
    text = f"{(end - now).total_seconds() / DAY_S:.0f} days left, until {end:%Y-%m-%d}"
    remedy = ROOT_ENDS if about.endswith("root.crt") else CA_ENDS
    if end <= now:
        return bad(about, f"ended on {end:%Y-%m-%d} by this machine's clock", f"set the clock if it is wrong; {remedy}")
    return good(about, text) if end - now > (end - begin) * LEAST_SHARE_LEFT else advice(about, text, remedy)


async def examine_broker(config: ServerConfig) -> list[Finding]:
    """Connect as the server does, and publish on a topic without subscribers."""
    broker = config.broker
    address = f"{broker.host}:{broker.port}"
    name, where = f"{config.site}._doctor-{os.getpid()}", topic(config.site, DOCTOR, "probe")
    refusal = await find_refusal(broker, name, where, dates=is_synchronised())
    if refusal and not refusal.startswith(NO_QOS_1):
        remedy = "start the broker, or correct [broker]; see the broker's log"
        findings = [bad("server's connection", f"{address}: {refusal}", remedy)]
    else:
        findings = [good("server's connection", f"{address} accepts the server")]
        findings += await examine_capabilities(broker, name, where, longest_packet(config.link.frame_bytes))
    if exposure := describe_exposure(broker):
        problem, remedy = split_remedy(exposure)
        findings.append(advice("server's connection", problem, remedy))
    return findings


async def examine_capabilities(broker: Broker, client_id: str, where: str, size: int) -> list[Finding]:
    """Test the capabilities that the protocol needs of a broker, by publishing.

    Args:
        broker: Broker that accepts this client.
        client_id: Client id that no other client uses.
        where: Topic on which only this client publishes and subscribes.
        size: Bytes of the longest message in use.
    """
    try:
        lacks = await find_lacks(broker, client_id, where, size, dates=is_synchronised())
    except Unreachable as error:
        return [bad("broker's capabilities", f"it closed the connection: {error}", "see the broker's log")]
    if not lacks:
        return [good("broker's capabilities", f"QoS 1, messages of {size >> 10} KiB, retained messages and wills work")]
    return [bad(f"broker's {lack.what}", lack.found, lack.setting) for lack in lacks]


def examine_secrets(config: ServerConfig) -> Iterator[Finding]:
    """Check whether others can read the secret files that the server's configuration names."""
    for path in secret_files(config):
        try:
            too_open = describe_unsafe_mode(path)
        except OSError as error:
            yield bad(str(path), error.strerror or str(error), "restore it, or let the server's user read it")
            continue
        if too_open:
            yield bad(str(path), "can be read or replaced by others", f"run `chmod 600 {path}`")


def secret_files(config: ServerConfig) -> list[Path]:
    """Return the key and password files in a server's configuration, of its broker and of its peers'."""
    brokers: list[Broker] = [config.broker, *(peer.broker for peer in config.peer)]
    keys = [broker.tls.key for broker in brokers if broker.tls and broker.tls.key]
    passwords = [broker.password_file for broker in brokers if broker.password_file]
    return [Path(path) for path in dict.fromkeys([*keys, *passwords])]


def examine_limits(lines: Iterable[str], source: str) -> Iterator[Finding]:
    """Check whether a broker's limits suffice for what the server sends at once.

    Args:
        lines: Lines of mosquitto's configuration.
    """
    settings = {fields[0]: fields[1] for line in lines if len(fields := line.split()) > 1}
    least = {"max_queued_messages": LEAST_QUEUED, "max_packet_size": MOST_PACKET_BYTES, "max_queued_bytes": 64 * MIB}
    wrong = {name: most for name, most in least.items() if 0 < _number(settings.get(name, "0")) < most}
    for name, most in wrong.items():
        yield bad(
            f"broker's {name}",
            f"{settings[name]} in {source} is too low: frames are lost",
            f"set {name} to {most} or more there",
        )
    if not wrong:
        yield good("broker's limits", f"{source} leaves room for queued frames")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def examine_open_files(port: int, boards: int) -> Iterator[Finding]:
    """Check whether this machine's mosquitto on a port may hold a connection of every board."""
    process = broker_process(port)
    limit = open_file_limit(process.pid) if process else None
    if limit is None:
        return
    text = f"it may open {limit:,} files, and each of {boards:,} boards needs one"
    remedy = "add `LimitNOFILE=65536` under [Service] by `systemctl edit mosquitto`, then restart it"
    if boards + OTHER_FILES > limit:
        yield bad("broker's open files", f"{text}: some will be refused", remedy)
    elif WARNING_SHARE * limit < boards + OTHER_FILES:
        yield advice("broker's open files", text, remedy)
    else:
        yield good("broker's open files", text)


def open_file_limit(pid: int) -> int | None:
    """Return the limit of open files of a process; None if it is unlimited or unreadable."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    fields = next((line.split() for line in lines if line.startswith("Max open files")), [])
    return int(fields[FIRST_LIMIT]) if len(fields) > FIRST_LIMIT and fields[FIRST_LIMIT].isdecimal() else None


def broker_process(port: int) -> psutil.Process | None:
    """Return this machine's mosquitto that listens on a port; None if it is not visible."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or connection.pid is None:
            continue
        with suppress(psutil.Error):
            process = psutil.Process(connection.pid)
            if process.name() == PROGRAM:
                return process
    return None


def running_configuration(port: int) -> tuple[Path, list[str]] | None:
    """Return path and lines of the configuration of this machine's mosquitto on a port; None if it is not visible."""
    process = broker_process(port)
    with suppress(psutil.Error, OSError, ValueError):
        arguments = process.cmdline() if process else []
        if process and "-c" in arguments[:-1]:
            path = Path(process.cwd(), arguments[arguments.index("-c") + 1])
            return path, expand_includes(path.read_text().splitlines())
    return None


def expand_includes(lines: list[str]) -> list[str]:
    """Return the lines of a configuration, including those of its `include_dir` folders."""
    folders = [Path(fields[1]) for line in lines if len(fields := line.split()) > 1 and fields[0] == "include_dir"]
    files = [path for folder in folders for path in sorted(folder.glob("*.conf"))]
    return [*lines, *(line for path in files for line in path.read_text().splitlines())]


def examine_machine(config: ServerConfig | None) -> Iterator[Finding]:
    """Check this machine's clock and disk.

    Args:
        config: Server's configuration; None if there is none or it is invalid.
    """
    if is_synchronised():
        yield good("clock", "is synchronised")
    else:
        remedy = "run `timedatectl set-ntp true`; this clock dates certificates, and boards without a clock follow it"
        yield advice("clock", "is not known to be synchronised", remedy)
    if config:
        yield _disk(Path(config.data_dir))
        yield from _data_folder(Path(config.data_dir))
        if config.plan and not Path(config.plan).is_file():
            yield advice("plan", f"{config.plan} does not exist", "create it before `edge-server run`")


def _disk(folder: Path) -> Finding:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return bad("disk", f"{existing} is not writable", "run this as the server's user, or change the folder's owner")
    free = shutil.disk_usage(existing).free
    text, remedy = f"{free / MIB:.0f} MiB free for {folder}", "free some space, for example by `edge-server runs prune`"
    if free < LEAST_FREE:
        return bad("disk", text, remedy)
    return advice("disk", text, remedy) if free < LITTLE_FREE else good("disk", text)


def _data_folder(folder: Path) -> Iterator[Finding]:
    try:
        check_data_folder(folder)
    except ConfigError as error:
        yield bad("data_dir", str(error), "until then `edge-server run` exits with code 2 and changes nothing")
