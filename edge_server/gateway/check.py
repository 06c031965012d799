"""Validate a site's files, certificates and live broker; suggest fixes."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import psutil  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from edge_server.gateway.authority import public_key_of
from edge_server.gateway.broker_files import broker_conf, probe_topic
from edge_server.gateway.broker_probe import BrokerEndpoint
from edge_server.gateway.certificate_files import (
    NEXT_CA,
    NEXT_KEY,
    NEXT_ROOT,
    are_revocation_lists,
    authority_id,
    is_pair,
    is_replacing_root,
    key_in,
    read_chain,
    read_roots,
    split_certificates,
)
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.packages.store import find_package_faults, read_index
from edge_server.gateway.probe_access import OpenFault, find_open_logins
from edge_server.gateway.reload import (
    RELOAD_LOCK,
    RESTART_ADVICE,
    broker_endpoint,
    find_broker,
    find_faults,
    stop_broker,
)
from edge_server.gateway.rotation.root import devices_on_old_root
from edge_server.gateway.site_folder import (
    LOCAL_PAIRS,
    PAIRS,
    SiteFolder,
    gateway_addresses,
    is_local_pair,
    local_certificates,
    pair_chain,
    site_acl,
    valid_authorities,
)
from edge_server.gateway.state import FILE, SiteState, lock_site, read_state, revoked_serials
from edge_server.plan.server_config import load
from shared.errors import ConfigError, Unreachable
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES
from shared.transport.base import Broker
from shared.transport.capabilities import Lack, find_lacks
from shared.transport.tls import TlsSettings

RENEWAL_LEAD = timedelta(days=365)
"""Advise to replace a CA this long before its end, since it limits the validity of boards' certificates."""

