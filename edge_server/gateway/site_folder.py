"""Site folder: its files, their owners and permissions.

    ca/root.key root.crt      signs site CAs; the key belongs elsewhere, off the gateway
    ca/site.key site.crt      signs everything else; chain.pem has both certificates, for boards and the broker
    ca/root-next.* site-next.crt cross.crt   while the root is replaced, see `rotation.root`; root.crt has both then
    gateway/                  keys and certificates: broker (server), enrolment service (enrolment), a server on another
                              machine (edge-server), probe (probe), a revoked one (revoked), package signer (packages);
                              own.pem has the certificates of the server and the probe (own-server, own-probe) for the
                              broker's loopback listener
    state.json                settings; accounts.sqlite has the issued certificates by account
    mosquitto.conf acl crl.pem   made from the state
    server.toml               the server's file, which people edit; rewritten until they do

Every file is replaced atomically. A key is readable by its owner only: the broker cannot read what signs, and cannot
write what it reads.
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
from typing import NamedTuple

import msgspec

from edge_server.gateway import authority
from edge_server.gateway.access import acl
from edge_server.gateway.authority import Role, Subject
from edge_server.gateway.broker_files import BrokerPaths, broker_conf
from edge_server.gateway.certificate_files import (
    are_revocation_lists,
    authority_id,
    find_leaf,
    read_chain,
    read_roots,
    signer_chain,
    split_certificates,
)
from edge_server.gateway.enrolment.accounts import as_accounts
from edge_server.gateway.state import (
    SiteState,
    denied_accounts,
    read_state,
    revoked_serials,
    with_account,
    with_certificate,
    write_state,
)
from shared.errors import ConfigError
from shared.protocol.packages import SIGNER_NAME
from shared.protocol.topics import PEER
from shared.runtime.durable import replace_file

DEFAULT_FOLDER = Path("/etc/fieldfleet/site")
BROKER_USER, SERVER_USER = "mosquitto", "fieldfleet-server"
PUBLIC, PRIVATE, FOLDER = 0o644, 0o600, 0o755
LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")
"""Names by which the server, on the same machine, reaches the broker."""

PAIRS: Mapping[str, tuple[str, Role]] = {
    "server": ("gateway", "gateway"),
    "enrolment": ("gateway", "gateway"),
    "edge-server": ("edge-server", "server"),
    "probe": ("probe", "probe"),
    "revoked": ("probe", "probe"),
    "packages": (SIGNER_NAME, "packages"),
}
"""Common name and role of the pairs in `gateway/`, valid as long as their CA, whose key is on the same machine."""

LOCAL_PAIRS: Mapping[str, tuple[str, Role]] = {"own-server": ("edge-server", "server"), "own-probe": ("probe", "probe")}
"""Self-signed pairs in `gateway/`, for the broker's loopback listener; rotations do not affect them."""
LOCAL_CERTIFICATES = "own.pem"


replace = msgspec.structs.replace


@dataclass(frozen=True)
class SiteFolder:
    """Paths of a site, and the users that own its files.

    Attributes:
        broker_user: User of the broker.
        server_user: User of the server and the enrolment service.
        changed: Files written so far, relative to `path`.
    """

    path: Path
    broker_user: str = ""
    server_user: str = ""
    changed: list[str] = field(default_factory=list, compare=False)

    def ca(self, name: str) -> Path:
        """Return the path of a file of the authorities."""
        return self.path / "ca" / name

    def gateway(self, name: str) -> Path:
        """Return the path of a file of the gateway."""
        return self.path / "gateway" / name

    def broker_paths(self) -> BrokerPaths:
        """Return the files that the broker reads."""
        base = self.path.resolve()
        return BrokerPaths(
            trusted=base / "ca" / "chain.pem",
            local=base / "gateway" / LOCAL_CERTIFICATES,
            certificate=base / "gateway" / "server.crt",
            key=base / "gateway" / "server.key",
            revoked=base / "crl.pem",
            access=base / "acl",
            user=self.broker_user,
        )

    def put(self, path: Path, data: bytes, *, private_to: str | None = None) -> None:
        """Write a file unless it has this content already, and add it to `changed`.

        Args:
            private_to: Only user who may read it; None for everybody.
        """
        if path.is_file() and path.read_bytes() == data:
            return
        mode = PUBLIC if private_to is None else PRIVATE
        replace_file(path, data, mode=mode, owner=owner_ids(private_to or self.server_user))
        self.changed.append(str(path.relative_to(self.path)))


