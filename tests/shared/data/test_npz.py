"""Arrays of numpy: the layouts we read, the real files, and what is never unpickled."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from shared.data.classes import class_names
from shared.data.load import load
from shared.data.spec import Data
from tests.naming import names_all

X, Y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 2])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "examples.npz"


def test_floats_stay_and_the_file_has_no_test_split(path, refused):
    np.savez(path, x=X.astype(">f8"), y=Y.astype(np.uint8), who=np.array(["a", "b", "a", "c"]))
    got = load(Data(source="npz", path=str(path), client_column="who"))
    assert got.inputs.tolist() == X.tolist()
    assert got.labels.tolist() == Y.tolist()
    assert got.clients == ("a", "b", "a", "c")
    assert names_all(
        refused(source="npz", path=str(path), split="test"), path, "x_test", "y_test", "evaluation.on_device"
    )


def test_named_splits_with_clients_of_each(path):
    np.savez(path, x_train=X, y_train=Y[:, None], x_test=X[:1], y_test=Y[:1], who_train=[7, 7, 8, 9], who_test=[3])
    fields = {"source": "npz", "path": str(path), "client_column": "who"}
    assert load(Data(**fields)).clients == ("7", "7", "8", "9")
    assert load(Data(**fields)).labels.tolist() == Y.tolist()
    assert load(Data(**fields, split="test")).clients == ("3",)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 5, 6, 3), (4, 3, 5, 6)), ((4, 5, 6), (4, 1, 5, 6)), ((4, 3, 5, 6), (4, 3, 5, 6)), ((4, 7), (4, 7))],
)
def test_bytes_are_pictures(path, shape, expected):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.savez_compressed(path, x=pixels, y=Y)
    got = load(Data(source="npz", path=str(path))).inputs
    assert got.shape == expected
    assert got.sum().item() == pytest.approx(pixels.sum() / 255, rel=1e-5)
    if len(shape) == 4 and shape[-1] == 3:
        assert got[1, 2, 3, 4].item() == pytest.approx(pixels[1, 3, 4, 2] / 255)


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"x": X, "y": Y[:3]}, ["4 x", "3 y"]),
        ({"x": X, "y": Y / 2}, ["y", "float64", "data.targets"]),
        ({"x": X, "y": Y + 10**12}, [4095]),
        ({"x": X, "y": Y.astype(np.uint64) + np.uint64(2**63)}, [4095]),
        ({"x": X, "y": np.eye(4, dtype=int)}, ["y", "(4, 4)"]),
        ({"x": X, "y": Y - 1}, ["label -1"]),
        ({"x": X[:, 0], "y": Y}, ["x", "(4,)"]),
        ({"x": np.float64(3), "y": Y}, ["x", "float64"]),
        ({"x": X.astype(str), "y": Y}, ["x", "<U32"]),
        ({"x": X.astype(complex), "y": Y}, ["x", "complex128"]),
        ({"x": np.zeros((4, 5, 6, 7), np.uint8), "y": Y}, ["(4, 5, 6, 7)"]),
        ({"x": X[:0], "y": Y[:0]}, []),
        ({"x": X[:, :0], "y": Y}, []),
        ({"x": np.where(X == 5, np.inf, X), "y": Y}, ["example 1"]),
        ({"x": X * 1e300, "y": Y}, ["example 0"]),
        ({"images": X, "y": Y}, ["images, y", "x_train"]),
        ({}, ["x_train", "y_train"]),
    ],
)
def test_wrong_arrays(path, refused, arrays, named):
    np.savez(path, **arrays)
    assert names_all(refused(source="npz", path=str(path)), path, *named)


def test_wrong_clients(path, refused):
    np.savez(path, x=X, y=Y, short=Y[:2], square=X, real=X[:, 0])
    named = {"short": ["2 clients"], "square": ["square", "(4, 3)"], "real": ["real", "float64"], "none": ["'none'"]}
    for column, values in named.items():
        assert names_all(refused(source="npz", path=str(path), client_column=column), path, *values)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the file was unpickled",))


def test_pickles_are_refused_and_not_run(path, refused):
    np.savez(path, x=np.array([Bomb()] * 4, dtype=object), y=Y)
    assert names_all(refused(source="npz", path=str(path)), path, "x", "dtype=str")
    path = path.with_suffix(".npy")
    np.save(path, np.array([Bomb()], dtype=object))
    assert names_all(refused(source="npz", path=str(path)), path, ".npz")


def _member(shape, data=b""):
    """Return an .npy file whose header claims the shape."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return out.getvalue() + data


@pytest.mark.parametrize(
    "member",
    [_member((2**40, 2**20)), _member((2**80, 3)), _member((4, 3), bytes(40)), _member((-4, 3)), b"cos\nsystem\n", b""],
)
def test_members_that_lie(path, refused, member):
    np.savez(path, y=Y)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", member)
    assert "examples.npz" in refused(source="npz", path=str(path))


