"""A `State` on disk: safetensors, written whole or not at all, with a digest that a torn or rotten file fails."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shared.durable import sync
from shared.errors import CorruptFile
from shared.payload import digest
from shared.tree import State, Tree, raw


def save(path: Path, state: State) -> None:
    """Write the state so that `path` holds either its old or its new content after any crash.

    Raises:
        OSError: The disk is full or cannot be written; the old content is untouched.
    """
    tree = {key: leaf.detach().contiguous() for key, leaf in state.tree.items()}
    facts = json.dumps(state.facts, sort_keys=True)
    metadata = {"facts": facts, "digest": _digest(tree, facts).hex()}
    partial = path.with_name(path.name + ".part")
    try:
        save_file(tree, partial, metadata=metadata)
    except SafetensorError as error:
        raise OSError(f"{partial}: {error}") from error
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def load(path: Path) -> State:
    """Read a state.

    Raises:
        FileNotFoundError: There is none.
        CorruptFile: The file is cut, changed, or not one that `save` wrote.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tree = {key: file.get_tensor(key) for key in sorted(file.keys())}
        facts, expected = metadata["facts"], metadata["digest"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path}: {error}") from error
    if _digest(tree, facts).hex() != expected:
        raise CorruptFile(f"{path}: digest does not hold")
    return State(tree, json.loads(facts))


def set_aside(path: Path) -> Path:
    """Rename a corrupt file so that it can be looked at and is never read again; return its new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _digest(tree: Tree, facts: str) -> bytes:
    """Cover the header's content too: a bit that rots there would rename a tensor or change a fact."""
    described = [(key, str(leaf.dtype), list(leaf.shape)) for key, leaf in sorted(tree.items())]
    header = memoryview(json.dumps([facts, described]).encode())
    return digest([header, *(raw(tree[key]) for key in sorted(tree))])
