"""False gateways: the board reveals no secret, changes nothing, prints one line.

Each is tried as a stranger with a certificate of its own, and as the true gateway whose answers are these.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from device_agent.identity import credentials
from device_agent.identity.credentials import KEY, MEMBERSHIP, read_membership
from device_agent.identity.renewal import Renewal
from edge_server.gateway import authority
from edge_server.gateway.enrolment.registrar import SiteInfo
from shared.errors import EnrolmentFailed
from shared.protocol.enrolment import MOST_BODY, http_date
from tests.device_agent.identity.test_join import foreign
from tests.device_agent.identity.test_renewal import DUE, Joined
from tests.edge_server.gateway.enrolments import NOW, Board, Gateway, authorities, failure, server_context, server_pair

GUARD_S = 300.0
WAITING: list[asyncio.Timeout] = []
"""The patience of whoever asks, which ends at a word here and not by the clock."""
MOST_SAID = 900
OK = b"HTTP/1.1 200 OK\r\n"


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def refused(**said: object) -> bytes:
    return whole(json.dumps(said).encode(), b"403 Forbidden")


ANSWERS = {
    "nothing": b"",
    "cut in its head": OK + b"Content-Le",
    "cut in its body": OK + b"Content-Length: 500\r\n\r\n0123",
    "a head without an end": b"x" * (1 << 20),
    "headers without an end": OK + b"".join(b"a%d: b\r\n" % number for number in range(1 << 16)),
    "a huge body": OK + b"Content-Length: 99999999999999\r\n\r\n" + bytes(1 << 20),
    "a body of more than is taken": whole(bytes(MOST_BODY + 1)),
    "a body in pieces without an end": OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n" * 9999,
    "a length below nothing": OK + b"Content-Length: -1\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "no status": b"HTTP/1.1 abc\r\n\r\n",
    "an error of another server": whole(b"<html>502</html>", b"502 Bad Gateway"),
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "noise": whole(bytes(range(256)) * 8),
    "depth": whole(b"[" * 30_000, b"400 Bad Request"),
    "depth as an answer": whole(b'{"certificate":' * 2000),
    "numbers": refused(reason=3, message=[]),
    "words that drive the terminal": refused(reason="\x1b[2J", message="\x1b]0;mine\x07\r\n\u202e" * 400),
    "a wait without an end": refused(reason="busy", retry_s=1e308),
    "half a character": whole(b'{"certificate":"\\ud800","chain":"\\ud800"}'),
}


@asynccontextmanager
async def lying(context, answers, heard):
    """Serve as who answers each path so, by bytes, and then hangs up; None answers a byte and no more."""
    tasks = set()

    async def handle(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            heard.extend(head)
            path = head.split(b" ")[1].decode()
            said = answers.get(path, answers.get("*", b""))
            writer.write(b"H" if said is None else said)
            await writer.drain()
            if said is None:
                WAITING[-1].reschedule(asyncio.get_running_loop().time())
            if said is None or head.startswith(b"POST"):
                while data := await reader.read(4096):
                    heard.extend(data)
                    if said is not None:
                        break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    def timeout(_seconds):
        WAITING.append(real(GUARD_S))
        return WAITING[-1]

    real = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", timeout)
    WAITING.clear()


def joins(board, context, token, answers, heard, host="127.0.0.1"):
    async def run():
        async with lying(context, answers, heard) as port:
            await board.join(replace(token, host=host, port=port))

    return failure(lambda: asyncio.run(run()))


def require_a_line(failed: EnrolmentFailed) -> None:
    """One line of bounded length, which drives no terminal."""
    assert str(failed).isprintable()
    assert 0 < len(str(failed)) < MOST_SAID


def disk(folder):
    """Return what is on a board's disk but the site's time, which whoever is verified may tell."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.name != "site_time"}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


CASES = {**ANSWERS, "a byte and no more": None}


@pytest.mark.parametrize("answer", CASES)
def test_a_stranger_who_answers_so_learns_nothing_and_changes_nothing(tmp_path, answer):
    board, heard, token = Board(tmp_path / "board"), bytearray(), Gateway().token()
    context = server_context(tmp_path / "gw", foreign()[1])
    failed = joins(board, context, token, {"*": CASES[answer]}, heard)
    require_a_line(failed)
    assert failed.code in (2, 3, 5)
    assert heard.startswith(b"GET /ca.pem HTTP/1.1\r\n")
    assert heard.count(b"HTTP/1.1") == 1  # it was asked for what anybody may ask, once
    for secret in (token.secret, token.id, "BEGIN", "POST"):
        assert secret.encode() not in heard
    assert not any(disk(board.state).values())  # the lock of the folder is empty


@pytest.mark.parametrize("answer", CASES)
def test_a_gateway_that_breaks_off_while_a_board_joins_leaves_it_outside(tmp_path, answer):
    """The same board joins by the same token afterwards, with the same key."""
    board, gateway, heard = Board(tmp_path / "board"), Gateway(), bytearray()
    context, token = server_context(tmp_path / "gw"), gateway.token()
    failed = joins(board, context, token, {"/ca.pem": whole(chain()), "/join": CASES[answer]}, heard)
    require_a_line(failed)
    assert b"POST /join" in heard
    assert read_membership(board.used) is None
    assert not (board.state / credentials.FOLDER / f"join-{token.id}" / MEMBERSHIP).exists()
    key = (board.state / credentials.FOLDER / f"join-{token.id}" / KEY).read_bytes()
    board.joins(gateway, context, token)
    assert (board.used / KEY).read_bytes() == key


