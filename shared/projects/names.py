"""Names and versions of projects."""

from __future__ import annotations

import keyword
import re
import sys

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MOST_NAME = 64
VERSION = re.compile(r"[0-9][0-9a-z.+]{0,31}")
OURS = ("device_agent", "edge_server", "firmware_profiles", "shared")


def require_project_name(name: str) -> str:
    """Return the name of a project, which is also that of its package.

    Raises:
        ValueError: It is no name of a package, or that of the standard library's or ours.
    """
    if not NAME.fullmatch(name) or len(name) > MOST_NAME:
        rule = "begins with a lower-case letter and has lower-case letters, digits and single underscores"
        raise ValueError(f"project {name[:80]!r}: a name {rule}")
    if keyword.iskeyword(name):
        raise ValueError(f"project {name!r} is a keyword of Python; choose another name")
    if name in OURS or name in sys.stdlib_module_names:
        raise ValueError(f"project {name!r} has the name of a module of Python or fieldfleet; choose another")
    return name


def require_version(version: str) -> str:
    """Return the version of a project.

    Raises:
        ValueError: It is malformed.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"version {version[:80]!r}: begins with a digit and has digits, letters, dots, such as 0.2.0")
    return version
