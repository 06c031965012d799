"""Class names: in the order of their numbers, found without torch, fixed by a plan."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - another process has imported nothing yet
import sys
import unicodedata

import msgspec
import pytest

from shared.data.classes import class_names, contrast, with_classes
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError
from tests.naming import names_all, naming


@pytest.fixture
def table(tmp_path):
    """Return what writes a table of examples and returns its spec."""

    def write(*labels: str, **fields: object) -> Data:
        path = tmp_path / "table.csv"
        path.write_text("v,label\n" + "".join(f"{number},{label}\n" for number, label in enumerate(labels)))
        return Data(source="csv", path=str(path), **fields)

    return write


@pytest.fixture
def folders(tmp_path):
    """Return what makes folders of pictures and returns their spec."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is absent")

    def make(*names: str, **fields: object) -> Data:
        for name in names:
            (tmp_path / "set" / name).mkdir(parents=True)
            image.new("L", (2, 2)).save(tmp_path / "set" / name / "1.png")
        return Data(source="folder", path=str(tmp_path / "set"), **fields)

    return make


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("cat", "bird", "cat"), ("bird", "cat")),
        (("2", "0", "1"), ()),
        (("7", "3"), ()),  # a device that lacks a class still agrees
        (("-1", "1"), ("-1", "1")),
        (("01", "02", "03"), ("01", "02", "03")),
        (("007", "3"), ("007", "3")),
        (("1", "01"), ("01", "1")),
        (("00", "1"), ("00", "1")),
        (("0012", "12", "x"), ("0012", "12", "x")),
        (("+1", "0"), ("+1", "0")),
        (("\u0661", "1"), ("1", "\u0661")),  # a digit, but not one that is printed so
        (("1234567890", "1"), ("1", "1234567890")),
        (("cafe\u0301", "caf\u00e9", "the\u0301"), ("café", "thé")),
    ],
)
def test_names_of_a_table_are_those_of_its_numbers(table, labels, names):
    """And the same as those of the examples when they are read."""
    spec = table(*labels)
    assert class_names(spec) == names
    assert load(spec).classes == names


def test_each_label_of_a_table_has_the_number_of_its_own_name(table):
    """Labels 1, 2, 3 beside names that began at 0 gave a served model the name of the next class."""
    for labels in (("02", "01", "03", "01"), ("1", "01", "001"), ("10", "9", "08"), ("b", "a", "é", "e\u0301")):
        spec = table(*labels)
        examples = load(spec)
        names = [examples.classes[number] for number in examples.labels.tolist()]
        assert names == [unicodedata.normalize("NFC", label) for label in labels]


def test_both_files_of_a_table_decide_whether_labels_are_numbers(tmp_path):
    """A file that has only "1" and "2" beside one that has "03" numbers them as that does."""
    for name, labels in (("train", ("1", "2")), ("test", ("03", "1"))):
        (tmp_path / f"{name}.csv").write_text("v,label\n" + "".join(f"0,{label}\n" for label in labels))
    train, test = (load(Data(source="csv", path=str(tmp_path), split=split)) for split in ("train", "test"))
    assert (train.classes, test.classes) == (("03", "1", "2"),) * 2
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 2], [0, 1])


def test_folders_of_both_unicode_forms_are_one_class(folders):
    spec = folders("caf\u00e9", "cafe\u0301", "the\u0301")
    assert class_names(spec) == ("café", "thé")
    assert load(spec).labels.tolist() == [0, 0, 1]
    planned = msgspec.structs.replace(spec, classes=("the\u0301", "cafe\u0301"))
    assert planned.classes == ("thé", "café")
    assert load(planned).labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("label", ["ok\u200b", "o\u202ek", "ok\ufeff", "o\x07k"])
def test_an_invisible_character_makes_no_class_of_its_own(table, folders, label):
    for spec in (table("ok", label), folders("ok", label)):
        for read in (class_names, load):
            with pytest.raises(ConfigError, match=r"U\+") as caught:
                read(spec)
            assert ascii(label) in str(caught.value)
            assert str(caught.value).isprintable()
    with pytest.raises(ValueError, match=r"U\+"):
        Data(source="csv", path="x", classes=("ok", label))


def test_two_lists_that_print_alike_are_shown_with_escapes(table):
    with pytest.raises(ConfigError) as caught:
        load(table("cat", "dog", classes=("c\u0430t", "dog")))
    assert names_all(caught.value, "'cat', dog", r"'c\u0430t', dog")


