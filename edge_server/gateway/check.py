"""Whether a site is as it was made: files, dates, and what the broker really does; each fault with its mend."""

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
from edge_server.gateway.certificate_files import (
    NEXT_CA,
    NEXT_KEY,
    NEXT_ROOT,
    are_revocation_lists,
    authority_id,
    chain_of,
    is_pair,
    is_replacing_root,
    key_in,
    roots_of,
    split_certificates,
)
from edge_server.gateway.enrolment.accounts import FILE as ACCOUNTS
from edge_server.gateway.packages.store import package_faults, read_index
from edge_server.gateway.probe_access import Door, OpenFault, strangers
from edge_server.gateway.reload import AGAIN, RELOAD_LOCK, all_faults, broker_door, find_broker, stop_broker
from edge_server.gateway.rotation.root import unmoved
from edge_server.gateway.site_folder import (
    OWN_PAIRS,
    PAIRS,
    SiteFolder,
    access_of,
    authorities,
    gateway_addresses,
    is_own_pair,
    own_trust,
    pair_chain,
)
from edge_server.gateway.state import FILE, SiteState, locked, read_state, revoked_serials
from edge_server.plan.server_config import load
from shared.errors import ConfigError, Unreachable
from shared.transfer.frames import HEADER_BYTES, MAX_FRAME_BYTES
from shared.transport.base import Broker
from shared.transport.capabilities import Lack, find_lacks
from shared.transport.tls import Tls

SOON = timedelta(days=365)
"""Before a CA's end, within which it is time to make the next: boards' certificates are not valid longer than it."""

