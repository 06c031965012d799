"""A live site among its peers: its connections to their brokers and to its own, for a plan with several sites."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from edge_server.allocation.coordinator import decide
from edge_server.fleet.membership import Members, devices_of_plan
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.decision import Decision
from edge_server.journal.disk import RETRY_S, persist
from edge_server.journal.records import AnyRecord
from edge_server.plan.devices import expanded
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import ServerConfig
from edge_server.plan.sites import devices_by_site
from edge_server.rounds.neighbours import Neighbours
from edge_server.sites.gossip import SiteIdentity
from edge_server.sites.link import Links, SitePresence, encode_plan
from edge_server.sites.neighbours import SiteServices, join_peers, require_peers
from edge_server.sites.overview import write_rounds
from shared.protocol.topics import PEER, PEERS, peer_topic
from shared.runtime.clock import monotonic
from shared.runtime.executor import in_thread
from shared.transport.mqtt import MqttTransport
from shared.transport.session_probe import SERVER_EVERY_S, SessionProbe

MOST_MODEL_BYTES = 8 << 30
"""Of a neighbour's model; what it may have at most beside ours is bounded by ours."""


def members_of(config: ServerConfig, plan: Plan) -> Members:
    """Return the devices that may take part at a server's site; None for whoever connects.

    Raises:
        ConfigError: The plan has sites, and the server's file does not fit them.
    """
    if plan.sites:
        require_peers(plan, config.site, [peer.site for peer in config.peer])
        return frozenset(devices_by_site(plan.sites, [one.name for one in expanded(plan.device)])[config.site])
    return None if config.strangers else devices_of_plan(plan)


@asynccontextmanager
async def among_peers(
    config: ServerConfig, plan: Plan, run: str, store: SqliteStore
) -> AsyncIterator[Neighbours | None]:
    """Connect to the peers of a plan's site while the block lasts; None where the plan has one site alone."""
    if not plan.sites:
        yield None
        return
    async with AsyncExitStack() as stack:
        described, instance = encode_plan(plan), uuid.uuid4().hex
        home = MqttTransport(config.broker, f"{config.site}.{PEERS}", probe=SessionProbe.of_server(config.site))
        away, born = {}, dict[str, SitePresence]()
        for peer in config.peer:
            born[peer.site] = births = SitePresence(config.site, peer.site, run, instance, described)
            known_as = f"{peer.site}.{PEER}{config.site}"
            probe = SessionProbe(peer_topic(peer.site, config.site, "probe"), every_s=SERVER_EVERY_S)
            away[peer.site] = MqttTransport(peer.broker, known_as, births.presence, probe=probe)
        for transport in (home, *away.values()):
            await stack.enter_async_context(transport.running())

        async def note_rounds(rounds: Mapping[str, int]) -> None:
            await in_thread(write_rounds, store.folder, dict(rounds))

        links = Links(config.site, home, away, described, born, note_rounds=note_rounds)
        us = SiteIdentity(config.site, plan.sites.names, run, store.folder, plan.sites.deadline_s)

        async def keep(record: AnyRecord) -> None:
            await persist(in_thread, RETRY_S, store.append, record)

        means = SiteServices(
            keep=keep,
            decide_case=partial(decide, plan.optimizer) if plan.optimizer else lambda _case: Decision(),
            policy=config.link.policy(MOST_MODEL_BYTES),
            clock=monotonic,
            worker=in_thread,
        )
        yield await stack.enter_async_context(join_peers(plan, us, links, means, store.records()))
