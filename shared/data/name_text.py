"""Unicode normalisation of class names, and refusal of characters that nobody sees.

One name is written in two ways: macOS decomposes "é" into "e" and an accent (NFD), most other systems do not (NFC).
Both print alike, so names are compared in the form NFC, without white space around them. Zero-width and control
characters would make classes of their own that print like another.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterable

IGNORABLE = (
    *((0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2028, 0x2029), (0x2800, 0x2800)),
    *((0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xE0100, 0xE01EF)),
)
"""Ranges without a glyph that are not of the categories Cc, Cf and Cs: fillers, variation selectors, line separators;
Default_Ignorable_Code_Point of https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt."""
_FIRST = tuple(first for first, _ in IGNORABLE)

_SIMILAR = str.maketrans(
    "АВЕКМНОРСТУХЅІЈԁаеорсухѕіјһԛԝΑΒΕΖΗΙΚΜΝΟΡΤΥΧοναϲ‐‑‒–—−’‘“”",  # noqa: RUF001 - the similar ones are the point
    "ABEKMHOPCTYXSIJdaeopcyxsijhqwABEZHIKMNOPTYXovac------''\"\"",
)


def normalise_name(name: str) -> str:
    """Return a name in the form NFC, without white space around it."""
    return name.strip() if name.isascii() else unicodedata.normalize("NFC", name).strip()


def find_invisible(name: str) -> str:
    """Return the first character of a name that is not shown, or that no UTF-8 text can hold; empty where none is."""
    if name.isascii() and name.isprintable():
        return ""
    return next(filter(_is_invisible, name), "")


def _is_invisible(character: str) -> bool:
    if unicodedata.category(character) in ("Cc", "Cf", "Cs"):
        return True
    place = bisect_right(_FIRST, ord(character)) - 1
    return place >= 0 and ord(character) <= IGNORABLE[place][1]


def describe_invisible(name: str) -> str:
    """Return what is wrong with a name that has an invisible character, with its escape; empty where it has none."""
    character = find_invisible(name)
    if not character:
        return ""
    if unicodedata.category(character) == "Cs":
        return f"{name!a} is not UTF-8 text"
    return f"{name!a} has the invisible character U+{ord(character):04X} ({unicodedata.name(character, 'control')})"


def show_name(name: str, *, escaped: bool = False) -> str:
    """Return a name for people: as it is, or with escapes where it would not print, or where they are asked for."""
    return ascii(name) if escaped or not name.isprintable() else name


def find_lookalikes(names: Iterable[str], others: Iterable[str]) -> set[str]:
    """Return those of both lists that print like a different name of the other list."""
    found, folded = set[str](), dict[str, list[str]]()
    for other in others:
        folded.setdefault(_print_form(other), []).append(other)
    for name in names:
        for other in folded.get(_print_form(name), ()):
            if name != other:
                found |= {name, other}
    return found


def _print_form(name: str) -> str:
    """Return a name with compatible and similar letters made one, and white space joined.

    Similar are letters of Latin, Greek and Cyrillic, which share most of their capitals.
    """
    plain = unicodedata.normalize("NFKC", "".join(one for one in name if not _is_invisible(one)))
    return " ".join(plain.translate(_SIMILAR).split())
