"""Phase lines of logs, `phase NAME key=value ...`: write and parse them.

Chaos studies and tests wait for a process to enter a phase, so these lines are an interface, not prose.
"""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

_TEXT = re.compile(r"phase ([\w-]+)((?: \w+=\S+)*)")
_LINE = re.compile(rf" DEBUG (\S+) {_TEXT.pattern}$")


class PhaseLine(NamedTuple):
    """A parsed phase line: logger, phase and facts by key."""

    logger: str
    phase: str
    facts: dict[str, str]


def log_phase(logger: logging.Logger, phase: str, **facts: object) -> None:
    """Log at DEBUG that this process enters a phase; the values of facts contain no spaces."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("phase %s", " ".join([phase, *(f"{key}={value}" for key, value in facts.items())]))


def parse_phase(line: str) -> PhaseLine | None:
    """Return the phase in a line of a log; None if it has none."""
    match = _LINE.search(line)
    return match and PhaseLine(match[1], match[2], dict(fact.split("=", 1) for fact in match[3].split()))
