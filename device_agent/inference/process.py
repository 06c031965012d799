"""Supervise the inference process: start it, send commands, restart it with back-off.

Its failures never raise into the agent's tasks. After a restart it is told to serve what it served before.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

import msgspec

from device_agent.inference.collaborative.pipe import TopRelay
from device_agent.inference.command_pipe import CommandPipe
from device_agent.inference.messages import (
    EXIT_TAKEN,
    Applied,
    Ask,
    Figures,
    Load,
    Loaded,
    Ready,
    Switch,
    Unload,
    from_inference,
    read_frame,
)
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError, FieldFleetError, ServingDied, ServingRefused
from shared.runtime import backports
from shared.runtime.clock import Clock, monotonic
from shared.runtime.interpreter import Interpreter, find_interpreter
from shared.runtime.memory import MIB
from shared.runtime.processes import terminate

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S = 1.0, 60.0, 60.0
"""Restart pause: doubled after each death up to the maximum, reset once the process has lived for `STEADY_S`."""
MODULE = "device_agent.inference.main"
START_PATIENCE_S = 120.0
EXIT_PATIENCE_S = 2.0
"""Time for a process to exit after its pipe has closed."""
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""NumPy multiplies no matrices here; BLAS thread pools would take 40 MB of the memory limit per core."""


class OwnParameters(Protocol):
    """Source of the device's own parameters, which replace a release's.

    Attributes:
        changed: Set when there are newer parameters.
    """

    changed: asyncio.Event

    def path_for(self, files: ReleaseFiles) -> str:
        """Return the file of own parameters for a release; empty if the release's are to be used."""


