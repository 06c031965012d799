"""Chaos study: repeat live runs, kill processes and audit each run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import msgspec

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, RunClosed, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.trial.chaos.kills import Kill
from edge_server.trial.chaos.log_reader import BEGINNING, LogLine
from edge_server.trial.chaos.mark import Kind, process_of
from edge_server.trial.chaos.site import BROKER, Site
from edge_server.trial.chaos.verify import Account, audit_run, audit_sites
from edge_server.trial.local import SERVER
from edge_server.trial.local_sites import LONGEST_NAME
from edge_server.trial.progress import follow
from shared.errors import TaskFailed
from shared.runtime.clock import Clock, monotonic
from shared.tensors.tree import State

MARK_POLL_S, POLL_S = 0.001, 0.02
MARK_PATIENCE_S = 20.0
"""Patience for a mark, times the number of sites: each logs it only now and then."""
STALL_S = 300.0
END_S = 10.0
LEADS = frozenset({"leading", "deciding", "decided"})
"""Phases of a coordinating server."""

Expected: TypeAlias = Callable[[Mapping[str, Sequence[AnyRecord]]], Mapping[str, State]]
"""Function from all sites' records, which contain the decisions, to the final states of undisturbed runs."""


class KillResult(msgspec.Struct, frozen=True, kw_only=True):
    """A kill that happened.

    Attributes:
        run: Run during which it happened.
        kind, name: Victim.
        phase: Last phase of the victim; for the broker, the server's.
        marked: Whether a mark was awaited and came.
        site: Site of the victim in a plan with several sites.
    """

    run: str
    kind: Kind
    name: str
    phase: str
    marked: bool
    site: str = ""


