"""Wireless link model: Shannon rate from distance, path loss, power, bandwidth, noise and fading.

    r = b B log2(1 + h g p / N),    h = 10^(-PL(d) / 10)

with bandwidth B, the device's share b of it, power p, noise power N, path gain h (see `edge_server.plan.radio`) and
fading gain g. In Rayleigh fading, g is exponentially distributed and constant over a block.
"""

from __future__ import annotations

from edge_server.plan.links import WirelessLink
from edge_server.plan.radio import dbm_to_watts, path_gain, shannon_rate
from edge_server.replay.devices.components import LinkModel
from edge_server.replay.devices.curve import constant
from edge_server.replay.devices.flow import Flow
from edge_server.replay.devices.random_draws import Blocks, draw_exponential, draw_within
from shared.errors import ConfigError

# At a lower rate a kilobyte takes over two hours: probably a distance in a wrong unit.
LEAST_BPS = 1.0


def wireless_link(table: WirelessLink, seed: int, device: str) -> LinkModel:
    """Return the link model of a device in its cell; only the fading is drawn again over time.

    Raises:
        ConfigError: The link's rate is below `LEAST_BPS`.
    """
    bandwidth = table.share * draw_within(table.bandwidth_hz, seed, device, "bandwidth_hz")
    path = path_gain(
        table, draw_within(table.distance_m, seed, device, "distance_m") if table.distance_m is not None else 1.0
    )
    noise = table.noise_w if table.noise_w is not None else dbm_to_watts(table.noise_dbm_hz) * bandwidth
    sent = dbm_to_watts(draw_within(table.tx_dbm, seed, device, "tx_dbm"))

    def rate(power_w: float, block: object) -> float:
        fading = table.gain if table.fading == "none" else draw_exponential(table.gain, seed, device, "gain", block)
        return shannon_rate(bandwidth, path * fading, power_w, noise)

    def flow(power_w: float, number: int = 0) -> Flow:
        if table.fading == "rayleigh" and not isinstance(table.again, str):
            return Blocks(lambda block: rate(power_w, block), table.again)
        return constant(rate(power_w, number if table.again == "round" else ""))

    server_w = dbm_to_watts(table.server_dbm)
    if (least := shannon_rate(bandwidth, path * table.gain, min(sent, server_w), noise)) < LEAST_BPS:
        raise ConfigError(
            f"link wireless: {least:.2g} bit/s; correct distance_m, powers or noise for at least {LEAST_BPS:g} bit/s"
        )
    return LinkModel(
        up=flow(sent),
        down=flow(server_w),
        delay_s=table.delay_s,
        loss=table.loss,
        of_round=(lambda number: (flow(sent, number), flow(server_w, number))) if table.again == "round" else None,
        source="plan, link wireless",
        tx_w=sent,
    )
