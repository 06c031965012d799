"""Power meter on the network, such as a smart plug: all the board takes from the wall, its power supply included.

Shelly: https://shelly-api-docs.shelly.cloud (Gen2 `Switch.GetStatus`, Gen1 `/meter/0`); Tasmota: `Status 8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from device_agent.config import MeterConfig
from device_agent.probes.power.rails import validate_watts
from shared.errors import NoData
from shared.protocol.measurements import Provenance, Reading
from shared.runtime.clock import Clock

TIMEOUT_S = 2.0
MAX_BYTES = 1 << 16
WALL_W = (0.0, 1e5)
UNCERTAINTY_W = 1.0
"""Of such a plug at the few watts of a board."""
HTTP_OK = 200


class ShellyStatus(msgspec.Struct):
    """Answer of a Gen2 switch."""

    apower: float


class ShellyGen1Status(msgspec.Struct):
    """Answer of a Gen1 meter."""

    power: float
    is_valid: bool = True


class TasmotaEnergy(msgspec.Struct):
    """Energy table of one Tasmota outlet; of several it sends a list, which is refused: they feed others too."""

    Power: float


class TasmotaSensors(msgspec.Struct):
    """Sensor table of a Tasmota's answer."""

    ENERGY: TasmotaEnergy


class TasmotaStatus(msgspec.Struct):
    """Answer to `Status 8`."""

    StatusSNS: TasmotaSensors


def _parse_shelly_gen1(data: bytes) -> float:
    answer = msgspec.json.decode(data, type=ShellyGen1Status)
    if not answer.is_valid:
        raise NoData("the meter says that its figure is not valid", lack="invalid")
    return answer.power


METER_KINDS: Mapping[str, tuple[str, Callable[[bytes], float]]] = {
    "shelly": ("/rpc/Switch.GetStatus?id=0", lambda data: msgspec.json.decode(data, type=ShellyStatus).apower),
    "shelly1": ("/meter/0", _parse_shelly_gen1),
    "tasmota": (
        "/cm?cmnd=Status%208",
        lambda data: msgspec.json.decode(data, type=TasmotaStatus).StatusSNS.ENERGY.Power,
    ),
}
"""Path and reader of each kind's answer."""


def parse_watts(kind: str, data: bytes) -> float:
    """Parse the watts in a meter's answer; raises NoData where there are none."""
    try:
        return validate_watts(METER_KINDS[kind][1](data), WALL_W)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise NoData(f"no answer of a {kind} meter: {error}", lack="invalid") from error


def fetch(url: str, clock: Clock, timeout_s: float = TIMEOUT_S) -> bytes:
    """Fetch a URL: at most 64 KiB, in at most about `timeout_s`, past all proxies, redirected nowhere.

    Args:
        url: Its scheme is http or https.
        clock: Monotonic seconds.
        timeout_s: Seconds for the whole answer.

    Raises:
        NoData: It does not answer so.
    """
    import http.client  # noqa: PLC0415 - only boards with such a meter shall pay for it

    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    until, data = clock() + timeout_s, b""
    try:
        with closing(connect(parts.hostname or "", parts.port, timeout=timeout_s)) as connection:
            connection.request("GET", f"{parts.path}?{parts.query}".rstrip("?"))
            with connection.getresponse() as answer:  # it may hold the socket by itself
                while len(data) <= MAX_BYTES and clock() < until and (part := answer.read1(MAX_BYTES)):
                    data += part
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoData(f"{parts.hostname}: {str(error) or type(error).__name__}", lack="busy") from error
    if answer.status != HTTP_OK:
        raise NoData(f"{parts.hostname}: HTTP {answer.status} for {parts.path}", lack="invalid")
    if len(data) > MAX_BYTES or clock() >= until:
        raise NoData(f"{parts.hostname}: no end after {len(data)} bytes, {timeout_s:g} s", lack="invalid")
    return data


class HttpMeter:
    """Source that asks the meter at every read; see `PowerSource`."""

    kind: Literal["instant", "mean"] = "instant"
    cost_s = 0.05

    def __init__(self, config: MeterConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._url = config.url.rstrip("/") + METER_KINDS[config.kind][0]
        self.period_s = config.period_s
        self.provenance = Provenance(source=f"http {config.kind}", quality="measured")

    def read(self) -> Reading:
        data = fetch(self._url, self._clock, TIMEOUT_S)
        return Reading(
            value=parse_watts(self._config.kind, data),
            unit="watts",
            source=self.provenance.source,
            quality="measured",
            at=self._clock(),
            uncertainty=UNCERTAINTY_W,
        )
