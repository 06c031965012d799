"""The board this process runs on: its profile, its probes, and the log of its power."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent.config import BoardConfig, TargetConfig
from device_agent.measurement.calibration_file import Measuring, apply_calibration, load
from device_agent.measurement.cpu_cycles import CycleCounter
from device_agent.measurement.link_meter import LinkMeter
from device_agent.measurement.power_log import IDLE_PERIOD_S, MAX_SAMPLES, PowerLog
from device_agent.measurement.task_meter import ProcessMeter
from device_agent.probes import PROBES, disk, gpu, runtime
from device_agent.probes.base import Probe, ProbeResult, describe_absence, run_probe
from device_agent.probes.power.source import TOTAL_WATTS, open_source
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from shared.errors import CorruptFile, NoData
from shared.protocol.measurements import Absent
from shared.protocol.messages import Report
from shared.runtime.clock import Clock, monotonic

log = logging.getLogger(__name__)

NEVER_S = 1e6
TRAINER_SAMPLES = 1 << 16
"""At 5 Hz they are 3.6 hours of training, and 7 MiB of a trainer's hundreds."""


def run_probes(root: Path, profile: Profile, probes: Mapping[str, Probe], clock: Clock) -> ProbeResult:
    """Run all probes; one that fails costs its own figures and no others, and gives its cause.

    Args:
        root: The board's root folder.
        clock: Monotonic seconds of the readings.
    """
    all_found = ProbeResult()
    for name, probe in probes.items():
        try:
            found = run_probe(probe, root, profile, clock())
        except NoData as error:
            log.debug("probe %s: %s", name, error)
            found = ProbeResult(absent={name: describe_absence(error)})
        all_found = ProbeResult(
            readings=all_found.readings | found.readings,
            absent=all_found.absent | found.absent,
            facts=all_found.facts | found.facts,
        )
    return gpu.derive_figures(profile, all_found)


@dataclass(frozen=True)
class Board:
    """A board and its instruments, as one process of this device uses them.

    Attributes:
        measuring: How it is measured, for the trainer.
        power: Samples its power; None where nothing measures it.
    """

    measuring: Measuring
    root: Path
    profile: Profile
    power: PowerLog | None
    clock: Clock

    def report(self, device: str, link: LinkMeter, state_dir: Path) -> Report:
        """Report all probes, which blocks; the total of a source that has to be watched, such as a meter, is the log's.

        Args:
            device: Name of the device.
            state_dir: Folder of the agent's state, whose disk is reported.
        """
        found = run_probes(self.root, self.profile, {**PROBES, "disk": disk.make_probe(state_dir)}, self.clock)
        carried = link.read(self.clock())
        readings, absent = found.readings | carried.readings, found.absent | carried.absent
        total = self.power.latest() if self.power else None
        if total:
            readings[TOTAL_WATTS] = total
            absent.pop(TOTAL_WATTS, None)
            absent.pop("power", None)
        elif meter := self.measuring.board.meter:  # the board's own sensors see less than a meter does
            readings.pop(TOTAL_WATTS, None)
            absent[TOTAL_WATTS] = Absent(lack="busy", cause=f"the meter {meter.url or meter.chip} does not answer")
        facts = found.facts | runtime.verdict_facts(runtime.load_verdicts(state_dir, self.profile.id))
        return Report(
            device=device, at=self.clock(), board=self.profile.id, readings=readings, absent=absent, facts=facts
        )

    def meter(self, idle_w: float | None) -> ProcessMeter:
        """Return a meter of this process's tasks.

        Args:
            idle_w: Watts of the idle board, where they are known.
        """
        return ProcessMeter(
            clock=self.clock,
            cycles=CycleCounter(self.root, self.profile),
            power=self.power,
            idle_w=idle_w,
            emulated=self.measuring.board.emulated,
        )


@dataclass(frozen=True)
class Meters:
    """The meters of a trainer's process, made when the first job says how to measure; they live as long as it does."""

    boards: dict[Measuring, Board] = field(default_factory=dict)

    def meter_for(self, how: Measuring | None, idle_w: float | None) -> ProcessMeter:
        """Return the meter for a job that states how to measure, on a board that draws `idle_w` watts at rest.

        Raises:
            ConfigError: There is no such profile.
        """
        if how is None:
            return ProcessMeter()
        if how not in self.boards:
            board = open_board(how, idle_period_s=NEVER_S, samples=TRAINER_SAMPLES)
            if board.power:
                board.power.start()
            self.boards[how] = board
        return self.boards[how].meter(idle_w)


def load_measuring(config: BoardConfig, folder: Path) -> Measuring:
    """Load how a device measures: as its file has it, with the calibration of this board, if that can be read.

    Args:
        folder: Where the calibration lies, if there is one.
    """
    try:
        return Measuring(board=config, calibration=load(folder))
    except CorruptFile as error:
        log.warning("%s", error)
        return Measuring(board=config)


def apply_target(profile: Profile, target: TargetConfig) -> Profile:
    """Return the profile with the agent's own highest clock as an intended one, which is not throttling."""
    if not target.max_hertz:
        return profile
    throttle = msgspec.structs.replace(profile.throttle, intended_max_hertz=target.max_hertz)
    return msgspec.structs.replace(profile, throttle=throttle)


def open_board(
    measuring: Measuring,
    *,
    clock: Clock = monotonic,
    idle_period_s: float = IDLE_PERIOD_S,
    samples: int = MAX_SAMPLES,
) -> Board:
    """Open the board: its profile, and the source of its power; the log is not started yet.

    Args:
        measuring: How it is measured.
        idle_period_s: Seconds between two samples of power while nothing is going on.
        samples: Most of them that are kept.

    Raises:
        ConfigError: There is no such profile.
    """
    config, fitted = measuring.board, measuring.calibration
    root = Path(config.root)
    profile = apply_target(apply_calibration(load_for_board(root, config.profile), fitted), config.target)
    if fitted and fitted.profile != profile.id:
        log.warning("what was fitted on a %s is left aside: this is a %s; calibrate again", fitted.profile, profile.id)
    if config.emulated:
        return Board(measuring, root, profile, None, clock)
    model = fitted.model if fitted and fitted.profile == profile.id else None
    try:
        source = open_source(root, profile, clock, meter=config.meter, calibrated=model)
    except NoData as error:
        log.info("nothing tells this board's power, joules stay unknown: %s", error)
        return Board(measuring, root, profile, None, clock)
    period_s = 1.0 / config.sample_hz if config.sample_hz else 0.0
    power = PowerLog(source, clock, period_s=period_s, idle_period_s=idle_period_s, size=samples)
    return Board(measuring, root, profile, power, clock)
