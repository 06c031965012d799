"""Versions of installed distributions, by the names of their folders: `importlib.metadata` takes two megabytes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

ENDING = ".dist-info"


def installed_version(*names: str) -> str:
    """Return the version of the first distribution that is installed; empty where none is."""
    for name in names:
        start = re.sub(r"[-_.]+", "_", name).lower() + "-"
        for folder in sys.path:
            with suppress(OSError):  # of what is on the path, a folder may be gone, or a zip file
                for entry in os.listdir(folder):  # noqa: PTH208 - the names alone
                    if entry.endswith(ENDING) and entry.lower().startswith(start):
                        return entry[len(start) : -len(ENDING)]
    return ""
