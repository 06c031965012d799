"""The exchange of steps under words and frames that are damaged."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from device_agent.exchange.split_session import Splitting
from shared.errors import SessionLost
from shared.protocol import wire
from shared.protocol.messages import Assignment, Gradient, Hyper, Missed, Skip, Spec, Task, Transfer, Want
from shared.protocol.topics import topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport
from tests.device_agent.server_side import DEVICE, FRAME_BYTES, POLICY, SITE, Server, features, gradient
from tests.fuzz.trees import cut_and_spliced
from tests.fuzz.wires import mutate


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_comes_on_the_topic_the_exchange_ends_as_it_may_or_goes_on(seed: int) -> None:
    """Damaged words and frames of the right session, between the right ones: no error but a lost session."""
    random = Random(seed)

    async def routine() -> None:
        transport, clock = MemoryTransport(), asyncio.get_running_loop().time
        server = Server(transport)
        splitting = Splitting(transport, SITE, DEVICE, clock, POLICY, Random(1))

        async def disturb() -> None:
            about = {"run": "trial", "round": 1, "device": DEVICE, "start": bytes(16)}
            transfer = Sender.of_parts([memoryview(gradient(1))], FRAME_BYTES).transfer
            answers = Sender.of_parts([memoryview(features(1))], FRAME_BYTES).transfer.digest
            whole = [
                wire.encode(Skip(**about, offered=1, step=2)),
                wire.encode(Gradient(**about, step=1, answers=answers, params=transfer, pushed=3)),
                wire.encode(Want(digest=answers, frame_bytes=FRAME_BYTES, ranges=[(0, 9)])),
                frames.encode(transfer, 0, [memoryview(gradient(1))[:1024]]),
            ]
            while True:
                data = random.choice(whole)
                data = mutate(data, random) if wire.is_message(data) else cut_and_spliced(data, random)
                await transport.publish(topic(SITE, DEVICE, "gradient"), data)
                await asyncio.sleep(0.0)

        plain = Spec(name="dense")
        task = Task(
            run="trial",
            round=1,
            device=DEVICE,
            algorithm=plain,
            model=plain,
            codec=plain,
            assignment=Assignment(seed=1, hyper=Hyper(), steps=4),
            params=Transfer(digest=bytes(16), size=1, frame_bytes=1024),
            shared=False,
            deadline_s=9.0,
        )
        async with background(server.run(), disturb()), splitting.session(task) as exchange:
            for step in range(1, 5):
                with suppress(SessionLost):
                    came = await exchange(step, [memoryview(features(step))])
                    assert isinstance(came, Missed) or came == gradient(step)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(asyncio.wait_for(routine(), 3600))
