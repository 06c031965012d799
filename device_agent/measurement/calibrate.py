"""Calibrate a board against a meter: at rest, then in real training at several clocks and numbers of threads."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.config import MeterConfig
from device_agent.measurement.calibration_file import Calibration, save
from device_agent.measurement.core_kinds import describe_core_kinds
from device_agent.measurement.power_fit import Observation, add_meter_error, fit_line, fit_model
from device_agent.measurement.power_log import PowerLog
from device_agent.measurement.tuning.apply import JOURNAL_NAME, hold_target
from device_agent.measurement.tuning.plan import CPUFREQ_FOLDER, Target
from device_agent.measurement.tuning.settings import read_settings
from device_agent.probes import thermal
from device_agent.probes.power.model import BoardState
from device_agent.probes.power.source import PowerSource, open_source
from device_agent.profile.schema import Profile
from shared.errors import NoData, TaskFailed
from shared.runtime import backports
from shared.runtime.clock import Clock, monotonic, utc_stamp
from shared.runtime.processes import wait_or_kill

DROPPED_SHARE = 0.25
"""Of every phase, until it is steady."""
WINDOW_S = 5.0
START_PATIENCE_S, END_PATIENCE_S = 120.0, 5.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationBench:
    """A board on the bench.

    Attributes:
        folder: Where the fit is kept, and what is to be undone after a kill.
        reference: The meter that is believed.
        own: The board's own sensor, where it is not the reference itself.
        idle_s: How long it rests.
        phase_s: How long each training lasts.
        say: Told of every phase.
    """

    root: Path
    profile: Profile
    folder: Path
    reference: PowerSource
    own: PowerSource | None
    idle_s: float = 60.0
    phase_s: float = 20.0
    say: Say = print
    clock: Clock = monotonic


def open_meters(
    root: Path, profile: Profile, meter: MeterConfig | None, clock: Clock
) -> tuple[PowerSource, PowerSource | None]:
    """Open the meter to calibrate against, and the board's own sensor beside it, uncorrected, if there are both.

    Args:
        root: The board's root folder.
        meter: A power meter on the network, if there is one.
        clock: Monotonic seconds of the readings.

    Raises:
        NoData: Nothing measures this board; says what to do.
    """
    plain = msgspec.structs.replace(profile, power=msgspec.structs.replace(profile.power, gain=1.0, offset_w=0.0))
    try:
        own: PowerSource | None = open_source(root, plain, clock)
    except NoData:
        own = None
    if own and own.provenance.quality == "modelled":
        own = None
    if meter:
        return open_source(root, profile, clock, meter=meter), own
    if own is None:
        raise NoData(
            "nothing measures what this board draws. Put a meter before its supply, such as a smart plug of Shelly or "
            "one with Tasmota, and name it: `--meter shelly=http://ADDRESS`, or [board.meter] of the configuration; "
            "or wire an INA219 or INA226 to the board's I2C bus and load its kernel driver"
        )
    return own, None


async def calibrate(bench: CalibrationBench) -> Calibration:
    """Run all phases, fit, and save the fit.

    Raises:
        NoData: The meter does not answer, the observations make no model, or no model can hold for this board; nothing
            is saved then.
        TaskFailed: Training does not start here.
    """
    refuse_mixed_cores(bench)
    async with _run_load() as process, _open_logs(bench) as logs:
        bench.say(f"idle, {bench.idle_s:.0f} s")
        seen = await _observe_phase(bench, logs, bench.idle_s)
        for hertz in _choose_clocks(bench):
            with hold_target(bench.root, bench.profile, Target(max_hertz=hertz), bench.folder / JOURNAL_NAME):
                for count in _choose_thread_counts():
                    at = f" at {hertz / 1e6:.0f} MHz" if hertz else ""
                    bench.say(f"training with {count} thread{'s' * (count > 1)}{at}, {bench.phase_s:.0f} s")
                    _set_threads(process, count)
                    seen += await _observe_phase(bench, logs, bench.phase_s)
                    _set_threads(process, 0)
    bench.say("the radio is not loaded: what sending and receiving take stays as the profile says")
    return fit_and_save(bench, seen)


def refuse_mixed_cores(bench: CalibrationBench) -> str:
    """Return by what the cores of the board differ; empty where they are of one kind.

    A model with one figure for all cores is wrong for a trainer that runs on some of them. A line from the board's own
    sensor to the meter needs no model.

    Raises:
        NoData: They differ, and the board has no sensor of its own.
    """
    kinds = describe_core_kinds(bench.root)
    if kinds and bench.own is None:
        raise NoData(
            f"this board has cores of several kinds ({kinds}), which take different energy per cycle: a power model "
            "with one figure for all of them would be wrong for work that runs on some of them. Name the meter itself "
            "under [board.meter], so that it measures every task",
            lack="invalid",
        )
    return kinds


def fit_and_save(bench: CalibrationBench, seen: Sequence[Observation]) -> Calibration:
    """Fit the observations and save the fit in the bench's folder; raises NoData where they make none."""
    meter, stamp = bench.reference.provenance.source, utc_stamp()
    model, judged = (None, None) if refuse_mixed_cores(bench) else fit_model(seen, os.cpu_count() or 1)
    if model:
        usual = bench.profile.power.model or model
        model = msgspec.structs.replace(
            add_meter_error(model, bench.reference),
            tx_w=usual.tx_w,
            rx_w=usual.rx_w,
            provenance=f"{meter} {stamp}",
        )
    line = None
    if bench.own or judged is None:
        line, judged = fit_line(seen)
        line = add_meter_error(line, bench.reference)
    calibration = Calibration(
        profile=bench.profile.id,
        meter=meter,
        stamp=stamp,
        governor=next((one.governor for one in read_settings(bench.root, bench.profile).policies.values()), ""),
        celsius=_read_hottest(bench),
        residual_w=judged.residual_w,
        r_squared=judged.r_squared,
        model=model,
        line=line,
    )
    save(bench.folder, calibration)
    return calibration


