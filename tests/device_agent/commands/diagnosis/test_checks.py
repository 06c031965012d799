"""What the doctor makes of findings: each check from its inputs alone."""

from __future__ import annotations

import pytest

from device_agent.commands.diagnosis import checks as doctor
from device_agent.probes.base import ProbeResult
from device_agent.probes.runtime import Verdict
from device_agent.probes.throttle import CAPPED, COOLS, OVER_CURRENT, TEMPERATURE_LIMIT, THROTTLED, UNDERVOLTAGE
from device_agent.profile.schema import Match, Permissions, Profile
from shared.protocol.measurements import Absent, Reading
from shared.runtime.support.table import System, read_table
from shared.transport.base import Broker
from shared.transport.mqtt_connection import NO_ANSWER
from shared.transport.reach import DENIES
from tests.machine import profile
from tests.naming import names_all

MIB = doctor.MIB


def found(name: str, value: float, **facts: str) -> ProbeResult:
    reading = Reading(value=value, unit=name.rpartition("_")[2], source="test", quality="measured", at=0)
    return ProbeResult(readings={name: reading}, facts=facts)


def lack(kind: str, cause: str = "why") -> Absent:
    return Absent(lack=kind, cause=cause)


def test_a_fallback_profile_says_so() -> None:
    own = Profile(schema=1, id="pi", name="Pi", match=Match(compatible=("raspberrypi,4-model-b",)))
    assert doctor.check_profile(own) == doctor.Check(name="profile", state="ok", finding="pi, Pi")
    assert "probe --record" in doctor.check_profile(profile()).remedy


@pytest.mark.parametrize(("synchronised", "state"), [(True, "ok"), (False, "warn"), (None, "warn")])
def test_a_wrong_calendar_is_no_more_than_a_warning(synchronised, state) -> None:
    assert doctor.check_clock(synchronised).state == state


@pytest.mark.parametrize(
    ("refused", "free_mib", "state", "words"),
    [
        ("", 5000, "ok", ["4.883 GiB"]),
        ("", 999, "warn", ["outbox_mb", "499"]),
        ("", 63, "bad", ["63 MiB"]),
        ("Permission denied", 0, "bad", ["Permission denied", "install -d -o USER /srv/state"]),
    ],
)
def test_the_disk(refused, free_mib, state, words) -> None:
    check = doctor.check_disk("/srv/state", refused, free_mib * MIB, 1000 * MIB)
    assert check.state == state
    assert names_all(f"{check.finding} {check.remedy}", *words)


@pytest.mark.parametrize(
    ("free_mib", "limit_mib", "state", "words"),
    [
        (1000, 0, "ok", ["1000 MiB"]),
        (399, 0, "warn", ["399 MiB", "400 MiB"]),
        (1000, 1500, "warn", ["1000 MiB", "1.465 GiB"]),
        (1000, 300, "warn", ["300 MiB", "memory_mb", "[trainer]", "400"]),
        (1000, 900, "ok", ["1000 MiB"]),
    ],
)
def test_memory(free_mib, limit_mib, state, words) -> None:
    check = doctor.check_memory(found("memory.available_bytes", free_mib * MIB), limit_mib * MIB)
    assert check.state == state
    assert names_all(f"{check.finding} {check.remedy}", *words)


def test_memory_that_nothing_tells() -> None:
    assert "no file" in doctor.check_memory(lack("not_present", "no file"), 0).finding


@pytest.mark.parametrize(
    ("name", "words", "cure"),
    [
        ("throttle.undervoltage_flag", f"{UNDERVOLTAGE}, {THROTTLED}", UNDERVOLTAGE),
        ("throttle.now_flag", f"{OVER_CURRENT} on VDD_IN", OVER_CURRENT),
        ("throttle.since_boot_flag", f"{THROTTLED} since boot", THROTTLED),
        ("throttle.now_flag", f"{CAPPED}, {TEMPERATURE_LIMIT}", TEMPERATURE_LIMIT),
        ("throttle.now_flag", f"thermal-cpufreq-0 {COOLS}", COOLS),
        ("throttle.now_flag", f"{CAPPED} at 1200 of 1500 MHz", ""),
    ],
)
def test_each_evidence_of_throttling_has_its_cure(name, words, cure) -> None:
    check = doctor.check_throttle(found(name, 1.0, throttle=words))
    assert (check.state, check.finding, check.remedy) == ("warn", words, doctor.THROTTLE_REMEDIES[cure])
    assert doctor.check_throttle(found(name, 0.0, throttle=words)).state == "ok"


def test_a_source_that_is_not_needed_is_no_warning() -> None:
    """The first answers: what comes after it may lack."""
    answers = {"ina3221": "5 W, measured", "tegrastats": lack("not_present"), "model": lack("invalid")}
    checks = doctor.check_sources("power", answers, "")
    assert [(check.name, check.state) for check in checks] == [
        ("power: ina3221", "ok"),
        ("power: tegrastats", "ok"),
        ("power: model", "ok"),
    ]
    assert names_all(checks[1].finding, "why", "ina3221")


def test_a_better_source_that_is_denied_is_one_with_the_fix() -> None:
    """The lesser one answers, and still the figures could be better."""
    answers = {"rapl": lack("denied"), "ina2xx": lack("not_present"), "battery": "9 W, measured"}
    checks = doctor.check_sources("power", answers, "usermod")
    assert [(check.state, check.remedy) for check in checks] == [("warn", "usermod"), ("ok", ""), ("ok", "")]


