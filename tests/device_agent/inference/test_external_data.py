"""A graph whose tensors lie in files is refused: ONNX Runtime would read them from the working directory."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from shared.errors import CorruptFile
from shared.protocol.inference.onnx_graph import require_no_files
from tests.naming import naming

OUTSIDE = "secret.bin"


def tensor(name: str, *, outside: bool, by: str = "both") -> TensorProto:
    made = numpy_helper.from_array(np.arange(4, dtype=np.float32), name)
    if outside:
        made.ClearField("raw_data")
        if by in ("both", "location"):
            made.data_location = TensorProto.EXTERNAL
        if by in ("both", "data"):
            entry = made.external_data.add()
            entry.key, entry.value = "location", OUTSIDE
    return made


def model(*initializers: TensorProto, nodes=(), functions=()) -> bytes:
    nodes = nodes or (helper.make_node("Add", ["x", "w"], ["y"]),)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    graph = helper.make_graph(list(nodes), "g", values[:1], values[1:], list(initializers))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], functions=functions, ir_version=9)
    return made.SerializeToString()


def branch(inner: TensorProto) -> onnx.NodeProto:
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])
    body = helper.make_graph([helper.make_node("Identity", [inner.name], ["z"])], "b", [], [value], [inner])
    return helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)


def constant(inner: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["y"], value=inner)


def function(inner: TensorProto) -> onnx.FunctionProto:
    return helper.make_function("own", "F", [], ["y"], [constant(inner)], [helper.make_opsetid("", 17)])


PLACES = {
    "initializer": model,
    "branch": lambda one: model(nodes=[branch(one)]),
    "constant": lambda one: model(nodes=[constant(one)]),
    "function": lambda one: model(tensor("w", outside=False), functions=[function(one)]),
}


@pytest.mark.parametrize("by", ["both", "location", "data"])
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_lies_in_a_file_is_named(place, by):
    made = PLACES[place](tensor("w", outside=True, by=by))
    with pytest.raises(CorruptFile, match=naming("release a/1", "'w'")):
        require_no_files(made, (), "release a/1")
    require_no_files(PLACES[place](tensor("w", outside=False)), (), "release a/1")


def test_a_parameter_that_is_handed_over_may_lie_outside_and_none_within_another_graph():
    require_no_files(model(tensor("w", outside=True)), ["w"], "release a/1")
    with pytest.raises(CorruptFile, match=naming("release a/1", "'w'")):
        require_no_files(model(nodes=[branch(tensor("w", outside=True))]), ["w"], "release a/1")


def test_onnx_runtime_would_have_read_it(tmp_path, monkeypatch):
    """From the working directory: that is what is refused."""
    (tmp_path / OUTSIDE).write_bytes(np.full(4, 7, dtype=np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model(tensor("w", outside=True))
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros(4, dtype=np.float32)})[0].tolist() == [7] * 4


def test_onnx_runtimes_own_format_is_refused(tmp_path):
    """It takes that from bytes as well, and nothing looks through it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "graph.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(model(tensor("w", outside=False)), options, providers=["CPUExecutionProvider"])
    data = (tmp_path / "graph.ort").read_bytes()
    onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    with pytest.raises(CorruptFile, match="release a/1"):
        require_no_files(data, (), "release a/1")


def test_two_tensors_of_a_name_are_computed_with_what_is_handed_over():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    ones = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(4, dtype=np.float32))
    options.add_external_initializers(["w"], [ones])
    data = model(tensor("w", outside=False), tensor("w", outside=True))
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros(4, dtype=np.float32)})[0].tolist() == [1] * 4


@given(st.binary(max_size=200))
def test_bytes_that_are_no_graph_are_refused_or_hold_none(data):
    with suppress(CorruptFile):
        require_no_files(data, (), "release a/1")
