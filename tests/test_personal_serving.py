"""A device that holds a model of its own serves it: agent, trainer and inference process over mosquitto."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from device_agent.trainer.task_files import read_state
from edge_server.journal.records import RunOpened
from edge_server.plan.sections import Chosen
from shared.algorithms.personal_model import personal_model
from shared.models.build import build_initial
from shared.protocol.inference.release import PROBES
from shared.protocol.messages import Assignment, Hyper
from tests.edge_server.processes import PATIENCE_S, Field, until, waiting
from tests.edge_server.release.runs import leave_run
from tests.machine import needs_mosquitto

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.broker, needs_mosquitto]
NETWORK = {"features": 64, "hidden": 8, "classes": 10}
TOLERANCE = 1e-5


class Personal(Field):
    """A field of two short rounds in which every device keeps a network of its own."""

    rounds = 2

    def sections(self) -> dict[str, str]:
        """Return the plan of the run."""
        return {
            "algorithm": 'name = "fedspu"',
            "hyper": "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.05",
            "optimizer": 'name = "clusters"\noptions = { keep = "0.5,1" }',
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Personal]:
    """Return a broker with two agents, of which one serves a release of the network that the plan trains."""
    from edge_server.release.create import create_release  # noqa: PLC0415 - it imports onnx
    from edge_server.release.run_model import read_model  # noqa: PLC0415
    from edge_server.release.store import export_release  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("own")
    run = leave_run(folder / "runs", "mlp", model=Chosen(name="mlp", options=NETWORK))
    export_release(create_release(read_model(run), folder / "runs", "digits"), folder / "release")
    serve = {"serve": {"releases": [str(folder / "release")], "port": 0, "own_max_drop": 0.99}}
    with waiting(folder, a=serve) as fleet:
        yield Personal(fleet, folder)


def test_a_device_serves_its_own_model_after_training_and_after_a_restart(site: Personal) -> None:
    """What an application is answered is what PyTorch computes with the parameters in the device's state."""
    state_dir, folder = site.fleet.folder / "a", site.folder
    probes = load_file(folder / "release" / PROBES)
    socket = str(state_dir / "serve.sock")
    with site.server("run") as process:
        assert process.wait(PATIENCE_S) == 0
    run = next(one.run for one in site.records("run") if isinstance(one, RunOpened))

    lasts = {f"{run}@2", f"{run}@3"}  # the last training, and the evaluation after it, which leaves it as it is

    def serves_own() -> bool:
        told = answer(socket, "/v2/models/digits/stats")
        return bool(told) and told["model_stats"][0]["parameters"].get("own_model") in lasts

    until(serves_own, "the model of the last round served")
    expected = _own_outputs(site, state_dir / "state" / run, probes["inputs"])
    largest = np.abs(expected).max()
    assert np.abs(expected - probes["outputs"]).max() > 100 * TOLERANCE * largest  # not the release's
    assert np.abs(infer(socket, "digits", probes["inputs"]) - expected).max() <= TOLERANCE * largest
    site.fleet.kill_agent("a")
    (state_dir / "serve.sock").unlink(missing_ok=True)  # of the process before
    site.fleet.agent("a")
    until(serves_own, "the same after a restart")
    assert np.abs(infer(socket, "digits", probes["inputs"]) - expected).max() <= TOLERANCE * largest


def _own_outputs(site: Personal, path: Any, inputs: np.ndarray) -> np.ndarray:
    plan = site.plan("again")
    model = build_initial(plan.model, plan.seed)
    state, _ = read_state(path)
    own = personal_model(model, state, {}, Assignment(seed=1, hyper=Hyper()))
    with torch.no_grad():
        outputs = torch.func.functional_call(model.layers.eval(), own, (torch.from_numpy(inputs),))
    return outputs.numpy()


def answer(socket: str, url: str, told: object = None) -> dict[str, Any]:
    """Return an answer over the Unix socket, empty where nobody gives one yet."""
    from tests.device_agent.inference.test_process import asked  # noqa: PLC0415

    try:
        code, answer = asked(socket, "GET" if told is None else "POST", url, told)
    except OSError:
        return {}
    return answer if code == 200 else {}


def infer(socket: str, name: str, inputs: np.ndarray) -> np.ndarray:
    tensor = {"name": "input", "shape": inputs.shape, "datatype": "FP32", "data": inputs.ravel().tolist()}
    [output] = answer(socket, f"/v2/models/{name}/infer", {"inputs": [tensor]})["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])
