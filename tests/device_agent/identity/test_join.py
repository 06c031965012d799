"""Enrolment over real TLS: what is sent, what is stored, kills in between."""

from __future__ import annotations

import asyncio
import ssl
import stat
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from device_agent.identity import credentials
from device_agent.identity.clock_floor import BoardClock, utc_text
from device_agent.identity.credentials import CA, CERTIFICATE, CURRENT, KEY, read_membership
from edge_server.gateway import authority
from shared.protocol.enrolment import Joined, parse_head
from tests.edge_server.gateway.enrolments import (
    DAY_S,
    NOW,
    STEPS,
    Board,
    Gateway,
    Killed,
    authorities,
    failure,
    killed_after,
    server_context,
    server_pair,
    serving,
)
from tests.naming import names_all


def test_a_board_joins(tmp_path):
    board, gateway = Board(tmp_path / "board"), Gateway()
    token = gateway.token("pi-03")
    found = board.joins(gateway, server_context(tmp_path / "gw"), token)
    assert (found.device, found.site, found.broker_host, found.broker_port) == ("pi-03", "roof", "gateway.local", 8883)
    assert board.proven == ["pi-03@gateway.local:8883"]
    assert gateway.ledger.tokens[token.id].closed
    assert board.is_usable()
    identity = board.state / credentials.FOLDER
    assert {path.name for path in identity.iterdir()} == {CURRENT, f"join-{token.id}", "lock", "site_time"}
    assert stat.S_IMODE(identity.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in board.used.iterdir()} == {0o600}


def test_the_same_again_is_no_harm_and_another_board_gets_nothing(tmp_path):
    board, gateway, context = Board(tmp_path / "board"), Gateway(), server_context(tmp_path / "gw")
    token = gateway.token()
    before = board.joins(gateway, context, token)
    assert board.joins(gateway, context, token) == before
    assert len(gateway.issued) == 1
    refused = failure(lambda: Board(tmp_path / "other").joins(gateway, context, token))
    assert (refused.code, refused.reason) == (2, "used")
    assert len(gateway.issued) == 1


@pytest.mark.parametrize(("device", "code"), [("pi-03", 0), ("pi-04", 2)])
def test_a_token_is_for_the_board_whose_file_says_so(tmp_path, device, code):
    board, gateway, context = Board(tmp_path / "board"), Gateway(), server_context(tmp_path / "gw")
    token = gateway.token("pi-03")
    if not code:
        assert board.joins(gateway, context, token, device).device == device
        return
    refused = failure(lambda: board.joins(gateway, context, token, device))
    assert (refused.code, refused.reason) == (code, "device")
    assert not gateway.ledger.tokens[token.id].key


def test_a_broker_that_does_not_let_it_in_leaves_the_token_open_for_this_board(tmp_path):
    board, gateway, context = Board(tmp_path / "board"), Gateway(), server_context(tmp_path / "gw")
    token = gateway.token()
    board.refusal = "not authorised"
    assert failure(lambda: board.joins(gateway, context, token)).code == 5
    assert read_membership(board.used) is None
    assert not gateway.ledger.tokens[token.id].closed
    board.refusal = ""
    board.joins(gateway, context, token)
    assert board.is_usable()
    assert len(gateway.issued) == 1


def test_nobody_answers(tmp_path):
    board, gateway = Board(tmp_path / "board"), Gateway()
    assert failure(lambda: asyncio.run(board.join(gateway.token(port=1)))).code == 5


@pytest.mark.parametrize("host", ["a..b", "a" * 70, "."])
def test_what_is_no_name_of_a_host_is_told_in_a_line(tmp_path, host):
    token = replace(Gateway().token(), host=host)
    assert failure(lambda: asyncio.run(Board(tmp_path / "board").join(token))).code == 5


@asynccontextmanager
async def recording(port: int, into: bytearray, context: ssl.SSLContext, onward: int = 0):
    """Answer on loopback with TLS and keep every byte that is said; as a relay, hand it onward."""

    async def copy(reader, writer, record):
        while data := await reader.read(4096):
            if record is not None:
                record.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def handle(reader, writer):
        if onward:
            beyond = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            beyond.check_hostname, beyond.verify_mode = False, ssl.CERT_NONE
            there = await asyncio.open_connection("127.0.0.1", onward, ssl=beyond)
            await asyncio.gather(copy(reader, there[1], into), copy(there[0], writer, None), return_exceptions=True)
            return
        head = await reader.readuntil(b"\r\n\r\n")
        into.extend(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(CHAIN[0]), CHAIN[0]))
        await writer.drain()
        into.extend(await reader.read())
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", port, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


