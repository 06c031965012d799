"""Payload entries of codecs that send some leaves unchanged and others encoded.

`=name` is an unchanged leaf. `~name` is the outline of an encoded one: its dtype, and its shape behind an extent of 0,
so that it has no bytes. Every other entry is the codec's own. Leaves are in the tree's order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.codecs.dense import DTYPES, from_blob, to_blob
from shared.errors import WireError
from shared.protocol.messages import Blob, Payload
from shared.protocol.payload import MAX_DIMENSIONS
from shared.tensors.tree import Tree, tensor_bytes

_LEAF, _OUTLINE = "=", "~"


@dataclass(frozen=True)
class Outline:
    """A floating leaf without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of values, not yet verified against the payload."""
        return math.prod(self.shape)

    def hollow(self) -> Tensor:
        """Return the leaf without storage.

        Raises:
            WireError: No tensor has such a shape.
        """
        try:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype], device="meta")
        except (RuntimeError, TypeError) as error:  # TypeError: an extent beyond 64 bits
            raise WireError(f"no tensor has the shape {self.shape}", reason="shape") from error

    def fill_leaf(self, flat: Tensor) -> Tensor:
        """Return the leaf from its values, of its dtype and number.

        Raises:
            WireError: No tensor has such a shape.
        """
        return from_blob(Blob(self.dtype, self.shape, tensor_bytes(flat)))


@dataclass(frozen=True)
class Entries:
    """Entries of a payload.

    Attributes:
        leaves: Of the tree, in its order: a tensor that is a view of the payload, or an outline.
        own: Blobs of the codec itself.
    """

    leaves: dict[str, Tensor | Outline] = field(default_factory=dict)
    own: dict[str, Blob] = field(default_factory=dict)

    @property
    def outlines(self) -> dict[str, Outline]:
        """Leaves whose values are encoded separately."""
        return {key: leaf for key, leaf in self.leaves.items() if isinstance(leaf, Outline)}

    def tree(self, filled: Tree) -> Tree:
        """Return all leaves, with `filled` in place of the outlines."""
        return {key: leaf if isinstance(leaf, Tensor) else filled[key] for key, leaf in self.leaves.items()}

    def hollow(self) -> Tree:
        """Return all leaves without storage; raise as `Outline.hollow`."""
        return {
            key: leaf.hollow() if isinstance(leaf, Outline) else leaf.to("meta") for key, leaf in self.leaves.items()
        }


def read_names(option: str) -> frozenset[str]:
    """Return the comma-separated leaf names of a codec's option.

    Raises:
        ValueError: It is not a string.
    """
    if not isinstance(option, str):
        raise ValueError(f"{option!r} is not a list of leaf names; give a string")  # noqa: TRY004 - the value is a plan's
    return frozenset(name.strip() for name in option.split(",")) - {""}


def divisible_leaves(tree: Tree, dims: int, exact: Collection[str] = ()) -> Tree:
    """Return the leaves that a codec may encode: floating, with `dims` dimensions or more.

    Args:
        exact: Names of leaves that always travel unchanged.
    """
    return {
        key: leaf
        for key, leaf in tree.items()
        if key not in exact and leaf.is_floating_point() and dims <= leaf.dim() < MAX_DIMENSIONS
    }


def outline_leaves(tree: Tree, outlined: Collection[str]) -> dict[str, Blob]:
    """Return the entries of a tree's leaves: outlines of the named ones, the others unchanged."""
    blobs = {}
    for key, leaf in tree.items():
        if key in outlined:
            blobs[_OUTLINE + key] = Blob(to_blob(leaf.new_empty(0)).dtype, (0, *leaf.shape), memoryview(b""))
        else:
            blobs[_LEAF + key] = to_blob(leaf)
    return blobs


def read_entries(payload: Payload, codec: str) -> Entries:
    """Read the output of `outline_leaves`, and the codec's own entries.

    Raises:
        WireError: The payload is of another codec, an entry is invalid, or a leaf occurs twice.
    """
    if payload.codec != codec:
        raise WireError(f"payload of codec {payload.codec!r}, expected {codec}", reason="codec")
    entries = Entries()
    for name, blob in payload.blobs.items():
        kind, key = name[:1], name[1:]
        if kind not in {_LEAF, _OUTLINE}:
            entries.own[name] = blob
            continue
        if key in entries.leaves:
            raise WireError(f"tensor {key!r} occurs twice", reason="shape")
        entries.leaves[key] = from_blob(blob) if kind == _LEAF else _outline(key, blob)
    return entries


def _outline(key: str, blob: Blob) -> Outline:
    if blob.dtype not in DTYPES or not DTYPES[blob.dtype].is_floating_point:
        raise WireError(f"tensor {key!r} of {blob.dtype!r} is not floating", reason="dtype")
    if blob.shape[:1] != (0,) or any(extent < 0 for extent in blob.shape):
        raise WireError(f"tensor {key!r} has no outline {blob.shape}", reason="shape")
    return Outline(blob.dtype, blob.shape[1:])


def select_prefix(entries: Entries, prefix: str) -> tuple[dict[str, Blob], Entries]:
    """Return the codec's entries with a prefix, without it, and the other entries."""
    below = {name.removeprefix(prefix): blob for name, blob in entries.own.items() if name.startswith(prefix)}
    others = {name: blob for name, blob in entries.own.items() if not name.startswith(prefix)}
    return below, Entries(entries.leaves, others)


def read_codec_blobs(entries: Entries, names: Mapping[str, tuple[str, int]]) -> dict[str, Tensor]:
    """Return the codec's own blobs as tensors.

    Args:
        names: Required dtype and number of dimensions of each blob.

    Raises:
        WireError: A blob is missing, of another kind, or not expected.
    """
    kinds = {name: (blob.dtype, len(blob.shape)) for name, blob in entries.own.items()}
    if kinds != names:
        raise WireError(f"entries {sorted(kinds)}, expected {sorted(names)}")
    return {name: from_blob(blob) for name, blob in entries.own.items()}
