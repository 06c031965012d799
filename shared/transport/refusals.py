"""MQTT connection refusals: explain the broker's reason and name the remedy."""

from __future__ import annotations

HUNG_UP = "it hung up before it answered"
MAY_BE_FULL = (
    "if it has as many clients as it may open files, usually 1,024, raise that limit (`LimitNOFILE=65536` in its "
    "systemd unit, see `systemctl edit mosquitto`)"
)
ONLY_3 = "if the broker does not know MQTT 5, set `version = 3` in [broker]; MQTT 3.1.1 is tried in turn"
WANTS_TLS = "if that port speaks TLS, set `tls` of [broker]"

REMEDIES = {
    "Retain not supported": "the broker retains no messages, which fieldfleet needs: set `retain_available true` "
    "(mosquitto), or allow retained messages",
    "QoS not supported": "the broker takes no QoS 1 messages, which fieldfleet needs: set `max_qos 2` (mosquitto), or "
    "allow QoS 1",
    "Quota exceeded": "the broker limits its clients: raise its limits of connections, messages or bytes",
    "Server busy": "the broker is busy: raise its limit of connections, or try later",
}
"""Remedies by MQTT 5's reason."""


def explain_hang_up(*, has_tls: bool) -> str:
    """Explain why a broker may close a connection before it answers, with the remedies."""
    return "; ".join([HUNG_UP, *([] if has_tls else [WANTS_TLS]), ONLY_3, MAY_BE_FULL])


def explain_refusal(reason: str) -> str:
    """Append the remedy to a broker's reason, if one is known."""
    remedy = next((remedy for name, remedy in REMEDIES.items() if name.lower() in reason.lower()), "")
    return f"{reason}: {remedy}" if remedy else reason
