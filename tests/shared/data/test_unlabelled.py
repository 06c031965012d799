"""Unlabelled examples from every source, and drawn labelled ones of a server."""

from __future__ import annotations

import gzip
import struct

import msgspec
import numpy as np
import pytest
import torch

from shared.data.cache import DataCache
from shared.data.classes import class_names, with_classes
from shared.data.load import load, load_whole
from shared.data.sources.arrays import NO_LABEL
from shared.data.spec import Client, Data, Dirichlet, Drawn, Even, Shards
from shared.errors import ConfigError
from tests.naming import names_all, naming


def require_unlabelled(examples, count):
    assert (len(examples), examples.classes) == (count, ())
    assert set(examples.labels.tolist()) == {NO_LABEL}


def test_an_npz_file_needs_no_labels_and_those_it_has_are_not_read(tmp_path):
    """An array of labels that cannot be read shows it: nobody looks."""
    path = str(tmp_path / "x.npz")
    np.savez(path, x=np.arange(12.0).reshape(6, 2))
    require_unlabelled(load(Data(source="npz", path=path, labels="none")), 6)
    np.savez(path, x_train=np.arange(12.0).reshape(6, 2), y_train=np.array([{}] * 6))  # pickled: reading it fails
    require_unlabelled(load(Data(source="npz", path=path, labels="none")), 6)
    with pytest.raises(ConfigError, match=naming("y_train", "dtype=str")):
        load(Data(source="npz", path=path))


def test_windows_need_no_labels(tmp_path):
    path = str(tmp_path / "har.npz")
    signal, start = np.arange(40.0).reshape(2, 20), np.array([0, 4, 8, 15])
    np.savez(path, signal=signal, start=start, subject=np.array([1, 1, 2, 3]), test_subjects=np.array([3]))
    own = load(Data(source="npz", path=path, labels="none", partition=Client(client="1")))
    require_unlabelled(own, 2)
    assert own.inputs[1].tolist() == [[4.0, 5.0, 6.0, 7.0, 8.0], [24.0, 25.0, 26.0, 27.0, 28.0]]


@pytest.mark.parametrize("text", ["a,b\n1,2\n3,4\n", "a,label,b\n1,cat,2\n3,,4\n"])
def test_a_table_needs_no_column_of_labels_and_passes_over_one(tmp_path, text):
    """Also where a cell of it is empty, which is an error for who reads it."""
    path = tmp_path / "rows.csv"
    path.write_text(text)
    examples = load(Data(source="csv", path=str(path), labels="none"))
    require_unlabelled(examples, 2)
    assert examples.inputs.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ConfigError, match="label"):
        load(Data(source="csv", path=str(path)))