CHAIN = [b""]


def foreign() -> tuple[bytes, tuple[bytes, bytes]]:
    """Return the chain of another site of the same name, and a gateway's pair of it."""
    now = datetime.fromtimestamp(NOW, UTC)
    root_key, root = authority.make_root("roof", now, 20)
    key, cert = authority.make_site(root_key, root, "roof", now, 10)
    own = authority.make_key()
    subject = authority.Subject("gateway", "gateway", "roof", ("127.0.0.1",))
    issued = authority.issue(key, cert, authority.public_key_of(own), subject, 365, now).certificate
    return cert + root, (own, issued + cert)


@pytest.mark.parametrize("offers", ["its own CA", "the right root too", "nothing"])
def test_a_false_gateway_learns_nothing(tmp_path, offers):
    """Every byte that it is told is looked at: the secret is not among them, nor the token's id, nor a request."""
    chain, pair = foreign()
    CHAIN[0] = {"its own CA": chain, "the right root too": chain + authorities()[1], "nothing": b""}[offers]
    heard, token = bytearray(), Gateway().token()
    board = Board(tmp_path / "board")

    async def run():
        async with recording(0, heard, server_context(tmp_path / "gw", pair)) as port:
            await board.join(replace(token, port=port))

    assert failure(lambda: asyncio.run(run())).code == 3
    first, headers = parse_head(bytes(heard))
    assert first == "GET /ca.pem HTTP/1.1"
    assert set(headers) == {"host", "connection"}
    for secret in (token.secret, token.id, "BEGIN", "pi-03"):
        assert secret.encode() not in heard
    assert read_membership(board.used) is None


async def test_the_key_never_leaves_the_board(tmp_path):
    """All that a relay in the middle of everything sees, decrypted by the gateway's own key, holds no part of it."""
    heard, gateway, board = bytearray(), Gateway(), Board(tmp_path / "board")
    context = server_context(tmp_path / "gw")
    token = gateway.token()
    async with serving(gateway, context) as onward, recording(0, heard, context, onward) as port:
        await board.join(replace(token, port=port))
    pem = (board.used / KEY).read_bytes()
    private = load_pem_private_key(pem, None)
    number = private.private_numbers().private_value
    assert token.secret.encode() in heard  # so that the search finds what is there
    for form in (
        number.to_bytes(32),
        f"{number:x}".encode(),
        private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
        *(line for line in pem.splitlines() if b"-----" not in line and len(line) == 64),
        b"PRIVATE KEY",
    ):
        assert form not in heard


def test_a_join_may_be_killed_at_every_step_and_done_again(tmp_path):
    """At each write, sync and rename in turn; then once more by the same board, which must succeed, with one key."""
    context = server_context(tmp_path / "gw")
    for steps in range(1, STEPS):
        board, gateway = Board(tmp_path / f"board-{steps}"), Gateway()
        token = gateway.token()
        with killed_after(steps) as left:
            try:
                board.joins(gateway, context, token)
            except Killed:
                board.is_usable()  # whole, or not there
        if left[0] > 0:
            break
        board.joins(gateway, context, token)
        assert board.is_usable()
        assert len(gateway.issued) == 1
    assert 10 < steps < STEPS - 1


@pytest.mark.parametrize("year", [1970, 2038])
@pytest.mark.parametrize("synchronised", [False, True])
def test_a_board_with_a_wrong_clock_joins(tmp_path, year, synchronised):
    """Where nothing keeps its clock, or it is of before this program was written, no date is judged by it."""
    wrong = datetime(year, 1, 2, tzinfo=UTC).timestamp()
    clock = BoardClock(utc_s=lambda: wrong, synchronised=lambda: synchronised and year == 1970)
    pair = server_pair("127.0.0.1", at=NOW - 900 * DAY_S, made=NOW - 1000 * DAY_S)  # has expired by OpenSSL's clock
    board, gateway = Board(tmp_path / "board", clock), Gateway(made=NOW - 1000 * DAY_S)
    board.joins(gateway, server_context(tmp_path / "gw", pair))
    assert clock.find_wrong_clock() == "board"
    assert names_all(clock.explain(), utc_text(wrong))
    assert board.is_usable()