def test_absent_truncated_and_altered_files(path, refused):
    assert str(path) in refused(source="npz", path=str(path))
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert str(path) in refused(source="npz", path=str(path))
    at = whole.index(X.tobytes())
    path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    assert names_all(refused(source="npz", path=str(path)), path, "CRC-32")


def streams(**changes):
    """Three windows of 4 samples that overlap by half, of a stream of 2 channels and 8 samples."""
    arrays = {
        "signal": np.arange(16.0).reshape(2, 8),
        "start": np.array([0, 2, 4]),
        "label": np.array([0, 0, 1]),
        "subject": np.array([5, 5, 6]),
        "test_subjects": np.array([6]),
    }
    return arrays | changes


def test_windows_are_cut_out_of_streams(path):
    np.savez(path, **streams())
    train = load(Data(source="npz", path=str(path)))
    assert train.inputs.tolist() == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[2, 3, 4, 5], [10, 11, 12, 13]]]
    assert train.clients == ("5", "5")
    test = load(Data(source="npz", path=str(path), split="test", client_column="label"))
    assert test.inputs.tolist() == [[[4, 5, 6, 7], [12, 13, 14, 15]]]
    assert (test.labels.tolist(), test.clients) == ([1], ("1",))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"start": np.array([0, 2, 8])}, ["start", "signal"]),
        ({"start": np.array([0, -1, 4])}, ["start", "signal"]),
        ({"start": np.array([0.0, 2.0, 4.0])}, ["start", "float64"]),
        ({"signal": np.arange(16.0)}, ["signal", "float64", "(16,)"]),
        ({"subject": np.array([5, 6])}, ["2 subject"]),
        ({"test_subjects": np.array([5, 6])}, []),
    ],
)
def test_wrong_streams(path, refused, changes, named):
    np.savez(path, **streams(**changes))
    assert names_all(refused(source="npz", path=str(path)), path, *named)


def test_the_real_uci_har(recorded):
    spec = Data(source="npz", path=recorded("uci-har/uci_har.npz"), split="test")
    got = load(spec)
    assert got.inputs.shape == (2947, 9, 128)
    assert set(got.clients) == {"2", "4", "9", "10", "12", "13", "18", "20", "24"}
    assert got.labels.bincount().tolist() == [496, 471, 420, 491, 532, 537]


def test_the_real_cifar10(recorded):
    got = load(Data(source="npz", path=recorded("cifar10/cifar10_20k.npz"), split="test"))
    assert got.inputs.shape == (4000, 3, 32, 32)
    assert got.labels.bincount().tolist() == [400] * 10
    assert got.inputs.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.491, 0.482, 0.447], abs=0.01)


@pytest.mark.parametrize("kind", ["<U8", ">U8", "S8"])
def test_labels_may_be_names(tmp_path, kind):
    """Numbered as those of a CSV file, of both splits alike; an agent learns them without numpy."""
    path, names = tmp_path / "x.npz", np.array(["dog", "cat", "dog "]).astype(kind)
    np.savez_compressed(path, x_train=np.ones((3, 2)), y_train=names, x_test=np.ones((1, 2)), y_test=np.array(["ant"]))
    spec = Data(source="npz", path=str(path))
    got = load(spec)
    assert got.labels.tolist() == [2, 1, 2]
    assert got.classes == class_names(spec) == ("ant", "cat", "dog")
    assert load(Data(source="npz", path=str(path), split="test")).labels.tolist() == [0]
    assert load(Data(source="npz", path=str(path), classes=("dog", "cat", "ant"))).labels.tolist() == [0, 1, 0]


def test_names_that_are_numbers_are_numbers(tmp_path, refused):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.ones((2, 2)), y=np.array(["2", "0"]))
    spec = Data(source="npz", path=str(path))
    assert load(spec).labels.tolist() == [2, 0]
    assert load(spec).classes == class_names(spec) == ()
    np.savez(path, x=np.ones((2, 2)), y=np.array(["caf\u00e9", "cafe\u0301"]))
    assert load(spec).labels.tolist() == [0, 0]
    np.savez(path, x=np.ones((2, 2)), y=np.array(["a\u200b", ""]))
    assert "y" in refused(source="npz", path=str(path))
    np.savez(path, x=np.ones((2, 2)), y=np.array(["a", "b"], dtype=object))
    assert names_all(refused(source="npz", path=str(path)), path, "y", "dtype=str")


def test_one_hot_labels_are_refused_with_what_to_do(tmp_path, refused):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.ones((2, 2)), y=np.eye(2, dtype=int))
    assert "y.argmax(axis=1)" in refused(source="npz", path=str(path))
