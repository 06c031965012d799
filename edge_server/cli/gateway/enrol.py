"""What `edge-server enrol` and `edge-server enrolment-service` do: tokens for boards, and who answers these."""

from __future__ import annotations

import argparse
import asyncio
import csv
import hashlib
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from edge_server.gateway.authority import check_device_name
from edge_server.gateway.enrolment.address import Address, read_address, write_address
from edge_server.gateway.enrolment.ledger import EnrolmentLedger, read_ledger
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite, address_of
from edge_server.gateway.enrolment.tokens import (
    EnrolmentEndpoint,
    TokenRecord,
    drop_old_tokens,
    make_token,
    revoke_earlier_tokens,
)
from edge_server.gateway.packages.download import PackageCatalogue, install_script
from edge_server.gateway.packages.store import read_index
from edge_server.gateway.revocation.revoke import readmit
from edge_server.gateway.site_folder import open_folder
from edge_server.gateway.state import SiteState, read_state
from shared.errors import ConfigError
from shared.protocol.enrolment import format_token
from shared.runtime.durable import replace_file
from shared.runtime.service import notify_supervisor
from shared.runtime.text_table import TextColumn, TextTable, write_text

if TYPE_CHECKING:
    from segno import QRCode

log = logging.getLogger(__name__)

MOST_AT_ONCE = 1000
PATTERN = re.compile(r"[^{}]*\{(:[0-9]{1,2})?\}[^{}]*")
"""A wider field than any name is a name of as many digits, which takes the memory for them first."""
PRIVATE = 0o600


def enrol(options: argparse.Namespace) -> int:
    """Make tokens, list them, or withdraw one.

    Raises:
        ConfigError: There is no such site or token, a name is none, or the options do not fit.
    """
    site = EnrolmentSite(options.folder)
    if options.list:
        show_tokens(read_ledger_of(site), site.utc_s())
    elif options.revoke:
        revoke_token(site, options.revoke)
    else:
        issue_tokens(site, options)
    return 0


def read_ledger_of(site: EnrolmentSite) -> EnrolmentLedger:
    """Return what a site keeps of enrolments.

    Raises:
        ConfigError: There is no site.
    """
    read_state(site.folder)
    return read_ledger(site.folder)


def issue_tokens(site: EnrolmentSite, options: argparse.Namespace) -> None:
    """Make tokens and print them; who was revoked is let in again if asked, once the tokens of before are void.

    Args:
        options: Of the command line.

    Raises:
        ConfigError: As `enrol`.
    """
    names = _names(site, options)
    if options.svg and len(names) > 1:
        raise ConfigError("--svg: one token at a time; --csv has many")
    state = read_state(site.folder)
    port = options.port or read_address(site.folder).port
    endpoint = EnrolmentEndpoint(_address(state, options.address), port, site.root_digest())
    denied, rows = _find_revoked(site, names, may_readmit=options.readmit), []
    with site.edit() as ledger:
        ledger.tokens = drop_old_tokens(ledger.tokens, site.utc_s())
        for name in names:
            ledger.tokens = revoke_earlier_tokens(ledger.tokens, name)
            token, record = make_token(name, endpoint, options.ttl, site.utc_s())
            rows.append((name, format_token(token), token.id, record.expires_utc_s))
            ledger.tokens[token.id] = record
    for name in denied:
        _readmit(site, name)
    if options.csv:
        _write_csv(rows)
        return
    has_packages = bool(read_index(site.folder).releases)
    for name, line, token_id, _ in rows:
        installs = install_line(endpoint, line) if options.install or has_packages else ""
        _print_token((name, line, token_id), options, again=name in state.accounts, installs=installs)
    if options.svg:
        _write_svg(rows[0][1], options.svg)


def _address(state: SiteState, requested: str) -> str:
    address = requested or address_of(state)
    if address not in state.addresses:
        names = ", ".join(state.addresses)
        raise ConfigError(f"--address {address}: the gateway's certificate names {names}; boards would refuse it")
    return address


