"""Change filter for device reports: selects what a run's journal records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edge_server.journal.claims import MAX_SOURCE
from edge_server.journal.records import Sensed
from shared.protocol.measurements import Provenance
from shared.protocol.messages import Report

PAUSE_S = 5.0
"""Least seconds between two records of a device that differ only in figures."""

AT_ONCE_S = 1.0
"""Readings closer together than this count as simultaneous: probes run one after another."""

TOLERANCE: Mapping[str, float] = {
    "cpu.f_hertz": 0.05,
    "power.total_watts": 0.05,
    "thermal.hottest_celsius": 0.05,
    "throttle.now_flag": 0.0,
    "throttle.undervoltage_flag": 0.0,
    "throttle.overcurrent_count": 0.0,
    "link.up_bits_per_s": 0.05,
    "link.down_bits_per_s": 0.05,
    "memory.available_bytes": 0.1,
    "memory.swap_used_bytes": 0.1,
    "gpu.load_ratio": 0.25,
    "gpu.f_hertz": 0.05,
    "gpu.rail_watts": 0.05,
    "gpu.hottest_celsius": 0.05,
}
"""The recorded readings, with the relative change that makes a new record."""

FACTS = ("model", "mode", "governor", "kernel", "l4t", "torch", "onnxruntime", "throttle")

MAX_FACT = 160


@dataclass(frozen=True)
class ObservedDevice:
    """The journal's knowledge of a device: its last readings, facts and sources."""

    at: float
    readings: Mapping[str, float]
    provenance: Mapping[str, Provenance]
    board: str
    facts: Mapping[str, str]
    spent: tuple[str, int] | None


def filter_report(report: Report, before: ObservedDevice | None, at: float) -> tuple[Sensed, ObservedDevice] | None:
    """Return the record of a report and the new knowledge; None without a relevant change.

    Recorded are a first report, the end of a task, a changed flag, fact or set of readings, and, after a pause, a
    figure beyond its tolerance. Impossible values are left out.

    Args:
        at: The server's clock, in seconds.
    """
    figures = {name: report.readings[name] for name in TOLERANCE if name in report.readings}
    figures = {name: reading for name, reading in figures.items() if reading.value >= 0 or name.endswith("_celsius")}
    readings = {name: reading.value for name, reading in figures.items()}
    sources = {
        name: Provenance(source=reading.source[:MAX_SOURCE], quality=reading.quality)
        for name, reading in figures.items()
    }
    facts = {name: report.facts[name][:MAX_FACT] for name in FACTS if name in report.facts}
    task = (report.spent.run, report.spent.round) if report.spent else None
    now = ObservedDevice(at, readings, sources, report.board[:MAX_SOURCE], facts, task)
    if not readings and not facts and not now.board:
        return None
    if before and not _is_news(before, now):
        return None
    ages = {name: report.at - figures[name].at for name in readings}
    return _build_record(report.device, before, now, ages), now


def _is_news(before: ObservedDevice, now: ObservedDevice) -> bool:
    if (before.readings.keys(), before.facts, before.board, before.spent) != (
        now.readings.keys(),
        now.facts,
        now.board,
        now.spent,
    ):
        return True
    old = before.readings
    changed = {
        name for name, value in now.readings.items() if abs(value - old[name]) > TOLERANCE[name] * abs(old[name])
    }
    return any(not TOLERANCE[name] for name in changed) or (bool(changed) and now.at - before.at >= PAUSE_S)


def _build_record(device: str, before: ObservedDevice | None, now: ObservedDevice, ages: Mapping[str, float]) -> Sensed:
    last = before or ObservedDevice(now.at, {}, {}, "", {}, None)
    return Sensed(
        device=device,
        at=now.at,
        readings=dict(now.readings),
        ages={name: age for name, age in ages.items() if AT_ONCE_S < age < math.inf},
        provenance={name: source for name, source in now.provenance.items() if last.provenance.get(name) != source},
        board=now.board if now.board != last.board else "",
        facts={name: fact for name, fact in now.facts.items() if last.facts.get(name) != fact},
    )
