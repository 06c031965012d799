"""Drive a rollout over a site's broker: the process that offers a release, sends parts, and writes down what comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from edge_server.journal.rollouts.file import FOLDER, AnyRolloutRecord, RolloutPlan
from edge_server.journal.rollouts.state import RolloutState
from edge_server.plan.data_folder import claim_data_folder
from edge_server.plan.server_config import ServerConfig
from edge_server.release.rollout.agents import StoredAgent, find_agent, site_of
from edge_server.release.rollout.engine import RolloutEngine
from edge_server.release.rollout.orders import KnownRollout
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
"""Behind the site's name: the broker lets one process under it in."""


async def drive(
    config: ServerConfig,
    load_rollout: Callable[[], KnownRollout],
    *,
    stays: bool = False,
    wait_s: float = math.inf,
    tell: Callable[[RolloutState, AnyRolloutRecord], None] = lambda _state, _record: None,
    wait: Callable[[str], None] = lambda _why: None,
) -> RolloutState:
    """Drive a rollout until nothing is left to do; return what it came to.

    Args:
        config: The site, its broker, its folders.
        load_rollout: Returns the rollout, once its folder is held and the broker is there.
        stays: Whether to go on for boards that are away.
        wait_s: Seconds for which it waits where nobody is there who could take it; then it stops.
        tell: Is told of every record.
        wait: Is told what is waited for, whenever that changes.

    Raises:
        ConfigError: Another process drives one, its release is gone, or a newer version wrote in the folder of runs.
        CorruptFile: Its journal or its release is damaged.
        Unreachable: There is no broker.
    """
    folder = Path(config.data_dir) / FOLDER
    claim_data_folder(Path(config.data_dir))
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    broker = msgspec.structs.replace(config.broker, session_expiry_s=0)
    with hold_lock(folder) as lock:
        transport = MqttTransport(broker, f"{config.site}.{CLIENT}", probe=SessionProbe.of_server(config.site))
        async with transport.running(), background(keep_lock(lock)):
            await _connected(transport, config)
            journal, state = load_rollout()
            stored = _find_offered(config, state.plan)
            if stored.sha256 != state.plan.sha256:
                raise ConfigError(f"release {state.plan.release} is another one than when its rollout began")
            engine = RolloutEngine(
                *(config.site, transport, monotonic, in_thread, journal, state, stored),
                frame_bytes=config.link.frame_bytes,
                patience_s=config.link.patience_s,
                stays=stays,
                wait_s=wait_s,
                tell=lambda record: tell(state, record),
                wait=wait,
                closed_topics=transport.closed,
            )
            await engine.run()
            return state


def _find_offered(config: ServerConfig, plan: RolloutPlan) -> StoredRelease | StoredAgent:
    if plan.name == AGENT:
        return find_agent(site_of(config.gateway), plan.release)
    return find_release(Path(config.data_dir), plan.release)


async def _connected(transport: MqttTransport, config: ServerConfig) -> None:
    try:
        async with asyncio.timeout(CONNECT_S):
            await transport.connected.wait()
    except TimeoutError:
        problem = f"no broker answers at {config.broker.host}:{config.broker.port}"
        remedy = "start it, `systemctl start mosquitto`; `edge-server doctor` says what is wrong with it"
        raise Unreachable(f"{problem}: {remedy}") from None
