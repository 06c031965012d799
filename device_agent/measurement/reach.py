"""Whether a broker serves this board: asked by a connection of its own, that takes nothing from the agent's.

A broker that knows a board by an account may take its second connection for the end of the first. So nobody but the
agent connects by an account while the agent runs, and the agent does not begin to meanwhile.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from device_agent.config import AgentConfig
from shared.errors import Unreachable
from shared.runtime.folder_lock import FOLDER_LOCK
from shared.transport.base import Broker
from shared.transport.mqtt_connection import NO_ANSWER, Connection, Incoming
from shared.transport.tcp_info import Traffic
from shared.transport.tls import context, explain, handshake

PATIENCE_S = 5.0
IN_USE = (
    "the agent is connected by this board's account, and a second connection would end its own: stop the agent first"
)


@contextmanager
def holding_off(config: AgentConfig) -> Iterator[bool]:
    """Keep the agent from connecting while the block lasts; tell whether a connection would take nothing from it.

    Args:
        config: Of the agent. Where its broker knows nobody by name, nobody is held off.
    """
    if not config.broker.has_account:
        yield True
        return
    try:
        file = (Path(config.state_dir) / FOLDER_LOCK).open("rb")
    except FileNotFoundError:  # no agent has ever run
        yield True
        return
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def find_distrust(broker: Broker, patience_s: float = PATIENCE_S, *, dates: bool = True) -> str:
    """Return why no connection to a broker can be made, by TCP and TLS alone; nothing where one can.

    Args:
        broker: Its address.
        patience_s: Seconds for the name and TCP, and again for TLS.
        dates: Whether this machine's clock may judge the dates of certificates.
    """
    try:
        with socket.create_connection((broker.host, broker.port), patience_s) as sock:
            if broker.tls:
                made, name = context(broker.tls, dates=dates), broker.tls.server_name or broker.host
                handshake(made, sock, name, patience_s).close()
    except Unreachable as error:
        return str(error)
    except (OSError, ValueError) as error:
        return str(explain(error, broker.tls, broker.host) if broker.tls else error)
    return ""


async def find_refusal(
    broker: Broker, client_id: str, topic: str, patience_s: float = PATIENCE_S, *, dates: bool = True
) -> str:
    """Connect, subscribe to `topic` and publish nothing to it; return why the broker refuses, or nothing.

    No session is left there. As the agent would, it falls back to MQTT 3.1.1 where 5 is not known; only under 5 does a
    broker tell that it drops what we publish.

    Args:
        broker: Its address.
        client_id: A name that no other client uses.
        topic: One without other subscribers.
        patience_s: Seconds for the name and TCP, and again for MQTT.
        dates: Whether this machine's clock may judge the dates of certificates.
    """
    once = msgspec.structs.replace(broker, session_expiry_s=0)
    said = await _try_broker(once, client_id, topic, patience_s, dates=dates)
    if broker.version != 3 and (NO_ANSWER in said or "nsupported protocol" in said):  # noqa: PLR2004 - MQTT's number
        return await _try_broker(msgspec.structs.replace(once, version=3), client_id, topic, patience_s, dates=dates)
    return said


async def _try_broker(broker: Broker, client_id: str, topic: str, patience_s: float, *, dates: bool) -> str:
    connection = Connection(broker, client_id, None, Incoming(lambda *_: None, Traffic()), dates=dates)
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
