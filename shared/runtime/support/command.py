"""The `setup` commands of both sides: select, check and install libraries."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shared.runtime.support import units
from shared.runtime.support.fetch import Say
from shared.runtime.support.install import WHEELS, find_extras, folder_name, install, is_current, require_disk
from shared.runtime.support.table import (
    PACKAGES,
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
"""Debian's python3-pip-whl installs pip here; only its configured index is read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `setup`."""
    help_ = "take files from this folder instead of downloading them; may be repeated"
    parser.add_argument("--from", dest="folders", type=Path, action="append", default=[], metavar="DIR", help=help_)
    help_ = f"package index; default: the one that pip uses; {TORCH_INDEX} names one to try before it"
    parser.add_argument("--index", action="append", default=[], metavar="URL", help=help_)
    help_ = "CA certificates that verify the index, such as a site's root; default: the system's"
    parser.add_argument("--ca", type=Path, default=None, metavar="FILE", help=help_)
    parser.add_argument("--list", action="store_true", help="print the files' names and SHA-256 without installing")
    parser.add_argument("--anyway", action="store_true", help="install even if this machine has too little memory")


def set_up(purpose: Purpose, options: argparse.Namespace, say: Say = print) -> int:
    """Install the libraries for a purpose; return the exit code.

    Raises:
        ConfigError: This system is not supported, has too little memory or disk, or files are unavailable.
        Unreachable: An index does not answer.
    """
    choice = choose(read_table(), read_wheels(), this_system(), purpose)
    if options.list:
        for wheel in choice.wheels:
            say(f"{wheel.sha256}  {wheel.file}")
        return 0
    extras, name = find_extras(), folder_name(choice, purpose)
    say(f"{choice.row.systems}: {PACKAGES[purpose]}, {len(choice.wheels)} files, {choice.bytes / 1e6:.0f} MB")
    if choice.row.note:
        say(choice.row.note)
    if is_current(extras, name) or (purpose == "infer" and _has_training_wheels(extras)):
        say("already there")  # the Ansible roles match this text
        return 0
    if not options.anyway:
        require_memory(purpose)
    require_disk(extras, choice, downloads=not options.folders)
    os.umask(0o022)  # the service's user must be able to read the files
    install(choice, purpose, extras, list(_sources(options, choice, extras)), say, ca=str(options.ca or ""))
    say(f"{PACKAGES[purpose]}: installed; {_restart_service(SERVICES[purpose])}")
    return 0


def _restart_service(service: str) -> str:
    """Restart a running service so that it loads the libraries; return a message about it."""
    if not units.can_start_services():
        return "a running service loads it at its next restart"
    refusal = units.restart(service, verb="try-restart")
    return f"{service} did not restart: {refusal}" if refusal else f"{service} was restarted, if it ran"


def _has_training_wheels(extras: Path) -> bool:
    """Check whether the training wheels, which can serve too, are installed."""
    choice = choose(read_table(), read_wheels(), this_system(), "train")
    return is_current(extras, folder_name(choice, "train"))


def _sources(options: argparse.Namespace, choice: Choice, extras: Path) -> Iterator[str]:
    yield str(extras / WHEELS)  # earlier downloads, complete or partial
    yield from map(str, options.folders)
    yield from options.index
    if torch_index := os.environ.get(TORCH_INDEX, ""):
        yield torch_index
    if options.folders and not options.index:
        return  # with only a folder named, do not wait for a network that may not exist
    if usual := find_usual_index():
        yield usual
    if choice.row.index:
        yield choice.row.index  # last: only for files that pip's own index lacks


def find_usual_index() -> str:
    """Return the index that pip would use here; PyPI where pip is not installed."""
    places = [str(path) for path in sorted(PIP_WHEELS.glob("pip-*.whl"))]
    sys.path += places
    try:
        configuration = importlib.import_module("pip._internal.configuration").Configuration(isolated=False)
        configuration.load()
        settings = dict(configuration.items())
        usual = importlib.import_module("pip._internal.models.index").PyPI.simple_url
        return str(settings.get(":env:.index-url") or settings.get("global.index-url") or usual)
    except (ImportError, AttributeError):
        return USUAL_INDEX
    finally:
        for place in places:
            sys.path.remove(place)