@dataclass
class ChaosStudy:
    """Sites under attack, mostly one.

    Attributes:
        sites: Their running processes, in the plan's order.
        expected: Final states of undisturbed runs.
        tell: Receives every kill and every audit.
        accounts: Audits of ended runs, one per site.
    """

    sites: Sequence[Site]
    kills: deque[Kill]
    expected: Expected
    tell: Callable[[KillResult | Account], None]
    clock: Clock = monotonic
    struck: list[KillResult] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    _moved: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0
    _following: dict[str, asyncio.Task[RunClosed]] = field(default_factory=dict)
    _leads: Site | None = None

    async def run(self) -> None:
        """Run the plan until no kill remains; the last run then ends undisturbed.

        Raises:
            TaskFailed: A run does not end, or a process ended by itself.
        """
        self._since, number = self.clock(), 0
        while self.kills or not self.accounts:
            number += 1
            first = self.kills[0] if self.kills else None
            self._stir()
            for site in self.sites:
                await site.serve(self._name(site, number))
            self._following = {
                site.local.site: asyncio.create_task(
                    follow(site.local.folder, partial(self._note, site.local.site)), name=f"follow {site.local.site}"
                )
                for site in self.sites
            }
            try:
                while not self._is_over():
                    if self.kills and (marked := await self._moment(self.kills[0])) is not None:
                        await self.strike(self.kills[0], marked=marked)
                    await self.pause(POLL_S)
                for task in self._following.values():
                    task.result()
            finally:
                for task in self._following.values():
                    task.cancel()
                await asyncio.gather(*self._following.values(), return_exceptions=True)
            await self._close()
            if first and self.kills and self.kills[0] is first:  # its device took no part in the whole run
                self.kills[0] = replace(first, device=first.device + 1)

    def _name(self, site: Site, number: int) -> str:
        plan, end = site.local.plan, f"-{number}"
        if plan.sites:
            end += f"-{site.local.site}"
        longest = max(len(other.local.site) for other in self.sites) - len(site.local.site) if plan.sites else 0
        return f"{plan.name[: min(32, LONGEST_NAME - len(end) - longest)]}{end}"

    def _is_over(self) -> bool:
        return all(task.done() for task in self._following.values())

    async def _moment(self, kill: Kill) -> bool | None:
        """Wait for the moment of a kill; return whether its mark came, None if the run ended first."""
        marked, patience_s = False, MARK_PATIENCE_S * len(self.sites)
        while kill.mark and not marked and self.clock() - self._since < patience_s and not self._is_over():
            marked = any(self.is_mark(kill, site, line) for site, line in self.news())
            await self.pause(0.0 if marked else MARK_POLL_S)
        strike_at = (self.clock() if marked else self._since) + kill.wait_s
        while self.clock() < strike_at and not self._is_over():
            await self.pause(min(POLL_S, strike_at - self.clock()))
        return None if self._is_over() else marked

    def news(self) -> list[tuple[Site, LogLine]]:
        """Return the phases logged since the last call, and note the coordinator."""
        news = [(site, line) for site in self.sites for line in site.logs.news()]
        for site, line in news:
            if line.by == "server" and line.phase in LEADS:
                self._leads = site
        return news

    def is_mark(self, kill: Kill, site: Site, line: LogLine) -> bool:
        """Return True if a log line from `site` is the mark of a kill."""
        target_site, device = self.place_of(kill)
        return (line.by, line.phase) == kill.mark and site is target_site and line.name in (SERVER, device)

    def place_of(self, kill: Kill) -> tuple[Site, str]:
        """Return the site and device that a kill targets; for a coordinator, its site."""
        homes = [(site, device) for site in self.sites for device in site.devices]
        site, device = homes[kill.device % len(homes)]
        return (self._leads or site, device) if kill.victim == "coordinator" else (site, device)

    async def strike(self, kill: Kill, *, marked: bool) -> None:
        """Kill and restart; if the victim is offline or past its phase, the kill remains due."""
        if not marked:
            self.news()  # which trainer runs, and who coordinates: nothing was waited for
        site, device = self.place_of(kill)
        by = process_of(kill.victim)
        name = {"server": SERVER, "broker": BROKER}.get(by, device)
        within = kill.mark.phase if marked and kill.mark and kill.mark.by == by else ""
        if kill.victim == "coordinator" and site.logs.phase(by, name) == BEGINNING:
            return  # it will be one again, or another site is by then
        if not await site.kill(kill.victim, name, within):
            return
        self.kills.popleft()
        self.news()
        phase = site.logs.phase("server", SERVER) if by == "broker" else site.logs.phase(by, name)
        self.struck.append(
            KillResult(
                run=site.local.run,
                kind=kill.victim,
                name=name,
                phase=phase,
                marked=marked,
                site=site.local.site if site.local.plan.sites else "",
            )
        )
        self.tell(self.struck[-1])
        await asyncio.sleep(kill.away_s)
        if by != "trainer":
            await site.start(name)
        self._stir()
        self._since = self.clock()

    async def pause(self, seconds: float) -> None:
        """Sleep, then check the processes.

        Raises:
            TaskFailed: An agent or a broker ended by itself, or nothing happened for too long.
        """
        await asyncio.sleep(max(0.0, seconds))
        for site in self.sites:
            self._require_well(site)

    def _require_well(self, site: Site) -> None:
        for name, part in site.parts.items():
            if part.code is not None and name != SERVER:
                raise TaskFailed(f"{name} ended with exit code {part.code}; see {site.place / name}.log")
        following = self._following.get(site.local.site)
        if following and following.done():
            return  # its run has ended, and the others' have not
        plan, code = site.local.plan, site.parts[SERVER].code
        between_s = 2 * plan.sites.deadline_s if plan.sites else 0.0
        patience_s = (
            max(STALL_S, 2 * (plan.round.deadline_s + plan.cohort.wait_s), between_s) if code is None else END_S
        )
        if self.clock() - self._moved.get(site.local.site, 0.0) > patience_s:
            reason = (
                f"the server ended with exit code {code}" if code is not None else f"nothing for {patience_s:.0f} s"
            )
            raise TaskFailed(f"run {site.local.run} does not end: {reason}; see {site.place / SERVER}.log")

    def _stir(self) -> None:
        self._moved = dict.fromkeys((site.local.site for site in self.sites), self.clock())

    def _note(self, site: str, _record: AnyRecord) -> None:
        self._moved[site] = self.clock()

    async def _close(self) -> None:
        self.news()
        records = {site.local.site: read_records(site.local.folder) for site in self.sites}
        expected = await asyncio.to_thread(self.expected, records)
        for site in self.sites:
            site_name, site_records, plan = site.local.site, records[site.local.site], site.local.plan
            models = [record.round for record in closed_rounds(site_records) if record.outcome == "aggregated"]
            final = checkpoints.load(site.local.folder / "checkpoints", models[-1]) if models else State()
            result = audit_run(
                *(site.local.run, site_records, site.logs.said),
                rounds=plan.rounds,
                final=final,
                expected=expected[site_name],
            )
            if plan.sites:
                result = audit_sites(result, plan, site_name, records)
            self.accounts.append(result)
            self.tell(result)
