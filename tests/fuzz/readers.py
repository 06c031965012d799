"""What reads foreign bytes here, each with what must hold of it whatever the bytes are.

A reader takes bytes and returns in a few words what became of them. It raises what `read` of the code under test raises
without being a typed refusal, or AssertionError where bytes were accepted that cannot be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tests.fuzz import coded, configs, frames, journals, payloads, tensors, wires

Mutate = Callable[[bytes, Random], bytes]


@dataclass(frozen=True)
class Reader:
    """One reader under test.

    Attributes:
        seeds: Bytes that it accepts.
        read: Reads bytes, checks what must hold, returns what became of them.
        mutate: Returns other bytes of the same kind: damage that such a reader has to look for.
        bytes_per_byte: The bound on what reading may allocate, for every byte read.
        bytes_besides: The same, whatever the length.
        longest: Bytes of the longest input that is tried.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], str]
    mutate: Mutate
    bytes_per_byte: int
    bytes_besides: int = 64 << 10
    longest: int = 2048


READERS: Mapping[str, Reader] = {
    "frame": Reader(frames.seeds, frames.read, frames.mutate, 4, 128 << 10, longest=8192),
    "config": Reader(configs.seeds, configs.read, configs.mutate, 64, 256 << 10),
    "wire": Reader(wires.seeds, wires.read, wires.mutate, 32),
    "payload": Reader(payloads.seeds, payloads.read, payloads.mutate, 64),
    "coded": Reader(coded.seeds, coded.read, coded.mutate, 160, 256 << 10),
    "journal": Reader(journals.seeds, journals.read, journals.mutate, 64),
    "tensorfile": Reader(tensors.seeds, tensors.read, tensors.mutate, 64, 128 << 10),
}
