"""A board is brought to its target and put back, whatever happens in between."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from device_agent.measurement.tuning.apply import JOURNAL_NAME, apply_steps, hold_settings, restore_settings
from device_agent.measurement.tuning.plan import CPUFREQ_FOLDER, Target, Write
from device_agent.profile.load import load_file
from device_agent.profile.schema import Profile
from shared.errors import ConfigError, NoData, Unwritable
from tests.device_agent.sources import JETSON, clocks, content, with_clocks, with_modes
from tests.machine import as_nobody, grow, open_to_all, profile
from tests.naming import names_all, naming

BOARD = profile()
CAP = Target(governor="powersave", max_hertz=1e9)
NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return with_clocks(tmp_path / "root", "policy0", "policy4")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL_NAME


@pytest.fixture
def jetson(tmp_path: Path) -> Profile:
    path = tmp_path / "jetson.toml"
    path.write_text(JETSON)
    return load_file(path)


def test_a_board_is_at_its_target_while_the_block_lasts_and_as_before_after_it(root, journal):
    """Every file again what it was, and the journal gone; within, both policies are at 900 MHz, which is below 1000."""
    before = content(root)
    with hold_settings(root, BOARD, CAP, journal) as now:
        assert clocks(root, "policy0") == clocks(root, "policy4") == ("powersave", 600_000, 900_000)
        assert now.policies["policy4"].max_hertz == 900_000_000
        assert journal.exists()
    assert content(root) == before
    assert not journal.exists()


def test_it_is_put_back_after_an_error_too(root, journal):
    before = content(root)
    with pytest.raises(ZeroDivisionError), hold_settings(root, BOARD, CAP, journal):
        raise ZeroDivisionError
    assert content(root) == before


def test_nothing_is_written_where_nothing_differs(root, journal):
    """Not even a journal."""
    with hold_settings(root, BOARD, Target(governor="ondemand"), journal):
        assert not journal.exists()


def test_what_is_refused_changes_nothing(root, journal):
    before = content(root)
    with pytest.raises(ConfigError, match="'turbo'"), hold_settings(root, BOARD, Target(governor="turbo"), journal):
        raise AssertionError
    assert content(root) == before
    assert not journal.exists()


def test_a_step_that_fails_takes_the_steps_before_it_back(root, journal):
    """The second policy has a governor file that keeps nothing; the first was set by then, and is put back."""
    governor = root / CPUFREQ_FOLDER / "policy4/scaling_governor"
    governor.unlink()
    governor.symlink_to("/dev/zero")  # takes every value, and says none
    with (
        pytest.raises(ConfigError, match=naming(f"/{CPUFREQ_FOLDER}/policy4/scaling_governor", "powersave")),
        hold_settings(root, BOARD, CAP, journal),
    ):
        raise AssertionError
    assert clocks(root, "policy0") == ("ondemand", 600_000, 1_500_000)


def test_a_journal_that_cannot_be_written_forbids_the_change(root, disk):
    """Without it nobody could put the board back after a kill."""
    before = content(root)
    disk.fill()
    with pytest.raises(Unwritable), hold_settings(root, BOARD, CAP, disk.path / JOURNAL_NAME):
        raise AssertionError
    assert content(root) == before


def test_a_highest_clock_that_heat_holds_lower_counts_as_set(root):
    """The kernel keeps the request, and says what holds now. A file that says less than was written stands for it."""
    masked = Path("/proc/self/coredump_filter")  # keeps nine bits: of 0x124f80, 0x180
    before = masked.read_text()
    folder = root / CPUFREQ_FOLDER / "policy0"
    try:
        for name in ("scaling_max_freq", "scaling_min_freq"):
            (folder / name).unlink()
            (folder / name).symlink_to(masked)
        apply_steps(root, BOARD, [Write(path=f"{CPUFREQ_FOLDER}/policy0/scaling_max_freq", value="1200000")])
        with pytest.raises(ConfigError, match=naming("1200000")):
            apply_steps(root, BOARD, [Write(path=f"{CPUFREQ_FOLDER}/policy0/scaling_min_freq", value="1200000")])
    finally:
        masked.write_text(f"0x{before.strip()}")


def test_who_may_not_write_is_told_how_to(journal):
    """An agent that is not root: the files are world-readable and root's."""
    with open_to_all() as folder:
        root = with_clocks(folder / "root")
        own = folder / "own"
        own.mkdir()
        os.chown(own, NOBODY, NOBODY)
        with (
            as_nobody(),
            pytest.raises(
                ConfigError,
                match=naming("Permission denied", "/etc/tmpfiles.d", "z /sys/devices/system/cpu/cpufreq/policy*"),
            ),
            hold_settings(root, BOARD, CAP, own / JOURNAL_NAME),
        ):
            raise AssertionError
        assert not (own / JOURNAL_NAME).exists()
        assert clocks(root) == ("ondemand", 600_000, 1_500_000)


