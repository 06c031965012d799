"""Layout of a release bundle: missing parts and tensors in one payload.

Addressing is by content: a part or tensor that the board already has under its SHA-256 is not sent. Both sides derive
the layout from the manifest alone, so that boards which lack the same share one transmission.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from shared.errors import WireError
from shared.protocol.inference.release import ParameterSpec, ReleasePart
from shared.protocol.inference.rollout import MOST_LACKING, Lacks

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Sizes of the dtypes of safetensors."""
LENGTH_BYTES = 8
"""Size of the header's length prefix, which counts as part of the header here."""
HEADER = ""
"""In place of a digest: the header of the parameters' file, which has no digest."""


class Lacking(NamedTuple):
    """Missing content of a release.

    Attributes:
        parts: SHA-256 of whole parts.
        tensors: SHA-256 of tensors of the parameters' file.
        header: Whether the header of that file is missing.
    """

    parts: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    header: bool = False


class Piece(NamedTuple):
    """A run of bytes of a bundle: the SHA-256 of its content, or `HEADER`, and its size."""

    sha256: str
    size: int


class Parts(Protocol):
    """The part of a manifest that determines the layout, of a release or of anything that has only whole parts."""

    @property
    def reference(self) -> str:
        """Name and version, for errors."""

    @property
    def parts(self) -> Mapping[str, ReleasePart]:
        """Files by name."""

    @property
    def parameters(self) -> ReleasePart:
        """The file that holds the tensors."""

    @property
    def tensors(self) -> Sequence[ParameterSpec]:
        """Tensors in the order of that file; empty if only whole parts are requested."""


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def tensor_bytes(tensor: ParameterSpec) -> int:
    """Compute the size of a tensor in bytes.

    Raises:
        WireError: Its dtype is unknown to safetensors, or an extent is negative.
    """
    if tensor.dtype not in ITEM_BYTES or any(extent < 0 for extent in tensor.shape):
        raise WireError(f"tensor {tensor.name!r} of {tensor.dtype[:16]} {tensor.shape}", reason="dtype")
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def header_bytes(manifest: Parts) -> int:
    """Compute the size of the header of the parameters' file, including its length prefix.

    Raises:
        WireError: The manifest leaves no room for one.
    """
    size = manifest.parameters.size - sum(map(tensor_bytes, manifest.tensors))
    if size <= LENGTH_BYTES:
        raise WireError(f"{manifest.reference}: its tensors are larger than their file", reason="shape")
    return size


def tensor_places(header: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Read the offsets of each tensor's bytes after the header of a safetensors file, by name.

    Args:
        header: JSON, without its length.

    Raises:
        WireError: It is malformed.
    """
    try:
        entries = _header.decode(header)
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(entry, type=_Place).data_offsets for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a header of safetensors: {error}") from error


def compute_lacking(manifest: Parts, stored: Collection[str], tensors: Collection[str]) -> Lacking:
    """Compute what a board lacks of a release.

    Args:
        stored: SHA-256 of the parts on the board.
        tensors: SHA-256 of the tensors in the board's releases.
    """
    parts = {part.sha256 for part in manifest.parts.values()} - set(stored)
    needed = {tensor.sha256 for tensor in manifest.tensors}
    some = needed - set(tensors)
    if manifest.parameters.sha256 not in parts or some == needed or len(some) + len(parts) > MOST_LACKING:
        return Lacking(frozenset(parts))
    return Lacking(frozenset(parts - {manifest.parameters.sha256}), frozenset(some), header=True)


def bundle_pieces(manifest: Parts, lacking: Lacking) -> list[Piece]:
    """List the pieces of a bundle, in order.

    Raises:
        WireError: The release has no such part or tensor.
    """
    parts = {part.sha256: part.size for part in manifest.parts.values()}
    tensors = {tensor.sha256: tensor_bytes(tensor) for tensor in manifest.tensors}
    has_no_header = lacking.header and not tensors
    if has_no_header or not (lacking.parts <= parts.keys() and lacking.tensors <= tensors.keys()):
        raise WireError(f"{manifest.reference} has no such part", reason="unexpected")
    pieces = [Piece(sha256, size) for sha256, size in parts.items() if sha256 in lacking.parts]
    pieces += [Piece(HEADER, header_bytes(manifest))] * lacking.header
    return [*pieces, *(Piece(sha256, size) for sha256, size in tensors.items() if sha256 in lacking.tensors)]


def build_lacks(device: str, deployment: str, lacking: Lacking) -> Lacks:
    """Build the message that requests missing content.

    Args:
        deployment: Name from the offer.
    """
    return Lacks(
        device=device,
        deployment=deployment,
        parts=_to_bytes(lacking.parts),
        tensors=_to_bytes(lacking.tensors),
        header=lacking.header,
    )


def parse_lacks(message: Lacks) -> Lacking:
    """Parse a board's request for missing content.

    Raises:
        WireError: It requests too many parts.
    """
    if len(message.parts) + len(message.tensors) > MOST_LACKING:
        raise WireError(f"{len(message.parts) + len(message.tensors)} parts are requested", reason="oversized")
    parts, tensors = (frozenset(digest.hex() for digest in digests) for digests in (message.parts, message.tensors))
    return Lacking(parts, tensors, header=message.header or bool(tensors))


def _to_bytes(digests: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(digest) for digest in sorted(digests))
