"""Versions of projects that a board's releases were trained with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from device_agent.config import AgentConfig
from device_agent.inference.store import BoardStore
from device_agent.projects.environment import export_plugins
from shared.errors import ConfigError, CorruptFile
from shared.protocol.messages import ProjectVersion
from shared.protocol.update import UpdateRecord


def export_board_plugins(config: AgentConfig) -> None:
    """Pass the operator's lists to child processes; projects in the versions that served releases name."""
    folder, trainer = Path(config.state_dir), config.trainer
    served = served_projects(BoardStore(folder)) if config.serve and trainer.projects else {}
    export_plugins(trainer.plugin_entries, trainer.projects, folder, served)


def served_projects(store: BoardStore) -> dict[str, str]:
    """Return the versions by project that served releases name; of several, that of the last update."""
    records = sorted(_read_records(store), key=lambda record: record.since)
    projects = (read_project(store, record.name, record.serving) for record in records)
    return {project.name: project.version for project in projects if project}


def retained_projects(store: BoardStore) -> set[ProjectVersion]:
    """Return the versions that releases name to which the board may return."""
    return {
        project
        for record in _read_records(store)
        for version in record.retained_versions
        if (project := read_project(store, record.name, version))
    }


def read_project(store: BoardStore, name: str, version: int) -> ProjectVersion | None:
    """Return the project of a stored release; None without one, or if the manifest cannot be read."""
    try:
        return (store.manifest(name, version).source.project or None) if version else None
    except (ConfigError, CorruptFile):  # the swap reports it
        return None


def _read_records(store: BoardStore) -> Iterator[UpdateRecord]:
    for name in store.names():
        try:
            yield store.record(name)
        except (ConfigError, CorruptFile):
            continue
