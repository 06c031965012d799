"""The agent's side of the trainer's pipes, with children that say what they were told to say."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE

from device_agent.trainer.interface import Done, Failed
from device_agent.trainer.process import Conversation
from shared.protocol.messages import Missed

CHILD = """
import sys
from device_agent.trainer.interface import Done, Failed, Step, frame
from device_agent.trainer.main import MessageReader
reader = MessageReader(sys.stdin.buffer)
reader.start()
def say(message, data=b""):
    sys.stdout.buffer.write(frame(message) + data)
    sys.stdout.buffer.flush()
"""
LIMIT_S = 300.0


def talk(script: str, exchange, story=None):
    """Run a story beside a conversation with a child; return its last word."""

    async def routine():
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD + script, stdin=PIPE, stdout=PIPE)
        one = Conversation(child, exchange)
        talking = asyncio.create_task(one.run())
        if story:
            await story(one)
        answer = await talking
        child.stdin.close()
        await child.wait()
        return answer

    return asyncio.run(asyncio.wait_for(routine(), LIMIT_S))


class Echo:
    """Sends back what came, once for every word; the third step it skips."""

    bytes_so_far = 3, 4

    def __init__(self) -> None:
        self.came: list[tuple[int, int]] = []

    async def __call__(self, step: int, parts) -> memoryview | Missed:
        self.came.append((step, sum(part.nbytes for part in parts)))
        return Missed(2) if step == 3 else memoryview(bytes(parts[0]))


def test_payloads_of_any_size_pass_both_ways_unchanged() -> None:
    """None, one byte, and several times what a pipe holds; the child itself compares."""
    script = """
for step, size in ((1, 0), (2, 1), (3, 7), (4, 3 << 20)):
    data = bytes(range(251)) * (size // 251 + 1)
    say(Step(step, size), data[:size])
    came = reader.wait_for_answer()
    right = came.steps == 2 if step == 3 else came == data[:size] and not came.readonly
    if not right or reader.carried != (3, 4):
        say(Failed(f"step {step}"))
        sys.exit()
say(Done())
"""
    echo = Echo()
    assert talk(script, echo) == Done()
    assert echo.came == [(1, 0), (2, 1), (3, 7), (4, 3 << 20)]


def test_a_step_of_a_job_that_was_given_up_is_not_exchanged() -> None:
    """The child was computing when it was told: its last step is on its way, and no server should see it."""
    script = "reader.cancelled.wait(); say(Step(1, 5), b'stale'); say(Failed('superseded'))"
    echo = Echo()

    async def story(one: Conversation) -> None:
        one.give_up()

    assert talk(script, echo, story) == Failed("superseded")
    assert echo.came == []


def test_a_child_that_dies_in_the_middle_of_a_payload_has_said_nothing() -> None:
    echo = Echo()
    assert talk("say(Step(1, 1000), b'cut short'); sys.exit()", echo) is None
    assert echo.came == []
