"""What the inference process is started with: `[serve]`, and what follows from the board."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.config import ServeConfig, load
from device_agent.inference.settings import SOCKET, choose_settings, runs_on_battery
from device_agent.profile.schema import Inference
from shared.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
HEAD = 'device = "board"\nsite = "lab"\nstate_dir = "s"\n'


USUAL = Inference()


def chosen(board_bytes=4 * GIB, *, on_battery=False, usual=USUAL, **serve):
    told = ServeConfig(**serve), Path("/state"), "info", usual
    return choose_settings(*told, board_bytes=board_bytes, on_battery=on_battery)


def test_what_is_left_out_follows_from_the_board():
    usual = chosen()
    assert (usual.port, usual.socket, usual.memory_bytes) == (8471, f"/state/{SOCKET}", 2 * GIB)
    assert (usual.threads, usual.spin_us, usual.arena, usual.provider) == (1, 0, True, "cpu")
    small = chosen(400 * MIB)
    assert (small.memory_bytes, small.arena) == (200 * MIB, False)
    told = chosen(memory_mb=100, arena="off", socket="/run/x", max_body_mb=3, max_batch=7, patience_s=1.5)
    assert (told.memory_bytes, told.arena, told.socket) == (100 * MIB, False, "/run/x")
    assert (told.max_body_bytes, told.max_batch, told.patience_s) == (3 * MIB, 7, 1.5)


def test_what_a_profile_knows_better_takes_the_place_of_the_usual_and_the_operator_s_word_of_both():
    knows = Inference(threads=4, spin_us=7, arena="off")
    found = chosen(usual=knows, rate_hz=100)
    assert (found.threads, found.spin_us, found.arena) == (4, 7, False)
    told = chosen(usual=knows, rate_hz=100, threads=2, arena="on")
    assert (told.threads, told.spin_us, told.arena) == (2, 7, True)
    assert chosen(usual=knows, rate_hz=100, threads=1).spin_us == 0
    assert chosen(usual=Inference(threads=2, spin_us=0), rate_hz=100).spin_us == 0
    assert chosen(400 * MIB, usual=Inference(arena="on")).arena


@pytest.mark.parametrize(
    ("threads", "rate_hz", "on_battery", "spins"),
    [(1, 100, False, False), (2, 29, False, False), (2, 30, False, True), (2, 100, True, False), (4, 0, False, False)],
)
def test_threads_spin_only_where_requests_come_often_and_no_battery_pays(threads, rate_hz, on_battery, spins):
    assert (chosen(threads=threads, rate_hz=rate_hz, on_battery=on_battery).spin_us > 0) == spins


def test_a_socket_s_path_may_not_be_longer_than_systems_take():
    with pytest.raises(ConfigError, match=r"serve\.socket"):
        chosen(socket="/" + 107 * "x")


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({}, False),
        ({"AC": ("Mains", "Unknown")}, False),
        ({"BAT0": ("Battery", "Discharging")}, True),
        ({"BAT0": ("Battery", "Full"), "BAT1": ("Battery", "Charging")}, False),
        ({"AC": ("Mains", ""), "BAT0": ("Battery", "Discharging")}, True),
    ],
)
def test_a_battery_that_is_being_emptied_is_seen(supplies, on_battery, tmp_path):
    for name, (kind, status) in supplies.items():
        folder = tmp_path / "sys/class/power_supply" / name
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "status").write_text(f"{status}\n")
    (tmp_path / "sys/class/power_supply/odd").mkdir(parents=True)
    assert runs_on_battery(tmp_path) == on_battery


def test_its_section_is_read_and_its_paths_start_at_the_file(tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(HEAD + '[serve]\nreleases = ["digits", "/srv/eels"]\nsocket = "x.sock"\nthreads = 2\nport = 0\n')
    config = load(path)
    assert config.serve == ServeConfig(
        releases=[str(tmp_path / "digits"), "/srv/eels"], socket=str(tmp_path / "x.sock"), threads=2, port=0
    )
    with pytest.raises(ConfigError, match=r"\[data\]"):
        config.examples  # noqa: B018 - a board that only serves trains with nothing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, r"\[data\]"),
        (HEAD + "[serve]\nport = 70000\n", "port"),
        (HEAD + "[serve]\nthreads = 0\n", "threads"),
        (HEAD + "[serve]\nmax_body_mb = 0\n", "max_body_mb"),
        (HEAD + "[serve]\nmax_batch = 0\n", "max_batch"),
        (HEAD + "[serve]\npatience_s = 0\n", "patience_s"),
        (HEAD + "[serve]\nrate_hz = -1.0\n", "rate_hz"),
        (HEAD + '[serve]\nprovider = "abacus"\n', "abacus"),
        (HEAD + '[serve]\narena = "perhaps"\n', "perhaps"),
        (HEAD + "[serve]\nspinning = true\n", "spinning"),
    ],
)
def test_what_no_process_can_be_given_is_refused(text, words, tmp_path):
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load(path)
