"""Tokens and certificates of a real site's folder: what is written where, for whom, and what the command prints."""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import segno
from cryptography import x509

from edge_server import __main__ as command_line
from edge_server.cli.gateway import enrol as enrol_command
from edge_server.cli.gateway.services import examine_services
from edge_server.gateway import authority
from edge_server.gateway.enrolment import ledger as ledgers
from edge_server.gateway.enrolment.address import FILE, read_address
from edge_server.gateway.enrolment.ledger import read_ledger
from edge_server.gateway.enrolment.registrar import Request
from edge_server.gateway.enrolment.site import EnrolmentSite
from edge_server.gateway.enrolment.tokens import EnrolmentEndpoint, make_token
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.revocation.revoke import readmit, revoke
from edge_server.gateway.site_folder import SiteFolder, open_folder
from edge_server.gateway.state import read_state, with_account, write_state
from shared.errors import ConfigError
from shared.protocol.enrolment import USUAL_PORT, JoinAnswer, parse_token
from tests.edge_server.gateway.enrolments import NOW, new_key, public_of, request_of
from tests.edge_server.processes import captured
from tests.machine import free_port
from tests.naming import names_all, naming

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    addresses = ("gateway.local", "192.0.2.7")
    initialise(SiteFolder(folder), SiteSettings("roof", addresses, free_port()), datetime.fromtimestamp(NOW, UTC))
    return folder


@pytest.fixture
def site(made):
    for path in made.glob("*enrolment.*"):
        path.unlink()
    before = {path: path.read_bytes() for path in (made / "state.json", made / "accounts.sqlite")}
    yield EnrolmentSite(made, utc_s=lambda: NOW)
    (made / FILE).unlink(missing_ok=True)
    for path, data in before.items():
        path.write_bytes(data)


def enrol(site, *words, code=0, told=False) -> str:
    """Return what the command printed; where it fails, or is asked, what it said beside."""
    found = captured("enrol", "--folder", site.folder, *words)
    assert found.code == code, found.err
    return found.err if code or told else found.out


def join(site, token, key):
    body = msgspec.json.encode({"token": token.id, "secret": token.secret, "request": request_of(key).decode()})
    return site.registrar().answer(Request("POST", "/join", body, "192.0.2.9"))


def test_a_token_of_the_command_line_is_good_for_one_certificate(site):
    token = parse_token(enrol(site, "pi-03"))
    assert (token.host, token.port) == ("gateway.local", 8443)
    root = (site.folder / "ca" / "root.crt").read_bytes()
    assert token.root == authority.fingerprint(root)
    key = new_key()
    told = msgspec.json.decode(join(site, token, key).body, type=JoinAnswer)
    assert (told.device, told.site, told.broker_host) == ("pi-03", "roof", "gateway.local")
    assert told.broker_port == read_state(site.folder).port
    [certificate, ca] = x509.load_pem_x509_certificates(told.certificate.encode())
    certificate.verify_directly_issued_by(ca)  # the broker trusts the root alone, so the board brings what is between
    [signed] = read_state(site.folder).accounts["pi-03"].certificates
    assert signed.serial == f"{certificate.serial_number:x}"
    assert join(site, token, new_key()).status == 403
    shown = enrol(site, "--list")
    assert "bound" in shown
    assert "ALARM" in shown
    assert "192.0.2.9" in shown
    assert token.secret not in shown + (site.folder / ledgers.FILE).read_text()


def test_ten_boards_at_once(site):
    rows = list(csv.DictReader(io.StringIO(enrol(site, "--count", "10", "--csv"))))
    assert [row["device"] for row in rows] == [f"pi-{number:02}" for number in range(1, 11)]
    assert len({parse_token(row["token"]).secret for row in rows}) == 10
    more = list(csv.DictReader(io.StringIO(enrol(site, "--count", "2", "--csv", "--pattern", "pi-{:02}"))))
    assert [row["device"] for row in more] == ["pi-11", "pi-12"]  # those before may have joined by now
    assert {one.state(NOW) for one in read_ledger(site.folder).tokens.values()} == {"open"}


def test_a_withdrawn_token_is_none(site):
    token = parse_token(enrol(site, "pi-04", "--ttl", "2h"))
    enrol(site, "--revoke", token.id)
    assert join(site, token, new_key()).status == 403
    assert "revoked" in enrol(site, "--list")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--count", "2", "--readmit"],
        ["PI 3"],
        ["edge-server"],
        ["pi-03", "--count", "2"],
        ["--count", "2", "--pattern", "pi"],
        ["--count", "2", "--pattern", "{x}"],
        ["pi-03", "--ttl", "0s"],
        ["pi-03", "--ttl", "forever"],
        ["pi-03", "--address", "elsewhere.example"],
        ["--revoke", "aaaaaa"],
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(site, words):
    enrol(site, *words, code=2)
    assert not read_ledger(site.folder).tokens


