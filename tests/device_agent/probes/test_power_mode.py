"""The power mode of a Jetson, by its files and by its tool, and pinned clocks."""

from __future__ import annotations

import pytest

from device_agent.probes import power_mode
from device_agent.profile.schema import PowerMode
from shared.errors import NoData
from tests.machine import grow, profile, shared
from tests.naming import naming

JETSON = PowerMode(kind="nvpmodel")
STATUS, CONF = "var/lib/nvpmodel/status", "etc/nvpmodel.conf"
POLICY = "sys/devices/system/cpu/cpufreq/policy"


def facts(root):
    return power_mode.read(root, profile(power_mode=JETSON), 0).facts


def test_the_files_of_a_recorded_orin_nano(tmp_path) -> None:
    """Number 2 of a Super's table is MAXN_SUPER; what the tool says is not asked for."""
    folder = shared("reference/boards/jetson-orin-nano")
    files = {
        STATUS: (folder / "var_lib_nvpmodel_status.txt").read_text(),
        CONF: (folder / "nvpmodel_conf_modes_super.txt").read_text(),
        "tools/nvpmodel -q": "NV Power Mode: 25W\n1",
    }
    assert facts(grow(tmp_path, files)) == {"mode": "MAXN_SUPER"}


@pytest.mark.parametrize(
    ("number", "name"), [(0, "MAXN"), (3, "MODE_15W_6CORE"), (5, "MODE_10W_4CORE"), (77, "mode 77")]
)
def test_the_table_of_a_recorded_xavier_nx(tmp_path, number, name) -> None:
    """Lines of clocks lie between the names; a number that the table lacks is still told."""
    conf = shared("reference/boards/jetson-xavier-nx/nvpmodel_conf_modes_MODIFIED.txt").read_text()
    assert facts(grow(tmp_path, {STATUS: f"pmode:{number:04} fmode:cool", CONF: conf})) == {"mode": name}


@pytest.mark.parametrize(
    "answer",
    [
        "NV Power Mode: 25W\n1",
        "NVPM WARN: fan mode is not set!\nNV Power Mode: 25W\n1",
        "NV Fan Mode:quiet\nNV Power Mode: 25W\n1",
    ],
)
def test_without_the_files_the_tool_is_asked(tmp_path, answer) -> None:
    assert facts(grow(tmp_path, {"tools/nvpmodel -q": answer})) == {"mode": "25W"}
    assert facts(grow(tmp_path, {STATUS: "pmode:0001"})) == {"mode": "25W"}


def test_the_recorded_answer_of_the_tool(tmp_path) -> None:
    answer = shared("reference/boards/jetson-orin-nano/nvpmodel_q.txt").read_text()
    assert facts(grow(tmp_path, {"tools/nvpmodel -q": answer})) == {"mode": "25W"}


@pytest.mark.parametrize("answer", ["", "NVPM ERROR: cannot open\n", "NV Power Mode:\n1"])
def test_what_names_no_mode_is_a_lack(tmp_path, answer) -> None:
    found = power_mode.read(grow(tmp_path, {"tools/nvpmodel -q": answer}), profile(power_mode=JETSON), 0)
    assert (found.facts, found.absent["mode"].lack) == ({}, "invalid")


def test_a_table_that_is_a_comment_names_nothing() -> None:
    assert power_mode.parse_mode_names("# < POWER_MODEL ID=0 NAME=OLD >\n< POWER_MODEL ID=1 NAME=NEW >") == {1: "NEW"}


@pytest.mark.parametrize(("limits", "word"), [((("9", "9"), ("7", "7")), "pinned"), ((("9", "9"), ("1", "7")), "free")])
def test_clocks_are_pinned_where_all_are(tmp_path, limits, word) -> None:
    """As `jetson_clocks` leaves them, read without root."""
    files = {}
    for number, (least, most) in enumerate(limits):
        files |= {f"{POLICY}{number}/scaling_min_freq": least, f"{POLICY}{number}/scaling_max_freq": most}
    assert power_mode.read(grow(tmp_path, files), profile(), 0).facts == {"clocks": word}


def test_a_board_without_modes_has_none(tmp_path) -> None:
    with pytest.raises(NoData, match=naming(tmp_path)) as caught:
        power_mode.read(grow(tmp_path, {STATUS: "pmode:0001"}), profile(), 0)
    assert caught.value.lack == "not_present"
