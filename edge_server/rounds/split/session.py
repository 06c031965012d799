"""Serve the steps of a split round: features in, barrier, gradients out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edge_server.fleet.answers import Answers, build_skip
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.split.barrier import Barrier, Reply
from edge_server.rounds.split.device_session import DeviceSession
from edge_server.rounds.split.gradient_store import GradientStore
from edge_server.rounds.split.payloads import StepPayloads
from edge_server.rounds.split.size_bound import MOST_SIZE, SizeBound
from edge_server.rounds.split.top_model import TopModel, copy_state
from shared.codecs import CODECS
from shared.data.examples import Examples
from shared.errors import WireError
from shared.protocol.messages import Assignment, Features, Update, Want
from shared.registry import build
from shared.runtime.clock import Clock
from shared.runtime.executor import Effect, Worker, background, run_uninterrupted
from shared.tensors.tree import State, Tree
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)

TICK_S, LONG_S = 0.25, 3600.0
EXAMPLES = 32
"""Number of the server's own examples by which it estimates the usual size of features."""
SKIP_COST = 1 / 32
"""Cost, in answers, of a skip message: the steps of other devices may be many a second."""
BEGIN_COST = 10.0
"""Cost, in answers, of a session restart: all earlier gradients may follow."""
SPLIT_STEP = "split step"
"""Effect name under which a step's computing time is charged."""