def test_pictures_need_no_folders_of_classes(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is absent")
    for name in ("b.png", "cat/a.png", "roof/deep/c.png", ".cache/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (4, 2), 10).save(tmp_path / name)
    require_unlabelled(load(Data(source="folder", path=str(tmp_path), labels="none")), 3)
    (tmp_path / "b.png").unlink()
    assert load(Data(source="folder", path=str(tmp_path))).classes == ("cat", "roof")


def test_idx_files_need_no_file_of_labels(tmp_path):
    header = struct.pack(">4B3I", 0, 0, 8, 3, 5, 2, 2)
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(header + bytes(range(20)))
    require_unlabelled(load(Data(source="idx", path=str(tmp_path), labels="none")), 5)
    with pytest.raises(ConfigError, match="labels"):
        load(Data(source="idx", path=str(tmp_path)))


def test_digits_without_labels_are_the_same_pictures():
    plain, bare = load(Data(source="digits")), load(Data(source="digits", labels="none"))
    require_unlabelled(bare, 1438)
    assert torch.equal(plain.inputs, bare.inputs)


@pytest.mark.parametrize(
    "partition", [Even(parts=3, index=1), Dirichlet(alpha=1.0, parts=3, index=1), Shards(parts=3, index=1)]
)
def test_a_share_is_the_same_with_and_without_labels(partition):
    """Where classes deal a simulation's data set out, labels are read for that and dropped; also from a cache."""
    labelled = load(Data(source="digits", partition=partition))
    spec = Data(source="digits", partition=partition, labels="none")
    for bare in (load(spec), DataCache().load(spec)):
        require_unlabelled(bare, len(labelled))
        assert torch.equal(bare.inputs, labelled.inputs)
    assert spec.reads_labels == (not isinstance(partition, Even))


def test_nobody_tells_what_unread_classes_are_called(tmp_path):
    spec = Data(source="csv", path=str(tmp_path / "away.csv"), labels="none")
    assert with_classes(spec, ("a", "b")) == spec
    assert DataCache().classes(spec) is None
    assert class_names(spec) is None, "an agent that starts asks so, and there is not even a file"
    assert class_names(msgspec.structs.replace(spec, source="idx", labels=msgspec.UNSET)) == ()


def test_a_labelled_source_can_be_read_without_and_holds_back_what_it_did():
    labelled = Data(source="digits", holdout=0.2, validation=0.1, drawn=Drawn(per_class=3), classes=("a", "b"))
    bare = labelled.drop_labels()
    assert (bare.labels, bare.drawn, bare.holdout, bare.validation) == ("none", msgspec.UNSET, 0.2, 0.1)
    assert not bare.reads_labels


@pytest.mark.parametrize("text", ["drawn = { per_class = 2 }"])
def test_what_needs_labels_is_refused_without_them(text):
    with pytest.raises(msgspec.ValidationError, match="labels"):
        msgspec.toml.decode(f"source = 'digits'\nlabels = 'none'\n{text}", type=Data)


@pytest.mark.parametrize("text", ["{}", "{ per_class = 1, count = 10 }", "{ count = -1 }", "{ count = 10, seed = -1 }"])
def test_a_draw_has_one_size(text):
    with pytest.raises(msgspec.ValidationError, match=r"per_class or count|seed"):
        msgspec.toml.decode(f"source = 'digits'\ndrawn = {text}", type=Data)


@pytest.mark.parametrize(
    ("drawn", "sizes"), [(Drawn(per_class=4), {4}), (Drawn(count=43), {4, 5}), (Drawn(count=10), {1})]
)
def test_the_server_draws_of_every_class_and_the_devices_share_the_rest(drawn, sizes):
    """No example is in two places, none is lost; the same seed draws the same, another one others."""
    server = load(Data(source="digits", drawn=drawn))
    assert set(server.labels.bincount().tolist()) == sizes
    assert len(server) == (drawn.count or 10 * drawn.per_class)
    parts = [
        load(Data(source="digits", labels="none", without=drawn, partition=Even(parts=3, index=index)))
        for index in range(3)
    ]
    everything = torch.cat([server.inputs, *(part.inputs for part in parts)])
    whole = load_whole(Data(source="digits"))
    assert len(everything) == len(whole)
    # pictures may be the same twice, so the two sets are compared as sorted rows
    assert sorted(everything.flatten(1).tolist()) == sorted(whole.inputs.flatten(1).tolist())
    assert torch.equal(load(Data(source="digits", drawn=drawn)).inputs, server.inputs)
    other = load(Data(source="digits", drawn=msgspec.structs.replace(drawn, seed=1)))
    assert not torch.equal(other.inputs, server.inputs)


def test_what_cannot_be_drawn_is_refused(tmp_path, refused):
    path = str(tmp_path / "few.npz")
    np.savez(path, x=np.arange(7.0)[:, None], y=np.array([0, 0, 0, 2, 2, 2, 2]))
    assert names_all(refused(source="npz", path=path, drawn=Drawn(count=2)), 2, 3, "count")
    assert names_all(refused(source="npz", path=path, drawn=Drawn(per_class=1)), "class 1", 0, 1)
    assert names_all(refused(source="digits", drawn=Drawn(per_class=200)), "class 0", 150, 200)
