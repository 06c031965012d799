"""Checks of a board, each with its remedy; pure, `device_agent.commands.diagnosis.examine` gathers what they judge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from device_agent.probes.base import ProbeResult
from device_agent.probes.runtime import Verdict
from device_agent.probes.throttle import NOW_FLAG, UNDERVOLTAGE_FLAG
from device_agent.profile.schema import Permissions, Profile
from shared.errors import ConfigError
from shared.protocol.measurements import Absent
from shared.protocol.units import format_figure
from shared.runtime.support.table import SupportTable, System, find_row
from shared.transport.base import Broker

MIB = 1 << 20
TRAINER_BYTES = 400 * MIB
"""Torch takes about 220 MiB when it is imported and 340 in the training of a small network."""

MIN_DISK_BYTES = 64 * MIB

AVAILABLE_MEMORY = "memory.available_bytes"
COOLING = "better cooling: a heat sink, a fan, a cooler place"
THROTTLE_CURES: Mapping[str, str] = {
    "undervoltage": "a stronger supply, a shorter or thicker cable",
    "over-current": "a stronger supply, or a power mode that draws less (`device-agent profile`)",
    "temperature": COOLING,
    "cools": COOLING,
    "throttled": COOLING,
    "": "if nobody capped the clock on purpose, look at power mode and cooling",
}
"""By the word of the fact `throttle` that tells the cause; the last is for what is left."""

THROTTLE_FLAGS = (NOW_FLAG, UNDERVOLTAGE_FLAG, "throttle.since_boot_flag")

SOURCE_REMEDIES: Mapping[str, str] = {
    "power": "name a meter under [board.meter], or let `device-agent calibrate` fit a model",
    "meter": "is it on, and is its url right? `curl` shows what it answers",
    "cpu clock": "cycles are not counted without a clock; a container needs /sys/devices/system/cpu",
}

SIGILL_CURES: Mapping[str, str] = {
    "torch": "install another release and run doctor again: on CPUs of ARMv8.0 2.4.0, 2.6.0 and 2.10.0 are known to "
    "die, 2.3.1 to run, 2.5.1 to train where such a CPU is emulated, and 2.11 to be mended (take it from an index of "
    "CPU wheels: the usual one brings CUDA)",
    "onnxruntime": "`pip install 'onnxruntime<1.21'` and run doctor again: 1.21.0 is known to die on CPUs of ARMv8.0",
}

GPU_REMEDY = (
    "see whether the driver is loaded (`nvidia-smi`; on a Jetson `ls /dev/nvhost-gpu /dev/nvgpu`) and whether the user "
    'that runs the agent is in the groups video and render; [trainer] device = "cpu" is right where there is no GPU'
)

FAULT_CURES: Mapping[str, str] = {
    "/sys/devices/system/cpu": "a container must let /sys be read",
    "libopenblas.so": "`sudo apt install libopenblas0`",
    "libcudnn.so": "`sudo apt install libcudnn9-cuda-12` with JetPack 6, libcudnn9-cuda-13 with JetPack 7",
    "libcusparseLt.so": "`sudo apt install libcusparselt0`, from NVIDIA's CUDA repository for this Ubuntu",
    "libcudss.so": "install cuDSS, from NVIDIA's CUDA repository for this Ubuntu",
    "libcu": "`sudo apt install nvidia-jetpack`: the image has no CUDA",
    "libnv": "`sudo apt install nvidia-jetpack`: the image has no CUDA",
}
"""By what the fault names: most are libraries of the system, which NVIDIA's builds for Jetsons load."""

PIP_BOUNDS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("torch", "aarch64"): ("<2.11", "<2.10,!=2.6.0"),
    ("onnxruntime", "aarch64"): ("", "<1.21"),
}
"""What pip is to be told of a library: later ones bring CUDA along; and where the CPU lacks what later ones want."""

BROKER_CURES: Mapping[tuple[str, ...], str] = {
    ("connection refused",): "nothing listens there: start the broker, or correct host and port of [broker]",
    (
        "name or service",
        "name resolution",
        "nodename",
    ): "nobody knows that name: correct host of [broker], or use an address",
    (
        "timed out",
        "no answer",
    ): "nobody answers: is the gateway on, is host of [broker] right, does a firewall drop it?",
    ("unreachable", "no route"): "there is no way to it: is this board's network up?",
    ("denies",): "allow it in the broker's access list, see edge_server/README.md",
    ("authori", "user name or password"): "the broker wants to know who it is: set `tls`, or `user` and "
    "`password_file`, of [broker]",
    ("tls", "certificate"): "mend what the finding names; the broker's log says what it found",
    ("",): "is it an MQTT broker? Look at its log",
}
"""By words of the refusal, what to do."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Finding of one check.

    Attributes:
        state: `bad` keeps the board from training; `warn` costs figures, or may cost a task.
        remedy: What to do; empty where nothing is to be done.
    """

    name: str
    state: Literal["ok", "warn", "bad"]
    finding: str
    remedy: str = ""