def _find_revoked(site: EnrolmentSite, names: Sequence[str], *, may_readmit: bool) -> list[str]:
    """Return which of these boards were revoked, where the operator says that they may join again."""
    revoked = [name for name in names if site.is_denied(name)]
    if revoked and not may_readmit:
        [name] = revoked  # of several boards, all names are new
        problem = f"{name} was revoked: a token would let a board of that name in again"
        raise ConfigError(f"{problem}; `edge-server enrol {name} --readmit` does, or give the board another name")
    return revoked


def _readmit(site: EnrolmentSite, name: str) -> None:
    """Have the broker deny a device no more: its old certificates stay revoked, and the new one gets a new key."""
    done = asyncio.run(readmit(open_folder(site.folder), name))
    if done.faults:
        raise ConfigError(f"{name} is denied still, and the broker was stopped: {'; '.join(done.faults)}")
    text = "was revoked and may join again, by this token and a new key; its certificates of before stay refused"
    sys.stderr.write(f"edge-server: {name} {text}\n")


def _names(site: EnrolmentSite, options: argparse.Namespace) -> list[str]:
    if bool(options.device) == bool(options.count):
        raise ConfigError("give the NAME of one board, or --count N for several")
    if options.device:
        return [check_device_name(options.device)]
    if options.readmit:
        raise ConfigError("--readmit: name the board; --count makes tokens for names that no board had")
    if not 1 <= options.count <= MOST_AT_ONCE:
        raise ConfigError(f"--count {options.count}: 1 to {MOST_AT_ONCE}")
    used = {*read_state(site.folder).accounts, *(record.device for record in read_ledger(site.folder).tokens.values())}
    return free_names(options.pattern, options.count, used)


def free_names(pattern: str, count: int, used: set[str]) -> list[str]:
    """Return so many names of a pattern that no board has.

    Args:
        pattern: With one field for a number, such as `pi-{:02}`.
        used: Names that are not free.

    Raises:
        ConfigError: The pattern gives no names.
    """
    if not PATTERN.fullmatch(pattern):
        raise ConfigError(f"--pattern {pattern[:80]!r}: write one with one place for a number, such as pi-{{:02}}")
    names: list[str] = []
    for number in range(1, count + len(used) + 1):
        try:
            name = check_device_name(pattern.format(number))
        except ConfigError as error:
            raise ConfigError(f"--pattern {pattern!r}: {error}; write one such as pi-{{:02}}") from error
        if name not in used:
            names.append(name)
        if len(names) == count:
            break
    return names


def install_line(endpoint: EnrolmentEndpoint, line: str) -> str:
    """Return what makes a bare board a device: it fetches the script, runs it if it is this gateway's, and that alone.

    The token is no argument of a command, which others on the board may see.

    Args:
        place: Host and port of the enrolment service, and the root's digest.
    """
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    digest = hashlib.sha256(install_script()).hexdigest()
    fetched = f"curl -fsSk https://{host}:{endpoint.port}/install.sh -o install.sh"
    return f"{fetched} && echo '{digest}  install.sh' | sha256sum -c - && echo {line} | sudo sh install.sh"


def _print_token(token: tuple[str, str, str], options: argparse.Namespace, *, again: bool, installs: str) -> None:
    (name, line, token_id), out = token, sys.stdout
    if options.install:
        out.write(f"{installs}\n")
        return
    if not out.isatty():
        out.write(f"{line}\n")
        return
    write_text(out, f"{name}: once, within {options.ttl / 60:g} minutes (token {token_id}). On the board:", "")
    if installs:
        out.write(f"{installs}\n\nor, where the agent is installed:\n\n")
    out.write(f"  device-agent join -\n\nand then this line, or the code:\n\n{line}\n\n")
    qr_code(line).terminal(out, compact=True)
    if again:
        write_text(out, f"{name} has a certificate already; that stays valid until `edge-server revoke {name}`.")


def qr_code(line: str) -> QRCode:
    """Return a token's QR code."""
    import segno  # noqa: PLC0415 - for people alone

    return segno.make_qr(line, error="m")


def _write_svg(line: str, path: Path) -> None:
    import io  # noqa: PLC0415 - with the above

    image = io.BytesIO()
    qr_code(line).save(image, kind="svg", scale=6, border=4)
    replace_file(path, image.getvalue(), mode=PRIVATE)
    log.warning("%s is as secret as the token: remove it when the board has joined", path)


