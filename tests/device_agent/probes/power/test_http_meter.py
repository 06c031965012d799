"""Power meters on the network, asked over real sockets."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from device_agent.config import MeterConfig
from device_agent.probes.power.http_login import Login, answer_challenge
from device_agent.probes.power.http_meter import MAX_BYTES, HttpMeter, fetch, parse_watts
from shared.errors import NoData
from shared.runtime.clock import monotonic
from tests.machine import shared
from tests.naming import naming

Answer = Callable[[BaseHTTPRequestHandler], None]
GEN2 = b'{"id":0, "output":true, "apower":4.2, "voltage":239.7, "aenergy":{"total":913.252}}'
GEN1 = b'{"power":5.31,"is_valid":true,"timestamp":1,"counters":[1,2,3],"total":42}'
PM1 = b'{"id":0,"voltage":230.1,"current":0.1,"apower":20.0,"freq":50.0}'
EM1 = b'{"id":0,"current":0.1,"voltage":230.1,"act_power":7.5,"aprt_power":9.1,"pf":0.8,"calibration":"factory"}'
EM = b'{"id":0,"a_act_power":11.6,"b_act_power":0.0,"c_act_power":0.0,"n_current":null,"total_act_power":11.6}'
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
        ("shelly-pm1", PM1, 20.0, "/rpc/PM1.GetStatus?id=0"),
        ("shelly-em1", EM1, 7.5, "/rpc/EM1.GetStatus?id=0"),
        ("shelly-em", EM, 11.6, "/rpc/EM.GetStatus?id=0"),
        ("shelly1-em", GEN1, 5.31, "/emeter/0"),
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
        ("shelly", b'{"id":0,"output":false,"apower":4.2}'),
        ("shelly-em1", b'{"id":0,"act_power":4.2,"errors":["power_meter_failure"]}'),
        ("shelly-em", b'{"id":0,"total_act_power":4.2,"errors":["out_of_range:a_act_power"]}'),
        ("shelly-em", b'{"id":0,"total_act_power":-4.2}'),
        ("shelly-pm1", b'{"id":0,"apower":null}'),
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
    with pytest.raises(NoData, match=naming("127.0.0.1")) as caught:
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
        with pytest.raises(NoData, match=naming("127.0.0.1")) as caught:
            fetch(url, monotonic, 0.5)
        assert time.monotonic() - began < 60
        ended.set()
    assert caught.value.lack == "invalid"


def test_proxies_of_the_environment_are_not_asked(monkeypatch) -> None:
    """A meter lies on the board's own network."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with server(body(GEN2)) as (url, _):
        assert fetch(url + "/", monotonic) == GEN2


USER, PASSWORD, REALM = "admin", 'p"w: \u00fc&=', "shellyplugsg3-aabbcc"


def hashed(name: str, *parts: str) -> str:
    return hashlib.new(name, ":".join(parts).encode()).hexdigest()


def digest_server(algorithm: str, *, qop: bool = True) -> Answer:
    """Answer as a Shelly does: 401 with a challenge, then whoever knows the password."""
    name = algorithm.replace("-", "").lower()

    def answer(request: BaseHTTPRequestHandler) -> None:
        said = dict(re.findall(r'(\w+)="?([^",]*)"?', request.headers.get("Authorization", "")))
        secret, target = hashed(name, USER, REALM, PASSWORD), hashed(name, "GET", request.path)
        middle = (said.get("nc", ""), said.get("cnonce", ""), "auth") if qop else ()
        if said.get("response") == hashed(name, secret, "60dc", *middle, target) and said["uri"] == request.path:
            body(GEN2)(request)
            return
        words = f'Digest {"qop=auth, " * qop}realm="{REALM}", nonce="60dc", algorithm={algorithm}'
        body(b"", 401, **{"WWW-Authenticate": words})(request)

    return answer


def basic_server(request: BaseHTTPRequestHandler) -> None:
    wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    if request.headers.get("Authorization") == wanted:
        body(GEN1)(request)
    else:
        body(b"401 Unauthorized", 401, **{"WWW-Authenticate": 'Basic realm="shelly1"'})(request)


def tasmota_server(request: BaseHTTPRequestHandler) -> None:
    """Tasmota answers 200 with a warning."""
    said = parse_qs(urlsplit(request.path).query)
    known = (said.get("user"), said.get("password")) == ([USER], [PASSWORD])
    body(TASMOTA if known else b'{"WARNING":"Need user=<username>&password=<password>"}')(request)


LOCKED = [
    ("shelly", digest_server("SHA-256"), 4.2),
    ("shelly", digest_server("MD5"), 4.2),
    ("shelly", digest_server("MD5", qop=False), 4.2),
    ("shelly1", basic_server, 5.31),
    ("tasmota", tasmota_server, 6.0),
]


@pytest.mark.parametrize(("kind", "answer", "watts"), LOCKED)
def test_a_meter_with_a_password_is_read_with_it_alone(kind, answer, watts, tmp_path) -> None:
    """Without one, and with a wrong one, the board is told what is missing; the password is in no message."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(f"\ufeff{PASSWORD}\n", encoding="utf-8")
    wrong.write_text("guess-me")
    with server(answer) as (url, _):
        found = MeterConfig(kind=kind, url=url, password_file=str(right))
        assert HttpMeter(found, monotonic).read().value == watts
        for file in ("", str(wrong), str(tmp_path / "none")):
            with pytest.raises(NoData) as caught:
                HttpMeter(MeterConfig(kind=kind, url=url, password_file=file), monotonic).read()
            assert caught.value.lack == "denied"
            assert "password" in str(caught.value)
            assert "guess-me" not in str(caught.value)


@pytest.mark.parametrize("challenge", ["", "Bearer", 'Digest realm="x", algorithm=SHA-512', 'Digest qop="auth-int"'])
def test_a_login_of_another_kind_is_denied(challenge) -> None:
    with pytest.raises(NoData) as caught:
        answer_challenge(challenge, Login("admin", "x"), "/")
    assert caught.value.lack == "denied"
