"""Supervise the inference process: start it, tell it what to serve, start it again with back-off when it dies.

What becomes of it never touches the agent's tasks: nothing here raises into them. After a start it is given all that
it served before.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec

from device_agent.inference.collaborative.interface import AskTop, Half, TopReply
from device_agent.inference.collaborative.pipe import relay
from device_agent.inference.messages import (
    EXIT_TAKEN,
    HEAD_BYTES,
    Ask,
    Figures,
    FromInference,
    Load,
    Loaded,
    LoadRefused,
    Ready,
    Switch,
    Switched,
    ToInference,
    Unload,
    Unloaded,
    frame,
)
from device_agent.inference.release_folder import ReleaseFiles
from device_agent.inference.settings import InferenceSettings
from shared.errors import ConfigError, FieldFleetError, ServingDied, ServingRefused, Unreachable
from shared.runtime import backports
from shared.runtime.clock import Clock, monotonic
from shared.runtime.interpreter import Interpreter, find_interpreter
from shared.runtime.memory import MIB
from shared.runtime.processes import terminate

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S = 1.0, 60.0, 60.0
"""Before it is started again; twice as long each time, from the first again after it lived for so long."""
MODULE = "device_agent.inference.main"
START_PATIENCE_S = 120.0
GONE_S = 2.0
"""For a process to end after its pipe."""
LEAN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Numpy multiplies no matrices here: without these it takes 40 MB of the process's limit for each core's buffers."""
A = TypeVar("A", Loaded, Switched, Unloaded, Figures)


class OwnParameters(Protocol):
    """Where the device's own parameters lie, which answer in place of a release's.

    Attributes:
        changed: To be set when there are newer ones.
    """

    changed: asyncio.Event

    def path_for(self, files: ReleaseFiles) -> str:
        """Return the file of those for a release; empty where its own answer."""


