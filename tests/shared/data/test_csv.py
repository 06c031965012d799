"""Tables: columns by name, classes by number or name, and errors that name line and column."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from shared.data.classes import class_names
from shared.data.load import load
from shared.data.spec import Client, Data
from tests.naming import names_all, naming


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.csv"


def test_columns_by_name(path):
    path.write_text("a, who ,label,b\n1,x,2,-0.5\n\n2e1,y,0, 7 \n3,x,0,0\n", encoding="utf-8-sig")
    got = load(Data(source="csv", path=str(path), client_column="who"))
    assert got.inputs.tolist() == [[1, -0.5], [20, 7], [3, 0]]
    assert got.labels.tolist() == [2, 0, 0]
    assert got.clients == ("x", "y", "x")
    mine = load(Data(source="csv", path=str(path), client_column="who", partition=Client(client="x")))
    assert mine.labels.tolist() == [2, 0]


def test_names_are_ranked_and_quotes_understood(path):
    path.write_text('kind,v\r\nrun,1\r\n"sit, still",2\r\nrun,3\r\nclimb,4\r\n')
    got = load(Data(source="csv", path=str(path), label_column="kind"))
    assert got.labels.tolist() == [1, 2, 1, 0]


def test_integers_keep_their_numbers_and_a_mixture_is_names(path):
    path.write_text("label,v\n9,1\n3,1\n10,1\n")
    assert load(Data(source="csv", path=str(path))).labels.tolist() == [9, 3, 10]
    path.write_text("label,v\n9,1\n-3,1\n10,1\n")
    assert load(Data(source="csv", path=str(path))).labels.tolist() == [2, 0, 1]


def test_a_folder_has_both_splits_and_one_numbering(tmp_path, refused):
    (tmp_path / "train.csv").write_text("label,v\nb,1\nc,2\n")
    assert names_all(refused(source="csv", path=str(tmp_path), split="test"), tmp_path / "test.csv")
    assert load(Data(source="csv", path=str(tmp_path))).labels.tolist() == [0, 1]
    (tmp_path / "test.csv").write_text("v,label\n4,a\n5,c\n")
    assert load(Data(source="csv", path=str(tmp_path))).labels.tolist() == [1, 2]
    test = load(Data(source="csv", path=str(tmp_path), split="test"))
    assert (test.labels.tolist(), test.inputs.tolist()) == ([0, 2], [[4], [5]])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", []),
        (b"\n\n", []),
        (b"label,a\n", []),
        (b"label\n1\n", []),
        (b"class,a\n1,2\n", ["'label'", "class, a", "label_column"]),
        (b"label,a,a\n1,2,3\n", ["'a'"]),
        (b"label,a\n1,2\n1,2,3\n", ["line 3", 3, 2, "','"]),
        (b"label,a\n1,2\n\0\0\0\n", ["line 3", "zero bytes"]),
        (b"Label,a\n1,2\n", ["'label'", "'Label'?"]),
        (b"1,2\n3,4\n", ["'label'", "the names of the columns"]),
        (b"label,a\n1,2\n1,two\n", ["line 3", "'a'", "'two'"]),
        (b"label,a\n1,2\n\n1,\n", ["line 4", "'a'"]),
        (b"label,a\n1,nan\n", ["'a'", "'nan'"]),
        (b"label,a\n1,-inf\n", ["'a'", "'-inf'"]),
        (b"label,a\n1,1e39\n", ["'a'", "'1e39'"]),
        (b"label,a\n ,1\n", ["line 2", "'label'"]),
        (b'label,a\n1,"2\n', ["line 2", "unexpected end of data"]),  # the csv module's words
        (b"label,a\n1,\xff\n", ["UTF-8", "0xff"]),
        (b"label,a\n1," + b"2" * 200_000 + b"\n", ["line 2", 131072]),
    ],
)
def test_bad_tables(path, refused, content, named):
    path.write_bytes(content)
    assert names_all(refused(source="csv", path=str(path)), path, *named)


def test_bad_paths_and_columns(path, refused):
    os.mkfifo(path)
    assert names_all(refused(source="csv", path=str(path)), path, "is not a file")
    path.unlink()
    assert names_all(refused(source="csv", path=str(path)), path, os.strerror(errno.ENOENT))
    path.write_text("label,a\n1,2\n")
    assert names_all(refused(source="csv", path=str(path), split="test"), path, "test.csv", "evaluation.on_device")
    assert names_all(refused(source="csv", path=str(path), client_column="who"), "'who'", "client_column")
    assert names_all(refused(source="csv", path=str(path), client_column="label"), "label_column", "'label'")


def write(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("header", [",a,b,label", "Unnamed: 0,a,b,label", "a,b,,label", "label,a,b,"])
def test_a_column_without_a_name_is_no_feature(tmp_path, refused, header):
    """As pandas writes an index, and calls it when it reads the file again."""
    label = header.split(",").index("label")
    row = ["1", "2", "3", "4"]
    row[label] = "x"
    path = write(tmp_path, f"{header}\n{','.join(row)}\n")
    name = "Unnamed: 0" if "Unnamed" in header else ""
    assert f'skip_columns = ["{name}"]' in refused(source="csv", path=path)
    got = load(Data(source="csv", path=path, skip_columns=(name,)))
    assert got.inputs.shape == (1, 2)


def test_columns_are_left_out(tmp_path, refused):
    path = write(tmp_path, "time,a,b,label\n2024-01-01 00:00:00,1,2,x\n2024-01-01 00:01:00,3,4,y\n")
    assert names_all(refused(source="csv", path=path), "line 2", "'time'", "skip_columns")
    got = load(Data(source="csv", path=path, skip_columns=("time", "b")))
    assert got.inputs.flatten().tolist() == [1, 3]
    assert names_all(refused(source="csv", path=path, skip_columns=("tme",)), "'tme'", "skip_columns")


@pytest.mark.parametrize(
    "cell", ["1_5", "\u0661\u0662", "1e1_0", "0x10", "\u22121", "1,5", "1 5", "nan", "inf", "1e99", "", "True"]
)
def test_what_is_no_plain_number_is_refused(tmp_path, refused, cell):
    message = refused(source="csv", path=write(tmp_path, f'a,label\n"{cell}",x\n'))
    assert names_all(message, "line 2", "'a'")
    assert ("decimal" in message) == (cell == "1,5")


@pytest.mark.parametrize("cell", ["15", "-1.5", "+.5", "2.", "1E-3", " 7 "])
def test_plain_numbers_are_read(tmp_path, cell):
    path = write(tmp_path, f"a,label\n{cell},x\n")
    assert load(Data(source="csv", path=path)).inputs.item() == pytest.approx(float(cell))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators(tmp_path, refused, separator):
    path = write(tmp_path, "a,b,label\n1,2,x\n3,4,y\n".replace(",", separator))
    told = separator.replace("\t", "\\t")
    assert f'separator = "{told}"' in refused(source="csv", path=path)
    spec = Data(source="csv", path=path, separator=separator)
    assert load(spec).inputs.tolist() == [[1, 2], [3, 4]]
    assert class_names(spec) == ("x", "y")


@pytest.mark.parametrize(
    "fields", [{"separator": ""}, {"separator": ", "}, {"separator": "\n"}, {"skip_columns": ("label",)}]
)
def test_keys_of_csv_that_cannot_be(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Data(source="csv", path="x", **fields)
    with pytest.raises(ValueError, match=naming(next(iter(fields)), "'npz'")):
        Data(source="npz", path="x", **fields)


def test_utf16_is_refused_with_what_to_do(tmp_path, refused):
    path = tmp_path / "table.csv"
    path.write_text("a,label\n1,x\n", encoding="utf-16")
    assert names_all(refused(source="csv", path=str(path)), path, "UTF-8")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block", [1, 7, 40, 1 << 20])
def test_blocks_and_single_lines_read_the_same(path, monkeypatch, block, end):
    """Also where a block ends within a line, or a blank line is between two; quotes are read line by line."""
    monkeypatch.setattr("shared.data.sources.csv.BLOCK_BYTES", block)
    rows = [f"{at},w{at % 3},{at * 7 % 13 / 8},{at % 2}{end * (1 + (at % 5 == 0))}" for at in range(50)]
    assert len(_read_plain_and_quoted(path, f"a,who,b,label{end}{''.join(rows)}", client_column="who")) == 50


@pytest.mark.parametrize("block", [1, 9, 64, 1 << 20])
def test_incomplete_lines_are_left_out_of_any_block(path, monkeypatch, block):
    """Cells that only contain the mark of a missing number are complete, as are marks in columns of text."""
    monkeypatch.setattr("shared.data.sources.csv.BLOCK_BYTES", block)
    values = ["1", "", "NA", "-200", " -200 ", "-200.5", "-2001", "\u00a0-200", " ", "\t", "200"]
    rows = [f"{a},{who},{b},0\n" for a in values for b in values for who in ("NA", "-200", "x")]
    text = f"a,who,b,label\n{''.join(rows)}\n,x,,0"
    examples = _read_plain_and_quoted(path, text, client_column="who", drop_missing=("", "NA", "-200"))
    assert len(examples) == 3 * sum(value.strip() not in ("", "NA", "-200") for value in values) ** 2


@pytest.mark.parametrize("block", [1, 9, 1 << 20])
def test_decimal_commas_of_any_block(path, monkeypatch, block):
    monkeypatch.setattr("shared.data.sources.csv.BLOCK_BYTES", block)
    rows = [f"{at},5;w.{at % 3},{at % 2};-200,0;0\n-1,{at};v,.;3;1\n" for at in range(20)]
    keys = {"client_column": "who", "decimal": ",", "separator": ";", "drop_missing": ("-200,0",)}
    assert _read_plain_and_quoted(path, f"a;who;b;label\n{''.join(rows)}", **keys).clients == ("v,.",) * 20


def _read_plain_and_quoted(path, text, **keys):
    """Read a table by blocks and line by line; require the same examples."""
    spec = Data(source="csv", path=str(path), **keys)
    path.write_text(text, newline="")
    plain = load(spec)
    path.write_text(text.replace("who", '"who"', 1), newline="")
    quoted = load(spec)
    assert (plain.inputs.tolist(), plain.labels.tolist()) == (quoted.inputs.tolist(), quoted.labels.tolist())
    assert plain.clients == quoted.clients
    return plain


@pytest.mark.parametrize("cell", ["1.5", "1.234,5", "1.234"])
def test_points_beside_decimal_commas_are_ambiguous(path, refused, cell):
    path.write_text(f"day;a;label\n01.02.2026;1,5;0\n02.02.2026;{cell};0\n")
    keys = {"separator": ";", "decimal": ",", "skip_columns": ("day",)}
    assert names_all(refused(source="csv", path=str(path), **keys), path, "line 3", "'a'", repr(cell), "decimal")


def test_a_fault_is_found_in_the_line_that_it_is_in(path, refused, monkeypatch):
    monkeypatch.setattr("shared.data.sources.csv.BLOCK_BYTES", 16)
    path.write_text("\n\na,label\n" + "1,2\n" * 20 + "\n\nx,2\n" + "1,2\n" * 20)
    assert names_all(refused(source="csv", path=str(path)), path, "line 26", "'a'", "'x'")


def test_a_line_that_is_being_written_is_left_for_later(path):
    path.write_text("a,label\n1,0\n2,1\n3,")
    for name in ("a", '"a"'):
        path.write_text(f"{name},label\n1,0\n2,1\n3,")
        assert load(Data(source="csv", path=str(path), growing=True)).inputs.flatten().tolist() == [1, 2]


def test_a_line_that_begins_while_the_file_is_read_is_left_for_later(path, monkeypatch):
    path.write_text("a,label\n1,0\n2,1\n")
    by_numpy = np.loadtxt

    def load_grown(*args, **keys):
        if path.read_text().endswith("\n"):
            path.write_text(f"{path.read_text()}3,1")
        return by_numpy(*args, **keys)

    monkeypatch.setattr(np, "loadtxt", load_grown)
    assert load(Data(source="csv", path=str(path), growing=True)).inputs.flatten().tolist() == [1, 2]
    assert path.read_text().endswith("3,1")


@pytest.mark.parametrize("length", [10, 11, 12, 31, 32, 40, 94, 95, 200])
def test_long_names_are_not_cut(path, length):
    names = ["x" * length + end for end in "ab"]
    path.write_text(f"label,a,who\n{names[0]},1,{names[1]}\n{names[1]},2,{names[0]}\n")
    examples = load(Data(source="csv", path=str(path), client_column="who"))
    assert (examples.classes, examples.clients) == (tuple(names), (names[1], names[0]))


def test_a_time_series_with_blank_lines_names_the_right_line(path, refused):
    path.write_text("t,a,y\n1,1,1\n\n3,2,2\n2,3,3\n")
    message = refused(source="csv", path=str(path), target_columns=("y",), time_column="t")
    assert names_all(message, path, "line 5", "line 4", "'t'")
