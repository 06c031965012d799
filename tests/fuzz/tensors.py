"""Files of tensors: checkpoints and a device's state, as a torn write or a rotten disk may leave them."""

from __future__ import annotations

import json
import struct
from random import Random

import torch

from shared.errors import CorruptFile
from shared.protocol.payload import digest
from shared.tensors import file
from shared.tensors.tree import State, tensor_bytes
from tests.fuzz.frames import folder
from tests.fuzz.trees import cut_and_spliced, damaged

LENGTH = struct.Struct("<Q")


def seeds() -> list[bytes]:
    """Return files of a few tensors and of none."""
    states = [State(), State({"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}, {"round": 2, "name": "x"})]
    found = []
    for state in states:
        file.save(folder() / "seed", state)
        found.append((folder() / "seed").read_bytes())
    return found


def read(data: bytes) -> str:
    """A state or a CorruptFile; what is read is written so that it is read the same."""
    path = folder() / "state"
    path.write_bytes(data)
    try:
        state = file.load(path)
    except CorruptFile as error:
        place, _, why = str(error).partition(": ")
        return f"corrupt: {error.__cause__ or why}" if place == str(path) else f"no place: {error}"
    file.save(path, state)
    again = file.load(path)
    assert again.facts == state.facts
    assert {key: digest([tensor_bytes(leaf)]) for key, leaf in again.tree.items()} == {
        key: digest([tensor_bytes(leaf)]) for key, leaf in state.tree.items()
    }
    return f"accepted: {len(state.tree)} tensors"


def mutate(data: bytes, random: Random) -> bytes:
    """Damage the header, which is JSON behind its length; or damage the bytes."""
    try:
        (length,) = LENGTH.unpack_from(data)
        if random.random() < 0.4:
            return cut_and_spliced(data, random)
        header = json.dumps(damaged(json.loads(data[8 : 8 + length]), random), default=repr).encode()
        return LENGTH.pack(len(header)) + header + data[8 + length :]
    except (ValueError, TypeError, struct.error, RecursionError, AttributeError):
        return cut_and_spliced(data, random)
