"""Unicode normalisation of class names; rejects invisible characters.

One name has two encodings: macOS decomposes "é" into "e" and an accent (NFD), most other systems do not (NFC). Both
print alike, so names are compared in NFC and stripped of white space. Names with zero-width or control characters
would be different classes that print alike.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable

IGNORABLE = (
    *((0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2028, 0x2029), (0x2800, 0x2800)),
    *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xE0100, 0xE01EF)),
)
"""Ranges without a glyph outside the categories Cc, Cf and Cs: fillers, variation selectors, line separators;
Default_Ignorable_Code_Point of https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt."""
_FIRST = tuple(first for first, _ in IGNORABLE)

_SIMILAR = str.maketrans(
    "АВЕКМНОРСТУХЅІЈԁаеорсухѕіјһԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧοναϲ‐‑‒–—−’‘“”",  # noqa: RUF001 - the similar ones are the point
    "ABEKMHOPCTYXSIJdaeopcyxsijhqwABEZHIKMNOPTYXovac------''\"\"",
)


def normalise_name(name: str) -> str:
    """Return a name in NFC, without white space around it."""
    return name.strip() if name.isascii() else unicodedata.normalize("NFC", name).strip()


def find_invisible(name: str) -> str:
    """Return the first invisible or not encodable character of a name; empty where there is none."""
    if name.isascii() and name.isprintable():
        return ""
    return next(filter(_is_invisible, name), "")


def _is_invisible(character: str) -> bool:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs"):
        return True
    place = bisect_right(_FIRST, ord(character)) - 1
    return place >= 0 and ord(character) <= IGNORABLE[place][1]


def describe_invisible(name: str) -> str:
    """Describe the invisible character of a name with its escape; empty where it has none."""
    character = find_invisible(name)
    if not character:
        return ""
    if unicodedata.category(character) == "Cs":
        return f"{name!a} is not UTF-8 text"
    return f"{name!a} has the invisible character U+{ord(character):04X} ({unicodedata.name(character, 'control')})"


def show_name(name: str, *, escaped: bool = False) -> str:
    """Format a name for people, escaped if it is not printable or if `escaped`."""
    return ascii(name) if escaped or not name.isprintable() else name


def find_lookalikes(names: Iterable[str], others: Iterable[str]) -> set[str]:
    """Return the names of both lists that print like a different name of the other list."""
    lookalikes, folded = set[str](), dict[str, list[str]]()
    for other in others:
        folded.setdefault(_print_form(other), []).append(other)
    for name in names:
        for other in folded.get(_print_form(name), ()):
            if name != other:
                lookalikes |= {name, other}
    return lookalikes


def _print_form(name: str) -> str:
    """Fold compatible and similar letters of a name, and join its white space.

    Latin, Greek and Cyrillic share most of their capitals.
    """
    plain = unicodedata.normalize("NFKC", "".join(character for character in name if not _is_invisible(character)))
    return " ".join(plain.translate(_SIMILAR).split())
