"""Guess which known name a mistyped one stands for."""

from __future__ import annotations

from collections.abc import Iterable


def guess(name: str, known: Iterable[str], quote: str = "'") -> str:
    """Return a question to end a message with, `; did you mean 'NAME'?`; empty where no known name is like it.

    Args:
        name: As it was given.
        known: Those that there are.
        quote: What to put around the guess.
    """
    import difflib  # noqa: PLC0415 - who is given the right name has no use for it

    folded = {one.casefold(): one for one in known}
    alike = difflib.get_close_matches(name.casefold(), folded, 1)
    return f"; did you mean {quote}{folded[alike[0]]}{quote}?" if alike else ""