RECREATE, RELOAD = "run `edge-server site init`, which writes it again", "reload it by `edge-server site reload`"
RECREATE_AND_RELOAD = f"{RECREATE}; {RELOAD}"
RESUME = "a rotation was interrupted: continue it by `edge-server site rotate-ca`"
FINISH = "`edge-server site rotate-root --finish`"
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    Attributes:
        about: File or component that was checked.
        state: `good`, `bad`, or `advice` for what works but could be better.
        told: Result, as a predicate of `about`.
        mend: Remedy; empty where none is needed.
    """

    about: str
    state: Literal["good", "bad", "advice"]
    told: str
    mend: str = ""


@dataclass(frozen=True)
class _Context:
    """Input of every check."""

    site: SiteFolder
    state: SiteState
    now: datetime


Check: TypeAlias = Callable[[_Context], Iterator[Finding]]


async def check_site(site: SiteFolder, now: datetime, *, stops: bool = False) -> list[Finding]:
    """Check a site's files and its broker's behaviour, without changing any file.

    Args:
        now: Current time in UTC.
        stops: Stop a broker that admits clients or messages that it must reject.

    Raises:
        ConfigError: There is no site.
    """
    try:
        state = read_state(site.path)
    except ConfigError as error:
        if not (site.path / FILE).is_file():
            raise
        restore = "restore state.json and accounts.sqlite from the same backup"
        return [_bad("state", str(error), restore), *await _broker_without_state(site, stops=stops)]
    context = _Context(site, state, now)
    checks: tuple[Check, ...] = (_authorities, _pairs, _modes, _broker_files, _server_file, _packages)
    findings = [finding for check in checks for finding in _run_check(check, context)]
    return findings + await _broker(context, stops=stops)


def _run_check(check: Check, context: _Context) -> Iterator[Finding]:
    try:
        yield from check(context)
    except PermissionError as error:
        yield _bad(str(error.filename), "cannot be read by this user", "run this as root")
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigError) as error:
        yield _bad(check.__name__.strip("_").replace("_", " "), str(error), RECREATE)


def _good(about: str, text: str) -> Finding:
    return Finding(about=about, state="good", told=text)


def _bad(about: str, text: str, remedy: str) -> Finding:
    return Finding(about=about, state="bad", told=text, mend=remedy)


def _advice(about: str, text: str, remedy: str) -> Finding:
    return Finding(about=about, state="advice", told=text, mend=remedy)


def _authorities(context: _Context) -> Iterator[Finding]:
    ca = x509.load_pem_x509_certificate(context.site.ca("site.crt").read_bytes())
    if not any(_is_issued_by(ca, root) for root in split_certificates(context.site.ca("root.crt").read_bytes())):
        yield _bad("ca/site.crt", "is not signed by ca/root.crt", "restore both from the same backup")
        return
    if public_key_of(context.site.ca("site.key").read_bytes()) != key_in(ca):
        remedy = RESUME if _is_interrupted(context.site) else "restore both from the same backup"
        yield _bad("ca/site.key", "is not the key of ca/site.crt", remedy)
        return
    for name, expected in (
        ("root.crt", read_roots(context.site.ca(""))),
        ("chain.pem", read_chain(context.site.ca(""))),
    ):
        if context.site.ca(name).read_bytes() != expected:
            yield _bad(f"ca/{name}", "does not consist of the site CA and the root", RECREATE)
    begin, end = ca.not_valid_before_utc, ca.not_valid_after_utc
    dates = f"valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    if not begin <= context.now <= end:
        text = f"{dates}, and this machine's clock reads {context.now:%Y-%m-%d}"
        yield _bad("ca/site.crt", text, "set the clock; if it is right, run `edge-server site rotate-ca`")
    elif end - context.now < RENEWAL_LEAD:
        remedy = "run `edge-server site rotate-ca`, which needs the root's key"
        yield _advice("ca/site.crt", dates, remedy)
    else:
        yield _good("ca/site.crt", f"signed by the root, {dates}")
    yield from _ca_rotation(context.site)
    yield from _root_rotation(context)
    if context.site.ca("root.key").exists():
        text = "is on the gateway: an intruder could create another site CA"
        remedy = "move it to offline media, with a copy; only rotating the CA needs it"
        yield _advice("ca/root.key", text, remedy)


def _ca_rotation(site: SiteFolder) -> Iterator[Finding]:
    """Report a previous CA still in force, and an interrupted rotation."""
    if _is_interrupted(site):
        yield _advice("ca/site-before.crt", "is still the CA that signs", RESUME)
    elif site.ca("site-before.crt").exists():
        text = "is valid beside the new one"
        remedy = "once all boards have renewed, run `edge-server site rotate-ca --finish`"
        yield _advice("ca/site-before.crt", text, remedy)
    elif site.ca("site-before.key").exists():
        text, remedy = "exists without its certificate", "remove it by `edge-server site rotate-ca --finish`"
        yield _advice("ca/site-before.key", text, remedy)


def _root_rotation(context: _Context) -> Iterator[Finding]:
    """Report the progress of a root rotation, and the devices that still trust the previous root."""
    site, pending = context.site, devices_on_old_root(context.site, context.state)
    names = f"{', '.join(pending)} still trust the previous root"
    if is_replacing_root(site.ca("")):
        if site.ca("site.crt").read_bytes() == site.ca(NEXT_CA).read_bytes():
            yield _bad("ca/root-next.crt", "is not the only root yet: interrupted", f"continue by {FINISH}")
            return
        text = f"is in force beside the previous root; {names if pending else 'all boards have moved to it'}"
        late = f"switch them on: they move within 8 hours, also after {FINISH}, but not after the next rotate-ca"
        yield _advice("ca/root-next.crt", text, late if pending else f"run {FINISH}")
        if site.ca(NEXT_KEY).exists():
            text = "is on the gateway: it is the key of the next root"
            remedy = "move it to offline media, with a copy, as root.key, in place of the previous root's"
            yield _advice("ca/root-next.key", text, remedy)
    elif site.ca(NEXT_ROOT).exists() or site.ca(NEXT_KEY).exists():
        remedy = "continue by `edge-server site rotate-root`"
        yield _advice("ca/root-next.crt", "is not signed by the present root yet", remedy)
    elif pending:
        remedy = "switch them on: they move within 8 hours; or re-enrol or revoke them before the next rotate-ca"
        yield _advice("ca/cross.crt", names, remedy)


def _is_issued_by(ca: x509.Certificate, root: bytes) -> bool:
    try:
        ca.verify_directly_issued_by(x509.load_pem_x509_certificate(root))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_interrupted(site: SiteFolder) -> bool:
    """Check whether a CA was set aside, but the next has not replaced it."""
    before = site.ca("site-before.crt")
    return before.is_file() and before.read_bytes() == site.ca("site.crt").read_bytes()


def _pairs(context: _Context) -> Iterator[Finding]:
    for name, (_, role) in PAIRS.items():
        addresses = gateway_addresses(context.state) if role == "gateway" else ()
        key, certificate = context.site.gateway(f"{name}.key"), context.site.gateway(f"{name}.crt")
        about = f"gateway/{name}.crt"
        if is_pair(key, certificate, pair_chain(context.site, name), addresses):
            yield _good(about, f"for {', '.join(addresses)}" if addresses else "matches its key and this site's CA")
        else:
            yield _bad(about, "is missing, or does not match its key, this site's CA or the addresses", RECREATE)
    for name in LOCAL_PAIRS:
        if is_local_pair(context.site, name):
            yield _good(f"gateway/{name}.crt", "matches its key, self-signed")
        else:
            yield _bad(f"gateway/{name}.crt", "is missing, or does not match its key", RECREATE)


def _modes(context: _Context) -> Iterator[Finding]:
    private = [*context.site.path.glob("ca/*.key"), *context.site.path.glob("gateway/*.key")]
    private += [path for path in (context.site.path / FILE, context.site.path / ACCOUNTS) if path.exists()]
    wrong = [path for path in private if path.stat().st_mode & OPEN_TO_OTHERS]
    for path in wrong:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = f"has mode {mode:04o}: others may read it"
        yield _bad(str(path.relative_to(context.site.path)), text, "set its mode to 600 by chmod")
    if not wrong:
        yield _good("keys", "are readable by their owners only")
    key = context.site.gateway("server.key")
    if context.site.broker_user and key.owner() != context.site.broker_user:
        text = f"belongs to {key.owner()}, but the broker runs as {context.site.broker_user}"
        yield _bad("gateway/server.key", text, f"change its owner to {context.site.broker_user} by chown")


def _broker_files(context: _Context) -> Iterator[Finding]:
    state, site = context.state, context.site
    conf = broker_conf(site.broker_paths(), port=state.port, own_port=state.servers_port, bind=state.bind)
    for name, text in (("acl", site_acl(state)), ("mosquitto.conf", conf)):
        if (site.path / name).read_text() == text:
            yield _good(name, "is unchanged")
        else:
            yield _bad(name, "differs from what the site's state requires", RECREATE_AND_RELOAD)
    expected = [(cert, revoked_serials(state, authority_id(cert))) for _, cert in valid_authorities(site)]
    if are_revocation_lists(site.path / "crl.pem", expected):
        yield _good("crl.pem", "is signed by the CA, lists all revoked certificates, and is valid as long as the CA")
    else:
        text = "does not list exactly the CA's revoked certificates, or ends before the CA"
        yield _bad("crl.pem", text, RECREATE_AND_RELOAD)


def _server_file(context: _Context) -> Iterator[Finding]:
    path = context.site.path / "server.toml"
    try:
        config = load(path)
    except ConfigError as error:
        yield _bad("server.toml", str(error), "correct it, or move it away and run `edge-server site init`")
        return
    broker, tls = config.broker, config.broker.tls
    if config.site != context.state.site:
        text = f"names site {config.site!r}, not {context.state.site!r}"
        yield _bad("server.toml", text, f'write site = "{context.state.site}"')
    elif broker.port != context.state.servers_port:
        port = context.state.servers_port
        text = f"has port {broker.port}, but the broker's loopback listener is at {port}"
        yield _bad("server.toml", text, f"write port = {port} in [broker]")
    elif tls is None or not all(Path(path).is_file() for path in (tls.ca, tls.cert, tls.key)):
        yield _bad("server.toml", "has no [broker.tls] with existing files", "compare with a new site's file")
    elif Path(tls.cert).read_bytes() not in local_certificates(context.site):
        pair = context.site.gateway("own-server.crt")
        text = f"has cert {tls.cert}, which the broker's loopback listener does not accept"
        yield _bad("server.toml", text, f'write cert = "{pair}", key = "{pair.with_suffix(".key")}" in [broker.tls]')
    else:
        yield _good("server.toml", f"is valid; broker at {broker.host}:{broker.port}")


def _packages(context: _Context) -> Iterator[Finding]:
    bad = list(find_package_faults(context.site.path))
    remedy = "remove it by `edge-server packages remove VERSION`, then run `packages add` again"
    if is_replacing_root(context.site.ca("")):
        remedy = f"continue by `edge-server site rotate-root`; otherwise {remedy}"
    for about, text in bad:
        yield _bad(about, text, remedy)
    index = read_index(context.site.path)
    if not bad and (index.releases or index.wheels or index.projects):
        newest = [f"agent {manifest.version} is the newest" for manifest in index.manifests()[-1:]]
        wheels = [f"{len(index.wheels)} wheels for boards' setup"] * bool(index.wheels)
        projects = [f"{len(index.projects)} versions of projects"] * bool(index.projects)
        yield _good("packages", f"are signed by this site and complete; {', '.join([*newest, *wheels, *projects])}")


async def _broker(context: _Context, *, stops: bool) -> list[Finding]:
    """Check the running broker; the lock keeps other probes out, whose connection would end this one's."""
    endpoint = broker_endpoint(context.site, context.state)
    address = f"{endpoint.host}:{endpoint.port}"
    try:
        pid = find_broker(context.state.port)
        if pid is None:
            conf = context.site.path / "mosquitto.conf"
            return [_bad("broker", f"nothing listens at {address}", f"start mosquitto with {conf}")]
        with lock_site(context.site.path, RELOAD_LOCK):
            faults = await find_faults(context.site, context.state, pid)
            lacks = [] if faults else await _missing_capabilities(context)
            is_stopped = stops and any(isinstance(fault, OpenFault) for fault in faults)
            if is_stopped:
                await stop_broker(pid, context.state.port)
    except (ConfigError, OSError) as error:
        return [_bad("broker", str(error), "run this as root")]
    if faults:
        remedy = f"it was stopped: {RESTART_ADVICE}" if is_stopped else RELOAD
        return [_bad("broker", str(fault), remedy) for fault in faults]
    if lacks:
        return [_bad(f"broker's {lack.what}", lack.found, lack.setting) for lack in lacks]
    text = f"at {address}, with the gateway's certificate; enforces certificates, revocation and the access list"
    others = _other_ports(pid, {context.state.port, context.state.servers_port})
    remedy = "remove its other listeners from its configuration: they may accept clients without a certificate"
    return [
        _good("broker", text),
        *(_advice("broker", f"also listens at port {port}", remedy) for port in others),
    ]


