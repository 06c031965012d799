"""Releases: made of a run's model, kept under digests, served by ONNX Runtime alone, damaged ones told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess  # noqa: TID251 - a board's process, which has no torch
import sys
from itertools import count

import msgspec
import onnxruntime
import pytest
import torch

from edge_server.plan.sections import Chosen
from edge_server.release import store
from shared.data.load import load
from shared.data.spec import Data
from shared.protocol.inference.release import MANIFEST, Preprocessing, ReleaseManifest, sha256_of
from shared.runtime.extras import install_command
from shared.runtime.folder_lock import hold_lock
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import called
from tests.edge_server.release.runs import RUN, leave_run
from tests.full_disk import refuse_writes
from tests.naming import names_all

pytest.importorskip("onnx")

BOARD = """
import json, sys
import numpy as np
import onnxruntime
from safetensors.numpy import load_file
from tests.full_disk import refuse_writes
from tests.naming import names_all

def bound(graph, names):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(parameters[name]) for name in names]
    options.add_external_initializers(list(names), values)
    with open(graph, "rb") as file:  # from memory: nothing is read beside it
        return onnxruntime.InferenceSession(file.read(), options, providers=["CPUExecutionProvider"])

manifest = json.load(open("manifest.json"))
parameters, probes = load_file("parameters.safetensors"), load_file("probes.safetensors")
[found] = bound("graph.onnx", manifest["graph"]["parameters"]).run(["output"], {"input": probes["inputs"]})
error = np.abs(found - probes["outputs"]).max() / np.abs(probes["outputs"]).max()
halves = manifest["halves"]
[features] = bound("bottom.onnx", halves["bottom"]["parameters"]).run(["features"], {"input": probes["inputs"]})
[joined] = bound("top.onnx", halves["top"]["parameters"]).run(["output"], {"features": features})
split = np.abs(joined - probes["outputs"]).max() / np.abs(probes["outputs"]).max()
beside = onnxruntime.InferenceSession("graph.onnx", providers=["CPUExecutionProvider"])
[same] = beside.run(None, {"input": probes["inputs"]})
loaded = sorted({"torch", "onnx", "shared", "edge_server"} & set(sys.modules))
print(json.dumps([float(error), float(split), bool((same == found).all()), len(found), loaded]))
"""


@pytest.fixture
def give(tmp_path, capsys):
    """Gives `release` some words; returns its code, what it wrote and what it complained of."""

    def run(*words: object) -> tuple[int, str, str]:
        code = called("release", *words, "--data-dir", tmp_path)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def made(tmp_path, give) -> ReleaseManifest:
    """Return the release of a tiny run."""
    leave_run(tmp_path, "mlp")
    code, out, err = give("create", RUN[:6], "--format", "json")
    assert code == 0, err
    return msgspec.convert(json.loads(out)["manifest"], ReleaseManifest)


def test_a_board_serves_it_by_onnx_runtime_alone(tmp_path, give):
    """Parameters bound by their names, whole and in halves; no torch, no onnx, nothing of ours on that way."""
    leave_run(tmp_path, "resnet20", algorithm=Chosen(name="fedsl", options={"cut": 7}))
    code, out, err = give("create", "last", "--name", "pictures", "--halves", "--format", "json")
    assert code == 0, err
    told = json.loads(out)["manifest"]
    assert told["halves"]["cut"] == 7
    assert told["graph"]["input"] == {"name": "input", "dtype": "float32", "shape": [-1, 3, 32, 32]}
    assert told["source"]["accuracy"] == 0.875
    assert give("export", "pictures", tmp_path / "out")[0] == 0
    command = [sys.executable, "-c", BOARD]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True, check=True)  # noqa: S603
    error, split, same, count, loaded = json.loads(done.stdout)
    assert error <= 1e-5
    assert split <= 1e-5
    assert (same, count, loaded) == (True, 10, [])


def test_a_trained_split_network_is_as_accurate_as_its_run_says(tmp_path, give):
    """Both parts joined, with the running statistics that were measured anew; by ONNX Runtime on the same examples."""
    sections = {
        "algorithm": 'name = "fedsl"\noptions = { steps_per_round = 3 }',
        "model": 'name = "spu_emnist"\noptions = { side = 8, width = 4, classes = 10 }',
        "data": 'source = "digits"\nlimit = 120\nmean = [0.3]',
        "evaluation": "every = 1",
    }
    plan = write_plan(tmp_path, **sections, more='[partition]\nkind = "even"\n[[device]]\nname = "a"\ncount = 2')
    assert called("replay", plan, "--data-dir", tmp_path, "--workers", 1) == 0
    assert give("create", "last")[0] == 0
    manifest = store.find_release(tmp_path, "tiny").manifest
    assert manifest.graph.input.shape == (-1, 1, 8, 8)
    assert manifest.preprocessing == Preprocessing(
        byte_scale=16.0, dtype="uint8", mean=(0.3,), std=(), size=(8, 8), layout="NCHW"
    )
    assert give("export", "tiny", tmp_path / "out")[0] == 0
    examples = load(Data(source="digits", split="test", limit=120, mean=(0.3,)))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "graph.onnx", providers=["CPUExecutionProvider"])
    [outputs] = session.run(None, {"input": examples.inputs.numpy()})
    right = int((outputs.argmax(1) == examples.labels.numpy()).sum())
    assert abs(right - manifest.source.accuracy * len(examples)) <= 1


def test_a_full_disk_leaves_no_half_release(monkeypatch, tmp_path, give):
    """At whichever file it is full; with room again the same command does it."""
    leave_run(tmp_path, "mlp")
    files, failed = 5, 0
    for full in range(files):
        shutil.rmtree(tmp_path / "releases", ignore_errors=True)
        writes = count()

        with monkeypatch.context() as patch:
            refuse_writes(patch, lambda writes=writes, full=full: next(writes) == full)
            code, _, err = give("create", "last")
        failed += (code, names_all(err, os.strerror(errno.ENOSPC))) == (1, True)
        assert json.loads(give("list", "--format", "json")[1]) == []
    assert failed == files
    assert give("create", "last")[0] == 0
    assert give("show", "tiny/1")[0] == 0
    assert not list((tmp_path / "releases").rglob("*.part*"))


def test_two_processes_do_not_write_at_once(tmp_path, give, made):
    with hold_lock(tmp_path / "releases"):
        for words in (("create", "last"), ("delete", "tiny/1")):
            code, _, err = give(*words)
            assert (code, names_all(err, tmp_path / "releases")) == (2, True)
        assert give("show", "tiny/1")[0] == 0


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path, give):
    leave_run(tmp_path, "mlp")
    for module in ("onnxruntime", "onnx"):
        monkeypatch.setitem(sys.modules, module, None)
        code, _, err = give("create", "last")
        assert (code, err.count("\n")) == (2, 1)
        assert f"{module!r}" in err
        assert install_command("release") in err


def test_releases_of_one_architecture_share_the_graph(tmp_path, give, made):
    """Whatever the parameters are, equal ones among them too; the same again is no other release."""
    zeros = {"3.bias": torch.zeros(10), "1.bias": torch.zeros(4)}
    leave_run(tmp_path, "mlp", run="next-20260102T000000Z-bbbb", seed=9, more=zeros)
    for _ in range(2):
        assert give("create", "next", "--round", 3)[0] == 0
    listed = json.loads(give("list", "--format", "json")[1])
    assert [one["release"] for one in listed] == ["tiny/1", "tiny/2"]
    assert listed[0]["graph_sha256"] == listed[1]["graph_sha256"]
    blobs = list((tmp_path / "releases" / "blobs").iterdir())
    assert len(blobs) == 1 + 2 * 3
    assert all(sha256_of(path.read_bytes()) == path.name for path in blobs)
    first, second = (store.find_release(tmp_path, f"tiny/{number}").manifest for number in (1, 2))
    assert [one.name for one in second.tensors] == ["1.bias", "1.weight", "3.bias", "3.weight"]
    assert set(second.graph.parameters) == {one.name for one in second.tensors}
    assert not {one.sha256 for one in first.tensors} & {one.sha256 for one in second.tensors}


def test_what_is_deleted_frees_its_parts_and_its_number_is_not_given_again(tmp_path, give, made):
    leave_run(tmp_path, "mlp", run="next-1", seed=9)
    assert give("create", "next-1")[0] == 0
    assert "tiny/2" in give("list")[1]
    assert give("delete", "tiny")[0] == 2
    assert give("delete", "tiny/2")[0] == 0
    blobs = {path.name for path in (tmp_path / "releases" / "blobs").iterdir()}
    assert blobs == {part.sha256 for part in made.parts.values()} | {store.find_release(tmp_path, "tiny").sha256}
    assert give("show", "tiny/2")[0] == 2
    assert give("create", "next-1")[0] == 0
    assert [one.manifest.version for one in store.list_releases(tmp_path)] == [1, 3]


def test_it_is_shown_for_people(give, made):
    code, out, _ = give("show", made.reference)
    assert code == 0
    for part in ("tiny/1", f"{RUN}, round 2", "0.8750 on server", "batch x 64", "opset 17", made.parameters.sha256):
        assert part in out


def test_a_damaged_part_is_told_by_its_digest(tmp_path, give, made):
    """It is neither shown nor exported, and does not keep others from being listed."""
    kept = store.find_release(tmp_path, "tiny")
    parts = {name: part.sha256 for name, part in made.parts.items()} | {MANIFEST: kept.sha256}
    for path in map(kept.path, parts.values()):
        data = path.read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        for damaged in (bytes(changed), data[:-7], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            for words in (("show", "tiny/1"), ("export", "tiny/1", tmp_path / "out")):
                code, _, err = give(*words)
                assert (code, err.count("\n"), str(path) in err) == (1, 1, True)
            assert not (tmp_path / "out").exists()
            assert give("list")[0] == 0
            path.write_bytes(data)
    assert give("show", "tiny/1")[0] == 0


def test_a_release_made_anew_is_whole_again(tmp_path, give, made):
    """Its parts by their digests; where its manifest is lost, as another version, and the old one can be deleted."""
    kept = store.find_release(tmp_path, "tiny")
    kept.path(made.parameters.sha256).unlink()
    assert give("create", RUN)[0] == 0
    assert give("show", "tiny/1")[0] == 0
    kept.path(kept.sha256).unlink()
    assert give("create", RUN)[0] == 0
    assert give("show", "tiny/2")[0] == 0
    assert give("delete", "tiny/1")[0] == 0
    assert [one.manifest.version for one in store.list_releases(tmp_path)] == [2]


def test_numbers_that_are_none_are_refused(tmp_path, give):
    leave_run(tmp_path, "mlp", more={"1.weight": torch.full((4, 64), float("inf"))})
    code, _, err = give("create", "last")
    assert code == 2
    assert names_all(err, "1.weight", "NaN")
    assert not (tmp_path / "releases").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("create", "last", "--name", "a/b"), "a/b"),
        (("create", "last", "--halves", 2), 2),
        (("show", "nothing"), "nothing"),
        (("show", "../tiny"), "../tiny"),
        (("export", "tiny", "."), "."),
        (("export", "tiny", "/nowhere/out"), "/nowhere"),
        (("create", "last", "--name", ""), "''"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(give, made, words, named):
    code, _, err = give(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert names_all(err, named)
