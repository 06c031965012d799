"""One task, from the bytes that came to the bytes that go: the only place where a device computes.

What a task gave, written into its draft: payload, the device's next state, and the message that names them.

A split session as the device computes it: what goes up is yielded to whoever drives it, who sends what comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.exchange import outbox
from device_agent.measurement.task_meter import Spent
from device_agent.trainer import device_state
from device_agent.trainer.interface import Job
from device_agent.trainer.step_timing import measure
from device_agent.trainer.workspace import Bench
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Outcome, Result, Session
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.build import seeded
from shared.models.evaluate import score
from shared.protocol import payload as payloads
from shared.protocol.measurements import Cost, StepCost
from shared.protocol.messages import Missed, Payload, Spec, Task, Transfer, Update, mix
from shared.registry import build
from shared.runtime.durable import explained
from shared.tensors.tree import State, Tree, check_like
from shared.transfer import to_file


def encode(job: Job, state: State, memory: Memory, result: Result) -> Transfer:
    """Write what goes up, and what the device will begin its next task with.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    log.debug("phase encoding")
    payload, memory = build(CODECS, job.task.codec, "codec").encode(result.tree, memory)
    if state.tree or state.facts or memory or Path(job.state).exists():
        device_state.write(Path(job.draft) / outbox.STATE, state, memory)
    return _write_payload(job, payload)


def _write_payload(job: Job, payload: Payload) -> Transfer:
    parts = payloads.pack(payload)
    with explained(Path(job.draft)), outbox.open_payload(Path(job.draft)) as file:
        for part in parts:
            file.write(part)
        size = file.tell()
        file.truncate()
    return Transfer(digest=payloads.digest(parts), size=size, frame_bytes=job.frame_bytes)


def finish(
    job: Job,
    result: Result | None,
    transfer: Transfer | None,
    metrics: dict[str, float],
    cost: Cost,
    step: StepCost | None,
) -> None:
    """Write the message and make the draft durable.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    task = job.task
    update = Update(
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
        step=step,
    )
    outbox.write(Path(job.draft), update)


Up: TypeAlias = list[memoryview]
"""A payload's bytes in parts, views of tensors that are used again once the answer is there."""

Performing: TypeAlias = Generator[Up, memoryview | Missed, None]
"""A job under way: at every step of a split session it yields a payload and is sent the server's, in memory that nobody
else uses. Its first payload belongs to step 1; after a payload comes that of the next step, after `Missed` that of so
many steps later. A task that is not split yields nothing."""


def exchanged(session: Session, task: Task, spent: Spent) -> Generator[Up, memoryview | Missed, Outcome]:
    """Drive a split device half, in bytes; return what it gives.

    Every step draws from torch's own generator as its own seed says, whatever other sessions do in between.

    Args:
        session: The algorithm's, not begun yet.
        task: Its seed, device and codec count.
        spent: Is told when computing rests.

    Raises:
        WireError: What came down cannot be decoded.
    """
    codec = build(CODECS, task.cut_codec, "codec")
    step, down = 1, None
    try:
        while True:
            with seeded(mix(task.assignment.seed, step, task.device)):
                up: Tree = next(session) if down is None else session.send(down)
                parts = payloads.pack(codec.encode(up, None)[0])
            del up, down
            with spent.exchanging():
                came = yield parts
            del parts  # views of what the session computes with
            down = came if isinstance(came, Missed) else codec.decode(payloads.unpack(came)).tree
            step += came.steps if isinstance(came, Missed) else 1
    except StopIteration as done:
        outcome: Outcome = done.value
        return outcome
    finally:
        session.close()


log = logging.getLogger("trainer")

Block: TypeAlias = Callable[[], AbstractContextManager[Spent]]
"""Begins to measure a block of computing, which is told what it spent when it is left."""

ALONE = "a device alone has only the part below the cut"


def perform(
    job: Job, bench: Bench, meter: Block, superseded: Callable[[], bool], *, trained: Result | None = None
) -> None:
    """Do a job that needs nobody else: leave the whole update in its draft, durably, but do not commit it.

    Raises:
        TaskFailed: The device half is one that needs the server at every step.
        FieldFleetError: As `performing`.
    """
    with closing(performing(job, bench, meter, superseded, trained=trained)) as work:
        for _ in work:
            raise TaskFailed(f"algorithm {job.task.algorithm.name!r} trains in a split session: {ALONE}")


