"""Releases, exports and evaluation graphs of plain modules, and the cost of their cuts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file

import shared
from edge_server.plan.plan import Plan
from edge_server.release.create import create_release
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.release.graph import MAX_ERROR
from edge_server.release.run_model import read_model
from shared import registry
from shared.models.build import build_blank
from shared.models.leaves import call_with
from shared.protocol import evaluation_graph as graphs
from tests.edge_server.processes import called
from tests.edge_server.release.runs import LowerHalf, leave_run
from tests.naming import names_all

SOURCE = """
import torch
from torch import nn
from torch.nn import functional

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Sequential(nn.Linear(36, 6), nn.ReLU(), nn.Linear(6, 3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]).view(4, 1, 1))
        self.register_buffer("shift", torch.full((4, 1, 1), 0.5), persistent=False)

    def forward(self, inputs):
        inputs = functional.max_pool2d(functional.relu(self.conv(inputs)), 2) * self.mask + self.shift
        return self.fc(inputs.flatten(1))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.last.weight = self.first.weight
        self.register_buffer("ids", torch.arange(8))

    def forward(self, inputs):
        inputs = self.first(inputs.flatten(1)[:, self.ids])
        return self.head(self.last(inputs.relu()))
"""
EXAMPLES = {"Plain": (1, 8, 8), "Tied": (8,)}


@pytest.fixture(autouse=True)
def _own_networks(tmp_path, monkeypatch):
    """Allow these networks here and in commands."""
    pytest.importorskip("onnx")
    (tmp_path / "plainnets.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(registry.VARIABLE, "plainnets:*")
    registry.allow(["plainnets:*"])
    yield
    registry.allow([])
    sys.modules.pop("plainnets", None)


@pytest.mark.parametrize("name", ["Plain", "Tied"])
@pytest.mark.parametrize("kind", ["onnx", "torchscript", "safetensors"])
@pytest.mark.filterwarnings("ignore:.torch.jit.load. is deprecated:DeprecationWarning")
def test_an_export_computes_what_pytorch_does(tmp_path, capsys, name, kind):
    run, out, example = leave_run(tmp_path, f"plainnets:{name}"), tmp_path / "model", EXAMPLES[name]
    words = ("export", "last", "--format", kind, "--out", out, "--json", "--data-dir", tmp_path)
    assert called(*words, "--example", *example) == 0
    assert json.loads(capsys.readouterr().out)["input"] == list(example)
    inputs = torch.randn(5, *example)
    model = read_model(run, example=example)
    with torch.no_grad():
        expected = model.model.layers(inputs).numpy()
    if kind == "safetensors":
        assert load_file(out).keys() == model.tree.keys() == build_blank(run.opened.plan.model).tree().keys()
        assert "first.weight" not in model.tree
        return
    if kind == "onnx":
        session = onnxruntime.InferenceSession(str(out), providers=["CPUExecutionProvider"])
        outputs = session.run(["output"], {"input": inputs.numpy()})[0]
    else:
        outputs = torch.jit.load(str(out))(inputs).detach().numpy()
    assert np.abs(outputs - expected).max() <= MAX_ERROR * np.abs(expected).max()


def test_a_release_has_halves_cut_within_the_derived_chain(tmp_path):
    run = leave_run(tmp_path, "plainnets:Plain")
    stored = create_release(read_model(run, example=(1, 8, 8)), tmp_path, "plain", 2)
    assert stored.manifest.halves.cut == 2
    assert {tensor.name for tensor in stored.manifest.tensors} == build_blank(run.opened.plan.model).tree().keys()
    assert set(stored.manifest.halves.top.parameters) == {"fc.2.weight", "fc.2.bias"}
    half = LowerHalf.of(stored)
    features = half.session.run(["features"], {"input": half.inputs})[0]
    parameters = load_file(stored.path(stored.manifest.parameters.sha256))
    outputs = features @ parameters["fc.2.weight"].T + parameters["fc.2.bias"]
    assert np.abs(outputs - half.outputs).max() <= MAX_ERROR * np.abs(half.outputs).max()


@pytest.mark.parametrize("name", ["Plain", "Tied"])
def test_an_evaluation_graph_binds_parameters_by_the_modules_names(tmp_path, name):
    run = leave_run(tmp_path, f"plainnets:{name}")
    random = np.random.default_rng(1)
    arrays = {f"x_{part}": random.normal(size=(6, *EXAMPLES[name])).astype(np.float32) for part in ("train", "test")}
    np.savez(tmp_path / "set.npz", **arrays, y_train=np.arange(6) % 3, y_test=np.arange(6) % 3)
    data = {"source": "npz", "path": str(tmp_path / "set.npz")}
    settings = {"data": data, "evaluation": {"runtime": "onnx", "devices_every": 1}}
    plan = msgspec.convert({**msgspec.to_builtins(run.opened.plan), **settings}, Plan)
    graph = graphs.decode(make_evaluation_graph(plan))
    model = read_model(run, example=EXAMPLES[name])
    assert set(graph.parameters) <= model.tree.keys()
    options = onnxruntime.SessionOptions()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(model.tree[key].numpy()) for key in graph.parameters]
    options.add_external_initializers(list(graph.parameters), values)
    session = onnxruntime.InferenceSession(graph.onnx, options, providers=["CPUExecutionProvider"])
    inputs = arrays["x_test"]
    with torch.no_grad():
        expected = call_with(model.model.layers, model.tree, torch.from_numpy(inputs)).numpy()
    outputs = session.run(None, {session.get_inputs()[0].name: inputs})[0]
    assert np.abs(outputs - expected).max() <= MAX_ERROR * np.abs(expected).max()


def test_the_cost_of_a_plain_module_is_shown_by_cut_or_why_it_has_none(capsys):
    assert called("models", "plainnets:Plain", "--example", 1, 8, 8, "--format", "json") == 0
    table = json.loads(capsys.readouterr().out)
    assert [(cut["cut"], cut["shape"]) for cut in table["cuts"]] == [(1, [4, 3, 3]), (2, [6])]
    assert table["whole"]["forward_macs"] == 4 * 9 * 36 + 36 * 6 + 6 * 3
    assert called("models", "plainnets:Tied", "--example", 8) == 0
    assert names_all(capsys.readouterr().out, "first.weight", "last.weight", "tied")


def test_the_example_of_the_page_is_a_network_with_a_cut(capsys, tmp_path):
    page = (Path(shared.__file__).parent / "algorithms" / "README.md").read_text()
    code = page.partition("## Your own network")[2].partition("```python\n")[2].partition("```")[0]
    (tmp_path / "plainnets.py").write_text(code)
    assert called("models", "plainnets:Net", "--option", "hidden=64", "--example", 1, 8, 8, "--format", "json") == 0
    table = json.loads(capsys.readouterr().out)
    assert [(cut["cut"], cut["shape"]) for cut in table["cuts"]] == [(1, [8, 3, 3])]
