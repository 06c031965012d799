"""A hundred boards renew at one gateway at once, over real TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from cryptography import x509

from device_agent.identity import certificates, credentials
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CA, CERTIFICATE, CURRENT, KEY, MEMBERSHIP, Membership, read_membership
from device_agent.identity.https import UNAVAILABLE
from device_agent.identity.renewal import Renewal
from edge_server.gateway.authority import fingerprint, public_key_of
from edge_server.gateway.enrolment import service as service_module
from edge_server.gateway.enrolment.service import EnrolmentService, service_context
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.site_folder import SiteFolder
from edge_server.gateway.state import read_state
from shared.errors import EnrolmentFailed
from tests.edge_server.gateway.enrolments import DAY_S, NOW

BOARDS, YEAR_S, DUE_S = 100, 365 * DAY_S, 270 * DAY_S
MOST_TURNS = 100
EACH = 64
"""Connections of one address, which boards in the field have each for themselves; not all at once even so."""


def enrolled(site: EnrolmentSite, folder: Path, name: str, port: int) -> Path:
    """Return the folder of a board that has joined."""
    folder.mkdir()
    identity, key = credentials.open_identity(folder), certificates.make_key()
    used = credentials.open_set(identity, "joined")
    issued = site.issue(public_key_of(key), name)
    root = (site.folder / "ca/root.crt").read_bytes()
    about = Membership(
        device=name, site="roof", token="", host="127.0.0.1", port=port, root=fingerprint(root).hex(),
        broker_host="127.0.0.1", broker_port=1, not_before_utc_s=NOW, not_after_utc_s=NOW + YEAR_S,
    )  # fmt: skip
    files = {KEY: key, CA: (site.folder / "ca/chain.pem").read_bytes(), CERTIFICATE: issued.certificate}
    for file, content in (files | {MEMBERSHIP: msgspec.json.encode(about)}).items():
        credentials.write_file(used, file, content)
    credentials.activate(identity, used)
    return folder


async def taken(broker) -> str:
    """Be a broker that takes a pair that belongs together."""
    ssl.create_default_context(cafile=broker.tls.ca).load_cert_chain(broker.tls.cert, broker.tls.key)
    return ""


async def all_renewed(renewals: list[Renewal]) -> int:
    """Have all look at once, and who was refused again, as agents do minutes later; return how often that took."""
    for turn in range(MOST_TURNS):
        found = await asyncio.gather(*(one.look() for one in renewals), return_exceptions=True)
        refused = [one for one in found if isinstance(one, BaseException)]
        assert all(isinstance(one, EnrolmentFailed) and one.code == UNAVAILABLE for one in refused), refused
        renewals = [one for one, came in zip(renewals, found, strict=True) if came is not True]
        if not renewals:
            return turn
    raise AssertionError(f"{len(renewals)} boards never renewed")


async def test_a_hundred_boards_renew_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "MOST_OPEN_EACH", EACH)
    monkeypatch.setattr(os, "fsync", lambda _file: None)  # a hundred boards have a hundred disks
    ahead = [0.0]
    initialise(SiteFolder(tmp_path / "site"), SiteSettings("roof", ("127.0.0.1",)), datetime.fromtimestamp(NOW, UTC))
    site = EnrolmentSite(tmp_path / "site", utc_s=lambda: NOW + ahead[0])
    service = EnrolmentService(site.registrar(), partial(service_context, *site.pair()))
    async with service.running("127.0.0.1", 0) as port:
        boards = [enrolled(site, tmp_path / f"pi-{one}", f"pi-{one}", port) for one in range(BOARDS)]
        clocks = [BoardClock(utc_s=lambda: 0.0, synchronised=lambda: False) for _ in boards]
        renewals = [Renewal(board, clock, taken) for board, clock in zip(boards, clocks, strict=True)]
        due = {one.due_utc_s(read_membership(one.identity / CURRENT)) for one in renewals}
        assert len(due) == BOARDS  # by themselves they come one after the other, over weeks
        assert max(due) - min(due) > 10 * DAY_S
        ahead[0] = DUE_S
        await all_renewed(renewals)
    accounts = read_state(site.folder).accounts
    for board in boards:
        used = board / credentials.FOLDER / CURRENT
        pair = credentials.make_tls(used)
        ssl.create_default_context(cafile=pair.ca).load_cert_chain(pair.cert, pair.key)
        found = x509.load_pem_x509_certificate((used / CERTIFICATE).read_bytes())
        signed = accounts[board.name].certificates
        assert [f"{found.serial_number:x}"] == [one.serial for one in signed[1:]]
        assert found.not_valid_after_utc.timestamp() > NOW + YEAR_S
