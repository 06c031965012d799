"""Checks of a board, each with its remedy; data from `examine`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from device_agent.probes.base import ProbeResult
from device_agent.probes.runtime import Verdict
from device_agent.probes.throttle import (
    COOLS,
    NOW_FLAG,
    OVER_CURRENT,
    TEMPERATURE_LIMIT,
    THROTTLED,
    UNDERVOLTAGE,
    UNDERVOLTAGE_FLAG,
)
from device_agent.profile.schema import Permissions, Profile
from shared.errors import ConfigError, split_remedy
from shared.protocol.measurements import Absent
from shared.protocol.units import format_figure
from shared.runtime.support.table import SupportTable, System, find_row
from shared.transport.base import Broker
from shared.transport.mqtt_connection import NO_ANSWER
from shared.transport.reach import DENIES

MIB = 1 << 20
TRAINER_BYTES = 400 * MIB
"""Torch needs about 220 MiB when imported and 340 MiB to train a small network."""

MIN_DISK_BYTES = 64 * MIB

AVAILABLE_MEMORY = "memory.available_bytes"
COOLING = "better cooling: a heat sink, a fan, a cooler place"
THROTTLE_REMEDIES: Mapping[str, str] = {
    UNDERVOLTAGE: "a stronger supply, a shorter or thicker cable",
    OVER_CURRENT: "a stronger supply, or a power mode that draws less (`device-agent profile`)",
    TEMPERATURE_LIMIT: COOLING,
    COOLS: COOLING,
    THROTTLED: COOLING,
    "": "unless the clock is limited on purpose, check power mode and cooling",
}
"""By the cause in the fact `throttle`; the last applies to any other cause."""

THROTTLE_FLAGS = (NOW_FLAG, UNDERVOLTAGE_FLAG, "throttle.since_boot_flag")

SOURCE_REMEDIES: Mapping[str, str] = {
    "power": "configure a meter in [board.meter], or fit a model with `device-agent calibrate`",
    "meter": "check that it is on and its url is right; test it with `curl`",
    "cpu clock": "cycles are not counted without a clock; a container needs /sys/devices/system/cpu",
}

SIGILL_REMEDIES: Mapping[str, str] = {
    "torch": "install another release and run doctor again: on ARMv8.0 CPUs 2.4.0, 2.6.0 and 2.10.0 are known to "
    "crash, 2.3.1 to run, 2.5.1 to train on an emulated CPU, and 2.11 to be fixed (install it from an index of "
    "CPU wheels: the default index includes CUDA)",
    "onnxruntime": "`pip install 'onnxruntime<1.21'` and run doctor again: 1.21.0 is known to crash on ARMv8.0 CPUs",
}

GPU_REMEDY = (
    "check that the driver is loaded (`nvidia-smi`; on a Jetson `ls /dev/nvhost-gpu /dev/nvgpu`) and that the agent's "
    'user is in the groups video and render; set [trainer] device = "cpu" if there is no GPU'
)

FAULT_REMEDIES: Mapping[str, str] = {
    "/sys/devices/system/cpu": "make /sys readable in the container",
    "libopenblas.so": "`sudo apt install libopenblas0`",
    "libcudnn.so": "`sudo apt install libcudnn9-cuda-12` with JetPack 6, libcudnn9-cuda-13 with JetPack 7",
    "libcusparseLt.so": "`sudo apt install libcusparselt0`, from NVIDIA's CUDA repository for this Ubuntu",
    "libcudss.so": "install cuDSS, from NVIDIA's CUDA repository for this Ubuntu",
    "libcu": "`sudo apt install nvidia-jetpack`: the image has no CUDA",
    "libnv": "`sudo apt install nvidia-jetpack`: the image has no CUDA",
}
"""By a part of the error: mostly system libraries that NVIDIA's Jetson builds load."""

PIP_BOUNDS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("torch", "aarch64"): ("<2.11", "<2.10,!=2.6.0"),
    ("onnxruntime", "aarch64"): ("", "<1.21"),
}
"""Version bounds for pip: later releases include CUDA; and bounds for CPUs without newer instructions."""

BROKER_REMEDIES: Mapping[tuple[str, ...], str] = {
    ("connection refused",): "nothing listens there: start the broker, or correct host and port of [broker]",
    (
        "name or service",
        "name resolution",
        "nodename",
    ): "unknown host name: correct host of [broker], or use an address",
    (
        "timed out",
        NO_ANSWER,
    ): "no answer: check that the gateway is on, host of [broker] is right, and no firewall blocks it",
    ("unreachable", "no route"): "no route to it: check this board's network",
    (DENIES,): "allow it in the broker's access list, see edge_server/README.md",
    ("authori", "user name or password"): "the broker requires authentication: set `tls`, or `user` and "
    "`password_file`, in [broker]",
    ("tls", "certificate"): "fix what the finding names; see also the broker's log",
    ("",): "check that it is an MQTT broker; see its log",
}
"""By phrases of the refusal."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    Attributes:
        state: `bad` prevents training; `warn` costs readings, or may cost a task.
        remedy: Suggested action; empty for none.
    """

    name: str
    state: Literal["ok", "warn", "bad"]
    finding: str
    remedy: str = ""


