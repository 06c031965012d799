"""One task, from the bytes that came to the bytes that go: the only place where a device computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent import outbox
from device_agent.agent import Job
from device_agent.metering import Spent
from shared import payload as payloads
from shared import spool, tensorfile
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Batch, Result
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.data.examples import Examples, batches, split_holdout
from shared.data.load import load
from shared.data.spec import Data
from shared.durable import explained
from shared.errors import CorruptFile, Superseded, TaskFailed
from shared.evaluate import score
from shared.messages import Assignment, Cost, Payload, Spec, Transfer, Update
from shared.models.base import Model
from shared.models.init import initial, seeded
from shared.registry import build
from shared.tree import State, Tree, check_like

log = logging.getLogger("trainer")

_ALGORITHM, _CODEC = "algorithm/", "codec/"


@dataclass
class Bench:
    """What a trainer keeps between tasks: the device's examples and the network it built last."""

    examples: dict[bytes, tuple[Examples, Examples]] = field(default_factory=dict)
    models: dict[bytes, Model] = field(default_factory=dict)

    def data(self, spec: Data) -> tuple[Examples, Examples]:
        """Return the device's training and held-out examples, read once."""
        key = msgspec.msgpack.encode(spec)
        if key not in self.examples:
            self.examples = {key: split_holdout(load(spec), spec.holdout, seed=0)}
        return self.examples[key]

    def model(self, spec: Spec) -> Model:
        """Return the network, built once; its parameters are whatever the last task left."""
        key = msgspec.msgpack.encode(spec)
        if key not in self.models:
            self.models = {key: initial(spec, seed=0)}
        return self.models[key]


@dataclass(frozen=True)
class TaskBatches:
    """Mini-batches of one task; stops when the task is superseded."""

    examples: Examples
    assignment: Assignment
    superseded: Callable[[], bool]

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        return len(self.examples)

    def __iter__(self) -> Iterator[Batch]:
        hyper = self.assignment.hyper
        for batch in batches(
            self.examples, batch_size=hyper.batch_size, epochs=hyper.local_epochs, seed=self.assignment.seed
        ):
            if self.superseded():
                raise Superseded("a newer task has come")
            yield batch


def perform(
    job: Job, bench: Bench, meter: Callable[[], AbstractContextManager[Spent]], superseded: Callable[[], bool]
) -> None:
    """Do a job: leave the whole update in its draft, durably, but do not commit it.

    Raises:
        TaskFailed: The device half is one this trainer cannot run.
        Superseded: `superseded` became true.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk takes no more.
    """
    task = job.task
    with meter() as spent, seeded(task.assignment.seed):
        start = _start(job, bench)
        metrics = _evaluate(job, bench, start)
        result, transfer = _train(job, bench, start, superseded) if task.train else (None, None)
    cost = msgspec.structs.replace(
        job.cost,
        compute_s=spent.compute_s,
        cpu_s=spent.cpu_s,
        joules=spent.joules,
        bytes_up=transfer.size if transfer else 0,
    )
    outbox.write(Path(job.draft), _update(job, result, metrics, transfer, cost))


def _update(
    job: Job, result: Result | None, metrics: dict[str, float], transfer: Transfer | None, cost: Cost
) -> Update:
    task = job.task
    return Update(
        run=task.run,
        round=task.round,
        device=task.device,
        params=transfer,
        start=task.params.digest,
        weight=result.weight if result else 0.0,
        num_examples=result.num_examples if result else 0,
        loss=result.loss if result else None,
        metrics=metrics | (result.metrics if result else {}),
        cost=cost,
    )


def _start(job: Job, bench: Bench) -> Tree:
    """Return the parameters that came with the task, as views of their file."""
    received = payloads.unpack(spool.view(Path(job.params)))
    tree = build(CODECS, Spec(name=received.codec), "codec").decode(received).tree
    check_like(tree, bench.model(job.task.model).tree())
    return tree


def _train(job: Job, bench: Bench, start: Tree, superseded: Callable[[], bool]) -> tuple[Result, Transfer]:
    """Run the algorithm's device half and encode what it gives; the device's next state goes into the draft."""
    task = job.task
    state, memory = _read_state(Path(job.state))
    own = TaskBatches(bench.data(job.data)[0], task.assignment, superseded)
    algorithm = build(ALGORITHMS, task.algorithm, "algorithm")
    outcome = algorithm.local(bench.model(task.model), state, start, own, task.assignment)
    if not isinstance(outcome, tuple):
        raise TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session, which needs a newer agent")
    state, result = outcome
    log.debug("phase encoding")
    payload, memory = build(CODECS, task.codec, "codec").encode(result.tree, memory)
    if state.tree or state.facts or memory or Path(job.state).exists():
        _write_state(Path(job.draft) / outbox.STATE, state, memory)
    return result, _write_payload(job, payload)


def _write_payload(job: Job, payload: Payload) -> Transfer:
    parts = payloads.pack(payload)
    with explained(Path(job.draft)), outbox.open_payload(Path(job.draft)) as file:
        for part in parts:
            file.write(part)
        size = file.tell()
        file.truncate()
    return Transfer(digest=payloads.digest(parts), size=size, frame_bytes=job.frame_bytes)


def _evaluate(job: Job, bench: Bench, start: Tree) -> dict[str, float]:
    """Return how good the received parameters are on the examples this device holds back."""
    held_out = bench.data(job.data)[1]
    if not job.task.evaluate or not len(held_out):
        return {}
    found = score(bench.model(job.task.model).layers.eval(), start, held_out)
    return {"eval_accuracy": found.accuracy, "eval_loss": found.loss, "eval_examples": float(len(held_out))}


def _read_state(path: Path) -> tuple[State, Memory]:
    """Return the algorithm's state and the codec's memory; empty ones where there are none yet."""
    try:
        both = tensorfile.load(path)
    except FileNotFoundError:
        return State(), None
    except CorruptFile as error:
        raise TaskFailed(
            f"{error}; set aside as {tensorfile.set_aside(path).name}, the next task starts afresh"
        ) from error
    memory = {key.removeprefix(_CODEC): leaf for key, leaf in both.tree.items() if key.startswith(_CODEC)}
    own = {key.removeprefix(_ALGORITHM): leaf for key, leaf in both.tree.items() if key.startswith(_ALGORITHM)}
    return State(own, both.facts), memory or None


def _write_state(path: Path, state: State, memory: Memory) -> None:
    tree = {_ALGORITHM + key: leaf for key, leaf in state.tree.items()}
    tree |= {_CODEC + key: leaf for key, leaf in (memory or {}).items()}
    tensorfile.save(path, State(tree, state.facts))
