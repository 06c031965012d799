"""Spelling suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable


def guess(name: str, candidates: Iterable[str], quote: str = "'") -> str:
    """Suggest a name as the end of a message, `; did you mean 'NAME'?`; empty where no candidate is similar.

    Args:
        quote: Quotation mark around the suggestion.
    """
    import difflib  # noqa: PLC0415 - needed only for wrong names

    folded = {candidate.casefold(): candidate for candidate in candidates}
    alike = difflib.get_close_matches(name.casefold(), folded, 1)
    return f"; did you mean {quote}{folded[alike[0]]}{quote}?" if alike else ""
