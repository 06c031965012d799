"""Trial of an active release candidate: collect its figures, then judge them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from device_agent.inference.messages import Figures
from device_agent.inference.served_model import ServedModel
from device_agent.inference.soak import judge_trial
from shared.errors import ServingRefused
from shared.protocol.update import UpdateRecord
from shared.runtime import backports

LOOK_S = 5.0
"""Interval between two checks of a trial's figures."""


@dataclass
class Trial:
    """Observation of a candidate; after an agent start, `watch` begins it again.

    Attributes:
        look_s: Seconds between two checks of the figures.
    """

    model: ServedModel
    look_s: float = LOOK_S
    _before: Figures | None = None
    _starts: int = 0

    async def begin(self, record: UpdateRecord) -> None:
        """Note the figures of the committed version and the process starts before the switch."""
        self._before, self._starts = await self.model.figures(record.committed), self.model.serving.starts

    def reset(self) -> None:
        """Forget the figures of an ended trial."""
        self._before = None

    async def watch(self, record: UpdateRecord) -> str:
        """Watch the trial to its end; return why the candidate is worse, or "" if it may stay."""
        if self._before is None:  # an earlier agent process began the trial
            self._before = await self.model.figures(record.committed)
            reason = await self.model.activate(record.candidate)
            self._starts = self.model.serving.starts  # counted only now, since activation may start the process
            if reason:
                return f"switch: {reason}"
        terms = record.terms
        try:
            async with backports.timeout(terms.deadline_s):
                reason = await self._watch_figures(record, self._before)
        except TimeoutError:
            reason = f"deadline: its trial did not end within {terms.deadline_s:.0f} s"
        except ServingRefused as error:
            reason = f"crashes: {error}"
        return reason

    async def _watch_figures(self, record: UpdateRecord, before: Figures) -> str:
        """Compare figures until the soak period ends; return what is worse, or ""."""
        serving, loop = self.model.serving, asyncio.get_running_loop()
        ends = loop.time() + record.terms.soak_s
        while True:
            over = ends - loop.time() <= self.look_s
            await asyncio.sleep(max(0.0, ends - loop.time()) if over else self.look_s)
            now = await serving.figures(self.model.name, record.candidate)
            reason = judge_trial(before, now, serving.starts - self._starts, record.terms)
            if reason or over:
                return reason
