"""Run one round: assign, broadcast, collect, aggregate, record."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from edge_server.journal.records import Noted, RoundClosed, RoundOpened, UpdateAccepted
from edge_server.learner import plan_algorithm
from edge_server.rounds import running_statistics as statistics
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.aggregate import aggregate_updates
from edge_server.rounds.assign import TaskAssigner
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.exchange import TaskExchange
from edge_server.rounds.neighbours import Neighbours
from edge_server.rounds.round_figures import build_round_record, note_full_precision
from edge_server.rounds.split.session import SplitRound, open_split_round, split_figures
from shared.algorithms.base import Cohort, join_network
from shared.data.examples import Examples
from shared.errors import ConfigError, WireError
from shared.models.evaluate import Score, score
from shared.protocol.messages import Assignment, derive_seed
from shared.protocol.topics import SERVER
from shared.runtime.executor import Effect, run_uninterrupted
from shared.runtime.phases import log_phase
from shared.tensors.generators import seed_torch
from shared.tensors.tree import CPU, State, state_to_device, to_device

log = logging.getLogger(__name__)
ROUND_END, SERVER_TRAINING = "round end", "server training"
"""Effect names under which the server's own computing time is charged."""


@dataclass
class Rounds:
    """Runs the rounds of one run. Holds no learning state.

    Attributes:
        test: The server's test data.
        labelled: The server's own training data, for algorithms that use it.
        graph: ONNX graph by which devices evaluate; empty if their trainers do.
        flush_observations: Awaited before an opening is recorded, so that earlier observations precede it.
        neighbours: The other sites of a multi-site plan.
        recorded_rounds: Recorded rounds whose assignments are repeated, by number.
    """

    run: ActiveRun
    test: Examples | None = None
    labelled: Examples | None = None
    graph: bytes = b""
    neighbours: Neighbours | None = None
    recorded_rounds: Mapping[int, RoundOpened] = field(default_factory=dict)
    flush_observations: Callable[[], Awaitable[None]] | None = None
    assigner: TaskAssigner = field(init=False)
    exchange: TaskExchange = field(init=False)

    def __post_init__(self) -> None:
        self.run.membership.silent.least = self.run.plan.round.min_updates
        self.assigner = TaskAssigner(self.run, self.neighbours, self.recorded_rounds)
        self.exchange = TaskExchange(self.run, self.graph)

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
        started = self.run.server.clock() - already_s
        if self.neighbours:
            await self.neighbours.begin(number)
        open_round = open_round or await self._record_opening(number, state)
        assignments = open_round.assignments
        begun = await self._train_on_server(number, state, assignments)
        split = await self._open_split(self.run, number, begun, assignments)
        gather = await self.exchange.perform(number, begun, assignments, accepted=accepted, split=split)
        trained, scored, batches = split.top.result if split else begun, None, None
        after = await self._aggregate(trained, assignments, gather)
        if after is not None:
            state, batches = await self._measure_statistics(
                number, await self._mix_with_neighbours(number, after), gather
            )
            log_phase(log, "checkpointing", run=self.run.name, round=number)
            _, scored = await asyncio.gather(
                self.run.persist(Effect(ROUND_END, self.run.store.save), number, state),
                self._score(state, number),
            )
        for note in note_full_precision(self.run.plan, gather, self.run.membership.full_precision):
            await self.run.record(note)
        closed = build_round_record(
            *(gather, self.run.server.flood.take_refused(), scored, self.run.model.objective),
            enough=after is not None,
            personal=self.run.algorithm.personal is not None,
        )
        at = self.run.server.clock()
        figures = split_figures(split) | {"statistics_batches": batches, "terms": self._finite_terms(after or trained)}
        closed = msgspec.structs.replace(closed, seconds=at - started, at=at, **figures)
        log_phase(log, "closing", run=self.run.name, round=number)
        await self._record_end(closed, may_wait=not split)
        return state, closed

    async def _record_end(self, closed: RoundClosed, *, may_wait: bool) -> None:
        """Record a round's end, with the next opening if it may wait.

        After a crash such a round is closed again from its stored updates, with the same bits.
        """
        if may_wait and self.neighbours is None:
            self.run.store.extend([closed], may_wait=True)  # waits for no disk, so it needs no thread
        else:
            await self.run.record(closed)

    async def _open_split(
        self, run: ActiveRun, number: int, state: State, assignments: Mapping[str, Assignment]
    ) -> SplitRound | None:
        if run.algorithm.split is None:
            return None
        return await run.server.worker(open_split_round, run, self.test, number, state, assignments)

    async def _record_opening(self, number: int, state: State) -> RoundOpened:
        """Assign a round and record its opening, after earlier observations."""
        open_round = await self.assigner.open_round(state, number)
        if self.flush_observations:
            await self.flush_observations()
        await self.run.record(open_round)
        return open_round

    async def _mix_with_neighbours(self, number: int, state: State) -> State:
        """Return the model after mixing with neighbouring sites; unchanged if no mixing is due."""
        sites = self.run.plan.sites
        if self.neighbours is None or not sites or not sites.is_mixed(number):
            return state
        log_phase(log, "mixing", run=self.run.name, round=number)
        return await self.neighbours.mix(number, state)

    def _finite_terms(self, state: State) -> dict[str, float] | msgspec.UnsetType:
        """Return the algorithm's finite figures of a round; unset without any."""
        server = self.run.algorithm.server
        terms = server.terms(state) if server and server.terms else {}
        return {name: value for name, value in terms.items() if math.isfinite(value)} or msgspec.UNSET

    async def _train_on_server(self, number: int, state: State, assignments: Mapping[str, Assignment]) -> State:
        """Return the state after the server's own training; deterministic, so that a restart repeats it.

        A missed round discards it, like the training of the devices.
        """
        server, plan = self.run.algorithm.server, self.run.plan
        if server is None:
            return state
        assert self.labelled is not None
        inputs, labels = self.labelled.inputs, self.labelled.labels
        cohort = Cohort(tuple(sorted(assignments)), plan.hyper_of(number), plan.seed, plan.rounds)

        def train() -> State:
            with seed_torch(derive_seed(plan.seed, number, f"{SERVER}/training")):
                labelled = inputs.to(self.run.device), labels.to(self.run.device)
                return state_to_device(
                    server.train(self.run.model, state_to_device(state, self.run.device), labelled, cohort, number),
                    CPU,
                )

        log_phase(log, "server-training", run=self.run.name, round=number)
        return await run_uninterrupted(self.run.server.worker(Effect(SERVER_TRAINING, train)))

    async def _aggregate(self, state: State, assignments: dict[str, Assignment], gather: Gather) -> State | None:
        """Return the next state; None if too few updates came, or their aggregate is not usable."""
        if len(gather.accepted) < self.run.plan.round.min_updates:
            return None
        log_phase(log, "aggregating", run=self.run.name, round=gather.number)
        try:
            size = sum(record.update.params.size for record in gather.accepted.values() if record.update.params)
            algorithm, rule = self.run.algorithm, self.run.plan.round
            aggregate = partial(aggregate_updates, algorithm, state, assignments, gather, rule)
            return await self.run.compute(size, aggregate)
        except WireError as error:
            log.warning("round %d: model unchanged, the aggregate cannot be used: %s", gather.number, error)
            gather.refused["aggregate"] += 1
            return None

    async def _measure_statistics(self, number: int, state: State, gather: Gather) -> tuple[State, int | None]:
        """Return the model with running statistics measured again, and the number of batches; None if not due.

        Measured by the devices whose updates count. A server killed in between repeats it.
        """
        if not self.run.has_statistics:
            return state, None
        devices = sorted(gather.accepted.keys() - gather.failed.keys())
        steps = statistics.due_steps(self.run.plan, self.run.algorithm, self.run.model, state, len(devices))
        if not steps or not (self._is_tested(number) or number == self.run.plan.rounds):
            return state, None
        log_phase(log, "measuring-statistics", run=self.run.name, round=number)
        at = statistics.session_number(self.run.plan, number)
        plan = statistics.session_plan(self.run.plan, self.run.algorithm.split)
        run = replace(self.run, plan=plan, algorithm=plan_algorithm(plan))
        assignments = statistics.session_assignments(plan, run.algorithm, state, devices, number=at, steps=steps)
        assignments = statistics.request_merging(self.run.model, assignments)
        split = await self._open_split(run, at, state, assignments)
        session_gather = await replace(self.exchange, run=run).perform(
            at, state, assignments, accepted={}, purpose="statistics", split=split
        )
        gather.refused.update(session_gather.refused)
        top = split.top.result if split else None
        fold = partial(statistics.fold_statistics, most_norm=self.run.plan.round.most_norm)
        return await self.run.server.worker(fold, self.run.model, state, top, session_gather)

    def _is_tested(self, number: int) -> bool:
        every = self.run.plan.evaluation.every
        return self.test is not None and bool(every) and (not number % every or number == self.run.plan.rounds)

    async def _score(self, state: State, number: int) -> Score | None:
        if self.test is None or not self._is_tested(number):
            return None
        model, test = self.run.model, self.test

        def evaluate() -> Score:
            parameters = to_device(join_network(self.run.algorithm, model, state), self.run.device)
            return score(model.layers, parameters, test, model.objective)

        try:
            return await self.run.server.worker(evaluate)
        except ConfigError as error:  # a loss or metric of the user fails on these outputs; the model is fine
            log.warning("round %d: its model is not evaluated: %s", number, error)
            await self.run.persist(
                self.run.store.append, Noted(what=f"round {number}: its model is not evaluated: {error}")
            )
            return None