def check_profile(profile: Profile) -> Check:
    """Check that a profile describes this board."""
    finding = f"{profile.id}, {profile.name}"
    if (profile.match.compatible or profile.match.dmi) and not profile.is_fallback():
        return Check(name="profile", state="ok", finding=finding)
    remedy = "figures are as good as the kernel's; to add this board, see `device-agent probe --record`"
    return Check(name="profile", state="ok", finding=f"{finding}; a fallback", remedy=remedy)


def check_clock(synchronised: bool | None) -> Check:  # noqa: FBT001 - it is the whole input
    """Check the calendar clock; no deadline uses it, so that a wrong one only spoils the dates of logs."""
    if synchronised is None:
        return Check(name="clock", state="warn", finding="the kernel does not say whether it is synchronised")
    if synchronised:
        return Check(name="clock", state="ok", finding="synchronised")
    remedy = "`sudo timedatectl set-ntp true`; on a site without internet, point it to a time server of the site"
    return Check(name="clock", state="warn", finding="not synchronised: dates in logs may be wrong", remedy=remedy)


def check_disk(folder: str, refused: str, free_bytes: int, outbox_bytes: int) -> Check:
    """Check that the folder of state takes what an agent keeps there.

    Args:
        folder: Of the agent's state.
        refused: Why it cannot be written to; empty where it can.
        outbox_bytes: Most that the outbox may take.
    """
    if refused:
        remedy = f"give it to the agent's user: `sudo install -d -o USER {folder}`, or name another folder in state_dir"
        return Check(name="disk", state="bad", finding=f"{folder}: {refused}", remedy=remedy)
    finding = f"{folder}: {format_figure('_bytes', free_bytes)} free"
    if free_bytes < MIN_DISK_BYTES:
        return Check(name="disk", state="bad", finding=finding, remedy="make room there, or name another folder")
    if free_bytes < outbox_bytes:
        remedy = f"make room, or set outbox_mb to {free_bytes // 2 // MIB}, so that an update that does not fit is told"
        finding += f", and the outbox may take {format_figure('_bytes', outbox_bytes)}"
        return Check(name="disk", state="warn", finding=finding, remedy=remedy)
    return Check(name="disk", state="ok", finding=finding)


def check_memory(memory: ProbeResult | Absent, limit_bytes: int) -> Check:
    """Check that the trainer finds the memory it takes, and may take it; `limit_bytes` is its limit, 0 for none."""
    free = memory.readings.get("memory.available_bytes") if isinstance(memory, ProbeResult) else None
    if free is None:
        return Check(name="memory", state="warn", finding=f"nothing tells how much is free: {_find_cause(memory)}")
    finding = f"{format_figure(AVAILABLE_MEMORY, free.value)} available"
    if 0 < limit_bytes < TRAINER_BYTES:
        remedy = f"set memory_mb of [trainer] to {TRAINER_BYTES // MIB} or more"
        finding += f", and the trainer may take {format_figure(AVAILABLE_MEMORY, limit_bytes)}: too little for torch"
        return Check(name="memory", state="warn", finding=finding, remedy=remedy)
    if free.value < max(limit_bytes, TRAINER_BYTES):
        remedy = "end other programs, leave out the desktop, or add swap"
        finding += f", and training takes {format_figure(AVAILABLE_MEMORY, max(limit_bytes, TRAINER_BYTES))}"
        return Check(name="memory", state="warn", finding=finding, remedy=remedy)
    return Check(name="memory", state="ok", finding=finding)


def check_throttle(throttle: ProbeResult) -> Check:
    """Check that the board runs at the speed it has, now and since it started."""
    causes = throttle.facts.get("throttle", "none")
    flags = [name for name in THROTTLE_FLAGS if (reading := throttle.readings.get(name)) and reading.value]
    if not flags and (unknown := throttle.absent.get(NOW_FLAG)):
        return Check(
            name="throttling", state="warn", finding=f"nobody knows: {unknown.cause}", remedy="see throttle below"
        )
    if not flags:
        return Check(name="throttling", state="ok", finding=causes)
    cure = next(cure for word, cure in THROTTLE_CURES.items() if word in causes)
    return Check(name="throttling", state="warn", finding=causes, remedy=cure)


