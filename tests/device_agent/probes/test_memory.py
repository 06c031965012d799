"""Memory: the least of what the board and every control group around this process leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes import memory
from device_agent.profile.schema import Profile
from shared.errors import NoData
from tests.machine import grow, shared

PROFILE = Profile(schema=1, id="test", name="test")
MIB = 1 << 20
BOARD = {
    "proc/meminfo": "MemTotal:  8388608 kB\nMemFree:  10 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0",
    "proc/pressure/memory": "some avg10=12.50 avg60=2.00 avg300=3.85 total=15\nfull avg10=0.20 avg60=3.00 avg300=4",
}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED = 9223372036854771712


def v1(limit: int, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"cache 5\ninactive_file 1\ntotal_inactive_file {cache}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def v2(limit: object, used: int, cache: int = 0, high: object = "max") -> dict[str, object]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7"
    return {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}


def below(folder: str, files: dict[str, object]) -> dict[str, object]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def values(root: Path) -> dict[str, float]:
    return {name: one.value for name, one in memory.read(root, PROFILE, 0.0).readings.items()}


def test_without_limits_it_is_the_board_s(tmp_path):
    assert values(grow(tmp_path, BOARD)) == pytest.approx(
        {"memory.total_bytes": 8192 * MIB, "memory.available_bytes": 4096 * MIB, "memory.pressure_ratio": 0.125}
    )


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("4:memory:/agent", below(f"{V1}/agent", v1(1024 * MIB, 400 * MIB, 100 * MIB)) | below(V1, v1(UNLIMITED, 1))),
        ("0::/agent.slice/run", below(f"{V2}/agent.slice/run", v2(1024 * MIB, 400 * MIB, 100 * MIB))),
        ("0::/agent", below(f"{V2}/unified/agent", v2(1024 * MIB, 400 * MIB, 100 * MIB))),
        ("0::/agent", below(f"{V2}/agent", v2("max", 400 * MIB, 100 * MIB, high=1024 * MIB))),
        ("0::/agent", below(f"{V2}/agent", v2(2048 * MIB, 400 * MIB, 100 * MIB, high=1024 * MIB))),
    ],
    ids=["v1", "v2", "both", "high alone", "high below max"],
)
def test_the_own_group_limits(tmp_path, own, files):
    """1024 MiB less 400 used, of which 100 are files' cache that gives way: 724 MiB."""
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": f"9:cpu:/other\n{own}"} | files))
    assert got["memory.limit_bytes"] == 1024 * MIB
    assert got["memory.available_bytes"] == 724 * MIB


def test_a_group_around_the_own_one_limits_too(tmp_path):
    """The own one leaves 900 MiB, the slice around it 50."""
    files = below(f"{V2}/slice/own", v2(1000 * MIB, 100 * MIB)) | below(f"{V2}/slice", v2(2000 * MIB, 1950 * MIB))
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": "0::/slice/own"} | files))
    assert got["memory.available_bytes"] == 50 * MIB
    assert got["memory.limit_bytes"] == 1000 * MIB


@pytest.mark.parametrize("path", ["/docker/0123abc", "/../..", "/"])
def test_in_a_container_the_mount_is_the_own_group(tmp_path, path):
    """Its path may be the host's, or outside of the namespace."""
    files = below(V1, v1(512 * MIB, 12 * MIB))
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": f"4:memory:{path}"} | files))
    assert got["memory.available_bytes"] == 500 * MIB


def test_what_lies_outside_of_the_own_namespace_is_not_followed(tmp_path):
    """Its path would lead out of where groups are mounted, and on a recorded board out of the board."""
    files = below(V2, v1(1 * MIB, 0)) | {"proc/self/cgroup": "4:memory:/.."}
    assert values(grow(tmp_path, BOARD | files))["memory.available_bytes"] == 4096 * MIB


def test_the_board_s_own_want_is_less_than_a_generous_group(tmp_path):
    files = below(f"{V2}/own", v2(7000 * MIB, 0))
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": "0::/own"} | files))
    assert got["memory.available_bytes"] == 4096 * MIB


@pytest.mark.parametrize("limit", ["max", UNLIMITED, 8192 * MIB])
def test_a_limit_above_the_board_is_none(tmp_path, limit):
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": "0::/own"} | below(f"{V2}/own", v2(limit, 8000 * MIB))))
    assert "memory.limit_bytes" not in got
    assert got["memory.available_bytes"] == 4096 * MIB