ANEW, RELOAD = "`edge-server site init` makes it anew", "`edge-server site reload` has the broker take it"
GO_ON = "a rotation was cut short: `edge-server site rotate-ca` goes on with it"
FINISH = "`edge-server site rotate-root --finish`"
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        state: `good`, `bad`, or `advice` for what works and might be better.
        mend: What to do about it; empty where nothing is to be done.
    """

    about: str
    state: Literal["good", "bad", "advice"]
    told: str
    mend: str = ""


@dataclass(frozen=True)
class _Look:
    """What every check is given."""

    site: SiteFolder
    state: SiteState
    now: datetime


Check: TypeAlias = Callable[[_Look], Iterator[Finding]]


async def check_site(site: SiteFolder, now: datetime, *, stops: bool = False) -> list[Finding]:
    """Look at a site's files, and at what its broker does; nothing is changed.

    Args:
        now: UTC.
        stops: Whether to stop a broker that is open to those whom it must not let in, or lets pass what it must not.

    Raises:
        ConfigError: There is no site.
    """
    try:
        state = read_state(site.path)
    except ConfigError as error:
        if not (site.path / FILE).is_file():
            raise
        restore = "restore state.json and accounts.sqlite from a backup, both of one time"
        return [_bad("state", str(error), restore), *await _broker_without_state(site, stops=stops)]
    look = _Look(site, state, now)
    checks: tuple[Check, ...] = (_authorities, _pairs, _modes, _broker_files, _server_file, _packages)
    found = [finding for check in checks for finding in _guarded(check, look)]
    return found + await _broker(look, stops=stops)


def _guarded(check: Check, look: _Look) -> Iterator[Finding]:
    try:
        yield from check(look)
    except PermissionError as error:
        yield _bad(str(error.filename), "may not be read", "run this as root")
    except (OSError, ValueError, TypeError, InvalidSignature, ConfigError) as error:
        yield _bad(check.__name__.strip("_").replace("_", " "), str(error), ANEW)


def _good(about: str, told: str) -> Finding:
    return Finding(about=about, state="good", told=told)


def _bad(about: str, told: str, mend: str) -> Finding:
    return Finding(about=about, state="bad", told=told, mend=mend)


def _authorities(look: _Look) -> Iterator[Finding]:
    ca = x509.load_pem_x509_certificate(look.site.ca("site.crt").read_bytes())
    if not any(_is_issued_by(ca, root) for root in split_certificates(look.site.ca("root.crt").read_bytes())):
        yield _bad("ca/site.crt", "is not signed by ca/root.crt", "bring both back from one copy")
        return
    if public_key_of(look.site.ca("site.key").read_bytes()) != key_in(ca):
        mend = GO_ON if _is_cut_short(look.site) else "bring both back from one copy"
        yield _bad("ca/site.key", "is not the key of ca/site.crt", mend)
        return
    for name, wanted in (("root.crt", roots_of(look.site.ca(""))), ("chain.pem", chain_of(look.site.ca("")))):
        if look.site.ca(name).read_bytes() != wanted:
            yield _bad(f"ca/{name}", "is not of the site CA and the root, as others are to get them", ANEW)
    begin, end = ca.not_valid_before_utc, ca.not_valid_after_utc
    dates = f"valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}"
    if not begin <= look.now <= end:
        told = f"{dates}, and this machine's clock reads {look.now:%Y-%m-%d}"
        yield _bad("ca/site.crt", told, "set the clock; if it is right, `edge-server site rotate-ca`")
    elif end - look.now < SOON:
        mend = "`edge-server site rotate-ca` makes the next; it needs the root's key"
        yield Finding(about="ca/site.crt", state="advice", told=dates, mend=mend)
    else:
        yield _good("ca/site.crt", f"signed by the root, {dates}")
    yield from _overlap(look.site)
    yield from _roots(look)
    if look.site.ca("root.key").exists():
        told = "lies on the gateway: whoever takes it over could make another site CA"
        mend = "move it to a medium that is kept elsewhere, with a copy; only rotating the CA needs it"
        yield Finding(about="ca/root.key", state="advice", told=told, mend=mend)


def _overlap(site: SiteFolder) -> Iterator[Finding]:
    """Look for the CA before, and for what a rotation left that was cut short."""
    if _is_cut_short(site):
        yield Finding(about="ca/site-before.crt", state="advice", told="is the CA that signs still", mend=GO_ON)
    elif site.ca("site-before.crt").exists():
        told = "is in force beside the new one"
        mend = "once all boards have renewed, `edge-server site rotate-ca --finish`"
        yield Finding(about="ca/site-before.crt", state="advice", told=told, mend=mend)
    elif site.ca("site-before.key").exists():
        told, mend = "is there without its certificate", "`edge-server site rotate-ca --finish` removes it"
        yield Finding(about="ca/site-before.key", state="advice", told=told, mend=mend)


def _roots(look: _Look) -> Iterator[Finding]:
    """Look how far a next root is, and who has not moved to it."""
    site, left = look.site, unmoved(look.site, look.state)
    names = f"{', '.join(left)} trust the root before still"
    if is_replacing_root(site.ca("")):
        if site.ca("site.crt").read_bytes() == site.ca(NEXT_CA).read_bytes():
            yield _bad("ca/root-next.crt", "is not the only root yet: that was cut short", f"{FINISH} goes on with it")
            return
        told = f"is in force beside the root before; {names if left else 'all boards have moved to it'}"
        late = f"switch them on: they move within 8 hours, after {FINISH} too, but not after the next rotate-ca"
        yield Finding(about="ca/root-next.crt", state="advice", told=told, mend=late if left else FINISH)
        if site.ca(NEXT_KEY).exists():
            told = "lies on the gateway: it is the key of the next root"
            mend = "move it to a medium kept elsewhere, with a copy, as root.key; that of the root before goes"
            yield Finding(about="ca/root-next.key", state="advice", told=told, mend=mend)
    elif site.ca(NEXT_ROOT).exists() or site.ca(NEXT_KEY).exists():
        mend = "`edge-server site rotate-root` goes on with it"
        yield Finding(about="ca/root-next.crt", state="advice", told="is not signed yet by the root that is", mend=mend)
    elif left:
        mend = "switch them on: they move within 8 hours; or enrol them anew, or revoke them, before the next rotate-ca"
        yield Finding(about="ca/cross.crt", state="advice", told=names, mend=mend)


def _is_issued_by(ca: x509.Certificate, root: bytes) -> bool:
    try:
        ca.verify_directly_issued_by(x509.load_pem_x509_certificate(root))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_cut_short(site: SiteFolder) -> bool:
    """Tell whether a CA was set aside, and the next did not take its place."""
    before = site.ca("site-before.crt")
    return before.is_file() and before.read_bytes() == site.ca("site.crt").read_bytes()


def _pairs(look: _Look) -> Iterator[Finding]:
    for name, (_, role) in PAIRS.items():
        addresses = gateway_addresses(look.state) if role == "gateway" else ()
        files = (look.site.gateway(f"{name}.key"), look.site.gateway(f"{name}.crt"))
        about = f"gateway/{name}.crt"
        if is_pair(*files, pair_chain(look.site, name), addresses):
            yield _good(about, f"for {', '.join(addresses)}" if addresses else "belongs to its key, of this site's CA")
        else:
            yield _bad(about, "is gone, not of this site's CA, or not for its key or these addresses", ANEW)
    for name in OWN_PAIRS:
        if is_own_pair(look.site, name):
            yield _good(f"gateway/{name}.crt", "belongs to its key, and signs itself")
        else:
            yield _bad(f"gateway/{name}.crt", "is gone, or not its key's", ANEW)


def _modes(look: _Look) -> Iterator[Finding]:
    private = [*look.site.path.glob("ca/*.key"), *look.site.path.glob("gateway/*.key")]
    private += [one for one in (look.site.path / FILE, look.site.path / ACCOUNTS) if one.exists()]
    wrong = [path for path in private if path.stat().st_mode & OPEN_TO_OTHERS]
    for path in wrong:
        mode = stat.S_IMODE(path.stat().st_mode)
        yield _bad(str(path.relative_to(look.site.path)), f"has mode {mode:04o}: others may read it", "chmod 600 it")
    if not wrong:
        yield _good("keys", "are their owners' alone")
    key = look.site.gateway("server.key")
    if look.site.broker_user and key.owner() != look.site.broker_user:
        told = f"is {key.owner()}'s, and the broker runs as {look.site.broker_user}"
        yield _bad("gateway/server.key", told, f"chown {look.site.broker_user} it")


def _broker_files(look: _Look) -> Iterator[Finding]:
    state, site = look.state, look.site
    conf = broker_conf(site.broker_places(), port=state.port, own_port=state.servers_port, bind=state.bind)
    for name, text in (
        ("acl", access_of(state)),
        ("mosquitto.conf", conf),
    ):
        if (site.path / name).read_text() == text:
            yield _good(name, "as it was made")
        else:
            yield _bad(name, "is not as it was made", f"{ANEW}; {RELOAD}")
    wanted = [(cert, revoked_serials(state, authority_id(cert))) for _, cert in authorities(site)]
    if are_revocation_lists(site.path / "crl.pem", wanted):
        yield _good("crl.pem", "signed by the CA, names all that is revoked, and does not run out before the CA")
    else:
        yield _bad(
            "crl.pem", "is not the CA's list of what is revoked, or is not valid all the time", f"{ANEW}; {RELOAD}"
        )


def _server_file(look: _Look) -> Iterator[Finding]:
    path = look.site.path / "server.toml"
    try:
        config = load(path)
    except ConfigError as error:
        yield _bad("server.toml", str(error), "correct it, or move it away: `edge-server site init` writes another")
        return
    broker, tls = config.broker, config.broker.tls
    if config.site != look.state.site:
        yield _bad("server.toml", f"is of site {config.site!r}", f'write site = "{look.state.site}"')
    elif broker.port != look.state.servers_port:
        own = look.state.servers_port
        told = f"has port {broker.port}, and the broker listens for this machine's own processes at {own}"
        yield _bad("server.toml", told, f"write port = {own} in [broker]")
    elif tls is None or not all(Path(one).is_file() for one in (tls.ca, tls.cert, tls.key)):
        yield _bad(
            "server.toml", "has no [broker.tls] whose files are there", "see what `edge-server site init` writes"
        )
    elif Path(tls.cert).read_bytes() not in own_trust(look.site):
        pair = look.site.gateway("own-server.crt")
        told = f"has cert {tls.cert}, which the broker's listener for this machine does not let in"
        yield _bad("server.toml", told, f'write cert = "{pair}", key = "{pair.with_suffix(".key")}" in [broker.tls]')
    else:
        yield _good("server.toml", f"reads; broker at {broker.host}:{broker.port}")


def _packages(look: _Look) -> Iterator[Finding]:
    bad = list(package_faults(look.site.path))
    mend = "`edge-server packages remove VERSION`, then `packages add` it anew"
    if is_replacing_root(look.site.ca("")):
        mend = f"`edge-server site rotate-root` goes on with it; else {mend}"
    for about, told in bad:
        yield _bad(about, told, mend)
    index = read_index(look.site.path)
    if not bad and (index.releases or index.wheels):
        newest = [f"agent {one.version} is the newest" for one in index.manifests()[-1:]]
        wheels = [f"{len(index.wheels)} wheels for boards' setup"] * bool(index.wheels)
        yield _good("packages", f"signed by this site and whole; {', '.join([*newest, *wheels])}")


async def _broker(look: _Look, *, stops: bool) -> list[Finding]:
    """Look at what the broker does; one probe at a time, since another would throw it off."""
    door = broker_door(look.site, look.state)
    place = f"{door.host}:{door.port}"
    try:
        pid = find_broker(look.state.port)
        if pid is None:
            conf = look.site.path / "mosquitto.conf"
            return [_bad("broker", f"nobody listens at {place}", f"start mosquitto with {conf}")]
        with locked(look.site.path, RELOAD_LOCK):
            found = await all_faults(look.site, look.state, pid)
            lacks = [] if found else await _lacks(look)
            is_stopped = stops and any(isinstance(one, OpenFault) for one in found)
            if is_stopped:
                await stop_broker(pid, look.state.port)
    except (ConfigError, OSError) as error:
        return [_bad("broker", str(error), "run this as root")]
    if found:
        mend = f"it was stopped: {AGAIN}" if is_stopped else RELOAD
        return [_bad("broker", str(told), mend) for told in found]
    if lacks:
        return [_bad(f"broker's {one.what}", one.found, one.setting) for one in lacks]
    told = f"at {place}, with the gateway's certificate; refuses strangers, the revoked, and what is not allowed"
    others = _other_ports(pid, {look.state.port, look.state.servers_port})
    mend = "take its other listeners out of its configuration: nobody needs a certificate there"
    return [
        _good("broker", told),
        *(Finding(about="broker", state="advice", told=f"listens at port {one} too", mend=mend) for one in others),
    ]


async def _broker_without_state(site: SiteFolder, *, stops: bool) -> list[Finding]:
    """Look whether a broker lets strangers in at the ports of its configuration, where the site's state is damaged."""
    found = []
    for port in _ports_of(site.path / "mosquitto.conf"):
        try:
            pid = find_broker(port)
            opened = await strangers(Door("127.0.0.1", port, site.ca("chain.pem")), site.gateway("")) if pid else []
            if pid and opened and stops:
                await stop_broker(pid, port)
        except (ConfigError, OSError) as error:
            found.append(_bad("broker", str(error), "run this as root"))
            continue
        mend = "it was stopped: restore the state, then start it" if stops else "stop it until the state is restored"
        found += [_bad("broker", f"at port {port} {one}", mend) for one in opened]
    return found


