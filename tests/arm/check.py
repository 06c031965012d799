"""What an emulated ARM board must do as this machine does: examine itself, draw the same weights, train, serve.

`make arm` runs it after `board.sh`. The fleet is one agent on the board and one on this machine, over mosquitto on
loopback; what came of it is read with the product's own commands.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from edge_server.fleet.broker import free_port
from shared.data.load import load
from shared.data.spec import Data
from shared.models import MODELS
from shared.models.build import DRAW
from shared.protocol.inference.release import PROBES
from tests.compat.sides import ROOT, mosquitto

SITE = ROOT / "build" / "arm" / "site"
HERE = Path(__file__).parent
BOARD = ("sh", str(HERE / "board.sh"), "run")
DEVICES = ("arm", "x86")
METHODS = {"fedavg": "", "fedspu": "keep = 0.5"}
"""With their options: of a network's half, the other half stays each device's own."""
ROUNDS = 3
PARITY = 1e-5
PATIENCE_S = 900.0
"""Emulation is slow, and perhaps the machine is busy: a guard against hanging, no bound of anything."""
DATA = {"source": "npz", "path": str(SITE / "digits.npz"), "limit": 240, "holdout": 0.2, "validation": 0.1}
PLAN = """
name = "{method}"
rounds = {rounds}
seed = 1
algorithm = {{ name = "{method}", options = {{ {options} }} }}
model = {{ name = "mlp", options = {{ features = 64, hidden = 16, classes = 10 }} }}
hyper = {{ local_epochs = 2, batch_size = 16, learning_rate = 0.05 }}
cohort = {{ min_devices = 2 }}
round = {{ deadline_s = 600.0 }}
evaluation = {{ every = 1, on_device = true }}
data = {{ source = "npz", path = "digits.npz" }}
[[device]]
name = "arm"
[[device]]
name = "x86"
"""


def output(*command: str, code: int = 0) -> str:
    """Run a command to the end; return what it wrote, and fail where it ends with another code."""
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert process.returncode == code, f"{' '.join(command[-4:])}: {process.stderr[-2000:] or process.stdout[-2000:]}"
    return process.stdout


def here(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command of this checkout."""
    return sys.executable, "-m", module, *arguments


def write(name: str, content: dict[str, Any]) -> str:
    """Write a file of settings where both sides see it; return its path."""
    path = SITE / f"{name}.json"
    path.write_text(json.dumps(content))
    return str(path)


