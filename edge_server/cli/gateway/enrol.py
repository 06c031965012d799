"""`edge-server enrol`, `enrolment-service`, `devices approve`: tokens and board enrolment."""

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

from edge_server.cli.terminal import write_text
from edge_server.gateway.authority import check_device_name
from edge_server.gateway.enrolment.address import Address, read_address, write_address
from edge_server.gateway.enrolment.ledger import EnrolmentLedger, read_ledger
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite, gateway_address
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
from shared.runtime.text_table import TextColumn, TextTable

if TYPE_CHECKING:
    from segno import QRCode

log = logging.getLogger(__name__)

MOST_AT_ONCE = 1000
PATTERN = re.compile(r"[^{}]*\{(:[0-9]{1,2})?\}[^{}]*")
"""The field's width has two digits at most, since formatting allocates it."""
PRIVATE = 0o600


def enrol(options: argparse.Namespace) -> int:
    """Create, list or revoke tokens.

    Raises:
        ConfigError: There is no such site or token, a name is malformed, or the options do not fit.
    """
    site = EnrolmentSite(options.folder)
    if options.list:
        show_tokens(read_site_ledger(site), site.utc_s())
    elif options.revoke:
        revoke_token(site, options.revoke)
    else:
        issue_tokens(site, options)
    return 0


def read_site_ledger(site: EnrolmentSite) -> EnrolmentLedger:
    """Return the enrolment ledger of a site.

    Raises:
        ConfigError: There is no site.
    """
    read_state(site.folder)
    return read_ledger(site.folder)


def issue_tokens(site: EnrolmentSite, options: argparse.Namespace) -> None:
    """Create tokens and print them; readmit revoked boards if requested, after voiding their earlier tokens.

    Raises:
        ConfigError: As `enrol`.
    """
    names = _names(site, options)
    if options.svg and len(names) > 1:
        raise ConfigError("--svg: only for a single token; use --csv for several")
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
        installs = format_install_command(endpoint, line) if options.install or has_packages else ""
        _print_token((name, line, token_id), options, again=name in state.accounts, installs=installs)
    if options.svg:
        _write_svg(rows[0][1], options.svg)


def _address(state: SiteState, requested: str) -> str:
    address = requested or gateway_address(state)
    if address not in state.addresses:
        names = ", ".join(state.addresses)
        raise ConfigError(f"--address {address}: not in the gateway's certificate ({names}); boards would reject it")
    return address


def _find_revoked(site: EnrolmentSite, names: Sequence[str], *, may_readmit: bool) -> list[str]:
    """Return the revoked ones of these boards, if the operator readmits them."""
    revoked = [name for name in names if site.is_denied(name)]
    if revoked and not may_readmit:
        [name] = revoked  # with --count, all names are new
        problem = f"{name} was revoked: a token would readmit a board of that name"
        raise ConfigError(f"{problem}; use `edge-server enrol {name} --readmit`, or another name")
    return revoked


def _readmit(site: EnrolmentSite, name: str) -> None:
    """Lift the broker's denial of a device; its old certificates stay revoked, and it gets a new key."""
    done = asyncio.run(readmit(open_folder(site.folder), name))
    if done.faults:
        raise ConfigError(f"{name} is still denied, and the broker was stopped: {'; '.join(done.faults)}")
    text = "was revoked and may join again, with this token and a new key; its earlier certificates stay revoked"
    sys.stderr.write(f"edge-server: {name} {text}\n")


def _names(site: EnrolmentSite, options: argparse.Namespace) -> list[str]:
    if bool(options.device) == bool(options.count):
        raise ConfigError("name one board, or use --count N for several")
    if options.device:
        return [check_device_name(options.device)]
    if options.readmit:
        raise ConfigError("--readmit: name the board; --count creates tokens for new names only")
    if not 1 <= options.count <= MOST_AT_ONCE:
        raise ConfigError(f"--count {options.count}: use 1 to {MOST_AT_ONCE}")
    used = {*read_state(site.folder).accounts, *(record.device for record in read_ledger(site.folder).tokens.values())}
    return list_unused_names(options.pattern, options.count, used)


def list_unused_names(pattern: str, count: int, used: set[str]) -> list[str]:
    """Return unused names of a pattern.

    Args:
        pattern: Name with one field for a number, such as `pi-{:02}`.
        used: Names that are taken.

    Raises:
        ConfigError: The pattern gives no valid names.
    """
    if not PATTERN.fullmatch(pattern):
        raise ConfigError(f"--pattern {pattern[:80]!r}: use one field for a number, such as pi-{{:02}}")
    names: list[str] = []
    for number in range(1, count + len(used) + 1):
        try:
            name = check_device_name(pattern.format(number))
        except ConfigError as error:
            raise ConfigError(f"--pattern {pattern!r}: {error}; use one such as pi-{{:02}}") from error
        if name not in used:
            names.append(name)
        if len(names) == count:
            break
    return names


