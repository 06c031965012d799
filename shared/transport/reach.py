"""Check whether a broker accepts this process, by TCP and TLS or MQTT."""

from __future__ import annotations

import socket

import msgspec

from shared.errors import Unreachable
from shared.runtime import backports
from shared.transport.base import Broker
from shared.transport.mqtt_connection import MQTT_5, NO_ANSWER, Connection, Incoming
from shared.transport.refusals import HUNG_UP
from shared.transport.tcp_info import Traffic
from shared.transport.tls import build_context, explain_failure, handshake

PATIENCE_S = 5.0
DENIES = "denies"
NO_QOS_1 = "hangs up at a message of QoS 1"


def find_distrust(broker: Broker, patience_s: float = PATIENCE_S, *, dates: bool = True) -> str:
    """Explain why a broker cannot be reached by TCP and TLS; empty where it can.

    Args:
        patience_s: Timeout in seconds of name resolution and TCP, and again of TLS.
        dates: Whether to check certificate dates by this machine's clock.
    """
    try:
        with socket.create_connection((broker.host, broker.port), patience_s) as sock:
            if broker.tls:
                tls_context, name = build_context(broker.tls, dates=dates), broker.tls.server_name or broker.host
                handshake(tls_context, sock, name, patience_s).close()
    except Unreachable as error:
        return str(error)
    except (OSError, ValueError) as error:
        return str(explain_failure(error, broker.tls, broker.host) if broker.tls else error)
    return ""


async def find_refusal(
    broker: Broker, client_id: str, topic: str, patience_s: float = PATIENCE_S, *, dates: bool = True
) -> str:
    """Connect, subscribe to `topic` and publish an empty message to it; return the broker's refusal, if any.

    No session remains. Like the agent, it falls back to MQTT 3.1.1 if 5 is not supported; only with 5 does a broker
    report that it drops our messages.

    Args:
        client_id: A name that no other client uses.
        topic: A topic without other subscribers.
        patience_s: Timeout in seconds of name resolution and TCP, and again of MQTT.
        dates: Whether to check certificate dates by this machine's clock.
    """
    once = msgspec.structs.replace(broker, session_expiry_s=0)
    problem = await _try_broker(once, client_id, topic, patience_s, dates=dates)
    if _lacks_mqtt_5(broker, problem):
        again = await _try_broker(msgspec.structs.replace(once, version=3), client_id, topic, patience_s, dates=dates)
        return problem if again and HUNG_UP in problem else again  # the first message has the remedies
    return problem


async def requires_mqtt_3(
    broker: Broker, client_id: str, topic: str, patience_s: float = PATIENCE_S, *, dates: bool = True
) -> bool:
    """Check whether a broker accepts this client only with MQTT 3.1.1; arguments as for `find_refusal`."""
    problem = await _try_broker(broker, client_id, topic, patience_s, dates=dates)
    return _lacks_mqtt_5(broker, problem)


def _lacks_mqtt_5(broker: Broker, problem: str) -> bool:
    """Check whether an attempt with MQTT 5 failed as with a broker that only supports 3.1.1."""
    return broker.version == MQTT_5 and any(sign in problem for sign in (NO_ANSWER, HUNG_UP, "nsupported protocol"))


async def _try_broker(broker: Broker, client_id: str, topic: str, patience_s: float, *, dates: bool) -> str:
    connection = Connection(broker, client_id, None, Incoming(lambda *_: None, Traffic()), dates=dates)
    publishes = False
    try:
        async with backports.timeout(2 * patience_s):  # one for the name and TCP, one for MQTT
            await connection.open(patience_s)
            if reason := (await connection.wait_answer(connection.subscribe([topic])))[0]:
                return f"{DENIES} subscribing to {topic}: {reason}"
            publishes = True
            answer = connection.send(topic, b"", qos=1, retain=False)
            if answer and (reason := (await connection.wait_answer(answer))[0]):
                return f"{DENIES} publishing to {topic}: {reason}"
    except Unreachable as error:
        return (
            f"{NO_QOS_1} to {topic}: {connection.lost.result()}" if publishes and connection.lost.done() else str(error)
        )
    except TimeoutError:
        return f"{NO_ANSWER} within {2 * patience_s:g} s"
    finally:
        connection.close()
    return ""
