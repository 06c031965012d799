"""Ask a broker whether it serves us, once, under a name that nobody else uses."""

from __future__ import annotations

import asyncio

import msgspec

from shared.errors import Unreachable
from shared.transport.base import Broker
from shared.transport.mqtt_connection import NO_ANSWER, Connection
from shared.transport.tcp_info import Traffic

PATIENCE_S = 5.0


async def refusal(broker: Broker, client_id: str, topic: str, patience_s: float = PATIENCE_S) -> str:
    """Connect, subscribe to `topic` and publish nothing to it; return why the broker does not let us, or nothing.

    No session is left there. As the agent would, it falls back to MQTT 3.1.1 where 5 is not known; only under 5 does a
    broker tell that it drops what we publish.
    """
    once = msgspec.structs.replace(broker, session_expiry_s=0)
    said = await _try(once, client_id, topic, patience_s)
    if broker.version != 3 and (NO_ANSWER in said or "nsupported protocol" in said):  # noqa: PLR2004 - MQTT's number
        return await _try(msgspec.structs.replace(once, version=3), client_id, topic, patience_s)
    return said


async def _try(broker: Broker, client_id: str, topic: str, patience_s: float) -> str:
    connection = Connection(broker, client_id, None, lambda *_: None, Traffic())
    try:
        async with asyncio.timeout(2 * patience_s):  # one for the name and TCP, one for MQTT
            await connection.open(patience_s)
            for deed, answer in (
                ("subscribing", connection.subscribe([topic])),
                ("publishing", connection.send(topic, b"", qos=1, retain=False)),
            ):
                if answer and (reason := (await connection.settled(answer))[0]):
                    return f"denies {deed} to {topic}: {reason}"
    except Unreachable as error:
        return str(error)
    except TimeoutError:
        return f"{NO_ANSWER} within {2 * patience_s:g} s"
    finally:
        connection.close()
    return ""