async def _broker_without_state(site: SiteFolder, *, stops: bool) -> list[Finding]:
    """Check for open logins at the configured ports, where the site's state is damaged."""
    findings = []
    for port in _ports_of(site.path / "mosquitto.conf"):
        try:
            pid = find_broker(port)
            endpoint = BrokerEndpoint("127.0.0.1", port, site.ca("chain.pem"))
            faults = await find_open_logins(endpoint, site.gateway("")) if pid else []
            if pid and faults and stops:
                await stop_broker(pid, port)
        except (ConfigError, OSError) as error:
            findings.append(_bad("broker", str(error), "run this as root"))
            continue
        remedy = "it was stopped: restore the state, then start it" if stops else "stop it until the state is restored"
        findings += [_bad("broker", f"at port {port} {fault}", remedy) for fault in faults]
    return findings


def _ports_of(conf: Path) -> list[int]:
    """Return the listener ports of a mosquitto configuration; empty if it cannot be read."""
    try:
        lines = conf.read_text(errors="replace").splitlines()
    except OSError:
        return []
    ports = [fields[1] for line in lines if len(fields := line.split()) > 1 and fields[0] == "listener"]
    return [int(port) for port in ports if port.isdecimal()]


async def _missing_capabilities(context: _Context) -> list[Lack]:
    """Test the broker's capabilities as the probe, among others by a message of the longest frame."""
    endpoint = broker_endpoint(context.site, context.state)
    pair = context.site.gateway("probe")
    tls = TlsSettings(ca=str(endpoint.trusted), cert=f"{pair}.crt", key=f"{pair}.key")
    broker = Broker(host=endpoint.host, port=endpoint.port, tls=tls)
    topic = probe_topic(context.state.site, context.state.generation)
    try:
        return await find_lacks(broker, "probe", topic, MAX_FRAME_BYTES + HEADER_BYTES)
    except Unreachable as error:
        return [Lack("connection", f"it closed the connection: {error}", RELOAD)]


def _other_ports(pid: int, site_ports: set[int]) -> list[int]:
    connections = psutil.net_connections("tcp")
    return sorted(
        {
            connection.laddr.port
            for connection in connections
            if connection.pid == pid and connection.status == psutil.CONN_LISTEN
        }
        - site_ports
    )
