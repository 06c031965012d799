"""The agent's side of one job's conversation with its trainer: words, and the payloads of a split session between."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

import msgspec

from device_agent.trainer.interface import Exchange
from device_agent.trainer.pipe_messages import (
    HEAD_BYTES,
    Answer,
    Cancel,
    Done,
    Failed,
    FromTrainer,
    Skipped,
    Step,
    ToTrainer,
    frame,
)
from shared.errors import TaskFailed
from shared.protocol.steps import Missed


class Conversation:
    """One job's.

    Args:
        process: The child.
        exchange: How steps reach the server; None where the job has none.

    Attributes:
        error: Why the job was given up, if the exchange of its steps was the reason.
    """

    def __init__(self, process: Process, exchange: Exchange | None) -> None:
        assert process.stdin
        assert process.stdout
        self._process, self._in, self._out, self._exchange = process, process.stdin, process.stdout, exchange
        self._exchanging: asyncio.Future[memoryview | Missed] | None = None
        self._given_up = False
        self.error: BaseException | None = None

    def say(self, message: ToTrainer) -> None:
        """Tell the child something."""
        self._in.write(frame(message))

    def give_up(self) -> None:
        """Have the child give the job up; `run` still returns its last word on it."""
        self._given_up = True
        self.say(Cancel())
        if self._exchanging:
            self._exchanging.cancel()

    async def run(self) -> Done | Failed | None:
        """Exchange the child's steps until it says how its job ended; None where it died first."""
        try:
            while isinstance(message := await self._hear(), Step):
                data = await self._out.readexactly(message.size)
                if not self._given_up:
                    await self._answer(message.step, data)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        return message

    async def _hear(self) -> FromTrainer:
        size = int.from_bytes(await self._out.readexactly(HEAD_BYTES), "little")
        message: FromTrainer = msgspec.msgpack.decode(await self._out.readexactly(size), type=FromTrainer)
        return message

    async def _answer(self, step: int, data: bytes) -> None:
        """Have a step exchanged, unless the job is given up or the child dies meanwhile."""
        if self._exchange is None:
            self.error = TaskFailed("its training takes steps with the server, which the task says nothing of")
            self.give_up()
            return
        exchanging = self._exchanging = asyncio.ensure_future(self._exchange(step, [memoryview(data)]))
        dying = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({exchanging, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
            exchanging.cancel()  # of a step whose child is dead nobody wants the answer
            await asyncio.wait({exchanging})
        if exchanging.cancelled():
            return
        if error := exchanging.exception():
            self.error = error
            self.give_up()
            return
        came, carried = exchanging.result(), self._exchange.carried
        if isinstance(came, Missed):
            self.say(Skipped(came.steps, carried))
        else:
            self.say(Answer(step, came.nbytes, carried))
            self._in.write(came)
        await self._in.drain()
