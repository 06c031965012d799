"""One round, top to bottom: assign, send, gather, fold, aggregate, record.

From the updates of a round to the next server state.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Muster
from edge_server.journal.checkpoints import Store
from edge_server.journal.disk import P, R, persist
from edge_server.journal.records import RoundClosed, RoundOpened, UpdateAccepted
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.aggregate import aggregate_updates
from edge_server.rounds.assign import WHAT, Assigning, Purpose, evaluates_everybody
from edge_server.rounds.broadcast import Outgoing, audiences
from edge_server.rounds.check_update import keep_only, require_like
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.evaluation import running_statistics as statistics
from edge_server.rounds.evaluation.round_figures import close_record
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.quorum import Waiting
from edge_server.rounds.split.session import SplitRound, open_split_round, split_figures
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Cohort, join_network
from shared.codecs import CODECS
from shared.codecs.dense import dense
from shared.data.examples import Examples
from shared.errors import WireError
from shared.models.base import Model
from shared.models.build import seeded
from shared.models.evaluate import Score, score
from shared.protocol.messages import LOSSLESS, Assignment, Task, Transfer, Update, mix
from shared.protocol.payload import pack
from shared.protocol.topics import SERVER
from shared.registry import build
from shared.runtime.executor import Effect, uninterrupted
from shared.tensors.placement import CPU, Device, state_on, to_device
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)
PAYLOAD_SLACK_BYTES = 1 << 20


def sent(algorithm: Algorithm, purpose: Purpose, model: Model) -> Callable[[State, str, Assignment], Tree]:
    """Return what gives the tree that goes down, by what it is sent for.

    Args:
        purpose: To evaluate what it is judged by, devices are sent all of that, of a split network its top too.
    """
    if purpose == "evaluate" and algorithm.personal and algorithm.personal.sent_for_evaluation:
        return algorithm.personal.sent_for_evaluation
    if purpose == "evaluate" and (algorithm.server or algorithm.split) and not algorithm.personal:
        return lambda state, _device, _told: join_network(algorithm, model, state)
    return algorithm.broadcast


def _with_graph(task: Task, graph: Transfer) -> Task:
    """Return a task that is evaluated by a graph."""
    return msgspec.structs.replace(task, assignment=msgspec.structs.replace(task.assignment, graph=graph))


def _packed(tree: Tree) -> list[memoryview]:
    """Return a tree as it goes out; a state read back from disk must go out under the same digest."""
    return pack(dense().encode(dict(sorted(tree.items())), None)[0])


ROUND_END, SERVER_TRAINING = "round end", "server training"
"""What the server's own calculations are called where their time is charged."""

Served: TypeAlias = tuple[dict[str, Task], list[Outgoing], SplitRound | None]
"""Of an open round: its tasks by device, its payloads, who serves its steps."""