def test_the_ledger_is_its_owners_alone_and_no_writer_loses_anothers(site):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _add(site, f"pi-{number}"), range(40)))
    assert len(read_ledger(site.folder).tokens) == 40
    assert stat.S_IMODE((site.folder / ledgers.FILE).stat().st_mode) == 0o600


def _add(site, name):
    token, kept = make_token(name, EnrolmentEndpoint("gateway.local", 8443, bytes(32)), 60, NOW)
    with site.edit() as ledger:
        ledger.tokens[f"{token.id}-{name}"] = kept


@pytest.mark.parametrize("data", [b"{", b"{}x", b'{"version": 2}', b'{"tokens": 3}', b"\x00" * 9])
def test_a_damaged_ledger_is_never_written_over(site, data):
    path = site.folder / ledgers.FILE
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=naming(path)), site.edit():
        pass
    assert path.read_bytes() == data


def test_a_revoked_device_is_let_in_again_by_a_new_token_alone_where_the_operator_says_so(site):
    old, new = new_key(), new_key()
    join(site, parse_token(enrol(site, "pi-03")), old)
    earlier = parse_token(enrol(site, "pi-03"))
    asyncio.run(revoke(open_folder(site.folder), "pi-03", datetime.fromtimestamp(NOW, UTC)))
    assert b'"revoked"' in join(site, earlier, new).body
    renewal = Request("POST", "/renew-expired", msgspec.json.encode({"request": request_of(old).decode()}))
    assert b'"revoked"' in site.registrar().answer(renewal).body
    kept = read_ledger(site.folder)
    told = enrol(site, "pi-03", code=2)
    assert names_all(told, "pi-03", "edge-server enrol pi-03 --readmit")
    assert (read_ledger(site.folder), site.is_denied("pi-03")) == (kept, True)
    assert names_all(enrol(site, "pi-03", "--readmit", told=True), "pi-03")
    assert b'"revoked"' in join(site, earlier, new).body
    assert enrol(site, "pi-03", "--readmit", told=True) == "", "it is in by now"
    token = parse_token(enrol(site, "pi-03"))
    assert join(site, token, new).status == 200
    assert not read_state(site.folder).accounts["pi-03"].denied
    assert b'"revoked"' in site.registrar().answer(renewal).body  # the stolen board's key stays out


def test_tokens_of_before_are_void_when_a_revoked_device_is_let_in_again(site, monkeypatch):
    """Whoever took such a token with the board must not be quicker than its owner."""
    join(site, parse_token(enrol(site, "pi-03")), new_key())
    earlier, answers = parse_token(enrol(site, "pi-03")), []
    asyncio.run(revoke(open_folder(site.folder), "pi-03", datetime.fromtimestamp(NOW, UTC)))

    async def watched(folder, name):
        done = await readmit(folder, name)
        answers.append(join(site, earlier, new_key()).body)
        return done

    monkeypatch.setattr(enrol_command, "readmit", watched)
    enrol(site, "pi-03", "--readmit")
    assert [b'"revoked"' in one for one in answers] == [True]


def test_a_board_that_was_away_for_too_long_renews_when_the_operator_says_so(site):
    key = new_key()
    renewal = Request("POST", "/renew-expired", msgspec.json.encode({"request": request_of(key).decode()}))
    site.issue(public_of(key), "pi-03")
    late = EnrolmentSite(site.folder, utc_s=lambda: NOW + 600 * DAY_S)
    assert b'"approval"' in late.registrar().answer(renewal).body
    assert "devices approve pi-03" in enrol(site, "--list")
    for words, code in (
        (["approve"], 2),
        (["approve", "pi-04"], 2),
        (["pi-03", "pi-04"], 2),
        (["approve", "pi-03"], 0),
    ):
        assert captured("devices", *words, "--folder", site.folder).code == code
    assert late.registrar().answer(renewal).status == 200
    assert (
        b'"approval"' in EnrolmentSite(site.folder, utc_s=lambda: NOW + 2000 * DAY_S).registrar().answer(renewal).body
    )


def test_a_holder_is_a_device_alone(site):
    """The gateway's own certificates are not renewed over the network."""
    assert site.find_holder("0" * 64) is None
    for account in read_state(site.folder).accounts.values():
        for one in account.certificates:
            assert site.find_holder(one.key) is None
    key = new_key()
    site.issue(public_of(key), "pi-05")
    assert site.find_holder(read_state(site.folder).accounts["pi-05"].certificates[0].key).device == "pi-05"


