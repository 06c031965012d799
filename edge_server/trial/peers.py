"""Connections of a live site to its own broker and its peers' brokers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from edge_server.allocation.coordinator import decide
from edge_server.fleet.membership import Members, devices_of_plan
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.decision import Decision
from edge_server.journal.disk import RETRY_S, retry_write
from edge_server.journal.records import AnyRecord
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.plan.sites import devices_by_site
from edge_server.rounds.neighbours import Neighbours
from edge_server.sites.identity import SiteIdentity, SiteServices
from edge_server.sites.link import Links, SitePresence, encode_plan
from edge_server.sites.neighbours import join_peers, require_peers
from edge_server.sites.overview import write_rounds
from shared.protocol.topics import PEER, PEERS, peer_topic
from shared.runtime.clock import monotonic
from shared.runtime.executor import in_thread
from shared.transport.mqtt import MqttTransport
from shared.transport.session_probe import SERVER_EVERY_S, SessionProbe

MOST_MODEL_BYTES = 8 << 30
"""Absolute limit of a neighbour's model; relative to the local model, a second limit applies."""


def members_of(config: ServerConfig, plan: Plan) -> Members:
    """Return the devices that may take part at a server's site; None for any device that connects.

    Raises:
        ConfigError: The plan has sites, and the server's configuration does not match them.
    """
    if plan.sites:
        require_peers(plan, config.site, [peer.site for peer in config.peer])
        return frozenset(
            devices_by_site(plan.sites, [device.name for device in expand_devices(plan.device)])[config.site]
        )
    return None if config.strangers else devices_of_plan(plan)


@asynccontextmanager
async def connect_peers(
    config: ServerConfig, plan: Plan, run: str, store: SqliteStore
) -> AsyncIterator[Neighbours | None]:
    """Connect to the peers of a plan's site while the block lasts; None if the plan has a single site."""
    if not plan.sites:
        yield None
        return
    async with AsyncExitStack() as stack:
        described, instance = encode_plan(plan), uuid.uuid4().hex
        home = MqttTransport(config.broker, f"{config.site}.{PEERS}", probe=SessionProbe.of_server(config.site))
        remote, presences = {}, dict[str, SitePresence]()
        for peer in config.peer:
            presences[peer.site] = presence = SitePresence(config.site, peer.site, run, instance, described)
            known_as = f"{peer.site}.{PEER}{config.site}"
            probe = SessionProbe(peer_topic(peer.site, config.site, "probe"), every_s=SERVER_EVERY_S)
            remote[peer.site] = MqttTransport(peer.broker, known_as, presence.presence, probe=probe)
        for transport in (home, *remote.values()):
            await stack.enter_async_context(transport.running())

        async def note_rounds(rounds: Mapping[str, int]) -> None:
            await in_thread(write_rounds, store.folder, dict(rounds))

        links = Links(config.site, home, remote, described, presences, note_rounds=note_rounds)
        identity = SiteIdentity(config.site, plan.sites.names, run, store.folder, plan.sites.deadline_s)

        async def keep(record: AnyRecord) -> None:
            await retry_write(in_thread, RETRY_S, store.append, record)

        means = SiteServices(
            keep=keep,
            decide_case=partial(decide, plan.optimizer) if plan.optimizer else lambda _case: Decision(),
            policy=config.link.policy(MOST_MODEL_BYTES),
            clock=monotonic,
            worker=in_thread,
        )
        yield await stack.enter_async_context(join_peers(plan, identity, links, means, store.records()))
