"""Enrolment service over real TLS: invalid, endless and too many requests."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from edge_server.gateway.enrolment import service as service_module
from edge_server.gateway.enrolment.service import EnrolmentService
from shared.errors import ConfigError
from shared.protocol.enrolment import MOST_BODY, MOST_HEAD, Refusal, http_date, parse_head
from tests.edge_server.gateway.enrolments import NOW, Gateway, authorities, new_key, request_of, server_context
from tests.naming import naming

PATIENCE_S = 300.0


async def until(holds):
    """Wait until the service, which runs in this very loop, has got so far."""
    while not holds():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authorities()[1].decode())


@asynccontextmanager
async def running(gateway, context, request_s=PATIENCE_S):
    service = EnrolmentService(gateway.registrar, lambda: context, request_s)
    async with asyncio.timeout(PATIENCE_S), service.running("127.0.0.1", 0) as port:
        yield service, port


async def hang_up(writer):
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def said(port, data):
    """Say something over TLS; return all that is answered until the other end closes, however it does."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    except OSError:
        return b""
    try:
        writer.write(data)
        return await reader.read()
    except OSError:
        return b""
    finally:
        await hang_up(writer)


def run(tmp_path, *inputs):
    gateway, context = Gateway(), server_context(tmp_path)

    async def go():
        async with running(gateway, context) as (service, port):
            answers = [await said(port, data) for data in inputs]
            await until(lambda: not service.handshake_slots.slots)
            return answers

    return asyncio.run(go())


def test_a_request_is_answered_with_the_gateways_time(tmp_path):
    [answer] = run(tmp_path, b"GET /ca.pem HTTP/1.1\r\nHost: a\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    first, headers = parse_head(head + b"\r\n\r\n")
    assert first == "HTTP/1.1 200 OK"
    assert headers["date"] == http_date(NOW)
    assert headers["connection"] == "close"
    assert int(headers["content-length"]) == len(body)
    assert body.count(b"BEGIN CERTIFICATE") == 2


async def test_a_board_joins_by_bytes(tmp_path):
    gateway, context = Gateway(), server_context(tmp_path)
    token = gateway.token()
    body = msgspec.json.encode({"token": token.id, "secret": token.secret, "request": request_of(new_key()).decode()})
    request = b"POST /join HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with running(gateway, context) as (_, port):
        assert (await said(port, request)).startswith(b"HTTP/1.1 200 OK\r\n")
    assert len(gateway.issued) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /ca.pem HTTP/2\r\n\r\n",
        b"GET  /ca.pem HTTP/1.1\r\n\r\n",
        b"GET /ca.pem HTTP/1.1\r\na\r\n\r\n",
        b"POST /join HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /join HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY + 1),
        b"POST /join HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /" + b"x" * 4 * MOST_HEAD,
    ],
)
def test_what_is_no_request_is_refused_in_words(tmp_path, data):
    [answer] = run(tmp_path, data)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert msgspec.json.decode(body, type=Refusal).reason == "malformed"


def test_nothing_but_the_paths_of_the_protocol_is_there(tmp_path):
    for answer in run(tmp_path, b"GET /ca/site.key HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        assert answer.startswith(b"HTTP/1.1 404 ")


async def test_who_never_ends_is_cut_off(tmp_path):
    """A connection that says nothing, one that stops in its head, and one that never sends its body."""
    gateway, context = Gateway(), server_context(tmp_path)
    async with running(gateway, context, request_s=0.2) as (service, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answers = await asyncio.gather(
            said(port, b""), said(port, b"GET /ca"), said(port, b"POST /join HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        )
        with suppress(OSError):
            assert await reader.read() == b""
        await hang_up(writer)
        await until(lambda: not service.handshake_slots.slots)
        assert answers == [b"", b"", b""]


async def test_too_many_at_once_are_turned_away_and_one_address_cannot_take_all(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "MOST_OPEN_EACH", 3)
    gateway, context = Gateway(), server_context(tmp_path)
    async with running(gateway, context) as (service, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await until(lambda: len(service.handshake_slots.slots) == 3)
        with pytest.raises((ConnectionError, ssl.SSLError)):  # how it is told, systems differ in
            await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
        for _, writer in idle:
            await hang_up(writer)
        await until(lambda: not service.handshake_slots.slots)
        assert (await said(port, b"GET /ca.pem HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


def test_files_that_are_not_in_order_are_the_gateways_fault_and_told_to_its_operator(tmp_path, caplog):
    gateway, context = Gateway(), server_context(tmp_path)

    def broken():
        raise ConfigError("site.key")

    gateway.registrar.site = broken

    async def go():
        async with running(gateway, context) as (_, port):
            return await said(port, b"GET /ca.pem HTTP/1.1\r\n\r\n")

    with caplog.at_level(logging.ERROR):
        answer = asyncio.run(go())
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"site.key" not in answer
    assert "site.key" in caplog.text


def test_a_connection_without_a_certificate_renews_nothing(tmp_path):
    answers = run(tmp_path, b'POST /renew HTTP/1.1\r\nContent-Length: 14\r\n\r\n{"request":""}')
    assert answers[0].startswith(b"HTTP/1.1 400 ")


async def test_a_port_that_is_taken_is_said(tmp_path):
    gateway, context = Gateway(), server_context(tmp_path)
    async with running(gateway, context) as (_, port):
        other = EnrolmentService(gateway.registrar, lambda: context)
        with pytest.raises(ConfigError, match=naming("--port", port)):
            async with other.running("127.0.0.1", port):
                pass
