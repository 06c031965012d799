"""Exported models equal PyTorch's outputs in each format; refusals are one line."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

from edge_server.plan.sections import Chosen
from edge_server.release.graph import MAX_ERROR
from edge_server.release.run_model import read_model
from shared import registry
from shared.data.spec import Data
from shared.models import MODELS
from shared.models.base import Model
from shared.models.build import build_blank
from shared.protocol.inference.release import Preprocessing
from shared.tensors import file
from tests.edge_server.harness import write_examples
from tests.edge_server.processes import called
from tests.edge_server.release.runs import RUN, leave_run
from tests.naming import names_all


def asked(inputs: np.ndarray, path: str) -> np.ndarray:
    """Return what ONNX Runtime makes of inputs by a file alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["output"], {"input": inputs})[0]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_onnx_runtime_computes_what_pytorch_does(tmp_path, capsys, name):
    """By the file alone, in batches of any size; the usual model is the most accurate."""
    pytest.importorskip("onnx")
    run = leave_run(tmp_path, name)
    out = tmp_path / "model.onnx"
    assert called("export", "last", "--format", "onnx", "--out", out, "--json", "--data-dir", tmp_path) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["round"], told["size"]) == (2, out.stat().st_size)
    assert told["error"] <= MAX_ERROR
    network, tree = (
        build_blank(run.opened.plan.model),
        file.load(run.folder / "checkpoints" / "round-000002.safetensors").tree,
    )
    inputs = torch.randn((7, *network.example), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = functional_call(network.layers.eval(), tree, (inputs,)).numpy()
    for count in (1, 7):
        found = asked(inputs[:count].numpy(), str(out))
        assert np.abs(found - expected[:count]).max() <= MAX_ERROR * np.abs(expected).max()


@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")
def test_weights_alone_and_torchscript(tmp_path, capsys):
    run = leave_run(tmp_path, "spu_emnist")
    weights, script = tmp_path / "model.safetensors", tmp_path / "model.pt"
    for form, out in (("safetensors", weights), ("torchscript", script)):
        command = ("export", RUN[:8], "--format", form, "--round", 3, "--out", out, "--data-dir", tmp_path)
        assert called(*command) == 0
        assert names_all(capsys.readouterr().out, 3, "0.7500")
    expected = file.load(run.folder / "checkpoints" / "round-000003.safetensors").tree
    found = load_file(weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    network = build_blank(run.opened.plan.model)
    inputs = torch.randn((5, *network.example), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs = torch.jit.load(script)(inputs)
        same = functional_call(network.layers.eval(), expected, (inputs,))
    assert (outputs - same).abs().max() <= MAX_ERROR * same.abs().max()


def test_of_a_split_method_both_parts_and_of_semisfl_the_teacher(tmp_path):
    split = read_model(leave_run(tmp_path, "lenet", algorithm=Chosen(name="fedsl", options={"cut": 2})))
    assert split.tree.keys() == build_blank(split.plan.model).tree().keys()
    teacher = {f"teacher/{name}": leaf + 1 for name, leaf in split.tree.items()}
    semi = leave_run(tmp_path, "lenet", run="semi-1", algorithm=Chosen(name="semisfl"), more=teacher)
    found = read_model(semi)
    assert all(torch.equal(found.tree[name], split.tree[name] + 1) for name in found.tree)


def test_what_a_model_takes_is_told_by_the_plans_data_or_by_the_network(tmp_path, caplog):
    """The shape of an input, how it was prepared, what the classes are called."""
    write_examples(tmp_path)
    told = {"source": "npz", "path": str(tmp_path / "examples.npz"), "mean": (0.5,), "std": (2.0,)}
    data = Data(**told, classes=("a", "b", "c"))
    model = Chosen(name="mlp", options={"features": 8, "hidden": 4, "classes": 3})
    found = read_model(leave_run(tmp_path, "mlp", model=model, data=data))
    assert (found.example, found.classes) == ((8,), ("a", "b", "c"))
    told = {"byte_scale": 1.0, "dtype": "float32", "layout": "NF"}
    assert found.preprocessing == Preprocessing(mean=(0.5,), std=(2.0,), **told)
    assert not caplog.records
    pictures = Chosen(name="resnet20", options={"width": 2})
    away = leave_run(tmp_path, "resnet20", run="away", model=pictures, data=Data(source="npz", path="away.npz"))
    assert read_model(away).example == (3, 32, 32)
    assert [one.levelname for one in caplog.records] == ["WARNING"], "its data is not there"
    small = read_model(away, example=(3, 16, 16))
    assert (small.example, small.preprocessing.size, small.preprocessing.mean) == ((3, 16, 16), (16, 16), ())
    assert read_model(leave_run(tmp_path, "cnn", run="theirs")).preprocessing.mean is None


class Spectrum(nn.Module):
    def forward(self, inputs):
        return torch.fft.rfft(inputs).real


class Decides(nn.Module):
    def forward(self, inputs):
        return inputs * 2 if len(inputs) == 2 else inputs


def spectrum() -> Model:
    return Model(nn.Sequential(nn.Linear(8, 8), Spectrum()), example=(8,))


def decides() -> Model:
    return Model(nn.Sequential(nn.Linear(8, 8), Decides()), example=(8,))


@pytest.fixture
def ours(monkeypatch):
    """Allow this module's networks."""
    monkeypatch.setenv(registry.VARIABLE, f"{__name__}:*")
    registry.allow([f"{__name__}:*"])
    yield __name__
    registry.allow([])


@pytest.mark.parametrize(("name", "named"), [("spectrum", "aten::fft_rfft"), ("decides", "decides")])
def test_what_cannot_be_exported_is_named_in_one_line(tmp_path, capfd, ours, name, named):
    pytest.importorskip("onnx")
    leave_run(tmp_path, f"{ours}:{name}")
    out = tmp_path / "model.onnx"
    assert called("export", "last", "--format", "onnx", "--out", out, "--data-dir", tmp_path) == 2
    told = capfd.readouterr()
    assert named in told.err
    assert (told.out, told.err.count("\n"), out.exists()) == ("", 1, False)


def test_a_network_that_nobody_allowed_is_not_imported(tmp_path, capsys, ours):
    leave_run(tmp_path, f"{ours}:spectrum")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(registry.VARIABLE, "")
        assert called("export", "last", "--format", "safetensors", "--data-dir", tmp_path) == 2
    assert names_all(capsys.readouterr().err, f"{ours}:spectrum", registry.VARIABLE)


def _nan(folder):
    leave_run(folder, "mlp", more={"3.bias": torch.full((10,), float("nan"))})


def _parts_of_devices(folder):
    leave_run(folder, "mlp", algorithm=Chosen(name="fedalt"))
    for path in (folder / RUN / "checkpoints").glob("*-*.safetensors"):
        state = file.load(path)
        del state.tree["1.weight"]
        file.save(path, state)


def _rotten(folder):
    leave_run(folder, "mlp")
    path = folder / RUN / "checkpoints" / "round-000002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("leave", "words", "code", "named"),
    [
        (_nan, (), 2, ("3.bias", "NaN")),
        (_parts_of_devices, (), 2, ("1.weight",)),
        (_rotten, (), 1, ("round-000002.safetensors",)),
        (lambda folder: leave_run(folder, "mlp"), ("--round", 9), 2, ("--round", "1, 2, 3")),
        (lambda folder: leave_run(folder, "mlp"), ("--example", 5), 2, ("(5,)",)),
        (lambda folder: leave_run(folder, "mlp"), ("--out", "/nowhere/x"), 2, ("--out",)),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, capsys, leave, words, code, named):
    leave(tmp_path)
    out = ("--out", tmp_path / "out") if "--out" not in words else ()
    assert called("export", "last", "--format", "safetensors", *out, *words, "--data-dir", tmp_path) == code
    assert names_all(capsys.readouterr().err, *named)
    assert not (tmp_path / "out").exists()
