"""The folder of a site: what lies where, whose it is, and who may read it; made in one go, and mended by the same.

    ca/root.key root.crt      signs site CAs; the key belongs elsewhere, off the gateway
    ca/site.key site.crt      signs everybody; chain.pem has both certificates, as boards get them and the broker
    ca/root-next.* site-next.crt cross.crt   while the root is replaced, see `rotation.root`; root.crt has both then
    gateway/                  key and certificate of the broker (server), of the enrolment service (enrolment), of the
                              server where it runs on another machine (edge-server), of the probe, of one that is
                              revoked (revoked),
                              and of who signs packages (packages); own.pem has the certificates of the server and
                              the probe (own-server, own-probe) at the broker's listener for this machine
    state.json                its settings; accounts.sqlite has what was signed for whom
    mosquitto.conf acl crl.pem   made from the state
    server.toml               the server's file, which people edit: made anew until they do

Every file is replaced in one step. Keys are their owner's alone: the broker cannot read what signs, and what the
broker reads, it cannot write.
"""

from __future__ import annotations

import hashlib
import os
import pwd
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from pathlib import Path

import msgspec

from edge_server.gateway import authority
from edge_server.gateway.access import acl
from edge_server.gateway.authority import Role, Subject
from edge_server.gateway.broker_files import BrokerPlaces, broker_conf
from edge_server.gateway.certificate_files import (
    are_revocation_lists,
    authority_id,
    chain_of,
    find_leaf,
    roots_of,
    signers_chain,
    split_certificates,
)
from edge_server.gateway.enrolment.accounts import as_accounts
from edge_server.gateway.state import (
    SiteState,
    denied_accounts,
    read_state,
    revoked_serials,
    with_account,
    with_signed,
    write_state,
)
from shared.errors import ConfigError
from shared.protocol.packages import SIGNER_NAME
from shared.protocol.topics import PEER
from shared.runtime.durable import replace_file

USUAL = Path("/etc/fieldfleet/site")
BROKER_USER, SERVER_USER = "mosquitto", "fieldfleet-server"
PUBLIC, PRIVATE, FOLDER = 0o644, 0o600, 0o755
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names by which the server, on the same machine, reaches the broker."""

PAIRS: Mapping[str, tuple[str, Role]] = {
    "server": ("gateway", "gateway"),
    "enrolment": ("gateway", "gateway"),
    "edge-server": ("edge-server", "server"),
    "probe": ("probe", "probe"),
    "revoked": ("probe", "probe"),
    "packages": (SIGNER_NAME, "packages"),
}
"""Pairs in `gateway/`: common name and role. All are valid as long as their CA, whose key lies on the same machine."""

OWN_PAIRS: Mapping[str, tuple[str, Role]] = {"own-server": ("edge-server", "server"), "own-probe": ("probe", "probe")}
"""Pairs in `gateway/` that sign themselves, for the broker's listener on loopback; no rotation concerns them."""
OWN = "own.pem"


replace = msgspec.structs.replace


@dataclass(frozen=True)
class SiteFolder:
    """Paths of a site, and as whom they are written.

    Attributes:
        broker_user: Who the broker runs as.
        server_user: Who the server and the enrolment service run as.
    """

    path: Path
    broker_user: str = ""
    server_user: str = ""
    changed: list[str] = field(default_factory=list, compare=False)

    def ca(self, name: str) -> Path:
        """Return a file of the authorities."""
        return self.path / "ca" / name

    def gateway(self, name: str) -> Path:
        """Return a file of the gateway's own."""
        return self.path / "gateway" / name

    def broker_places(self) -> BrokerPlaces:
        """Return the files that the broker reads."""
        here = self.path.resolve()
        return BrokerPlaces(
            trusted=here / "ca" / "chain.pem",
            own=here / "gateway" / OWN,
            certificate=here / "gateway" / "server.crt",
            key=here / "gateway" / "server.key",
            revoked=here / "crl.pem",
            access=here / "acl",
            user=self.broker_user,
        )

    def put(self, path: Path, data: bytes, *, private_to: str | None = None) -> None:
        """Write a file if it does not hold this already, and note that.

        Args:
            private_to: Who alone may read it; everybody if None.
        """
        if path.is_file() and path.read_bytes() == data:
            return
        mode = PUBLIC if private_to is None else PRIVATE
        replace_file(path, data, mode=mode, owner=owner_ids(private_to or self.server_user))
        self.changed.append(str(path.relative_to(self.path)))


