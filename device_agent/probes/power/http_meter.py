"""HTTP power meters such as smart plugs: power at the wall, power supply included.

Shelly: https://shelly-api-docs.shelly.cloud (Gen2 `Switch`, `PM1`, `EM1` and `EM.GetStatus`, Gen1 `/meter/0` and
`/emeter/0`); Tasmota: `Status 8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Literal
from urllib.parse import quote, urlsplit

import msgspec

from device_agent.config import MeterConfig
from device_agent.probes.power.http_login import Login, answer_challenge, read_login
from device_agent.probes.power.rails import validate_watts
from shared.errors import NoData
from shared.protocol.measurements import Lack, Provenance, Reading
from shared.runtime.clock import Clock

TIMEOUT_S = 2.0
MAX_BYTES = 1 << 16
WALL_W = (0.0, 1e5)
UNCERTAINTY_W = 1.0
"""Uncertainty of a smart plug at the few watts of a board."""
HTTP_OK, UNAUTHORISED = 200, 401
LOGIN_REMEDY = "if it wants a password, set `user` and `password_file` of [board.meter]"


class ShellyStatus(msgspec.Struct):
    """Response of a Gen2 switch (`output`: on or off) or of a PM1, which has no switch."""

    apower: float
    output: bool = True


class ShellyEm1Status(msgspec.Struct):
    """Response of one channel of a Gen2 energy meter; invalid if it reports errors."""

    act_power: float
    errors: list[str] = []


class ShellyEmStatus(msgspec.Struct):
    """Response of a three-phase Gen2 energy meter; invalid if it reports errors."""

    total_act_power: float
    errors: list[str] = []


class ShellyGen1Status(msgspec.Struct):
    """Response of a Gen1 meter."""

    power: float
    is_valid: bool = True


class TasmotaEnergy(msgspec.Struct):
    """Energy table of a Tasmota with one outlet; several outlets send lists, which fail to decode on purpose."""

    Power: float


class TasmotaSensors(msgspec.Struct):
    """Sensor table of a Tasmota's response."""

    ENERGY: TasmotaEnergy


class TasmotaStatus(msgspec.Struct):
    """Response to `Status 8`, or the refusal of a Tasmota that has a password."""

    StatusSNS: TasmotaSensors | None = None
    WARNING: str = ""


def _parse_switch(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=ShellyStatus)
    if not answer.output:
        raise NoData(
            "the meter's switch is off, so its figure is stale or of another load; check that it feeds this board",
            lack="invalid",
        )
    return answer.apower


def _parse_em1(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=ShellyEm1Status)
    _refuse_errors(answer.errors)
    return answer.act_power


def _parse_em(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=ShellyEmStatus)
    _refuse_errors(answer.errors)
    return answer.total_act_power


def _refuse_errors(errors: list[str]) -> None:
    if errors:
        raise NoData(f"the meter reports {', '.join(errors)[:80]}", lack="invalid")


def _parse_shelly_gen1(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=ShellyGen1Status)
    if not answer.is_valid:
        raise NoData("the meter reports is_valid = false", lack="invalid")
    return answer.power


def _parse_tasmota(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=TasmotaStatus)
    if answer.StatusSNS is None:
        lack: Lack = "denied" if "password" in answer.WARNING.lower() else "invalid"
        raise NoData(f"{answer.WARNING[:80] or 'no StatusSNS'}: {LOGIN_REMEDY}", lack=lack)
    return answer.StatusSNS.ENERGY.Power


METER_KINDS: Mapping[str, tuple[str, Callable[[bytes], float]]] = {
    "shelly": ("/rpc/Switch.GetStatus?id=0", _parse_switch),
    "shelly-pm1": ("/rpc/PM1.GetStatus?id=0", _parse_switch),
    "shelly-em1": ("/rpc/EM1.GetStatus?id=0", _parse_em1),
    "shelly-em": ("/rpc/EM.GetStatus?id=0", _parse_em),
    "shelly1": ("/meter/0", _parse_shelly_gen1),
    "shelly1-em": ("/emeter/0", _parse_shelly_gen1),
    "tasmota": ("/cm?cmnd=Status%208", _parse_tasmota),
}
"""Request path and response parser of each kind."""


def parse_watts(kind: str, data: bytes) -> float:
    """Parse the watts in a meter's response; raises NoData."""
    try:
        return validate_watts(METER_KINDS[kind][1](data), WALL_W)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NoData(f"not a response of a {kind} meter: {error}", lack="invalid") from error


def fetch(url: str, clock: Clock, timeout_s: float = TIMEOUT_S, login: Login | None = None) -> bytes:
    """Fetch an http or https URL without proxies or redirects; at most 64 KiB.

    Args:
        timeout_s: Seconds for the whole exchange, connection to last byte.
        login: Credentials to use if the server asks for them.

    Raises:
        NoData: The server did not answer in time with status 200.
    """
    until = clock() + timeout_s
    status, data, challenge = _get(url, clock, until, {})
    if status == UNAUTHORISED and login:
        parts = urlsplit(url)
        authorization = answer_challenge(challenge, login, f"{parts.path}?{parts.query}".rstrip("?"))
        status, data, _ = _get(url, clock, until, {"Authorization": authorization})
    host = urlsplit(url).hostname
    if status == UNAUTHORISED:
        raise NoData(f"{host}: {'refuses this user or password' if login else LOGIN_REMEDY}", lack="denied")
    if status != HTTP_OK:
        raise NoData(f"{host}: HTTP {status} for {urlsplit(url).path}", lack="invalid")
    return data


def _get(url: str, clock: Clock, until: float, headers: Mapping[str, str]) -> tuple[int, bytes, str]:
    """Return status, body and `WWW-Authenticate` of one request; raises NoData."""
    import http.client  # noqa: PLC0415 - only needed on boards with such a meter

    parts, data = urlsplit(url), b""
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with closing(connect(parts.hostname or "", parts.port, timeout=max(0.01, until - clock()))) as connection:
            connection.request("GET", f"{parts.path}?{parts.query}".rstrip("?"), headers=dict(headers))
            with connection.getresponse() as answer:  # the response may own the socket
                while len(data) <= MAX_BYTES and clock() < until and (part := answer.read1(MAX_BYTES)):
                    data += part
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoData(f"{parts.hostname}: {str(error) or type(error).__name__}", lack="busy") from error
    if len(data) > MAX_BYTES or clock() >= until:
        raise NoData(
            f"{parts.hostname}: response incomplete after {len(data)} bytes, too long or too slow", lack="invalid"
        )
    return answer.status, data, answer.headers.get("WWW-Authenticate", "")


class HttpMeter:
    """Power source that queries the meter at every read; see `PowerSource`."""

    kind: Literal["instant", "mean"] = "instant"
    uncertainty_w, cost_s = UNCERTAINTY_W, 0.05

    def __init__(self, config: MeterConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._url = config.url.rstrip("/") + METER_KINDS[config.kind][0]
        self.period_s = config.period_s
        self.provenance = Provenance(source=f"http {config.kind}", quality="measured")

    def read(self) -> Reading:
        login = read_login(self._config.user, self._config.password_file)
        url = self._url
        if login and self._config.kind == "tasmota":  # Tasmota takes credentials only in the query
            url += f"&user={quote(login.user, safe='')}&password={quote(login.password, safe='')}"
        data = fetch(url, self._clock, TIMEOUT_S, login)
        return Reading(
            value=parse_watts(self._config.kind, data),
            unit="watts",
            source=self.provenance.source,
            quality="measured",
            at=self._clock(),
            uncertainty=self.uncertainty_w,
        )