def _write_csv(rows: Sequence[tuple[str, str, str, float]]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["device", "token", "id", "expires"])
    out.writerows([(name, line, token_id, utc_text(expires)) for name, line, token_id, expires in rows])


def show_tokens(ledger: EnrolmentLedger, now_utc_s: float, out: TextIO | None = None) -> None:
    """Show what has become of tokens, and who waits for approval.

    Args:
        out: Where to; None for standard output.
    """
    out = out or sys.stdout
    for device, key in sorted(ledger.pending.items()):
        asks = f"{device} asks to renew a certificate that ended long ago, by the key {key[:16]}"
        write_text(out, f"{asks}: edge-server devices approve {device}")
    if not ledger.tokens:
        write_text(out, "no token was made")
        return
    headings = ("id", "device", "state", "until", "key", "alarms")
    newest = sorted(ledger.tokens.items(), key=lambda item: -item[1].made_utc_s)
    rows = [_token_row(name, record, now_utc_s) for name, record in newest]
    write_text(out, TextTable([TextColumn(heading) for heading in headings], rows))
    for name, record in newest:
        for alarm in record.alarms:
            who = f"token {name} of {record.device} was used again, by the key {alarm.key[:16]}"
            write_text(out, f"ALARM {utc_text(alarm.utc_s)}: {who} from {alarm.source}")


def _token_row(name: str, record: TokenRecord, now_utc_s: float) -> list[str]:
    state = record.state(now_utc_s)
    alarms = str(len(record.alarms)) if record.alarms else ""
    return [name, record.device, state, utc_text(record.expires_utc_s), record.key[:16], alarms]


def revoke_token(site: EnrolmentSite, name: str) -> None:
    """Withdraw a token; a certificate that was given by it stays.

    Args:
        name: Id of the token.

    Raises:
        ConfigError: There is none of that id.
    """
    read_state(site.folder)
    with site.edit() as ledger:
        record = ledger.tokens.get(name)
        if record is None:
            raise ConfigError(f"no token {name!r}; `edge-server enrol --list` shows them")
        ledger.tokens[name] = msgspec.structs.replace(record, revoked=True)
    if record.key:
        write_text(
            sys.stdout, f"{record.device} has a certificate by it: `edge-server revoke {record.device}` ends that"
        )


def approve(options: argparse.Namespace) -> int:
    """Let a board that asked for it renew a certificate that ended long ago; it does so by its own key alone.

    Raises:
        ConfigError: There is no such site, or the board did not ask.
    """
    site, name = EnrolmentSite(options.folder), options.name
    read_state(site.folder)
    with site.edit() as ledger:
        if name not in ledger.pending:
            asking = ", ".join(sorted(ledger.pending)) or "none"
            raise ConfigError(f"{name!r} does not ask to renew a certificate that ended long ago; asking: {asking}")
        ledger.approved[name] = ledger.pending[name]
    write_text(
        sys.stdout,
        f"{name} may renew its certificate, by the key {ledger.approved[name][:16]}; it asks again by itself",
    )
    return 0


def serve(options: argparse.Namespace) -> int:
    """Answer boards until SIGTERM or SIGINT comes.

    Raises:
        ConfigError: There is no such site, its files are not in order or open to others, or the port is taken.
    """
    site = EnrolmentSite(options.folder, options.days)
    site.require_private()
    asyncio.run(_serve(site, options.host, options.port))
    return 0


async def _serve(site: EnrolmentSite, host: str, port: int) -> None:
    service = EnrolmentService(
        site.registrar(), lambda: service_context(*site.pair()), packages=PackageCatalogue(site.folder)
    )
    service.context()  # what is wrong with it is better said now
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with service.running(host, port) as bound, notify_supervisor():
        try:
            write_address(site.folder, Address(host=host, port=bound))
        except OSError as error:  # boards are answered all the same
            log.warning("doctor and tokens go by another port than %d: %s", bound, error)
        log.info("enrolment service of site %s on port %d", site.facts().name, bound)
        await stopping.wait()
    log.info("stopped")


def utc_text(utc_s: float) -> str:
    """Return calendar seconds for people and programs."""
    from datetime import UTC, datetime  # noqa: PLC0415 - for messages alone

    return f"{datetime.fromtimestamp(utc_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
