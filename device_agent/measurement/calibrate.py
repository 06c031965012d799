"""Calibrate a board's power model against a meter, idle and in training."""

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
from device_agent.measurement.calibration_file import Calibration, save_calibration
from device_agent.measurement.core_kinds import describe_core_kinds
from device_agent.measurement.power_fit import Observation, add_meter_uncertainty, fit_power_model, fit_sensor_line
from device_agent.measurement.power_log import PowerLog
from device_agent.measurement.tuning.apply import JOURNAL_NAME, hold_settings
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
"""Fraction of every phase that is dropped until power is steady."""
WINDOW_S = 5.0
START_PATIENCE_S, END_PATIENCE_S = 120.0, 5.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class CalibrationSetup:
    """Board, instruments and timing of a calibration.

    Attributes:
        folder: Folder of the calibration file and of the journal that undoes clock changes after a kill.
        reference: Meter that is taken as correct.
        sensor: The board's own sensor; None if there is none or it is the reference.
        say: Prints a line about each phase.
    """

    root: Path
    profile: Profile
    folder: Path
    reference: PowerSource
    sensor: PowerSource | None
    idle_s: float = 60.0
    phase_s: float = 20.0
    say: Say = print
    clock: Clock = monotonic


def open_meters(
    root: Path, profile: Profile, meter: MeterConfig | None, clock: Clock
) -> tuple[PowerSource, PowerSource | None]:
    """Open the reference meter, and the board's own sensor without correction if it is not the reference.

    Args:
        root: Root of the board's file system.
        meter: A power meter on the network; None to use the board's sensor as the reference.

    Raises:
        NoData: Nothing measures this board; the message says what to do.
    """
    plain = msgspec.structs.replace(profile, power=msgspec.structs.replace(profile.power, gain=1.0, offset_w=0.0))
    try:
        sensor: PowerSource | None = open_source(root, plain, clock)
    except NoData:
        sensor = None
    if sensor and sensor.provenance.quality == "modelled":
        sensor = None
    if meter:
        return open_source(root, profile, clock, meter=meter), sensor
    if sensor is None:
        raise NoData(
            "nothing measures this board's power. Put a meter before its supply, such as a smart plug of Shelly or one "
            "with Tasmota, and name it: `--meter shelly=http://ADDRESS`, or [board.meter] of the configuration; or "
            "wire an INA219 or INA226 to the board's I2C bus and load its kernel driver"
        )
    return sensor, None


async def calibrate(setup: CalibrationSetup) -> Calibration:
    """Run all phases, fit the observations and save the calibration.

    Raises:
        NoData: The meter does not answer, the observations give no valid fit, or the board has mixed cores. Nothing is
            saved then.
        TaskFailed: The training process does not start.
    """
    check_core_kinds(setup)
    async with _run_load() as process, _open_logs(setup) as logs:
        setup.say(f"idle, {setup.idle_s:.0f} s")
        observations = await _observe_phase(setup, logs, setup.idle_s)
        for hertz in _choose_clocks(setup):
            with hold_settings(setup.root, setup.profile, Target(max_hertz=hertz), setup.folder / JOURNAL_NAME):
                for count in _choose_thread_counts():
                    at = f" at {hertz / 1e6:.0f} MHz" if hertz else ""
                    setup.say(f"training with {count} thread{'s' * (count > 1)}{at}, {setup.phase_s:.0f} s")
                    _set_threads(process, count)
                    observations += await _observe_phase(setup, logs, setup.phase_s)
                    _set_threads(process, 0)
    setup.say("the radio is not calibrated: the power of sending and receiving stays as in the profile")
    return fit_and_save(setup, observations)


def check_core_kinds(setup: CalibrationSetup) -> str:
    """Describe how the board's cores differ; empty if they are of one kind.

    A model with one figure for all cores is wrong for a trainer that runs on some of them. A line from the board's own
    sensor to the meter needs no model.

    Raises:
        NoData: The cores differ and the board has no sensor of its own.
    """
    kinds = describe_core_kinds(setup.root)
    if kinds and setup.sensor is None:
        raise NoData(
            f"this board has cores of several kinds ({kinds}), which take different energy per cycle: a power model "
            "with one figure for all of them would be wrong for work that runs on some of them. Name the meter itself "
            "under [board.meter], so that it measures every task",
            lack="invalid",
        )
    return kinds


