"""Run a plan live again and again, kill its processes meanwhile, and say what became of everything."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, RunClosed, closed_rounds
from edge_server.journal.sqlite import read
from edge_server.trial.chaos.kills import Kill, Kind
from edge_server.trial.chaos.log_reader import BEGINNING, LogLine
from edge_server.trial.chaos.site import BROKER, Site
from edge_server.trial.chaos.verify import Account, account
from edge_server.trial.local import SERVER
from edge_server.trial.progress import follow
from shared.errors import TaskFailed
from shared.runtime.clock import Clock, monotonic
from shared.tensors.tree import State

MARK_POLL_S, POLL_S = 0.001, 0.02
MARK_PATIENCE_S = 20.0
STALL_S = 300.0
END_S = 10.0


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A kill that was made.

    Attributes:
        run: The run it fell into.
        kind, name: What was killed.
        phase: What it did, by its own last word; for the broker, what the server did.
        marked: Whether a mark was waited for and came.
    """

    run: str
    kind: Kind
    name: str
    phase: str
    marked: bool


@dataclass
class ChaosStudy:
    """A site under attack.

    Attributes:
        site: Its processes, running.
        kills: What is still to be killed.
        expected: The state an undisturbed run ends with.
        tell: Hears of every kill and of every run that has ended.
        struck: The kills that were made.
        accounts: The runs that have ended.
    """

    site: Site
    kills: deque[Kill]
    expected: State
    tell: Callable[[Struck | Account], None]
    clock: Clock = monotonic
    struck: list[Struck] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    _moved: float = 0.0
    _since: float = 0.0

    async def run(self) -> None:
        """Run the plan until nothing is left to be killed; the last run then ends undisturbed.

        Raises:
            TaskFailed: A run does not end, or a process ended by itself.
        """
        self._since = self.clock()
        while self.kills or not self.accounts:
            run = f"{self.site.local.plan.name[:32]}-{len(self.accounts) + 1}"
            self._moved = self.clock()
            await self.site.serve(run)
            ended = asyncio.create_task(follow(self.site.local.folder, self._note), name="follow")
            try:
                while not ended.done():
                    if self.kills and (marked := await self._moment(self.kills[0], ended)) is not None:
                        await self._strike(self.kills[0], marked=marked)
                    await self._pause(POLL_S)
                ended.result()
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)
            self._close(run)

    async def _moment(self, kill: Kill, ended: asyncio.Task[RunClosed]) -> bool | None:
        """Wait for the moment of a kill: tell whether its mark came; None where the run has ended first."""
        marked = False
        while kill.mark and not marked and self.clock() - self._since < MARK_PATIENCE_S and not ended.done():
            marked = any(self._is_mark(kill, said) for said in self.site.logs.news())
            await self._pause(0.0 if marked else MARK_POLL_S)
        strike_at = (self.clock() if marked else self._since) + kill.wait_s
        while self.clock() < strike_at and not ended.done():
            await self._pause(min(POLL_S, strike_at - self.clock()))
        return None if ended.done() else marked

    def _is_mark(self, kill: Kill, said: LogLine) -> bool:
        return (said.by, said.phase) == kill.mark and said.name in (SERVER, self._device(kill))

    def _device(self, kill: Kill) -> str:
        return self.site.devices[kill.device % len(self.site.devices)]

    async def _strike(self, kill: Kill, *, marked: bool) -> None:
        """Kill and start again; where the victim is away, or past its mark's phase, the moment is still to come."""
        name = {"server": SERVER, "broker": BROKER}.get(kill.victim, self._device(kill))
        within = kill.mark.phase if marked and kill.mark and kill.mark.by == kill.victim else ""
        if not await self.site.kill(kill.victim, name, within):
            return
        self.kills.popleft()
        self.site.logs.news()
        phases = self.site.logs.phases
        phase = phases.get(("server", SERVER) if kill.victim == "broker" else (kill.victim, name), BEGINNING)
        self.struck.append(Struck(run=self.site.local.run, kind=kill.victim, name=name, phase=phase, marked=marked))
        self.tell(self.struck[-1])
        await asyncio.sleep(kill.away_s)
        if kill.victim != "trainer":
            await self.site.start(name)
        self._moved = self._since = self.clock()

    async def _pause(self, seconds: float) -> None:
        """Let time pass, and find out whether anything has gone wrong.

        Raises:
            TaskFailed: An agent or the broker ended by itself, or nothing has happened for very long.
        """
        await asyncio.sleep(max(0.0, seconds))
        for name, part in self.site.parts.items():
            if part.code is not None and name != SERVER:
                raise TaskFailed(f"{name} ended with exit code {part.code}; {self._where(name)}")
        plan, code = self.site.local.plan, self.site.parts[SERVER].code
        patience_s = max(STALL_S, 2 * (plan.round.deadline_s + plan.cohort.wait_s)) if code is None else END_S
        if self.clock() - self._moved > patience_s:
            what = f"the server ended with exit code {code}" if code is not None else f"nothing for {patience_s:.0f} s"
            raise TaskFailed(f"run {self.site.local.run} does not end: {what}; {self._where(SERVER)}")

    def _where(self, name: str) -> str:
        return f"see {self.site.place / name}.log"

    def _note(self, _record: AnyRecord) -> None:
        self._moved = self.clock()

    def _close(self, run: str) -> None:
        """Draw up the account of a run that has ended."""
        self.site.logs.news()
        folder, rounds = self.site.local.folder, self.site.local.plan.rounds
        records = read(folder)
        models = [one.round for one in closed_rounds(records) if one.outcome == "aggregated"]
        final = checkpoints.load(folder / "checkpoints", models[-1]) if models else State()
        said = self.site.logs.said
        self.accounts.append(account(run, records, said, rounds=rounds, final=final, expected=self.expected))
        self.tell(self.accounts[-1])