def check_profile(profile: Profile) -> Check:
    """Check that the profile describes this board."""
    finding = f"{profile.id}, {profile.name}"
    if (profile.match.compatible or profile.match.dmi) and not profile.is_fallback():
        return Check(name="profile", state="ok", finding=finding)
    remedy = "readings are limited to the kernel's; to add this board, see `device-agent probe --record`"
    return Check(name="profile", state="ok", finding=f"{finding}; a fallback", remedy=remedy)


def check_clock(synchronised: bool | None) -> Check:  # noqa: FBT001 - it is the whole input
    """Check the calendar clock; no deadline uses it, a wrong one only affects dates in logs."""
    if synchronised is None:
        return Check(name="clock", state="warn", finding="unknown whether it is synchronised")
    if synchronised:
        return Check(name="clock", state="ok", finding="synchronised")
    remedy = "`sudo timedatectl set-ntp true`; on a site without internet, point it to a time server of the site"
    return Check(name="clock", state="warn", finding="not synchronised: dates in logs may be wrong", remedy=remedy)


def check_disk(folder: str, refused: str, free_bytes: int, outbox_bytes: int) -> Check:
    """Check that the state folder is writable and has room.

    Args:
        refused: Why it is not writable; empty if it is.
    """
    if refused:
        remedy = f"give it to the agent's user: `sudo install -d -o USER {folder}`, or name another folder in state_dir"
        return Check(name="disk", state="bad", finding=f"{folder}: {refused}", remedy=remedy)
    finding = f"{folder}: {format_figure('_bytes', free_bytes)} free"
    if free_bytes < MIN_DISK_BYTES:
        return Check(name="disk", state="bad", finding=finding, remedy="free disk space there, or name another folder")
    if free_bytes < outbox_bytes:
        remedy = f"free disk space, or set outbox_mb to {free_bytes // 2 // MIB}, so that an excess is reported"
        finding += f", but the outbox may take {format_figure('_bytes', outbox_bytes)}"
        return Check(name="disk", state="warn", finding=finding, remedy=remedy)
    return Check(name="disk", state="ok", finding=finding)


def check_memory(memory: ProbeResult | Absent, limit_bytes: int) -> Check:
    """Check that the trainer's memory is available and within its limit (`limit_bytes`, 0 for none)."""
    free = memory.readings.get("memory.available_bytes") if isinstance(memory, ProbeResult) else None
    if free is None:
        return Check(name="memory", state="warn", finding=f"available memory unknown: {_find_cause(memory)}")
    finding = f"{format_figure(AVAILABLE_MEMORY, free.value)} available"
    if 0 < limit_bytes < TRAINER_BYTES:
        remedy = f"set memory_mb of [trainer] to {TRAINER_BYTES // MIB} or more"
        finding += f", but the trainer's limit is {format_figure(AVAILABLE_MEMORY, limit_bytes)}: too little for torch"
        return Check(name="memory", state="warn", finding=finding, remedy=remedy)
    if free.value < max(limit_bytes, TRAINER_BYTES):
        remedy = "stop other programs, disable the desktop, or add swap"
        finding += f", but training needs {format_figure(AVAILABLE_MEMORY, max(limit_bytes, TRAINER_BYTES))}"
        return Check(name="memory", state="warn", finding=finding, remedy=remedy)
    return Check(name="memory", state="ok", finding=finding)


def check_throttle(throttle: ProbeResult) -> Check:
    """Check that the board runs at full speed, now and since boot."""
    causes = throttle.facts.get("throttle", "none")
    flags = [name for name in THROTTLE_FLAGS if (reading := throttle.readings.get(name)) and reading.value]
    if not flags and (unknown := throttle.absent.get(NOW_FLAG)):
        return Check(name="throttling", state="warn", finding=f"unknown: {unknown.cause}", remedy="see throttle below")
    if not flags:
        return Check(name="throttling", state="ok", finding=causes)
    remedy = next(remedy for cause, remedy in THROTTLE_REMEDIES.items() if cause in causes)
    return Check(name="throttling", state="warn", finding=causes, remedy=remedy)