@pytest.mark.parametrize("days", [-2, 2])
def test_a_gateway_two_days_off_is_joined(tmp_path, days):
    then = NOW + days * DAY_S
    board, gateway = Board(tmp_path / "board"), Gateway(now=then, made=then)
    board.joins(gateway, server_context(tmp_path / "gw", server_pair("127.0.0.1", at=then, made=then)))
    assert board.clock.find_wrong_clock() == "gateway"
    assert names_all(board.clock.explain(), utc_text(then))


@pytest.mark.parametrize("years", [-10, 10])
def test_where_dates_decide_it_is_told_which_clock_is_wrong(tmp_path, years):
    """The gateway made all its certificates by a clock that is years off, and this board's is kept right."""
    then = NOW + years * 365 * DAY_S
    pair = server_pair("127.0.0.1", at=then, days=30, made=then)
    board, gateway = Board(tmp_path / "board"), Gateway(now=then, made=then)
    failed = failure(lambda: board.joins(gateway, server_context(tmp_path / "gw", pair)))
    assert failed.code == 4
    assert board.clock.find_wrong_clock() == "gateway"
    assert board.clock.explain() in str(failed)
    assert gateway.issued == []


def test_an_expired_gateway_is_told_from_a_wrong_clock(tmp_path):
    """Both clocks agree, so that neither is to blame."""
    made = NOW - 100 * DAY_S
    pair = server_pair("127.0.0.1", days=1, at=NOW - 9 * DAY_S, made=made)
    board = Board(tmp_path / "board")
    failed = failure(lambda: board.joins(Gateway(made=made), server_context(tmp_path / "gw", pair)))
    assert failed.code == 4
    assert board.clock.find_wrong_clock() == ""
    assert "edge-server site check" in str(failed)


def test_a_gateway_under_another_name_is_not_the_one(tmp_path):
    gateway = Gateway()
    context = server_context(tmp_path / "gw", server_pair("192.0.2.1"))
    failed = failure(lambda: Board(tmp_path / "board").joins(gateway, context))
    assert failed.code == 3
    assert gateway.ledger.tokens[next(iter(gateway.ledger.tokens))].key == ""


def test_a_certificate_that_is_not_what_was_asked_for_is_not_used(tmp_path, monkeypatch):
    """A gateway that errs: another's key, another name, a CA of nobody."""
    monkeypatch.setattr(Gateway, "issue", lambda self, public, device: _issue(public_of_nobody(), device), raising=True)
    board = Board(tmp_path / "board")
    failed = failure(lambda: board.joins(Gateway(), server_context(tmp_path / "gw")))
    assert failed.code == 3
    assert read_membership(board.used) is None


def public_of_nobody() -> bytes:
    return authority.public_key_of(authority.make_key())


def _issue(public, device):
    _, _, key, cert = authorities()
    subject = authority.Subject(device, "device", "roof")
    return authority.issue(key, cert, public, subject, 365, datetime.fromtimestamp(NOW, UTC))


def test_the_last_word_to_the_gateway_is_said_again(tmp_path, monkeypatch):
    """Killed after all is in use and before the token is closed: the same again closes it."""
    board, gateway, context = Board(tmp_path / "board"), Gateway(), server_context(tmp_path / "gw")
    token = gateway.token()
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "encode", _dies_at(Joined, msgspec.json.encode))
        with pytest.raises(Killed):
            board.joins(gateway, context, token)
    assert board.is_usable()
    assert not gateway.ledger.tokens[token.id].closed
    board.joins(gateway, context, token)
    assert gateway.ledger.tokens[token.id].closed


def _dies_at(kind, encode):
    def run(value):
        if isinstance(value, kind):
            raise Killed
        return encode(value)

    return run


def test_what_is_on_the_disk_is_what_the_gateway_signed(tmp_path):
    board, gateway = Board(tmp_path / "board"), Gateway()
    board.joins(gateway, server_context(tmp_path / "gw"))
    certificate = x509.load_pem_x509_certificate((board.used / CERTIFICATE).read_bytes())
    assert certificate.public_key() == load_pem_private_key((board.used / KEY).read_bytes(), None).public_key()
    assert (board.used / CA).read_bytes().count(b"BEGIN") == 2
