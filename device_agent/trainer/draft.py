"""What a task gave, written into its draft: payload, the device's next state, and the message that names them."""

from __future__ import annotations

import logging
from pathlib import Path

from device_agent.exchange import outbox
from device_agent.trainer import device_state
from device_agent.trainer.interface import Job
from shared.algorithms.base import Result
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.protocol import payload as payloads
from shared.protocol.measurements import Cost, StepCost
from shared.protocol.messages import Payload, Transfer, Update
from shared.registry import build
from shared.runtime.durable import explained
from shared.tensors.tree import State

log = logging.getLogger("trainer")


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
