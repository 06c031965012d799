"""Serve the steps of one split round: features come up, the barrier says when a step is due, gradients go down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edge_server.fleet.answers import Answers, skip
from edge_server.fleet.hub import Server
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.aggregate import median_of
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.split.barrier import Barrier, Reply
from edge_server.rounds.split.device_session import DeviceSession
from edge_server.rounds.split.kept_answers import Shelf
from edge_server.rounds.split.payloads import StepPayloads
from edge_server.rounds.split.top_model import TopModel, copy_state
from shared.algorithms.base import Algorithm
from shared.codecs import CODECS
from shared.data.examples import Examples
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Features, Update, Want
from shared.registry import build
from shared.runtime.clock import Clock
from shared.runtime.executor import Effect, Worker, background, uninterrupted
from shared.tensors.placement import CPU, Device
from shared.tensors.tree import State, Tree
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)

TICK_S, LONG_S = 0.25, 3600.0
EXAMPLES = 32
"""Of the server's own, by which it knows how large features usually are."""
SKIP_COST = 1 / 32
"""As what share of an answer it counts that a device is told the open step: others' steps may be many a second."""
BEGIN_COST = 10.0
"""As how many answers it counts that a device begins its session anew: all that it was given may follow."""
MOST_SIZE = 5.0
"""Features of one step differ less than that from device to device; 25 times as large, those of one in four halved the
accuracy. `round.most_norm` may be less."""
COMPANY = 3
"""Devices of which one alone does not choose the median."""
SPLIT_STEP = "split step"
"""What a step of the server's part of a network is called where its time is charged."""


