"""Tables on a terminal: rich draws the lines of the plain layout."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cli.terminal import write_text
from shared.runtime.text_table import LEAST_COLUMNS, TextColumn, TextTable, fold_text, table_lines
from tests.machine import shown

CELLS = st.text(st.characters(max_codepoint=0x2FF), max_size=30)
WORDS = st.text("abc xyz-/", max_size=30)
COLUMNS = st.lists(st.builds(TextColumn, WORDS, st.booleans(), st.none() | st.integers(4, 12)), min_size=1, max_size=5)


class Terminal(io.StringIO):
    """A terminal of some columns."""

    def isatty(self) -> bool:
        return True


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    """Return a table of any cells, with or without a second group of columns and with a dim row."""
    columns = draw(COLUMNS)
    rows = draw(st.lists(st.lists(CELLS, min_size=len(columns), max_size=len(columns)), max_size=4))
    return TextTable(columns, rows, draw(WORDS), draw(WORDS), seam=draw(st.integers(0, 3)), styles={1: "dim"})


@given(tables(), st.integers(LEAST_COLUMNS, 100))
def test_rich_draws_the_lines_of_the_plain_layout(table, columns):
    """At any width: columns below each other, folded cells, rows as lists; no character is cut."""
    terminal = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        write_text(terminal, ["a paragraph", table])
    lines = shown(terminal.getvalue().encode())
    expected = [*fold_text("a paragraph", columns), *([""] if table.rows else []), *table_lines(table, columns)]
    assert [line.split() for line in lines if line.split()] == [line.split() for line in expected if line.split()]


def test_columns_are_aligned(monkeypatch):
    """Numbers at the right; a folded cell and a heading of two lines take two."""
    monkeypatch.setenv("COLUMNS", "24")
    columns = [TextColumn("name"), TextColumn("free\nMiB", right=True), TextColumn("source", least=8)]
    table, terminal = TextTable(columns, [("pi", "7", "the sensor nearby")]), Terminal()
    write_text(terminal, table)
    assert [line.rstrip() for line in shown(terminal.getvalue().encode())] == table_lines(table, 24)


def test_a_pipe_has_plain_lines():
    pipe = io.StringIO()
    write_text(pipe, TextTable([TextColumn("a")], [("x" * 200,)], styles={0: "dim"}))
    assert pipe.getvalue() == "a\n" + "x" * 200 + "\n"
