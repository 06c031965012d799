"""Check that a message names given values, whatever the sentence around them."""

from __future__ import annotations

import re

import pytest


def naming(*values: object) -> str:
    """Return a pattern for `pytest.raises(match=...)`: each value stands in the message as a whole word."""
    return r"(?s)\A" + "".join(f"(?=.*{_whole_word(str(value))})" for value in values)


def names_all(message: object, *values: object) -> bool:
    """Return whether a message names each value as a whole word: a key, a path, a device, a number."""
    return re.search(naming(*values), str(message)) is not None


def log_messages(caplog: pytest.LogCaptureFixture, *values: object, level: str = "") -> list[str]:
    """Return the messages of the log records that name all values.

    Args:
        level: Name of the level, such as `WARNING`; empty for all levels.
    """
    messages = [record.getMessage() for record in caplog.records if level in ("", record.levelname)]
    return [message for message in messages if names_all(message, *values)]


def _whole_word(text: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", text) else ""
    return before + re.escape(text) + after