def open_folder(path: Path, broker_user: str | None = None) -> SiteFolder:
    """Return a site's folder, with the services' users as owners where root runs this and they exist.

    Args:
        broker_user: User of the broker; None for the site's present one, or the default.

    Raises:
        ConfigError: There is no such user.
    """
    if os.geteuid() != 0:
        return SiteFolder(path)
    if broker_user is None:
        stored_user = ""
        with suppress(ConfigError):  # a missing or damaged state is reported by callers that need it
            stored_user = read_state(path).broker_user
        broker_user = stored_user or (BROKER_USER if _is_user(BROKER_USER) else "root")
    if not _is_user(broker_user):
        raise ConfigError(f"user {broker_user!r}: does not exist on this machine; create it, or name another")
    return SiteFolder(path, broker_user, SERVER_USER if _is_user(SERVER_USER) else "root")


def _is_user(name: str) -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwnam(name))
    return False


class Owner(NamedTuple):
    """User and group id of a file."""

    uid: int
    gid: int


def owner_ids(user: str) -> Owner | None:
    """Return user and group id for a file; None to leave its owner unchanged."""
    if not user or os.geteuid() != 0:
        return None
    user_entry = pwd.getpwnam(user)
    return Owner(user_entry.pw_uid, user_entry.pw_gid)


def make_folders(site: SiteFolder) -> None:
    """Create the missing folders of a site."""
    for folder in (site.path, site.path / "ca", site.path / "gateway"):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            folder.chmod(FOLDER)
            if owner := owner_ids(site.server_user):
                os.chown(folder, owner.uid, owner.gid)


def make_authorities(site: SiteFolder, name: str, now: datetime, *, years: tuple[float, float]) -> None:
    """Create the root and the site CA if they are missing.

    Args:
        now: Current time in UTC.
        years: Validity of root and site CA, in this order.

    Raises:
        ConfigError: Some of their files are missing, or the clock is outside of the root's validity.
    """
    root_key, root_crt, site_key, site_crt = (
        site.ca(file) for file in ("root.key", "root.crt", "site.key", "site.crt")
    )
    if not root_crt.is_file():
        if site_crt.is_file():
            raise ConfigError(f"{root_crt} is missing: restore it from a backup, every board verifies against it")
        key, cert = authority.make_root(name, now, years[0])
        site.put(root_key, key, private_to="root")
        site.put(root_crt, cert)
    if not site_crt.is_file():
        if not root_key.is_file():
            raise ConfigError(f"{root_key} is missing: put it back until the site CA is made")
        key, cert = authority.make_site(root_key.read_bytes(), root_crt.read_bytes(), name, now, years[1])
        site.put(site_key, key, private_to=site.server_user)
        site.put(site_crt, cert)
    make_chains(site)


def make_chains(site: SiteFolder) -> None:
    """Write the chains of the authorities' certificates."""
    site.put(site.ca("root.crt"), read_roots(site.ca("")))
    site.put(site.ca("chain.pem"), read_chain(site.ca("")))


def pair_chain(site: SiteFolder, name: str) -> bytes:
    """Return the CA chain that follows the certificate of one of `PAIRS` in its file, PEM."""
    return signer_chain(site.ca("")) if name == "packages" else site.ca("site.crt").read_bytes()


def sign(site: SiteFolder, state: SiteState, subject: Subject, spki: bytes, now: datetime) -> tuple[SiteState, bytes]:
    """Sign a certificate by the present site CA and add it to the state; it is valid as long as the CA.

    Args:
        spki: Public key, SubjectPublicKeyInfo in DER.
        now: Current time in UTC.
    """
    ca = site.ca("site.crt").read_bytes()
    issued = authority.issue(site.ca("site.key").read_bytes(), ca, spki, subject, inf, now)
    key = hashlib.sha256(spki).hexdigest()
    signed_by = authority_id(ca)
    noted = with_certificate(state, subject.name, issued, authority=signed_by, key=key, role=subject.role)
    return noted, issued.certificate + ca


def gateway_addresses(state: SiteState) -> tuple[str, ...]:
    """Return all addresses of a gateway's certificate."""
    return tuple(dict.fromkeys((*state.addresses, *LOCAL_ADDRESSES, *((state.bind,) if state.bind else ()))))


