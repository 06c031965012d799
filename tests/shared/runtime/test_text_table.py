"""Tables of plain text: whole at any width, and nothing of a cell is lost."""

from __future__ import annotations

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.runtime.text_table import (
    LEAST_COLUMNS,
    TextColumn,
    TextTable,
    display_width,
    fold_text,
    fold_words,
    printable_text,
    table_lines,
    write_text,
)

FIGURES = TextTable(
    [TextColumn("round", right=True), *(TextColumn(f"pi-{n}", right=True) for n in range(4))],
    [("1", *["55.1/55.0"] * 4), ("10", *["155.1/5.0"] * 4)],
    "Rounds",
    "kB down/up",
)
WORDS = TextTable([TextColumn("name"), TextColumn("source", least=8)], [("power", "the sensor beside the CPU")])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


def test_what_fits_is_one_block():
    assert table_lines(FIGURES, None) == [
        "Rounds",
        "round       pi-0       pi-1       pi-2       pi-3",
        "    1  55.1/55.0  55.1/55.0  55.1/55.0  55.1/55.0",
        "   10  155.1/5.0  155.1/5.0  155.1/5.0  155.1/5.0",
        "kB down/up",
    ]
    assert table_lines(FIGURES, 45)[1] == "round      pi-0      pi-1      pi-2      pi-3", "closer together first"


def test_columns_that_do_not_fit_stand_below_with_their_key():
    assert table_lines(FIGURES, 30)[1:-1] == [
        "round       pi-0       pi-1",
        "    1  55.1/55.0  55.1/55.0",
        "   10  155.1/5.0  155.1/5.0",
        "",
        "round       pi-2       pi-3",
        "    1  55.1/55.0  55.1/55.0",
        "   10  155.1/5.0  155.1/5.0",
    ]


def test_a_seam_keeps_together_what_belongs_together():
    """Where groups are needed at all."""
    parted = TextTable(FIGURES.columns, FIGURES.rows, seam=2)
    assert [line.split() for line in table_lines(parted, 40) if "pi" in line] == [
        ["round", "pi-0"],
        ["round", "pi-1", "pi-2", "pi-3"],
    ]
    assert len(table_lines(parted, 60)) == 3


def test_words_are_folded_before_figures_move():
    assert table_lines(WORDS, 24) == [
        "name   source",
        "power  the sensor beside",
        "       the CPU",
    ]


def test_a_row_stands_by_itself_where_no_column_fits_beside_its_key():
    wide = TextTable([TextColumn("run"), TextColumn("free\nMiB", right=True)], [("a" * 18, "123456"), ("b", "1")])
    assert table_lines(wide, 20) == [
        "run       " + "a" * 18,
        "free MiB  123456",
        "",
        "run       b",
        "free MiB  1",
    ]


def test_headings_of_several_lines_stand_on_the_row():
    lines = table_lines(TextTable([TextColumn("device"), TextColumn("free\nMiB", right=True)], [("a", "7")]), 80)
    assert lines == ["        free", "device   MiB", "a          7"]


def test_styles_are_for_a_terminal_alone(monkeypatch):
    lines = table_lines(TextTable([TextColumn("a")], [("1",), ("2",)], styles={1: "dim"}), 80, styled=True)
    assert lines == ["\x1b[1ma\x1b[0m", "1", "\x1b[2m2\x1b[0m"]
    stream = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    write_text(stream, ["x" * 200, WORDS])
    assert stream.getvalue() == "x" * 200 + "\n\nname   source\npower  the sensor beside the CPU\n"


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("one two three", 8, ["one two", "three"]),
        ("/sys/class/hwmon/hwmon2", 12, ["/sys/class/", "hwmon/hwmon2"]),
        ("a0123456789", 4, ["a012", "3456", "789"]),
        ("模型模型", 5, ["模型", "模型"]),
        ("", 5, [""]),
    ],
)
def test_words_stay_whole_where_they_fit(text, width, lines):
    assert fold_words(text, width) == lines


def test_a_folded_paragraph_is_indented_like_its_beginning():
    assert fold_text("  one two three", 11) == ["  one two", "    three"]
    assert fold_text("one two three", None) == ["one two three"]
    assert fold_text("a\x1b[2J", 80) == ["a?[2J"]


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=4), st.integers(LEAST_COLUMNS + 10, 90))
def test_every_character_is_there_at_any_width(rows, width):
    """However the cells are folded or parted, and nothing that could drive a terminal."""
    columns = (TextColumn("k", least=6), TextColumn("x", right=True), TextColumn("words", least=8))
    lines = table_lines(TextTable(columns, rows), width)
    assert all(line.isprintable() for line in lines)
    seen = sorted("".join(lines).replace(" ", ""))
    for row in rows:
        for cell in row:
            for one in printable_text(cell).replace(" ", ""):
                assert one in seen
    least = sum(len(printable_text(cell).replace(" ", "")) for row in rows for cell in row)
    assert len(seen) >= least


@example("0000\xa0", 4)
@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Mn", "Me"]), max_size=60), st.integers(4, 40)
)
def test_folded_words_fit_and_are_the_same_words(text, width):
    lines = fold_words(text, width)
    assert max(map(display_width, lines)) <= width
    assert "".join("".join(lines).split(" ")) == "".join(text.split(" "))
