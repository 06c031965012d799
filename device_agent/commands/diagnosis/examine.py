"""State of a board and its environment for `device-agent doctor`; judged by `checks`."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from device_agent.commands.diagnosis import checks
from device_agent.commands.diagnosis.checks import Check
from device_agent.commands.diagnosis.container import examine_container
from device_agent.config import AgentConfig, BoardConfig, MeterConfig, TrainerConfig
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.identity.clock_floor import BoardClock
from device_agent.measurement import calibration_file
from device_agent.measurement.account_lock import block_agent_connection
from device_agent.measurement.board import apply_target
from device_agent.probes import clocks, cpufreq, memory, power_mode, runtime, thermal, throttle
from device_agent.probes.base import Probe, ProbeResult, describe_absence, run_probe
from device_agent.probes.power import source as power
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from device_agent.trainer.processor_share import choose_trainer_device
from shared.errors import ConfigError, CorruptFile, NoData, Unreachable, split_remedy
from shared.protocol.measurements import Absent, Reading
from shared.protocol.topics import topic
from shared.protocol.units import format_figure
from shared.runtime import backports
from shared.runtime.clock import is_disciplined, monotonic
from shared.runtime.extras import is_packaged
from shared.runtime.folder_lock import is_held
from shared.runtime.interpreter import find_interpreter
from shared.runtime.support.table import read_table, this_system
from shared.transfer.frames import FRAME_BYTES, HEADER_BYTES
from shared.transport.base import Broker
from shared.transport.capabilities import find_lacks
from shared.transport.reach import NO_QOS_1, find_distrust, find_refusal

SMOKE_TEST_S = 180.0


def examine_board(root: Path, config: BoardConfig, state_dir: Path | None = None) -> Iterator[Check]:
    """Examine the board below `root` by its files.

    Args:
        config: The board's table of the agent's file.
        state_dir: Folder with a calibration of the board; None for none.
    """
    try:
        fitted = calibration_file.load_calibration(state_dir) if state_dir else None
    except CorruptFile as error:
        fitted = None
        yield Check(name="calibration", state="warn", finding=str(error), remedy="`device-agent calibrate`")
    try:
        profile = calibration_file.apply_calibration(load_for_board(root, config.profile), fitted)
        profile = apply_target(profile, config.target)
    except ConfigError as error:
        remedy = "correct `profile` of [board] or that file"
        yield Check(name="profile", state="bad", finding=str(error), remedy=remedy)
        return
    yield checks.check_profile(profile)
    if isinstance(result := _ask_probe(throttle.read, root, profile), ProbeResult):
        yield checks.check_throttle(result)
    yield from _examine_sensors(root, profile, config.meter)


def examine_machine(config: AgentConfig | None, profile: Profile, smoke_s: float = SMOKE_TEST_S) -> Iterator[Check]:
    """Examine this machine: clock, disk, memory, libraries.

    Args:
        config: The agent's; None if not given.
        smoke_s: Time limit of a library's smoke test, in seconds.
    """
    yield checks.check_system(read_table(), this_system())
    yield from examine_container(LIVE_ROOT)
    yield checks.check_clock(is_disciplined())
    limit = config.trainer.memory_mb * checks.MIB if config else 0
    yield checks.check_memory(_ask_probe(memory.read, LIVE_ROOT, profile), limit)
    if config:
        yield from examine_state_folder(Path(config.state_dir), config.outbox_mb * checks.MIB)
    try:
        interpreter = find_interpreter(config.trainer.python if config else "")
    except ConfigError as error:
        problem, remedy = split_remedy(str(error))
        yield Check(name="torch", state="bad", finding=problem, remedy=remedy)
        return
    device = choose_trainer_device(config.trainer if config else TrainerConfig(), profile)
    for library in runtime.PACKAGES:
        verdict = runtime.smoke_test(library, smoke_s, board=profile.id, interpreter=interpreter, device=device)
        if config:
            runtime.store_verdict(Path(config.state_dir), verdict)
        lacking = runtime.find_missing_isa(LIVE_ROOT, library, profile)
        is_needed = is_library_needed(library, config)
        yield checks.check_library(verdict, lacking, platform.machine(), is_needed=is_needed, is_packaged=is_packaged())


def is_library_needed(library: str, config: AgentConfig | None) -> bool:
    """Return True if the board depends on a library: torch to train, ONNX Runtime to serve or evaluate."""
    trains = config is None or (config.data is not None and config.trainer.trains)
    return trains if library == "torch" else config is not None and (config.serve is not None or not trains)


def examine_broker(config: AgentConfig) -> Iterator[Check]:
    """Examine the connection to the broker and its features, on separate connections and an unused topic.

    If an agent is connected with the board's account, only TCP and TLS are tested, to preserve its connection.
    """
    name = f"{config.site}.{config.device}.doctor-{os.getpid()}"
    dates = BoardClock.of(Path(config.state_dir)).may_judge()
    with block_agent_connection(config) as alone:
        if not alone:
            yield checks.check_broker(config.broker, find_distrust(config.broker, dates=dates), is_agents=True)
            return
        place = topic(config.site, config.device, "probe")
        refusal = backports.run(find_refusal(config.broker, name, place, dates=dates))
        is_able = not refusal or refusal.startswith(NO_QOS_1)
        yield checks.check_broker(config.broker, "" if is_able else refusal)
        if is_able:
            yield from _examine_capabilities(config.broker, name, place, dates=dates)


def _examine_capabilities(broker: Broker, client_id: str, place: str, *, dates: bool) -> Iterator[Check]:
    """Test the broker features that the protocol needs; yield a check for each missing one."""
    size = FRAME_BYTES + HEADER_BYTES
    try:
        lacks = backports.run(find_lacks(broker, client_id, place, size, dates=dates))
    except Unreachable as error:
        yield Check(name="broker", state="bad", finding=f"it closed the connection: {error}", remedy="see its log")
        return
    for lack in lacks:
        yield Check(name="broker", state="bad", finding=f"{lack.what}: {lack.found}", remedy=lack.setting)
    if not lacks:
        finding = f"QoS 1, messages of {size >> 10} KiB, retained messages and a will pass"
        yield Check(name="broker", state="ok", finding=finding)


def examine_state_folder(folder: Path, outbox_bytes: int) -> Iterator[Check]:
    """Check that the agent may write its state and has room for an outbox of that size."""
    refused, free_bytes = "", 0
    try:  # the agent creates the folder itself, so that its user owns it
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(1))
        free_bytes = shutil.disk_usage(existing).free
    except OSError as error:
        refused = error.strerror or str(error)
    yield checks.check_disk(str(folder), refused, free_bytes, outbox_bytes)
    if is_held(folder):
        yield Check(name="agent", state="ok", finding=f"running in {folder}")


def _examine_sensors(root: Path, profile: Profile, meter: MeterConfig | None) -> Iterator[Check]:
    """Read each source of the profile separately, and each other probe once."""
    grant = checks.describe_grant(profile.permissions, *_read_user())
    if meter:
        yield from checks.check_sources("meter", {meter.url or meter.chip: _ask_watts(root, profile, meter)}, grant)
    watts: dict[str, str | Absent] = {
        source: _ask_watts(root, replace(profile, power=replace(profile.power, sources=(source,))))
        for source in profile.power.sources
    }
    yield from checks.check_sources("power", watts, grant)
    hertz: dict[str, str | Absent] = {source: _ask_clock(root, profile, source) for source in profile.cpu.sources}
    yield from checks.check_sources("cpu clock", hertz, grant)
    throttling: dict[str, str | Absent] = {
        source: _ask_value(
            throttle.read, root, replace(profile, throttle=replace(profile.throttle, sources=(source,))), "throttle"
        )
        for source in profile.throttle.sources
    }
    yield from checks.check_sources("throttle", throttling, grant)
    yield from checks.check_sources(
        "thermal", {"": _ask_value(thermal.read, root, profile, thermal.HOTTEST_CELSIUS)}, grant
    )
    if profile.power_mode.kind != "none":
        yield from checks.check_sources("power mode", {"": _ask_value(power_mode.read, root, profile, "mode")}, grant)


def _ask_watts(root: Path, profile: Profile, meter: MeterConfig | None = None) -> str | Absent:
    """Return the reading of a power source; for an energy counter, which needs two reads, that it opens."""
    try:
        source = power.open_source(root, profile, monotonic, meter=meter)
        if source.kind == "mean":
            return f"opens, {source.provenance.quality}"
        return _format_reading("power.total_watts", source.read())
    except NoData as error:
        return describe_absence(error)


def _ask_clock(root: Path, profile: Profile, source: str) -> str | Absent:
    """Return a source's clock, with the quality that `probe` reports, which depends on other sources too."""
    try:
        answer = clocks.read_source(source, root, profile.cpu)
    except NoData as error:
        return describe_absence(error)
    if answer.part:
        return answer.part
    return _format_reading(cpufreq.MEAN_HERTZ, cpufreq.make_mean(answer, monotonic()))


def _ask_value(probe: Probe, root: Path, profile: Profile, name: str) -> str | Absent:
    """Return a probe's reading or fact of that name."""
    result = _ask_probe(probe, root, profile)
    if isinstance(result, Absent):
        return result
    if name in result.readings:
        return _format_reading(name, result.readings[name])
    if name in result.facts:
        return result.facts[name]
    lacks = [result.absent[name]] if name in result.absent else list(result.absent.values())
    return next(iter(lacks), Absent(lack="not_present", cause="no reading"))


def _format_reading(name: str, reading: Reading) -> str:
    return f"{format_figure(name, reading.value)}, {reading.quality}"


def _ask_probe(probe: Probe, root: Path, profile: Profile) -> ProbeResult | Absent:
    try:
        return run_probe(probe, root, profile, monotonic())
    except NoData as error:
        return describe_absence(error)


def _read_user() -> tuple[str, frozenset[str]]:
    """Return the name of this user and its groups; numbers where there are no names."""
    names = set[str]()
    for number in {os.getegid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            names.add(str(number))
    try:
        return pwd.getpwuid(os.geteuid()).pw_name, frozenset(names)
    except KeyError:
        return str(os.geteuid()), frozenset(names)