def check_sources(quantity: str, answers: Mapping[str, str | Absent], grant: str) -> list[Check]:
    """Check every source of a quantity, best first; lesser sources are optional, denied ones have a remedy.

    Args:
        quantity: Name for the report, such as `power`.
        grant: How to give this user access.
    """
    order = list(answers)
    serving = next((name for name in order if isinstance(answers[name], str)), "")
    checks = []
    for name, answer in answers.items():
        title = f"{quantity}: {name}" if name else quantity
        if isinstance(answer, str):
            checks.append(Check(name=title, state="ok", finding=answer))
            continue
        finding = f"{answer.lack.replace('_', ' ')}: {answer.cause}"
        if serving and (answer.lack == "not_present" or order.index(name) > order.index(serving)):
            checks.append(Check(name=title, state="ok", finding=f"{finding}; using {serving}"))
            continue
        remedy = grant if answer.lack == "denied" else SOURCE_REMEDIES.get(quantity, "") if name == order[-1] else ""
        checks.append(Check(name=title, state="warn", finding=finding, remedy=remedy))
    return checks


def describe_grant(permissions: Permissions, user: str, groups: Collection[str]) -> str:
    """Describe how to give a user access to the board's sensors."""
    lines = [
        f"`sudo usermod -aG {group} {user}`, then log in again" for group in permissions.groups if group not in groups
    ]
    lines += [f"add to /etc/udev/rules.d/60-fieldfleet.rules: {line}" for line in permissions.udev]
    lines += [f"add to /etc/tmpfiles.d/fieldfleet.conf: {line}" for line in permissions.tmpfiles]
    if permissions.tmpfiles:
        lines.append("`sudo systemd-tmpfiles --create`")
    if permissions.note:
        lines.append(permissions.note)
    return "; ".join(lines) or f"let {user} read it, as a member of the file's group"


def check_system(table: SupportTable, system: System) -> Check:
    """Check that this system is in the table from which `setup` chooses libraries."""
    try:
        row = find_row(table, system)
    except ConfigError as error:
        problem, remedy = split_remedy(str(error))
        return Check(name="system", state="warn", finding=problem, remedy=remedy)
    if row.refused:
        return Check(name="system", state="bad", finding=row.systems, remedy=row.refused)
    return Check(name="system", state="ok", finding=f"{row.systems}; tested {row.tested}", remedy=row.note)


def check_library(verdict: Verdict, lacking: str, machine: str, *, is_needed: bool, is_packaged: bool = False) -> Check:
    """Check that a library runs.

    Args:
        lacking: Instruction set that it needs but this CPU lacks; empty for none.
        machine: As `uname -m` prints it.
        is_needed: Whether the board depends on it.
        is_packaged: Whether the agent was installed as a Debian package.
    """
    name, state = verdict.library, verdict.state
    finding = f"{verdict.version} {verdict.finding}".strip()
    if state == "usable" and verdict.lack:
        return Check(name=name, state="warn", finding=f"{finding}; {verdict.lack}", remedy=GPU_REMEDY)
    if state == "usable":
        return Check(name=name, state="ok", finding=finding)
    if lacking:
        finding += f"; this CPU has no {lacking}"
    return Check(
        name=name,
        state="bad" if is_needed else "warn",
        finding=finding,
        remedy=_suggest_remedy(verdict, machine, lacking, is_packaged=is_packaged),
    )


def _suggest_remedy(verdict: Verdict, machine: str, lacking: str, *, is_packaged: bool) -> str:
    library = verdict.library
    match verdict.state:
        case "missing":
            bound = PIP_BOUNDS.get((library, machine), ("", ""))[bool(lacking)]
            by_pip = f"`pip install '{library}{bound}'` into this environment"
            return f"`sudo device-agent setup {'train' if library == 'torch' else 'infer'}`" if is_packaged else by_pip
        case "sigill":
            return SIGILL_REMEDIES.get(library, "install an older release")
        case "out_of_memory":
            return "stop other programs or add swap; torch does not fit into 512 MB"
        case "timeout":
            return "try again while the board is idle"
    default = f"see `python -c 'import {library}'`; reinstall it"
    return next((remedy for part, remedy in FAULT_REMEDIES.items() if part in verdict.finding), default)


def check_broker(broker: Broker, refusal: str, *, is_agents: bool = False) -> Check:
    """Check that the broker accepts this device.

    Args:
        refusal: Why it does not; empty if it does.
        is_agents: Whether an agent uses the board's only connection, so that only TCP and TLS were tested.
    """
    place = f"{broker.host}:{broker.port}"
    if not refusal:
        finding = (
            f"{place} answers; the agent uses the account's only connection"
            if is_agents
            else f"{place} accepts this device"
        )
        return Check(name="broker", state="ok", finding=finding)
    message = refusal.lower()
    remedy = next(remedy for phrases, remedy in BROKER_REMEDIES.items() if any(phrase in message for phrase in phrases))
    return Check(name="broker", state="bad", finding=f"{place}: {refusal}", remedy=remedy)


def _find_cause(result: ProbeResult | Absent) -> str:
    lacks = [result] if isinstance(result, Absent) else list(result.absent.values())
    return next((lack.cause for lack in lacks), "no reading")