def open_folder(path: Path, broker_user: str | None = None) -> SiteFolder:
    """Return a site's folder; root writes for the users of the services where they exist, others for themselves.

    Args:
        broker_user: Who the broker runs as; None for whom the site knows, or the usual one.

    Raises:
        ConfigError: There is no such user.
    """
    if os.geteuid() != 0:
        return SiteFolder(path)
    if broker_user is None:
        known = ""
        with suppress(ConfigError):  # of a state that is missing or damaged, which whoever needs it says
            known = read_state(path).broker_user
        broker_user = known or (BROKER_USER if _is_user(BROKER_USER) else "root")
    if not _is_user(broker_user):
        raise ConfigError(f"user {broker_user!r}: there is none on this machine; make one, or name another")
    return SiteFolder(path, broker_user, SERVER_USER if _is_user(SERVER_USER) else "root")


def _is_user(name: str) -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


def owner_ids(user: str) -> tuple[int, int] | None:
    """Return user and group to whom a file is given; None where it stays with who writes it."""
    if not user or os.geteuid() != 0:
        return None
    found = pwd.getpwnam(user)
    return found.pw_uid, found.pw_gid


def make_folders(site: SiteFolder) -> None:
    """Make the folders of a site where they are not there."""
    for folder in (site.path, site.path / "ca", site.path / "gateway"):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(FOLDER)
            if owner := owner_ids(site.server_user):
                os.chown(folder, *owner)


def make_authorities(site: SiteFolder, name: str, now: datetime, *, years: tuple[float, float]) -> None:
    """Make root and site CA where they are not there.

    Args:
        now: UTC.
        years: How long root and site CA are valid.

    Raises:
        ConfigError: A part of them is gone, or the clock is outside of the root's time.
    """
    root_key, root_crt, site_key, site_crt = (site.ca(one) for one in ("root.key", "root.crt", "site.key", "site.crt"))
    if not root_crt.is_file():
        if site_crt.is_file():
            raise ConfigError(f"{root_crt} is gone: bring it back from a copy, for every board compares with it")
        key, cert = authority.make_root(name, now, years[0])
        site.put(root_key, key, private_to="root")
        site.put(root_crt, cert)
    if not site_crt.is_file():
        if not root_key.is_file():
            raise ConfigError(f"{root_key} is not here: bring it back while the site CA is made")
        key, cert = authority.make_site(root_key.read_bytes(), root_crt.read_bytes(), name, now, years[1])
        site.put(site_key, key, private_to=site.server_user)
        site.put(site_crt, cert)
    make_chains(site)


def make_chains(site: SiteFolder) -> None:
    """Write what is made of the authorities' certificates for those who are to trust them."""
    site.put(site.ca("root.crt"), roots_of(site.ca("")))
    site.put(site.ca("chain.pem"), chain_of(site.ca("")))


def pair_chain(site: SiteFolder, name: str) -> bytes:
    """Return what follows the certificate of one of `PAIRS` in its file, PEM."""
    return signers_chain(site.ca("")) if name == "packages" else site.ca("site.crt").read_bytes()


def sign(site: SiteFolder, state: SiteState, subject: Subject, spki: bytes, now: datetime) -> tuple[SiteState, bytes]:
    """Sign a certificate by the site CA that lies in the folder, as long as that is valid; note it in the state.

    Args:
        subject: Whom it is for.
        now: UTC.
    """
    ca = site.ca("site.crt").read_bytes()
    issued = authority.issue(site.ca("site.key").read_bytes(), ca, spki, subject, inf, now)
    key = hashlib.sha256(spki).hexdigest()
    signed_by = authority_id(ca)
    noted = with_signed(state, subject.name, issued, authority=signed_by, key=key, role=subject.role)
    return noted, issued.certificate + ca


def gateway_addresses(state: SiteState) -> tuple[str, ...]:
    """Return all that a gateway's certificate is for."""
    return tuple(dict.fromkeys((*state.addresses, *LOCAL, *((state.bind,) if state.bind else ()))))


def make_pair(site: SiteFolder, state: SiteState, name: str, now: datetime, *, new_key: bool = False) -> SiteState:
    """Make one of the gateway's own pairs where it is not there, or not what it should be.

    Args:
        state: Of the site; its addresses are those of the certificate.
        name: One of `PAIRS`.
        now: UTC.
        new_key: Whether to make another one in any case.
    """
    return make_pairs(site, state, (name,), now, new_key=new_key)


def make_pairs(
    site: SiteFolder, state: SiteState, names: Iterable[str], now: datetime, *, new_key: bool = False
) -> SiteState:
    """Make those of the gateway's own pairs that are not there, or not what they should be; all are noted at once.

    Args:
        state: Of the site; its addresses are those of the certificates.
        names: Of `PAIRS`.
        now: UTC.
        new_key: Whether to make others in any case.
    """
    made = list[tuple[Path, bytes, str | None]]()
    for name in names:
        state, files = _signed_pair(site, state, name, now, new_key=new_key)
        made += files
    if made:
        write_state(site.path, state)  # before anybody has one: what is not noted cannot be revoked
    for path, data, user in made:
        site.put(path, data, private_to=user)
    return state