def test_long_lists_show_what_differs():
    """The first twelve names of two lists of hundreds may be the same."""
    names = [f"class{number:03}" for number in range(100)]
    ours, theirs = contrast(names, [*names[:-1], "other"])
    assert ("class099" in ours, "other" in theirs) == (True, True)
    ours, theirs = contrast(names, [*names[:50], *names[:49:-1]])
    assert ("class050" in ours, "class099" in theirs) == (True, True)


def test_names_of_folders_are_those_of_their_numbers(folders):
    assert class_names(folders("cat", "dog")) == ("cat", "dog")
    found = load(folders("bird"))
    assert (found.classes, found.labels.tolist()) == (("bird", "cat", "dog"), [0, 1, 2])


def test_folders_that_are_numbers_in_order_have_no_names(folders):
    """A data set of numbers and one of such folders mean the same by label 0; 10 behind 1 does not."""
    assert class_names(folders("0", "1", "2")) == ()
    assert class_names(folders("10")) == ("0", "1", "10", "2")


def test_a_list_of_classes_numbers_all_sources(table, folders):
    """Two boards with other classes, each lacking one, mean the same by a number."""
    classes = ("dog", "cat", "bird")
    assert load(folders("cat", "bird", classes=classes)).labels.tolist() == [1, 2]
    assert load(table("cat", "bird", classes=classes)).labels.tolist() == [1, 2]
    assert load(Data(source="digits", classes=tuple("abcdefghij"))).labels.max() == 9


def test_a_class_beyond_the_list_is_refused_with_both_lists(table, folders, refused):
    for spec in (table("cat", "eel", classes=("cat", "dog")), folders("cat", "eel", classes=("cat", "dog"))):
        with pytest.raises(ConfigError, match=naming("'eel'", "cat, eel", "cat, dog")):
            load(spec)
    assert names_all(refused(source="digits", classes=("a", "b", "c")), 9, "data.classes", 3)


@pytest.mark.parametrize("label", ["1.5", "0.0", "-.5", "1e3", "2."])
def test_fractions_are_no_classes(table, label):
    """They were made as many classes as there are different ones."""
    spec = table("1", label, "0")
    for read in (load, class_names):
        with pytest.raises(ConfigError, match=naming(repr(label), "label_column")):
            read(spec)


@pytest.mark.parametrize("classes", [(), ("a", "a"), ("a", ""), ("a" * 40_000,)])
def test_a_list_of_classes_that_cannot_be(classes):
    with pytest.raises(ValueError, match="classes"):
        Data(source="digits", classes=classes)


def test_a_task_names_the_classes_of_a_device_that_does_not(table):
    spec = table("cat")
    assert with_classes(spec, []) is spec
    assert with_classes(spec, ["dog", "cat"]).classes == ("dog", "cat")
    with pytest.raises(ConfigError, match=naming("data.classes", "dog, cat")):
        with_classes(table("cat", classes=("cat",)), ["dog", "cat"])


@pytest.mark.parametrize(
    "name",
    [
        *("lost+found", "@eaDir", "__MACOSX", "System Volume Information", "$RECYCLE.BIN", "$Recycle.Bin", "#recycle"),
        *("RECYCLER", "FOUND.000", "LOST.DIR", "@Recycle", "#snapshot"),
    ],
)
def test_a_folder_of_the_system_is_no_class_and_a_line_says_so(folders, caplog, name):
    spec = folders("cat", "dog", name)
    assert class_names(spec) == load(spec).classes == ("cat", "dog")
    assert names_all(caplog.text, name)


def test_a_folder_of_the_system_that_the_plan_names_is_a_class(folders):
    assert load(folders("cat", "#recycle", classes=("#recycle", "cat"))).labels.tolist() == [0, 1]


def test_a_class_folder_whose_name_is_not_utf8_is_refused_with_the_escaped_name(folders):
    """As unpacked from an archive made on Windows."""
    spec = folders("cat")
    os.mkdir(os.fsencode(spec.path) + b"/M\xfcll")  # noqa: PTH102 - bytes that no text stands for
    for read in (load, class_names):
        with pytest.raises(ConfigError, match=naming(r"'M\udcfcll'")) as caught:
            read(spec)
        assert str(caught.value).encode()
    assert class_names(Data(source="folder", path=spec.path, labels="none")) is None
    assert len(load(Data(source="folder", path=spec.path, labels="none"))) == 1


def test_an_agent_learns_them_without_torch():
    code = "import sys, shared.data.classes; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - ours
