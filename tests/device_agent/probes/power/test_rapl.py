"""Energy counters: their zones, their wraps, and whose they are to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.probes.power import rapl
from device_agent.probes.power.rapl import RaplSource, Zone, choose_total, subtract_joules
from device_agent.profile.schema import Power
from shared.errors import NoData
from tests.boards import material
from tests.machine import as_nobody, grow, open_to_all, shared
from tests.naming import naming

CLASS = "sys/class/powercap"
RANGE_UJ = 262_143_328_850


def zone(key: str, name: str, joules: float = 0.0, control: str = "intel-rapl", **files: object) -> dict[str, object]:
    content = {"name": name, "energy_uj": round(joules * 1e6), "max_energy_range_uj": RANGE_UJ} | files
    return {f"{CLASS}/{control}:{key}/{file}": value for file, value in content.items()}


class Board:
    """Zones below a root, a clock, and counters opened on both."""

    def __init__(self, root: Path, *zones: dict[str, object], **power: object) -> None:
        self.root, self.now = root, 100.0
        for one in zones:
            grow(root, one)
        self.counters = RaplSource(root, Power(**power), lambda: self.now, period_s=0.2)  # type: ignore[arg-type]

    def first(self) -> None:
        with pytest.raises(NoData) as caught:
            self.counters.read()
        assert caught.value.lack == "busy"

    def after(self, seconds: float, **joules: float) -> float:
        """Let time pass and counters show these joules, by key (`_` for `:`); return the mean watts."""
        self.now += seconds
        for key, value in joules.items():
            folder = f"{CLASS}/intel-rapl:{key.removeprefix('z').replace('_', ':')}"
            grow(self.root, {f"{folder}/energy_uj": round(value * 1e6)})
        return self.counters.read().value


def test_the_recorded_tree_has_two_packages_one_of_them_numbered_in_hexadecimal(tmp_path) -> None:
    content = shared("reference", "boards", "x86-generic", "powercap_tree.tsv").read_text()
    found = rapl.read_once(material.write(material.tsv(content), tmp_path), 7.0, "package")
    assert {name: reading.value for name, reading in found.readings.items()} == pytest.approx(
        {
            "power.package-0_joules": 240422.366267,
            "power.package-10_joules": 240422.366267,
            "power.package-0-core_joules": 118821.284256,
        }
    )
    assert found.absent["power.total_watts"].lack == "busy"
    assert found.facts == {"power.scope": "package"}


def test_watts_are_joules_over_seconds_of_packages_and_their_memory(tmp_path) -> None:
    """Derivation: (30 + 10 + 5) J in 2 s; cores are inside of their package, and count with it alone."""
    board = Board(
        tmp_path,
        *(zone("0", "package-0"), zone("0:0", "core"), zone("0:1", "dram"), zone("1", "package-1")),
        *(zone("1:0", "uncore"), zone("0", "package-0", control="intel-rapl-mmio")),
    )
    board.first()
    assert board.after(2.0, z0=30, z0_0=25, z0_1=5, z1=10, z1_0=9) == pytest.approx(22.5)
    assert board.counters.provenance.source == "rapl package-0+package-0-dram+package-1"
    assert board.counters.kind == "mean"


def test_what_is_inside_of_a_package_never_makes_the_total(tmp_path) -> None:
    parts = {"package-0": "package", "package-0-core": "inside", "package-0-dram": "memory", "psys": "machine"}
    found = {
        name: Zone(folder=tmp_path, part=part, range_joules=1.0, limit_w=1.0)  # type: ignore[arg-type]
        for name, part in parts.items()
    }
    assert choose_total({}, found, machine=False) == ("package-0", "package-0-dram")
    assert choose_total({"package-0": 3.0, "psys": 3.0}, found, machine=True) == ("psys",)


def test_a_counter_of_the_whole_machine_is_the_total_alone(tmp_path) -> None:
    board = Board(tmp_path, zone("0", "package-0"), zone("0:0", "dram"), zone("1", "psys"))
    board.first()
    assert board.after(1.0, z0=8, z0_0=1, z1=12) == pytest.approx(12.0)
    assert board.counters.provenance.source == "rapl psys"
    assert rapl.read_once(tmp_path, 0.0, "package").facts == {"power.scope": "machine"}


def test_a_machine_that_says_less_than_its_package_is_not_believed_again(tmp_path) -> None:
    board = Board(tmp_path, zone("0", "package-0"), zone("1", "psys"))
    board.first()
    assert board.after(1.0, z0=8, z1=0.5) == pytest.approx(8.0)
    assert board.after(1.0, z0=16, z1=30) == pytest.approx(8.0)
    assert board.counters.provenance.source == "rapl package-0"


def test_a_second_way_to_the_same_package_serves_where_there_is_no_first(tmp_path) -> None:
    board = Board(tmp_path, zone("0", "package-0", control="intel-rapl-mmio"))
    assert board.counters.provenance.source == "rapl package-0"


@given(before=st.integers(0, RANGE_UJ), spent=st.integers(0, RANGE_UJ - 1))
def test_a_counter_that_wraps_loses_nothing(before, spent) -> None:
    """The counter runs from 0 to its range; what was spent comes back out, however it lay about the wrap."""
    shown = before + spent if before + spent <= RANGE_UJ else before + spent - RANGE_UJ
    one = Zone(folder=Path(), part="package", range_joules=RANGE_UJ * 1e-6, limit_w=float("inf"))
    assert subtract_joules(before * 1e-6, shown * 1e-6, one, 1.0) == pytest.approx(spent * 1e-6, abs=1e-3)


def test_a_wrap_between_two_reads_is_no_gap(tmp_path) -> None:
    """Derivation: 10 J up to the end of the range and 5 J after it, in 1 s."""
    board = Board(tmp_path, zone("0", "package-0", RANGE_UJ * 1e-6 - 10))
    board.first()
    assert board.after(1.0, z0=5) == pytest.approx(15.0, rel=1e-6)


def test_a_counter_set_back_in_sleep_costs_one_reading(tmp_path) -> None:
    """It looks like a wrap of 260 kJ in a second: more than three times the short-term limit, and than anything."""
    board = Board(tmp_path, zone("0", "package-0", 2000.0, constraint_1_power_limit_uw=60_000_000))
    board.first()
    with pytest.raises(NoData, match=naming("260146 J", "1 s")) as caught:
        board.after(1.0, z0=3)
    assert caught.value.lack == "invalid"
    assert board.after(1.0, z0=10) == pytest.approx(7.0)


def test_a_jump_is_refused_by_the_profile_where_the_limit_says_nothing(tmp_path) -> None:
    board = Board(tmp_path, zone("0", "package-0", constraint_1_power_limit_uw=4_090_000_000), valid_w=(0.5, 200.0))
    board.first()
    with pytest.raises(NoData) as caught:
        board.after(1.0, z0=201)
    assert caught.value.lack == "invalid"


def test_after_a_long_pause_the_count_of_wraps_is_unknown(tmp_path) -> None:
    """Derivation: 262143 J at up to 200 W go round in 1310 s."""
    board = Board(tmp_path, zone("0", "package-0"), valid_w=(0.5, 200.0))
    board.first()
    assert board.after(1300.0, z0=13_000) == pytest.approx(10.0)
    with pytest.raises(NoData, match=naming("1320 s")):
        board.after(1320.0, z0=26_000)
    assert board.after(1.0, z0=26_010) == pytest.approx(10.0)


def test_too_short_a_time_is_waited_out_and_nothing_of_it_lost(tmp_path) -> None:
    board = Board(tmp_path, zone("0", "package-0"))
    board.first()
    with pytest.raises(NoData, match=naming("0.01 s")) as caught:
        board.after(0.01, z0=1)
    assert caught.value.lack == "busy"
    assert board.after(0.99, z0=20) == pytest.approx(20.0)


def test_counters_of_root_are_denied_with_the_remedy() -> None:
    """Mode 0400, as kernels ship them; names and ranges are everybody's."""
    with open_to_all() as root:
        grow(root, zone("0", "package-0", 5))
        (root / CLASS / "intel-rapl:0/energy_uj").chmod(0o400)
        with as_nobody():
            for attempt in (
                lambda: rapl.read_once(root, 0.0, "package"),
                lambda: RaplSource(root, Power(), lambda: 0.0, period_s=1.0),
            ):
                with pytest.raises(NoData, match=r"tmpfiles\.d.*energy_uj 0440 root powercap") as caught:
                    attempt()
                assert caught.value.lack == "denied"


def test_a_virtual_machine_has_no_counters(tmp_path) -> None:
    with pytest.raises(NoData) as caught:
        rapl.read_once(tmp_path, 0.0, "package")
    assert caught.value.lack == "not_present"
