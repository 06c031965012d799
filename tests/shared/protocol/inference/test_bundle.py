"""What of a release lacks: content decides, and both sides lay a bundle out alike."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.release.rollout.bundle_distributor import open_bundle
from shared.errors import WireError
from shared.protocol.inference.bundle import (
    HEADER,
    Lacking,
    build_lacks,
    bundle_pieces,
    compute_lacking,
    header_bytes,
    parse_lacks,
    tensor_bytes,
    tensor_places,
)
from shared.protocol.inference.release import ParameterSpec, sha256_of
from shared.protocol.inference.rollout import Lacks
from tests.edge_server.release.boards import make_release

TENSORS = {"a": b"\1" * 3000, "b": b"\2" * 500, "c": b"\1" * 3000}  # a and c have the same content


@pytest.fixture
def stored(tmp_path):
    return make_release(tmp_path, TENSORS)


def digests(stored) -> set[str]:
    return {part.sha256 for part in stored.manifest.parts.values()}


def test_a_board_that_has_nothing_lacks_whole_parts(stored):
    lacking = compute_lacking(stored.manifest, (), ())
    assert lacking == Lacking(frozenset(digests(stored)))
    data = b"".join(open_bundle(stored, lacking, 1024).source.read(0, 1 << 20))
    assert data == b"".join(stored.path(one.sha256).read_bytes() for one in bundle_pieces(stored.manifest, lacking))


def test_a_board_that_has_a_tensor_lacks_the_others_and_the_header(stored):
    manifest = stored.manifest
    held = digests(stored) - {manifest.parameters.sha256}
    lacking = compute_lacking(manifest, held, {sha256_of(TENSORS["b"])})
    same = sha256_of(TENSORS["a"])
    assert lacking == Lacking(tensors=frozenset({same}), header=True)
    pieces = bundle_pieces(manifest, lacking)
    assert [(one.sha256, one.size) for one in pieces] == [(HEADER, header_bytes(manifest)), (same, 3000)]
    data = b"".join(open_bundle(stored, lacking, 1024).source.read(0, 1 << 20))
    file = stored.path(manifest.parameters.sha256).read_bytes()
    assert data == file[: header_bytes(manifest)] + TENSORS["a"]
    assert tensor_places(file[8 : header_bytes(manifest)])["b"] == (3000, 3500)


def test_a_board_that_has_every_tensor_lacks_the_header_alone(stored):
    held = digests(stored) - {stored.manifest.parameters.sha256}
    lacking = compute_lacking(stored.manifest, held, {sha256_of(data) for data in TENSORS.values()})
    assert lacking == Lacking(header=True)


def test_a_board_that_has_all_lacks_nothing(stored):
    assert compute_lacking(stored.manifest, digests(stored), ()) == Lacking()


def test_what_lacks_comes_back_as_it_was_said(stored):
    lacking = Lacking(frozenset({"0" * 64}), frozenset({"a" * 64, "b" * 64}), header=True)
    assert parse_lacks(build_lacks("pi-1", "0001", lacking)) == lacking


@pytest.mark.parametrize("lacking", [Lacking(frozenset({"0" * 64})), Lacking(tensors=frozenset({"0" * 64}))])
def test_what_a_release_does_not_have_is_refused(stored, lacking):
    with pytest.raises(WireError):
        bundle_pieces(stored.manifest, lacking)


def test_more_than_anybody_asks_for_is_refused():
    with pytest.raises(WireError):
        parse_lacks(Lacks(device="pi-1", deployment="0001", parts=(bytes(32),) * 1025))


def test_a_manifest_that_contradicts_itself_is_refused(stored):
    small = msgspec.structs.replace(stored.manifest.parameters, size=100)
    with pytest.raises(WireError):
        header_bytes(msgspec.structs.replace(stored.manifest, parameters=small))
    for dtype, shape in (("X9", (1,)), ("F32", (-1, 4))):
        with pytest.raises(WireError):
            tensor_bytes(ParameterSpec(name="a", dtype=dtype, shape=shape, sha256=""))


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b"\xff\xfe"])
def test_a_header_that_is_none_is_refused(header):
    with pytest.raises(WireError):
        tensor_places(header)