class InferenceProcess:
    """The process and what it serves.

    Args:
        settings: It is started with.
        find: Returns the files of a version; raises what there is against it.
        served: What it serves from its start.
        folders: What answers where everything else of its name was taken back: what an operator put on the board.
        command: Starts it, without its settings; empty for the usual.

    Attributes:
        refused: Why it serves none of what it was to serve from its start, by name.
        ask: The way to upper halves on the server, where networks are cut; None while there is none.
        own: The device's own parameters; None where the releases' answer.
        ready: Whether the process is there and has what it served before.
        starts: How often it was started.
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
        self._loaded = {name: {one.version: one} for name, one in served.items()}
        self._current = {name: one.version for name, one in served.items()}
        self._folders = folders
        self._process: Process | None = None
        self._pending: deque[asyncio.Future[FromInference]] = deque()
        self.ready = asyncio.Event()
        self.ask: AskTop | None = None
        self.own: OwnParameters | None = None
        self.refused: dict[str, str] = {}
        self.starts = 0

    @property
    def pid(self) -> int:
        """The process's; 0 while there is none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    @property
    def deaths(self) -> int:
        """How often the process died since this agent started."""
        return max(0, self.starts - bool(self.pid))

    async def load(self, name: str, version: int) -> None:
        """Have a version opened beside the one that answers.

        Raises:
            ServingRefused: It cannot be served, and why; `ServingDied` where the process ended over it.
        """
        try:
            files = self._find(name, version)
        except FieldFleetError as error:
            raise ServingRefused(str(error)) from error
        await self._up()
        await self._unload_others(name, version)
        await self.request(self._load_message(files), Loaded)
        self._loaded.setdefault(name, {})[version] = files

    async def _unload_others(self, name: str, version: int) -> None:
        """Forget what neither answers nor is wanted, such as a folder's version since a rollout's answers."""
        there = self._loaded.get(name, {})
        for one in [one for one in there if one not in (version, self._current.get(name))]:
            del there[one]
            if self.pid:
                await self.request(Unload(name, one), Unloaded)

    async def switch(self, name: str, version: int) -> None:
        """Have a version answer from now on.

        Raises:
            ServingRefused: It is not loaded.
        """
        await self._up()
        await self.request(Switch(name, version), Switched)
        self._current[name] = version

    def answering(self) -> list[ReleaseFiles]:
        """Return the versions that answer."""
        return [self._loaded[name][version] for name, version in self._current.items() if version in self._loaded[name]]

    async def reload(self, files: ReleaseFiles) -> bool:
        """Have a version that answers opened anew; no request fails meanwhile. Tell whether it still answered.

        Raises:
            ServingRefused: It cannot be; it answers as before. `ServingDied` where the process ended over it.
        """
        await self._up()
        if files not in self.answering():
            return False
        await self.request(self._load_message(files), Loaded)
        return True

    async def unload(self, name: str, version: int) -> None:
        """Have a version forgotten; it is not served after a start either. If it answers, another one does from now on.

        Args:
            version: Of it; 0 for all that do not answer.

        Raises:
            ServingDied: The process ended first, and comes back without it.
        """
        if not version:
            await self._unload_others(name, version)
            return
        others = self._loaded.setdefault(name, {})
        others.pop(version, None)
        if self._current.get(name) == version:
            del self._current[name]
            await self._answer_instead(name, others)
        if self.pid and version not in others:
            await self.request(Unload(name, version), Unloaded)

    async def _answer_instead(self, name: str, others: dict[int, ReleaseFiles]) -> None:
        """Have another version answer: one that is loaded, or the one of a folder, where a rollout's is taken back."""
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
                await self.request(self._load_message(files), Loaded)
            await self.switch(name, max(others))
        except ServingDied:
            raise  # the next one begins with it
        except ServingRefused as error:
            log.warning("%s: nothing answers any more: %s", name, error)
            del self._current[name]
            others.clear()

    async def figures(self, name: str, version: int) -> Figures:
        """Return how a version does.

        Raises:
            ServingRefused: It is not loaded.
        """
        await self._up()
        return await self.request(Ask(name, version), Figures)

    async def _up(self) -> None:
        """Wait until the process has what it served before."""
        try:
            async with backports.timeout(START_PATIENCE_S):
                await self.ready.wait()
        except TimeoutError as error:
            raise ServingDied(f"there is no inference process, after {START_PATIENCE_S:.0f} s of waiting") from error

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

    def _start_command(self, interpreter: Interpreter) -> Sequence[str]:
        settings = msgspec.json.encode(self._settings).decode()
        return (*self._command, settings) if self._command else interpreter.command(MODULE, settings)

    async def live(self) -> str:
        """Start the process, and hear it until it ends; return why it did.

        Raises:
            ConfigError: The interpreter that is to run it is not there.
        """
        self.starts += 1
        interpreter = find_interpreter()
        ours, theirs = socket.socketpair() if self._settings.cut else (None, None)
        tops = [theirs.fileno()] if theirs else []
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *(*self._start_command(interpreter), *map(str, tops)),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                env=interpreter.environment() | LEAN,
                pass_fds=tops,
            )
        finally:
            if theirs:
                theirs.close()
        log.info("inference process started pid=%d", process.pid)
        relaying = asyncio.create_task(self._relay(ours), name="upper halves") if ours else None
        restoring, is_there = None, False
        try:
            async with backports.timeout(START_PATIENCE_S):
                first = await _receive(process)
            if isinstance(first, Ready):
                is_there = True
                restoring = asyncio.create_task(self._restore(), name="restore")
                while (message := await _receive(process)) is not None:
                    self._answered(message)
                with suppress(TimeoutError):  # a signal to one that dies of itself would hide what it died of
                    async with backports.timeout(GONE_S):
                        await process.wait()
        except TimeoutError:
            process.kill()
        except msgspec.DecodeError as error:
            log.warning("the inference process sent what is no message: %s", error)
            process.kill()
        finally:
            self.ready.clear()
            for task in (restoring, relaying):
                if task:
                    task.cancel()
            self._fail_pending()
            await asyncio.shield(terminate(process))
        return _cause_of_death(process) + ("" if is_there else self._hint(process))

    def _hint(self, process: Process) -> str:
        """Say what may be the cause where the process never began to serve."""
        if process.returncode == EXIT_TAKEN:
            return " (serve.port, serve.socket)"
        limit = self._settings.memory_bytes / MIB
        return f"; it ended before it could serve: where memory was short, raise serve.memory_mb, now {limit:.0f} MiB"

    async def _relay(self, ours: socket.socket) -> None:
        """Ask the server what the process asks for, until it is gone."""
        try:
            await relay(*await asyncio.open_connection(sock=ours), self._ask_top)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("upper halves cannot be asked for: %s", error)

    async def _ask_top(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        if self.ask is None:
            raise Unreachable("there is no connection to the site's broker yet")
        return await self.ask(half, parts, deadline_s)

    def _answered(self, message: FromInference) -> None:
        if self._pending:
            asked = self._pending.popleft()
            if not asked.done():  # who asked may have gone
                asked.set_result(message)

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, deque()
        for asked in pending:
            if not asked.done():
                asked.set_exception(ServingDied("the inference process ended"))

    async def _restore(self) -> None:
        """Give it what it served before; what it refuses is told, and the rest goes on."""
        for name, versions in [(name, dict(versions)) for name, versions in self._loaded.items()]:
            for files in versions.values():
                try:
                    told = await self.request(self._load_message(files), Loaded)
                    if self._current.get(name) == files.version:
                        await self.request(Switch(name, files.version), Switched)
                    self.refused.pop(name, None)
                    log.info("serving %s/%d, opened in %.2f s by %s", name, files.version, told.seconds, told.provider)
                except ServingDied:
                    return  # `run` starts another
                except ServingRefused as error:
                    self.refused[name] = str(error)
                    log.warning("%s/%d is not served: %s", name, files.version, error)
        self.ready.set()

    async def request(self, message: ToInference, kind: type[A]) -> A:
        """Send the process a message, and return its answer.

        Raises:
            ServingRefused: That is the answer.
            ServingDied: There is none.
        """
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise ServingDied("there is no inference process at the moment")
        asked: asyncio.Future[FromInference] = asyncio.get_running_loop().create_future()
        self._pending.append(asked)
        process.stdin.write(frame(message))
        answer = await asked
        if isinstance(answer, kind):
            return answer
        raise ServingRefused(answer.reason if isinstance(answer, LoadRefused) else f"it answered {answer!r}")

    def _load_message(self, files: ReleaseFiles) -> Load:
        parts = {name: str(path) for name, path in files.parts.items()}
        return Load(files.name, files.version, files.manifest, parts, self.own.path_for(files) if self.own else "")


async def _receive(process: Process) -> FromInference | None:
    """Return the next message; None where there will be none."""
    assert process.stdout
    try:
        size = int.from_bytes(await process.stdout.readexactly(HEAD_BYTES), "little")
        message: FromInference = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=FromInference)
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    return message


def _cause_of_death(process: Process) -> str:
    code = process.returncode
    if code == -signal.SIGKILL:
        return "the inference process was killed (signal 9): out of memory, by hand, or it did not answer"
    if code is not None and code < 0:
        return f"the inference process died of signal {-code} ({signal.Signals(-code).name})"
    return f"the inference process ended with exit code {code}; its last words are in this agent's log"
