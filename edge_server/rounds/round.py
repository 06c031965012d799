"""Run one round: assign, broadcast, collect, aggregate, record."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Membership
from edge_server.journal.checkpoints import Store
from edge_server.journal.disk import P, R, retry_write
from edge_server.journal.records import Noted, RoundClosed, RoundOpened, UpdateAccepted
from edge_server.learner import plan_algorithm, plan_frozen
from edge_server.plan.plan import Plan
from edge_server.plan.project import plan_project
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.aggregate import aggregate_updates
from edge_server.rounds.assign import PURPOSE_LABELS, Purpose, TaskAssigner, asks_all_devices
from edge_server.rounds.broadcast import Outgoing, group_audiences
from edge_server.rounds.check_update import check_stored_update, prune_updates
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.evaluation import running_statistics as statistics
from edge_server.rounds.evaluation.round_figures import build_round_record
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.plugins import task_plugins
from edge_server.rounds.precision import note_full_precision
from edge_server.rounds.quorum import QuorumWait
from edge_server.rounds.split.session import SplitRound, open_split_round, split_figures
from shared.algorithms.adaptation import frozen_leaves
from shared.algorithms.base import Algorithm, Cohort, join_network, network_leaves
from shared.codecs import CODECS
from shared.codecs.dense import dense
from shared.data.examples import Examples
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.models.build import seed_torch
from shared.models.evaluate import Score, score
from shared.protocol.messages import INLINE_BYTES, LOSSLESS, PAYLOAD, Assignment, Task, Transfer, Update, derive_seed
from shared.protocol.objective import LOSS
from shared.protocol.payload import pack
from shared.protocol.topics import SERVER
from shared.registry import build
from shared.runtime.executor import Effect, run_uninterrupted
from shared.runtime.phases import log_phase
from shared.tensors.placement import CPU, Device, state_to_device, to_device
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)
PAYLOAD_SLACK_BYTES = 1 << 20
ROUND_END, SERVER_TRAINING = "round end", "server training"
"""Effect names under which the server's own computing time is charged."""


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


