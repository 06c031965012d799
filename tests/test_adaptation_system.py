"""Runs of frozen layers and adapters as processes over mosquitto: live as in replay, exported, released and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from edge_server.journal.records import AnyRecord, UpdateAccepted, closed_rounds
from edge_server.learner import initial_network, plan_frozen
from edge_server.plan.plan import Plan
from shared.models.adaptation import is_adapter
from shared.models.build import DRAW
from shared.models.leaves import load_leaves
from shared.tensors.file import load
from shared.tensors.tree import Tree
from tests.edge_server.processes import PATIENCE_S, Field, Fleet, captured, final, folder_of, until, waiting
from tests.machine import needs_mosquitto
from tests.test_personal_serving import TOLERANCE, answer, infer

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]
NETWORK = 'name = "cnn"\noptions = { side = 8, classes = 10 }'
CASES = {
    "lora": {"model": NETWORK, "lora": 'rank = 2\ntrain = ["9"]'},
    "freeze": {"model": f'{NETWORK}\nfreeze = ["0", "3"]'},
}
FRAMING = 2000
"""Bytes of headers and frames of a task, at most."""


@dataclass
class Adapted(Field):
    """A field whose boards train a part of a network."""

    case: str = "lora"
    rounds = 3

    def sections(self) -> dict[str, str]:
        """Return the plan of the run."""
        hyper = "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.05"
        return CASES[self.case] | {"hyper": hyper, "evaluation": "every = 1"}


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Return a site of its own: the agents of other tests must not be restarted with releases."""
    with waiting(tmp_path_factory.mktemp("boards")) as fleet:
        yield fleet


def costs(records: list[AnyRecord]) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the bytes down and up of each task."""
    return {
        (record.device, record.round): (record.update.cost.bytes_down, record.update.cost.bytes_up)
        for record in records
        if isinstance(record, UpdateAccepted)
    }


def figures(records: list[AnyRecord]) -> list[object]:
    return [(closed.loss, closed.accuracy, closed.arrived) for closed in closed_rounds(records)]


def size(leaves: Tree, names: set[str] | frozenset[str]) -> int:
    return sum(leaf.nbytes for name, leaf in leaves.items() if name in names)


@pytest.mark.parametrize("case", CASES)
def test_live_it_is_the_replay_and_what_is_served_is_the_network_with_adapters(case, boards, tmp_path):
    site = Adapted(boards, tmp_path, case=case)
    with site.server(case) as process:
        until(lambda: site.reached(case, 1), "the first round")
        boards.kill_agent("a")  # the base that it has received stays on its disk
        boards.agent("a")
        assert process.wait(PATIENCE_S) == 0
    plan, records, folder = site.plan(case), site.records(case), folder_of(tmp_path / case)
    site.require_whole(case)
    _, replayed = site.replayed(case, plan)
    assert figures(records) == figures(replayed)
    live, again = costs(records), costs(replayed)
    assert {task: up for task, (_, up) in live.items()} == {task: up for task, (_, up) in again.items()}
    require_parts_travel(plan, final(folder, site.rounds), live)
    served = serve(boards, case, tmp_path)
    inputs = torch.randn((20, 1, 8, 8), generator=torch.Generator().manual_seed(5))
    expected = outputs_with_adapters(plan, final(folder, site.rounds), inputs)
    assert np.abs(infer(served, case, inputs.numpy()) - expected).max() <= TOLERANCE * np.abs(expected).max()
    require_exported(case, tmp_path, inputs, expected)


def require_parts_travel(plan: Plan, leaves: Tree, live: dict[tuple[str, int], tuple[int, int]]) -> None:
    """Check that frozen leaves go down in round 1 alone, and never up, however an agent is killed in between."""
    frozen = plan_frozen(plan)
    trained = size(leaves, leaves.keys() - frozen)
    for (_, number), (down, up) in live.items():
        assert trained <= up <= trained + FRAMING
        least = trained + size(leaves, frozen) * (number == 1)
        assert number == 2 or least <= down <= least + FRAMING  # of round 2, frames may be lost with the agent


def outputs_with_adapters(plan: Plan, leaves: Tree, inputs: torch.Tensor) -> np.ndarray:
    """Return what the network that devices train computes, with its adapters beside the frozen layers."""
    model = initial_network(plan, DRAW)
    assert any(map(is_adapter, model.tree())) == (plan.lora is not msgspec.UNSET)
    load_leaves(model.layers, {name: leaves[name] for name in model.tree()})
    with torch.no_grad():
        outputs: np.ndarray = model.layers.eval()(inputs).numpy()
    return outputs


def serve(boards: Fleet, case: str, runs: Path) -> str:
    """Release the run's network, and restart agent b with it; return its socket."""
    places, run = ("--data-dir", runs / "releases"), folder_of(runs / case)
    released = captured("release", "create", run, "--round", Adapted.rounds, "--name", case, *places)
    assert released.code == 0, released.err
    exported = captured("release", "export", case, runs / f"{case}-release", *places)
    assert exported.code == 0, exported.err
    socket = boards.folder / "b" / "serve.sock"
    boards.more["b"] = {"serve": {"releases": [str(runs / f"{case}-release")], "port": 0}}
    boards.kill_agent("b")
    socket.unlink(missing_ok=True)
    boards.agent("b")
    until(lambda: answer(str(socket), f"/v2/models/{case}"), "the release is served")
    return str(socket)


def require_exported(case: str, folder: Path, inputs: torch.Tensor, expected: np.ndarray) -> None:
    """Check the exported graph, and that the exported leaves are the plain network's."""
    import onnxruntime  # noqa: PLC0415 - skipped where it is missing

    run = folder_of(folder / case)
    for suffix in ("onnx", "safetensors"):
        path = folder / f"{case}.{suffix}"
        done = captured("export", run, "--round", Adapted.rounds, "--format", suffix, "--out", path, "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["input"] == [1, 8, 8]
    session = onnxruntime.InferenceSession(folder / f"{case}.onnx")
    [outputs] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    assert np.abs(outputs - expected).max() <= TOLERANCE * np.abs(expected).max()
    assert not any(map(is_adapter, load(folder / f"{case}.safetensors").tree))
