"""Open rounds of a site, and handlers of device messages for them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from edge_server.fleet.answers import Answers, build_ack, build_skip
from edge_server.fleet.handlers import Broadcast, Collector, StepServer
from shared.errors import WireError
from shared.protocol.messages import Features, Task, Update, Want
from shared.protocol.topics import is_name
from shared.runtime.phases import log_phase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRound:
    """Round that is open for some devices.

    Attributes:
        tasks: Its tasks, by device.
        splitting: Serves its steps; None unless it is split.
        payloads: Payloads for each device.
    """

    gather: Collector
    tasks: dict[str, Task]
    splitting: StepServer | None
    payloads: Mapping[str, Sequence[Broadcast]]

    def owes(self, device: str) -> bool:
        """Return true if a device has a task of this round that is not done."""
        return device in self.tasks and device not in self.gather.accepted and device not in self.gather.failed

    def dismiss(self, device: str) -> None:
        """Stop serving payloads to a device that has them or disconnected."""
        for payload in self.payloads.get(device, ()):
            payload.dismiss(device)

    async def handle_reconnect(self, device: str) -> None:
        """Handle a new session of a device."""
        await self.gather.handle_reconnect(device)
        if self.splitting:
            await self.splitting.handle_reconnect(device)


@dataclass
class OpenRounds:
    """Rounds by run: several runs may have one open at once, each with other devices.

    Attributes:
        was_run: Returns true for names of this site's earlier runs, so that their late updates can be settled.
        runs: Names of the current runs.
        takes: Returns true for devices that may take part.
    """

    answers: Answers
    was_run: Callable[[str], bool] = lambda _run: False
    runs: set[str] = field(default_factory=set)
    takes: Callable[[str], bool] = lambda _device: True
    _by_run: dict[str, OpenRound] = field(default_factory=dict)

    @contextmanager
    def open(
        self,
        gather: Collector,
        tasks: dict[str, Task],
        outgoing: Sequence[Broadcast],
        splitting: StepServer | None,
    ) -> Iterator[None]:
        """Route messages of a round's devices to it during the block."""
        payloads = defaultdict[str, list[Broadcast]](list)
        for payload in outgoing:
            for device in payload.devices:
                payloads[device].append(payload)
        self._by_run[gather.run] = OpenRound(gather, tasks, splitting, payloads)
        try:
            yield
        finally:
            del self._by_run[gather.run]

    @property
    def tasks(self) -> dict[str, Task]:
        """Tasks of the open rounds, by device."""
        return {device: task for open_round in self._by_run.values() for device, task in open_round.tasks.items()}

    def find(self, device: str) -> OpenRound | None:
        """Return the open round that may expect messages of a device: the only one, or the one with a task for it."""
        rounds = self._by_run.values()
        return next((entry for entry in rounds if len(rounds) == 1 or device in entry.tasks), None)

    def awaits(self, device: str, channel: str) -> bool:
        """Return true if frames of a device are expected on a channel."""
        taker = self.find_taker(device, channel)
        return taker is not None and taker.awaits(device)

    def find_taker(self, device: str, channel: str) -> Collector | StepServer | None:
        """Return the receiver of a device's frames on a channel; None if no round expects any."""
        open_round = self.find(device)
        if open_round is None:
            return None
        return open_round.gather if channel == "update" else open_round.splitting

    async def handle_want(self, device: str, want: Want) -> None:
        """Send frames of a payload that a device requests."""
        if not (open_round := self.find(device)):
            return
        if payloads := [payload for payload in open_round.payloads.get(device, ()) if payload.digest == want.digest]:
            payloads[0].want(device, want)
        elif open_round.splitting:
            open_round.splitting.want(device, want)

    async def handle_update(self, device: str, update: Update) -> None:
        """Pass an offer to the open round, or settle it if no round will take it."""
        open_round = self._by_run.get(update.run)
        if open_round is None and self._is_between_rounds(update.run):
            return  # between rounds the device simply offers again
        is_open = open_round is not None and update.round == open_round.gather.number
        if open_round and is_open and device in open_round.gather.expected:
            gather, splitting = open_round.gather, open_round.splitting
            if update.start in (b"", gather.starts[device]):
                open_round.dismiss(device)  # a device that offers has the whole payload
            if splitting and splitting.is_void(device, update):
                self.answers.tell(device, "ack", build_ack(update, "void"))
            else:
                await gather.offer(device, update)
            if splitting:
                splitting.wake()
        elif not is_open and is_name(update.run) and self.was_run(update.run):
            self.answers.tell(device, "ack", build_ack(update, "late"))
            log_phase(log, "late", run=update.run, round=update.round, device=device)
        else:
            reason = "unknown-device" if is_open else "unknown-run"
            error = WireError("update of no run, round and device of this site", reason=reason)
            self.answers.tell(device, "ack", build_ack(update, "refused", str(error)))
            raise error

    async def handle_features(self, device: str, features: Features) -> None:
        """Pass features to the open round; if their round is over, tell the device so that it ends its session."""
        open_round = self._by_run.get(features.run)
        if open_round is None and self._is_between_rounds(features.run):
            return  # the device offers again
        is_open = open_round is not None and features.round == open_round.gather.number
        if open_round and open_round.splitting and is_open:
            if features.start == open_round.gather.starts.get(device):
                open_round.dismiss(device)
            await open_round.splitting.offer(device, features)
        elif not is_open and is_name(features.run) and self.was_run(features.run):
            self.answers.tell(device, "gradient", build_skip(features))
        else:
            raise WireError("features of no run, round and device of this site", reason="unknown-run")

    def _is_between_rounds(self, run: str) -> bool:
        """Return true if a run without an open round may open another; before any run is known, each may."""
        return not self.runs or run in self.runs
