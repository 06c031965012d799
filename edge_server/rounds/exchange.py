"""Exchange of one round's payloads, tasks and updates with its devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from edge_server.journal.records import UpdateAccepted
from edge_server.learner import plan_frozen
from edge_server.plan.project import plan_project
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.assign import PURPOSE_LABELS, Purpose, asks_all_devices
from edge_server.rounds.broadcast import Outgoing, group_audiences
from edge_server.rounds.check_update import check_stored_update, prune_updates
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.plugins import task_plugins
from edge_server.rounds.quorum import QuorumWait
from edge_server.rounds.split.session import SplitRound
from shared.algorithms.adaptation import frozen_leaves
from shared.algorithms.base import Algorithm, join_network, network_leaves
from shared.codecs import CODECS
from shared.codecs.dense import dense
from shared.models.base import Model
from shared.protocol.messages import INLINE_BYTES, LOSSLESS, PAYLOAD, Assignment, Task, Transfer, Update
from shared.protocol.objective import LOSS
from shared.protocol.payload import pack
from shared.registry import build
from shared.runtime.phases import log_phase
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)
PAYLOAD_SLACK_BYTES = 1 << 20


def choose_broadcast(
    algorithm: Algorithm, purpose: Purpose, model: Model, *, adapted: bool = False
) -> Callable[[State, str, Assignment], Tree]:
    """Return the function that selects the tree sent to a device.

    To evaluate or to measure running statistics, devices receive the evaluated network alone, including the top of a
    split network.

    Args:
        adapted: Whether devices have the frozen leaves, and merge adapters themselves.
    """
    alone = purpose == "evaluate" or (purpose == "statistics" and not algorithm.split)
    if alone and adapted:
        return lambda state, device, task: network_leaves(algorithm.broadcast(state, device, task))
    if purpose == "evaluate" and algorithm.personal and algorithm.personal.sent_for_evaluation:
        return algorithm.personal.sent_for_evaluation
    if alone and not algorithm.personal:
        return lambda state, _device, _told: join_network(algorithm, model, state)
    return algorithm.broadcast


def _attach_graph(task: Task, graph: Transfer) -> Task:
    return msgspec.structs.replace(task, assignment=msgspec.structs.replace(task.assignment, graph=graph))


def _pack_tree(tree: Tree) -> list[memoryview]:
    """Pack a tree in key order; a state read back from disk must have the same digest."""
    return pack(dense().encode(dict(sorted(tree.items())), None)[0])


@dataclass(frozen=True)
class TaskExchange:
    """Sends the tasks of a round, and collects its updates.

    Attributes:
        graph: ONNX graph by which devices evaluate; empty if their trainers do.
    """

    run: ActiveRun
    graph: bytes = b""
    _based: set[str] = field(default_factory=set)

    async def perform(
        self,
        number: int,
        state: State,
        assignments: dict[str, Assignment],
        *,
        accepted: dict[str, UpdateAccepted],
        purpose: Purpose = "train",
        split: SplitRound | None = None,
    ) -> Gather:
        """Send every device its task and collect updates until quorum or deadline.

        Args:
            accepted: Updates that an earlier process stored.
            split: Serves the steps of a split round.
        """
        run, server = self.run, self.run.server
        broadcast = choose_broadcast(run.algorithm, purpose, run.model, adapted=self._is_adapted(purpose))
        trees = {device: broadcast(state, device, assignment) for device, assignment in assignments.items()}
        outgoing = await self._pack_broadcasts(trees, purpose)
        payloads = [(device, payload) for payload in outgoing for device in payload.devices]
        codec = build(CODECS, run.plan.codec, "codec")

        def require(content: memoryview, update: Update) -> float:
            check_values = run.algorithm.check_update
            rule = check_values and partial(check_values, assignments[update.device])
            return check_stored_update(content, codec, trees[update.device], rule)

        gather = Gather(
            *(server.site, server.transport, run.store, server.clock, server.worker),
            run=run.name,
            number=number,
            expected=assignments,
            require=require,
            starts={device: payload.transfer.digest for device, payload in payloads},
            codec=codec,
            trains=None if purpose == "statistics" else purpose == "train",
            limit=max((2 * payload.transfer.size for payload in outgoing), default=0) + PAYLOAD_SLACK_BYTES,
            link=run.link,
            accepted=accepted,
            ceilings=server.links.ceilings,
            metrics=frozenset({*run.model.objective.metrics, LOSS}) if run.plan.task_objective else frozenset(),
        )
        if split:
            split.join(gather)
        tasks = self._create_tasks(number, assignments, outgoing, purpose)
        await self._gather_answers(gather, *await self._attach_base(state, tasks, outgoing, purpose), split, purpose)
        return gather

    async def _gather_answers(
        self,
        gather: Gather,
        tasks: dict[str, Task],
        outgoing: list[Outgoing],
        split: SplitRound | None,
        purpose: Purpose,
    ) -> None:
        log_phase(log, "gathering", run=self.run.name, round=gather.number)
        what = PURPOSE_LABELS.get(purpose, f"round {gather.number}")
        waits_for_all = asks_all_devices(self.run.plan, self.run.algorithm, purpose)
        wait = QuorumWait(self.run, gather, what)
        wait.begin()
        if purpose == "evaluate" and self.graph:
            graph = self._create_outgoing([memoryview(self.graph)], list(tasks), group=())
            tasks = {device: _attach_graph(task, graph.transfer) for device, task in tasks.items()}
            outgoing = [*outgoing, graph]
        async with self.run.server.round(gather, tasks, outgoing, split):
            await wait.until_quorum(size=None if waits_for_all else self.run.plan.cohort.size)
        await gather.close()
        self._based.update(device for device in gather.accepted if tasks[device].adaptation)

    async def _pack_broadcasts(self, trees: dict[str, Tree], purpose: Purpose) -> list[Outgoing]:
        """Pack the payloads of a round; prune updates of devices without a task in it.

        Only when a training round has been opened is the end of the last one on the disk, and its updates unnecessary.
        """
        audiences = group_audiences(trees)

        def pack_and_prune() -> list[Outgoing]:
            if purpose == "train":
                prune_updates(self.run.store.updates, trees)
            return [self._create_outgoing(_pack_tree(tree), devices) for tree, devices in audiences]

        size = sum(leaf.nbytes for tree, _ in audiences for leaf in tree.values())
        return await self.run.compute(size, pack_and_prune)

    async def _attach_base(
        self, state: State, tasks: dict[str, Task], outgoing: list[Outgoing], purpose: Purpose
    ) -> tuple[dict[str, Task], list[Outgoing]]:
        """Return tasks that name the payload of the frozen leaves, if there are some, and all payloads."""
        if not self._is_adapted(purpose):
            return tasks, outgoing
        group = [device for device, task in tasks.items() if task.shared and device not in self._based]
        base = await self.run.server.worker(self._pack_base, state, list(tasks), group)
        attached = {device: msgspec.structs.replace(task, base=base.transfer) for device, task in tasks.items()}
        return attached, [*outgoing, base]

    def _pack_base(self, state: State, devices: list[str], group: list[str]) -> Outgoing:
        """Pack the frozen leaves, which a device requests once.

        Args:
            group: Devices that have done no task with them yet: all request them now, in shared frames.
        """
        tree = frozen_leaves(state, plan_frozen(self.run.plan))
        return self._create_outgoing(_pack_tree(tree), devices, group=group)

    def _is_adapted(self, purpose: Purpose) -> bool:
        """Return true for tasks with a part of the leaves; ONNX Runtime needs all, with adapters merged."""
        return self.run.plan.adaptation is not None and not (purpose == "evaluate" and self.graph)

    def _create_outgoing(
        self, parts: list[memoryview], devices: list[str], *, group: Sequence[str] | None = None
    ) -> Outgoing:
        server = self.run.server
        frame_bytes = frames.largest_frame(self.run.link.frame_bytes, server.transport.max_payload_bytes)
        sender, patience_s = Sender.of_parts(parts, frame_bytes), self.run.link.patience_s
        return Outgoing(
            server.site, server.transport, server.clock, devices, sender, patience_s=patience_s, group=group
        )

    def _create_tasks(
        self, number: int, assignments: Mapping[str, Assignment], outgoing: list[Outgoing], purpose: Purpose
    ) -> dict[str, Task]:
        tasks = dict[str, Task]()
        for payload in outgoing:
            for device in payload.devices:
                tasks[device] = self._create_task(number, device, assignments[device], payload, purpose)
                if tasks[device].payload:
                    payload.dismiss(device)  # the others must not wait for its requests
        return tasks

    def _create_task(
        self, number: int, device: str, assignment: Assignment, payload: Outgoing, purpose: Purpose
    ) -> Task:
        plan = self.run.plan
        return Task(
            run=self.run.name,
            round=number,
            device=device,
            algorithm=plan.algorithm,
            model=plan.model.spec,
            codec=plan.codec,
            cut_codec=plan.cut_codec if assignment.is_split else LOSSLESS,
            assignment=self.run.membership.complete(self.run.server.fleet, device, assignment),
            params=payload.transfer,
            shared=payload.is_shared,
            train=purpose == "train" or (purpose == "statistics" and assignment.is_split),
            evaluate=purpose == "evaluate" or (purpose == "train" and plan.evaluation.on_device),
            measure_s=plan.measure.seconds if purpose == "measure" else 0.0,
            deadline_s=plan.round.deadline_s,
            plugins=task_plugins(plan),
            objective=plan.task_objective,
            adaptation=plan.adaptation if self._is_adapted(purpose) else None,
            project=plan_project(plan),
            payload=self._inline_payload(device, payload),
        )

    def _inline_payload(self, device: str, payload: Outgoing) -> bytes:
        """Return a small payload's content if the device's agent takes it inside its task; else nothing."""
        server = self.run.server
        status = server.fleet.statuses.get(device)
        most = min(INLINE_BYTES, server.transport.max_payload_bytes // 2)  # the rest of the task needs room too
        is_inline = status is not None and PAYLOAD in status.knows and payload.transfer.size <= most
        return payload.content if is_inline else b""
