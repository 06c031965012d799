"""Run the acceptance gates of a candidate in a memory-limited child process.

A model may crash ONNX Runtime, hang it or exhaust memory. In a child process that harms nothing else, and the child's
exit status is the verdict.
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
from device_agent.inference.release_projects import read_project
from device_agent.inference.settings import InferenceSettings
from device_agent.inference.store import BoardStore
from device_agent.projects.provide import Projects
from shared.data.spec import Data
from shared.errors import TaskFailed
from shared.protocol.inference.release import read_manifest
from shared.protocol.messages import ProjectVersion
from shared.protocol.update import UpdateRecord, UpdateTerms
from shared.runtime import backports
from shared.runtime.interpreter import find_interpreter
from shared.runtime.processes import kill

log = logging.getLogger(__name__)

PATIENCE_S = 900.0
TRIES = 2
"""Tries of a candidate whose process dies: the first death may be the system's out-of-memory killer."""
MODULE = "device_agent.inference.gates.main"


class GateJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Job: run the gates on a candidate.

    Attributes:
        state_dir: Folder with the release store.
        committed: Active version to compare with; 0 for none.
        terms: Limits that the candidate must meet.
        settings: Settings of the inference process, memory limit included.
        data: The device's training data, part of which is held out; None for none.
        own: File of the device's own parameters that replace the release's; empty for none.
        projects: Folder of the release's project, whose code may read the data, by its name.
    """

    state_dir: str
    name: str
    candidate: int
    committed: int
    terms: UpdateTerms
    settings: InferenceSettings
    data: Data | None = None
    own: str = ""
    projects: dict[str, str] = {}


class OwnJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Job: compare the device's own model with the release that it would replace.

    Attributes:
        parts: Paths of the release's files by their names in an exported folder.
        own: File of the device's own parameters.
        max_drop: Allowed drop of accuracy below the release's.
        settings: Settings of the inference process.
        data: The device's training data, part of which is held out.
    """

    manifest: bytes
    parts: dict[str, str]
    own: str
    max_drop: float
    settings: InferenceSettings
    data: Data
    projects: dict[str, str] = {}


AnyJob: TypeAlias = GateJob | OwnJob


class Entering(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the gate about to run, to be blamed if the process dies."""

    gate: str


FromGates: TypeAlias = Entering | GateVerdict


@dataclass
class GateProcess:
    """Runs the gates on one candidate at a time.

    Attributes:
        state_dir: Folder with the release store.
        settings: Settings of the inference process.
        data: The device's training data; None for none.
        own_path: File of the device's own parameters; None if the releases' are used.
        patience_s: Seconds that a candidate's gates may take.
        projects: Provides the code of a release's project; None for no projects.
    """

    state_dir: Path
    settings: InferenceSettings
    data: Data | None = None
    own_path: Path | None = None
    patience_s: float = PATIENCE_S
    module: str = MODULE
    projects: Projects | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, record: UpdateRecord) -> GateVerdict:
        """Return the verdict on a record's candidate; cancelling the call kills the process."""
        job = GateJob(
            state_dir=str(self.state_dir),
            name=record.name,
            candidate=record.candidate,
            committed=record.committed,
            terms=record.terms,
            settings=self.settings,
            data=self.data,
            own=str(self.own_path or ""),
            projects=await self._provide(read_project(BoardStore(self.state_dir), record.name, record.candidate)),
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
        log.info("release %s/%d: %s", job.name, job.candidate, verdict.reason or "passed the gates")
        return verdict

    async def judge_own(self, files: ReleaseFiles, max_drop: float) -> str:
        """Return why the device's own parameters may not replace a release's; empty if they may.

        They may if the comparison is not possible, such as when memory is short.

        Args:
            max_drop: Allowed drop of accuracy below the release's, on the device's held-out examples.
        """
        if self.own_path is None or self.data is None:
            return ""
        job = OwnJob(
            manifest=files.manifest,
            parts={name: str(path) for name, path in files.parts.items()},
            own=str(self.own_path),
            max_drop=max_drop,
            settings=self.settings,
            data=self.data,
            projects=await self._provide(read_manifest(files.manifest, files.name).source.project or None),
        )
        async with self._turn:
            verdict = await self._try_out(job)
        if isinstance(verdict, GateVerdict) and verdict.lasting:
            return verdict.reason
        problem = verdict.reason if isinstance(verdict, GateVerdict) else verdict
        log.warning("%s/%d: cannot compare the device's own model: %s", files.name, files.version, problem)
        return ""

    async def _provide(self, project: ProjectVersion | None) -> dict[str, str]:
        """Return the folder of a release's project; empty to read examples with the code of the last task."""
        if project is None or self.projects is None or self.data is None:
            return {}
        try:
            return {project.name: str((await self.projects.provide(project)).folder)}
        except TaskFailed as error:
            log.warning("the gates do not use %s %s: %s", project.name, project.version, error)
            return {}

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
        return f"memory: the gate process was killed (signal 9) in {gate}: out of memory, or by hand"
    if code < 0:
        return f"crashes: the gate process died of signal {-code} in {gate}"
    return f"crashes: the gate process ended with exit code {code} in {gate}; see this agent's log"