def _read_hottest(bench: CalibrationBench) -> float | None:
    try:
        found = thermal.read(bench.root, bench.profile, bench.clock()).readings.get("thermal.hottest_celsius")
    except NoData:
        return None
    return found.value if found else None


def _choose_thread_counts() -> list[int]:
    """Return the numbers of threads to train with."""
    most = len(os.sched_getaffinity(0))
    return sorted({1, min(2, most), most})


def _choose_clocks(bench: CalibrationBench) -> list[float]:
    """Return the highest clocks to train at; 0 for the clock as it is, where it cannot be set."""
    policies = read_settings(bench.root, bench.profile).policies
    writable = all(os.access(bench.root / CPUFREQ_FOLDER / name / "scaling_max_freq", os.W_OK) for name in policies)
    if not policies or not writable:
        bench.say("the clock cannot be set here (it takes root and a cpufreq policy): training at whatever it is")
        return [0.0]
    lowest = max(one.lowest_hertz for one in policies.values())
    highest = max(one.highest_hertz for one in policies.values())
    return [float(lowest), (lowest + highest) / 2, float(highest)]


async def _observe_phase(bench: CalibrationBench, logs: Sequence[PowerLog], seconds: float) -> list[Observation]:
    """Return the observations of the steady part of a phase, window by window."""
    await asyncio.sleep(DROPPED_SHARE * seconds)
    steady_s = (1 - DROPPED_SHARE) * seconds
    count = max(1, round(steady_s / WINDOW_S))
    return [await _observe_window(bench, logs, steady_s / count) for _ in range(count)]


async def _observe_window(bench: CalibrationBench, logs: Sequence[PowerLog], seconds: float) -> Observation:
    before = BoardState(bench.root, bench.profile, bench.clock(), radio=False)
    await asyncio.sleep(seconds)
    after = BoardState(bench.root, bench.profile, bench.clock(), radio=False)
    reference, *own = [log.energy(before.at, after.at) for log in logs]
    if reference is None:
        raise NoData(f"{logs[0].source.provenance.source} said nothing for {seconds:.0f} s", lack="busy")
    return Observation(
        watts=reference.joules / reference.seconds,
        busy_cores=(after.busy_s - before.busy_s) / (after.at - before.at),
        hertz=(before.hertz + after.hertz) / 2,
        sensed_w=own[0].joules / own[0].seconds if own and own[0] else None,
    )


@asynccontextmanager
async def _open_logs(bench: CalibrationBench) -> AsyncIterator[list[PowerLog]]:
    """Sample the meter, and the board's own sensor beside it, at full rate while the block lasts."""
    with ExitStack() as stack:
        logs = [stack.enter_context(PowerLog(one, bench.clock)) for one in (bench.reference, bench.own) if one]
        for log in logs:
            stack.enter_context(log.busy())
        yield logs


@asynccontextmanager
async def _run_load() -> AsyncIterator[Process]:
    """Run a process that trains on command while the block lasts.

    Raises:
        TaskFailed: It does not start.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "device_agent.measurement.cpu_load", stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with backports.timeout(START_PATIENCE_S):
            if not await process.stdout.readline():
                raise TaskFailed(f"training ends with {await process.wait()} here; ask `device-agent doctor` why")
        yield process
    except TimeoutError:
        raise TaskFailed(f"training does not start within {START_PATIENCE_S:.0f} s") from None
    finally:
        process.stdin.close()
        await wait_or_kill(process, END_PATIENCE_S)


def _set_threads(process: Process, threads: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % threads)