def _signed_pair(
    site: SiteFolder, state: SiteState, name: str, now: datetime, *, new_key: bool
) -> tuple[SiteState, list[tuple[Path, bytes, str | None]]]:
    """Return the state with a pair in it, and its files: path, content and whose alone it is; none if it is right."""
    key_file, file = site.gateway(f"{name}.key"), site.gateway(f"{name}.crt")
    common, role = PAIRS[name]
    addresses = gateway_addresses(state) if role == "gateway" else ()
    chain = pair_chain(site, name)
    if leaf := b"" if new_key else find_leaf(key_file, file, chain, addresses):
        return state, [] if file.read_bytes() == leaf + chain else [(file, leaf + chain, None)]
    user = site.broker_user if name == "server" else site.server_user
    key = key_file.read_bytes() if key_file.is_file() and not new_key else authority.make_key()
    subject = Subject(common, role, state.site, addresses)
    state, leaf = sign(site, state, subject, authority.public_key_of(key), now)
    if name == "revoked":
        account = state.accounts[common]
        *others, last = account.certificates
        state = with_account(state, common, replace(account, certificates=(*others, replace(last, revoked=True))))
    return state, [(key_file, key, user), (file, split_certificates(leaf)[0] + chain, None)]


def make_own_pairs(site: SiteFolder, name: str) -> None:
    """Make the pairs that sign themselves where they are not there or not right, and the file that trusts them.

    Args:
        site: Folder in which the pairs are made.
        name: Name of the site in the certificates.
    """
    for pair, (common, role) in OWN_PAIRS.items():
        key_file, file = site.gateway(f"{pair}.key"), site.gateway(f"{pair}.crt")
        if not is_own_pair(site, pair):
            key = authority.make_key()
            site.put(key_file, key, private_to=site.server_user)
            site.put(file, authority.sign_self(key, Subject(common, role, name), site.ca("site.crt").read_bytes()))
    site.put(site.gateway(OWN), own_trust(site))


def is_own_pair(site: SiteFolder, pair: str) -> bool:
    """Check that the key and the certificate of one of `OWN_PAIRS` exist and belong together."""
    key, file = site.gateway(f"{pair}.key"), site.gateway(f"{pair}.crt")
    data = file.read_bytes() if file.is_file() else b""
    return bool(data) and find_leaf(key, file, data, ()) == data


def own_trust(site: SiteFolder) -> bytes:
    """Return the certificates that the broker's listener on loopback lets in, PEM."""
    return b"".join(site.gateway(f"{pair}.crt").read_bytes() for pair in OWN_PAIRS)


def authorities(site: SiteFolder) -> list[tuple[bytes, bytes]]:
    """Return key and certificate of every CA whose certificates are good: the site's, and the one before in its time.

    Raises:
        ConfigError: They cannot be read.
    """
    found = []
    for name in ("site", "site-before"):
        key, cert = site.ca(f"{name}.key"), site.ca(f"{name}.crt")
        if name == "site" or cert.is_file():
            try:
                found.append((key.read_bytes(), cert.read_bytes()))
            except OSError as error:
                raise ConfigError(f"{error.filename}: {error.strerror}; run this as root or the site's user") from error
    return found


def access_of(state: SiteState) -> str:
    """Return the access list that a site's broker must have."""
    peers = (name.removeprefix(PEER) for name in as_accounts(state.accounts).beginning(PEER))
    return acl(state.site, peers, denied_accounts(state), state.generation)


def make_broker_files(site: SiteFolder, state: SiteState) -> None:
    """Write what the broker reads as the state wants it: first who is denied, then what is revoked.

    Raises:
        ConfigError: The CA's files cannot be read, or do not belong together.
        Unwritable: The disk takes nothing more.
    """
    make_own_pairs(site, state.site)
    site.put(site.path / "acl", access_of(state).encode())
    lists = [(key, cert, revoked_serials(state, authority_id(cert))) for key, cert in authorities(site)]
    path = site.path / "crl.pem"
    if not are_revocation_lists(path, [(cert, serials) for _, cert, serials in lists]):
        site.put(path, b"".join(authority.revocations(*one) for one in lists))
    conf = broker_conf(site.broker_places(), port=state.port, own_port=state.servers_port, bind=state.bind)
    site.put(site.path / "mosquitto.conf", conf.encode())
