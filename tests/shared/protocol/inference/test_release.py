"""Manifests of releases: the same one has the same bytes, later keys are tolerated, newer formats refused."""

from __future__ import annotations

import json

import msgspec
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
from shared.protocol.inference.rollout import Ahead, Offer, Withdraw
from shared.protocol.messages import Spec
from shared.protocol.update import UpdateTerms
from tests.naming import naming

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
    with pytest.raises(ConfigError, match=naming("it", FORMAT + 1)):
        read_manifest(json.dumps({"format": FORMAT + 1, "all": "else"}).encode(), "it")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 1}', b'{"format": "\xff"}', b" " * (MAX_MANIFEST_BYTES + 1)])
def test_what_is_no_manifest_is_told(data):
    with pytest.raises(CorruptFile, match=naming("it")):
        read_manifest(data, "it")


def test_every_cut_of_a_manifest_is_told():
    data = write_manifest(MADE).rstrip()
    for end in range(0, len(data), 7):
        with pytest.raises(CorruptFile):
            read_manifest(data[:end], "it")


def test_a_release_is_named_with_its_version_or_without():
    assert parse_reference("digits") == ("digits", 0)
    assert parse_reference("digits.v2/12") == ("digits.v2", 12)
    for text in ("", "a/0", "a/b", "a/1/2", "../a", "a/", "a" * 65, "a/1234567890", "a/1\N{ARABIC-INDIC DIGIT THREE}"):
        with pytest.raises(ConfigError):
            parse_reference(text)


NO_NAMES = [
    *("", ".", "..", "...", "../../escape", "/etc/cron.d/x", "a/b", "a\\b", "C:x", "C:\\x", "~root", "-rf", ".hidden"),
    *("a\nb", "a\x00b", "a\rb", "a b", "a\u202eb", "a\u200bb", "\N{FULLWIDTH FULL STOP}" * 2, "\xe9t\xe9", "a" * 65),
    *("model.", "con", "NUL", "aux.v2", "Com1", "lpt9.tar.gz"),
]


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_a_manifest_whose_name_could_leave_its_folder_or_forge_a_line_is_refused(name):
    told = json.loads(write_manifest(MADE)) | {"name": name}
    with pytest.raises(CorruptFile, match="name") as caught:
        read_manifest(json.dumps(told).encode(), "it")
    assert str(caught.value).isprintable()
    for message in (Offer, Ahead, Withdraw):
        fields = {"deployment": "0001", "name": name, "version": 1, "manifest": b"", "soak_s": 0.0}
        with pytest.raises(msgspec.ValidationError, match="name"):
            msgspec.convert(fields, message)


@pytest.mark.parametrize("version", [0, -1, 1 << 31, 1 << 62, 1 << 63, -(1 << 63), True, 1.5, None, "1"])
def test_a_manifest_with_a_version_that_no_release_has_is_refused(version):
    told = json.loads(write_manifest(MADE)) | {"version": version}
    with pytest.raises(CorruptFile, match="version"):
        read_manifest(json.dumps(told).encode(), "it")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"deployment": "0001", "name": "a", "version": version, "manifest": b""}, Ahead)


@pytest.mark.parametrize("part", ["graph.part", "parameters", "probes", "halves.bottom.part", "halves.top.part"])
@pytest.mark.parametrize(
    "change",
    [
        *({"sha256": one} for one in ("", "../" * 21 + "x", "AB" * 32, "ab" * 33, "ab" * 31 + "a\n", "/" + "a" * 63)),
        *({"size": one} for one in (0, -1, 1 << 41, 1 << 63, True)),
    ],
    ids=str,
)
def test_a_part_with_no_digest_or_no_size_is_refused(part, change):
    told = json.loads(write_manifest(MADE))
    place = told
    for key in part.split("."):
        place = place[key]
    place |= change
    with pytest.raises(CorruptFile, match=r"sha256|size|Expected"):
        read_manifest(json.dumps(told).encode(), "it")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", "x\ny"),
        ("source.run", "x\x1b[2J"),
        ("source.round", -1),
        ("tensors.0.sha256", "../x"),
        ("tensors.0.shape", [-1]),
        ("tensors.0.shape", [1 << 62]),
        ("format", 0),
        ("format", -1),
    ],
)
def test_other_values_that_are_shown_or_reckoned_with_are_bounded(key, value):
    told = json.loads(write_manifest(MADE))
    *above, last = key.split(".")
    place = told
    for one in above:
        place = place[int(one) if one.isdecimal() else one]
    place[last] = value
    with pytest.raises(CorruptFile):
        read_manifest(json.dumps(told).encode(), "it")


def test_of_a_key_that_comes_twice_both_readings_agree():
    """The name that is checked is the name that is used."""
    data = write_manifest(MADE).rstrip().removesuffix(b"}")
    with pytest.raises(CorruptFile, match="name"):
        read_manifest(data + b', "name": "../x"}', "it")
    assert read_manifest(data + b', "name": "other"}', "it").name == "other"


@pytest.mark.parametrize("soak_s", [float("nan"), float("inf"), -1.0])
def test_terms_that_a_record_could_not_hold_are_refused(soak_s):
    with pytest.raises(ValueError, match="soak_s"):
        UpdateTerms(soak_s=soak_s)
