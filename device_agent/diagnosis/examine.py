"""Look at a board and its surroundings for `device-agent doctor`; `checks` judges what is found."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import grp
import os
import platform
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from device_agent.config import AgentConfig, BoardConfig, MeterConfig
from device_agent.diagnosis import checks
from device_agent.diagnosis.board_text import human
from device_agent.diagnosis.checks import Check
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.measurement import calibration_file
from device_agent.measurement.link_test import refusal
from device_agent.probes import cpufreq, memory, power_mode, runtime, thermal, throttle
from device_agent.probes.base import Probe, ProbeResult, describe_absence
from device_agent.probes.power import source as power
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from shared.errors import ConfigError, CorruptFile, NoData
from shared.protocol.measurements import Absent, Reading
from shared.protocol.topics import topic
from shared.runtime.clock import monotonic

TIME_ERROR = 5
"""What adjtimex(2) returns of a clock that nobody keeps right."""

SMOKE_S = 180.0


def board(root: Path, told: BoardConfig, state_dir: Path | None = None) -> Iterator[Check]:
    """Examine the board below `root`: whatever its files can tell, with what was fitted on it, kept in `state_dir`."""
    try:
        fitted = calibration_file.load(state_dir) if state_dir else None
    except CorruptFile as error:
        fitted = None
        yield Check(name="calibration", state="warn", finding=str(error), remedy="`device-agent calibrate`")
    try:
        profile = calibration_file.applied(load_for_board(root, told.profile), fitted)
    except ConfigError as error:
        remedy = "correct `profile` of [board], or that file"
        yield Check(name="profile", state="bad", finding=str(error), remedy=remedy)
        return
    yield checks.of_profile(profile)
    if isinstance(found := _asked(throttle.read, root, profile), ProbeResult):
        yield checks.of_throttle(found)
    yield from _sensors(root, profile, told.meter)


def machine(config: AgentConfig | None, profile: Profile, smoke_s: float = SMOKE_S) -> Iterator[Check]:
    """Examine this machine itself: clock, disk, memory, libraries."""
    yield checks.of_clock(synchronised())
    limit = config.trainer.memory_mb * checks.MIB if config else 0
    yield checks.of_memory(_asked(memory.read, LIVE_ROOT, profile), limit)
    if config:
        yield from _state(Path(config.state_dir), config.outbox_mb * checks.MIB)
    for library in runtime.PACKAGES:
        verdict = runtime.smoke_test(library, smoke_s, board=profile.id)
        if config:
            runtime.store_verdict(Path(config.state_dir), verdict)
        yield checks.of_library(verdict, runtime.find_missing_isa(LIVE_ROOT, library, profile), platform.machine())


def broker(config: AgentConfig) -> Check:
    """Examine the way to the broker, with a connection of its own and a topic that nobody listens to."""
    name = f"{config.site}.{config.device}.doctor-{os.getpid()}"
    said = asyncio.run(refusal(config.broker, name, topic(config.site, config.device, "doctor")))
    return checks.of_broker(config.broker, said)


def synchronised() -> bool | None:
    """Return whether the kernel's clock is kept right by a time server; None where the kernel does not say."""
    timex = (ctypes.c_long * 64)()  # room for struct timex; its first word, 0, says that nothing is to be changed
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


def _state(folder: Path, outbox_bytes: int) -> Iterator[Check]:
    refused, free_bytes = "", 0
    try:  # the folder itself is left to the agent, whose user is to own it
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(1))
        free_bytes = shutil.disk_usage(there).free
    except OSError as error:
        refused = error.strerror or str(error)
    yield checks.of_disk(str(folder), refused, free_bytes, outbox_bytes)
    if _is_held(folder / "lock"):
        yield Check(name="agent", state="ok", finding=f"one is running in {folder}")


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _sensors(root: Path, profile: Profile, meter: MeterConfig | None) -> Iterator[Check]:
    """Ask every source of the profile by itself, and each other probe once."""
    grant = checks.granting(profile.permissions, *_user())
    if meter:
        yield from checks.of_sources("meter", {meter.url: _watts(root, profile, meter)}, grant)
    watts: dict[str, str | Absent] = {
        source: _watts(root, replace(profile, power=replace(profile.power, sources=(source,))))
        for source in profile.power.sources
    }
    yield from checks.of_sources("power", watts, grant)
    hertz: dict[str, str | Absent] = {
        source: _said(cpufreq.read, root, replace(profile, cpu=replace(profile.cpu, sources=(source,))), "cpu.f_hertz")
        for source in profile.cpu.sources
    }
    yield from checks.of_sources("cpu clock", hertz, grant)
    words: dict[str, str | Absent] = {
        source: _said(
            throttle.read, root, replace(profile, throttle=replace(profile.throttle, sources=(source,))), "throttle"
        )
        for source in profile.throttle.sources
    }
    yield from checks.of_sources("throttle", words, grant)
    yield from checks.of_sources("thermal", {"": _said(thermal.read, root, profile, thermal.HOTTEST_CELSIUS)}, grant)
    if profile.power_mode.kind != "none":
        yield from checks.of_sources("power mode", {"": _said(power_mode.read, root, profile, "mode")}, grant)


def _watts(root: Path, profile: Profile, meter: MeterConfig | None = None) -> str | Absent:
    """Return what a source of power says; of one that counts energy, that it opens: a figure takes two reads."""
    try:
        source = power.open_source(root, profile, monotonic, meter=meter)
        if source.kind == "mean":
            return f"opens, {source.provenance.quality}"
        return _shown("power.total_watts", source.read())
    except NoData as error:
        return describe_absence(error)


def _said(probe: Probe, root: Path, profile: Profile, name: str) -> str | Absent:
    """Return a probe's figure or fact of that name."""
    found = _asked(probe, root, profile)
    if isinstance(found, Absent):
        return found
    if name in found.readings:
        return _shown(name, found.readings[name])
    if name in found.facts:
        return found.facts[name]
    lacks = [found.absent[name]] if name in found.absent else list(found.absent.values())
    return next(iter(lacks), Absent(lack="not_present", cause="it says nothing"))


def _shown(name: str, reading: Reading) -> str:
    return f"{human(name, reading.value)}, {reading.quality}"


def _asked(probe: Probe, root: Path, profile: Profile) -> ProbeResult | Absent:
    try:
        return probe(root, profile, monotonic())
    except NoData as error:
        return describe_absence(error)


def _user() -> tuple[str, frozenset[str]]:
    """Return who we are, and the groups we are in; numbers where they have no name."""
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