@dataclass
class SplitRound:
    """The steps of one open round. The hub passes in offers and frames; only `serve` takes steps.

    Attributes:
        top: The server's part of the network.
        payloads: Receives features and sends gradients.
        gradient_store: Sent gradients of the round.
        answers: Best-effort replies, rate-limited per device.
        size_bound: Bound on feature sizes: a single oversized step would destroy what the server's part has learnt.
    """

    clock: Clock
    worker: Worker
    top: TopModel
    barrier: Barrier
    payloads: StepPayloads
    gradient_store: GradientStore
    answers: Answers
    size_bound: SizeBound
    _named: set[str] = field(default_factory=set)
    _gather: Gather = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Check again which devices have failed."""
        self._wake.set()

    def is_void(self, device: str, update: Update) -> bool:
        """Return true if an update belongs to a session of an earlier process, whose top is lost."""
        is_ours = update.failure is None and update.start in (b"", self._gather.starts[device])
        return is_ours and self.barrier.is_member(device) and not self.barrier.is_done(device)

    async def offer(self, device: str, offer: Features) -> None:
        """Answer an offer of features: request missing frames, or send the session's position.

        Raises:
            WireError: It names another device, a device outside this round, or an invalid step.
        """
        if offer.device != device or device not in self._gather.starts:
            raise WireError(f"features in the name of {offer.device!r}", reason="identity")
        if not 1 <= offer.step <= self.barrier.steps:
            raise WireError(f"features of step {offer.step} of {self.barrier.steps}", reason="step")
        if offer.start != self._gather.starts[device] or not self.barrier.is_member(device):
            return  # from before the round restarted with other parameters, or the device failed
        session = self.barrier.sessions[device]
        answer = self.barrier.offer(device, offer.step, offer.params.digest)
        if answer is Reply.AGAIN:
            await self._answer_again(session, offer)
            return
        session.at = max(session.at, offer.step)
        if answer is Reply.TAKE:
            await self._take(session, offer)
        elif isinstance(answer, int):
            self.answers.tell(device, "gradient", build_skip(offer, answer), SKIP_COST)

    async def _answer_again(self, session: DeviceSession, offer: Features) -> None:
        """Send a gradient again to a device that lost it or restarts its session, within its rate limit."""
        begins_anew = offer.step < session.at
        cost = BEGIN_COST if begins_anew else 1.0 if offer.step == session.at else SKIP_COST
        if not self.answers.is_due(session.device, cost):
            return
        if begins_anew:
            log.info("round %d: %s restarts its session", self._gather.number, session.device)
        session.at = offer.step
        self.payloads.expect_push(session)
        await self.payloads.announce(session, offer)

    async def _take(self, session: DeviceSession, offer: Features) -> None:
        try:
            await self.payloads.begin(session, offer)
        except WireError as error:
            self._refuse(session, error)
        self._wake.set()  # start the timeout for missing frames

    def awaits(self, device: str) -> bool:
        """Return true if frames of a device are accepted."""
        return self.barrier.is_member(device)

    async def frame(self, device: str, data: bytes) -> bool:
        """Take a frame of offered features; return true if it held new or requested blocks.

        Raises:
            WireError: It is damaged or does not match the offer.
        """
        session = self.barrier.sessions.get(device) or DeviceSession(device)  # check frames of unknown devices as well
        is_new = await self.payloads.take(session, data)
        if is_new and session.receiver and session.receiver.complete:
            self._wake.set()
        return is_new

    def join(self, gather: Gather) -> None:
        """Attach to a round's update collection."""
        self._gather, self.gradient_store.folder = gather, gather.store.updates

    def want(self, device: str, want: Want) -> None:
        """Send the requested part of a device's last gradient."""
        if session := self.barrier.sessions.get(device):
            self.payloads.answer_want(session, want)

    async def handle_reconnect(self, device: str) -> None:
        """Request missing features from a device that has reconnected."""
        if session := self.barrier.sessions.get(device):
            await self.payloads.ask_after_reconnect(session)

    async def serve(self, reachable: Callable[[], Awaitable[bool]]) -> None:
        """Serve steps until cancelled.

        Args:
            reachable: Waits for the broker; returns true if it was connected already. No deadline runs while waiting.
        """
        async with background(self.payloads.queue.run()):
            while True:
                self._wake.clear()
                for device in self._gather.failed:
                    self.barrier.drop(device)
                for session in self.payloads.receiving_sessions():
                    if session.receiver and session.receiver.complete:
                        await self._read(session, session.receiver)
                if self.barrier.remaining_s(self.clock()) > 0:
                    await self.payloads.ask_again()
                    await self._wait_until_due()
                elif self.barrier.awaited_devices and not await reachable():
                    self.barrier.postpone(self.clock())
                else:
                    await self._serve_step()

    async def _read(self, session: DeviceSession, receiver: Receiver[MemorySink]) -> None:
        """Decode and check complete features."""
        try:
            features, size = await self.worker(self.top.read, session.device, receiver)
        except WireError as error:
            if session.receiver is not receiver:
                return  # the device has restarted meanwhile
            if await self.payloads.retry(session, error):
                self._gather.refused["digest"] += 1
            else:
                session.receiver = None
                self._refuse(session, error)
        else:
            if session.receiver is receiver:
                session.receiver, session.features, session.size = None, features, size
                self.barrier.deliver(session.device, receiver.transfer.digest, self.clock())

    def _refuse(self, session: DeviceSession, error: WireError) -> None:
        if not self._gather.refused[error.reason]:
            log.warning("step %d goes on without %s: %s", self.barrier.step, session.device, error)
        self._gather.refused[error.reason] += 1
        self.barrier.refuse(session.device, self.clock())
        self._wake.set()

    async def _refuse_oversized(self) -> None:
        """Exclude features from the open step that far exceed the median and the usual size."""
        for session, reason in await self.size_bound.find_oversized():
            session.features = None
            if session.device not in self._named:
                self._named.add(session.device)
                log.warning("round %d: device %s: %s", self._gather.number, session.device, reason)
            self._refuse(session, WireError(reason, reason="large"))

    async def _serve_step(self) -> None:
        """Compute the due step and send its gradients."""
        await self._refuse_oversized()
        number, absent, sessions = self.barrier.step, self.barrier.awaited_devices, self.barrier.sessions
        devices, in_vain = self.barrier.serve()
        log.debug("step round=%d number=%d devices=%d", self._gather.number, number, len(devices))
        if absent:
            log.info("round %d: step %d goes on without %s", self._gather.number, number, ", ".join(sorted(absent)))
        skips = {device: build_skip(_offer(sessions[device]), self.barrier.step) for device in in_vain}
        offers = {device: _offer(sessions[device]) for device in devices}
        # Collect everything before the first await: offers may arrive meanwhile.
        features = {device: sessions[device].take_features() for device in devices}
        await asyncio.gather(*(self.payloads.tell(device, message) for device, message in skips.items()))
        if devices:
            self._keep(number, await self._compute(number, features))
        for device in offers:
            self.payloads.expect_push(sessions[device])
        # A device that repeats earlier steps reaches this one later.
        due = [(sessions[device], offer) for device, offer in offers.items() if sessions[device].at >= number]
        await asyncio.gather(*(self.payloads.announce(session, offer) for session, offer in due))

    def _keep(self, number: int, gradients: Mapping[str, Sender]) -> None:
        was_full = self.gradient_store.is_full
        for device, gradient in gradients.items():
            self.barrier.sessions[device].answers.put(number, gradient, self.gradient_store)
        if self.gradient_store.is_full and not was_full:
            limit = f"{self.gradient_store.used / (1 << 20):.1f} MiB (link.kept_gradients_mb)"
            log.info(
                "round %d: from step %d on, gradients beyond %s are not stored; a restarted session misses them",
                *(self._gather.number, number, limit),
            )

    async def _compute(self, number: int, features: dict[str, Tree]) -> dict[str, Sender]:
        """Compute a step off the event loop; on cancellation, wait: state and random draws must not be shared."""
        step = Effect(SPLIT_STEP, self.top.serve)
        return await run_uninterrupted(self.worker(step, number, features, self.payloads.frame_bytes))

    async def _wait_until_due(self) -> None:
        """Wait for a message or the step's deadline."""
        left_s = min(self.barrier.remaining_s(self.clock()), TICK_S if self.payloads.receiving_sessions() else LONG_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()


def _offer(session: DeviceSession) -> Features:
    assert session.offer is not None, "who has offered in a step has an offer"
    return session.offer


def open_split_round(
    run: ActiveRun, test: Examples | None, number: int, state: State, assignments: Mapping[str, Assignment]
) -> SplitRound | None:
    """Return the step server of a round, on a copy of the state; None for an algorithm that is not split.

    Args:
        test: The server's test data.
        state: The server state before the round.
    """
    plan, server, link = run.plan, run.server, run.link
    if run.algorithm.split is None:
        return None
    steps = max((assignment.steps for assignment in assignments.values()), default=0)
    top = TopModel(
        algorithm=run.algorithm,
        model=run.model,
        state=copy_state(state, run.device),
        codec=build(CODECS, plan.cut_codec, "cut_codec"),
        assignments=assignments,
        seed=plan.seed,
        before=(number - 1) * steps,
        examples=None if test is None else test.inputs[:EXAMPLES],
        device=run.device,
    )
    barrier = Barrier(steps, plan.round.step_deadline_s, assignments)
    payloads = StepPayloads(server.site, server.transport, server.clock, link, server.links.paces, barrier.sessions)
    return SplitRound(
        clock=server.clock,
        worker=server.worker,
        top=top,
        barrier=barrier,
        payloads=payloads,
        gradient_store=GradientStore(link.kept_gradients_mb << 20),
        answers=server.rounds.answers,
        size_bound=SizeBound(barrier, server.worker, top.usual_size, min(plan.round.most_norm, MOST_SIZE)),
    )


def split_figures(split: SplitRound | None) -> dict[str, Any]:
    """Return the recorded figures of a round's steps; empty for a round that is not split."""
    if split is None:
        return {}
    return {"steps": split.barrier.step - 1, "missed": split.barrier.missed}
