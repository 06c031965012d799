"""One line an event, to standard error: level, logger, key=value; under systemd the journal adds the time."""

from __future__ import annotations

import logging
import os
import sys
import time


def configure(level: str) -> None:
    """Set up logging for a process.

    Args:
        level: Name of a level: debug, info, warning, error.
    """
    stamped = "JOURNAL_STREAM" not in os.environ
    formatter = logging.Formatter(
        ("%(asctime)s.%(msecs)03dZ " if stamped else "") + "%(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime  # noqa: TID251 - only converts what the record holds
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("mqtt").setLevel(logging.ERROR)  # its reconnects are told by our own transport, once a state
