"""Manifests of releases: the same one has the same bytes, later keys are tolerated, newer formats refused."""

from __future__ import annotations

import json

import pytest

from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    ParameterSpec,
    Preprocessing,
    ReleaseGraph,
    ReleaseManifest,
    ReleasePart,
    ReleaseSource,
    SplitHalves,
    TensorSpec,
    parse_reference,
    read_manifest,
    write_manifest,
)
from shared.protocol.messages import Spec

PART = ReleasePart(sha256="ab" * 32, size=5)


def tensor(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=(-1, *shape))


def graph(*names: str) -> ReleaseGraph:
    return ReleaseGraph(part=PART, input=tensor(names[0], 1, 8, 8), output=tensor(names[1], 10), parameters=("1.bias",))


MADE = ReleaseManifest(
    name="digits",
    version=3,
    created="20260101T000000Z",
    model=Spec(name="mlp", options={"hidden": 4}),
    source=ReleaseSource(run="run", round=2, plan="digits", algorithm=Spec(name="fedavg"), accuracy=0.875),
    graph=graph("input", "output"),
    halves=SplitHalves(cut=1, bottom=graph("input", "features"), top=graph("features", "output")),
    parameters=PART,
    tensors=(ParameterSpec(name="1.bias", dtype="F32", shape=(4,), sha256="cd" * 32),),
    preprocessing=Preprocessing(mean=(0.5,), std=(0.25,), size=(8, 8)),
    classes=("nought", "one"),
    probes=PART,
    opset=17,
    ir_version=8,
)


def test_a_manifest_is_read_as_it_was_written():
    data = write_manifest(MADE)
    assert read_manifest(data, "it") == MADE
    assert write_manifest(read_manifest(data, "it")) == data
    told = json.loads(data)
    assert (MADE.reference, told["graph"]["input"]["shape"]) == ("digits/3", [-1, 1, 8, 8])
    assert sorted(MADE.parts) == [
        "bottom.onnx",
        "graph.onnx",
        "parameters.safetensors",
        "probes.safetensors",
        "top.onnx",
    ]


def test_a_newer_format_is_refused_and_later_keys_are_not():
    told = json.loads(write_manifest(MADE))
    assert read_manifest(json.dumps({**told, "colour": 1}).encode(), "it") == MADE
    with pytest.raises(ConfigError, match="update"):
        read_manifest(json.dumps({"format": FORMAT + 1, "all": "else"}).encode(), "it")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 1}', b'{"format": "\xff"}', b" " * (MAX_MANIFEST_BYTES + 1)])
def test_what_is_no_manifest_is_told(data):
    with pytest.raises(CorruptFile, match="it: "):
        read_manifest(data, "it")


def test_every_cut_of_a_manifest_is_told():
    data = write_manifest(MADE).rstrip()
    for end in range(0, len(data), 7):
        with pytest.raises(CorruptFile):
            read_manifest(data[:end], "it")


def test_a_release_is_named_with_its_version_or_without():
    assert parse_reference("digits") == ("digits", 0)
    assert parse_reference("digits.v2/12") == ("digits.v2", 12)
    for text in ("", "a/0", "a/b", "a/1/2", "../a", "a/", "a" * 65, "a/1234567890"):
        with pytest.raises(ConfigError):
            parse_reference(text)
