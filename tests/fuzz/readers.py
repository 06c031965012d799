"""What reads foreign bytes here, each with what must hold of it whatever the bytes are.

A reader takes bytes and returns in a few words what became of them. It raises what `read` of the code under test raises
without being a typed refusal, or AssertionError where bytes were accepted that cannot be given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from tests.fuzz import (
    coded,
    configs,
    damages,
    enrolments,
    frames,
    journals,
    offers,
    packages,
    payloads,
    tensors,
    texts,
    wires,
)
from tests.fuzz.files import FILES
from tests.fuzz.texts import TEXTS
from tests.fuzz.trees import cut_and_spliced

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
        places: At how many places of an input damage is tried.
        notices: What a reader notices wherever it is: nothing, that bytes are missing ("cut") or too many as well
            ("length"), or any change of a bit ("all").
        is_choosy: Whether it refuses what is of another kind.
        damages: Bytes by the name of what is wrong with them, and how the words begin that must come of them.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], str]
    mutate: Mutate = cut_and_spliced
    bytes_per_byte: int = 64
    bytes_besides: int = 64 << 10
    longest: int = 2048
    places: int = 400
    notices: str = ""
    is_choosy: bool = True
    damages: Mapping[str, tuple[bytes, str]] = field(default_factory=dict)


def _of_file(name: str, notices: str = "", found: damages.Damages | None = None) -> Reader:
    """Return the reader of a file on disk, which may use a library's buffers and tables."""
    return Reader(
        FILES[name].seeds, FILES[name].read, notices=notices, places=60, bytes_besides=4 << 20, damages=found or {}
    )


READERS: Mapping[str, Reader] = {
    "frame": Reader(frames.seeds, frames.read, frames.mutate, 4, 128 << 10, longest=8192),
    "single frame": Reader(
        frames.single_seeds, frames.read_single, notices="all", bytes_per_byte=4, damages=damages.of_frames()
    ),
    "config": Reader(configs.seeds, configs.read, configs.mutate, 64, 256 << 10),
    "wire": Reader(wires.seeds, wires.read, wires.mutate, 32, notices="length", damages=damages.of_messages()),
    "payload": Reader(
        payloads.seeds, payloads.read, payloads.mutate, 64, notices="length", damages=damages.of_payloads()
    ),
    "coded": Reader(coded.seeds, coded.read, coded.mutate, 160, 256 << 10, notices="length", damages=coded.damages()),
    "journal": Reader(
        journals.seeds, journals.read, journals.mutate, 64, notices="length", damages=damages.of_records()
    ),
    "tensorfile": Reader(
        *(tensors.seeds, tensors.read, tensors.mutate, 64, 128 << 10),
        notices="all",
        damages=damages.of_tensor_files(),
    ),
    "enrolment": Reader(
        enrolments.seeds, enrolments.read, enrolments.mutate, 64, 1 << 20, notices="cut", longest=4096, places=60
    ),
    "chain of CAs": Reader(enrolments.chain_seeds, enrolments.read_chain, bytes_besides=1 << 20, places=60),
    "token": Reader(enrolments.token_seeds, enrolments.read_token, notices="cut"),
    "agent's package": Reader(
        *(packages.package_seeds, packages.read_package, packages.mutate_package),
        bytes_besides=2 << 20,
        longest=4096,
        places=60,
        notices="length",
        damages=packages.package_damages(),
    ),
    "package that is offered": Reader(
        *(packages.offered_seeds, packages.read_offered, packages.mutate_package),
        bytes_besides=20 << 20,  # the dictionary of `xz -6`
        longest=4096,
        places=60,
        notices="length",
    ),
    "agent's manifest": Reader(offers.manifest_seeds, offers.read_offer, notices="cut", bytes_besides=1 << 20),
    "range of a file": Reader(offers.range_seeds, offers.read_range, bytes_besides=1 << 20, is_choosy=False),
    "upgrade's record": Reader(packages.record_seeds, packages.read_record, notices="cut", is_choosy=False),
    "npz": _of_file("npz", "cut"),
    "idx": _of_file("idx", "length"),
    "idx.gz": _of_file("idx.gz", "cut"),
    "csv": _of_file("csv"),
    "picture": _of_file("picture"),
    "link trace": _of_file("link trace"),
    "trace": _of_file("trace", found={name: (b"\0" + data, to) for name, (data, to) in damages.of_figures().items()}),
    "profile": _of_file("profile", found=damages.of_figures()),
    "calibration": _of_file("calibration", found=damages.of_figures()),
    "update": _of_file("update", "all"),
    "update's payload": _of_file("update's payload", "all"),
    "run": _of_file("run"),
    "reports": _of_file("reports"),
    **{
        name: Reader(
            text.seeds, text.read, texts.mutate, bytes_besides=1 << 20, is_choosy=name not in ("answer", "cgroups")
        )
        for name, text in TEXTS.items()
    },
}
