"""Files of a task: its parameters, the device's state, the draft with its results and its update."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from device_agent.exchange import outbox, state_files
from device_agent.inference.release_folder import OWN, OwnModel, compute_own_digest
from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.interface import Job
from shared.algorithms.base import Result
from shared.codecs import CODECS
from shared.codecs.base import Codec, Memory, decode_bounded
from shared.errors import CorruptFile, TaskFailed
from shared.objectives.metric_sums import HeldOutScore
from shared.protocol import payload as payloads
from shared.protocol.measurements import StepCost
from shared.protocol.messages import Payload, Spec, Task, Transfer, Update
from shared.registry import build
from shared.runtime.durable import explain_disk_errors
from shared.runtime.phases import log_phase
from shared.tensors import file
from shared.tensors.tree import CPU, State, Tree, check_like, state_to_device, tensor_bytes, to_device
from shared.transfer import to_file

NO_SCORE = HeldOutScore()
log = logging.getLogger("trainer")


_ALGORITHM, _CODEC = "algorithm/", "codec/"
"""Prefixes of leaves in a state file: the algorithm's state, and the codec's memory."""


def read_parameters(path: Path, like: Tree | None) -> Tree:
    """Return the leaves of a payload, as views of its file.

    Args:
        like: Outline of the network, which the leaves must be part of; None if their shapes are not known.

    Raises:
        WireError: They are of another shape or type, or not finite.
    """
    received = payloads.unpack(to_file.view(path))
    codec = _build_codec(msgspec.json.encode(Spec(name=received.codec)))
    if like is None:
        tree = decode_bounded(codec, received).tree
    else:
        check_like(codec.outline(received), like)
        tree = codec.decode(received).tree
    check_like(tree, tree if like is None else like)
    return tree


def build_codec(spec: Spec) -> Codec:
    """Build a codec, or return an equal one: codecs are pure functions.

    Raises:
        ConfigError: The codec or one of its options is unknown.
    """
    return _build_codec(msgspec.json.encode(spec))


@lru_cache(maxsize=8)
def _build_codec(encoded: bytes) -> Codec:
    return build(CODECS, msgspec.json.decode(encoded, type=Spec), "codec")


def read_state(path: Path, device: torch.device = CPU) -> tuple[State, Memory]:
    """Return the algorithm's state and the codec's memory; empty in a device's first task.

    Raises:
        TaskFailed: The file is damaged; it is set aside, and the next task starts without state.
    """
    if not path.exists() or state_files.is_empty_state(path):
        return State(), None
    try:
        both = file.load(path)
    except FileNotFoundError:
        return State(), None
    except CorruptFile as error:
        raise TaskFailed(f"{error}; set aside as {file.set_aside(path).name}, the next task starts afresh") from error
    memory = {key.removeprefix(_CODEC): leaf for key, leaf in both.tree.items() if key.startswith(_CODEC)}
    tree = {key.removeprefix(_ALGORITHM): leaf for key, leaf in both.tree.items() if key.startswith(_ALGORITHM)}
    return State(to_device(tree, device), both.facts), memory or None


def write_state(path: Path, state: State, memory: Memory) -> None:
    """Write the algorithm's state and the codec's memory atomically.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    tree = {_ALGORITHM + key: leaf for key, leaf in state.tree.items()}
    tree |= {_CODEC + key: leaf for key, leaf in (memory or {}).items()}
    file.save(path, State(tree, state.facts))


def write_result(job: Job, state: State, memory: Memory, result: Result) -> Transfer:
    """Encode and write a result, and the device's state for its next task; return the announcement of the payload.

    Args:
        state: The algorithm's state after training, on any device as the result.
        memory: The codec's memory before encoding.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    log_phase(log, "encoding")
    result = replace(result, tree=to_device(result.tree, CPU), coverage=to_device(result.coverage, CPU))
    payload, memory = build_codec(_select_codec(job.task)).encode(result.tree, memory)
    changes = not job.task.assignment.measures_statistics  # else the old state stays, for a repetition of the round
    if changes and (state.tree or state.facts or memory or Path(job.state).exists()):
        write_state(Path(job.draft) / outbox.STATE, state_to_device(state, CPU), memory)
    return write_payload(job, payload)


def _select_codec(task: Task) -> Spec:
    """Return the plan's codec; `topk` with the share that was allocated to the device."""
    if task.codec.name != "topk" or (sent := task.assignment.allocation.sent) is None:
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
    digest = payloads.digest(parts)
    return Transfer(digest=digest, size=outbox.write_payload(Path(job.draft), parts), frame_bytes=job.frame_bytes)


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
