"""What `edge-server doctor` looks at beside a site's own files: broker, limits, ends of certificates, clock, disk."""

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
from shared.errors import ConfigError, Unreachable
from shared.protocol.topics import DOCTOR, topic
from shared.runtime.clock import is_synchronised
from shared.transport.base import Broker
from shared.transport.capabilities import find_lacks
from shared.transport.packet_limit import MOST_PACKET_BYTES
from shared.transport.reach import NO_QOS_1, find_refusal
from shared.transport.tls import find_openness

DAY_S, MIB = 86_400.0, 1 << 20
RENEWAL_LEAD_DAYS = 60.0
"""Before the end of a board's certificate: with the usual year it renews 120 days before that."""
LEAST_SHARE_LEFT = 1 / 3
"""Of a certificate's life."""
CA_ENDS = "all end with the site CA: `edge-server site rotate-ca` makes the next"
ROOT_ENDS = "no CA outlives it: `edge-server site rotate-root`, then rotate-ca, make the next"
LEAST_FREE, LITTLE_FREE = 64 * MIB, 1024 * MIB
OTHER_FILES = 32
"""Of a broker: listeners, logs, the server's and the probe's connections."""
WARNING_SHARE, FIRST_LIMIT = 0.8, 3
"""Share of a limit that boards may take without a word; place of the soft limit in a line of /proc/PID/limits."""
LEAST_QUEUED = 1000
"""Messages that mosquitto keeps for a client that is slow, by its own default."""


def good(about: str, text: str) -> Finding:
    """Return a finding of what is as it should be."""
    return Finding(about=about, state="good", told=text)


def bad(about: str, text: str, mend: str) -> Finding:
    """Return a finding of what keeps the site from its work."""
    return Finding(about=about, state="bad", told=text, mend=mend)


def advice(about: str, text: str, mend: str) -> Finding:
    """Return a finding of what works and may not for long."""
    return Finding(about=about, state="advice", told=text, mend=mend)


def examine_certificates(state: SiteState, now: datetime) -> Iterator[Finding]:
    """Look for certificates of boards and peers that have ended, or end soon.

    Args:
        now: UTC.
    """
    count = 0
    for name, account in sorted(state.accounts.items()):
        valid = [
            certificate
            for certificate in account.certificates
            if not certificate.revoked and certificate.role in ("device", "peer")
        ]
        if account.denied or not valid:
            continue
        count += 1
        remaining_s = max(certificate.not_after_utc_s for certificate in valid) - now.timestamp()
        about = f"certificate of {name}"
        if remaining_s <= 0:
            mend = f"switch it on: it renews by itself for 180 days, then by `edge-server devices approve {name}`"
            yield advice(about, f"ended {-remaining_s / DAY_S:.0f} days ago", mend)
        elif remaining_s < RENEWAL_LEAD_DAYS * DAY_S:
            mend = "is the board on, and does it reach the enrolment service? By now it should have renewed"
            yield advice(about, f"ends in {remaining_s / DAY_S:.0f} days", mend)
    if count:
        yield good("certificates", f"{count} boards and peers have one; ends that are near are told")


def examine_own_certificates(site: SiteFolder, now: datetime) -> Iterator[Finding]:
    """Look how long root, site CA and the gateway's own certificates are good.

    Args:
        now: UTC.
    """
    files = [site.ca("root.crt"), site.ca("site.crt"), *(site.gateway(f"{name}.crt") for name in PAIRS)]
    for path in files:
        about = str(path.relative_to(site.path))
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            continue  # `check_site` says so
        if about != "gateway/revoked.crt":
            yield check_validity(
                f"life of {about}", certificate.not_valid_before_utc, certificate.not_valid_after_utc, now
            )


def check_validity(about: str, begin: datetime, end: datetime, now: datetime) -> Finding:
    """Judge how much of a certificate's life is left.

    Args:
        begin: From when it is valid.
        now: UTC.
    """
    text = f"{(end - now).total_seconds() / DAY_S:.0f} days are left, until {end:%Y-%m-%d}"
    mend = ROOT_ENDS if about.endswith("root.crt") else CA_ENDS
    if end <= now:
        return bad(about, f"ended on {end:%Y-%m-%d} by this machine's clock", f"set the clock if it is wrong; {mend}")
    return good(about, text) if end - now > (end - begin) * LEAST_SHARE_LEFT else advice(about, text, mend)


async def examine_broker(config: ServerConfig) -> list[Finding]:
    """Connect as the server does, and publish where it may and nobody listens."""
    broker = config.broker
    address = f"{broker.host}:{broker.port}"
    name, where = f"{config.site}._doctor-{os.getpid()}", topic(config.site, DOCTOR, "probe")
    refusal = await find_refusal(broker, name, where, dates=is_synchronised())
    if refusal and not refusal.startswith(NO_QOS_1):
        mend = "start the broker, or correct [broker]; its log says more"
        findings = [bad("server's connection", f"{address}: {refusal}", mend)]
    else:
        findings = [good("server's connection", f"{address} takes the server")]
        findings += await examine_capabilities(broker, name, where, longest_packet(config.link.frame_bytes))
    if exposure := describe_exposure(broker):
        problem, _, mend = exposure.partition("; ")
        findings.append(advice("server's connection", problem, mend))
    return findings


async def examine_capabilities(broker: Broker, client_id: str, where: str, size: int) -> list[Finding]:
    """Try what the protocol needs of a broker, by publishing.

    Args:
        broker: That takes this client.
        client_id: Client id that no other client uses.
        where: Topic that this client may publish and subscribe to, and no other client uses.
        size: Bytes of the longest message in use.
    """
    try:
        lacks = await find_lacks(broker, client_id, where, size, dates=is_synchronised())
    except Unreachable as error:
        return [bad("broker's capabilities", f"it hung up: {error}", "its log says more")]
    if not lacks:
        return [good("broker's capabilities", f"QoS 1, messages of {size >> 10} KiB, retained messages and wills pass")]
    return [bad(f"broker's {lack.what}", lack.found, lack.setting) for lack in lacks]


