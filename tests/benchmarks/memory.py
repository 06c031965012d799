"""The server's memory and what it sends do not grow with the fleet."""

from __future__ import annotations

import asyncio

import fleet
from measure import Figure

SMALLER, LARGER, MANY = 25_000_000, 100_000_000, 20
QUICK = 2_000_000, 4_000_000, 4


def run(*, quick: bool = False) -> list[Figure]:
    """Measure one device, two, and many."""
    smaller, larger, count = QUICK if quick else (SMALLER, LARGER, MANY)
    one = asyncio.run(fleet.measure(model_bytes=smaller, devices=1, rounds=6, echo=True))
    two = asyncio.run(fleet.measure(model_bytes=larger, devices=2, rounds=6, echo=True, memory=True, tests=True))
    many = asyncio.run(fleet.measure(model_bytes=smaller, devices=count, rounds=6, echo=True, memory=True))
    few, all_ = f"2 devices, {larger / 1e6:g} MB and evaluated,", f"{count} devices, {smaller / 1e6:g} MB"
    return [
        Figure(f"server memory over idle, {few}", two.peak_models, "models", "<= 4"),
        Figure(f"server memory over idle, {all_}", many.peak_models, "models", "<= 4"),
        Figure(f"broker memory over idle, {all_}", many.broker_bytes / 1e6, "MB", "<= 100"),
        Figure("server sent a round, 1 device", one.sent_bytes / one.rounds / one.model_bytes, "models"),
        Figure(f"server sent a round, {count} devices", many.sent_bytes / many.rounds / many.model_bytes, "models"),
        Figure(f"server sent, {count} devices over 1", many.sent_bytes / one.sent_bytes, "x", "<= 1.05"),
    ]
