"""Power sources that do as they are told.

An outbox on files, and updates in it as a trainer leaves them.

A split task of a small perceptron, and a server's half that is no network: a gradient that follows from features.

Boards whose clocks and power mode can be set: files below a folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import torch

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from device_agent.measurement.tuning.plan import CPUFREQ_FOLDER
from device_agent.trainer.split_training import SplitTraining
from shared.codecs.dense import dense
from shared.errors import NoData
from shared.protocol import payload
from shared.protocol.measurements import Provenance, Reading
from shared.protocol.messages import Assignment, Hyper, Missed, Spec, Task, Transfer, Update
from shared.runtime.clock import Clock, monotonic
from shared.runtime.durable import explain_disk_errors
from tests.machine import grow

PROVENANCE = Provenance(source="given", quality="measured", uncertainty=0.02)


@dataclass
class Given:
    """Watts as a function of time; counts its reads, fails or hangs when told to."""

    watts: Callable[[float], float] = lambda _: 4.0
    clock: Clock = monotonic
    kind: Literal["instant", "mean"] = "instant"
    period_s: float = 0.01
    cost_s: float = 0.0
    provenance: Provenance = PROVENANCE
    fails: bool = False
    reads: int = 0
    free: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.free.set()

    def read(self) -> Reading:
        self.reads += 1
        self.free.wait(20)
        if self.fails:
            raise NoData("it does not answer", lack="busy")
        at = self.clock()
        return Reading(value=self.watts(at), unit="watts", source="given", quality="measured", at=at)


@dataclass
class Hand:
    """A clock that somebody moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


BYTES = Random(3).randbytes(1 << 20)


def make(folder: Path, limit: int = outbox.LIMIT_BYTES) -> Outbox:
    return Outbox(folder / "outbox", folder / "state", limit)


def put(box: Outbox, number: int, data: bytes = BYTES, state: bytes = b"") -> None:
    """Commit an update as a trainer does."""
    draft = box.draft("trial", number)
    with explain_disk_errors(draft), outbox.open_payload(draft) as file:
        file.write(data)
        file.truncate()
    if state:
        (draft / outbox.STATE).write_bytes(state)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    outbox.write(draft, Update(run="trial", round=number, device="board", params=transfer))
    box.commit(draft)


STEPS = 4
ALGORITHM = Spec(name="fedsl", options={"period": STEPS, "drop": 0.3, "sparsity": 0.2})


def split(task: Task, **fields) -> Task:
    """Return a task as a split one."""
    hyper = Hyper(batch_size=8, learning_rate=0.1, local_epochs=STEPS)
    values = {"first_step": 0, "total_steps": 2 * STEPS}
    assignment = Assignment(seed=5, hyper=hyper, steps=STEPS, values=values)
    return msgspec.structs.replace(task, **({"algorithm": ALGORITHM, "assignment": assignment} | fields))


def below(folder: Path, parameters: bytes) -> str:
    """Write the part of the parameters below the cut as the download leaves it; return its path."""
    tree = dense().decode(payload.unpack(memoryview(bytearray(parameters)))).tree
    bottom = {key: leaf for key, leaf in tree.items() if key.startswith("1.")}
    path = folder / "params-below"
    path.write_bytes(b"".join(payload.pack(dense().encode(bottom, None)[0])))
    return str(path)


def answer(parts: Iterable[memoryview]) -> memoryview:
    """Return what the server sends down for what came up."""
    up = dense().decode(payload.unpack(memoryview(bytearray(b"".join(parts))))).tree
    down = {"gradient": torch.tanh(up["features"]), "loss": up["features"].square().mean()}
    return memoryview(bytearray(b"".join(payload.pack(dense().encode(down, None)[0]))))


def finish(splitting: AbstractContextManager[SplitTraining]) -> int:
    """Drive a split training to its end in this process; return its steps."""
    count = 0
    with splitting as training:
        while training.up is not None:
            training.advance(answer(training.up))
            count += 1
    return count


@dataclass
class Exchanged:
    """The agent's exchange, answered here.

    Attributes:
        miss: Steps, by that at which this is said, that went on without the device.
    """

    miss: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    carried: tuple[int, int] = (0, 0)

    async def __call__(self, step: int, parts) -> memoryview | Missed:
        self.steps.append(step)
        if step in self.miss:
            return Missed(self.miss[step])
        came = answer(parts)
        self.carried = self.carried[0] + sum(part.nbytes for part in parts), self.carried[1] + came.nbytes
        return came


def payload_of(box: Outbox, number: int) -> bytes:
    """Return the bytes of the update of a round."""
    return next(entry for entry in box.entries() if entry.update.round == number).payload.read_bytes()


KHZ = (600_000, 900_000, 1_200_000, 1_500_000)
GOVERNORS = "ondemand performance powersave"
CONF = "\n".join(f"< POWER_MODEL ID={number} NAME={name} >" for number, name in enumerate(("15W", "25W", "7W")))
JETSON = """
schema = 1
id = "jetson"
name = "Jetson"
[power_mode]
kind = "nvpmodel"
needs_reboot = ["7W"]
"""


def with_clocks(root: Path, *policies: str, least: int = KHZ[0], most: int = KHZ[-1]) -> Path:
    """Grow CPU frequency policies, all of them at `least` to `most` kHz."""
    for name in policies or ("policy0",):
        folder = f"{CPUFREQ_FOLDER}/{name}"
        files = {
            "scaling_governor": "ondemand",
            "scaling_available_governors": GOVERNORS,
            "scaling_available_frequencies": " ".join(map(str, KHZ)),
            "scaling_min_freq": least,
            "scaling_max_freq": most,
            "cpuinfo_min_freq": KHZ[0],
            "cpuinfo_max_freq": KHZ[-1],
        }
        grow(root, {f"{folder}/{file}": content for file, content in files.items()})
    return root


def with_modes(root: Path, number: int) -> Path:
    """Grow the power modes of a Jetson that is in one of them."""
    status = f"pmode:{number:04d} fmode:fan_mode_quiet"
    return grow(root, {"etc/nvpmodel.conf": CONF, "var/lib/nvpmodel/status": status})


def content(root: Path) -> dict[str, str]:
    """Return what all files below a folder hold."""
    return {str(path.relative_to(root)): path.read_text().strip() for path in root.rglob("*") if path.is_file()}


def clocks(root: Path, policy: str = "policy0") -> tuple[str, int, int]:
    """Return governor, least and most kHz of a policy."""
    folder = root / CPUFREQ_FOLDER / policy
    governor, least, most = (folder / f"scaling_{name}" for name in ("governor", "min_freq", "max_freq"))
    return governor.read_text().strip(), int(least.read_text()), int(most.read_text())
