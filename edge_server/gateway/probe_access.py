"""Check a running broker: which clients it admits and what they may do."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from edge_server.gateway.broker_files import forbidden_topic, probe_topic
from edge_server.gateway.broker_probe import ANSWER_S, BrokerEndpoint, ProbeConnection, open_probe
from shared.errors import Unreachable
from shared.transport.tls import TlsSettings, build_context


async def fetch_certificate(endpoint: BrokerEndpoint) -> bytes:
    """Return the broker's certificate, DER. Raises Unreachable: no answer, or not valid."""

    def fetch() -> bytes:
        context = build_context(TlsSettings(ca=str(endpoint.trusted)), dates=True)
        with (
            socket.create_connection((endpoint.host, endpoint.port), ANSWER_S) as sock,
            context.wrap_socket(sock, server_hostname=endpoint.host) as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""

    try:
        return await asyncio.to_thread(fetch)
    except OSError as error:
        raise Unreachable(str(error)) from error


async def find_access_faults(
    endpoint: BrokerEndpoint, gateway: Path, site: str, generation: int, *, local: bool = False
) -> list[str]:
    """Return the broker's deviations from its access rules; empty if there are none.

    Args:
        gateway: Folder of the pairs `probe` and `revoked`.
        generation: Generation of the access list that must be active.
        local: Probe the loopback listener, with the pair `own-probe`.
    """
    problems = []
    try:
        async with open_probe(endpoint, gateway / ("own-probe" if local else "probe")) as probe:
            problems += await _find_acl_faults(probe, site, generation)
    except Unreachable as error:
        problems.append(f"it rejects a client with a valid certificate ({error})")
    return problems + await find_open_logins(endpoint, gateway, local=local)


class OpenFault(str):
    """A fault by which a broker admits a client or a message that it must reject."""

    __slots__ = ()


async def find_open_logins(endpoint: BrokerEndpoint, gateway: Path, *, local: bool = False) -> list[str]:
    """List the clients that a broker admits although it must not; `local` is the loopback listener."""
    problems = list[str]()
    pairs = [(gateway / "revoked", "a revoked certificate"), (None, "no certificate")]
    if local:
        pairs.append((gateway / "probe", "a board's certificate, signed by the site CA"))
    for pair, client in pairs:
        with suppress(Unreachable):
            async with open_probe(endpoint, pair):
                problems.append(OpenFault(f"it admits a client with {client}"))
    return problems


async def _find_acl_faults(probe: ProbeConnection, site: str, generation: int) -> list[str]:
    """Return deviations from the access list, by publishing: mosquitto accepts any subscription, but filters."""
    allowed, forbidden = probe_topic(site, generation), forbidden_topic(site)
    problems = []
    if await probe.subscribe(allowed) or await probe.publish(allowed):
        problems.append("it refuses a message that the access list allows")
    elif await probe.receive_topic() != allowed:
        problems.append(OpenFault("it delivers a message that was not requested"))
    if await probe.publish(forbidden) != "Not authorized":
        problems.append(OpenFault("it accepts a message that the access list forbids"))
    return problems
