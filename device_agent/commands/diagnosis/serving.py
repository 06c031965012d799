"""Serving state of this machine for `device-agent doctor`; judged by `serving_checks`."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from device_agent.commands.diagnosis import serving_checks as checks
from device_agent.commands.diagnosis.checks import AVAILABLE_MEMORY, Check
from device_agent.config import AgentConfig, ServeConfig
from device_agent.hardware.tools import LIVE_ROOT, run_module
from device_agent.inference.release_folder import ReleaseFiles, read_folder, require_new
from device_agent.inference.settings import choose_settings, runs_on_battery
from device_agent.inference.store import BoardStore
from device_agent.probes import memory, runtime
from device_agent.profile.schema import Profile
from device_agent.trainer.processor_share import choose_share
from shared.errors import ConfigError, CorruptFile, NoData
from shared.protocol.inference.release import ReleaseManifest, read_manifest
from shared.protocol.update import UpdateRecord
from shared.runtime.clock import monotonic
from shared.runtime.file_digest import file_sha256

PROVIDERS_S = 60.0
LOOPBACK = "127.0.0.1"


def examine_serving(config: AgentConfig, profile: Profile, *, agent_runs: bool) -> Iterator[Check]:
    """Examine everything that serving models needs.

    Args:
        agent_runs: Whether an agent is running with this folder.
    """
    serve, folder = config.serve, Path(config.state_dir)
    assert serve
    providers = _list_providers()
    yield checks.check_runtime(
        runtime.find_version("onnxruntime"), providers, serve.provider or profile.inference.provider
    )
    refusal, is_taken = _probe_port(serve.port)
    yield checks.check_port(serve.port, refusal, is_taken=is_taken, agent_runs=agent_runs)
    releases = ReleaseInventory(serve, folder)
    yield checks.check_releases(releases.folders, releases.records, releases.damages, releases.refusals)
    try:
        battery = runs_on_battery(Path(config.board.root))
        settings = choose_settings(serve, folder, config.log_level, profile.inference, on_battery=battery)
    except ConfigError as error:
        yield Check(name="serve: settings", state="bad", finding=str(error), remedy="name a shorter path in [serve]")
        return
    yield checks.check_serving_memory(settings.memory_bytes, releases.weight_bytes, _read_available_memory(profile))
    configured = {"threads": serve.threads is not None, "arena": serve.arena != "auto"}
    present = os.sched_getaffinity(0)
    share = choose_share(config.trainer, profile, present, serves=True) if config.data else None
    yield checks.describe_settings(settings, configured, profile, share)


def _list_providers() -> list[str]:
    """Return the execution providers of ONNX Runtime; empty if it does not run."""
    ended = run_module("device_agent.hardware.execution_providers", timeout_s=PROVIDERS_S)
    return ended.stdout.splitlines()[-1].split() if ended.exit_code == 0 and ended.stdout.strip() else []


def _probe_port(port: int) -> tuple[str, bool]:
    """Return why a port cannot be bound, empty if it can, and whether another process listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the inference server does
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            return error.strerror or str(error), error.errno == errno.EADDRINUSE
    return "", False


def _read_available_memory(profile: Profile) -> float | None:
    try:
        reading = memory.read(LIVE_ROOT, profile, monotonic()).readings.get(AVAILABLE_MEMORY)
    except NoData:
        return None
    return reading.value if reading else None


class ReleaseInventory:
    """Releases of a board, from configured folders and from rollouts.

    Attributes:
        folders: Versions of the configured folders, by model name.
        damages: Parts that cannot be served, with the reason.
        refusals: Folders that prevent the agent's start, with the reason.
        weight_bytes: Size of the largest model.
    """

    def __init__(self, serve: ServeConfig, state_dir: Path) -> None:
        self.folders, self.records, self.damages = dict[str, int](), list[UpdateRecord](), list[str]()
        self.refusals, self.weight_bytes = list[str](), 0
        for folder in serve.releases:
            try:
                self._add_folder(read_folder(Path(folder)))
            except (ConfigError, CorruptFile) as error:
                self.refusals.append(str(error))
        store = BoardStore(state_dir)
        try:
            for name in store.names():
                self._add_record(store, store.record(name))
        except (ConfigError, CorruptFile, OSError) as error:
            self.damages.append(str(error))

    def _add_folder(self, files: ReleaseFiles) -> None:
        manifest = read_manifest(files.manifest, files.name)
        self._track_weight(manifest)
        require_new(files.name, self.folders)
        self.folders[files.name] = files.version
        for name, path in files.parts.items():
            if fault := _find_fault(path, manifest.parts[name].sha256):
                self.damages.append(f"{manifest.reference}: {name} {fault}")

    def _add_record(self, store: BoardStore, record: UpdateRecord) -> None:
        self.records.append(record)
        for version in sorted({record.serving, record.committed} - {0}):
            manifest = store.manifest(record.name, version)
            self._track_weight(manifest)
            missing = store.parts.missing(manifest)
            if missing:
                self.damages.append(f"{manifest.reference}: {', '.join(sorted(missing))} missing on this board")
            for name in sorted(manifest.parts.keys() - missing.keys()):
                digest = manifest.parts[name].sha256
                if fault := _find_fault(store.parts.path(digest), digest):
                    self.damages.append(f"{manifest.reference}: {name} {fault}")

    def _track_weight(self, manifest: ReleaseManifest) -> None:
        self.weight_bytes = max(self.weight_bytes, manifest.parameters.size)


def _find_fault(path: Path, digest: str) -> str:
    """Return why a part of a release cannot be opened; empty if it is intact."""
    try:
        return "" if file_sha256(path) == digest else "is damaged: its digest does not match"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
