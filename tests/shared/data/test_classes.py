"""Class names: in the order of their numbers, found without torch, fixed by a plan."""

from __future__ import annotations

import subprocess  # noqa: TID251 - another process has imported nothing yet
import sys

import pytest

from shared.data.classes import class_names, with_classes
from shared.data.load import load
from shared.data.spec import Data
from shared.errors import ConfigError


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
    ],
)
def test_names_of_a_table_are_those_of_its_numbers(table, labels, names):
    """And the same as those of the examples when they are read."""
    spec = table(*labels)
    assert class_names(spec) == names
    assert load(spec).classes == names


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
        with pytest.raises(ConfigError, match=r"class 'eel' is not among the run's: here cat, eel; there cat, dog;"):
            load(spec)
    assert "holds the label 9, and data.classes names 3" in refused(source="digits", classes=("a", "b", "c"))


@pytest.mark.parametrize("label", ["1.5", "0.0", "-.5", "1e3", "2."])
def test_fractions_are_no_classes(table, label):
    """They were made as many classes as there are different ones."""
    spec = table("1", label, "0")
    for read in (load, class_names):
        with pytest.raises(ConfigError, match=r"a class is a name or a whole number from 0, regression comes later"):
            read(spec)


@pytest.mark.parametrize("classes", [(), ("a", "a"), ("a", ""), ("a" * 40_000,)])
def test_a_list_of_classes_that_cannot_be(classes):
    with pytest.raises(ValueError, match="classes must be"):
        Data(source="digits", classes=classes)


def test_a_task_names_the_classes_of_a_device_that_does_not(table):
    spec = table("cat")
    assert with_classes(spec, []) is spec
    assert with_classes(spec, ["dog", "cat"]).classes == ("dog", "cat")
    with pytest.raises(ConfigError, match=r"the run's are dog, cat, this device's cat; correct its file"):
        with_classes(table("cat", classes=("cat",)), ["dog", "cat"])


def test_an_agent_learns_them_without_torch():
    code = "import sys, shared.data.classes; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603 - ours
