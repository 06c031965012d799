"""The process that tries a release out: started for one candidate, limited in memory, ended after it.

A model may crash ONNX Runtime, hang it or take all memory. Here it takes nothing with it: how this process ends is its
verdict.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.inference.candidate import GateVerdict
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.settings import InferenceSettings
from shared.data.spec import Data
from shared.protocol.update import UpdateRecord, UpdateTerms
from shared.runtime import backports
from shared.runtime.interpreter import find_interpreter
from shared.runtime.processes import kill

log = logging.getLogger(__name__)

PATIENCE_S = 900.0
TRIES = 2
"""Of a candidate under which the process dies: the first time it may have been the system's need of memory."""
MODULE = "device_agent.inference.gates.main"


class GateJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What to try out.

    Attributes:
        state_dir: Where the board's releases lie.
        committed: The one to compare it with; 0 for none.
        terms: What it must keep to.
        settings: As the inference process has them, its memory too.
        data: The device's own examples, of which some are held out; None for none.
        own: File of the device's own parameters, which answer in place of a release's; empty where none do.
    """

    state_dir: str
    name: str
    candidate: int
    committed: int
    terms: UpdateTerms
    settings: InferenceSettings
    data: Data | None = None
    own: str = ""


class OwnJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A model of the device's own to compare with the release that it is to answer for.

    Attributes:
        parts: Paths of its files, by the names that they have in a folder.
        own: File of the device's own parameters.
        max_drop: By how much they may be less accurate than the release's.
        settings: Of the inference process.
        data: The device's own examples, of which some are held out.
    """

    manifest: bytes
    parts: dict[str, str]
    own: str
    max_drop: float
    settings: InferenceSettings
    data: Data


AnyJob: TypeAlias = GateJob | OwnJob


class Entering(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: what comes next, should this be its last word."""

    gate: str


FromGates: TypeAlias = Entering | GateVerdict


@dataclass
class GateProcess:
    """Tries candidates out, one at a time.

    Attributes:
        state_dir: Where the board's releases lie.
        settings: Of the inference process.
        data: The device's own examples; None for none.
        own: File of the device's own parameters; None where releases' answer.
        patience_s: In which a candidate must have passed.
    """

    state_dir: Path
    settings: InferenceSettings
    data: Data | None = None
    own: Path | None = None
    patience_s: float = PATIENCE_S
    module: str = MODULE
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, record: UpdateRecord) -> GateVerdict:
        """Return what becomes of a record's candidate; a call that is cancelled ends the process."""
        job = GateJob(
            state_dir=str(self.state_dir),
            name=record.name,
            candidate=record.candidate,
            committed=record.committed,
            terms=record.terms,
            settings=self.settings,
            data=self.data,
            own=str(self.own or ""),
        )
        async with self._turn:
            for remaining in reversed(range(TRIES)):
                verdict = await self._try_out(job)
                if isinstance(verdict, GateVerdict):
                    break
                log.warning("release %s/%d: %s", job.name, job.candidate, verdict)
                if not remaining:
                    verdict = GateVerdict(reason=verdict)
        assert isinstance(verdict, GateVerdict)
        log.info("release %s/%d: %s", job.name, job.candidate, verdict.reason or "it passed the gates")
        return verdict

    async def judge_own(self, files: ReleaseFiles, max_drop: float) -> str:
        """Return why the device's own parameters are not to answer for a release; empty where they may.

        Where nothing here can tell, as where memory is short, they may.

        Args:
            max_drop: By how much they may be less accurate than the release's on the device's held-out examples.
        """
        if self.own is None or self.data is None:
            return ""
        job = OwnJob(
            manifest=files.manifest,
            parts={name: str(path) for name, path in files.parts.items()},
            own=str(self.own),
            max_drop=max_drop,
            settings=self.settings,
            data=self.data,
        )
        async with self._turn:
            verdict = await self._try_out(job)
        if isinstance(verdict, GateVerdict) and verdict.lasting:
            return verdict.reason
        problem = verdict.reason if isinstance(verdict, GateVerdict) else verdict
        log.warning("%s/%d: the device's own model is not judged: %s", files.name, files.version, problem)
        return ""

    async def _try_out(self, job: AnyJob) -> GateVerdict | str:
        """Return the child's verdict, or how it died."""
        interpreter = find_interpreter()
        process = await asyncio.create_subprocess_exec(
            *interpreter.command(self.module), stdin=PIPE, stdout=PIPE, env=interpreter.environment()
        )
        try:
            async with backports.timeout(self.patience_s):
                return await _converse(process, job)
        except TimeoutError:
            is_lasting = isinstance(job, GateJob)
            return GateVerdict(lasting=is_lasting, reason=f"time: the gates did not end within {self.patience_s:.0f} s")
        finally:
            await kill(process)


async def _converse(process: Process, job: AnyJob) -> GateVerdict | str:
    assert process.stdin
    assert process.stdout
    process.stdin.write(msgspec.json.encode(job))
    process.stdin.close()
    gate = "its start"
    async for line in process.stdout:
        message: FromGates = msgspec.json.decode(line, type=FromGates)
        if isinstance(message, GateVerdict):
            return message
        gate = message.gate
    return _cause_of_death(await process.wait(), gate)


def _cause_of_death(code: int, gate: str) -> str:
    if code == -signal.SIGKILL:
        return f"memory: the process that tried it out was killed (signal 9) in {gate}: out of memory, or by hand"
    if code < 0:
        return f"crashes: the process that tried it out died of signal {-code} in {gate}"
    return f"crashes: the process that tried it out ended with exit code {code} in {gate}; see this agent's log"