@dataclass
class Rounds:
    """Runs rounds of one run; every seam it needs is handed in, and it keeps no learning state.

    Attributes:
        model: Without storage; its `example` is the shape of one input as the server's own have it, empty where it has
            none: devices may bring any.
        test: What the server evaluates with.
        labelled: What the server itself trains on, where the method does.
        device: What it trains and evaluates with; states between are on the CPU.
        graph: What devices evaluate by, with ONNX Runtime; empty where their trainers do it.
        opening: Is waited for before a round is recorded as opened: what was seen before it stands before it.
        neighbours: The other sites of a plan with several.
        told: What another run told the devices in each round, which is told again.
        assigning: Tells devices what to do.
    """

    run: str
    plan: Plan
    server: Server
    store: Store
    algorithm: Algorithm
    link: LinkConfig
    model: Model
    test: Examples | None
    opening: Callable[[], Awaitable[None]] | None = None
    muster: Muster = field(default_factory=Muster)
    labelled: Examples | None = None
    device: Device = CPU
    graph: bytes = b""
    neighbours: Neighbours | None = None
    told: Mapping[int, RoundOpened] = field(default_factory=dict)
    assigning: Assigning = field(init=False)

    def __post_init__(self) -> None:
        """Have somebody decide who does what."""
        self.muster.silent.least = self.plan.round.min_updates
        us = self.run, self.plan, self.server, self.store
        self.assigning = Assigning(*us, self.algorithm, self.model, self.muster, self.neighbours, self.told)

    async def next(
        self,
        number: int,
        state: State,
        opened: RoundOpened | None,
        accepted: dict[str, UpdateAccepted],
        *,
        already_s: float = 0.0,
    ) -> tuple[State, RoundClosed]:
        """Run round `number`, or the rest of it; return the next state and what is recorded.

        Args:
            number: The round, from 1.
            state: The server state before it.
            opened: The round's beginning, if an earlier process of this server began it.
            accepted: The updates that process had stored.
            already_s: Seconds since then.
        """
        started = self.server.clock() - already_s
        if self.neighbours:
            await self.neighbours.begin(number)
        opened = opened or await self._opened(number, state)
        us = self.plan, self.algorithm, self.model, self.server, self.link, self.test, self.device
        told = opened.assignments
        begun = await self._trained(number, state, told)
        split = None
        if self.algorithm.split:
            split = await self.server.worker(open_split_round, *us, number=number, state=begun, assignments=told)
        gather = await self.exchange(number, begun, told, accepted=accepted, split=split)
        trained, scored = split.top.result if split else begun, None
        after = await self._after(trained, told, gather)
        batches = None
        if after is not None:
            state, batches = await self._measured(number, await self._mixed(number, after), gather)
            log.debug("phase checkpointing run=%s round=%d", self.run, number)
            _, scored = await asyncio.gather(
                self.persist(Effect(ROUND_END, self.store.save), number, state),
                self._score(state, number),
            )
        personal = self.algorithm.personal is not None
        closed = close_record(gather, self.server.take_refused(), scored, enough=after is not None, personal=personal)
        at = self.server.clock()
        figures = split_figures(split) | {"statistics_batches": batches, "terms": self._terms(after or trained)}
        closed = msgspec.structs.replace(closed, seconds=at - started, at=at, **figures)
        log.debug("phase closing run=%s round=%d", self.run, number)
        await self.persist(self.store.append, closed)
        return state, closed

    async def _opened(self, number: int, state: State) -> RoundOpened:
        """Return the beginning of a round, once it is recorded, behind what was seen before it."""
        opened = await self.assigning.open_round(state, number)
        if self.opening:
            await self.opening()
        await self.persist(self.store.append, opened)
        return opened

    async def _mixed(self, number: int, state: State) -> State:
        """Return a new model as the neighbours leave it; as it is where they do not mix after this round."""
        sites = self.plan.sites
        if self.neighbours is None or not sites or not sites.is_mixed(number):
            return state
        log.debug("phase mixing run=%s round=%d", self.run, number)
        return await self.neighbours.mix(number, state)

    def _terms(self, state: State) -> dict[str, float] | msgspec.UnsetType:
        """Return a method's own figures of a round, as far as they are numbers; unset where it has none."""
        server = self.algorithm.server
        found = server.terms(state) if server and server.terms else {}
        return {name: value for name, value in found.items() if math.isfinite(value)} or msgspec.UNSET

    async def persist(self, write: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write something of the run, and wait where the disk is full."""
        return await persist(self.server.worker, self.store.retry_s, write, *args, **kwargs)

    async def _trained(self, number: int, state: State, told: Mapping[str, Assignment]) -> State:
        """Return the state that a round begins with, after the server's own training; the same after a restart.

        A missed round leaves nothing of it, as it leaves nothing of what devices trained.
        """
        server, plan = self.algorithm.server, self.plan
        if server is None:
            return state
        assert self.labelled is not None
        inputs, labels = self.labelled.inputs, self.labelled.labels
        cohort = Cohort(tuple(sorted(told)), plan.hyper, plan.seed, plan.rounds)

        def train() -> State:
            with seeded(mix(plan.seed, number, f"{SERVER}/training")):
                labelled = inputs.to(self.device), labels.to(self.device)
                return state_on(server.train(self.model, state_on(state, self.device), labelled, cohort, number), CPU)

        log.debug("phase server-training run=%s round=%d", self.run, number)
        return await uninterrupted(self.server.worker(Effect(SERVER_TRAINING, train)))

    async def _after(self, state: State, assignments: dict[str, Assignment], gather: Gather) -> State | None:
        """Return the next state; None where too few updates came, or their sum is no model."""
        if len(gather.accepted) < self.plan.round.min_updates:
            return None
        log.debug("phase aggregating run=%s round=%d", self.run, gather.number)
        try:
            us, rule = (self.algorithm, state, assignments, gather), self.plan.round
            return await self.server.worker(aggregate_updates, *us, rule)
        except WireError as error:
            log.warning("round %d: the model stays as it was, the aggregate cannot be used: %s", gather.number, error)
            gather.refused["aggregate"] += 1
            return None

    async def _measured(self, number: int, state: State, gather: Gather) -> tuple[State, int | None]:
        """Return the model with its running statistics measured anew, and over how many batches; None: not due.

        By the devices whose updates count. A server that is killed meanwhile does it again.
        """
        devices, worker = sorted(gather.accepted.keys() - gather.failed.keys()), self.server.worker
        steps = statistics.due_steps(self.plan, self.algorithm, self.model, state, len(devices))
        if not steps or not (self._is_tested(number) or number == self.plan.rounds):
            return state, None
        log.debug("phase measuring-statistics run=%s round=%d", self.run, number)
        at = statistics.session_number(self.plan, number)
        plan = statistics.session_plan(self.plan, self.algorithm.split)
        other = replace(self, plan=plan, algorithm=build(ALGORITHMS, plan.algorithm, "algorithm"))
        told = statistics.session_assignments(plan, other.algorithm, state, devices, number=at, steps=steps)
        told = statistics.tell_merging(self.model, told)
        us = plan, other.algorithm, self.model, self.server, self.link, self.test, self.device
        split = await worker(open_split_round, *us, number=at, state=state, assignments=told)
        own = await other.exchange(at, state, told, accepted={}, purpose="statistics", split=split)
        gather.refused.update(own.refused)
        top = split.top.result if split else None
        found, most = (self.model, state, top, own), self.plan.round.most_norm
        return await worker(statistics.fold_statistics, *found, most_norm=most)

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
        """Give every device its task and take what comes back, until quorum or deadline.

        Args:
            accepted: Updates that an earlier process stored.
            purpose: To train, to evaluate, to measure a step's cost or running statistics.
            split: Serves the steps of a split round.
        """
        broadcast = sent(self.algorithm, purpose, self.model)
        trees = {device: broadcast(state, device, told) for device, told in assignments.items()}
        outgoing = await self.server.worker(self._prepare, trees)
        payloads = [(device, one) for one in outgoing for device in one.devices]
        codec = build(CODECS, self.plan.codec, "codec")

        def require(path: Path, update: Update) -> float:
            rule = self.algorithm.check_update and partial(self.algorithm.check_update, assignments[update.device])
            return require_like(path, codec, trees[update.device], rule)

        gather = Gather(
            *(self.server.site, self.server.transport, self.store, self.server.clock, self.server.worker),
            run=self.run,
            number=number,
            expected=assignments,
            require=require,
            starts={device: one.transfer.digest for device, one in payloads},
            codec=codec,
            trains=None if purpose == "statistics" else purpose == "train",
            limit=max((2 * one.transfer.size for one in outgoing), default=0) + PAYLOAD_SLACK_BYTES,
            link=self.link,
            accepted=accepted,
            ceilings=self.server.ceilings,
        )
        tasks = {device: self._task(number, device, assignments[device], one, purpose) for device, one in payloads}
        if split:
            split.join(gather)
        await self._gather_answers(gather, (tasks, outgoing, split), purpose)
        return gather

    async def _gather_answers(self, gather: Gather, served: Served, purpose: Purpose) -> None:
        log.debug("phase gathering run=%s round=%d", self.run, gather.number)
        what, everybody = WHAT.get(purpose, f"round {gather.number}"), evaluates_everybody(self.plan, self.algorithm)
        waiting = Waiting(self.plan, self.server, self.store, self.muster, gather, what)
        waiting.begin()
        tasks, outgoing, split = served
        if purpose == "evaluate" and self.graph:
            graph = self._outgoing([memoryview(self.graph)], list(tasks), alone=True)
            tasks = {device: _with_graph(one, graph.transfer) for device, one in tasks.items()}
            outgoing = [*outgoing, graph]
        async with self.server.round(gather, tasks, outgoing, split):
            await waiting.until_quorum(size=None if purpose == "evaluate" and everybody else self.plan.cohort.size)
        await gather.close()

    def _prepare(self, trees: dict[str, Tree]) -> list[Outgoing]:
        """Pack what goes down, and make room for what comes up."""
        outgoing = [self._outgoing(_packed(tree), devices) for tree, devices in audiences(trees)]
        keep_only(self.store.updates, trees)
        return outgoing

    def _outgoing(self, parts: list[memoryview], devices: list[str], *, alone: bool = False) -> Outgoing:
        server = self.server
        frame_bytes = frames.largest_frame(self.link.frame_bytes, server.transport.max_payload_bytes)
        sender, patience_s = Sender.of_parts(parts, frame_bytes), self.link.patience_s
        us = server.site, server.transport, server.clock
        return Outgoing(*us, devices, sender, patience_s=patience_s, alone=alone)

    def _task(self, number: int, device: str, told: Assignment, payload: Outgoing, purpose: Purpose) -> Task:
        plan = self.plan
        return Task(
            run=self.run,
            round=number,
            device=device,
            algorithm=plan.algorithm,
            model=plan.model,
            codec=plan.codec,
            cut_codec=plan.cut_codec if told.is_split else LOSSLESS,
            assignment=msgspec.structs.replace(told, classes=self.muster.names_for(self.server.fleet, device)),
            params=payload.transfer,
            shared=payload.shared,
            train=purpose == "train" or (purpose == "statistics" and told.is_split),
            evaluate=purpose == "evaluate" or (purpose == "train" and plan.evaluation.on_device),
            measure_s=plan.measure.seconds if purpose == "measure" else 0.0,
            deadline_s=plan.round.deadline_s,
        )

    def _is_tested(self, number: int) -> bool:
        every = self.plan.evaluation.every
        return self.test is not None and bool(every) and (not number % every or number == self.plan.rounds)

    async def _score(self, state: State, number: int) -> Score | None:
        if self.test is None or not self._is_tested(number):
            return None
        model, test = self.model, self.test

        def scored() -> Score:
            return score(model.layers, to_device(join_network(self.algorithm, model, state), self.device), test)

        return await self.server.worker(scored)
