"""A state on disk: what is read is what was written, or CorruptFile; a save that fails changes nothing."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from json import dumps as json_dumps

import pytest
import torch

from shared.errors import CorruptFile
from shared.tensors import file as tensorfile
from shared.tensors.tree import State, tensor_bytes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
SMALL = State({"layer.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3)}, {"round": 3, "kept": True})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


def assert_same(a: State, b: State) -> None:
    assert a.facts == b.facts
    assert {key: type(value) for key, value in a.facts.items()} == {k: type(value) for k, value in b.facts.items()}
    assert sorted(a.tree) == sorted(b.tree)
    for key, leaf in a.tree.items():
        assert (leaf.dtype, leaf.shape) == (b.tree[key].dtype, b.tree[key].shape)
        assert bytes(tensor_bytes(leaf)) == bytes(tensor_bytes(b.tree[key]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(path, dtype):
    """Matrices, scalars, empty leaves, and leaves that do not lie in C order."""
    values = torch.tensor([[1, 0, 3], [0, 5, 100]]).to(dtype)
    tree = {
        "matrix": values,
        "scalar": values[1, 2],
        "empty": values[:, :0],
        "turned": values.T,
        "every": values[:, ::2],
    }
    tensorfile.save(path, State({key: leaf.clone() for key, leaf in tree.items()}))
    assert_same(tensorfile.load(path), State(tree))


def test_bits_that_are_no_numbers_and_facts_of_every_type(path):
    """NaN, infinities, minus zero and the smallest number keep their bits; true stays no 1, and 1.0 no 1."""
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    weight = torch.ones(2, requires_grad=True)
    state = State({"odd": odd, "weight": weight}, {"a": True, "b": 1, "c": 1.0, "d": "naïve ☂", "e": -(1 << 70)})
    tensorfile.save(path, state)
    assert_same(tensorfile.load(path), state)


def test_nothing_is_a_state(path):
    tensorfile.save(path, State())
    assert_same(tensorfile.load(path), State())


def test_none_is_no_corrupt_file(path):
    with pytest.raises(FileNotFoundError):
        tensorfile.load(path)


def test_a_folder_is_no_file(path):
    path.mkdir()
    with pytest.raises(CorruptFile):
        tensorfile.load(path)


@contextmanager
def small_files(limit: int):
    """Let the kernel refuse to write files longer than `limit` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failing_save_leaves_the_old_content(path):
    """The disk refuses the second save half way: the first is still there, whole, and a third succeeds."""
    tensorfile.save(path, SMALL)
    large = State({"w": torch.ones(100_000)})
    with small_files(100_000), pytest.raises(OSError, match="part"):
        tensorfile.save(path, large)
    assert_same(tensorfile.load(path), SMALL)
    tensorfile.save(path, large)
    assert_same(tensorfile.load(path), large)


def test_a_save_replaces_the_file_and_does_not_write_into_it(path):
    """Who has the old file open or mapped goes on reading the old content; nothing else is left in the folder."""
    tensorfile.save(path, SMALL)
    before, old = path.read_bytes(), tensorfile.load(path)
    with path.open("rb") as file:
        path.with_name("state.part").write_bytes(b"of an earlier crash")
        tensorfile.save(path, State({"layer.weight": torch.zeros(2, 3)}))
        assert file.read() == before
    assert_same(old, SMALL)
    assert [entry.name for entry in path.parent.iterdir()] == ["state"]


def test_a_state_may_be_saved_over_the_file_it_was_loaded_from(path):
    tensorfile.save(path, SMALL)
    tensorfile.save(path, tensorfile.load(path))
    assert_same(tensorfile.load(path), SMALL)


def test_set_aside_never_overwrites(path):
    """Two corrupt files in a row are both kept for whoever looks."""
    for number in (1, 2):
        path.write_bytes(bytes([number]))
        assert tensorfile.set_aside(path) == path.with_name(f"state.corrupt-{number}")
        assert not path.exists()
    assert path.with_name("state.corrupt-1").read_bytes() == b"\1"


@pytest.mark.parametrize("earlier", [0, 10, 5000], ids=["empty", "shorter", "longer"])
def test_what_is_overwritten_leaves_no_trace(tmp_path, earlier):
    """A spare file becomes the new one, cut where that ends; it is gone under its own name."""
    state = State({"w": torch.arange(100.0)}, {"n": 1})
    tensorfile.save(tmp_path / "new", state)
    (tmp_path / "spare").write_bytes(b"x" * earlier)
    tensorfile.save(tmp_path / "over", state, spare=tmp_path / "spare")
    assert (tmp_path / "over").read_bytes() == (tmp_path / "new").read_bytes()
    assert not (tmp_path / "spare").exists()
    tensorfile.save(tmp_path / "over", state, spare=tmp_path / "spare")
    assert torch.equal(tensorfile.load(tmp_path / "over").tree["w"], state.tree["w"])


def test_leaves_that_share_memory_are_written_each(tmp_path):
    """Two views of one storage, as a model with tied weights has, come back as two."""
    base = torch.arange(12.0)
    tensorfile.save(tmp_path / "state", State({"a": base, "b": base.view(3, 4), "c": base[2:5]}, {}))
    tree = tensorfile.load(tmp_path / "state").tree
    assert torch.equal(tree["a"], base)
    assert torch.equal(tree["b"], base.view(3, 4))
    assert torch.equal(tree["c"], base[2:5])


def test_a_loaded_state_keeps_its_values_when_its_file_becomes_the_spare_of_later_saves(tmp_path):
    """Its tensors were views of the file: after the fourth save they held the newer states' bytes."""
    mask, steps = torch.ones(5, dtype=torch.bool), torch.tensor(7)
    state = State({"weight": torch.full((1000,), 3.0), "mask": mask, "steps": steps})
    path, spare = tmp_path / "state", tmp_path / "spare"
    tensorfile.save(path, state)
    first, second = tensorfile.load(path), tensorfile.load(path)
    other = State({"weight": torch.full((1000,), -1.0), "mask": ~mask, "steps": steps + 1})
    path.replace(spare)
    tensorfile.save(path, other, spare=spare)
    for loaded in (first, second):
        assert_same(loaded, state)
    first.tree["weight"].zero_()
    assert_same(second, state)
    assert_same(tensorfile.load(path), other)


@pytest.mark.parametrize("facts", ["", "[]", "nonsense", "[" * 100_000])
def test_facts_that_are_no_table_are_damage_even_with_a_fitting_digest(path, monkeypatch, facts):
    monkeypatch.setattr(tensorfile.json, "dumps", lambda value, **_: facts if value == {"a": 1} else json_dumps(value))
    tensorfile.save(path, State({}, {"a": 1}))
    with pytest.raises(CorruptFile, match="facts"):
        tensorfile.load(path)
