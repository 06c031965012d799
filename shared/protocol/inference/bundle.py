"""What of a release a board lacks, and the one payload that brings it: parts, a header, tensors, in a fixed order.

Content decides: a part, or a tensor of the parameters' file, that is on the board under its SHA-256 does not travel.
Both sides lay a bundle out by the manifest alone, so that boards which lack the same share one transmission.
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
"""Of the dtypes of safetensors."""
LENGTH_BYTES = 8
"""Of the header's length, which stands before it and is counted with it here."""
HEADER = ""
"""In place of a digest: the header of the parameters' file, which has none of its own."""


class Lacking(NamedTuple):
    """What lacks.

    Attributes:
        parts: SHA-256 of whole parts.
        tensors: SHA-256 of tensors of the parameters' file.
        header: Whether the header of that file lacks.
    """

    parts: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()
    header: bool = False


class Piece(NamedTuple):
    """A run of bytes of a bundle: the SHA-256 of what it is, or `HEADER`, and its size."""

    sha256: str
    size: int


class Parts(Protocol):
    """What of a manifest says how its bytes are laid out: a release's, or one of what has parts alone."""

    @property
    def reference(self) -> str:
        """Name and version."""

    @property
    def parts(self) -> Mapping[str, ReleasePart]:
        """Its files, by names."""

    @property
    def parameters(self) -> ReleasePart:
        """The file that holds its tensors."""

    @property
    def tensors(self) -> Sequence[ParameterSpec]:
        """In the order of that file; empty where nothing is asked for but whole parts."""


class _Place(msgspec.Struct):
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])


def tensor_bytes(tensor: ParameterSpec) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        WireError: Its dtype is none of safetensors, or an extent is below zero.
    """
    if tensor.dtype not in ITEM_BYTES or any(extent < 0 for extent in tensor.shape):
        raise WireError(f"tensor {tensor.name!r} of {tensor.dtype[:16]} {tensor.shape}", reason="dtype")
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def header_bytes(manifest: Parts) -> int:
    """Return the size of the header of the parameters' file, with its length before it.

    Raises:
        WireError: There is no room for one: the manifest contradicts itself.
    """
    size = manifest.parameters.size - sum(map(tensor_bytes, manifest.tensors))
    if size <= LENGTH_BYTES:
        raise WireError(f"{manifest.reference}: its tensors are larger than their file", reason="shape")
    return size


def tensor_places(header: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Return where each tensor's bytes lie behind the header of a safetensors file, by name.

    Args:
        header: JSON, without its length.

    Raises:
        WireError: It is none.
    """
    try:
        entries = _header.decode(header)
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(one, type=_Place).data_offsets for name, one in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"no header of safetensors: {error}") from error


def lacking_of(manifest: Parts, held: Collection[str], tensors: Collection[str]) -> Lacking:
    """Return what a board lacks.

    Args:
        manifest: Of what it is to have.
        held: SHA-256 of the parts that it has.
        tensors: SHA-256 of the tensors that its releases have.
    """
    parts = {part.sha256 for part in manifest.parts.values()} - set(held)
    needed = {tensor.sha256 for tensor in manifest.tensors}
    some = needed - set(tensors)
    if manifest.parameters.sha256 not in parts or some == needed or len(some) + len(parts) > MOST_LACKING:
        return Lacking(frozenset(parts))
    return Lacking(frozenset(parts - {manifest.parameters.sha256}), frozenset(some), header=True)


def bundle_pieces(manifest: Parts, lacking: Lacking) -> list[Piece]:
    """Return what a bundle consists of, in order.

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


def say_lacking(device: str, deployment: str, lacking: Lacking) -> Lacks:
    """Return the message that asks for what lacks.

    Args:
        deployment: That of the offer.
    """
    return Lacks(
        device=device,
        deployment=deployment,
        parts=_raw(lacking.parts),
        tensors=_raw(lacking.tensors),
        header=lacking.header,
    )


def hear_lacking(message: Lacks) -> Lacking:
    """Return what a board says that it lacks.

    Raises:
        WireError: It is more than anybody asks for.
    """
    if len(message.parts) + len(message.tensors) > MOST_LACKING:
        raise WireError(f"{len(message.parts) + len(message.tensors)} parts are asked for", reason="oversized")
    parts, tensors = (frozenset(one.hex() for one in found) for found in (message.parts, message.tensors))
    return Lacking(parts, tensors, header=message.header or bool(tensors))


def _raw(digests: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(one) for one in sorted(digests))
