"""Versions of installed distributions, from folder names on `sys.path`.

`importlib.metadata` would take two megabytes in an idle agent.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

ENDING = ".dist-info"


def installed_version(*names: str) -> str:
    """Return the version of the first installed distribution; empty where none is."""
    for name in names:
        start = re.sub(r"[-_.]+", "_", name).lower() + "-"
        for folder in sys.path:
            with suppress(OSError):  # an entry of the path may not exist, or be a zip file
                for entry in os.listdir(folder):  # noqa: PTH208 - only the names
                    if entry.endswith(ENDING) and entry.lower().startswith(start):
                        return entry[len(start) : -len(ENDING)]
    return ""
