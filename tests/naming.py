"""Check that a message names given values, whatever the sentence around them."""

from __future__ import annotations

import re


def naming(*values: object) -> str:
    """Return a pattern for `pytest.raises(match=...)`: each value stands in the message as a whole word."""
    return r"(?s)\A" + "".join(f"(?=.*{_whole_word(str(value))})" for value in values)


def names_all(message: object, *values: object) -> bool:
    """Return whether a message names each value as a whole word: a key, a path, a device, a number."""
    return re.search(naming(*values), str(message)) is not None


def _whole_word(text: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", text) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", text) else ""
    return before + re.escape(text) + after
