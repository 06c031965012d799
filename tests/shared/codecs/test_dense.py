"""The lossless codec: bytes of the tensors, exactly and without a copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.codecs import CODECS
from shared.codecs.base import Codec, Coded
from shared.codecs.dense import DTYPES, from_blob, to_blob
from shared.errors import WireError
from shared.protocol import payload
from shared.protocol.messages import Blob, Payload
from shared.protocol.payload import ITEM_BYTES
from shared.tensors.tree import Tree


def over_the_wire(codec: Codec, tree: Tree) -> Coded:
    """Return what is decoded of the very bytes that a tree is encoded and packed into."""
    packed = b"".join(payload.pack(codec.encode(tree, None)[0]))
    return codec.decode(payload.unpack(memoryview(bytearray(packed))))


def tree_over_the_wire(codec: Codec, tree: Tree) -> Tree:
    """Return its tree alone."""
    return over_the_wire(codec, tree).tree


def trees(shapes: list[list[int]], seed: int) -> Tree:
    """Return leaves of these shapes, named by their places, of normal numbers by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {str(place): torch.randn(shape, generator=generator) for place, shape in enumerate(shapes)}


DENSE = CODECS["dense"]()


def shapes(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    matrix = torch.tensor([[1, 0, 3], [0, 5, 100]]).to(dtype)
    return {"matrix": matrix, "scalar": matrix[1, 2], "empty": matrix[:0], "turned": matrix.T, "every": matrix[:, ::2]}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_over_the_wire(name):
    """Encoded, packed, unpacked and decoded: the same leaves in the same order, of every dtype and shape."""
    tree = shapes(DTYPES[name])
    packed = payload.pack(DENSE.encode(tree, None)[0])
    coded = DENSE.decode(payload.unpack(memoryview(bytearray(b"".join(packed)))))
    assert coded.coverage == {}
    assert list(coded.tree) == list(tree)
    for key, leaf in tree.items():
        assert coded.tree[key].dtype == leaf.dtype
        assert coded.tree[key].shape == leaf.shape
        assert coded.tree[key].tolist() == leaf.tolist()


def test_the_seam_and_the_wire_know_the_same_dtypes():
    """And the same size of their items: payload refuses by one table, the codec builds by the other."""
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_payload_bytes_are_exact():
    """6 * 4 + 1 * 8 + 3 * 2 + 0 = 38 bytes, little-endian in C order; the header comes on top, and is not counted."""
    tree = {
        "w": torch.arange(6.0).reshape(2, 3),
        "n": torch.tensor(-2),
        "h": torch.ones(3, dtype=torch.bfloat16),
        "e": torch.empty(0, 4),
    }
    encoded = DENSE.encode(tree, None)[0]
    assert encoded.num_bytes == 38
    assert bytes(encoded.blobs["n"].data) == b"\xfe" + b"\xff" * 7
    assert bytes(encoded.blobs["h"].data) == b"\x80\x3f" * 3


def test_special_values_keep_their_bits():
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    back = DENSE.decode(DENSE.encode({"w": odd}, None)[0]).tree["w"]
    assert back.view(torch.int32).tolist() == odd.view(torch.int32).tolist()


def test_strides_that_say_nothing():
    """Of one value or of none a tensor may have any, and counts as contiguous: as numpy makes them, and `expand`."""
    tree = {"none": torch.from_numpy(np.compress([False], [1.5])), "one": torch.tensor(2.5).expand(1)}
    found = DENSE.decode(DENSE.encode(tree, None)[0]).tree
    assert {key: leaf.tolist() for key, leaf in found.items()} == {"none": [], "one": [2.5]}


def test_neither_way_copies():
    """Encoding shows the tensor's own bytes, decoding is a view of the buffer."""
    leaf = torch.zeros(4)
    blob = DENSE.encode({"w": leaf}, None)[0].blobs["w"]
    leaf[0] = 1.0
    assert bytes(blob.data[:4]) == b"\0\0\x80?"
    buffer = bytearray(16)
    decoded = from_blob(Blob("f32", (2, 2), memoryview(buffer)))
    buffer[2:4] = b"\x80?"
    assert decoded.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_memory_passes_through():
    """Nothing is left out, so there is nothing to remember; what another codec remembered is not lost."""
    memory = {"w": torch.ones(2)}
    assert DENSE.encode({}, memory)[1] is memory
    assert DENSE.encode({}, None)[1] is None


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (Blob("c64", (1,), memoryview(bytearray(8))), "dtype"),
        (Blob("f32", (3,), memoryview(bytearray(8))), "shape"),
        (Blob("f32", (1,), memoryview(bytearray(7))), "shape"),
        (Blob("f32", (3,), memoryview(b"")), "shape"),
        (Blob("f32", ((1 << 64) - 1, 0), memoryview(b"")), "shape"),
        (Blob("f32", (1 << 40, 1 << 40, 0), memoryview(b"")), "shape"),
        (Blob("f32", (0, 4, 1 << 62), memoryview(b"")), "shape"),
        (Blob("f32", (-1, 2), memoryview(bytearray(16))), "shape"),
        (Blob("f32", (-1, 2), memoryview(b"")), "shape"),
    ],
)
def test_bytes_that_are_no_such_tensor(blob, reason):
    """Also extents beyond what torch holds, which cost nothing beside a zero, and those that torch would choose."""
    with pytest.raises(WireError) as caught:
        DENSE.decode(Payload(codec="dense", blobs={"w": blob}))
    assert caught.value.reason == reason


def test_a_payload_of_another_codec_is_refused():
    with pytest.raises(WireError, match="topk") as caught:
        DENSE.decode(Payload(codec="topk", blobs={}))
    assert caught.value.reason == "codec"


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_writes_its_own_name(name):
    """By it the receiver finds the decoder; an empty tree comes back as one."""
    codec = CODECS[name]()
    encoded, _ = codec.encode({}, None)
    assert encoded.codec == name
    assert codec.decode(encoded).tree == {}


def test_to_blob_names_dtype_and_shape():
    blob = to_blob(torch.zeros(2, 0, 3, dtype=torch.int16))
    assert (blob.dtype, blob.shape, blob.data.nbytes) == ("i16", (2, 0, 3), 0)
