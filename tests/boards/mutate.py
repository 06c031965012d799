"""Boards whose files and folders are spoilt by a seed, and what no probe may make of them.

`TREES=10000 pytest tests/boards/test_mutated_trees.py` tries so many.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random

from device_agent.probes.base import ProbeResult
from shared.protocol.plausible import is_plausible

PARTIAL = re.compile(r";\D*\d+\D+\d+")
"""In the source of a reading that is a part of the board's: how many sensors of how many it lacks."""

NO_FIGURES: tuple[str, ...] = (
    "",
    "garbage\n",
    "not a number 7\n",
    "1_0\n",
    "١٢٣\n",
    "5\u00b2\n",
    "0x1p3\n",
    "1e21\n",
    "12.5\n",
    "NaN\n",
    "--7\n",
    "7" * 5000 + "\n",
    "#lack denied\n",
    "#lack busy\n",
    "#lack invalid\n",
    "\0\0\0",
    "\n" * (1 << 20),
    "a:" * (1 << 16),
    "é\udcff\n",
)
"""Contents that are no figure anywhere: what is read out of them is false."""

ABSURD: tuple[str, ...] = (
    "1 2 3\n",
    "-1\n",
    "-499200000\n",
    "99999999999999999999\n",
    "18446744073709551615\n",
    "-5\n",
)
"""Contents that are figures: what is read out of them may be true of one kind of file, and never of most."""


RESPELLINGS: tuple[Callable[[re.Match[str]], str], ...] = (
    lambda digits: "9" * 5000,
    lambda digits: f"{digits[0][0]}_{digits[0][1:]}",
    lambda digits: digits[0].translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")),
    lambda digits: f"{digits[0]}\0{digits[0]}",
    lambda digits: f"{digits[0]}e9",
)
"""What may stand where a figure stood within a text, and is none."""


def _respell(path: Path, kept: Path, random: Random) -> None:
    """Write a file as it was, with one of its figures spelt as no driver spells it."""
    content = kept.read_text(errors="replace")
    figures = list(re.finditer(r"[0-9]{2,}", content))
    if not figures:
        path.write_text("garbage\n")
        return
    one = random.choice(figures)
    path.write_text(content[: one.start()] + random.choice(RESPELLINGS)(one) + content[one.end() :])


def _put(content: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.write_bytes(content.encode(errors="surrogateescape"))

    return spoil


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            one.bind(f"/proc/self/fd/{here}/{path.name}"[:100])
        finally:
            os.close(here)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _make_folder(path: Path) -> None:
    (path / "within").mkdir(parents=True)


RESPELT = 0.3

PLACES: tuple[Callable[[Path], object], ...] = (
    lambda path: None,
    os.mkfifo,
    _make_socket,
    _link("/dev/zero"),
    _link("/dev/full"),
    _link("itself-nowhere"),
    _link("."),
    _make_folder,
    _put("#lack denied\n"),
    _put("garbage\n"),
)
"""What stands where a file or a folder stood; nothing first."""
COUNTER = "_event_cnt"
"""Chips differ in how many they have: a board without one is a board that has fewer."""


@contextmanager
def spoilt(root: Path, seed: int) -> Iterator[bool]:
    """Spoil one to three files or folders of a tree and mend them afterwards; give whether none became a figure."""
    random = Random(seed)
    paths = sorted(path for path in root.rglob("*") if not path.is_symlink())
    saved, harmless = root.parent / f"{root.name}-saved", True
    saved.mkdir()
    moved: list[tuple[Path, Path]] = []
    try:
        for number, path in enumerate(random.sample(paths, random.randint(1, 3))):
            if not path.exists() or path.is_symlink():
                continue  # it lay below another
            is_file = path.is_file()
            path.rename(saved / str(number))
            moved.append((path, saved / str(number)))
            if is_file and random.random() < RESPELT:
                _respell(path, saved / str(number), random)
            elif is_file and random.random() < 0.7:
                content = random.choice(NO_FIGURES if random.random() < 0.75 else ABSURD)
                harmless &= content not in ABSURD
                _put(content)(path)
            else:
                random.choice(PLACES[path.name.endswith(COUNTER) :])(path)
        yield harmless
    finally:
        for path, kept in reversed(moved):
            _remove(path)
            kept.rename(path)
        saved.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


OTHER_THERMOMETERS = ("firmware", "hwmon")
"""Asked where zones are gone; what they say is not what zones said."""


def find_false(whole: ProbeResult, found: ProbeResult, *, harmless: bool) -> list[str]:
    """List the figures that a spoilt board cannot have.

    Those that no board can have; and, where nothing that was put there is a figure, those that differ from the whole
    board's, unless they are said to be modelled, or to be a part, or are another thermometer's. A sensor that lost its
    name keeps its figure.

    Args:
        whole: Figures of the board as it was.
        found: Figures of the spoilt one.
        harmless: Whether nothing that was put there is a figure.
    """
    values = {round(one.value, 9) for one in whole.readings.values()}
    wrong = []
    for name, one in found.readings.items():
        same = round(one.value, 9) in values
        another = name.startswith("thermal.") and one.source.startswith(OTHER_THERMOMETERS)
        marked = one.quality == "modelled" or PARTIAL.search(one.source) is not None or another
        if not is_plausible(name, one.value) or (harmless and not same and not marked):
            wrong.append(f"{name} = {one.value:g} {one.quality} of {one.source}")
        elif harmless and name in whole.readings and not marked and one.value != whole.readings[name].value:
            wrong.append(f"{name} = {one.value:g}, was {whole.readings[name].value:g}, of {one.source}")
    return wrong


def count(outcomes: Mapping[int, object]) -> str:
    """Return the seeds of outcomes as words."""
    return "; ".join(f"seed {seed}: {outcome}" for seed, outcome in outcomes.items())
