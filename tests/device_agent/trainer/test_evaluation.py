"""A device that evaluates by ONNX Runtime: what it finds, what it refuses, and that nothing there needs torch."""

from __future__ import annotations

import json
import subprocess  # noqa: TID251 - a board's process, which has no torch
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.interface import Job
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from edge_server.release.evaluation_graph import make_evaluation_graph
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError, Superseded, TaskFailed, WireError
from shared.models.build import build_initial
from shared.protocol import evaluation_graph as graphs
from shared.protocol import payload
from shared.protocol.messages import Spec, Transfer
from shared.tensors.tree import Tree
from tests.device_agent.agent_side import Device, is_alive, update_of
from tests.edge_server.harness import write_plan
from tests.naming import naming

pytest.importorskip("onnx")

BOARD = """
import json, sys
from pathlib import Path
import msgspec
from device_agent.exchange import outbox
from device_agent.measurement.task_meter import BlockCost, FixedMeter
from device_agent.trainer.evaluation import GraphTask, evaluate_by_graph, read_examples
from device_agent.trainer.interface import Job

job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
task = GraphTask(job, read_examples, FixedMeter(BlockCost()).task, lambda: False)
outbox.write(Path(job.draft), evaluate_by_graph(task))
print(json.dumps(sorted({"torch", "onnx", "safetensors", "edge_server"} & set(sys.modules))))
"""


def graph_of(model: Spec, folder: Path) -> bytes:
    """Return the graph that a server makes of a network."""
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in model.options.items())
    path = write_plan(
        folder,
        model=f'name = "{model.name}"\noptions = {{ {options} }}',
        evaluation='every = 0\ndevices_every = 1\nruntime = "onnx"',
    )
    return make_evaluation_graph(msgspec.structs.replace(load(path, folder), data=msgspec.UNSET))


@pytest.fixture
def graph(tmp_path, make_task) -> bytes:
    return graph_of(make_task().model, tmp_path)


@pytest.fixture
def evaluating(tmp_path, graph, make_task) -> Callable[..., dict[str, object]]:
    """Return the fields of a job that evaluates by a graph, the usual one or another's bytes."""

    def fields(data: bytes = graph) -> dict[str, object]:
        path = tmp_path / "graph"
        path.write_bytes(data)
        return {"graph": str(path)}

    return fields


def task_of(make_task, graph: bytes, **fields):
    transfer = Transfer(digest=payload.digest([memoryview(graph)]), size=len(graph), frame_bytes=1024)
    assignment = msgspec.structs.replace(make_task().assignment, graph=transfer)
    return make_task(train=False, evaluate=True, assignment=assignment, **fields)


def test_it_finds_what_the_trainer_finds(device, make_task, graph, evaluating):
    """Also the examples that it holds back are the same, though numpy alone draws them."""
    ours = update_of(device.perform(task_of(make_task, graph), **evaluating()))
    theirs = update_of(device.perform(make_task(round=2, train=False, evaluate=True)))
    assert ours.metrics["eval_accuracy"] == theirs.metrics["eval_accuracy"]
    assert ours.metrics["eval_loss"] == pytest.approx(theirs.metrics["eval_loss"], rel=1e-5)
    assert ours.metrics["eval_examples"] == theirs.metrics["eval_examples"] == 10
    assert (ours.params, ours.start, ours.trained_on) == (None, theirs.start, "cpu")
    assert (ours.cost.bytes_up, ours.cost.bytes_down) == (0, theirs.cost.bytes_down)


