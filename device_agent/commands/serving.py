"""Build the model-serving part of the agent; imported only with `[serve]`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from device_agent.agent.build import compose_bundle_download
from device_agent.config import AgentConfig, ServeConfig
from device_agent.exchange.board_releases import BoardFiles, run_releases
from device_agent.exchange.own_model import OwnModelServing
from device_agent.exchange.remote_top import RemoteTop
from device_agent.inference.gates.process import GateProcess
from device_agent.inference.process import InferenceProcess
from device_agent.inference.release_folder import ReleaseFiles, read_folders
from device_agent.inference.release_projects import retained_projects, served_projects
from device_agent.inference.settings import InferenceSettings, choose_settings, runs_on_battery
from device_agent.inference.store import BoardStore
from device_agent.profile.load import load_for_board
from device_agent.projects.provide import Projects
from shared.runtime.clock import monotonic
from shared.runtime.executor import background
from shared.transport.base import Transport


@dataclass(frozen=True)
class BoardServing:
    """Components that serve models on a board.

    Attributes:
        folder: Folder of releases and downloads.
        own: Serves the personal model; None for split serving, whose upper halves are the release's.
        gates: Checks before a release is activated.
        folders: The operator's releases by model name.
        projects: Projects in the versions that releases name.
    """

    config: AgentConfig
    folder: Path
    process: InferenceProcess
    settings: InferenceSettings
    store: BoardStore
    own: OwnModelServing | None
    gates: GateProcess
    folders: Mapping[str, ReleaseFiles]
    projects: Projects

    def coroutines(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines to run as long as the agent."""
        return [self.process.run(), *([self.own.run()] if self.own else [])]

    def run_releases(self, transport: Transport, instance: str) -> Coroutine[Any, Any, None]:
        """Return the board's part in rollouts of models, to be awaited.

        Args:
            instance: Instance of the process's Status.
        """
        download = compose_bundle_download(self.config, self.folder, transport, "release")
        folders = {name: files.version for name, files in self.folders.items()}
        return run_releases(download, self.store, self.process, self.gates, instance, folders)

    @asynccontextmanager
    async def connect_tops(self, transport: Transport, instance: str) -> AsyncIterator[None]:
        """Connect split networks to their upper halves on the server while the block runs.

        Args:
            instance: Instance of the process's Status.
        """
        if self.settings.cut is None:
            yield
            return
        config = self.config
        remote = RemoteTop(transport, config.site, config.device, instance, monotonic, config.link.frame_bytes)
        async with background(remote.run()):
            self.process.tops.ask = remote
            try:
                yield
            finally:
                self.process.tops.ask = None


def compose_serving(config: AgentConfig, serve: ServeConfig, folder: Path) -> BoardServing:
    """Compose model serving on a board; `serve` is the configuration's `[serve]`.

    Raises:
        ConfigError: A configured folder has no release, or the firmware profile is unknown.
    """
    on_battery = runs_on_battery(Path(config.board.root))
    profile = load_for_board(Path(config.board.root), config.board.profile)
    settings = choose_settings(serve, folder, config.log_level, profile.inference, on_battery=on_battery)
    store = BoardStore(folder)
    files = BoardFiles(store, read_folders(serve.releases))
    process = InferenceProcess(settings, files.find, files.select_served(), folders=files.folders)
    projects = Projects(
        folder,
        config.trainer.projects,
        config.data.source if config.data else "",
        served=partial(served_projects, store),
        retained=partial(retained_projects, store),
    )
    gates, personal = GateProcess(folder, settings, config.data, projects=projects), None
    if not serve.split:
        is_judged = config.data is not None and config.data.holdout > 0 and serve.own_max_drop < 1
        judge = partial(gates.judge_own, max_drop=serve.own_max_drop) if is_judged else None
        personal = OwnModelServing(folder / "state", process, judge)
        gates.own_path = personal.path
    return BoardServing(config, folder, process, settings, store, personal, gates, files.folders, projects)
