"""State files: atomic safetensors with a digest against corruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CorruptFile
from shared.protocol.messages import Scalar
from shared.protocol.payload import digest
from shared.runtime.durable import drop_oldest, explain_disk_errors, sync, unused_name
from shared.tensors.tree import State, Tree, tensor_bytes

ALIGN = 8
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save(
    path: Path,
    state: State,
    spare: Path | None = None,
    *,
    durable: bool = True,
    about: Mapping[str, Scalar] | None = None,
) -> None:
    """Write the state so that `path` holds either its old or its new content after any crash.

    Not written by the library, which copies everything first, rejects leaves that share memory, and leaves a file with
    a random name when it is killed.

    Args:
        spare: An unneeded file to overwrite, if it exists.
        durable: Whether to wait for the disk; if not, only a crash of the process is survived.
        about: Description of the state, readable without its tensors.

    Raises:
        Unwritable: The disk is full or cannot be written; the old content is untouched.
    """
    partial = path.with_name(path.name + ".part")
    with explain_disk_errors(partial):
        try:
            if spare:
                with suppress(FileNotFoundError):
                    spare.replace(partial)
            with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                for part in _parts(state, about):
                    file.write(part)
                file.truncate()
            if durable:
                sync(partial)
        except OSError:
            with suppress(OSError):
                partial.unlink()  # it may fill the disk
            raise
        partial.replace(path)
        if durable:
            sync(path.parent)


def encode(state: State, about: Mapping[str, Scalar] | None = None) -> bytes:
    """Return the file's content; the same state gives the same bytes.

    Args:
        about: Description of the state, as in `save`.
    """
    return b"".join(_parts(state, about))


def _parts(state: State, about: Mapping[str, Scalar] | None) -> Iterator[bytes | memoryview]:
    """Yield the file: u64 length of the header, the header as JSON, the leaves one after the other."""
    facts = json.dumps(state.facts, sort_keys=True)
    metadata = {"facts": facts, "digest": _digest(state.tree, facts).hex()}
    if about:
        description = json.dumps(about, sort_keys=True)
        metadata |= {"about": description, "about_digest": _about_digest(description, metadata["digest"])}
    header: dict[str, object] = {"__metadata__": metadata}
    leaves = dict(sorted(state.tree.items(), key=lambda item: (-item[1].itemsize, item[0])))  # aligns every leaf
    end = 0
    for key, leaf in leaves.items():
        start, end = end, end + leaf.nbytes
        header[key] = {"dtype": DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % ALIGN)
    yield len(data).to_bytes(8, "little") + data
    yield from (tensor_bytes(leaf) for leaf in leaves.values())


def load(path: Path) -> State:
    """Read a state into private memory: its tensors stay valid whatever happens to the file.

    Raises:
        FileNotFoundError: The file does not exist.
        CorruptFile: The file is cut, changed, or was not written by `save`.
    """
    while True:
        status = path.stat()
        try:
            return _read(path)
        except CorruptFile:
            # The server of a live run overwrites spare files in place: a reader in another process that opened one
            # before it was renamed reads a mixture of both states, and has to read the file of that name again.
            if _identity(path.stat()) == _identity(status):
                raise


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _read(path: Path) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned, since the library's tensors are views of a memory map, and `save` overwrites spare files in place.
            tree = {key: file.get_tensor(key).clone() for key in sorted(file.keys())}
        facts, expected = metadata["facts"], metadata["digest"]
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path}: {error}") from error
    if _digest(tree, facts).hex() != expected:
        raise CorruptFile(f"{path}: the digest does not match the content")
    try:
        decoded = json.loads(facts)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: its facts are damaged: {error}") from error
    if not isinstance(decoded, dict):
        raise CorruptFile(f"{path}: its facts are a {type(decoded).__name__}, not a table")
    return State(tree, decoded)


def read_about(path: Path) -> dict[str, Scalar]:
    """Return a file's description, empty without one; the tensors are not verified.

    Raises:
        CorruptFile: It cannot be read, or the description has changed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if "about" not in metadata:
            return {}
        about: dict[str, Scalar] = json.loads(metadata["about"])
        is_valid = metadata["about_digest"] == _about_digest(metadata["about"], metadata["digest"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptFile(f"{path}: {error}") from error
    if not is_valid:
        raise CorruptFile(f"{path}: the digest does not match the description")
    return about


def set_aside(path: Path) -> Path:
    """Rename a corrupt file for inspection, so that it is never read again; return its new path.

    Only the last few of a folder are retained.

    Raises:
        Unwritable: The disk is read-only.
    """
    unused = unused_name(path)
    with explain_disk_errors(path):
        path.rename(unused)
        drop_oldest(path.parent.glob("*.corrupt-*"))
    return unused


def _about_digest(about: str, content: str) -> str:
    return digest([memoryview(f"{about}\n{content}".encode())]).hex()


def _digest(tree: Tree, facts: str) -> bytes:
    """Include the header's content: a corrupt bit there would rename a tensor or change a fact."""
    described = [(key, str(leaf.dtype), list(leaf.shape)) for key, leaf in sorted(tree.items())]
    header = memoryview(json.dumps([facts, described]).encode())
    return digest([header, *(tensor_bytes(tree[key]) for key in sorted(tree))])