class InferenceProcess:
    """The process and the versions that it serves.

    Args:
        find: Returns the files of a version; raises if they are unusable.
        served: Versions served from the start, by model.
        folders: Fallback versions that an operator put on the board, by model.
        command: Command line without the settings; empty for the default.

    Attributes:
        refused: Reason why a version is not served after a start, by model.
        commands: Commands and their replies.
        tops: Relay of requests for upper halves to the server.
        own: Source of the device's own parameters; None if the releases' are used.
        ready: Set while the process runs and serves what it served before.
        starts: Number of process starts.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        find: Callable[[str, int], ReleaseFiles],
        served: Mapping[str, ReleaseFiles],
        *,
        folders: Mapping[str, ReleaseFiles] = MappingProxyType({}),
        clock: Clock = monotonic,
        command: tuple[str, ...] = (),
    ) -> None:
        self._settings, self._find, self._clock, self._command = settings, find, clock, command
        self._loaded = {name: {files.version: files} for name, files in served.items()}
        self._current = {name: files.version for name, files in served.items()}
        self._folders = folders
        self._process: Process | None = None
        self.commands, self.tops = CommandPipe(), TopRelay()
        self.ready = asyncio.Event()
        self.own: OwnParameters | None = None
        self.refused: dict[str, str] = {}
        self.starts = 0

    @property
    def pid(self) -> int:
        """Process id; 0 while the process is not running."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    @property
    def deaths(self) -> int:
        """Number of deaths of the process since the agent started."""
        return max(0, self.starts - bool(self.pid))

    async def load(self, name: str, version: int) -> None:
        try:
            files = self._find(name, version)
        except FieldFleetError as error:
            raise ServingRefused(str(error)) from error
        await self._wait_until_ready()
        await self._unload_others(name, version)
        await self.commands.request(self._load_message(files), Loaded)
        self._loaded.setdefault(name, {})[version] = files

    async def _unload_others(self, name: str, version: int) -> None:
        """Unload versions that are neither active nor wanted, such as a folder's version replaced by a rollout."""
        versions = self._loaded.get(name, {})
        for other in [other for other in versions if other not in (version, self._current.get(name))]:
            del versions[other]
            if self.pid:
                await self.commands.request(Unload(name, other), Applied)

    async def switch(self, name: str, version: int) -> None:
        await self._wait_until_ready()
        await self.commands.request(Switch(name, version), Applied)
        self._current[name] = version

    def active_files(self) -> list[ReleaseFiles]:
        """Return the active versions."""
        return [self._loaded[name][version] for name, version in self._current.items() if version in self._loaded[name]]

    async def reload(self, files: ReleaseFiles) -> bool:
        """Reload an active version without failing requests; return whether it was still active.

        Raises:
            ServingRefused: It cannot be reloaded and stays active; `ServingDied` if the process died meanwhile.
        """
        await self._wait_until_ready()
        if files not in self.active_files():
            return False
        await self.commands.request(self._load_message(files), Loaded)
        return True

    async def unload(self, name: str, version: int) -> None:
        """Unload a version for good; if it was active, another one is activated.

        Args:
            version: 0 for all inactive versions.

        Raises:
            ServingDied: The process died first; it restarts without this version.
        """
        if not version:
            await self._unload_others(name, version)
            return
        others = self._loaded.setdefault(name, {})
        others.pop(version, None)
        if self._current.get(name) == version:
            del self._current[name]
            await self._activate_other(name, others)
        if self.pid and version not in others:
            await self.commands.request(Unload(name, version), Applied)

    async def _activate_other(self, name: str, others: dict[int, ReleaseFiles]) -> None:
        """Activate another loaded version, or that of an operator's folder once a rollout's is taken back."""
        files = None if others else self._folders.get(name)
        if files:
            others[files.version] = files
        if not others:
            return
        self._current[name] = max(others)
        if not self.pid:
            return
        try:
            if files:
                await self.commands.request(self._load_message(files), Loaded)
            await self.switch(name, max(others))
        except ServingDied:
            raise  # the next process starts with this version
        except ServingRefused as error:
            log.warning("model %s is no longer served: %s", name, error)
            del self._current[name]
            others.clear()

    async def figures(self, name: str, version: int) -> Figures:
        await self._wait_until_ready()
        return await self.commands.request(Ask(name, version), Figures)

    async def _wait_until_ready(self) -> None:
        """Wait until the process serves what it served before."""
        try:
            async with backports.timeout(START_PATIENCE_S):
                await self.ready.wait()
        except TimeoutError as error:
            raise ServingDied(f"the inference process is not ready after {START_PATIENCE_S:.0f} s") from error

    async def run(self) -> None:
        """Keep the process alive until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock()
            try:
                cause = await self.live()
            except (OSError, ConfigError) as error:
                cause = f"it could not be started: {error}"
            if self._clock() - began >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            log.warning("nothing is served: %s; it is started again in %.0f s", cause, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _start(self, interpreter: Interpreter, tops: Sequence[int]) -> Process:
        """Start the process, with the descriptor of its socket for upper halves if it has one."""
        settings = msgspec.json.encode(self._settings).decode()
        return await asyncio.create_subprocess_exec(
            *(*(self._command or interpreter.command(MODULE)), settings, *map(str, tops)),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            env=interpreter.environment() | SINGLE_THREADED,
            pass_fds=tops,
        )

    async def live(self) -> str:
        """Start the process and serve it until it ends; return the cause of its death.

        Raises:
            ConfigError: The Python interpreter for it is missing.
        """
        self.starts += 1
        interpreter = find_interpreter()
        agent_socket, process_socket = socket.socketpair() if self._settings.cut else (None, None)
        tops = [process_socket.fileno()] if process_socket else []
        try:
            process = self._process = await self._start(interpreter, tops)
        finally:
            if process_socket:
                process_socket.close()
        self.commands.attach(process)
        log.info("inference process started pid=%d", process.pid)
        relaying = asyncio.create_task(self.tops.run(agent_socket), name="upper halves") if agent_socket else None
        restoring, has_served = None, False
        try:
            async with backports.timeout(START_PATIENCE_S):
                first = await read_frame(process.stdout, from_inference)
            if isinstance(first, Ready):
                has_served = True
                restoring = asyncio.create_task(self._restore(), name="restore")
                while (message := await read_frame(process.stdout, from_inference)) is not None:
                    self.commands.resolve_next(message)
                with suppress(TimeoutError):  # let it exit by itself: a signal would hide the cause of its death
                    async with backports.timeout(EXIT_PATIENCE_S):
                        await process.wait()
        except TimeoutError:
            process.kill()
        except msgspec.DecodeError as error:
            log.warning("the inference process sent an invalid message: %s", error)
            process.kill()
        finally:
            self.ready.clear()
            for task in (restoring, relaying):
                if task:
                    task.cancel()
            self.commands.fail_pending()
            await asyncio.shield(terminate(process))
        return _cause_of_death(process) + ("" if has_served else _hint(process, self._settings.memory_bytes))

    async def _restore(self) -> None:
        """Load what was served before; log and record refusals."""
        for name, versions in [(name, dict(versions)) for name, versions in self._loaded.items()]:
            for files in versions.values():
                try:
                    loaded = await self.commands.request(self._load_message(files), Loaded)
                    if self._current.get(name) == files.version:
                        await self.commands.request(Switch(name, files.version), Applied)
                    self.refused.pop(name, None)
                    log.info(
                        "serving %s/%d, opened in %.2f s by %s", name, files.version, loaded.seconds, loaded.provider
                    )
                except ServingDied:
                    return  # `run` restarts it
                except ServingRefused as error:
                    self.refused[name] = str(error)
                    log.warning("%s/%d is not served: %s", name, files.version, error)
        self.ready.set()

    def _load_message(self, files: ReleaseFiles) -> Load:
        parts = {name: str(path) for name, path in files.parts.items()}
        return Load(files.name, files.version, files.manifest, parts, self.own.path_for(files) if self.own else "")


def _cause_of_death(process: Process) -> str:
    code = process.returncode
    if code == -signal.SIGKILL:
        return "the inference process was killed (signal 9): out of memory, by hand, or unresponsive"
    if code is not None and code < 0:
        return f"the inference process died of signal {-code} ({signal.Signals(-code).name})"
    return f"the inference process ended with exit code {code}; see its messages in this agent's log"


def _hint(process: Process, memory_bytes: int) -> str:
    """Return a likely cause for a process that died before it could serve."""
    if process.returncode == EXIT_TAKEN:
        return " (serve.port, serve.socket)"
    limit = memory_bytes / MIB
    return f"; it ended before it could serve: if memory was short, raise serve.memory_mb (now {limit:.0f} MiB)"
