"""One task, from the bytes that came to the bytes that go: the only place where a device computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from device_agent import outbox
from device_agent.job import Job
from device_agent.metering import Spent
from device_agent.step_cost import measure
from shared import payload as payloads
from shared import spool, tensorfile
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Batch, Outcome, Result, Session
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.data.examples import Examples, batches, split_holdout
from shared.data.load import load
from shared.data.spec import Data
from shared.durable import explained
from shared.errors import CorruptFile, Superseded, TaskFailed
from shared.evaluate import score
from shared.flops import step_flops
from shared.measures import StepCost
from shared.messages import Assignment, Payload, Spec, Task, Transfer, Update
from shared.models.base import Model
from shared.models.init import initial, seeded
from shared.registry import build
from shared.tree import State, Tree, check_like

log = logging.getLogger("trainer")

_ALGORITHM, _CODEC = "algorithm/", "codec/"


@dataclass
class Bench:
    """What a trainer keeps between tasks: the device's examples and the network it built last.

    Attributes:
        read: Reads a device's examples.
    """

    read: Callable[[Data], Examples] = load
    examples: dict[bytes, tuple[Examples, Examples]] = field(default_factory=dict)
    models: dict[bytes, Model] = field(default_factory=dict)
    counted: dict[tuple[bytes, torch.Size, int], int] = field(default_factory=dict)

    def data(self, spec: Data) -> tuple[Examples, Examples]:
        """Return the device's training and held-out examples, read once."""
        key = msgspec.msgpack.encode(spec)
        if key not in self.examples:
            self.examples = {key: split_holdout(self.read(spec), spec.holdout, seed=0)}
        return self.examples[key]

    def model(self, spec: Spec) -> Model:
        """Return the network, built once; its parameters are whatever the last task left."""
        key = msgspec.msgpack.encode(spec)
        if key not in self.models:
            self.models = {key: initial(spec, seed=0)}
        return self.models[key]

    def flops(self, spec: Spec, example: torch.Size, batch_size: int) -> int:
        """Return the floating-point operations of one training step, counted once."""
        key = (msgspec.msgpack.encode(spec), example, batch_size)
        if key not in self.counted:
            self.counted = {key: step_flops(spec, example, batch_size)}
        return self.counted[key]


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
    job: Job,
    bench: Bench,
    meter: Callable[[], AbstractContextManager[Spent]],
    superseded: Callable[[], bool],
    *,
    trained: Result | None = None,
) -> None:
    """Do a job: leave the whole update in its draft, durably, but do not commit it.

    Where a replay has trained several devices at once, `trained` is what this one's training gave.

    Raises:
        TaskFailed: The device half is one this trainer cannot run.
        Superseded: `superseded` became true.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk takes no more.
    """
    task = job.task
    with meter() as spent, seeded(task.assignment.seed):
        start = start_of(job, bench)
        metrics = _evaluate(job, bench, start)
        result, transfer = _train(job, bench, start, superseded, trained) if task.train else (None, None)
    step = None
    if task.measure_s:
        with seeded(task.assignment.seed):
            step, figures = _measure(job, bench, start, meter, superseded)
        metrics |= figures
    cost = msgspec.structs.replace(spent.added_to(job.cost), bytes_up=transfer.size if transfer else 0)
    update = _update(task, result, metrics | (result.metrics if result else {}), transfer)
    outbox.write(Path(job.draft), msgspec.structs.replace(update, cost=cost, step=step))


def _update(task: Task, result: Result | None, metrics: dict[str, float], transfer: Transfer | None) -> Update:
    return Update(
        run=task.run,
        round=task.round,
        device=task.device,
        params=transfer,
        start=task.params.digest,
        weight=result.weight if result else 0.0,
        num_examples=result.num_examples if result else 0,
        loss=result.loss if result else None,
        metrics=metrics,
    )


def start_of(job: Job, bench: Bench) -> Tree:
    """Return the parameters that came with the task, as views of their file.

    Raises:
        FieldFleetError: They cannot be used.
    """
    received = payloads.unpack(spool.view(Path(job.params)))
    tree = build(CODECS, Spec(name=received.codec), "codec").decode(received).tree
    check_like(tree, bench.model(job.task.model).tree())
    return tree


def _train(
    job: Job, bench: Bench, start: Tree, superseded: Callable[[], bool], result: Result | None
) -> tuple[Result, Transfer]:
    """Run the algorithm's device half, if it was not run before, and encode what it gives.

    The device's next state goes into the draft.
    """
    task = job.task
    state, memory = _read_state(Path(job.state))
    if result is None:
        own = TaskBatches(bench.data(job.data)[0], task.assignment, superseded)
        algorithm, model = build(ALGORITHMS, task.algorithm, "algorithm"), bench.model(task.model)
        state, result = _require_whole(algorithm.local(model, state, start, own, task.assignment), task)
    log.debug("phase encoding")
    payload, memory = build(CODECS, task.codec, "codec").encode(result.tree, memory)
    if state.tree or state.facts or memory or Path(job.state).exists():
        _write_state(Path(job.draft) / outbox.STATE, state, memory)
    return result, _write_payload(job, payload)


def _measure(
    job: Job,
    bench: Bench,
    start: Tree,
    meter: Callable[[], AbstractContextManager[Spent]],
    superseded: Callable[[], bool],
) -> tuple[StepCost, dict[str, float]]:
    """Time training steps, and have the algorithm measure what else its server asks for; nothing of it is kept."""
    task = job.task
    state, _ = _read_state(Path(job.state))
    hyper = msgspec.structs.replace(task.assignment.hyper, local_epochs=1)  # begun anew as often as it takes
    own = TaskBatches(bench.data(job.data)[0], msgspec.structs.replace(task.assignment, hyper=hyper), superseded)
    batch_size = min(hyper.batch_size, len(own.examples))
    algorithm, model = build(ALGORITHMS, task.algorithm, "algorithm"), bench.model(task.model)
    cost = measure(
        lambda some: _require_whole(algorithm.local(model, state, start, some, task.assignment), task),
        own,
        meter,
        seconds=task.measure_s,
        weights=sum(leaf.numel() for leaf in model.layers.parameters()),
        flops=bench.flops(task.model, own.examples.inputs.shape[1:], batch_size),
    )
    return cost, algorithm.measure(model, start, own) if algorithm.measure else {}


def _require_whole(outcome: Outcome | Session, task: Task) -> Outcome:
    """Refuse a device half that needs the server at every step."""
    if not isinstance(outcome, tuple):
        raise TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session, which needs a newer agent")
    return outcome


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
    if not job.task.evaluate or not len(held_out := bench.data(job.data)[1]):
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
