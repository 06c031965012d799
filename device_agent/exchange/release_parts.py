"""Parts of releases on a board: which of them lack, and how a bundle that came is taken apart into them.

A parameters' file that only partly lacks is put together again: the header and the tensors that came, and those that
files of other releases on the board have. It counts only under the digest that its manifest says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

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
from shared.protocol.inference.release import ReleaseManifest, ReleasePart
from shared.protocol.update import UpdateRecord
from shared.runtime.durable import explain_disk_errors

COPY_BYTES = 1 << 20

NEWEST_FORMATS: Mapping[tuple[int, int], tuple[int, int]] = {
    (1, 17): (20, 9),
    (1, 18): (21, 10),
    (1, 19): (21, 10),
    (1, 20): (21, 10),
}
"""Opset and IR version that releases of ONNX Runtime read at most; of others a board finds out when it loads one."""


class PartStore(Protocol):
    """What a board keeps of releases."""

    def names(self) -> list[str]:
        """Return the names of which there is a record."""

    def record(self, name: str) -> UpdateRecord:
        """Return what the board is at with a name."""

    def versions(self, name: str) -> list[int]:
        """Return the versions of a name whose manifests lie here."""

    def manifest(self, name: str, version: int) -> ReleaseManifest:
        """Return the manifest of a version."""

    def missing(self, manifest: ReleaseManifest) -> dict[str, ReleasePart]:
        """Return the parts of a release that are not here."""

    def path(self, digest: str) -> Path:
        """Return where a part lies, or would."""

    def keep_ahead(self, manifest: bytes) -> None:
        """Keep the parts of a release that will be offered."""

    def ahead(self) -> ReleaseManifest | None:
        """Return the manifest of a release that will be offered."""

    def forget_ahead(self) -> None:
        """Keep nothing for a release that was to be offered."""

    def tidy(self) -> None:
        """Remove what nothing wants kept."""

    def adopt(self, digest: str, path: Path) -> None:
        """Take a file as a part, if it has that digest."""


class _Place(NamedTuple):
    """Where bytes lie."""

    path: Path
    offset: int
    size: int


def find_lacking(store: PartStore, manifest: ReleaseManifest, *, whole: bool = False) -> Lacking:
    """Return what of a release is not on the board.

    Args:
        whole: Whether the parameters are wanted in one piece, since what is here of them turned out damaged.
    """
    missing = {part.sha256 for part in store.missing(manifest).values()}
    held = {part.sha256 for part in manifest.parts.values()} - missing
    tensors = {} if whole or manifest.parameters.sha256 in held else _tensors_here(store, manifest)
    return compute_lacking(manifest, held, tensors.keys())


def _tensors_here(store: PartStore, manifest: ReleaseManifest) -> dict[str, _Place]:
    """Return where tensors of a release lie in files of others, by digest."""
    wanted, found = {tensor.sha256 for tensor in manifest.tensors}, dict[str, _Place]()
    for other in _releases_here(store):
        if other.parameters.sha256 == manifest.parameters.sha256 or wanted <= found.keys():
            continue
        alike = [tensor for tensor in other.tensors if tensor.sha256 in wanted]
        if not alike or other.parameters.sha256 in {part.sha256 for part in store.missing(other).values()}:
            continue
        path = store.path(other.parameters.sha256)
        with suppress(OSError, WireError):  # what cannot be read is fetched
            begin = header_bytes(other)
            with path.open("rb") as file:
                places = tensor_places(file.read(begin)[LENGTH_BYTES:])
            for tensor in alike:
                found[tensor.sha256] = _Place(path, begin + places[tensor.name][0], tensor_bytes(tensor))
    return found


def _releases_here(store: PartStore) -> Iterator[ReleaseManifest]:
    for name in store.names():
        for version in reversed(store.versions(name)):
            with suppress(ConfigError, CorruptFile):
                yield store.manifest(name, version)


def take_bundle(store: PartStore, manifest: ReleaseManifest, lacking: Lacking, bundle: Path) -> None:
    """Put what came into the store; of the bundle nothing is left. Not for the event loop.

    Args:
        lacking: What was asked for.

    Raises:
        CorruptFile: A part has not its digest; others may be in the store.
        WireError: The manifest contradicts itself.
        Unwritable: The disk takes nothing more.
    """
    offset, came = 0, dict[str, _Place]()
    for piece in bundle_pieces(manifest, lacking):
        came[piece.sha256] = _Place(bundle, offset, piece.size)
        offset += piece.size
    if bundle.stat().st_size != offset:
        raise CorruptFile(f"{bundle}: {bundle.stat().st_size} bytes, and {offset} were asked for")
    for digest in sorted(lacking.parts):
        _build(store, digest, [came[digest]], bundle)
    if lacking.header:
        _build(store, manifest.parameters.sha256, _parameter_places(store, manifest, came), bundle)
    bundle.unlink()


def _parameter_places(store: PartStore, manifest: ReleaseManifest, came: dict[str, _Place]) -> Sequence[_Place]:
    """Return where the bytes of a parameters' file lie, in its order."""
    header = came[HEADER]
    with header.path.open("rb") as file:
        file.seek(header.offset + LENGTH_BYTES)
        offsets = tensor_places(file.read(header.size - LENGTH_BYTES))
    here = _tensors_here(store, manifest) | came
    known = {tensor.name: tensor.sha256 for tensor in manifest.tensors}
    try:
        names = sorted(offsets, key=lambda name: offsets[name])
        return [header, *(here[known[name]] for name in names)]
    except KeyError as error:
        raise CorruptFile(f"{manifest.reference}: tensor {error} is neither here nor came") from error


def _build(store: PartStore, digest: str, places: Sequence[_Place], bundle: Path) -> None:
    """Write a part from where its bytes lie, and have the store take it."""
    partial = bundle.with_name(f"{bundle.name}.part")
    try:
        with explain_disk_errors(partial), partial.open("wb") as out:
            for place in places:
                _copy(place, out.fileno())
        store.adopt(digest, partial)
    finally:
        partial.unlink(missing_ok=True)


def _copy(place: _Place, out: int) -> None:
    with place.path.open("rb") as file:
        file.seek(place.offset)
        left = place.size
        while left and (data := file.read(min(left, COPY_BYTES))):
            left -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(out, view) :]
    if left:
        raise CorruptFile(f"{place.path} ends {left} bytes too early")


def runtime_refusal(manifest: ReleaseManifest, runtime: str) -> str:
    """Return why a board's ONNX Runtime cannot read a release, before any of it is fetched; empty where it may.

    Args:
        runtime: Version of ONNX Runtime, empty where nobody knows.
    """
    major, _, rest = runtime.partition(".")
    minor = rest.partition(".")[0]
    known = NEWEST_FORMATS.get((int(major), int(minor))) if major.isdecimal() and minor.isdecimal() else None
    if known is None or (manifest.opset <= known[0] and manifest.ir_version <= known[1]):
        return ""
    has = f"opset {known[0]} and IR version {known[1]}"
    needs = f"opset {manifest.opset} and IR version {manifest.ir_version}"
    return f"runtime: ONNX Runtime {runtime} reads up to {has}, and {manifest.reference} is of {needs}: update it"
