"""Batched training of replayed jobs equals training each one alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.exchange import outbox
from edge_server.replay.training_executor import TrainingExecutor
from shared.codecs.dense import dense
from shared.data.cache import DataCache
from shared.data.spec import Data, Even
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.messages import Assignment, Hyper, Spec, Transfer, Update
from tests.edge_server.harness import packed, write_examples
from tests.edge_server.replay.test_pool import order

MODEL = Spec(name="mlp", options={"features": 8, "hidden": 5, "classes": 3})
DEVICES = 4
WITHIN = 1e-5


def ordered(folder: Path, device: int, **changes) -> object:
    """Return an order of one device, whose parameters are those of the seed `start`."""
    start, hyper = changes.pop("start", 0), changes.pop("hyper", Hyper(batch_size=4))
    data, place = packed(build_initial(MODEL, start).tree()), folder / str(device)
    place.mkdir(parents=True)
    (place / "params").write_bytes(changes.pop("params", data))
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    usual = {"model": MODEL, "assignment": Assignment(seed=device, hyper=hyper), "params": transfer}
    one = order(str(place))
    task = msgspec.structs.replace(one.job.task, **usual | changes)
    share = Data(source="npz", path=str(folder.parent / "examples.npz"), partition=Even(parts=DEVICES, index=device))
    paths = {"params": str(place / "params"), "state": str(place / "state"), "data": share}
    return msgspec.structs.replace(one, job=msgspec.structs.replace(one.job, task=task, **paths))


def done(folder: Path, together: bool, changes: list[dict]) -> list[tuple[str | None, Update | None, dict]]:  # noqa: FBT001
    """Return how each order ended, its update and what that carries."""
    if not (folder / "examples.npz").exists():
        write_examples(folder, 60)
    place = folder / str(together)
    orders = [ordered(place, device, **one) for device, one in enumerate(changes)]
    found = []
    for ending, one in zip(TrainingExecutor(DataCache(), together=together).execute(orders), orders, strict=True):
        draft = Path(one.job.draft)
        if ending is not None:
            found.append((ending, None, {}))
            continue
        update = outbox.read(draft)
        tree = {} if update.params is None else dense().decode(payload.unpack(read(draft))).tree
        found.append((ending, msgspec.structs.replace(update, params=None, loss=None), tree))
    return found


def read(draft: Path) -> memoryview:
    return memoryview(bytearray((draft / outbox.PAYLOAD).read_bytes()))


MIXED = {
    "all alike": [{}] * DEVICES,
    "other beginnings": [{"start": 0}, {"start": 1}, {"start": 0}, {"start": 1}],
    "other rates": [{"hyper": Hyper(batch_size=4, learning_rate=rate)} for rate in (0.1, 0.2, 0.1, 0.2)],
    "other methods": [{"algorithm": Spec(name=name)} for name in ("fedavg", "fedprox", "fedprox", "fedavg")],
    "some that only evaluate": [{}, {"train": False}, {}, {"train": False}],
    "an unreadable beginning": [{"params": b"?"}, {}, {}, {}],
    "nothing readable": [{"params": b"?"}] * DEVICES,
    "no such method": [{"algorithm": Spec(name="nothing")}] * DEVICES,
}


@pytest.mark.parametrize("what", MIXED)
def test_every_device_gets_what_it_would_have_learned_alone(tmp_path, what):
    """Whatever the batch holds: the same updates and the same failures, parameters within rounding."""
    at_once, alone = (done(tmp_path, together, MIXED[what]) for together in (True, False))
    assert [one[:2] for one in at_once] == [one[:2] for one in alone]
    for (_, _, tree), (_, _, expected) in zip(at_once, alone, strict=True):
        assert tree.keys() == expected.keys()
        for key, leaf in expected.items():
            assert float((tree[key] - leaf).abs().max()) <= WITHIN * float(leaf.abs().max()), key


def test_only_a_desk_that_may_trains_at_once(tmp_path):
    """Else every bit is a device's own, as in a live run."""
    trees = [[tree for _, _, tree in done(tmp_path, together, [{}] * DEVICES)] for together in (True, False)]
    same = [all(torch.equal(a[key], b[key]) for key in b) for a, b in zip(*trees, strict=True)]
    assert not all(same)
