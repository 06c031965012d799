"""Commands to the inference process through its pipes, answered in order."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from collections import deque
from typing import TypeVar

from device_agent.inference.messages import (
    Applied,
    Figures,
    FromInference,
    Loaded,
    Refused,
    ToInference,
    encode_frame,
)
from shared.errors import ServingDied, ServingRefused

A = TypeVar("A", Loaded, Applied, Figures)


class CommandPipe:
    """Commands that wait for their replies; the process may be replaced by its successor."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._pending: deque[asyncio.Future[FromInference]] = deque()

    def attach(self, process: Process) -> None:
        """Send further commands to this process."""
        self._process = process

    async def request(self, message: ToInference, kind: type[A]) -> A:
        """Send a command and return its reply.

        Raises:
            ServingRefused: The process refused.
            ServingDied: The process is not running or died.
        """
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise ServingDied("the inference process is not running")
        reply: asyncio.Future[FromInference] = asyncio.get_running_loop().create_future()
        self._pending.append(reply)
        process.stdin.write(encode_frame(message))
        answer = await reply
        if isinstance(answer, kind):
            return answer
        raise ServingRefused(answer.reason if isinstance(answer, Refused) else f"unexpected reply {answer!r}")

    def resolve_next(self, message: FromInference) -> None:
        """Pass a reply to the oldest command."""
        if self._pending:
            reply = self._pending.popleft()
            if not reply.done():  # the caller may have been cancelled
                reply.set_result(message)

    def fail_pending(self) -> None:
        """Fail the commands of a process that has ended."""
        pending, self._pending = self._pending, deque()
        for reply in pending:
            if not reply.done():
                reply.set_exception(ServingDied("the inference process ended"))