def make_pair(site: SiteFolder, state: SiteState, name: str, now: datetime, *, new_key: bool = False) -> SiteState:
    """Create one of the gateway's pairs if it is missing or wrong.

    Args:
        name: Key of `PAIRS`, the file name without suffix.
        now: Current time in UTC.
        new_key: Replace the pair in any case.
    """
    return make_pairs(site, state, (name,), now, new_key=new_key)


def make_pairs(
    site: SiteFolder, state: SiteState, names: Iterable[str], now: datetime, *, new_key: bool = False
) -> SiteState:
    """Create the gateway's pairs that are missing or wrong, and record them in the state at once.

    Args:
        names: Keys of `PAIRS`, the file names without suffix.
        now: Current time in UTC.
        new_key: Replace the pairs in any case.
    """
    pending = list[tuple[Path, bytes, str | None]]()
    for name in names:
        state, files = _prepare_pair(site, state, name, now, new_key=new_key)
        pending += files
    if pending:
        write_state(site.path, state)  # before the files: a certificate that is not recorded cannot be revoked
    for path, data, user in pending:
        site.put(path, data, private_to=user)
    return state


def _prepare_pair(
    site: SiteFolder, state: SiteState, name: str, now: datetime, *, new_key: bool
) -> tuple[SiteState, list[tuple[Path, bytes, str | None]]]:
    """Return the state with a pair in it, and the files to write: path, content, only reader."""
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


def make_local_pairs(site: SiteFolder, name: str) -> None:
    """Create the self-signed pairs that are missing or wrong, and the file of their certificates."""
    for pair, (common, role) in LOCAL_PAIRS.items():
        key_file, file = site.gateway(f"{pair}.key"), site.gateway(f"{pair}.crt")
        if not is_local_pair(site, pair):
            key = authority.make_key()
            site.put(key_file, key, private_to=site.server_user)
            site.put(file, authority.sign_self(key, Subject(common, role, name), site.ca("site.crt").read_bytes()))
    site.put(site.gateway(LOCAL_CERTIFICATES), local_certificates(site))


def is_local_pair(site: SiteFolder, pair: str) -> bool:
    """Check whether the key and the certificate of one of `LOCAL_PAIRS` exist and match."""
    key, file = site.gateway(f"{pair}.key"), site.gateway(f"{pair}.crt")
    data = file.read_bytes() if file.is_file() else b""
    return bool(data) and find_leaf(key, file, data, ()) == data


def local_certificates(site: SiteFolder) -> bytes:
    """Return the certificates that the broker's loopback listener accepts, PEM."""
    return b"".join(site.gateway(f"{pair}.crt").read_bytes() for pair in LOCAL_PAIRS)


def valid_authorities(site: SiteFolder) -> list[tuple[bytes, bytes]]:
    """Return key and certificate of every valid CA: the site's, and the previous one during a rotation.

    Raises:
        ConfigError: They cannot be read.
    """
    pairs = []
    for name in ("site", "site-before"):
        key, cert = site.ca(f"{name}.key"), site.ca(f"{name}.crt")
        if name == "site" or cert.is_file():
            try:
                pairs.append((key.read_bytes(), cert.read_bytes()))
            except OSError as error:
                raise ConfigError(f"{error.filename}: {error.strerror}; run this as root or the site's user") from error
    return pairs


def site_acl(state: SiteState) -> str:
    """Return the access list of a site's broker."""
    peers = (name.removeprefix(PEER) for name in as_accounts(state.accounts).find_by_prefix(PEER))
    return acl(state.site, peers, denied_accounts(state), state.generation)


def make_broker_files(site: SiteFolder, state: SiteState) -> None:
    """Write the broker's files from the state: the access list first, then the revocation list.

    Raises:
        ConfigError: The CA's files cannot be read, or do not match.
        Unwritable: The disk is full or read-only.
    """
    make_local_pairs(site, state.site)
    site.put(site.path / "acl", site_acl(state).encode())
    lists = [(key, cert, revoked_serials(state, authority_id(cert))) for key, cert in valid_authorities(site)]
    path = site.path / "crl.pem"
    if not are_revocation_lists(path, [(cert, serials) for _, cert, serials in lists]):
        site.put(path, b"".join(authority.revocations(key, cert, serials) for key, cert, serials in lists))
    conf = broker_conf(site.broker_paths(), port=state.port, own_port=state.servers_port, bind=state.bind)
    site.put(site.path / "mosquitto.conf", conf.encode())