@dataclass
class Rounds:
    """Runs the rounds of one run. Holds no learning state.

    Attributes:
        model: Without storage; its `example` is the input shape of the server's own data, empty without such data: then
            devices may bring any shape.
        test: The server's test data.
        labelled: The server's own training data, for algorithms that use it.
        device: Where the server trains and evaluates; states between rounds are on the CPU.
        graph: ONNX graph by which devices evaluate; empty if their trainers do.
        flush_observations: Awaited before an opening is recorded, so that earlier observations precede it.
        neighbours: The other sites of a multi-site plan.
        recorded_rounds: Recorded rounds whose assignments are repeated, by number.
    """

    run: str
    plan: Plan
    server: Server
    store: Store
    algorithm: Algorithm
    link: LinkConfig
    model: Model
    test: Examples | None
    flush_observations: Callable[[], Awaitable[None]] | None = None
    membership: Membership = field(default_factory=Membership)
    labelled: Examples | None = None
    device: Device = CPU
    graph: bytes = b""
    neighbours: Neighbours | None = None
    recorded_rounds: Mapping[int, RoundOpened] = field(default_factory=dict)
    assigner: TaskAssigner = field(init=False)
    _based: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.membership.silent.least = self.plan.round.min_updates
        self.assigner = TaskAssigner(
            run=self.run,
            plan=self.plan,
            server=self.server,
            store=self.store,
            algorithm=self.algorithm,
            model=self.model,
            membership=self.membership,
            neighbours=self.neighbours,
            recorded_rounds=self.recorded_rounds,
        )

    async def run_round(
        self,
        number: int,
        state: State,
        open_round: RoundOpened | None,
        accepted: dict[str, UpdateAccepted],
        *,
        already_s: float = 0.0,
    ) -> tuple[State, RoundClosed]:
        """Run or resume a round; return the next state and the round's record.

        Args:
            number: The round, from 1.
            open_round: Its opening, if an earlier process recorded it.
            accepted: Updates that the earlier process stored.
            already_s: Seconds since that opening.
        """
        started = self.server.clock() - already_s
        if self.neighbours:
            await self.neighbours.begin(number)
        open_round = open_round or await self._record_opening(number, state)
        assignments = open_round.assignments
        begun = await self._train_on_server(number, state, assignments)
        split = await self.open_split(number, begun, assignments) if self.algorithm.split else None
        gather = await self.exchange(number, begun, assignments, accepted=accepted, split=split)
        for note in note_full_precision(self.plan, gather, self.membership.full_precision):
            await self.persist(self.store.append, note)
        trained, scored, batches = split.top.result if split else begun, None, None
        after = await self._aggregate(trained, assignments, gather)
        if after is not None:
            state, batches = await self._measure_statistics(
                number, await self._mix_with_neighbours(number, after), gather
            )
            log_phase(log, "checkpointing", run=self.run, round=number)
            _, scored = await asyncio.gather(
                self.persist(Effect(ROUND_END, self.store.save), number, state),
                self._score(state, number),
            )
        closed = build_round_record(
            *(gather, self.server.flood.take_refused(), scored, self.model.objective),
            enough=after is not None,
            personal=self.algorithm.personal is not None,
        )
        at = self.server.clock()
        figures = split_figures(split) | {"statistics_batches": batches, "terms": self._finite_terms(after or trained)}
        closed = msgspec.structs.replace(closed, seconds=at - started, at=at, **figures)
        log_phase(log, "closing", run=self.run, round=number)
        await self.persist(self.store.append, closed)
        return state, closed

    async def open_split(self, number: int, state: State, assignments: Mapping[str, Assignment]) -> SplitRound | None:
        begin = partial(open_split_round, number=number, state=state, assignments=assignments)
        return await self.server.worker(
            begin, self.plan, self.algorithm, self.model, self.server, self.link, self.test, self.device
        )

    async def _record_opening(self, number: int, state: State) -> RoundOpened:
        """Assign a round and record its opening, after earlier observations."""
        open_round = await self.assigner.open_round(state, number)
        if self.flush_observations:
            await self.flush_observations()
        await self.persist(self.store.append, open_round)
        return open_round

    async def _mix_with_neighbours(self, number: int, state: State) -> State:
        """Return the model after mixing with neighbouring sites; unchanged if no mixing is due."""
        sites = self.plan.sites
        if self.neighbours is None or not sites or not sites.is_mixed(number):
            return state
        log_phase(log, "mixing", run=self.run, round=number)
        return await self.neighbours.mix(number, state)

    def _finite_terms(self, state: State) -> dict[str, float] | msgspec.UnsetType:
        """Return the algorithm's finite figures of a round; unset without any."""
        server = self.algorithm.server
        terms = server.terms(state) if server and server.terms else {}
        return {name: value for name, value in terms.items() if math.isfinite(value)} or msgspec.UNSET

    async def persist(self, write: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write to the run's store; wait while the disk is full."""
        return await retry_write(self.server.worker, self.store.retry_s, write, *args, **kwargs)

    async def _train_on_server(self, number: int, state: State, assignments: Mapping[str, Assignment]) -> State:
        """Return the state after the server's own training; deterministic, so that a restart repeats it.

        A missed round discards it, like the training of the devices.
        """
        server, plan = self.algorithm.server, self.plan
        if server is None:
            return state
        assert self.labelled is not None
        inputs, labels = self.labelled.inputs, self.labelled.labels
        cohort = Cohort(tuple(sorted(assignments)), plan.hyper_of(number), plan.seed, plan.rounds)

        def train() -> State:
            with seed_torch(derive_seed(plan.seed, number, f"{SERVER}/training")):
                labelled = inputs.to(self.device), labels.to(self.device)
                return state_to_device(
                    server.train(self.model, state_to_device(state, self.device), labelled, cohort, number), CPU
                )

        log_phase(log, "server-training", run=self.run, round=number)
        return await run_uninterrupted(self.server.worker(Effect(SERVER_TRAINING, train)))

    async def _aggregate(self, state: State, assignments: dict[str, Assignment], gather: Gather) -> State | None:
        """Return the next state; None if too few updates came, or their aggregate is not usable."""
        if len(gather.accepted) < self.plan.round.min_updates:
            return None
        log_phase(log, "aggregating", run=self.run, round=gather.number)
        try:
            rule = self.plan.round
            return await self.server.worker(aggregate_updates, self.algorithm, state, assignments, gather, rule)
        except WireError as error:
            log.warning("round %d: model unchanged, the aggregate cannot be used: %s", gather.number, error)
            gather.refused["aggregate"] += 1
            return None

    async def _measure_statistics(self, number: int, state: State, gather: Gather) -> tuple[State, int | None]:
        """Return the model with running statistics measured again, and the number of batches; None if not due.

        Measured by the devices whose updates count. A server killed in between repeats it.
        """
        devices = sorted(gather.accepted.keys() - gather.failed.keys())
        steps = statistics.due_steps(self.plan, self.algorithm, self.model, state, len(devices))
        if not steps or not (self._is_tested(number) or number == self.plan.rounds):
            return state, None
        log_phase(log, "measuring-statistics", run=self.run, round=number)
        at = statistics.session_number(self.plan, number)
        plan = statistics.session_plan(self.plan, self.algorithm.split)
        session = replace(self, plan=plan, algorithm=plan_algorithm(plan))
        assignments = statistics.session_assignments(plan, session.algorithm, state, devices, number=at, steps=steps)
        assignments = statistics.request_merging(self.model, assignments)
        split = await session.open_split(at, state, assignments)
        session_gather = await session.exchange(at, state, assignments, accepted={}, purpose="statistics", split=split)
        gather.refused.update(session_gather.refused)
        top = split.top.result if split else None
        fold = partial(statistics.fold_statistics, most_norm=self.plan.round.most_norm)
        return await self.server.worker(fold, self.model, state, top, session_gather)

    async def exchange(
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
        broadcast = choose_broadcast(self.algorithm, purpose, self.model, adapted=self._is_adapted(purpose))
        trees = {device: broadcast(state, device, assignment) for device, assignment in assignments.items()}
        outgoing = await self.server.worker(self._pack_broadcasts, trees)
        payloads = [(device, payload) for payload in outgoing for device in payload.devices]
        codec = build(CODECS, self.plan.codec, "codec")

        def require(content: memoryview, update: Update) -> float:
            rule = self.algorithm.check_update and partial(self.algorithm.check_update, assignments[update.device])
            return check_stored_update(content, codec, trees[update.device], rule)

        gather = Gather(
            *(self.server.site, self.server.transport, self.store, self.server.clock, self.server.worker),
            run=self.run,
            number=number,
            expected=assignments,
            require=require,
            starts={device: payload.transfer.digest for device, payload in payloads},
            codec=codec,
            trains=None if purpose == "statistics" else purpose == "train",
            limit=max((2 * payload.transfer.size for payload in outgoing), default=0) + PAYLOAD_SLACK_BYTES,
            link=self.link,
            accepted=accepted,
            ceilings=self.server.links.ceilings,
            metrics=frozenset({*self.model.objective.metrics, LOSS}) if self.plan.task_objective else frozenset(),
        )
        tasks = self._create_tasks(number, assignments, outgoing, purpose)
        if split:
            split.join(gather)
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
        log_phase(log, "gathering", run=self.run, round=gather.number)
        what = PURPOSE_LABELS.get(purpose, f"round {gather.number}")
        waits_for_all = asks_all_devices(self.plan, self.algorithm, purpose)
        wait = QuorumWait(self.plan, self.server, self.store, self.membership, gather, what)
        wait.begin()
        if purpose == "evaluate" and self.graph:
            graph = self._create_outgoing([memoryview(self.graph)], list(tasks), group=())
            tasks = {device: _attach_graph(task, graph.transfer) for device, task in tasks.items()}
            outgoing = [*outgoing, graph]
        async with self.server.round(gather, tasks, outgoing, split):
            await wait.until_quorum(size=None if waits_for_all else self.plan.cohort.size)
        await gather.close()
        self._based |= gather.accepted.keys() if self._is_adapted(purpose) else set()

    def _pack_broadcasts(self, trees: dict[str, Tree]) -> list[Outgoing]:
        """Pack the payloads of a round and prune updates of other devices."""
        outgoing = [self._create_outgoing(_pack_tree(tree), devices) for tree, devices in group_audiences(trees)]
        prune_updates(self.store.updates, trees)
        return outgoing

    async def _attach_base(
        self, state: State, tasks: dict[str, Task], outgoing: list[Outgoing], purpose: Purpose
    ) -> tuple[dict[str, Task], list[Outgoing]]:
        """Return tasks that name the payload of the frozen leaves, if there are some, and all payloads."""
        if not self._is_adapted(purpose):
            return tasks, outgoing
        group = [device for device, task in tasks.items() if task.shared and device not in self._based]
        base = await self.server.worker(self._pack_base, state, list(tasks), group)
        attached = {device: msgspec.structs.replace(task, base=base.transfer) for device, task in tasks.items()}
        return attached, [*outgoing, base]

    def _pack_base(self, state: State, devices: list[str], group: list[str]) -> Outgoing:
        """Pack the frozen leaves, which a device requests once.

        Args:
            group: Devices that have done no task with them yet: all request them now, in shared frames.
        """
        tree = frozen_leaves(state, plan_frozen(self.plan))
        return self._create_outgoing(_pack_tree(tree), devices, group=group)

    def _is_adapted(self, purpose: Purpose) -> bool:
        """Return true for tasks with a part of the leaves; ONNX Runtime needs all, with adapters merged."""
        return self.plan.adaptation is not None and not (purpose == "evaluate" and self.graph)

    def _create_outgoing(
        self, parts: list[memoryview], devices: list[str], *, group: Sequence[str] | None = None
    ) -> Outgoing:
        server = self.server
        frame_bytes = frames.largest_frame(self.link.frame_bytes, server.transport.max_payload_bytes)
        sender, patience_s = Sender.of_parts(parts, frame_bytes), self.link.patience_s
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
        plan = self.plan
        return Task(
            run=self.run,
            round=number,
            device=device,
            algorithm=plan.algorithm,
            model=plan.model.spec,
            codec=plan.codec,
            cut_codec=plan.cut_codec if assignment.is_split else LOSSLESS,
            assignment=self.membership.complete(self.server.fleet, device, assignment),
            params=payload.transfer,
            shared=payload.shared,
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
        status = self.server.fleet.statuses.get(device)
        most = min(INLINE_BYTES, self.server.transport.max_payload_bytes // 2)  # the rest of the task needs room too
        is_inline = status is not None and PAYLOAD in status.knows and payload.transfer.size <= most
        return payload.content if is_inline else b""

    def _is_tested(self, number: int) -> bool:
        every = self.plan.evaluation.every
        return self.test is not None and bool(every) and (not number % every or number == self.plan.rounds)

    async def _score(self, state: State, number: int) -> Score | None:
        if self.test is None or not self._is_tested(number):
            return None
        model, test = self.model, self.test

        def evaluate() -> Score:
            parameters = to_device(join_network(self.algorithm, model, state), self.device)
            return score(model.layers, parameters, test, model.objective)

        try:
            return await self.server.worker(evaluate)
        except ConfigError as error:  # a loss or metric of the user fails on these outputs; the model is fine
            log.warning("round %d: its model is not evaluated: %s", number, error)
            await self.persist(self.store.append, Noted(what=f"round {number}: its model is not evaluated: {error}"))
            return None