def chain() -> bytes:
    _, root, _, site = authorities()
    return site + root


@pytest.mark.parametrize(
    "said",
    [
        {"name": "a/b"},
        {"name": "\x1b[2J"},
        {"broker_port": 0},
        {"broker_port": 1 << 16},
        {"broker_port": -1},
        {"broker_host": "\x1b[2J"},
        {"broker_host": ""},
        {"broker_host": "a b"},
        {"broker_host": "a" * 300},
    ],
    ids=str,
)
def test_a_gateway_that_names_what_nobody_can_use_is_refused(tmp_path, said):
    """All else that it answers is right."""
    board, gateway, context = Board(tmp_path / "board"), Gateway(), server_context(tmp_path / "gw")
    facts = {"name": "roof", "chain": chain(), "broker_host": "gateway.local", "broker_port": 8883}
    gateway.registrar.site = lambda: SiteInfo(**{**facts, **said})
    failed = failure(lambda: board.joins(gateway, context))
    require_a_line(failed)
    assert failed.code == 2
    assert read_membership(board.used) is None
    assert board.proven == []


NAMES: dict[authority.Role, str] = {"device": "localhost", "server": "edge-server", "packages": "_packages"}


def pair_of(role: authority.Role) -> tuple[bytes, bytes]:
    """Return a pair of the site's own CA as whoever takes part in that role has, even if it names an address."""
    now = datetime.fromtimestamp(NOW, UTC)
    _, _, ca_key, ca = authorities()
    key = authority.make_key()
    subject = authority.Subject(NAMES[role], role, "roof")
    return key, authority.issue(ca_key, ca, authority.public_key_of(key), subject, 365, now).certificate + ca


FALSE = {
    "a CA of nobody": lambda: foreign()[1],
    "the site's, for another name": lambda: server_pair("192.0.2.1"),
    "the site's, of a device": lambda: pair_of("device"),
    "the site's, of a server": lambda: pair_of("server"),
    "the site's, of who signs packages": lambda: pair_of("packages"),
}


@pytest.mark.parametrize("whose", FALSE)
def test_who_shows_the_sites_ca_and_has_a_certificate_that_is_not_a_gateways_gets_no_secret(tmp_path, whose):
    board, heard, token = Board(tmp_path / "board"), bytearray(), Gateway().token()
    context = server_context(tmp_path / "gw", FALSE[whose]())
    failed = joins(
        board, context, token, {"/ca.pem": whole(chain())}, heard, host="localhost"
    )  # as the device is called
    require_a_line(failed)
    assert failed.code == 3
    assert token.secret.encode() not in heard
    assert token.id.encode() not in heard
    assert read_membership(board.used) is None


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A board whose certificate is to be renewed, as soon as a gateway tells it the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("device_agent.identity.clock_floor.WRITTEN_UTC_S", NOW - 30 * 86_400.0)
        return Joined(tmp_path_factory.mktemp("joined"))


def looks(joined, context, answers, heard):
    """Have the board look, at who answers so; return why nothing was renewed, and what changed on the disk."""

    async def run():
        async with lying(context, answers, heard) as port:
            joined.move_to(port)
            before.update(disk(joined.board.state))
            await Renewal(joined.board.state, joined.board.clock, joined.prove).look()

    before: dict[str, bytes] = {}
    joined.shown.clear()
    failed = failure(lambda: asyncio.run(run()))
    assert joined.shown == []  # nothing new was shown to the broker
    assert disk(joined.board.state) == before
    assert joined.board.is_usable()
    return failed


@pytest.mark.parametrize("whose", FALSE)
def test_a_false_gateway_renews_nothing(tmp_path, joined, whose):
    heard = bytearray()
    failed = looks(joined, server_context(tmp_path / "gw", FALSE[whose]()), {"*": whole(chain())}, heard)
    require_a_line(failed)
    assert not heard


def dated(data: bytes) -> bytes:
    """Return an answer that tells the time at which the certificate is to be renewed."""
    return data.replace(b"\r\n", f"\r\nDate: {http_date(NOW + DUE)}\r\n".encode(), 1)


@pytest.mark.parametrize("answer", CASES)
def test_a_gateway_that_breaks_off_while_a_board_renews_changes_nothing(tmp_path, joined, answer):
    heard = bytearray()
    answers = {"/ca.pem": dated(whole(chain())), "/renew": CASES[answer]}
    require_a_line(looks(joined, joined.context, answers, heard))
    assert b"POST /renew " in heard


@pytest.mark.parametrize(
    "answer", [name for name in CASES if name not in ("noise", "depth as an answer", "half a character")]
)
def test_a_gateway_that_breaks_off_when_it_is_looked_at_changes_nothing(joined, answer):
    require_a_line(looks(joined, joined.context, {"*": CASES[answer]}, bytearray()))