def test_a_group_that_is_over_its_limit_has_no_room_not_a_negative_one(tmp_path):
    """Usage may exceed a limit that was lowered, and memory.high always."""
    files = below(f"{V2}/own", v2("max", 300 * MIB, high=200 * MIB))
    got = values(grow(tmp_path, BOARD | {"proc/self/cgroup": "0::/own"} | files))
    assert got["memory.available_bytes"] == 0


def test_lines_of_groups_that_are_garbage_are_passed_over(tmp_path):
    files = {"proc/self/cgroup": "garbage\n0::/own\n::"} | below(f"{V2}/own", v2(1024 * MIB, 1000 * MIB))
    assert values(grow(tmp_path, BOARD | files))["memory.available_bytes"] == 24 * MIB


@pytest.mark.parametrize("limit", ["lots", "-1", "0", "1_073_741_824", "#lack denied"])
def test_a_limit_that_is_there_and_not_known_leaves_the_least_room_unknown(tmp_path, limit):
    """Neither the limit nor what is available is told: 4096 MiB would be the room that the group does not leave."""
    files = {"proc/self/cgroup": "0::/own"} | below(f"{V2}/own", v2(limit, 100 * MIB))
    found = memory.read(grow(tmp_path, BOARD | files), PROFILE, 0.0)
    lack = "denied" if "denied" in limit else "invalid"
    assert {found.absent[f"memory.{name}_bytes"].lack for name in ("limit", "available")} == {lack}
    assert not {"memory.limit_bytes", "memory.available_bytes"} & found.readings.keys()


def test_usage_that_cannot_be_read_leaves_the_room_unknown_and_the_limit_known(tmp_path):
    files = {"proc/self/cgroup": "0::/own"} | below(f"{V2}/own", v2(1024 * MIB, -5))
    found = memory.read(grow(tmp_path, BOARD | files), PROFILE, 0.0)
    assert found.readings["memory.limit_bytes"].value == 1024 * MIB
    assert found.absent["memory.available_bytes"].lack == "invalid"


@pytest.mark.parametrize(("total", "free", "used"), [(0, 0, 0), (4096, 1024, 3072)])
def test_swap(tmp_path, total, free, used):
    """A board without swap has none of it used, which is a figure."""
    got = values(
        grow(tmp_path, {"proc/meminfo": f"{BOARD['proc/meminfo']}\nSwapTotal: {total} kB\nSwapFree: {free} kB"})
    )
    assert (got["memory.swap_total_bytes"], got["memory.swap_used_bytes"]) == (total * 1024, used * 1024)


def test_swap_that_cannot_be_is_none(tmp_path):
    files = {"proc/meminfo": f"{BOARD['proc/meminfo']}\nSwapTotal: 1 kB\nSwapFree: 2 kB"}
    found = memory.read(grow(tmp_path, files), PROFILE, 0.0)
    assert found.absent["memory.swap_used_bytes"].lack == "invalid"


def test_an_old_kernel_does_not_say_what_is_available(tmp_path):
    """MemAvailable came with Linux 3.14; free memory is no stand-in for it."""
    found = memory.read(grow(tmp_path, {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 500 kB"}), PROFILE, 0.0)
    assert found.readings.keys() == {"memory.total_bytes"}
    assert found.absent["memory.available_bytes"].lack == "not_present"
    assert found.absent["memory.pressure_ratio"].lack == "not_present"


@pytest.mark.parametrize("content", ["", "MemTotal: 0 kB", "MemTotal: lots kB", "MemTotal: 12"])
def test_without_a_total_all_is_invalid(tmp_path, content):
    with pytest.raises(NoData) as caught:
        memory.read(grow(tmp_path, {"proc/meminfo": content}), PROFILE, 0.0)
    assert caught.value.lack == "invalid"


def test_recorded_pressure():
    text = shared("reference", "boards", "x86-generic", "proc_pressure_memory.txt").read_text()
    assert memory.parse_pressure(text) == pytest.approx(0.001)


@pytest.mark.parametrize(
    "content", ["", "some avg10=nan avg60=0", "full avg10=1.00 avg60=0", "some avg10=250.00 avg60"]
)
def test_what_is_no_pressure_is_invalid(content):
    with pytest.raises(NoData):
        memory.parse_pressure(content)


def test_this_machine_agrees_with_psutil():
    got = values(LIVE_ROOT)
    theirs = psutil.virtual_memory()
    assert got["memory.total_bytes"] == theirs.total
    assert 0 < got["memory.available_bytes"] <= theirs.available + 512 * MIB