@dataclass
class SplitRound:
    """One open round's steps. The hub hands offers and frames in; `serve` alone takes steps.

    Attributes:
        top: The server's part of the network.
        barrier: Which step is open, and the sessions of the devices.
        payloads: Receives what comes up, and sends what goes down.
        shelf: Room for what went down, in the round.
        answers: Says what nobody waits for, to each device as often as it is due.
        most_size: A step goes on without features larger than this many times the median of those that are here; 0:
            with all. One step with such would leave nothing of what the server's part has learnt. Where fewer than
            three devices are here, the median is one device's: then features must also be this many times what the
            network makes of the server's own examples, so that who sends tiny ones does not have the others' refused.
    """

    clock: Clock
    worker: Worker
    top: TopModel
    barrier: Barrier
    payloads: StepPayloads
    shelf: Shelf
    answers: Answers
    most_size: float = 0.0
    _usual_size: float | None = None
    _named: set[str] = field(default_factory=set)
    _gather: Gather = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Look again at who has failed."""
        self._wake.set()

    def is_void(self, device: str, update: Update) -> bool:
        """Tell whether an update is of a session that an earlier process served: the top that belongs to it is lost."""
        is_ours = update.failure is None and update.start in (b"", self._gather.starts[device])
        return is_ours and self.barrier.is_member(device) and not self.barrier.is_done(device)

    async def offer(self, device: str, offer: Features) -> None:
        """Answer an offer of features: ask for what is missing of them, or say where the session is.

        Raises:
            WireError: It is in the name of another device, or of none of this round, or of no step.
        """
        if offer.device != device or device not in self._gather.starts:
            raise WireError(f"features in the name of {offer.device!r}", reason="identity")
        if not 1 <= offer.step <= self.barrier.steps:
            raise WireError(f"features of step {offer.step} of {self.barrier.steps}", reason="step")
        if offer.start != self._gather.starts[device] or not self.barrier.is_member(device):
            return  # of before the round was begun anew from other parameters, as its newer task says; or it failed
        session = self.barrier.sessions[device]
        answer = self.barrier.offer(device, offer.step, offer.params.digest)
        if answer is Reply.AGAIN:
            await self._answer_again(session, offer)
            return
        session.at = max(session.at, offer.step)
        if answer is Reply.TAKE:
            await self._take(session, offer)
        elif isinstance(answer, int):
            self.answers.tell(device, "gradient", skip(offer, answer), SKIP_COST)

    async def _answer_again(self, session: DeviceSession, offer: Features) -> None:
        """Give a gradient once more, to who lost it or begins anew; who does so again and again waits for it."""
        begins_anew = offer.step < session.at
        cost = BEGIN_COST if begins_anew else 1.0 if offer.step == session.at else SKIP_COST
        if not self.answers.is_due(session.device, cost):
            return
        if begins_anew:
            log.info("round %d: %s begins its session anew", self._gather.number, session.device)
        session.at = offer.step
        self.payloads.expect_push(session)
        await self.payloads.announce(session, offer)

    async def _take(self, session: DeviceSession, offer: Features) -> None:
        try:
            await self.payloads.begin(session, offer)
        except WireError as error:
            self._refuse(session, error)
        self._wake.set()  # from now on a silence is to be noticed

    def awaits(self, device: str) -> bool:
        """Tell whether frames of a device may come."""
        return self.barrier.is_member(device)

    async def frame(self, device: str, data: bytes) -> bool:
        """Take a frame of features that were offered; tell whether anything in it was new, or was asked for.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        session = self.barrier.sessions.get(device) or DeviceSession(
            device
        )  # a stranger's frame is checked all the same
        is_new = await self.payloads.take(session, data)
        if is_new and session.receiver and session.receiver.complete:
            self._wake.set()
        return is_new

    def join(self, gather: Gather) -> None:
        """Take the features of this round's devices from now on."""
        self._gather, self.shelf.folder = gather, gather.store.updates

    def want(self, device: str, want: Want) -> None:
        """Send what a device asks for of its last gradient."""
        if session := self.barrier.sessions.get(device):
            self.payloads.answer_want(session, want)

    async def returned(self, device: str) -> None:
        """Note that a device has connected anew."""
        if session := self.barrier.sessions.get(device):
            await self.payloads.ask_anew(session)

    async def serve(self, reachable: Callable[[], Awaitable[bool]]) -> None:
        """Serve step after step, until cancelled.

        Args:
            reachable: Waits until the broker is there; tells whether it was there already. No deadline runs meanwhile.
        """
        async with background(self.payloads.send_gradients()):
            while True:
                self._wake.clear()
                for device in self._gather.failed:
                    self.barrier.drop(device)
                for session in self.payloads.coming():
                    if session.receiver and session.receiver.complete:
                        await self._read(session, session.receiver)
                if self.barrier.left_s(self.clock()) > 0:
                    await self.payloads.ask_again()
                    await self._until_due()
                elif self.barrier.awaited and not await reachable():
                    self.barrier.postpone(self.clock())
                else:
                    await self._step()

    async def _read(self, session: DeviceSession, receiver: Receiver[MemorySink]) -> None:
        """Decode and check features that are whole."""
        try:
            features, size = await self.worker(self.top.read, session.device, receiver)
        except WireError as error:
            if session.receiver is not receiver:
                return  # it has begun anew meanwhile
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

    async def _refuse_large(self) -> None:
        """Let the open step go on without features that are far larger than the others', and than usual ones."""
        median, large = self._beyond_median()
        if large and self._usual_size is None and not self._is_in_company():
            self._usual_size = await uninterrupted(self.worker(self.top.usual_size))
            median, large = self._beyond_median()  # offers have come meanwhile
        least = 0.0 if self._is_in_company() else self.most_size * (self._usual_size or 0.0)
        for session in large:
            if session.size > least:
                session.features = None
                usual = f", and the usual {self._usual_size:.3g}" if least and self._usual_size else ""
                what = f"features of size {session.size:.3g} are more than {self.most_size:g} times the step's median"
                why = f"of {median:.3g}{usual} (at most {MOST_SIZE:g} and round.most_norm)"
                if session.device not in self._named:
                    self._named.add(session.device)
                    log.warning("round %d: device %s: %s %s", self._gather.number, session.device, what, why)
                self._refuse(session, WireError(f"{what} {why}", reason="large"))

    def _delivered(self) -> list[DeviceSession]:
        return [one for one in self.barrier.sessions.values() if one.state == "delivered"]

    def _is_in_company(self) -> bool:
        return len(self._delivered()) >= COMPANY

    def _beyond_median(self) -> tuple[float, list[DeviceSession]]:
        """Return the median size of the features that are here, and whose are far beyond it."""
        delivered = self._delivered()
        median = median_of([one.size for one in delivered])
        return median, [one for one in delivered if self.most_size and median and one.size > self.most_size * median]

    async def _step(self) -> None:
        """Take the step that is due, and send everybody what came of it."""
        await self._refuse_large()
        number, absent, sessions = self.barrier.step, self.barrier.awaited, self.barrier.sessions
        devices, in_vain = self.barrier.serve()
        log.debug("step of round %d: number=%d devices=%d", self._gather.number, number, len(devices))
        if absent:
            log.info("round %d: step %d goes on without %s", self._gather.number, number, ", ".join(sorted(absent)))
        skips = {device: skip(_offer(sessions[device]), self.barrier.step) for device in in_vain}
        offers = {device: _offer(sessions[device]) for device in devices}
        # All of it before anything is waited for: offers come meanwhile.
        features = {device: sessions[device].take_features() for device in devices}
        await asyncio.gather(*(self.payloads.tell(device, message) for device, message in skips.items()))
        if devices:
            self._keep(number, await self._compute(number, features))
        for device in offers:
            self.payloads.expect_push(sessions[device])
        # One that does earlier steps again comes to this one later.
        due = [(sessions[device], offer) for device, offer in offers.items() if sessions[device].at >= number]
        await asyncio.gather(*(self.payloads.announce(session, offer) for session, offer in due))

    def _keep(self, number: int, gradients: Mapping[str, Sender]) -> None:
        was_full = self.shelf.is_full
        for device, gradient in gradients.items():
            self.barrier.sessions[device].answers.put(number, gradient, self.shelf)
        if self.shelf.is_full and not was_full:
            kept = f"{self.shelf.used / (1 << 20):.1f} MiB of gradients (link.kept_gradients_mb)"
            log.info(
                "round %d: from step %d on no more than %s are kept: a device that begins anew misses those behind",
                *(self._gather.number, number, kept),
            )

    async def _compute(self, number: int, features: dict[str, Tree]) -> dict[str, Sender]:
        """Take a step off the loop; when cancelled, wait: nobody else may draw or use the state meanwhile."""
        step = Effect(SPLIT_STEP, self.top.serve)
        return await uninterrupted(self.worker(step, number, features, self.payloads.frame_bytes))

    async def _until_due(self) -> None:
        """Wait until something has come, or the step is due."""
        left_s = min(self.barrier.left_s(self.clock()), TICK_S if self.payloads.coming() else LONG_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()


def _offer(session: DeviceSession) -> Features:
    assert session.offer is not None, "who has offered in a step has an offer"
    return session.offer


def open_split_round(  # noqa: PLR0913, PLR0917 - what a round is made of
    plan: Plan,
    algorithm: Algorithm,
    model: Model,
    server: Server,
    link: LinkConfig,
    test: Examples | None = None,
    device: Device = CPU,
    *,
    number: int,
    state: State,
    assignments: Mapping[str, Assignment],
) -> SplitRound | None:
    """Return what serves a round's steps, on a copy of the state; None where the devices train alone.

    Args:
        model: Its network, without storage.
        server: The site's, with how fast features come from each device.
        link: Window and limits of transfers.
        test: Examples of the server's own, if it has any.
        device: What its part of the network computes with.
        number: The round, from 1.
        state: The server's before the round.
        assignments: What the devices are told.
    """
    if algorithm.split is None:
        return None
    steps = max((told.steps for told in assignments.values()), default=0)
    codec = build(CODECS, plan.cut_codec, "cut_codec")
    own = None if test is None else test.inputs[:EXAMPLES]
    us = algorithm, model, copy_state(state, device), codec, assignments, plan.seed
    top = TopModel(*us, before=(number - 1) * steps, examples=own, device=device)
    barrier = Barrier(steps, plan.round.step_deadline_s, assignments)
    payloads = StepPayloads(server.site, server.transport, server.clock, link, server.paces, barrier.sessions)
    ways = barrier, payloads, Shelf(link.kept_gradients_mb << 20), server.answers
    return SplitRound(server.clock, server.worker, top, *ways, min(plan.round.most_norm, MOST_SIZE))


def split_figures(split: SplitRound | None) -> dict[str, Any]:
    """Return what is recorded of a round's steps; nothing of one that is not split."""
    if split is None:
        return {}
    return {"steps": split.barrier.step - 1, "missed": split.barrier.missed}