def test_a_board_does_it_without_torch(tmp_path, make_job, make_task, graph, evaluating, device):
    """In a process of its own: neither torch nor onnx is loaded by what it imports, with examples from a CSV file."""
    draft = device.outbox.draft("trial", 1)
    job: Job = msgspec.structs.replace(make_job(task_of(make_task, graph), draft), **evaluating())
    done = subprocess.run(  # noqa: S603 - ours
        [sys.executable, "-c", BOARD], input=msgspec.json.encode(job), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == []
    found = update_of(draft).metrics
    expected = update_of(device.perform(make_task(round=2, train=False, evaluate=True))).metrics
    assert found["eval_accuracy"] == expected["eval_accuracy"]


async def test_a_process_without_torch_evaluates_and_refuses_to_train(tmp_path, make_job, make_task, graph, evaluating):
    """The agent starts it for such a task alone; one that trains is refused where the board does not."""
    trainer = TrainerProcess(tmp_path / "lock", 60.0, TrainerOptions(threads=1), trains=False)
    outbox = Outbox(tmp_path / "outbox", tmp_path / "state")
    with pytest.raises(TaskFailed, match=naming("ConfigError", "torch")):
        await trainer.ready(make_task())
    task = task_of(make_task, graph)
    await trainer.ready(task)
    draft = outbox.draft("trial", 1)
    await trainer(msgspec.structs.replace(make_job(task, draft), **evaluating()))
    outbox.commit(draft)
    [entry] = outbox.entries()
    assert entry.update.metrics["eval_examples"] == 10
    pid = trainer.pid
    maps = maps_of(pid)
    assert "onnxruntime" in maps
    assert "libtorch" not in maps
    await trainer.close()
    assert not is_alive(pid)


def maps_of(pid: int) -> str:
    """Return which files a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def bent(make: Callable[[Tree], Tree], make_task, device: Device) -> str:
    """Return the path of parameters that are not as they should be."""
    return device.params(make(build_initial(make_task().model, 1).tree()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tree: {**tree, "1.bias": torch.full((8,), torch.nan)}, "not-finite"),
        (lambda tree: {**tree, "1.bias": torch.full((8,), torch.inf)}, "not-finite"),
        (lambda tree: {**tree, "1.weight": torch.zeros(8, 4, dtype=torch.float64)}, "dtype"),
        (lambda tree: {name: leaf for name, leaf in tree.items() if name != "3.bias"}, "shape"),
        (lambda tree: {**tree, "1.weight": torch.zeros(4, 8)}, None),
    ],
)
def test_parameters_that_are_none_of_this_network_are_refused(device, make_task, graph, evaluating, change, reason):
    """ONNX Runtime itself would take the ones that are not finite."""
    with pytest.raises(WireError) as caught:
        device.perform(task_of(make_task, graph), params=bent(change, make_task, device), **evaluating())
    assert reason is None or caught.value.reason == reason


def test_damaged_graphs_are_refused(device, make_task, graph, evaluating):
    """Cut, changed, empty, of a newer format, or with something else than a network in it."""
    found = graphs.decode(graph)
    damaged = [
        b"",
        graph[:100],
        graph[::-1],
        graphs.encode(msgspec.structs.replace(found, format=2)),
        graphs.encode(msgspec.structs.replace(found, onnx=found.onnx[:200])),
        graphs.encode(msgspec.structs.replace(found, onnx=b"")),
    ]
    for data in damaged:
        with pytest.raises((WireError, ConfigError)):
            device.perform(task_of(make_task, graph), **evaluating(data))


def test_a_graph_newer_than_the_boards_onnx_runtime_is_said_to_be(device, make_task, graph, evaluating):
    import onnx  # noqa: PLC0415 - an extra

    found = graphs.decode(graph)
    proto = onnx.load_model_from_string(found.onnx)
    proto.ir_version = 99
    newer = graphs.encode(msgspec.structs.replace(found, onnx=proto.SerializeToString()))
    with pytest.raises(ConfigError, match=naming("ONNX Runtime", 99)):
        device.perform(task_of(make_task, graph), **evaluating(newer))


def test_examples_of_another_shape_or_with_more_classes_are_refused(device, make_task, graph, evaluating, tmp_path):
    for name, line, words in (("five", "1,2,3,4,5,0", ["(5,)"]), ("class", "1,2,3,4,7", [2, 7])):
        columns = ",".join("abcde"[: line.count(",")])
        path = tmp_path / f"{name}.csv"
        path.write_text(f"{columns},label\n{line}\n{line}\n")
        data = msgspec.structs.replace(make_data(), path=str(path))
        with pytest.raises(ConfigError, match=naming(*words)):
            device.perform(task_of(make_task, graph), data=data, **evaluating())


def make_data():
    from shared.data.spec import Data  # noqa: PLC0415

    return Data(source="csv", path="none", holdout=0.5)


def test_where_onnx_runtime_is_absent_the_task_says_so(device, make_task, graph, evaluating, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match="ONNX Runtime"):
        device.perform(task_of(make_task, graph), **evaluating())


def test_a_newer_task_ends_it(device, make_task, graph, evaluating):
    with pytest.raises(Superseded):
        device.perform(task_of(make_task, graph), superseded=lambda: True, **evaluating())


def test_a_device_that_holds_nothing_back_finds_nothing(device, make_task, graph, evaluating, examples):
    data = msgspec.structs.replace(examples, holdout=0.0)
    assert update_of(device.perform(task_of(make_task, graph), data=data, **evaluating())).metrics == {}


@pytest.mark.parametrize(
    "model",
    [
        Spec(name="cnn", options={"width": 2, "hidden": 8}),
        Spec(name="resnet20", options={"width": 2}),
    ],
    ids=lambda model: model.name,
)
def test_pictures_and_running_statistics_are_bound_too(tmp_path, device, make_task, evaluating, model):
    """A network with convolutions, and one with BatchNorm whose statistics are not those it began with."""
    import numpy as np  # noqa: PLC0415

    graph = graph_of(model, tmp_path)
    shape = graphs.decode(graph).input.shape[1:]
    random = np.random.default_rng(3)
    np.savez(tmp_path / "p.npz", x=random.normal(size=(40, *shape)).astype(np.float32), y=random.integers(0, 10, 40))
    data = msgspec.structs.replace(make_data(), source="npz", path=str(tmp_path / "p.npz"))
    tree = build_initial(model, 4).tree()
    for name, leaf in tree.items():
        if name.endswith(("running_mean", "running_var")):
            leaf.copy_(torch.rand(leaf.shape, generator=torch.Generator().manual_seed(1)) + 0.5)
    fields = {"data": data, "params": device.params(tree)}
    ours = update_of(device.perform(task_of(make_task, graph, model=model), **fields, **evaluating(graph))).metrics
    theirs = update_of(device.perform(make_task(round=2, train=False, evaluate=True, model=model), **fields)).metrics
    assert abs(ours["eval_accuracy"] - theirs["eval_accuracy"]) * 20 <= 1 + 1e-9
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)
