"""State file of a device in a run: algorithm state and codec memory."""

from __future__ import annotations

from pathlib import Path

from device_agent.exchange import state_files
from shared.codecs.base import Memory
from shared.errors import CorruptFile, TaskFailed
from shared.tensors import file
from shared.tensors.tree import State

_ALGORITHM, _CODEC = "algorithm/", "codec/"


def read(path: Path) -> tuple[State, Memory]:
    """Return the algorithm's state and the codec's memory; empty in a device's first task.

    Raises:
        TaskFailed: The file is damaged; it is set aside, and the next task starts without state.
    """
    if state_files.is_empty_state(path):
        return State(), None
    try:
        both = file.load(path)
    except FileNotFoundError:
        return State(), None
    except CorruptFile as error:
        raise TaskFailed(f"{error}; set aside as {file.set_aside(path).name}, the next task starts afresh") from error
    memory = {key.removeprefix(_CODEC): leaf for key, leaf in both.tree.items() if key.startswith(_CODEC)}
    algorithm_state = {
        key.removeprefix(_ALGORITHM): leaf for key, leaf in both.tree.items() if key.startswith(_ALGORITHM)
    }
    return State(algorithm_state, both.facts), memory or None


def write(path: Path, state: State, memory: Memory) -> None:
    """Write both atomically.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    tree = {_ALGORITHM + key: leaf for key, leaf in state.tree.items()}
    tree |= {_CODEC + key: leaf for key, leaf in (memory or {}).items()}
    file.save(path, State(tree, state.facts))
