"""Power meters on the network, asked over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from device_agent.config import MeterConfig
from device_agent.probes.power.http_meter import MAX_BYTES, HttpMeter, fetch, parse_watts
from shared.errors import NoData
from shared.runtime.clock import monotonic
from tests.machine import shared

Answer = Callable[[BaseHTTPRequestHandler], None]
GEN2 = b'{"id":0, "output":true, "apower":4.2, "voltage":239.7, "aenergy":{"total":913.252}}'
GEN1 = b'{"power":5.31,"is_valid":true,"timestamp":1,"counters":[1,2,3],"total":42}'
TASMOTA = b'{"StatusSNS":{"Time":"2026-01-01T00:00:00","ENERGY":{"Total":3.1,"Power":6,"Voltage":230}}}'


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Serve on loopback; yield the address and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", asked
        finally:
            http.shutdown()
            thread.join()


def body(data: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    return answer


def test_an_answer_too_deep_to_read_is_no_answer() -> None:
    """It would end the thread that samples, and with it every later figure."""
    with pytest.raises(NoData):
        parse_watts("shelly", b'{"apower":1, "x":' + b"[" * 30_000 + b"]" * 30_000 + b"}")


@pytest.mark.parametrize(
    ("kind", "data", "value", "path"),
    [
        ("shelly", GEN2, 4.2, "/rpc/Switch.GetStatus?id=0"),
        ("shelly1", GEN1, 5.31, "/meter/0"),
        ("tasmota", TASMOTA, 6.0, "/cm?cmnd=Status%208"),
    ],
)
def test_a_meter_is_asked_its_own_way(kind, data, value, path) -> None:
    with server(body(data)) as (url, asked):
        meter = HttpMeter(MeterConfig(kind=kind, url=f"{url}/", period_s=2.0), monotonic)
        reading = meter.read()
    assert (reading.value, reading.unit, reading.quality, reading.source) == (
        value,
        "watts",
        "measured",
        f"http {kind}",
    )
    assert reading.uncertainty == 1.0
    assert (meter.kind, meter.period_s, asked) == ("instant", 2.0, [path])


def test_the_recorded_answer_of_a_plug_is_25_watts() -> None:
    data = shared("reference", "boards", "meters", "shelly_gen2_switch_getstatus.json").read_bytes()
    assert parse_watts("shelly", data) == 25.7


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("shelly", b""),
        ("shelly", b"<html>"),
        ("shelly", b"\xff\xfe"),
        ("shelly", b'{"power":3}'),
        ("shelly", b'{"apower":"3"}'),
        ("shelly", b'{"apower":0.0}'),
        ("shelly", b'{"apower":-2.0}'),
        ("shelly", b"[" * 5000),
        ("shelly1", b'{"power":3.0,"is_valid":false}'),
        ("tasmota", b'{"StatusSNS":{"ENERGY":{"Power":[3,4]}}}'),
        ("tasmota", b'{"Status":{}}'),
    ],
)
def test_what_is_no_draw_of_this_board_is_invalid(kind, data) -> None:
    """Zero too: the board that asks draws something, and plugs show 0 where they are too coarse."""
    with pytest.raises(NoData) as caught:
        parse_watts(kind, data)
    assert caught.value.lack == "invalid"


@pytest.mark.parametrize(
    "answer",
    [
        body(b"not found", 404),
        body(b"", 302, Location="http://127.0.0.1:1/"),
        body(b" " * (MAX_BYTES + 1)),
    ],
    ids=["missing", "redirected", "endless"],
)
def test_another_answer_than_a_meters_is_invalid(answer) -> None:
    with server(answer) as (url, asked), pytest.raises(NoData) as caught:
        fetch(url + "/x", monotonic)
    assert caught.value.lack == "invalid"
    assert asked == ["/x"]


def test_nobody_there_is_busy_and_names_the_host() -> None:
    with server(body(b"")) as (url, _):
        pass
    with pytest.raises(NoData, match=r"127\.0\.0\.1") as caught:
        fetch(url, monotonic)
    assert caught.value.lack == "busy"


def test_a_meter_that_never_answers_is_left_in_time() -> None:
    ended = threading.Event()
    with server(lambda _: (ended.wait(600), None)[1]) as (url, _):
        began = time.monotonic()
        with pytest.raises(NoData) as caught:
            fetch(url, monotonic, 0.2)
        assert time.monotonic() - began < 60
        ended.set()
    assert caught.value.lack == "busy"


def test_an_answer_that_drips_is_left_in_time() -> None:
    """Each byte comes well before the socket's own timeout."""
    ended = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while not ended.wait(0.05):
                request.wfile.write(b" ")
        except OSError:
            pass

    with server(drip) as (url, _):
        began = time.monotonic()
        with pytest.raises(NoData, match="no end") as caught:
            fetch(url, monotonic, 0.5)
        assert time.monotonic() - began < 60
        ended.set()
    assert caught.value.lack == "invalid"


def test_proxies_of_the_environment_are_not_asked(monkeypatch) -> None:
    """A meter lies on the board's own network."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(body(GEN2)) as (url, _):
        assert fetch(url + "/", monotonic) == GEN2