def check_sources(quantity: str, answers: Mapping[str, str | Absent], grant: str) -> list[Check]:
    """Check every source of a quantity, best first; a lesser one need not answer, one that is denied can be mended.

    Args:
        quantity: Such as `power`.
        answers: A source's answer, or why there is none, by source.
        grant: What gives this user the right to read.
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
            checks.append(Check(name=title, state="ok", finding=f"{finding}; {serving} serves"))
            continue
        remedy = grant if answer.lack == "denied" else SOURCE_REMEDIES.get(quantity, "") if name == order[-1] else ""
        checks.append(Check(name=title, state="warn", finding=finding, remedy=remedy))
    return checks


def describe_grant(permissions: Permissions, user: str, groups: Collection[str]) -> str:
    """Describe what gives a user the right to read the board's sensors.

    Args:
        permissions: Of the board's profile.
        user: Name of the agent's user.
        groups: Those the user is in.
    """
    lines = [
        f"`sudo usermod -aG {group} {user}`, then log in anew" for group in permissions.groups if group not in groups
    ]
    lines += [f"add to /etc/udev/rules.d/60-fieldfleet.rules: {line}" for line in permissions.udev]
    lines += [f"add to /etc/tmpfiles.d/fieldfleet.conf: {line}" for line in permissions.tmpfiles]
    if permissions.tmpfiles:
        lines.append("`sudo systemd-tmpfiles --create`")
    if permissions.note:
        lines.append(permissions.note)
    return "; ".join(lines) or f"let {user} read it: run as a member of the file's group"


def check_system(table: SupportTable, system: System) -> Check:
    """Check that this kind of system is one of the table by which `setup` chooses what trains and serves."""
    try:
        row = find_row(table, system)
    except ConfigError as error:
        problem, _, remedy = str(error).partition("; ")
        return Check(name="system", state="warn", finding=problem, remedy=remedy)
    if row.refused:
        return Check(name="system", state="bad", finding=row.systems, remedy=row.refused)
    return Check(name="system", state="ok", finding=f"{row.systems}; tested {row.tested}", remedy=row.note)


def check_library(verdict: Verdict, lacking: str, machine: str, *, is_needed: bool, is_packaged: bool = False) -> Check:
    """Check that a library runs.

    Args:
        verdict: Of its smoke test.
        lacking: Instruction set that it wants and this CPU does not have; empty for none.
        machine: As `uname -m` prints it.
        is_needed: Whether the board is of no use without it.
        is_packaged: Whether this is the agent of a Debian package.
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
        remedy=_suggest_cure(verdict, machine, lacking, is_packaged=is_packaged),
    )


def _suggest_cure(verdict: Verdict, machine: str, lacking: str, *, is_packaged: bool) -> str:
    library = verdict.library
    match verdict.state:
        case "missing":
            bound = PIP_BOUNDS.get((library, machine), ("", ""))[bool(lacking)]
            by_pip = f"`pip install '{library}{bound}'` into this environment"
            return f"`sudo device-agent setup {'train' if library == 'torch' else 'infer'}`" if is_packaged else by_pip
        case "sigill":
            return SIGILL_CURES.get(library, "install an older release")
        case "out_of_memory":
            return "end other programs or add swap; on boards of 512 MB torch does not fit"
        case "timeout":
            return "try again while the board does nothing else"
    usual = f"`python -c 'import {library}'` says more; reinstall it"
    return next((cure for part, cure in FAULT_CURES.items() if part in verdict.finding), usual)


def check_broker(broker: Broker, refusal: str, *, is_agents: bool = False) -> Check:
    """Check that the broker serves us.

    Args:
        refusal: Why it does not.
        is_agents: Whether an agent has the board's only connection, so that nothing but the way there was tried.
    """
    place = f"{broker.host}:{broker.port}"
    if not refusal:
        finding = f"{place} is there; the agent has this account's one connection" if is_agents else f"{place} takes us"
        return Check(name="broker", state="ok", finding=finding)
    message = refusal.lower()
    cure = next(cure for phrases, cure in BROKER_CURES.items() if any(phrase in message for phrase in phrases))
    return Check(name="broker", state="bad", finding=f"{place}: {refusal}", remedy=cure)


def _find_cause(result: ProbeResult | Absent) -> str:
    lacks = [result] if isinstance(result, Absent) else list(result.absent.values())
    return next((lack.cause for lack in lacks), "no reading")