def _ports_of(conf: Path) -> list[int]:
    """Return the ports of a configuration of mosquitto; none where it cannot be read."""
    try:
        lines = conf.read_text(errors="replace").splitlines()
    except OSError:
        return []
    told = [words[1] for line in lines if len(words := line.split()) > 1 and words[0] == "listener"]
    return [int(port) for port in told if port.isdecimal()]


async def _lacks(look: _Look) -> list[Lack]:
    """Try, as the probe, what the protocol needs of the broker: by a message of the longest frame, among others."""
    door = broker_door(look.site, look.state)
    pair = look.site.gateway("probe")
    tls = Tls(ca=str(door.trusted), cert=f"{pair}.crt", key=f"{pair}.key")
    broker, place = Broker(host=door.host, port=door.port, tls=tls), probe_topic(look.state.site, look.state.generation)
    try:
        return await find_lacks(broker, "probe", place, MAX_FRAME_BYTES + HEADER_BYTES)
    except Unreachable as error:
        return [Lack("connection", f"it hung up: {error}", RELOAD)]


def _other_ports(pid: int, ours: set[int]) -> list[int]:
    found = psutil.net_connections("tcp")
    return sorted({one.laddr.port for one in found if one.pid == pid and one.status == psutil.CONN_LISTEN} - ours)
