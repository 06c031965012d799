"""What a server computes with, for a run's record: another version may give other bits."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = ("fieldfleet", "numpy", "torch")


def versions() -> dict[str, str]:
    """Return the version of Python and of every distribution that decides what numbers come out, if it is there."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # imported from a folder that was never installed
    return found
