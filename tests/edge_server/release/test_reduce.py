"""Reduced releases (int8, float16): measured, reported and bounded loss."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from device_agent.inference.release_folder import read_folder
from device_agent.inference.session import open_model
from device_agent.inference.settings import InferenceSettings
from edge_server.plan.sections import Chosen
from edge_server.release import store
from shared.data.spec import Data
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import (
    GRAPH,
    MANIFEST,
    PARAMETERS,
    PROBES,
    ReleaseManifest,
    ReleasePart,
    read_manifest,
    sha256_of,
    write_manifest,
)
from tests.edge_server.harness import write_examples
from tests.edge_server.processes import called
from tests.edge_server.release.runs import leave_run
from tests.naming import names_all

pytest.importorskip("onnx")

CLASSES = {"features": 8, "hidden": 4, "classes": 3}


@pytest.fixture
def give(tmp_path, capsys):
    """Gives `release` some words; returns its code, what it wrote and what it complained of."""

    def run(*words: object) -> tuple[int, str, str]:
        code = called("release", *words, "--data-dir", tmp_path)
        return code, *capsys.readouterr()

    return run


def picks() -> dict[str, torch.Tensor]:
    """Return a perceptron that answers with the largest of three features, whatever the last one is."""
    first, second = torch.zeros(4, 8), torch.zeros(3, 4)
    for number in range(3):
        first[number, number] = second[number, number] = 1.0
    return {"1.weight": first, "1.bias": torch.full((4,), 4.0), "3.weight": second, "3.bias": torch.zeros(3)}


def leave_picks(folder: Path, outlier: float = 0.0, count: int = 400, **more: torch.Tensor) -> None:
    """Leave a run of that network, with examples whose last feature is as large as told."""
    folder.mkdir(exist_ok=True)
    write_examples(folder, count)
    arrays = dict(np.load(folder / "examples.npz"))
    for split in ("train", "test"):
        arrays[f"x_{split}"][:, 7] += outlier
    np.savez(folder / "examples.npz", **arrays)
    data = Data(source="npz", path=str(folder / "examples.npz"))
    leave_run(folder, "mlp", model=Chosen(name="mlp", options=CLASSES), data=data, more={**picks(), **more})


def made(give, *words: object) -> ReleaseManifest:
    code, out, err = give("create", "last", *words, "--format", "json")
    assert code == 0, err
    return msgspec.convert(json.loads(out)["manifest"], ReleaseManifest)


def on_a_board(folder: Path) -> tuple[float, set[str]]:
    """Return how far a board's inference process is from what an exported release says, and the types in its file."""
    files, probes = read_folder(folder), load_file(folder / PROBES)
    settings = InferenceSettings(port=0, socket="", memory_bytes=2 << 30, max_body_bytes=1 << 20, patience_s=5.0)
    found = open_model(files.manifest, files.parts, settings).run(probes["inputs"])
    error = np.abs(found - probes["outputs"]).max() / np.abs(probes["outputs"]).max()
    return float(error), {str(one.dtype) for one in load_file(folder / PARAMETERS).values()}


def test_eight_bits_on_a_board(tmp_path, give):
    """Weights are bytes, the graph is given them by their names, accuracy and sizes are told, and measured apart."""
    leave_picks(tmp_path)
    one = made(give, "--int8", "--max-drop", 0.1)
    told = one.reduction
    assert (told.kind, told.examples, told.calibrated_on) == ("int8", 300, 100)
    assert told.accuracy_before > 0.5
    assert told.accuracy >= told.accuracy_before - 0.1
    assert min(told.seconds_before, told.seconds_after) > 0
    assert told.bytes_after == one.parameters.size
    assert {spec.dtype for spec in one.tensors} >= {"I8", "I32"}
    assert give("export", "tiny", tmp_path / "out")[0] == 0
    error, kinds = on_a_board(tmp_path / "out")
    assert error <= 1e-6
    assert "int8" in kinds
    code, shown, _ = give("show", "tiny")
    assert code == 0
    assert names_all(shown, "int8", f"{told.accuracy:.4f}", f"{told.accuracy_before:.4f}", 300)


def test_the_same_release_is_not_made_twice_though_it_was_faster_that_time(tmp_path, give):
    leave_picks(tmp_path)
    assert [made(give, "--int8").version for _ in range(2)] == [1, 1]
    assert made(give).version == 2


def test_convolutions_and_batchnorm_of_eight_bits_are_a_quarter(tmp_path, give):
    """BatchNorm goes into the convolution before it; weights of a network of some size are a quarter of its bytes."""
    random = np.random.default_rng(1)
    arrays = {f"x_{split}": random.normal(size=(40, 3, 16, 16)).astype(np.float32) for split in ("train", "test")}
    np.savez(tmp_path / "p.npz", **arrays, y_train=np.arange(40) % 10, y_test=np.arange(40) % 10)
    data = Data(source="npz", path=str(tmp_path / "p.npz"))
    leave_run(tmp_path, "resnet20", model=Chosen(name="resnet20", options={"width": 8}), data=data)
    one = made(give, "--int8", "--max-drop", 1)
    assert 0.2 < one.reduction.bytes_after / one.reduction.bytes_before < 0.5
    assert give("export", "tiny", tmp_path / "out")[0] == 0
    assert on_a_board(tmp_path / "out")[0] <= 1e-6


