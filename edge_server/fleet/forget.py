"""Delete a retired device's retained messages from a site's broker."""

from __future__ import annotations

from edge_server.fleet.view import connect_anonymously, read_retained
from shared.errors import ConfigError, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import topic
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

RETAINED = ("status", "report", "release", "agent")
"""Channels of a device with retained messages."""


async def forget_retained(broker: Broker, site: str, device: str, *, is_revoked: bool = False) -> int:
    """Delete a device's retained messages; return their number.

    Args:
        is_revoked: Whether the device can no longer connect: then its last birth is ignored.

    Raises:
        Unreachable: There is no broker, or it denies the deletion.
        ConfigError: The device is connected.
    """
    async with connect_anonymously(broker, site) as transport:
        retained = await _read_messages(transport, site, device)
        if not is_revoked and _is_online(retained.get(topic(site, device, "status"))):
            raise ConfigError(f"{device} is connected; stop its agent first, or revoke it")
        for name in retained:
            await transport.publish(name, b"", retain=True)
        if remaining := await _read_messages(transport, site, device):
            denied = ", ".join(sorted(remaining))
            raise Unreachable(
                f"the broker keeps {denied}: let the server publish there; where `edge-server site init` made the "
                "broker's files, `edge-server site reload` does"
            )
    return len(retained)


async def _read_messages(transport: MqttTransport, site: str, device: str) -> dict[str, bytes]:
    """Return a device's retained messages by topic."""
    messages = dict[str, bytes]()
    async with transport.subscribe(*(topic(site, device, channel) for channel in RETAINED)) as inbox:
        await read_retained(inbox, messages.__setitem__)
    return {name: data for name, data in messages.items() if data}


def _is_online(data: bytes | None) -> bool:
    """Return true if a status says that its device is connected; an unreadable one counts as offline."""
    try:
        status = wire.decode(data) if data else None
    except WireError:
        return False
    return isinstance(status, Status) and status.online
