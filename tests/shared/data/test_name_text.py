"""Class names in one Unicode form; invisible characters are refused and named."""

from __future__ import annotations

import unicodedata

import pytest

from shared.data.name_text import describe_invisible, find_invisible, find_lookalikes, normalise_name

NAMES = ("café", "thé", "Müll", "한국어", "नमस्ते", "猫", "plain", "two words", "naïve façade")


@pytest.mark.parametrize("name", NAMES)
def test_the_two_unicode_forms_of_a_name_are_one(name):
    forms = {unicodedata.normalize(form, name) for form in ("NFC", "NFD")}
    assert {normalise_name(f" {form}\u00a0") for form in forms} == {unicodedata.normalize("NFC", name)}
    assert not find_invisible(normalise_name(name))


@pytest.mark.parametrize(
    "character",
    [
        *("\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u180e", "\u061c"),  # zero-width
        *("\u202e", "\u2066", "\u200f", "\U000e0041"),  # direction marks, tags
        *("\0", "\n", "\t", "\x1b", "\x7f", "\x85", "\u2028", "\u2029"),  # controls
        *("\u034f", "\u115f", "\u3164", "\uffa0", "\u2800", "\ufe0f", "\U000e0100"),  # fillers, variation selectors
        "\udcfc",  # a byte of a folder's name that is not UTF-8
    ],
)
@pytest.mark.parametrize("name", ["o{}k", "{}ok", "ok{}", "{}"])
def test_an_invisible_character_is_named_by_its_escape(name, character):
    problem = describe_invisible(name.format(character))
    assert problem.startswith(ascii(name.format(character)))
    assert f"U+{ord(character):04X}" in problem or "UTF-8" in problem


def test_every_character_that_python_does_not_print_is_shown_with_an_escape():
    """But for spaces, which are seen, and characters without a name, which print as a box."""
    for number in range(0x110000):
        if unicodedata.category(chr(number)) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert find_invisible(f"a{chr(number)}") == chr(number), hex(number)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cat", "c\u0430t"),
        ("two words", "two\u00a0words"),
        ("two words", "two  words"),
        ("\uff21", "A"),
        ("ﬁsh", "fish"),
    ],
)
def test_names_that_print_alike_are_found(name, other):
    assert find_lookalikes([name, "dog"], ["dog", other]) == {name, other}
    assert not find_lookalikes([name, "dog"], ["dog", name])
    assert not find_lookalikes(["猫", "é"], ["犬", "e"])