def format_install_command(endpoint: EnrolmentEndpoint, line: str) -> str:
    """Return the shell line that installs the agent on a bare board, after verifying the script's digest.

    The token is not an argument of a command, which other users of the board could see.
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
    write_text(out, [f"{name}: usable once within {options.ttl / 60:g} minutes (token {token_id}). On the board:", ""])
    if installs:
        out.write(f"{installs}\n\nor, if the agent is installed:\n\n")
    out.write(f"  device-agent join -\n\nfollowed by this line, or the code:\n\n{line}\n\n")
    make_qr_code(line).terminal(out, compact=True)
    if again:
        write_text(out, f"{name} has a certificate already, which stays valid until `edge-server revoke {name}`.")


def make_qr_code(line: str) -> QRCode:
    """Return a token's QR code."""
    import segno  # noqa: PLC0415 - only when printing

    return segno.make_qr(line, error="m")


def _write_svg(line: str, path: Path) -> None:
    import io  # noqa: PLC0415 - only with --svg

    image = io.BytesIO()
    make_qr_code(line).save(image, kind="svg", scale=6, border=4)
    replace_file(path, image.getvalue(), mode=PRIVATE)
    log.warning("%s is as secret as the token: delete it when the board has joined", path)


def _write_csv(rows: Sequence[tuple[str, str, str, float]]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["device", "token", "id", "expires"])
    out.writerows([(name, line, token_id, format_utc(expires)) for name, line, token_id, expires in rows])


def show_tokens(ledger: EnrolmentLedger, now_utc_s: float, out: TextIO | None = None) -> None:
    """Show the state of tokens, and the boards that wait for approval.

    Args:
        out: Stream to write to; None for standard output.
    """
    out = out or sys.stdout
    for device, key in sorted(ledger.pending.items()):
        asks = f"{device} wants to renew a certificate that expired long ago, with key {key[:16]}"
        write_text(out, f"{asks}; to allow it: edge-server devices approve {device}")
    if not ledger.tokens:
        write_text(out, "no tokens")
        return
    headings = ("id", "device", "state", "until", "key", "alarms")
    newest = sorted(ledger.tokens.items(), key=lambda item: -item[1].made_utc_s)
    rows = [_token_row(name, record, now_utc_s) for name, record in newest]
    write_text(out, TextTable([TextColumn(heading) for heading in headings], rows))
    for name, record in newest:
        for alarm in record.alarms:
            who = f"token {name} of {record.device} was used again with another key, {alarm.key[:16]},"
            write_text(out, f"ALARM {format_utc(alarm.utc_s)}: {who} from {alarm.source}")


def _token_row(name: str, record: TokenRecord, now_utc_s: float) -> list[str]:
    state = record.state(now_utc_s)
    alarms = str(len(record.alarms)) if record.alarms else ""
    return [name, record.device, state, format_utc(record.expires_utc_s), record.key[:16], alarms]


def revoke_token(site: EnrolmentSite, name: str) -> None:
    """Revoke a token; a certificate issued for it stays valid.

    Args:
        name: Id of the token.

    Raises:
        ConfigError: There is no such token.
    """
    read_state(site.folder)
    with site.edit() as ledger:
        record = ledger.tokens.get(name)
        if record is None:
            raise ConfigError(f"unknown token {name!r}; list tokens by `edge-server enrol --list`")
        ledger.tokens[name] = msgspec.structs.replace(record, revoked=True)
    if record.key:
        write_text(
            sys.stdout,
            f"{record.device} has a certificate from it: revoke that by `edge-server revoke {record.device}`",
        )


def approve_renewal(options: argparse.Namespace) -> int:
    """Allow a board that requested it to renew a certificate that expired long ago, for its present key only.

    Raises:
        ConfigError: There is no such site, or the board has not requested it.
    """
    site, name = EnrolmentSite(options.folder), options.name
    read_state(site.folder)
    with site.edit() as ledger:
        if name not in ledger.pending:
            asking = ", ".join(sorted(ledger.pending)) or "none"
            raise ConfigError(f"{name!r} has not asked to renew an expired certificate; waiting for approval: {asking}")
        ledger.approved[name] = ledger.pending[name]
    write_text(
        sys.stdout,
        f"{name} may renew its certificate with key {ledger.approved[name][:16]}; it asks again automatically",
    )
    return 0


def serve_enrolment(options: argparse.Namespace) -> int:
    """Answer boards until SIGTERM or SIGINT.

    Raises:
        ConfigError: There is no such site, its files are faulty or readable by others, or the port is in use.
    """
    site = EnrolmentSite(options.folder, options.days)
    site.require_private()
    asyncio.run(_serve(site, options.host, options.port))
    return 0


async def _serve(site: EnrolmentSite, host: str, port: int) -> None:
    registrar = site.registrar()
    packages = PackageCatalogue(site.folder, registrar.is_board)
    service = EnrolmentService(registrar, lambda: service_context(*site.pair()), packages=packages)
    service.context()  # report faults before serving
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with service.running(host, port) as bound, notify_supervisor():
        try:
            write_address(site.folder, Address(host=host, port=bound))
        except OSError as error:  # not needed for serving
            log.warning("cannot store port %d for doctor and tokens: %s", bound, error)
        log.info("enrolment service of site %s on port %d", site.facts().name, bound)
        await stopping.wait()
    log.info("stopped")


def format_utc(utc_s: float) -> str:
    """Format calendar seconds as UTC."""
    from datetime import UTC, datetime  # noqa: PLC0415 - only for messages

    return f"{datetime.fromtimestamp(utc_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