def fit_and_save(setup: CalibrationSetup, observations: Sequence[Observation]) -> Calibration:
    """Fit the observations and save the calibration; raise `NoData` if no fit is valid."""
    meter, stamp = setup.reference.provenance.source, utc_stamp()
    model, judged = (None, None) if check_core_kinds(setup) else fit_power_model(observations, os.cpu_count() or 1)
    if model:
        usual = setup.profile.power.model or model
        model = msgspec.structs.replace(
            add_meter_uncertainty(model, setup.reference),
            tx_w=usual.tx_w,
            rx_w=usual.rx_w,
            provenance=f"{meter} {stamp}",
        )
    line = None
    if setup.sensor or judged is None:
        line, judged = fit_sensor_line(observations)
        line = add_meter_uncertainty(line, setup.reference)
    calibration = Calibration(
        profile=setup.profile.id,
        meter=meter,
        stamp=stamp,
        governor=next((policy.governor for policy in read_settings(setup.root, setup.profile).policies.values()), ""),
        celsius=_read_hottest(setup),
        residual_w=judged.residual_w,
        r_squared=judged.r_squared,
        model=model,
        line=line,
    )
    save_calibration(setup.folder, calibration)
    return calibration


def _read_hottest(setup: CalibrationSetup) -> float | None:
    try:
        reading = thermal.read(setup.root, setup.profile, setup.clock()).readings.get("thermal.hottest_celsius")
    except NoData:
        return None
    return reading.value if reading else None


def _choose_thread_counts() -> list[int]:
    most = len(os.sched_getaffinity(0))
    return sorted({1, min(2, most), most})


def _choose_clocks(setup: CalibrationSetup) -> list[float]:
    """Return the clock caps to train at, in hertz; 0 for the current clock if it cannot be set."""
    policies = read_settings(setup.root, setup.profile).policies
    writable = all(os.access(setup.root / CPUFREQ_FOLDER / name / "scaling_max_freq", os.W_OK) for name in policies)
    if not policies or not writable:
        setup.say("the clock cannot be set (needs root and a cpufreq policy): training at the current clock")
        return [0.0]
    lowest = max(policy.lowest_hertz for policy in policies.values())
    highest = max(policy.highest_hertz for policy in policies.values())
    return [float(lowest), (lowest + highest) / 2, float(highest)]


async def _observe_phase(setup: CalibrationSetup, logs: Sequence[PowerLog], seconds: float) -> list[Observation]:
    """Return the observations of a phase's steady part, one per window."""
    await asyncio.sleep(DROPPED_SHARE * seconds)
    steady_s = (1 - DROPPED_SHARE) * seconds
    count = max(1, round(steady_s / WINDOW_S))
    return [await _observe_window(setup, logs, steady_s / count) for _ in range(count)]


async def _observe_window(setup: CalibrationSetup, logs: Sequence[PowerLog], seconds: float) -> Observation:
    before = BoardState(setup.root, setup.profile, setup.clock(), radio=False)
    await asyncio.sleep(seconds)
    after = BoardState(setup.root, setup.profile, setup.clock(), radio=False)
    reference, *sensed = [log.energy(before.at, after.at) for log in logs]
    if reference is None:
        raise NoData(f"no answer from {logs[0].source.provenance.source} for {seconds:.0f} s", lack="busy")
    return Observation(
        watts=reference.joules / reference.seconds,
        busy_cores=(after.busy_s - before.busy_s) / (after.at - before.at),
        hertz=(before.hertz + after.hertz) / 2,
        sensed_w=sensed[0].joules / sensed[0].seconds if sensed and sensed[0] else None,
    )


@asynccontextmanager
async def _open_logs(setup: CalibrationSetup) -> AsyncIterator[list[PowerLog]]:
    """Sample the meter, and the board's own sensor if any, at full rate during the block."""
    with ExitStack() as stack:
        logs = [
            stack.enter_context(PowerLog(source, setup.clock)) for source in (setup.reference, setup.sensor) if source
        ]
        for log in logs:
            stack.enter_context(log.busy())
        yield logs


@asynccontextmanager
async def _run_load() -> AsyncIterator[Process]:
    """Run a process that trains on command during the block.

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
                raise TaskFailed(f"training exits with code {await process.wait()}; run `device-agent doctor`")
        yield process
    except TimeoutError:
        raise TaskFailed(f"training does not start within {START_PATIENCE_S:.0f} s") from None
    finally:
        process.stdin.close()
        await wait_or_kill(process, END_PATIENCE_S)


def _set_threads(process: Process, threads: int) -> None:
    assert process.stdin is not None
    process.stdin.write(b"%d\n" % threads)