def performing(
    job: Job,
    bench: Bench,
    meter: Block,
    superseded: Callable[[], bool],
    *,
    trained: Result | None = None,
    carried: Callable[[], tuple[int, int] | None] = lambda: None,
) -> Performing:
    """Do a job step by step: leave the whole update in its draft, durably, but do not commit it.

    Where a replay has trained several devices at once, `trained` is what this one's training gave. `carried` tells the
    bytes of frames that a split session took so far, up and down; None where nobody counts them.

    Raises:
        Superseded: `superseded` became true.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk takes no more.
    """
    task, metrics, result, transfer, step = job.task, dict[str, float](), None, None, None
    with meter() as spent:
        algorithm = build(ALGORITHMS, task.algorithm, "algorithm")
        if algorithm.serve:
            result, transfer = yield from _split(job, bench, superseded, spent)
        else:
            with seeded(task.assignment.seed):
                start, state = start_of(job, bench), None
                if not algorithm.serves:
                    metrics = _evaluate(job, bench, start)
                if task.train:
                    state, result, transfer = _train(job, bench, start, superseded, trained)
                if algorithm.serves and task.evaluate:
                    own = device_state.read(Path(job.state))[0] if state is None else state
                    used = algorithm.serves(bench.model(task.model), own, start, task.assignment)
                    metrics = _evaluate(job, bench, used)
    if task.measure_s:
        with seeded(task.assignment.seed):
            step, figures = _measure(job, bench, start, meter, superseded)
        metrics |= figures
    up, down = carried() or (None, None)
    cost = msgspec.structs.replace(
        spent.added_to(job.cost), bytes_up=transfer.size if transfer else 0, features_bytes=up, gradient_bytes=down
    )
    finish(job, result, transfer, metrics, cost, step)


def start_of(job: Job, bench: Bench) -> Tree:
    """Return the parameters that came with the task, as views of their file.

    Raises:
        FieldFleetError: They cannot be used.
    """
    return _received(job, bench.model(job.task.model))


def _received(job: Job, model: Model) -> Tree:
    received = payloads.unpack(to_file.view(Path(job.params)))
    tree = build(CODECS, Spec(name=received.codec), "codec").decode(received).tree
    chooses = build(ALGORITHMS, job.task.algorithm, "algorithm").accepts is not None
    check_like(tree, tree if chooses else model.tree())
    return tree


def _train(
    job: Job, bench: Bench, start: Tree, superseded: Callable[[], bool], result: Result | None
) -> tuple[State, Result, Transfer]:
    """Run the algorithm's device half, if it was not run before, and encode what it gives."""
    task = job.task
    state, memory = device_state.read(Path(job.state))
    if result is None:
        own = bench.batches(job.data, task.assignment, superseded)
        algorithm, model = build(ALGORITHMS, task.algorithm, "algorithm"), bench.model(task.model)
        state, result = _require_whole(algorithm.local(model, state, start, own, task.assignment), task)
    return state, result, encode(job, state, memory, result)


def _split(
    job: Job, bench: Bench, superseded: Callable[[], bool], spent: Spent
) -> Generator[Up, memoryview | Missed, tuple[Result, Transfer]]:
    """Run a split device half on a network without storage: only the part below the cut takes memory here."""
    task = job.task
    if task.evaluate or task.measure_s or not task.train:
        raise TaskFailed(f"algorithm {task.algorithm.name!r} neither evaluates nor times steps on a device: {ALONE}")
    model = bench.skeleton(task.model)
    state, memory = device_state.read(Path(job.state))
    own = bench.batches(job.data, task.assignment, superseded)
    algorithm = build(ALGORITHMS, task.algorithm, "algorithm")
    session = algorithm.local(model, state, _received(job, model), own, task.assignment)
    if isinstance(session, tuple):
        raise TaskFailed(f"algorithm {task.algorithm.name!r} is split, its device half is not: a fault of its own")
    state, result = yield from exchanged(session, task, spent)
    with seeded(task.assignment.seed):
        return result, encode(job, state, memory, result)


def _measure(
    job: Job, bench: Bench, start: Tree, meter: Block, superseded: Callable[[], bool]
) -> tuple[StepCost, dict[str, float]]:
    """Time training steps, and have the algorithm measure what else its server asks for; nothing of it is kept."""
    task = job.task
    state, _ = device_state.read(Path(job.state))
    hyper = msgspec.structs.replace(task.assignment.hyper, local_epochs=1)  # begun anew as often as it takes
    own = bench.batches(job.data, msgspec.structs.replace(task.assignment, hyper=hyper), superseded)
    batch_size = min(hyper.batch_size, len(own.examples))
    algorithm, model = build(ALGORITHMS, task.algorithm, "algorithm"), bench.model(task.model)
    timed = algorithm.timed or algorithm.local
    cost = measure(
        lambda some: _require_whole(timed(model, state, start, some, task.assignment), task),
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
        raise TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session: {ALONE}")
    return outcome


def _evaluate(job: Job, bench: Bench, tree: Tree) -> dict[str, float]:
    """Return how good parameters are on the examples this device holds back: those received, or its personal ones."""
    if not job.task.evaluate or not len(held_out := bench.data(job.data)[1]):
        return {}
    found = score(bench.model(job.task.model).layers.eval(), tree, held_out)
    return {"eval_accuracy": found.accuracy, "eval_loss": found.loss, "eval_examples": float(len(held_out))}
