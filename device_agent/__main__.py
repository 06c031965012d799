"""Command line of a device."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
import uuid
from pathlib import Path

from device_agent.compose import compose
from device_agent.config import AgentConfig, load
from device_agent.trainer import TrainerProcess
from shared import heap, log
from shared.errors import ConfigError, Unwritable
from shared.lock import held
from shared.presence import Session
from shared.transport.mqtt import MqttTransport

logger = logging.getLogger(__name__)


def main() -> None:
    """Parse the command line and run; exit code 2 means that the operator must edit something."""
    parser = argparse.ArgumentParser(prog="device-agent", description="The agent of one board.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="connect to the site's broker and serve tasks until told to stop")
    run.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML file, see the README")
    options = parser.parse_args()
    try:
        config = load(options.config)
        log.configure(config.log_level)
        heap.tune()
        asyncio.run(serve(config))
    except (ConfigError, Unwritable) as error:
        sys.stderr.write(f"device-agent: {error}\n")
        sys.exit(2)


async def serve(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT, then leave nothing behind."""
    folder = _writable(Path(config.state_dir))
    session = Session(folder / "session", config.device, config.site, uuid.uuid4().hex)
    trainer = TrainerProcess(
        folder / "trainer.lock",
        config.trainer.idle_s,
        config.trainer.memory_mb,
        config.trainer.threads,
        config.log_level,
    )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with held(folder):
        await _live(config, folder, session, trainer, stopping)
    logger.info("stopped")


async def _live(
    config: AgentConfig, folder: Path, session: Session, trainer: TrainerProcess, stopping: asyncio.Event
) -> None:
    client_id = f"{config.site}.{config.device}"
    async with MqttTransport(config.broker, client_id, session.presence).running() as transport:
        agent = compose(config, folder, transport, trainer)
        living = asyncio.create_task(agent.run(), name="agent")
        stop = asyncio.create_task(stopping.wait(), name="stop")
        try:
            await asyncio.wait({living, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            living.cancel()
            stop.cancel()
            await trainer.close()  # the agent waits for its trainer, which may be deep in a library
            ended = await asyncio.gather(living, return_exceptions=True)
            await trainer.close()  # one that was on its way meanwhile
    if isinstance(ended[0], Exception):
        raise ended[0]


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(f"state_dir {folder}: {error}; name a folder this user may write") from error


if __name__ == "__main__":
    main()
