"""Select and replace the model releases that a board serves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from device_agent.exchange.download import Download
from device_agent.exchange.release_offers import ReleaseOffers
from device_agent.inference.candidate import Gates, SwapContext
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.served_model import Serving
from device_agent.inference.store import BoardStore
from device_agent.inference.swap import Swaps
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import write_manifest
from shared.runtime.distributions import installed_version
from shared.runtime.executor import background

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoardFiles:
    """Release files of a board, from its store or from folders of its operator.

    Attributes:
        folders: Operator's releases by model name.
    """

    store: BoardStore
    folders: Mapping[str, ReleaseFiles]

    def find(self, name: str, number: int) -> ReleaseFiles:
        """Return the files of a version.

        Raises:
            ConfigError: The board has no such version.
            CorruptFile: A part is missing or the manifest is damaged.
        """
        if number in self.store.versions(name):
            return self._read_stored(name, number)
        files = self.folders.get(name)
        if files is None or files.version != number:
            raise ConfigError(f"{name}/{number} is neither in the store nor in a folder of serve.releases")
        return files

    def _read_stored(self, name: str, number: int) -> ReleaseFiles:
        manifest = self.store.manifest(name, number)
        if missing := self.store.parts.missing(manifest):
            raise CorruptFile(f"{manifest.reference}: {', '.join(sorted(missing))} missing on this board")
        parts = {part_name: self.store.parts.path(part.sha256) for part_name, part in manifest.parts.items()}
        return ReleaseFiles(name, number, write_manifest(manifest), parts)

    def select_served(self) -> dict[str, ReleaseFiles]:
        """Return the releases to serve at the start: from rollouts, else from folders."""
        releases = dict(self.folders)
        for name in self.store.names():
            with suppress(ConfigError, CorruptFile):  # the swap reports it
                record = self.store.record(name)
                for number in (record.serving, record.committed, record.previous):
                    if number and (files := self._find_complete(name, number)):
                        releases[name] = files
                        break
        return releases

    def _find_complete(self, name: str, number: int) -> ReleaseFiles | None:
        try:
            return self._read_stored(name, number)
        except (ConfigError, CorruptFile) as error:
            log.warning("not served: %s", error)
            return None


async def run_releases(
    download: Download, store: BoardStore, serving: Serving, gates: Gates, instance: str, folders: Mapping[str, int]
) -> None:
    """Take part in rollouts of models until cancelled.

    Args:
        download: Fetches parts.
        gates: Checks before a release is activated.
        instance: Instance of this process's Status.
        folders: Versions in operator folders, by model name.
    """

    def has_folder(name: str, version: int) -> bool:
        return folders.get(name, version) != version

    offers = ReleaseOffers(download, store, None, runtime_version(), instance, serving, folders)
    offers.swap = swaps = Swaps(SwapContext(store, serving, gates, offers.announce, has_folder=has_folder))
    async with background(swaps.run()):
        await offers.run()


def runtime_version() -> str:
    """Return the installed version of ONNX Runtime without importing it; empty if there is none."""
    return installed_version("onnxruntime", "onnxruntime-gpu")
