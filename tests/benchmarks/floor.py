"""Lower bound: the same bytes with a bare MQTT client, without checks or disk.

A server sends `size` bytes in frames to all devices at once, each device sends them back; both sides keep at most
`WINDOW` frames under way. Run as a script it is one device.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import tempfile
import threading
import time
from asyncio.subprocess import DEVNULL
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edge_server.fleet.broker import run_private_broker
from shared.runtime.processes import terminate

FRAME, WINDOW = 256 * 1024, 16
HEAD = struct.Struct("<I")


class Inbox:
    """What a client receives; the network runs on the thread that waits, which is faster than the client's own."""

    def __init__(self, client: mqtt.Client) -> None:
        self._client, self.queue = client, deque[tuple[str, bytes]]()

    def get(self) -> tuple[str, bytes]:
        """Return the next message."""
        while not self.queue:
            self._client.loop(0.1)
        return self.queue.popleft()


def connect(port: int, name: str) -> tuple[mqtt.Client, Inbox]:
    """Return a connected client and what it receives."""
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=mqtt.MQTTv311)
    inbox = Inbox(client)
    client.on_message = lambda _c, _d, message: inbox.queue.append((message.topic, message.payload))
    client.on_socket_open = lambda _c, _d, sock: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.connect("127.0.0.1", port)
    while not client.is_connected():
        client.loop(0.1)
    return client, inbox


def device(port: int, name: str, size: int) -> None:
    """Echo payloads for ever."""
    client, inbox = connect(port, name)
    client.subscribe([("model", 0), (f"credit/{name}", 0)])
    client.publish("hello", name.encode(), qos=1)
    count, buffer = -(-size // FRAME), bytearray(size)
    view = memoryview(buffer)
    while True:
        have = 0
        while have < count:
            topic, data = inbox.get()
            if topic != "model":
                continue  # what was left of the credit for our last update
            index = _store(data, view)
            have += 1
            if have % (WINDOW // 2) == 0 or have == count:
                client.publish("got", HEAD.pack(index + 1))
        _send(client, inbox, f"update/{name}", view, [f"credit/{name}"])


def _store(frame: bytes, view: memoryview) -> int:
    (index,) = HEAD.unpack_from(frame)
    view[index * FRAME : index * FRAME + len(frame) - HEAD.size] = memoryview(frame)[HEAD.size :]
    return int(index)


def _send(client: mqtt.Client, inbox: Inbox, topic: str, view: memoryview, credits_of: list[str]) -> None:
    """Send everything; wait whenever somebody is a window behind."""
    count, reached = -(-len(view) // FRAME), dict.fromkeys(credits_of, 0)
    for index in range(count):
        while index - min(reached.values()) >= WINDOW:
            name, data = inbox.get()
            reached[name] = HEAD.unpack(data)[0]
        client.publish(topic, HEAD.pack(index) + view[index * FRAME : (index + 1) * FRAME])


def serve(port: int, devices: int, size: int, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    client, inbox = connect(port, "server")
    client.subscribe([("hello", 1), ("got", 0), ("update/+", 0)])
    ready = set()
    while len(ready) < devices:
        ready.add(inbox.get()[1])
    model, taken = memoryview(bytearray(size)), []
    count = -(-size // FRAME)
    buffers = {f"update/{name.decode()}": memoryview(bytearray(size)) for name in ready}
    for _ in range(rounds):
        started, sent, got, have = time.perf_counter(), 0, 0, dict.fromkeys(buffers, 0)
        while sum(have.values()) < devices * count:
            while sent < count and sent < WINDOW + got // devices:
                client.publish("model", HEAD.pack(sent) + model[sent * FRAME : (sent + 1) * FRAME])
                sent += 1
            topic, data = inbox.get()
            if topic == "got":
                got += WINDOW // 2
                continue
            _store(data, buffers[topic])
            have[topic] += 1
            if have[topic] % (WINDOW // 2) == 0:
                client.publish(topic.replace("update", "credit"), HEAD.pack(have[topic]))
        taken.append(time.perf_counter() - started)
    client.disconnect()
    return taken


async def measure(*, model_bytes: int, devices: int, rounds: int) -> list[float]:
    """Return the seconds of warm rounds over a private mosquitto."""
    with tempfile.TemporaryDirectory(prefix="fieldfleet-floor-") as name:
        async with AsyncExitStack() as stack:
            broker = await stack.enter_async_context(run_private_broker(Path(name)))
            results: list[float] = []
            server = threading.Thread(
                target=lambda: results.extend(serve(broker.port, devices, model_bytes, rounds)), daemon=True
            )
            server.start()
            await asyncio.sleep(0.3)
            for index in range(devices):
                command = [sys.executable, __file__, str(broker.port), f"d{index}", str(model_bytes)]
                process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL)
                stack.push_async_callback(terminate, process)
            await asyncio.to_thread(server.join, 300)
            return results[2:]


if __name__ == "__main__":
    device(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
