"""Write a task's results to its draft; build the update message."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import safetensors.torch

from device_agent.exchange import outbox
from device_agent.inference.release_folder import OWN, OwnModel, compute_own_digest
from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer import device_state
from device_agent.trainer.held_out_score import HeldOutScore
from device_agent.trainer.interface import Job
from shared.algorithms.base import Result
from shared.codecs import CODECS
from shared.codecs.base import Memory
from shared.protocol import payload as payloads
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Payload, Spec, Task, Transfer, Update
from shared.registry import build
from shared.runtime.durable import explain_disk_errors
from shared.runtime.phases import log_phase
from shared.tensors.placement import CPU, state_to_device, to_device
from shared.tensors.tree import State, Tree, tensor_bytes

NO_SCORE = HeldOutScore()
log = logging.getLogger("trainer")


def move_result_to_cpu(result: Result) -> Result:
    """Return a copy of a result with its tensors on the CPU."""
    return replace(result, tree=to_device(result.tree, CPU), coverage=to_device(result.coverage, CPU))


def write_result(job: Job, state: State, memory: Memory, result: Result) -> Transfer:
    """Encode and write a result, and the device's state for its next task; return the announcement of the payload.

    Args:
        state: The algorithm's state after training.
        memory: The codec's memory before encoding.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    log_phase(log, "encoding")
    payload, memory = build(CODECS, _select_codec(job.task), "codec").encode(result.tree, memory)
    changes = not job.task.assignment.measures_statistics  # else the old state stays, for a repetition of the round
    if changes and (state.tree or state.facts or memory or Path(job.state).exists()):
        device_state.write(Path(job.draft) / outbox.STATE, state_to_device(state, CPU), memory)
    return write_payload(job, payload)


def _select_codec(task: Task) -> Spec:
    """Return the plan's codec; `topk` with the share that was allocated to the device."""
    sent = task.assignment.allocation.sent
    if sent is None or task.codec.name != "topk":
        return task.codec
    return msgspec.structs.replace(task.codec, options={**task.codec.options, "share": sent})


def write_personal_model(job: Job, tree: Tree) -> None:
    """Write the device's personal model, for the board to serve; `outbox.write` makes it durable.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    leaves = {name: leaf.contiguous() for name, leaf in to_device(tree, CPU).items()}
    contents = compute_own_digest({name: tensor_bytes(leaf) for name, leaf in leaves.items()})
    task = job.task
    metadata = OwnModel(model=task.model, run=task.run, round=task.round, contents=contents, project=task.project)
    data = safetensors.torch.save(leaves, {OWN: msgspec.json.encode(metadata).decode()})
    path = Path(job.draft) / outbox.OWN
    with explain_disk_errors(path):
        path.write_bytes(data)


def write_payload(job: Job, payload: Payload) -> Transfer:
    """Write a payload and return its announcement.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    parts = payloads.pack(payload)
    with explain_disk_errors(Path(job.draft)), outbox.open_payload(Path(job.draft)) as file:
        for part in parts:
            file.write(part)
        size = file.tell()
        file.truncate()
    return Transfer(digest=payloads.digest(parts), size=size, frame_bytes=job.frame_bytes)


def build_update(  # noqa: PLR0913 - the parts of an update
    job: Job,
    usage: BlockCost,
    held_out: HeldOutScore = NO_SCORE,
    *,
    result: Result | None = None,
    transfer: Transfer | None = None,
    step: StepCost | None = None,
    trained_on: str,
) -> Update:
    """Return the update of a task.

    Args:
        usage: Cost of the work, which is added to that of the job.
        result: Result of training; None without training.
        transfer: Announcement of the payload; None without one.
        step: Cost of a training step, if measured.
        trained_on: Description of the computing device.
    """
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
        metrics={**held_out.metrics, **(result.metrics if result else {})},
        sums=dict(held_out.sums),
        cost=msgspec.structs.replace(usage.add_to(job.cost), bytes_up=transfer.size if transfer else 0),
        step=step,
        trained_on=trained_on,
    )
