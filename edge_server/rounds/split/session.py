"""Serve the steps of one split round: features come up, the barrier says when a step is due, gradients go down.

What a round of a split method has besides: somebody who serves its steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edge_server.config import LinkConfig
from edge_server.fleet.hub import Server, skip
from edge_server.plan.plan import Plan
from edge_server.rounds.collect_updates import Gather
from edge_server.rounds.split.barrier import Barrier, Word
from edge_server.rounds.split.features_in import Coming, Incoming
from edge_server.rounds.split.gradients_out import Gradients
from edge_server.rounds.split.top_model import Top, own
from shared.algorithms.base import Algorithm
from shared.codecs import CODECS
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Features, Update, Want
from shared.registry import build
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.runtime.tasks import background
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.sender import Sender

log = logging.getLogger(__name__)

TICK_S, LONG_S = 0.25, 3600.0


@dataclass
class Splitting:
    """One open round's steps. Whoever hears hands offers and frames in; `serve` alone takes steps.

    Attributes:
        top: The server's part of the network.
        barrier: Who is in, and which step is open.
        incoming: What comes up.
        gradients: What goes down.
    """

    clock: Clock
    worker: Worker
    top: Top
    barrier: Barrier
    incoming: Incoming
    gradients: Gradients
    _gather: Gather = field(init=False)
    _offers: dict[str, Features] = field(default_factory=dict)
    _ups: dict[str, Tree] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Look again at who has failed."""
        self._wake.set()

    def is_void(self, device: str, update: Update) -> bool:
        """Tell whether an update is of a session that an earlier process served: the top that belongs to it is lost."""
        is_ours = update.failure is None and update.start in (b"", self._gather.starts[device])
        return is_ours and self.barrier.knows(device) and not self.barrier.done(device)

    async def offer(self, device: str, offer: Features) -> None:
        """Answer an offer of features: ask for what lacks, or say where the session is.

        Raises:
            WireError: It is in the name of another device, or of none of this round, or of no step.
        """
        if offer.device != device or device not in self._gather.starts:
            raise WireError(f"features in the name of {offer.device!r}", reason="identity")
        if not 1 <= offer.step <= self.barrier.steps:
            raise WireError(f"features of step {offer.step} of {self.barrier.steps}", reason="step")
        if offer.start != self._gather.starts[device] or not self.barrier.knows(device):
            return  # of before the round was begun anew from other parameters, which its newer task tells; or it failed
        answer = self.barrier.offer(device, offer.step, offer.params.digest)
        if answer is Word.TAKE:
            await self._take(device, offer)
        elif answer is Word.AGAIN:
            await self._tell_gradient(device, offer)
        elif isinstance(answer, int):
            await self.incoming.tell(device, skip(offer, answer))

    async def _take(self, device: str, offer: Features) -> None:
        self._offers[device] = offer
        self._ups.pop(device, None)
        try:
            await self.incoming.begin(device, offer)
        except WireError as error:
            self._refuse(device, error)
        self._wake.set()  # from now on a silence is to be noticed

    async def frame(self, device: str, data: bytes) -> None:
        """Take a frame of features that were offered.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        if await self.incoming.frame(device, data):
            self._wake.set()

    def join(self, gather: Gather) -> None:
        """Take the features of this round's devices from now on."""
        self._gather = gather

    def want(self, device: str, want: Want) -> None:
        """Send what a device asks for of its last gradient."""
        self.gradients.want(device, want)

    async def returned(self, device: str) -> None:
        """Note that a device has connected anew."""
        await self.incoming.returned(device)

    async def serve(self, reachable: Callable[[], Awaitable[bool]]) -> None:
        """Serve step after step, until cancelled.

        Args:
            reachable: Waits until the broker is there; tells whether it was there already. No deadline runs meanwhile.
        """
        async with background(self.gradients.send()):
            while True:
                self._wake.clear()
                self._drop_failed()
                for device, one in list(self.incoming.coming.items()):
                    if one.receiving.complete:
                        await self._read(device, one)
                if self.barrier.left_s(self.clock()) > 0:
                    await self.incoming.ask_again()
                    await self._until_due()
                elif self.barrier.lacking and not await reachable():
                    self.barrier.postpone(self.clock())
                else:
                    await self._step()

    def _drop_failed(self) -> None:
        for device in self._gather.failed:
            self.barrier.drop(device)
            for kept in (self.incoming.coming, self._ups, self.gradients.here):
                kept.pop(device, None)

    async def _read(self, device: str, one: Coming) -> None:
        """Decode and check features that are whole."""
        try:
            up = await self.worker(self.top.read, device, one.receiving)
        except WireError as error:
            if self.incoming.coming.get(device) is not one:
                return  # it has begun anew meanwhile
            if await self.incoming.damaged(device, error):
                self._gather.refused["digest"] += 1
            else:
                del self.incoming.coming[device]
                self._refuse(device, error)
        else:
            if self.incoming.coming.get(device) is one:
                del self.incoming.coming[device]
                self._ups[device] = up
                self.barrier.deliver(device, one.offer.params.digest, self.clock())

    def _refuse(self, device: str, error: WireError) -> None:
        if not self._gather.refused[error.reason]:
            log.warning("step %d goes on without %s: %s", self.barrier.step, device, error)
        self._gather.refused[error.reason] += 1
        self.barrier.refuse(device, self.clock())
        self._wake.set()

    async def _step(self) -> None:
        """Take the step that is due, and tell everybody what came of it."""
        number, absent = self.barrier.step, self.barrier.lacking
        devices, in_vain = self.barrier.serve()
        log.debug("step of round %d: number=%d devices=%d", self._gather.number, number, len(devices))
        if absent:
            log.info("round %d: step %d goes on without %s", self._gather.number, number, ", ".join(sorted(absent)))
        for device in in_vain:
            self.incoming.coming.pop(device, None)
        words = {device: skip(self._offers[device], self.barrier.step) for device in in_vain}
        offers = {device: self._offers[device] for device in devices}
        ups = {device: self._ups.pop(device) for device in devices}
        self.gradients.forget(devices)  # all of it before anything is waited for: offers come meanwhile
        await asyncio.gather(*(self.incoming.tell(device, word) for device, word in words.items()))
        if devices:
            self.gradients.here.update(await self._served(number, ups))
        await asyncio.gather(*(self._tell_gradient(device, offer) for device, offer in offers.items()))

    async def _served(self, number: int, ups: dict[str, Tree]) -> dict[str, Sender]:
        """Take a step off the loop; when cancelled, wait: nobody else may draw or use the state meanwhile."""
        link, transport = self.incoming.link, self.incoming.transport
        frame_bytes = frames.largest_frame(link.frame_bytes, transport.max_payload_bytes)
        serving = asyncio.ensure_future(self.worker(self.top.serve, number, ups, frame_bytes))
        try:
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            await asyncio.wait({serving})
            raise

    async def _tell_gradient(self, device: str, offer: Features) -> None:
        await self.gradients.tell(device, offer, self.incoming.pace(device), self.incoming.window)

    async def _until_due(self) -> None:
        """Wait until something has come, or the step is due."""
        left_s = min(self.barrier.left_s(self.clock()), TICK_S if self.incoming.coming else LONG_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()


def begin(  # noqa: PLR0913 - what a round is made of
    plan: Plan,
    algorithm: Algorithm,
    model: Model,
    server: Server,
    link: LinkConfig,
    *,
    number: int,
    state: State,
    assignments: Mapping[str, Assignment],
) -> Splitting | None:
    """Return who serves a round's steps, on a copy of the state; None where the devices train alone."""
    if algorithm.serve is None:
        return None
    steps = max((told.steps for told in assignments.values()), default=0)
    codec = build(CODECS, plan.cut_codec, "cut_codec")
    top = Top(algorithm, model, own(state), codec, assignments, plan.seed, before=(number - 1) * steps)
    barrier = Barrier(steps, plan.round.step_deadline_s, assignments)
    incoming = Incoming(server.site, server.transport, server.clock, link, server.paces)
    gradients = Gradients(server.site, server.transport)
    return Splitting(server.clock, server.worker, top, barrier, incoming, gradients)


def account(splitting: Splitting | None) -> dict[str, Any]:
    """Return what is recorded of a round's steps; nothing of one that is not split."""
    if splitting is None:
        return {}
    barrier = splitting.barrier
    return {"steps": barrier.step - 1, "missed": dict(sorted(barrier.missed.items()))}
