"""Run a rollout over a site's broker, holding the lock of the rollouts' folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge_server.journal.rollouts.file import FOLDER, RolloutPlan
from edge_server.journal.rollouts.state import RolloutState
from edge_server.plan.data_folder import claim_data_folder
from edge_server.plan.server_config import ServerConfig
from edge_server.release.rollout.agents import StoredAgent, find_agent, require_site_folder
from edge_server.release.rollout.engine import RolloutEngine
from edge_server.release.rollout.link import RolloutLink, RolloutOptions
from edge_server.release.rollout.orders import LoadedRollout
from edge_server.release.store import StoredRelease, find_release
from shared.errors import ConfigError, Unreachable
from shared.protocol.packages import AGENT
from shared.runtime.clock import monotonic
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import background, in_thread
from shared.runtime.folder_lock import hold_lock, keep_lock
from shared.transport.mqtt import MqttTransport
from shared.transport.session_probe import SessionProbe

CONNECT_S = 5.0
CLIENT = "_rollout"
"""Suffix of the MQTT client id; the broker admits one process with this id."""
DEFAULTS = RolloutOptions()


async def drive(
    config: ServerConfig, load_rollout: Callable[[], LoadedRollout], options: RolloutOptions = DEFAULTS
) -> RolloutState:
    """Run a rollout until nothing is left to do; return its final state.

    Args:
        load_rollout: Called once the lock is held and the broker is connected.

    Raises:
        ConfigError: Another process runs a rollout, the release is missing, or a newer fieldfleet wrote in the folder.
        CorruptFile: The journal or the release is damaged.
        Unreachable: The broker does not answer.
    """
    folder = Path(config.data_dir) / FOLDER
    claim_data_folder(Path(config.data_dir))
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    broker = msgspec.structs.replace(config.broker, session_expiry_s=0)
    with hold_lock(folder) as lock:
        transport = MqttTransport(broker, f"{config.site}.{CLIENT}", probe=SessionProbe.of_server(config.site))
        async with transport.running(), background(keep_lock(lock)):
            await _await_connection(transport, config)
            rollout = load_rollout()
            link = RolloutLink(
                site=config.site,
                transport=transport,
                clock=monotonic,
                worker=in_thread,
                stored=_find_release(config, rollout.state.plan),
                frame_bytes=config.link.frame_bytes,
                patience_s=config.link.patience_s,
                closed_topics=transport.closed,
            )
            await RolloutEngine(rollout, link, options).run()
            return rollout.state


def _find_release(config: ServerConfig, plan: RolloutPlan) -> StoredRelease | StoredAgent:
    """Find the release of a rollout and require that it has not changed since the rollout began."""
    stored: StoredRelease | StoredAgent
    if plan.name == AGENT:
        stored = find_agent(require_site_folder(config.gateway), plan.release)
    else:
        stored = find_release(Path(config.data_dir), plan.release)
    if stored.sha256 != plan.sha256:
        raise ConfigError(
            f"release {plan.release} has changed since its rollout began (digest {stored.sha256[:12]}, was "
            f"{plan.sha256[:12]}); restore it"
        )
    return stored


async def _await_connection(transport: MqttTransport, config: ServerConfig) -> None:
    try:
        async with asyncio.timeout(CONNECT_S):
            await transport.connected.wait()
    except TimeoutError:
        problem = f"no broker answers at {config.broker.host}:{config.broker.port}"
        remedy = "start it, `systemctl start mosquitto`; `edge-server doctor` says what is wrong with it"
        raise Unreachable(f"{problem}: {remedy}") from None
