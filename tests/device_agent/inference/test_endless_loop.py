"""Release with an endless graph: ended, named in the log, others keep serving."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from device_agent.inference.models import ServedVersion
from device_agent.inference.release_folder import read_folder
from device_agent.inference.session import open_model
from shared.errors import ServingRefused
from shared.protocol.inference.release import GRAPH
from shared.runtime import bounded_run
from tests.device_agent.inference.test_session import told_anew


def add_loop(folder, *, always: bool) -> None:
    """Have the graph of a release loop without an end: always, or where a value of its input is above 9."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    graph, name = model.graph, model.graph.output[0].name
    for node in graph.node:
        node.output[:] = ["before" if one == name else one for one in node.output]
    kept = helper.make_tensor_value_info("kept", TensorProto.FLOAT, None)
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["on_still"]), helper.make_node("Identity", ["kept"], ["kept_still"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            kept,
        ],
        [
            helper.make_tensor_value_info("on_still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("kept_still", TensorProto.FLOAT, None),
        ],
    )
    graph.initializer.append(helper.make_tensor("bound", TensorProto.FLOAT, [], [-1.0 if always else 9.0]))
    graph.node.extend(
        [
            helper.make_node("ReduceMax", [graph.input[0].name], ["largest"], keepdims=0),
            helper.make_node("Greater", ["largest", "bound"], ["begins"]),
            helper.make_node("Loop", ["", "begins", "before"], [name], body=body),
        ]
    )
    (folder / GRAPH).write_bytes(model.SerializeToString())
    told_anew(folder, GRAPH)


@pytest.fixture
def soon(monkeypatch):
    """Let a run take a second."""
    monkeypatch.setattr(bounded_run, "MOST_RUN_S", 1.0)


def opened(folder, settings):
    files = read_folder(folder)
    return open_model(files.manifest, files.parts, settings)


def test_one_that_never_ends_is_not_opened(copied, settings, soon, caplog):
    folder = copied("tiny-1")
    add_loop(folder, always=True)
    with caplog.at_level(logging.WARNING), pytest.raises(ServingRefused, match=r"\d s"):
        opened(folder, settings)
    assert ["tiny/1" in record.getMessage() for record in caplog.records] == [True]


def test_one_that_does_not_end_for_some_input_answers_the_others(copied, settings, soon, caplog):
    folder = copied("tiny-1")
    add_loop(folder, always=False)
    model = opened(folder, settings)
    served = ServedVersion(model)
    usual = np.zeros((1, *model.input.shape[1:]), np.float32)
    first = served.run(usual)
    with pytest.raises(ServingRefused, match=r"\d s"):
        served.run(usual + 10)
    assert ["tiny/1" in record.getMessage() for record in caplog.records] == [True]
    assert (served.errors, served.requests) == (1, 2)
    assert np.array_equal(served.run(usual), first)
