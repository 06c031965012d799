"""Removal of a device that is gone for good from what a site's broker has retained of it."""

from __future__ import annotations

from edge_server.fleet.view import connected_look, take_retained
from shared.errors import ConfigError, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import topic
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

RETAINED = ("status", "report", "release", "agent")
"""Channels of a device whose last message a broker keeps."""


async def forget_retained(broker: Broker, site: str, device: str, *, is_revoked: bool = False) -> int:
    """Have the broker drop what it has retained of a device; return how many messages these were.

    Args:
        is_revoked: Whether it may not connect any more: then its last birth says nothing.

    Raises:
        Unreachable: There is no broker, or it denies this.
        ConfigError: The device is connected.
    """
    async with connected_look(broker, site) as transport:
        kept = await _retained(transport, site, device)
        if not is_revoked and _is_online(kept.get(topic(site, device, "status"))):
            raise ConfigError(f"{device} is connected; stop its agent first, or revoke it")
        for name in kept:
            await transport.publish(name, b"", retain=True)
        if left := await _retained(transport, site, device):
            denied = ", ".join(sorted(left))
            raise Unreachable(
                f"the broker keeps {denied}: let the server publish there; where `edge-server site init` made the "
                "broker's files, `edge-server site reload` does"
            )
    return len(kept)


async def _retained(transport: MqttTransport, site: str, device: str) -> dict[str, bytes]:
    """Return the retained messages of a device by topic."""
    found = dict[str, bytes]()
    async with transport.subscribe(*(topic(site, device, channel) for channel in RETAINED)) as inbox:
        await take_retained(inbox, found.__setitem__)
    return {name: data for name, data in found.items() if data}


def _is_online(data: bytes | None) -> bool:
    """Tell whether a status says that its device is connected; of one that cannot be read nobody knows."""
    try:
        status = wire.decode(data) if data else None
    except WireError:
        return False
    return isinstance(status, Status) and status.online
