"""Server states on disk: the last two, whole or not at all."""

from __future__ import annotations

import pytest
import torch

from edge_server.journal import checkpoints
from shared.errors import CorruptFile
from shared.tensors.tree import State


def state(value: float) -> State:
    """Return a state that can be told from others."""
    return State({"w": torch.full((100,), value)}, {"value": value})


def test_the_last_two_are_kept(tmp_path):
    """One to go on from, one to fall back on, and one to be overwritten; the disk does not fill up."""
    for number in (1, 2, 3, 5):
        checkpoints.save(tmp_path, number, state(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".spare",
        "round-000003.safetensors",
        "round-000005.safetensors",
    ]
    assert checkpoints.load(tmp_path, 5).facts == {"value": 5}


def test_an_absent_state_is_told_from_a_damaged_one(tmp_path):
    """The remedies differ: go back, or set aside and go back."""
    with pytest.raises(FileNotFoundError):
        checkpoints.load(tmp_path, 1)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "noise"])
def test_damage_is_found(tmp_path, damage):
    """A torn write, one rotten bit in the values, an empty file, another file's content."""
    checkpoints.save(tmp_path, 1, state(1.0))
    path = checkpoints.checkpoint_path(tmp_path, 1)
    whole = path.read_bytes()
    changed = whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:]
    path.write_bytes({"cut": whole[:-7], "changed": changed, "empty": b"", "noise": b"noise" * 99}[damage])
    with pytest.raises(CorruptFile, match=path.name):
        checkpoints.load(tmp_path, 1)


def test_a_write_that_fails_leaves_the_older_states(tmp_path):
    """The folder of the next state is not writable as a file: an error, and what was there is there."""
    checkpoints.save(tmp_path, 1, state(1.0))
    (tmp_path / "round-000002.safetensors.part").mkdir()
    with pytest.raises(OSError, match="round-000002"):
        checkpoints.save(tmp_path, 2, state(2.0))
    assert torch.equal(checkpoints.load(tmp_path, 1).tree["w"], state(1.0).tree["w"])