def test_where_no_source_answers_the_last_says_what_helps() -> None:
    checks = doctor.check_sources("power", {"rapl": lack("not_present"), "model": lack("not_present")}, "")
    assert [check.state for check in checks] == ["warn", "warn"]
    assert checks[0].remedy == ""
    assert "device-agent calibrate" in checks[1].remedy


def test_the_fix_names_the_groups_that_the_user_lacks_and_the_lines_of_the_profile() -> None:
    needs = Permissions(
        groups=("video", "i2c"), udev=('KERNEL=="x"',), tmpfiles=("z /sys/x 0440 root i2c",), note="Note."
    )
    text = doctor.describe_grant(needs, "ff", {"video"})
    assert "usermod -aG i2c ff" in text
    assert "video" not in text
    assert names_all(text, "/etc/udev/rules.d/60-fieldfleet.rules", *needs.udev)
    assert names_all(text, "/etc/tmpfiles.d/fieldfleet.conf", *needs.tmpfiles)
    assert "systemd-tmpfiles --create" in text
    assert text.endswith("Note.")
    assert "ff" in doctor.describe_grant(Permissions(), "ff", set())


@pytest.mark.parametrize(
    ("library", "verdict", "machine", "state", "cure"),
    [
        ("torch", "usable", "aarch64", "ok", ""),
        ("torch", "missing", "aarch64", "bad", "pip install 'torch<2.10,!=2.6.0'"),
        ("torch", "missing", "x86_64", "bad", "pip install 'torch'"),
        ("onnxruntime", "missing", "aarch64", "warn", "pip install 'onnxruntime<1.21'"),
        ("torch", "sigill", "aarch64", "bad", "2.10.0"),
        ("onnxruntime", "sigill", "aarch64", "warn", "onnxruntime<1.21"),
        ("torch", "out_of_memory", "aarch64", "bad", "swap"),
        ("torch", "timeout", "aarch64", "bad", ""),
        ("torch", "broken", "aarch64", "bad", "import torch"),
    ],
)
def test_each_verdict_on_a_library_has_its_cure(library, verdict, machine, state, cure) -> None:
    told = Verdict(library=library, state=verdict, version="2.10.0", finding="words")
    check = doctor.check_library(told, "atomics", machine, is_needed=library == "torch")
    assert (check.name, check.state) == (library, state)
    assert cure in check.remedy
    assert bool(check.remedy) == ("atomics" in check.finding) == (state != "ok")


@pytest.mark.parametrize(("library", "cure"), [("torch", "torch<2.11"), ("onnxruntime", "onnxruntime")])
def test_what_is_missing_on_a_cpu_that_lacks_nothing_is_a_newer_one(library, cure) -> None:
    told = Verdict(library=library, state="missing", version="", finding="not installed")
    check = doctor.check_library(told, "", "aarch64", is_needed=True)
    assert f"`pip install '{cure}'`" in check.remedy


@pytest.mark.parametrize(("library", "purpose"), [("torch", "train"), ("onnxruntime", "infer")])
def test_the_agent_of_a_package_is_told_of_setup(library, purpose) -> None:
    told = Verdict(library=library, state="missing", version="", finding="not installed")
    check = doctor.check_library(told, "", "aarch64", is_needed=True, is_packaged=True)
    assert f"`sudo device-agent setup {purpose}`" in check.remedy
    assert "pip install" not in check.remedy


@pytest.mark.parametrize(
    ("system", "state", "words"),
    [
        (System("aarch64", "3.11"), "ok", "Raspberry Pi 5"),
        (System("aarch64", "3.11", lacks="atomics"), "ok", "Raspberry Pi 3, 4"),
        (System("armv7l", "3.11"), "bad", "32-bit"),
        (System("aarch64", "3.9"), "warn", "3.9"),
    ],
)
def test_the_system_is_one_of_the_table(system, state, words) -> None:
    check = doctor.check_system(read_table(), system)
    assert (check.name, check.state) == ("system", state)
    assert words in check.finding
    assert check.remedy


def test_a_container_that_hides_the_cpus_is_told() -> None:
    told = Verdict(library="onnxruntime", state="broken", finding="failed to parse /sys/devices/system/cpu/possible")
    assert "container" in doctor.check_library(told, "", "aarch64", is_needed=False).remedy


REFUSALS_OF_A_BROKER = (
    ["[Errno 111] Connection refused"],
    ["[Errno -2] Name or service not known"],
    ["timed out", f"{NO_ANSWER} within 5 s"],
    ["[Errno 101] Network is unreachable", "[Errno 113] No route to host"],
    ["Not authorized", "Bad user name or password"],
    [f"{DENIES} subscribing to x: Not authorized"],
    ["Server busy"],
)
"""By their cause."""


def test_each_cause_for_which_a_broker_refuses_has_its_cure() -> None:
    remedies = set()
    for refusals in REFUSALS_OF_A_BROKER:
        checks = [doctor.check_broker(Broker(host="gateway"), refusal) for refusal in refusals]
        assert [check.state for check in checks] == ["bad"] * len(refusals)
        assert [check.finding for check in checks] == [f"gateway:1883: {refusal}" for refusal in refusals]
        [remedy] = {check.remedy for check in checks}
        remedies.add(remedy)
    assert len(remedies) == len(REFUSALS_OF_A_BROKER)
    assert doctor.check_broker(Broker(), "").state == "ok"
