"""Lossless codec: every leaf unchanged."""

from __future__ import annotations

from shared.codecs.base import Codec, Coded, Memory, from_blob, outline_blob, to_blob
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.tree import Tree


def _encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
    return Payload(codec="dense", blobs={key: to_blob(leaf) for key, leaf in tree.items()}), memory


def _decode(payload: Payload) -> Coded:
    _require_dense(payload)
    return Coded({key: from_blob(blob) for key, blob in payload.blobs.items()}, {})


def _outline(payload: Payload) -> Tree:
    _require_dense(payload)
    return {key: outline_blob(blob) for key, blob in payload.blobs.items()}


def _require_dense(payload: Payload) -> None:
    if payload.codec != "dense":
        raise WireError(f"payload of codec {payload.codec!r}, expected dense", reason="codec")


def dense() -> Codec:
    """Build the codec; a payload is exactly the bytes of its tensors."""
    return Codec(_encode, _decode, _outline)
