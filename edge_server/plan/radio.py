"""Path loss, channel gain and Shannon rate of a `wireless` link.

The path loss PL(d) = 128.1 + 37.6 log10(d in km) dB is that of a macro cell at 2 GHz in 3GPP TR 36.814, table B.1.2.1-1
(https://www.3gpp.org/dynareport/36814.htm); the general law PL(d) = PL(1 m) + 10 n log10(d in m) is T. S. Rappaport,
"Wireless Communications", section 4.9.
"""

from __future__ import annotations

import math

from edge_server.plan.links import WirelessLink
from edge_server.plan.simulated_devices import Span, range_ends

M_PER_KM = 1000.0
LOSS_DB_1M = 40.0
"""Free-space loss at one metre and 2.4 GHz, the first term of the general law."""


def dbm_to_watts(dbm: float) -> float:
    """Convert a level in dBm to watts."""
    return math.pow(10.0, dbm / 10.0) / 1000.0


def path_gain(table: WirelessLink, distance_m: float) -> float:
    """Return the channel gain h at a distance, as a power ratio."""
    match table.path_loss:
        case "3gpp":
            loss_db = 128.1 + 37.6 * math.log10(distance_m / M_PER_KM)
        case "exponent":
            loss_db = LOSS_DB_1M + 10 * table.exponent * math.log10(distance_m)
        case "none":
            loss_db = 0.0
    return math.pow(10.0, -loss_db / 10.0)


def shannon_rate(bandwidth_hz: float, gain: float, power_w: float, noise_w: float) -> float:
    """Return B log2(1 + gain * p / N) in bit/s, with N over the whole bandwidth."""
    return bandwidth_hz * math.log2(1.0 + gain * power_w / noise_w)


def mean_rates(table: WirelessLink) -> tuple[float, float]:
    """Return uplink and downlink in bit/s at the midpoint of every range and the mean fading."""
    bandwidth, sent = table.share * _midpoint(table.bandwidth_hz), dbm_to_watts(_midpoint(table.tx_dbm))
    gain = table.gain * path_gain(table, _midpoint(table.distance_m) if table.distance_m is not None else 1.0)
    noise = table.noise_w if table.noise_w is not None else dbm_to_watts(table.noise_dbm_hz) * bandwidth
    return shannon_rate(bandwidth, gain, sent, noise), shannon_rate(
        bandwidth, gain, dbm_to_watts(table.server_dbm), noise
    )


def _midpoint(span: Span) -> float:
    return sum(range_ends(span)) / 2