def examine_secrets(config: ServerConfig) -> Iterator[Finding]:
    """Look whether others can read what the server's file names as secret."""
    for path in secret_files(config):
        try:
            too_open = find_openness(path)
        except OSError as error:
            yield bad(str(path), error.strerror or str(error), "bring it back, or let the server's user read it")
            continue
        if too_open:
            yield bad(str(path), "can be read or replaced by others", f"chmod 600 {path}")


def secret_files(config: ServerConfig) -> list[Path]:
    """Return keys and passwords' files that a server's file names, of its own broker and of peers'."""
    brokers: list[Broker] = [config.broker, *(peer.broker for peer in config.peer)]
    keys = [broker.tls.key for broker in brokers if broker.tls and broker.tls.key]
    return [
        Path(path) for path in dict.fromkeys([*keys, *(path.password_file for path in brokers if path.password_file)])
    ]


def examine_limits(lines: Iterable[str], source: str) -> Iterator[Finding]:
    """Look whether a broker's settings leave room for what the server has under way.

    Args:
        lines: Of mosquitto's configuration.
    """
    settings = {fields[0]: fields[1] for line in lines if len(fields := line.split()) > 1}
    least = {"max_queued_messages": LEAST_QUEUED, "max_packet_size": MOST_PACKET_BYTES, "max_queued_bytes": 64 * MIB}
    wrong = {name: most for name, most in least.items() if 0 < _number(settings.get(name, "0")) < most}
    for name, most in wrong.items():
        yield bad(
            f"broker's {name}", f"{settings[name]} in {source}: frames are lost", f"set {name} {most} there, or more"
        )
    if not wrong:
        yield good("broker's limits", f"{source} leaves room for frames that wait")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def examine_open_files(port: int, boards: int) -> Iterator[Finding]:
    """Look whether the mosquitto of this machine that listens on a port may hold a connection of every board.

    Args:
        boards: How many there are.
    """
    process = broker_process(port)
    limit = open_file_limit(process.pid) if process else None
    if limit is None:
        return
    text = f"it may open {limit:,} files, and each of {boards:,} boards takes one"
    mend = "add `LimitNOFILE=65536` under [Service] by `systemctl edit mosquitto`, then restart it"
    if boards + OTHER_FILES > limit:
        yield bad("broker's open files", f"{text}: the last ones are refused", mend)
    elif WARNING_SHARE * limit < boards + OTHER_FILES:
        yield advice("broker's open files", text, mend)
    else:
        yield good("broker's open files", text)


def open_file_limit(pid: int) -> int | None:
    """Return how many files a process may open; None where that cannot be read, or there is no limit."""
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return None
    fields = next((line.split() for line in lines if line.startswith("Max open files")), [])
    return int(fields[FIRST_LIMIT]) if len(fields) > FIRST_LIMIT and fields[FIRST_LIMIT].isdecimal() else None


def broker_process(port: int) -> psutil.Process | None:
    """Return the mosquitto of this machine that listens on a port; None where that cannot be seen."""
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or connection.pid is None:
            continue
        with suppress(psutil.Error):
            process = psutil.Process(connection.pid)
            if process.name() == PROGRAM:
                return process
    return None


def running_configuration(port: int) -> tuple[Path, list[str]] | None:
    """Return file and lines of the mosquitto of this machine that listens on a port; None where that cannot be seen."""
    process = broker_process(port)
    with suppress(psutil.Error, OSError, ValueError):
        arguments = process.cmdline() if process else []
        if process and "-c" in arguments[:-1]:
            path = Path(process.cwd(), arguments[arguments.index("-c") + 1])
            return path, expand_includes(path.read_text().splitlines())
    return None


def expand_includes(lines: list[str]) -> list[str]:
    """Return lines of a configuration with those of the files that it includes, as Debian's does."""
    folders = [Path(fields[1]) for line in lines if len(fields := line.split()) > 1 and fields[0] == "include_dir"]
    files = [path for folder in folders for path in sorted(folder.glob("*.conf"))]
    return [*lines, *(line for path in files for line in path.read_text().splitlines())]


def examine_machine(config: ServerConfig | None) -> Iterator[Finding]:
    """Look at this machine: clock and disk.

    Args:
        config: Of the server; None where it has none that can be read.
    """
    if is_synchronised():
        yield good("clock", "is synchronised")
    else:
        mend = "`timedatectl set-ntp true`; certificates are signed by this clock, and boards without one follow it"
        yield advice("clock", "nothing says that it is right", mend)
    if config:
        yield _disk(Path(config.data_dir))
        yield from _data_folder(Path(config.data_dir))
        if not Path(config.plan).is_file():
            yield advice("plan", f"{config.plan} is not there", "write one before `edge-server run`")


def _disk(folder: Path) -> Finding:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return bad("disk", f"{existing} may not be written", "run this as the server's user, or give it the folder")
    free = shutil.disk_usage(existing).free
    text, mend = f"{free / MIB:.0f} MiB free for {folder}", "make room, or `edge-server runs` to remove some"
    if free < LEAST_FREE:
        return bad("disk", text, mend)
    return advice("disk", text, mend) if free < LITTLE_FREE else good("disk", text)


def _data_folder(folder: Path) -> Iterator[Finding]:
    try:
        check_data_folder(folder)
    except ConfigError as error:
        yield bad("data_dir", str(error), "until then `edge-server run` ends with code 2, and changes nothing there")
