"""The server's memory and what it sends do not grow with the fleet."""

from __future__ import annotations

import asyncio

import fleet
from measure import Figure

MODEL_BYTES = 25_000_000


def run() -> list[Figure]:
    """Measure 1, 2 and 20 devices."""
    one = asyncio.run(fleet.measure(model_bytes=MODEL_BYTES, devices=1, rounds=6, echo=True))
    two = asyncio.run(fleet.measure(model_bytes=100_000_000, devices=2, rounds=6, echo=True, memory=True))
    many = asyncio.run(fleet.measure(model_bytes=MODEL_BYTES, devices=20, rounds=6, echo=True, memory=True))
    return [
        Figure("server memory over idle, 2 devices, 100 MB", two.peak_models, "models", "<= 4"),
        Figure("server memory over idle, 20 devices, 25 MB", many.peak_models, "models", "<= 4"),
        Figure("broker memory over idle, 20 devices, 25 MB", many.broker_bytes / 1e6, "MB", "<= 100"),
        Figure("server sent a round, 1 device", one.sent_bytes / one.rounds / one.model_bytes, "models"),
        Figure("server sent a round, 20 devices", many.sent_bytes / many.rounds / many.model_bytes, "models"),
        Figure("server sent, 20 devices over 1", many.sent_bytes / one.sent_bytes, "x", "<= 1.05"),
    ]
