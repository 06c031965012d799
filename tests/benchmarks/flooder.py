"""One member of a site that sends the same message without end, as fast as it is told to.

Run as `python flooder.py PORT KIND [BYTES_PER_S]`; 0 for as fast as the broker takes it. It ends when it is ended.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping

from shared.protocol import wire
from shared.protocol.messages import Transfer, Update, Want
from shared.protocol.topics import ROOT

SITE, DEVICE = "lab", "flood"
LARGE_BYTES, RANGES = 900_000, 300_000


def offer(text: str = "") -> bytes:
    """Return an offer of a run that nobody knows."""
    return wire.encode(Update(run="stranger", round=1, device=DEVICE, params=None, failure=text or None))


def want(digest: bytes = bytes(16)) -> bytes:
    """Return a wish for as many ranges as a message of the largest size holds."""
    return wire.encode(Want(digest=digest, frame_bytes=1024, ranges=[(0, 1)] * RANGES))


def update_frame() -> bytes:
    """Return a whole frame of an update that nobody asked for."""
    from shared.transfer import frames  # noqa: PLC0415

    data = bytes(256 * 1024)
    return frames.encode(Transfer(digest=bytes(16), size=1 << 30, frame_bytes=len(data)), 0, [memoryview(data)])


KINDS: Mapping[str, tuple[str, Callable[[], bytes], float]] = {
    "what nobody hears": ("nothing", offer, 0.0),
    "small offers": ("update", offer, 0.0),
    "large offers": ("update", lambda: offer("x" * LARGE_BYTES), 0.0),
    "large wants": ("want", want, 0.0),
    "frames": ("update", update_frame, 0.0),
}
"""Channel, message, and bytes a second, 0 for as fast as they go."""


def packet(first: int, body: bytes) -> bytes:
    """Return an MQTT packet."""
    length, size = bytearray(), len(body)
    while True:
        size, digit = size >> 7, size & 0x7F
        length.append(digit | (0x80 if size else 0))
        if not size:
            return bytes([first]) + length + body


def _text(text: str) -> bytes:
    return struct.pack("!H", len(text)) + text.encode()


def connected(port: int, client: str = DEVICE) -> socket.socket:
    """Return a connection to the broker of this machine, as a client of MQTT 3.1.1 that hears nothing."""
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(packet(0x10, _text("MQTT") + bytes([4, 2]) + struct.pack("!H", 60) + _text(client)))
    line.recv(4)
    return line


def main(port: int, kind: str, bytes_per_s: float | None = None) -> None:
    """Send until ended."""
    channel, make, usual = KINDS[kind]
    rate = usual if bytes_per_s is None else bytes_per_s
    message = packet(0x30, _text(f"{ROOT}/{SITE}/{DEVICE}/{channel}") + make())
    batch = message * max(1, 4096 // len(message))
    line, sent, began = connected(port), 0, time.monotonic()
    while True:
        line.sendall(batch)
        sent += len(batch)
        if rate and (ahead := sent / rate - (time.monotonic() - began)) > 0:
            time.sleep(ahead)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:4]))
