"""What the `setup` commands of both sides do: say what fits this system, check it, bring it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shared.runtime.support import units
from shared.runtime.support.fetch import Say
from shared.runtime.support.install import WHEELS, find_extras, install, is_current, name_of, require_disk
from shared.runtime.support.table import (
    WANTED,
    Choice,
    Purpose,
    choose,
    read_table,
    read_wheels,
    require_memory,
    this_system,
)

SERVICES: Mapping[Purpose, str] = {
    "train": "fieldfleet-agent",
    "infer": "fieldfleet-agent",
    "server": "fieldfleet-server",
}
TORCH_INDEX = "FIELDFLEET_TORCH_INDEX"
USUAL_INDEX = "https://pypi.org/simple"
PIP_WHEELS = Path("/usr/share/python-wheels")
"""Where Debian's python3-pip-whl puts pip, which is asked for its index alone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the files come from, and what else both sides are told."""
    help_ = "a folder with the files, so that nothing is downloaded that is there; repeat for more"
    parser.add_argument("--from", dest="folders", type=Path, action="append", default=[], metavar="DIR", help=help_)
    help_ = f"address of an index that pip could use; default: pip's own; {TORCH_INDEX} names one more, for torch"
    parser.add_argument("--index", action="append", default=[], metavar="URL", help=help_)
    help_ = "certificates that the index must be signed by, such as a site's root; default: the system's"
    parser.add_argument("--ca", type=Path, default=None, metavar="FILE", help=help_)
    parser.add_argument("--list", action="store_true", help="print the files' names and SHA-256, and do nothing")
    parser.add_argument("--anyway", action="store_true", help="even where memory is too little")


def set_up(purpose: Purpose, options: argparse.Namespace, say: Say = print) -> int:
    """Bring what this system needs for a purpose; return the exit code.

    Args:
        options: As `add_arguments` declared them.
        say: Is told what is done.

    Raises:
        ConfigError: This system is not supported, has too little memory or disk, or the files are not to be had.
        Unreachable: An index does not answer.
    """
    choice = choose(read_table(), read_wheels(), this_system(), purpose)
    if options.list:
        for one in choice.wheels:
            say(f"{one.sha256}  {one.file}")
        return 0
    extras, name = find_extras(), name_of(choice, purpose)
    say(f"{choice.row.systems}: {WANTED[purpose]}, {len(choice.wheels)} files, {choice.bytes / 1e6:.0f} MB")
    if choice.row.note:
        say(choice.row.note)
    if is_current(extras, name) or (purpose == "infer" and _serves_too(extras)):
        say("already there")
        return 0
    if not options.anyway:
        require_memory(purpose)
    require_disk(extras, choice, downloads=not options.folders)
    os.umask(0o022)  # what is brought is for the service's user to read
    install(choice, purpose, extras, list(_sources(options, choice, extras)), say, ca=str(options.ca or ""))
    say(f"{WANTED[purpose]}: in place; {_taken_up(SERVICES[purpose])}")
    return 0


def _taken_up(service: str) -> str:
    """Have a service that runs take up what was brought; return what is to be said of that."""
    if not units.may_start():
        return "a running service takes it up when it is restarted"
    refusal = units.restart(service, verb="try-restart")
    return f"{service} did not start again: {refusal}" if refusal else f"{service} takes it up, if it runs"


def _serves_too(extras: Path) -> bool:
    """Return whether what trains, which serves as well, is there already."""
    choice = choose(read_table(), read_wheels(), this_system(), "train")
    return is_current(extras, name_of(choice, "train"))


def _sources(options: argparse.Namespace, choice: Choice, extras: Path) -> Iterator[str]:
    yield str(extras / WHEELS)  # what came before; half files go on
    yield from map(str, options.folders)
    yield from options.index
    if torch_index := os.environ.get(TORCH_INDEX, ""):
        yield torch_index
    if options.folders and not options.index:
        return  # nobody who names a folder alone waits for a network that is not there
    if usual := find_usual_index():
        yield usual
    if choice.row.index:
        yield choice.row.index  # last: it is asked only for what pip's own index lacks


def find_usual_index() -> str:
    """Return the address of the index that pip would use here; its usual one where there is no pip to ask."""
    places = [str(one) for one in sorted(PIP_WHEELS.glob("pip-*.whl"))]
    sys.path += places
    try:
        configuration = importlib.import_module("pip._internal.configuration").Configuration(isolated=False)
        configuration.load()
        told = dict(configuration.items())
        usual = importlib.import_module("pip._internal.models.index").PyPI.simple_url
        return str(told.get(":env:.index-url") or told.get("global.index-url") or usual)
    except (ImportError, AttributeError):
        return USUAL_INDEX
    finally:
        for place in places:
            sys.path.remove(place)
