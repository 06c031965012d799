"""Board of the current process: profile, probes and power log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from device_agent.config import BoardConfig, TargetConfig
from device_agent.measurement.calibration_file import MeasurementSettings, apply_calibration, load_calibration
from device_agent.measurement.cpu_cycles import CycleCounter, Ticker
from device_agent.measurement.link_meter import LinkMeter
from device_agent.measurement.power_log import IDLE_PERIOD_S, MAX_SAMPLES, PowerLog
from device_agent.measurement.task_meter import ProcessMeter
from device_agent.probes import PROBES, disk, gpu, runtime
from device_agent.probes.base import Probe, ProbeResult, describe_absence, run_probe
from device_agent.probes.power.source import TOTAL_WATTS, open_source
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from shared.data.check_result import read_check
from shared.errors import CorruptFile, NoData
from shared.protocol.measurements import Absent
from shared.protocol.messages import Report
from shared.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)

NEVER_S = 1e6
TRAINER_SAMPLES = 1 << 16
"""3.6 hours of training at 5 Hz; takes 7 MiB, little beside a trainer's memory."""


def run_probes(root: Path, profile: Profile, probes: Mapping[str, Probe], clock: Clock) -> ProbeResult:
    """Run all probes; a failing probe reports its cause and does not affect the others."""
    combined = ProbeResult()
    for name, probe in probes.items():
        try:
            result = run_probe(probe, root, profile, clock())
        except NoData as error:
            log.debug("probe %s: %s", name, error)
            result = ProbeResult(absent={name: describe_absence(error)})
        combined = ProbeResult(
            readings=combined.readings | result.readings,
            absent=combined.absent | result.absent,
            facts=combined.facts | result.facts,
        )
    return gpu.add_rail_and_temperature(profile, combined)


@dataclass(frozen=True)
class Board:
    """A board and its instruments, as used by one process.

    Attributes:
        measuring: Measurement settings, also passed to the trainer.
        power: Power log; None without a power source.
    """

    measuring: MeasurementSettings
    root: Path
    profile: Profile
    power: PowerLog | None
    clock: Clock
    ticker: Ticker = field(default_factory=Ticker)

    def report(self, device: str, link: LinkMeter, state_dir: Path) -> Report:
        """Run all probes (blocking) and return their report.

        The total power of a source that is sampled continuously, such as a meter, comes from the power log.

        Args:
            state_dir: Folder of the agent's state, whose disk is reported.
        """
        result = run_probes(self.root, self.profile, {**PROBES, "disk": disk.make_probe(state_dir)}, self.clock)
        carried = link.read(self.clock())
        readings, absent = result.readings | carried.readings, result.absent | carried.absent
        total = self.power.latest() if self.power else None
        if total:
            readings[TOTAL_WATTS] = total
            absent.pop(TOTAL_WATTS, None)
            absent.pop("power", None)
        elif meter := self.measuring.board.meter:  # the board's own sensors cover less than the meter
            readings.pop(TOTAL_WATTS, None)
            absent[TOTAL_WATTS] = Absent(lack="busy", cause=f"the meter {meter.url or meter.chip} does not answer")
        facts = result.facts | runtime.verdict_facts(runtime.load_verdicts(state_dir, self.profile.id))
        if check := read_check(state_dir):
            facts["data"] = check.summary()
        return Report(
            device=device, at=self.clock(), board=self.profile.id, readings=readings, absent=absent, facts=facts
        )

    @cached_property
    def _cycles(self) -> CycleCounter:
        return CycleCounter(self.root, self.profile)

    def meter(self, idle_w: float | None) -> ProcessMeter:
        """Return a meter for this process's tasks.

        Args:
            idle_w: Watts of the idle board; None if unknown.
        """
        return ProcessMeter(
            clock=self.clock,
            cycles=self._cycles,
            power=self.power,
            idle_w=idle_w,
            emulated=self.measuring.board.emulated,
            ticker=self.ticker,
        )


@dataclass(frozen=True)
class Meters:
    """Meters of a trainer process, opened by the first job that needs them and kept for later jobs."""

    boards: dict[MeasurementSettings, Board] = field(default_factory=dict)

    def meter_for(self, measuring: MeasurementSettings | None, idle_w: float | None) -> ProcessMeter:
        """Return the meter for a job's measurement settings, on a board that draws `idle_w` watts when idle.

        Raises:
            ConfigError: The profile does not exist.
        """
        if measuring is None:
            return ProcessMeter()
        if measuring not in self.boards:
            board = open_board(measuring, idle_period_s=NEVER_S, samples=TRAINER_SAMPLES)
            if board.power:
                board.power.start()
            self.boards[measuring] = board
        return self.boards[measuring].meter(idle_w)


def load_measuring(config: BoardConfig, folder: Path) -> MeasurementSettings:
    """Load the measurement settings: the configuration, plus this board's calibration if it is readable.

    Args:
        folder: Folder that may hold a calibration.
    """
    try:
        return MeasurementSettings(board=config, calibration=load_calibration(folder))
    except CorruptFile as error:
        log.warning("%s", error)
        return MeasurementSettings(board=config)


def apply_target(profile: Profile, target: TargetConfig) -> Profile:
    """Mark the agent's own clock cap in the profile as intended, so that it does not count as throttling."""
    if not target.max_hertz:
        return profile
    throttle = msgspec.structs.replace(profile.throttle, intended_max_hertz=target.max_hertz)
    return msgspec.structs.replace(profile, throttle=throttle)


def open_board(
    measuring: MeasurementSettings,
    *,
    clock: Clock = monotonic,
    idle_period_s: float = IDLE_PERIOD_S,
    samples: int = MAX_SAMPLES,
) -> Board:
    """Open a board's profile and power source. The power log is not started yet.

    Args:
        idle_period_s: Seconds between power samples while the board is idle.

    Raises:
        ConfigError: The profile does not exist.
    """
    config, fitted = measuring.board, measuring.calibration
    root = Path(config.root)
    profile = apply_target(apply_calibration(load_for_board(root, config.profile), fitted), config.target)
    if fitted and fitted.profile != profile.id:
        log.warning("calibration of a %s ignored: this board is a %s; calibrate again", fitted.profile, profile.id)
    if config.emulated:
        return Board(measuring, root, profile, None, clock)
    model = fitted.model if fitted and fitted.profile == profile.id else None
    try:
        source = open_source(root, profile, clock, meter=config.meter, calibrated=model)
    except NoData as error:
        log.info("no source of this board's power, energy stays unknown: %s", error)
        return Board(measuring, root, profile, None, clock)
    period_s = 1.0 / config.sample_hz if config.sample_hz else 0.0
    power = PowerLog(source, clock, period_s=period_s, idle_period_s=idle_period_s, size=samples)
    return Board(measuring, root, profile, power, clock)
