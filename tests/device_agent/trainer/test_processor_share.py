"""What training leaves to served models: by the operator, else by the board's profile, else all of it."""

from __future__ import annotations

import pytest

from device_agent.config import TrainerConfig, load
from device_agent.profile.load import load_all
from device_agent.profile.schema import Inference, Profile
from device_agent.trainer.processor_share import FROM_CONFIG, FROM_DEFAULT, choose_share, format_share
from shared.errors import ConfigError
from tests.naming import names_all

BOARD = Profile(
    schema=1,
    id="board",
    name="Board",
    inference=Inference(trainer_nice=5, spared_cpus=1, origin={"trainer_nice": "a guess", "spared_cpus": "measured"}),
)
PLAIN = Profile(schema=1, id="plain", name="Plain")


@pytest.mark.parametrize(
    ("told", "profile", "present", "serves", "nice", "cpus"),
    [
        ({}, BOARD, {0, 1, 2, 3}, False, 0, ()),
        ({}, BOARD, {0, 1, 2, 3}, True, 5, (1, 2, 3)),
        ({}, BOARD, {4, 2}, True, 5, (4,)),
        ({}, BOARD, {0}, True, 5, ()),
        ({}, PLAIN, {0, 1}, True, 10, ()),
        ({"nice": 0, "cpus": []}, BOARD, {0, 1}, True, 0, ()),
        ({"nice": 19, "cpus": [3, 1]}, PLAIN, {0, 1}, False, 19, (1, 3)),
    ],
)
def test_the_trainer_s_share(told, profile, present, serves, nice, cpus) -> None:
    share = choose_share(TrainerConfig(**told), profile, present, serves=serves)
    assert (share.nice, share.cpus) == (nice, cpus)


def test_who_says_so_is_told() -> None:
    share = choose_share(TrainerConfig(cpus=[2]), BOARD, {0, 1, 2}, serves=True)
    assert names_all(format_share(share), 5, "board: a guess", 2, FROM_CONFIG)
    plain = choose_share(TrainerConfig(), PLAIN, {0, 1}, serves=True)
    assert format_share(plain).count(FROM_DEFAULT) == 2
    assert names_all(format_share(plain), 10)


def test_what_no_board_measured_says_so_in_its_profile() -> None:
    origins = {key: one for profile in load_all().values() for key, one in profile.inference.origin.items()}
    assert origins
    assert all("measured" in one for one in origins.values())


@pytest.mark.parametrize(
    ("line", "words"),
    [("nice = 20", "nice"), ("cpus = [1, 1]", "cpus"), ("cpus = [-1]", "cpus")],
)
def test_what_no_process_can_be_given_is_refused(line, words, tmp_path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'device = "a"\nsite = "lab"\nstate_dir = "s"\n[data]\nsource = "digits"\n[trainer]\n{line}\n')
    with pytest.raises(ConfigError, match=words):
        load(path)
