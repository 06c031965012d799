"""Missing parts of a release: find them, unpack received bundles.

A parameter file that lacks only some tensors is assembled from the received header and tensors and from those in files
of other releases on the board. It is accepted only with the digest that its manifest names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from device_agent.inference.store import BoardStore
from shared.errors import ConfigError, CorruptFile, WireError
from shared.protocol.inference.bundle import (
    HEADER,
    LENGTH_BYTES,
    Lacking,
    bundle_pieces,
    compute_lacking,
    header_bytes,
    tensor_bytes,
    tensor_places,
)
from shared.protocol.inference.release import ReleaseManifest
from shared.runtime.durable import explain_disk_errors

COPY_BYTES = 1 << 20

NEWEST_FORMATS: Mapping[tuple[int, int], tuple[int, int]] = {
    (1, 17): (20, 9),
    (1, 18): (21, 10),
    (1, 19): (21, 10),
    (1, 20): (21, 10),
}
"""Newest opset and IR version that each ONNX Runtime reads; for others, loading the model decides."""


class _ByteRange(NamedTuple):
    """Range of bytes in a file."""

    path: Path
    offset: int
    size: int


@dataclass
class MissingParts:
    """Parts of an offered release that the board lacks.

    Attributes:
        as_one_file: Fetch the parameter file as a whole, since the local tensors turned out damaged.
    """

    board: BoardStore
    manifest: ReleaseManifest
    as_one_file: bool = False

    @property
    def label(self) -> str:
        return self.manifest.reference

    def find_lacking(self) -> Lacking:
        missing = {part.sha256 for part in self.board.parts.missing(self.manifest).values()}
        present = {part.sha256 for part in self.manifest.parts.values()} - missing
        is_whole = self.as_one_file or self.manifest.parameters.sha256 in present
        tensors = {} if is_whole else _find_local_tensors(self.board, self.manifest)
        return compute_lacking(self.manifest, present, tensors.keys())

    def bundle_size(self, lacking: Lacking) -> int:
        return sum(piece.size for piece in bundle_pieces(self.manifest, lacking))

    def store(self, lacking: Lacking, bundle: Path) -> None:
        self.as_one_file = True  # unless this succeeds
        offset, received, manifest = 0, dict[str, _ByteRange](), self.manifest
        for piece in bundle_pieces(manifest, lacking):
            received[piece.sha256] = _ByteRange(bundle, offset, piece.size)
            offset += piece.size
        if bundle.stat().st_size != offset:
            raise CorruptFile(f"{bundle}: {bundle.stat().st_size} bytes, expected {offset}")
        for digest in sorted(lacking.parts):
            _assemble_part(self.board, digest, [received[digest]], bundle)
        if lacking.header:
            ranges = _parameter_ranges(self.board, manifest, received)
            _assemble_part(self.board, manifest.parameters.sha256, ranges, bundle)
        bundle.unlink()
        self.as_one_file = False


def _find_local_tensors(store: BoardStore, manifest: ReleaseManifest) -> dict[str, _ByteRange]:
    """Return the ranges of a release's tensors in files of other releases, by digest."""
    digests, ranges = {tensor.sha256 for tensor in manifest.tensors}, dict[str, _ByteRange]()
    for other in _local_releases(store):
        if other.parameters.sha256 == manifest.parameters.sha256 or digests <= ranges.keys():
            continue
        alike = [tensor for tensor in other.tensors if tensor.sha256 in digests]
        if not alike or other.parameters.sha256 in {part.sha256 for part in store.parts.missing(other).values()}:
            continue
        path = store.parts.path(other.parameters.sha256)
        with suppress(OSError, WireError):  # unreadable tensors are fetched
            begin = header_bytes(other)
            with path.open("rb") as file:
                places = tensor_places(file.read(begin)[LENGTH_BYTES:])
            for tensor in alike:
                ranges[tensor.sha256] = _ByteRange(path, begin + places[tensor.name][0], tensor_bytes(tensor))
    return ranges


def _local_releases(store: BoardStore) -> Iterator[ReleaseManifest]:
    for name in store.names():
        for version in reversed(store.versions(name)):
            with suppress(ConfigError, CorruptFile):
                yield store.manifest(name, version)


def _parameter_ranges(
    store: BoardStore, manifest: ReleaseManifest, received: dict[str, _ByteRange]
) -> Sequence[_ByteRange]:
    """Return the byte ranges of a parameter file, in file order."""
    header = received[HEADER]
    with header.path.open("rb") as file:
        file.seek(header.offset + LENGTH_BYTES)
        offsets = tensor_places(file.read(header.size - LENGTH_BYTES))
    sources = _find_local_tensors(store, manifest) | received
    digests = {tensor.name: tensor.sha256 for tensor in manifest.tensors}
    try:
        names = sorted(offsets, key=lambda name: offsets[name])
        return [header, *(sources[digests[name]] for name in names)]
    except KeyError as error:
        raise CorruptFile(f"{manifest.reference}: tensor {error} is neither on the board nor in the bundle") from error


def _assemble_part(store: BoardStore, digest: str, places: Sequence[_ByteRange], bundle: Path) -> None:
    """Write a part from its byte ranges and add it to the store."""
    partial = bundle.with_name(f"{bundle.name}.part")
    try:
        with explain_disk_errors(partial), partial.open("wb") as out:
            for place in places:
                _copy(place, out.fileno())
        store.parts.adopt(digest, partial)
    finally:
        partial.unlink(missing_ok=True)


def _copy(place: _ByteRange, out: int) -> None:
    with place.path.open("rb") as file:
        file.seek(place.offset)
        remaining = place.size
        while remaining and (data := file.read(min(remaining, COPY_BYTES))):
            remaining -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(out, view) :]
    if remaining:
        raise CorruptFile(f"{place.path} ends {remaining} bytes too early")


def runtime_refusal(manifest: ReleaseManifest, runtime: str) -> str:
    """Return why the board's ONNX Runtime cannot read a release, before anything is fetched; empty if it may.

    Args:
        runtime: Version of ONNX Runtime; empty if unknown.
    """
    major, _, tail = runtime.partition(".")
    minor = tail.partition(".")[0]
    newest = NEWEST_FORMATS.get((int(major), int(minor))) if major.isdecimal() and minor.isdecimal() else None
    if newest is None or (manifest.opset <= newest[0] and manifest.ir_version <= newest[1]):
        return ""
    has = f"opset {newest[0]} and IR version {newest[1]}"
    needs = f"opset {manifest.opset} and IR version {manifest.ir_version}"
    return f"runtime: ONNX Runtime {runtime} reads up to {has}, {manifest.reference} needs {needs}; update it"