def test_a_terminal_shows_a_code_that_says_the_token(site, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with pytest.MonkeyPatch.context() as patch:
        screen = Terminal()
        patch.setattr(sys, "stdout", screen)
        patch.setattr(
            sys,
            "argv",
            ["edge-server", "enrol", "--folder", str(site.folder), "pi-03", "--svg", str(tmp_path / "a.svg")],
        )
        with pytest.raises(SystemExit):
            command_line.main()
    shown = screen.getvalue()
    line = next(one for one in shown.splitlines() if one.startswith("ff1,"))
    parse_token(line)
    drawn = io.StringIO()
    segno.make_qr(line, error="m").terminal(drawn, compact=True)
    assert drawn.getvalue() in shown
    assert stat.S_IMODE((tmp_path / "a.svg").stat().st_mode) == 0o600
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def test_without_a_site_it_is_said_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=naming(tmp_path, "edge-server site init")):
        EnrolmentSite(tmp_path).registrar()


@pytest.mark.parametrize("name", ["ca/site.key", "gateway/enrolment.key", "state.json", "accounts.sqlite"])
def test_the_service_does_not_begin_with_secrets_that_others_can_read(site, name):
    path = site.folder / name
    path.chmod(0o644)
    try:
        ended = captured("enrolment-service", "--folder", site.folder)
    finally:
        path.chmod(0o600)
    assert ended.code == 2
    assert f"chmod 600 {path}" in ended.err


def test_the_service_of_the_command_line_answers_until_it_is_told_to_stop(site, caplog):
    options = argparse.Namespace(folder=site.folder, days=365.0, host="127.0.0.1", port=0)
    secured = ssl.create_default_context(cadata=(site.folder / "ca" / "root.crt").read_text())
    answers, doctors = [], []

    def ask(port: int) -> None:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
            secured.wrap_socket(sock, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"GET /ca.pem HTTP/1.1\r\n\r\n")
            answers.append(b"".join(iter(lambda: connection.recv(4096), b"")))

    def go():
        while not (
            bound := [one.args[-1] for one in caplog.records if one.name == enrol_command.__name__ and one.args]
        ):
            threading.Event().wait(0.01)
        try:
            ask(bound[0])
            doctors.append(asyncio.run(examine_services(None, site.folder))[-1])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the command heeds it, since it listens

    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        assert enrol_command.serve_enrolment(options) == 0
        thread.join()
    assert answers[0].startswith(b"HTTP/1.1 200 OK")
    port = read_address(site.folder).port
    assert port != USUAL_PORT
    assert (doctors[0].state, names_all(doctors[0].told, port)) == ("good", True)
    stopped = asyncio.run(examine_services(None, site.folder))[-1]
    assert stopped.state == "advice"
    assert names_all(stopped.mend, f"edge-server enrolment-service --port {port}")
    assert parse_token(enrol(site, "pi-03")).port == port, "a token names the port that boards reach"


@pytest.mark.parametrize("readmitted", [False, True])
def test_a_renewal_under_way_while_its_device_is_revoked_is_refused(site, readmitted):
    """The key is checked before the certificate is signed; between both, the operator revokes, and may readmit."""
    old = new_key()
    join(site, parse_token(enrol(site, "pi-03")), old)
    registrar, folder = site.registrar(), open_folder(site.folder)

    def issue_late(public, device):
        asyncio.run(revoke(folder, "pi-03", datetime.fromtimestamp(NOW, UTC)))
        if readmitted:
            asyncio.run(readmit(folder, "pi-03"))
        return site.issue(public, device)

    renewal = Request("POST", "/renew-expired", msgspec.json.encode({"request": request_of(old).decode()}))
    assert b'"revoked"' in replace(registrar, issue=issue_late).answer(renewal).body
    assert all(one.revoked for one in read_state(site.folder).accounts["pi-03"].certificates)


def test_readmission_revokes_every_certificate_of_the_account(site):
    """Also one that an earlier version signed while the device was being revoked."""
    join(site, parse_token(enrol(site, "pi-03")), new_key())
    state = read_state(site.folder)
    write_state(
        site.folder, with_account(state, "pi-03", msgspec.structs.replace(state.accounts["pi-03"], denied=True))
    )
    enrol(site, "pi-03", "--readmit")
    [certificate] = read_state(site.folder).accounts["pi-03"].certificates
    assert certificate.revoked
    assert not site.is_denied("pi-03")


def test_a_device_renews_twenty_times_at_once_and_then_once_a_minute(site):
    """However many addresses it asks from: each renewal is a certificate on record."""
    key = new_key()
    join(site, parse_token(enrol(site, "pi-03")), key)
    body = msgspec.json.encode({"request": request_of(key).decode()})
    registrar = site.registrar()
    answers = [registrar.answer(Request("POST", "/renew-expired", body, f"192.0.2.{n}")) for n in range(30)]
    assert [one.status for one in answers].count(200) == 20
    assert b'"busy"' in answers[-1].body
    assert 0 < answers[-1].retry_s <= 60
    assert len(read_state(site.folder).accounts["pi-03"].certificates) <= 21
