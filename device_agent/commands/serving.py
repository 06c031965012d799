"""Compose what serves models on a board: only imported where its file has `[serve]`, since a waiting agent is small."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from device_agent.config import AgentConfig, ServeConfig
from device_agent.exchange.board_releases import BoardFiles, BoardReleases
from device_agent.exchange.download import Download
from device_agent.exchange.own_model import OwnModelServing
from device_agent.exchange.remote_top import RemoteTop
from device_agent.inference.gates.process import GateProcess
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles, read_folders
from device_agent.inference.settings import InferenceSettings, choose_settings, runs_on_battery
from device_agent.inference.store import BoardStore
from device_agent.profile.load import load_for_board
from shared.runtime.clock import monotonic
from shared.runtime.executor import background, in_thread
from shared.transport.base import Transport


@dataclass(frozen=True)
class BoardServing:
    """What serves models on a board.

    Attributes:
        config: The agent's, with a `[serve]`.
        folder: Of its releases, and of what it receives.
        settings: It was started with.
        own: Has the model of the device's own served; None where networks are cut: upper halves are the release's.
        gates: Try out what is to be served.
        folders: What its operator put there, by the names of the models.
    """

    config: AgentConfig
    folder: Path
    process: InferenceProcess
    settings: InferenceSettings
    store: BoardStore
    own: OwnModelServing | None
    gates: GateProcess
    folders: Mapping[str, ReleaseFiles]

    def running(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs as long as the agent does."""
        return [self.process.run(), *([self.own.run()] if self.own else [])]

    def compose_releases(self, transport: Transport, instance: str) -> BoardReleases:
        """Compose the board's part in rollouts.

        Args:
            transport: Its way to the broker.
            instance: That of the process's Status.
        """
        config = self.config
        download = Download(
            *(transport, config.site, config.device, self.folder, in_thread, monotonic),
            policy=config.link.policy,
            spool="release",
            frames_on="parts",
            wants_on="lacks",
        )
        folders = {name: files.version for name, files in self.folders.items()}
        return BoardReleases(download, self.store, self.process, self.gates, instance, folders)

    @asynccontextmanager
    async def asking_tops(self, transport: Transport, instance: str) -> AsyncIterator[None]:
        """Let the inference process ask the server for upper halves while the block lasts, if its networks are cut.

        Args:
            transport: The way to the broker.
            instance: That of the process's Status.
        """
        if self.settings.cut is None:
            yield
            return
        place, most = (self.config.site, self.config.device, instance), self.config.link.frame_bytes
        remote = RemoteTop(transport, *place, monotonic, most)
        async with background(remote.run()):
            self.process.ask = remote
            try:
                yield
            finally:
                self.process.ask = None


def compose_serving(config: AgentConfig, serve: ServeConfig, folder: Path) -> BoardServing:
    """Compose what serves models on a board.

    Args:
        config: As its file has it.
        serve: Its `[serve]`.

    Raises:
        ConfigError: A folder that it names holds no release, or there is no such firmware profile.
    """
    on_battery = runs_on_battery(Path(config.board.root))
    profile = load_for_board(Path(config.board.root), config.board.profile)
    us = serve, folder, config.log_level, profile.inference
    settings = choose_settings(*us, on_battery=on_battery)
    store = BoardStore(folder)
    files = BoardFiles(store, read_folders(serve.releases))
    process = InferenceProcess(settings, files.find, files.select_served(), folders=files.folders)
    gates, personal = GateProcess(folder, settings, config.data), None
    if not serve.split:
        is_judged = config.data is not None and config.data.holdout > 0 and serve.own_max_drop < 1
        judge = partial(gates.judge_own, max_drop=serve.own_max_drop) if is_judged else None
        personal = OwnModelServing(folder / "state", process, judge)
        gates.own_path = personal.path
    return BoardServing(config, folder, process, settings, store, personal, gates, files.folders)