@contextmanager
def running(name: str, command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process and its children while the block lasts; what they say is in a log beside their settings."""
    with (SITE / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def write_digits() -> None:
    """Write the demo's data set where both sides see it: a board has no scikit-learn, which it comes with."""
    arrays = {}
    for split in ("train", "test"):
        examples = load(Data(source="digits", split=split))
        arrays |= {f"x_{split}": examples.inputs.numpy(), f"y_{split}": examples.labels.numpy()}
    np.savez(SITE / "digits.npz", **arrays)


def first_weights() -> str:
    """Compare the first weights of all networks, drawn on the board, with the pinned digests."""
    for name in ("weights.py", "weights.json"):
        shutil.copy(HERE / name, SITE)
    found = json.loads(output(*BOARD, "python", str(SITE / "weights.py"), str(SITE / "weights.json")))
    assert (found["networks"], found["wrong"]) == (len(MODELS), [])
    return f"{found['networks']} networks have the pinned bits"


def doctor(config: str) -> str:
    """Have the board examine itself, its broker and its folder among it."""
    found = json.loads(output(*BOARD, "device-agent", "doctor", "--config", config, "--format", "json"))
    states = {one["name"]: one["state"] for one in found}
    assert states["torch"] == states["onnxruntime"] == states["broker"] == "ok", states
    return f"{len(states)} findings, none bad"


def probe() -> str:
    """Have the board measure what it can."""
    found = json.loads(output(*BOARD, "device-agent", "probe", "--format", "json"))
    assert found["board"] == "generic-arm", found["board"]
    assert {"cpu.f_hertz", "cputime.busy_seconds", "memory.available_bytes"} <= found["readings"].keys()
    return f"{found['board']}: {len(found['readings'])} readings"


def agents(port: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each device's name and the command that runs its agent."""
    for index, name in enumerate(DEVICES):
        partition = {"kind": "even", "seed": 0, "parts": len(DEVICES), "index": index}
        keys = {
            "device": name,
            "site": "lab",
            "state_dir": str(SITE / name),
            "trainer": {"threads": 1},
            "broker": {"port": port},
        }
        config = write(name, {**keys, "data": {**DATA, "partition": partition}})
        command = ("run", "--config", config)
        yield name, (*BOARD, "device-agent", *command) if name == "arm" else here("device_agent", *command)


def train(port: int, method: str) -> str:
    """Train three rounds; every one must have been aggregated from both updates."""
    (SITE / f"{method}.toml").write_text(PLAN.format(method=method, options=METHODS[method], rounds=ROUNDS))
    runs = SITE / f"runs-{method}"
    keys = {
        "plan": f"{method}.toml",
        "site": "lab",
        "data_dir": str(runs),
        "data_root": str(SITE),
        "broker": {"port": port},
    }
    with running(f"server-{method}", here("edge_server", "run", "--config", write(f"server-{method}", keys))) as server:
        code = server.wait(PATIENCE_S)
    assert code == 0, f"the server ended with code {code}; see {SITE / f'server-{method}.log'}"
    [run] = [path.parent for path in runs.glob("*/journal.sqlite")]
    rounds = json.loads(output(*here("edge_server", "show", str(run), "--format", "json")))["rounds"]
    expected = [(number, "aggregated", list(DEVICES), {}, {}) for number in range(1, ROUNDS + 1)]
    keys = ("round", "outcome", "arrived", "failed", "refused")
    found = [tuple(one[key] for key in keys) for one in rounds]
    assert found == expected, f"not every round has both updates: {found}"
    trace = SITE / f"trace-{method}"
    output(*here("edge_server", "trace", "export", str(run), "--out", str(trace)))
    header = json.loads((trace / "trace.json").read_text())
    boards = {one["name"]: one["board"] for one in header["devices"]}
    assert boards["arm"] == "generic-arm" != boards["x86"], boards
    assert header["draw"] == DRAW, header["draw"]
    losses = " ".join(f"{one['loss']:.3f}" for one in rounds)
    return f"{ROUNDS} rounds aggregated with both updates; loss {losses}"


def serve() -> str:
    """Serve a release of the last run from an environment without torch, within 1e-5 of what PyTorch computed here."""
    runs, folder, port = SITE / "runs-fedavg", SITE / "release", free_port()
    output(*here("edge_server", "release", "create", "last", "--name", "arm", "--data-dir", str(runs)))
    output(*here("edge_server", "release", "export", "arm", str(folder), "--data-dir", str(runs)))
    output(*BOARD, "/opt/infer/bin/python", "-c", "import torch", code=1)
    keys = {"device": "serving", "site": "lab", "state_dir": str(SITE / "serving")}
    config = write("serving", {**keys, "serve": {"releases": [str(folder)], "port": port, "memory_mb": 1000}})
    probes = load_file(folder / PROBES)
    with running("serving", (*BOARD, "/opt/infer/bin/device-agent", "run", "--config", config)):
        answer = ask(port, probes["inputs"])
    outputs = np.array(answer["data"]).reshape(answer["shape"])
    error = float(np.abs(outputs - probes["outputs"]).max() / np.abs(probes["outputs"]).max())
    assert error <= PARITY, f"outputs differ by {error:.1e} of the largest"
    return f"{len(outputs)} outputs by ONNX Runtime without torch, off by {error:.1e} of the largest"


def ask(port: int, inputs: np.ndarray) -> dict[str, Any]:
    """Return the model's output for inputs, once it is served."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as link:
            try:
                link.request("GET", "/v2/models/arm")
                model = json.load(link.getresponse())
                tensor = {**model["inputs"][0], "shape": inputs.shape, "data": inputs.ravel().tolist()}
            except (OSError, KeyError):
                assert time.monotonic() < until, f"nothing is served; see {SITE / 'serving.log'}"
                time.sleep(1)
                continue
            link.request("POST", "/v2/models/arm/infer", json.dumps({"inputs": [tensor]}))
            answer: dict[str, Any] = json.load(link.getresponse())
            return answer["outputs"][0]


def main() -> int:
    """Run all checks, print each with what it found, and say how many failed."""
    shutil.rmtree(SITE, ignore_errors=True)
    SITE.mkdir(parents=True)
    failed = 0

    def check(name: str, perform: Callable[[], str]) -> None:
        nonlocal failed
        try:
            mark, found = "ok  ", perform()
        except (AssertionError, KeyError, ValueError, OSError, subprocess.TimeoutExpired) as error:
            mark, found, failed = "FAIL", f"{type(error).__name__}: {error}", failed + 1
        sys.stdout.write(f"{mark}  {name:<14}  {found}\n")
        sys.stdout.flush()

    with ExitStack() as stack:
        port = stack.enter_context(mosquitto(SITE))
        commands = dict(agents(port))
        write_digits()
        check("first weights", first_weights)
        check("doctor", lambda: doctor(str(SITE / "arm.json")))
        check("probe", probe)
        for name, command in commands.items():
            stack.enter_context(running(f"agent-{name}", command))
        for method in METHODS:
            check(method, lambda method=method: train(port, method))
        check("serve", serve)
    sys.stdout.write(
        f"arm: {failed} of {len(METHODS) + 4} checks failed; logs in {SITE}\n" if failed else "arm: all ok\n"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
