"""Whether a broker serves whoever asks: by a connection of its own, or by the way there alone."""

from __future__ import annotations

import socket

import msgspec

from shared.errors import Unreachable
from shared.runtime import backports
from shared.transport.base import Broker
from shared.transport.mqtt_connection import MQTT_5, NO_ANSWER, Connection, Incoming
from shared.transport.refusals import HUNG_UP
from shared.transport.tcp_info import Traffic
from shared.transport.tls import context, explain, handshake

PATIENCE_S = 5.0
NO_QOS_1 = "hangs up at a message of QoS 1"


def find_distrust(broker: Broker, patience_s: float = PATIENCE_S, *, dates: bool = True) -> str:
    """Return why no connection to a broker can be made, by TCP and TLS alone; nothing where one can.

    Args:
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
        client_id: A name that no other client uses.
        topic: One without other subscribers.
        patience_s: Seconds for the name and TCP, and again for MQTT.
        dates: Whether this machine's clock may judge the dates of certificates.
    """
    once = msgspec.structs.replace(broker, session_expiry_s=0)
    said = await _try_broker(once, client_id, topic, patience_s, dates=dates)
    if _knows_no_5(broker, said):
        again = await _try_broker(msgspec.structs.replace(once, version=3), client_id, topic, patience_s, dates=dates)
        return said if again and HUNG_UP in said else again  # the first of two has the remedies
    return said


async def speaks_only_3(
    broker: Broker, client_id: str, topic: str, patience_s: float = PATIENCE_S, *, dates: bool = True
) -> bool:
    """Tell whether a broker takes this client by MQTT 3.1.1 alone; arguments as of `find_refusal`."""
    said = await _try_broker(broker, client_id, topic, patience_s, dates=dates)
    return _knows_no_5(broker, said)


def _knows_no_5(broker: Broker, said: str) -> bool:
    """Tell whether a broker may know nothing newer than MQTT 3.1.1, by what became of a try with 5."""
    return broker.version == MQTT_5 and any(one in said for one in (NO_ANSWER, HUNG_UP, "nsupported protocol"))


async def _try_broker(broker: Broker, client_id: str, topic: str, patience_s: float, *, dates: bool) -> str:
    connection = Connection(broker, client_id, None, Incoming(lambda *_: None, Traffic()), dates=dates)
    publishes = False
    try:
        async with backports.timeout(2 * patience_s):  # one for the name and TCP, one for MQTT
            await connection.open(patience_s)
            if reason := (await connection.settled(connection.subscribe([topic])))[0]:
                return f"denies subscribing to {topic}: {reason}"
            publishes = True
            answer = connection.send(topic, b"", qos=1, retain=False)
            if answer and (reason := (await connection.settled(answer))[0]):
                return f"denies publishing to {topic}: {reason}"
    except Unreachable as error:
        return (
            f"{NO_QOS_1} to {topic}: {connection.lost.result()}" if publishes and connection.lost.done() else str(error)
        )
    except TimeoutError:
        return f"{NO_ANSWER} within {2 * patience_s:g} s"
    finally:
        connection.close()
    return ""