def test_a_network_that_eight_bits_ruin_is_refused(tmp_path, give):
    """Derivation: a feature of 10,000 has all of them rounded to multiples of about 79, those that count to none."""
    leave_picks(tmp_path, outlier=1e4)
    code, out, err = give("create", "last", "--int8")
    assert (code, out) == (2, "")
    assert names_all(err, "int8", 300, "--max-drop", 0.01)
    assert store.list_releases(tmp_path) == []
    assert made(give, "--int8", "--max-drop", 1).reduction.accuracy < 0.6


def test_weights_that_travel_as_16_bits_are_half_and_have_the_same_graph(tmp_path, give):
    """A board that expands them computes what PyTorch does with the same rounded ones."""
    leave_picks(tmp_path)
    whole, one = made(give), made(give, "--float16")
    assert one.graph.part == whole.graph.part
    assert {spec.dtype for spec in one.tensors} == {"F16"}
    told = one.reduction
    assert (told.kind, told.calibrated_on, told.seconds_before, told.seconds_after) == ("float16", 0, None, None)
    assert told.bytes_before == whole.parameters.size > told.bytes_after
    assert 0 <= told.error < 1e-2
    assert give("export", one.reference, tmp_path / "out")[0] == 0
    error, kinds = on_a_board(tmp_path / "out")
    assert error <= 1e-5
    assert kinds == {"float16"}
    assert names_all(give("show", one.reference)[1], "float16")


def test_weights_too_large_for_16_bits_are_refused(tmp_path, give):
    leave_picks(tmp_path, **{"3.bias": torch.tensor([0.0, 1e6, 0.0])})
    code, _, err = give("create", "last", "--float16")
    assert code == 2
    assert names_all(err, "3.bias", "--float16")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-drop", "0.1"), ("--max-drop", "--int8", "--float16")),
        (("--int8", "--max-drop", "nan"), ("--max-drop",)),
        (("--int8", "--max-drop", "-0.1"), ("--max-drop",)),
        (("--int8", "--halves"), ("--int8",)),
        (("--float16", "--halves", 1), ("--float16",)),
    ],
)
def test_words_that_make_no_sense_together(tmp_path, give, words, named):
    leave_picks(tmp_path)
    code, _, err = give("create", "last", *words)
    assert code == 2
    assert names_all(err, *named)


def test_without_examples_of_the_servers_nothing_can_be_measured(tmp_path, give):
    leave_run(tmp_path, "mlp")
    code, _, err = give("create", "last", "--int8")
    assert code == 2
    assert names_all(err, "[data]")
    leave_picks(tmp_path / "few", count=9)
    assert called("release", "create", "last", "--int8", "--data-dir", tmp_path / "few") == 2


def test_a_damaged_release_of_eight_bits_is_refused_and_crashes_nobody(tmp_path, give):
    """Manifests with bytes changed, cut or doubled, parts likewise: it opens, or one of two errors says why not."""
    leave_picks(tmp_path)
    one = made(give, "--int8", "--max-drop", 0.1)
    assert give("export", "tiny", tmp_path / "out")[0] == 0
    settings = InferenceSettings(port=0, socket="", memory_bytes=2 << 30)
    whole = {name: (tmp_path / "out" / name).read_bytes() for name in (MANIFEST, *one.parts)}
    random, refused = Random(3), Counter[str]()

    def opened() -> str:
        try:
            files = read_folder(tmp_path / "out")
            open_model(files.manifest, files.parts, settings)
        except (ConfigError, CorruptFile) as error:
            return type(error).__name__
        return "accepted"

    for name, data in whole.items():
        path = tmp_path / "out" / name
        for number in range(60 if name == MANIFEST else 12):
            path.write_bytes(damaged(data, random, number))
            refused[name, opened()] += 1
        path.write_bytes(data)
    assert opened() == "accepted"
    for name in (PARAMETERS, GRAPH):
        assert refused[name, "CorruptFile"] == 12
    assert refused[MANIFEST, "CorruptFile"] > 30


def test_parameters_of_eight_bits_that_are_others_than_the_manifest_says_are_refused(tmp_path, give):
    """Under their right digest: cut short, with a tensor less, or of another dtype."""
    leave_picks(tmp_path)
    made(give, "--int8", "--max-drop", 0.1)
    assert give("export", "tiny", tmp_path / "out")[0] == 0
    settings = InferenceSettings(port=0, socket="", memory_bytes=2 << 30)
    files = read_folder(tmp_path / "out")
    told, tensors = read_manifest(files.manifest, "manifest"), load_file(tmp_path / "out" / PARAMETERS)
    name = max(tensors)
    for data in (
        (tmp_path / "out" / PARAMETERS).read_bytes()[:-1],
        save({one: tensors[one] for one in tensors if one != name}),
        save(tensors | {name: tensors[name].astype(np.int16)}),
        b"\0",
    ):
        (tmp_path / "out" / PARAMETERS).write_bytes(data)
        part = ReleasePart(sha256=sha256_of(data), size=len(data))
        manifest = write_manifest(msgspec.structs.replace(told, parameters=part))
        with pytest.raises(CorruptFile, match="tiny/1"):
            open_model(manifest, files.parts, settings)


def damaged(data: bytes, random: Random, number: int) -> bytes:
    """Return bytes that are not those: cut, with some changed, or with a run of them twice."""
    place = random.randrange(len(data))
    if number % 3 == 0:
        return data[:place]
    if number % 3 == 1:
        return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
    return data[:place] + data[max(0, place - 40) : place] + data[place:] + b"\0"