class Nvpmodel:
    """The tool as boards have it: writes the status file, and sets clocks of its own; may also do nothing."""

    def __init__(self, *, works: bool = True) -> None:
        self.works, self.asked = works, []

    def __call__(self, root: Path, command: Sequence[str], *, timeout_s: float) -> str:
        self.asked.append(" ".join(command))
        if self.works:
            number = int(command[2])
            with_clocks(root, most=(1_500_000, 1_200_000)[number])
            grow(root, {"var/lib/nvpmodel/status": f"pmode:{number:04d} fmode:quiet"})
        return ""


def test_a_power_mode_is_set_then_the_clocks_and_both_are_put_back(root, journal, jetson):
    """The mode sets the highest clock to 1200 MHz itself; what was before, 900 of a user's own, is there again."""
    with_modes(with_clocks(root, most=900_000), 0)
    shutil.rmtree(root / CPUFREQ_FOLDER / "policy4")
    before, tool = content(root), Nvpmodel()
    with hold_settings(root, jetson, Target(power_mode="25W", governor="powersave"), journal, tool) as now:
        assert now.power_mode == "25W"
        assert clocks(root) == ("powersave", 600_000, 1_200_000)
    assert tool.asked == ["nvpmodel -m 1", "nvpmodel -m 0"]
    assert content(root) == before | {"var/lib/nvpmodel/status": "pmode:0000 fmode:quiet"}


def test_a_tool_that_does_nothing_is_noticed(root, journal, jetson):
    """Where it wants a terminal or a restart it ends well and leaves the mode as it is."""
    with_modes(root, 0)
    with (
        pytest.raises(ConfigError, match=naming("nvpmodel -m 1", "15W", "25W")),
        hold_settings(root, jetson, Target(power_mode="25W"), journal, Nvpmodel(works=False)),
    ):
        raise AssertionError
    assert not journal.exists()


def test_a_tool_that_does_not_end_is_an_error_with_the_remedy(root, journal, jetson):
    def hangs(root: Path, command: Sequence[str], *, timeout_s: float) -> str:
        raise NoData(f"{' '.join(command)}: no end after {timeout_s:g} s", lack="busy")

    with_modes(root, 0)
    with (
        pytest.raises(ConfigError, match=naming("30 s", "sudo nvpmodel -m 1")),
        hold_settings(root, jetson, Target(power_mode="25W"), journal, hangs),
    ):
        raise AssertionError


def test_what_cannot_be_put_back_is_said_and_tried_again_by_the_next(root, journal, jetson, caplog):
    """The tool works once and then never; clocks are put back all the same, and the mode once the tool works again."""
    with_modes(root, 0)
    shutil.rmtree(root / CPUFREQ_FOLDER / "policy4")
    tool = Nvpmodel()
    with hold_settings(root, jetson, Target(power_mode="25W", governor="powersave"), journal, tool):
        tool.works = False
    assert clocks(root) == ("ondemand", 600_000, 1_500_000)
    assert journal.exists()
    assert names_all(caplog.text, "nvpmodel -m 0", "25W")
    with (
        pytest.raises(ConfigError, match=naming(journal)),
        hold_settings(root, jetson, Target(governor="performance"), journal, tool),
    ):
        raise AssertionError
    assert clocks(root)[0] == "ondemand"
    tool.works = True
    assert restore_settings(root, jetson, journal, tool)
    assert "pmode:0000" in content(root)["var/lib/nvpmodel/status"]
    assert not journal.exists()


@pytest.mark.parametrize("rot", [b"", b"{", b'{"before": 1}', b"\xff\xfe", b'{"what": {}}'])
def test_a_journal_that_rotted_is_kept_aside_and_said(root, journal, rot, caplog):
    """The board is set as wanted; nobody knows any more how it was before."""
    journal.write_bytes(rot)
    with caplog.at_level(logging.WARNING), hold_settings(root, BOARD, CAP, journal):
        assert clocks(root)[2] == 900_000
    assert names_all(caplog.text, f"{JOURNAL_NAME}.corrupt-1")
    assert journal.with_name(f"{JOURNAL_NAME}.corrupt-1").read_bytes() == rot
    assert clocks(root)[2] == 1_500_000


def test_a_journal_of_another_user_forbids_the_change_and_stays(tmp_path):
    """Root's agent was killed, and the next one is not root's: how the board was before is known to root alone."""
    with open_to_all() as folder:
        root = with_clocks(folder / "root")
        own = folder / "own"
        own.mkdir()
        os.chown(own, NOBODY, NOBODY)
        (own / JOURNAL_NAME).write_text("how it was")
        (own / JOURNAL_NAME).chmod(0o600)
        with (
            as_nobody(),
            pytest.raises(ConfigError, match=naming(own / JOURNAL_NAME)),
            hold_settings(root, BOARD, CAP, own / JOURNAL_NAME),
        ):
            raise AssertionError
        assert (own / JOURNAL_NAME).read_text() == "how it was"
